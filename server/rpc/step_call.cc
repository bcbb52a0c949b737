#include "server/rpc/step_call.h"

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/rpc/step_listener.h"
#include "server/rpc/step_transport.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/step_reader.h"
#include "server/wire/step_writer.h"

namespace kvpool {
namespace {

// The memory of an answer is used again for the next one, unless it is larger than this: four times what a batch
// of 64 one-block verbs takes.
constexpr size_t kMaxKeptAnswerBytes = 4096;
constexpr int kMaxKeptResults = 128;

// What streams of one queue have in common.
struct StepMethod {
  RpcQueue* queue;
  RpcStats* rpc_stats;
  MethodStats *step, *open_session, *add_member;  // An opening is one, however it comes.
  EngineHost host;
};

StepMethod MakeStepMethod(RpcQueue* queue, RpcStats* stats, const EngineHost& host) {
  return {.queue = queue,
          .rpc_stats = stats,
          .step = stats->Add("Step"),
          .open_session = stats->Add("OpenSession"),
          .add_member = stats->Add("AddMember"),
          .host = host};
}

// Brings the end of what another thread carries out to the stream's queue.
class ElsewhereEnd {
 public:
  explicit ElsewhereEnd(RpcQueue* queue) : alarm_(queue->MakeAlarm()) {}
  // On that thread: `tag` comes back on the queue.
  void Tell(absl::Status status, RpcTag* tag) {
    MutexLock lock(&mu_);
    status_ = std::move(status);
    alarm_->Set(tag);
  }
  absl::Status TakeStatus() {
    MutexLock lock(&mu_);
    return std::move(status_);
  }

 private:
  Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  const std::unique_ptr<RpcAlarm> alarm_;
};

// A batch that waits for its pace looks again after such a pause, which doubles each time: rules may be others by then, and whoever
// comes between two looks of others may be first. All streams of a rule may wait, and looks are no work for a queue that others use,
// so none comes sooner; the burst that a pace allows makes up for it.
constexpr auto kFirstPaceLook = std::chrono::milliseconds(20), kLastPaceLook = std::chrono::milliseconds(250);

bool Opens(const v1::StepRequest& request) {
  return request.operations_size() == 1 &&
         (request.operations(0).has_open_session() || request.operations(0).has_add_member());
}

// One stream, in the states of step_call.h. It belongs to its queue's thread.
class StepCall final : public RpcCall {
 public:
  // `next` is called when a caller has come, and may be empty.
  static void Begin(const StepMethod& method, std::unique_ptr<StepTransport> transport,
                    std::function<void()> next) {
    auto* call = new StepCall(method, std::move(transport), std::move(next));
    call->transport_->Begin(&call->begun_tag_, &call->over_tag_);
  }

  void Abandon() override {
    End(absl::UnavailableError("the daemon shuts down"));
    // A caller that does not read does not hold the daemon up.
    transport_->Cancel();
  }
  // A batch that is being applied elsewhere, or an opening, is carried through and answered.
  void OnRest() override {
    if (elsewhere_ == nullptr) End(Resting());
  }

 private:
  StepCall(const StepMethod& method, std::unique_ptr<StepTransport> transport, std::function<void()> next)
      : method_(method), transport_(std::move(transport)), next_(std::move(next)) {}
  ~StepCall() = default;

  void OnBegun(bool ok);
  void OnRead(bool ok);
  // The batch waits for its tenant's turn. True: its rule's sessions have sent too many verbs a second, and OnPaced follows.
  bool AwaitPace();
  void OnPaced(bool ok);
  // Its tenant's turn has come: the batch that was read is applied.
  void OnTurn();
  void OnWritten(bool ok);
  void OnFinished(bool ok);
  void OnWake(bool ok);
  void OnOpened(bool ok);
  void OnApplied(bool ok);
  // The call has ended, in one way or the other.
  void OnOver(bool ok);

  // Applies the batch that was read: fills response_, and wire_ as well if the answer is serialised already.
  void Handle();
  // Has a large batch applied elsewhere, or one that would wait for another of its session's; OnApplied follows.
  void HandleElsewhere(bool large);
  // Handles a first batch that makes this the stream of a new member; OnOpened follows.
  void OpenMember();
  // `opened`: just now, in this stream.
  absl::Status Bind(const std::string& token, bool opened);
  // UNAVAILABLE: it is too early for batches.
  absl::Status CheckMembersAreBack(const Member& member) const;
  // The queue rests, and what kept the stream from ending is over.
  void EndIfResting();
  // Sends what was filled for the batch that was read, which ended like that.
  void Answer(MethodStats* stats, absl::StatusCode code);
  void AnswerBatch() { Answer(method_.step, static_cast<absl::StatusCode>(response_.code())); }
  // Writes, reads and ends as far as the state allows.
  void Pump();
  // Appends the answer, wire_ or else response_, to replies_.
  void Reply();
  // Empties response_. Results of a small batch are left for the next one.
  void RenewResponse();
  // Only the first end counts.
  void End(const absl::Status& status);
  void MarkEnding(const absl::Status& status);
  void DeleteIfDone();

  const StepMethod method_;
  const std::unique_ptr<StepTransport> transport_;
  const std::function<void()> next_;
  MethodTag<StepCall> begun_tag_{this, &StepCall::OnBegun};
  MethodTag<StepCall> read_tag_{this, &StepCall::OnRead};
  MethodTag<StepCall> write_tag_{this, &StepCall::OnWritten};
  MethodTag<StepCall> finish_tag_{this, &StepCall::OnFinished};
  MethodTag<StepCall> wake_tag_{this, &StepCall::OnWake};
  MethodTag<StepCall> opened_tag_{this, &StepCall::OnOpened};
  MethodTag<StepCall> applied_tag_{this, &StepCall::OnApplied};
  MethodTag<StepCall> paced_tag_{this, &StepCall::OnPaced};
  MethodTag<StepCall> over_tag_{this, &StepCall::OnOver};
  Caller caller_;

  std::shared_ptr<Member> member_;
  std::shared_ptr<StepListener> listener_;
  std::string token_;
  // An opening or a large batch is under way on another thread, which alone uses reader_, response_, wire_ and
  // follow_up_.
  std::shared_ptr<ElsewhereEnd> elsewhere_;
  // So many writes have to succeed until the answer to the opening has reached the caller.
  size_t undelivered_ = 0;

  uint64_t begun_ns_ = 0;
  StepReader reader_;
  v1::StepResponse response_;
  std::string wire_;
  bool keep_results_ = false;
  bool said_prefills_ = false;  // See StepResponse.takes_prefills.
  bool opened_here_ = false;    // The member was opened in this stream, and has sent no batch since.
  using Results = google::protobuf::RepeatedPtrField<v1::OperationResult>;
  Results left_;  // The results of the last batch, if it was small: the next one writes over them.
  std::deque<std::string> replies_;  // They wait for the write under way.
  bool follow_up_ = false;           // The daemon wants FollowUp once the answer is on its way.
  const std::unique_ptr<RpcAlarm> pace_alarm_ = method_.queue->MakeAlarm();
  std::chrono::milliseconds pace_look_ = kFirstPaceLook;
  size_t received_bytes_ = 0;
  bool reading_ = false, writing_ = false, waking_ = false, pacing_ = false, in_turn_ = false;
  bool half_closed_ = false, pending_ = false, ending_ = false, finishing_ = false, finished_ = false;
  bool over_ = false;
  absl::Status status_;
};

void StepCall::OnBegun(bool ok) {
  if (!ok) {
    delete this;  // Nobody has come, and nobody will: over_tag_ comes only for calls that have begun.
    return;
  }
  if (next_ && !method_.queue->stopping()) next_();
  method_.queue->Begin(this);
  // Those that stop did not know of it.
  if (method_.queue->stopping()) return Abandon();
  caller_.peer = transport_->peer();
  if (caller_.peer.process == nullptr) {
    return End(absl::PermissionDeniedError(
        absl::StrCat("Step is for the Unix socket only; the caller is ", Describe(caller_.peer))));
  }
  if (method_.queue->resting()) return End(Resting());
  Pump();
}

void StepCall::OnRead(bool ok) {
  reading_ = false;
  if (ending_) return DeleteIfDone();
  if (!ok) {
    half_closed_ = true;
    return Pump();
  }
  // Nobody has heard of what was read: it comes again.
  if (method_.queue->resting()) return End(Resting());
  begun_ns_ = NowNs();
  received_bytes_ = transport_->read_bytes();
  method_.queue->CountRead(received_bytes_);
  if (const absl::Status read = transport_->TakeRead(&reader_); !read.ok()) return End(read);
  if (std::exchange(opened_here_, false)) {
    if (const absl::Status back = CheckMembersAreBack(*member_); !back.ok()) return End(back);
  }
  if (member_ == nullptr) {
    if (Opens(reader_.request())) {
      // It was heard of already, and nothing else would tell.
      if (over_ && transport_->gone()) return End(absl::CancelledError("the caller is gone"));
      return OpenMember();
    }
    const absl::Status bound = Bind(reader_.request().member_token(), /*opened=*/false);
    if (!bound.ok()) return End(bound);
  }
  if (member_->batch_waits.exchange(true)) {
    return End(
        absl::UnavailableError("a batch that came in an earlier stream of this member is not applied yet; "
                               "nothing of this one was: call again"));
  }
  pace_look_ = kFirstPaceLook;
  if (!AwaitPace()) return;
  method_.rpc_stats->CountPaced();
  // What is pending goes out meanwhile.
  Pump();
}

bool StepCall::AwaitPace() {
  VerbPace* const pace = member_->session->pace.load(std::memory_order_relaxed);
  // A batch that has more is refused.
  const auto verbs = std::min<uint64_t>(reader_.request().operations_size(), kMaxBatchOperations);
  pacing_ = pace != nullptr && pace->Take(NowNs(), verbs) > 0;
  if (pacing_) {
    pace_alarm_->SetAfter(pace_look_, &paced_tag_);
    pace_look_ = std::min(2 * pace_look_, kLastPaceLook);
    return true;
  }
  in_turn_ = true;
  method_.queue->InTurn(
      TenantOf(*member_), [this] { OnTurn(); }, received_bytes_);
  return false;
}

void StepCall::OnPaced(bool ok) {
  pacing_ = false;
  if (!ending_ && !method_.queue->resting()) {
    AwaitPace();
    return;
  }
  member_->batch_waits = false;
  return ending_ ? DeleteIfDone() : End(Resting());
}

void StepCall::OnTurn() {
  in_turn_ = false;
  if (ending_ || method_.queue->resting()) {
    member_->batch_waits = false;
    // Nobody has heard of it: it comes again.
    return ending_ ? DeleteIfDone() : End(Resting());
  }
  const v1::StepRequest& request = reader_.request();
  if (!request.member_token().empty() && request.member_token() != token_) {
    response_.set_sequence(request.sequence());
    response_.set_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
    response_.set_message("member_token is not that of this stream's first batch; leave it empty");
    member_->batch_waits = false;
    return AnswerBatch();
  }
  const bool large = WorkOf(*member_->session, request) > kLargeCallNames;
  if (large || member_->session->large_calls > 0) return HandleElsewhere(large);
  Handle();
  member_->batch_waits = false;
  AnswerBatch();
}

void StepCall::HandleElsewhere(bool large) {
  elsewhere_ = std::make_shared<ElsewhereEnd>(method_.queue);
  // Wake-ups come meanwhile, and are looked at when this is over.
  method_.host.large_calls->StartHeld(
      {.owner = LargeCallOwner(*member_), .tenant = TenantOf(*member_)}, [this, end = elsewhere_, large] {
        member_->session->large_calls += large ? 1 : 0;
        follow_up_ =
            method_.host.daemon->Apply(member_, reader_.request(), &response_, &wire_, listener_.get());
        member_->session->large_calls -= large ? 1 : 0;
        member_->batch_waits = false;
        end->Tell(absl::OkStatus(), &applied_tag_);
      });
}

void StepCall::OnApplied(bool ok) {
  // What that thread wrote is seen from here on, whatever orders an alarm and its tag.
  (void)std::exchange(elsewhere_, nullptr)->TakeStatus();
  if (ending_) return DeleteIfDone();
  AnswerBatch();
  EndIfResting();
}

void StepCall::Answer(MethodStats* stats, absl::StatusCode code) {
  stats->Record(NowNs() - begun_ns_, code);
  Reply();
  Pump();
  // This comes after the answer, so that the caller does not wait for it.
  if (std::exchange(follow_up_, false)) method_.host.daemon->FollowUp(member_);
  reader_.Renew();
  RenewResponse();
}

void StepCall::OnWritten(bool ok) {
  writing_ = false;
  if (ok && undelivered_ > 0) --undelivered_;
  if (!ok) MarkEnding(absl::CancelledError("the caller is gone"));
  Pump();
}

void StepCall::OnWake(bool ok) {
  waking_ = false;
  listener_->WakeArrived();
  if (ending_) return DeleteIfDone();
  if (listener_->superseded()) return End(absl::AbortedError("a newer stream of this member took over"));
  pending_ = true;
  Pump();
}

void StepCall::OnFinished(bool ok) {
  finished_ = true;
  DeleteIfDone();
}

void StepCall::OnOver(bool ok) {
  over_ = true;
  // No operation is under way that would tell of a caller that is gone.
  if ((elsewhere_ != nullptr || pacing_) && transport_->gone())
    End(absl::CancelledError("the caller is gone"));
  DeleteIfDone();
}

void StepCall::Handle() {
  response_.mutable_results()->Swap(&left_);
  listener_->BeginVerb();
  follow_up_ = method_.host.daemon->Apply(member_, reader_.request(), &response_, &wire_, listener_.get());
  if (listener_->EndVerb()) pending_ = true;
}

void StepCall::OpenMember() {
  elsewhere_ = std::make_shared<ElsewhereEnd>(method_.queue);
  const v1::Operation& operation = reader_.request().operations(0);
  v1::OperationResult* result = response_.add_results();
  auto done = [this, end = elsewhere_](absl::Status status) { end->Tell(std::move(status), &opened_tag_); };
  if (operation.has_open_session()) {
    method_.host.openings->OpenSession(caller_, &operation.open_session(), result->mutable_open_session(),
                                       std::move(done));
  } else {
    method_.host.openings->AddMember(caller_, &operation.add_member(), result->mutable_add_member(),
                                     std::move(done));
  }
}

void StepCall::OnOpened(bool ok) {
  absl::Status status = std::exchange(elsewhere_, nullptr)->TakeStatus();
  v1::OperationResult& result = *response_.mutable_results(0);
  const std::string token =
      result.has_open_session() ? result.open_session().member_token() : result.add_member().member_token();
  if (ending_) {
    if (status.ok()) method_.host.openings->OnUndelivered(token);
    return DeleteIfDone();
  }
  if (status.ok()) status = Bind(token, /*opened=*/true);
  if (!status.ok()) {
    result.clear_result();
    result.set_code(status.raw_code());
    result.set_message(std::string(status.message()));
  } else {
    undelivered_ = replies_.size() + (writing_ ? 1 : 0) + 1;
  }
  const bool opens = reader_.request().operations(0).has_open_session();
  opened_here_ = status.ok();
  Answer(opens ? method_.open_session : method_.add_member, status.code());
  EndIfResting();
}

absl::Status StepCall::CheckMembersAreBack(const Member& member) const {
  if (!method_.host.daemon->AwaitsMembers(member)) return absl::OkStatus();
  return absl::UnavailableError("members of the session are on their way back; nothing was applied");
}

void StepCall::EndIfResting() {
  // An answer that waits for another one to be written would be lost.
  if (method_.queue->resting() && replies_.empty()) End(Resting());
}

absl::Status StepCall::Bind(const std::string& token, bool opened) {
  absl::StatusOr<std::shared_ptr<Member>> member = method_.host.daemon->FindMember(token);
  if (!member.ok()) return member.status();
  if (absl::Status owner = CheckOwner(caller_.peer, **member); !owner.ok()) {
    method_.host.refusals->Add(caller_.peer, "Step", owner);
    return owner;
  }
  // A member that was opened is there, whatever else is not: refused now, it would be lost.
  if (!opened) RETURN_IF_ERROR(CheckMembersAreBack(**member));
  member_ = std::move(*member);
  token_ = token;
  listener_ = std::make_shared<StepListener>(method_.queue, &wake_tag_);
  listener_->BeginVerb();
  method_.host.daemon->BindStream(member_, listener_);
  listener_->EndVerb();
  pending_ = true;  // Notices may have come up while the member had no stream.
  return absl::OkStatus();
}

void StepCall::Reply() {
  if (wire_.empty()) {
    response_.set_takes_prefills(!std::exchange(said_prefills_, true));
    WriteStep(response_, &wire_);
  }
  keep_results_ = wire_.size() <= kMaxKeptAnswerBytes && response_.results_size() <= kMaxKeptResults;
  replies_.push_back(std::exchange(wire_, {}));
}

void StepCall::RenewResponse() {
  Results results;
  if (keep_results_) results.Swap(response_.mutable_results());
  left_.Swap(&results);
  response_ = v1::StepResponse();
}

void StepCall::Pump() {
  if (finishing_) return;
  if (!ending_ && !writing_ && replies_.empty() && pending_ && member_ != nullptr && elsewhere_ == nullptr &&
      !in_turn_) {
    // Notices that do not fit into one response are asked for again when it has been written.
    pending_ = method_.host.daemon->TakePending(member_, listener_.get(), &response_);
    if (pending_) Reply();
    response_ = v1::StepResponse();
  }
  if (!writing_ && !replies_.empty()) {
    writing_ = true;
    std::string reply = std::move(replies_.front());
    replies_.pop_front();
    transport_->Write(std::move(reply), /*more=*/!replies_.empty(), &write_tag_);
  }
  if (half_closed_ && !writing_ && !ending_) MarkEnding(absl::OkStatus());
  if (ending_) {
    if (writing_) return;
    finishing_ = true;
    transport_->Finish(status_, &finish_tag_);
    return;
  }
  if (elsewhere_ == nullptr && !pacing_ && !in_turn_ && !reading_ && !half_closed_ &&
      replies_.size() + (writing_ ? 1 : 0) < kMaxUnanswered) {
    reading_ = true;
    transport_->Read(&read_tag_);
  }
}

void StepCall::End(const absl::Status& status) {
  MarkEnding(status);
  Pump();
}

void StepCall::MarkEnding(const absl::Status& status) {
  if (ending_) return;
  ending_ = true;
  caller_.gone = true;
  if (pacing_) pace_alarm_->Cancel();
  status_ = status;
  if (!status.ok()) {
    method_.step->CountError(status.code());
    replies_.clear();
  }
  if (listener_ != nullptr) {
    method_.host.daemon->UnbindStream(member_, listener_.get());
    waking_ = listener_->Shut();
  }
}

void StepCall::DeleteIfDone() {
  if (!finished_ || !over_ || reading_ || writing_ || waking_ || pacing_ || in_turn_ || elsewhere_ != nullptr)
    return;
  if (undelivered_ > 0) method_.host.openings->OnUndelivered(token_);
  method_.queue->End(this);
  delete this;
}

}  // namespace

const std::string& TenantOf(const Member& member) { return member.session->space->facts.tenant; }

uint64_t LargeCallOwner(const Member& member) { return reinterpret_cast<uintptr_t>(member.session); }

namespace {

void AcceptNext(const StepMethod& method, EngineService* service, const Connections* connections) {
  StepCall::Begin(method, MakeGrpcTransport(service, method.queue, connections),
                  [=] { AcceptNext(method, service, connections); });
}

// Brings a socket to the thread that serves it.
class Adoption final : public RpcTag {
 public:
  Adoption(const StepMethod& method, SocketEvents* events, UniqueFd socket,
           std::shared_ptr<const PeerCredentials> peer)
      : method_(method), transport_(MakeFrameTransport(events, std::move(socket), std::move(peer))) {}
  void Run(bool ok) override {
    if (ok && !method_.queue->stopping()) StepCall::Begin(method_, std::move(transport_), nullptr);
    delete this;
  }

 private:
  const StepMethod method_;
  std::unique_ptr<StepTransport> transport_;
};

}  // namespace

void AcceptStepCalls(const RpcSite<EngineService>& site, const EngineHost& host) {
  AcceptNext(MakeStepMethod(site.queue, site.stats, host), site.service, site.connections);
}

StepSockets ServeStepSockets(RpcQueue* queue, SocketEvents* events, RpcStats* stats, const EngineHost& host) {
  const StepMethod method = MakeStepMethod(queue, stats, host);
  return [method, events](UniqueFd socket, std::shared_ptr<const PeerCredentials> peer) {
    events->Post(new Adoption(method, events, std::move(socket), std::move(peer)));
  };
}

}  // namespace kvpool
