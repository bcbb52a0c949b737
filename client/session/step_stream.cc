#include "client/session/step_stream.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvpool/v1/engine.grpc.pb.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

constexpr milliseconds kNap{1};  // The shortest wait of gRPC's poller.
constexpr int kNapsBeforeSleep = 8;
constexpr milliseconds kFirstRetry{1};
constexpr milliseconds kLastRetry{500};
constexpr int kMaxMessageBytes = 64 << 20;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, kMaxMessageBytes);
  // Channels with equal arguments share a connection, and the daemon's limits are per connection:
  // so this one differs.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 10);
  // This is also how long a connection may take to come up: a busy machine needs more than a moment.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

void SetDeadline(grpc::ClientContext* context, steady_clock::time_point deadline) {
  context->set_deadline(system_clock::now() +
                        std::chrono::duration_cast<system_clock::duration>(deadline - steady_clock::now()));
}

// The session is over after these: a new stream would get the same answer.
bool EndsSession(grpc::StatusCode code) {
  return code == grpc::StatusCode::ABORTED || code == grpc::StatusCode::UNAUTHENTICATED ||
         code == grpc::StatusCode::NOT_FOUND;
}

}  // namespace

class StepStream::Rep {
 public:
  explicit Rep(const std::string& socket)
      : channel_(MakeChannel(socket)), stub_(v1::Engine::NewStub(channel_)) {}
  ~Rep();

  v1::Engine::Stub* stub() { return stub_.get(); }
  void Start(StepBatches* batches, SessionState* state) {
    batches_ = batches;
    state_ = state;
    thread_ = std::thread([this] { Run(); });
  }
  void Wake(Urgency urgency);
  void OnDaemonChange();
  void Stop();

 private:
  void EndThread();
  enum class Mode { kAwake, kNap, kSleep };
  enum Tag : intptr_t { kWoken = 1, kStarted, kRead, kWritten, kFinished };
  static void* AsPointer(Tag tag) { return reinterpret_cast<void*>(tag); }

  void Run();
  // One stream, from its start to its end. True: it carried at least one answer.
  bool RunStream();
  void WriteNext();
  // The next event; false: none before it was time to look for commands.
  bool NextEvent(Tag* tag, bool* ok);
  // True: the daemon has gone or come back meanwhile.
  bool Pause(milliseconds pause);
  // Nobody waits for a daemon that is gone, however this thread came to wait, and whenever the match came.
  void LetMatchesGoIfAway() {
    if (state_->away.load(std::memory_order_seq_cst)) batches_->LetMatchesGo();
  }
  bool over() const {
    return stop_.load(std::memory_order_seq_cst) || !state_->open.load(std::memory_order_seq_cst);
  }

  // Both are null once it was stopped: a session that is closed and kept has no connection.
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Engine::Stub> stub_;
  StepBatches* batches_ = nullptr;
  SessionState* state_ = nullptr;
  std::thread thread_;

  std::atomic<bool> stop_{false};
  std::atomic<bool> changed_{false};  // The daemon is gone or back: a pause is over.
  std::atomic<Mode> mode_{Mode::kAwake};
  std::atomic<bool> alarm_set_{false};
  grpc::CompletionQueue queue_;
  grpc::Alarm alarm_;  // Set by whoever moved alarm_set_ to true.

  // ---- Used by the thread alone
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  bool writable_ = false;   // The stream has started and no write is under way.
  bool cancelled_ = false;  // The session is over, and the stream was told.
  int idle_naps_ = 0;
  grpc::Status last_status_;
};

void StepStream::Rep::EndThread() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_seq_cst);
  Wake(Urgency::kNow);
  thread_.join();
}

void StepStream::Rep::Stop() {
  EndThread();
  if (batches_ != nullptr) batches_->Abort(state_->status());
  stub_.reset();
  channel_.reset();
}

StepStream::Rep::~Rep() {
  EndThread();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

void StepStream::Rep::Wake(Urgency urgency) {
  const Mode mode = mode_.load(std::memory_order_seq_cst);
  if (mode == Mode::kAwake || (mode == Mode::kNap && urgency == Urgency::kSoon)) return;
  if (alarm_set_.exchange(true, std::memory_order_acq_rel)) return;
  alarm_.Set(&queue_, gpr_time_0(GPR_CLOCK_MONOTONIC), AsPointer(kWoken));
}

void StepStream::Rep::OnDaemonChange() {
  changed_.store(true, std::memory_order_seq_cst);
  // Without this the channel would go on to wait after attempts that failed.
  grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  Wake(Urgency::kNow);
}

bool StepStream::Rep::NextEvent(Tag* tag, bool* ok) {
  const bool nap = idle_naps_ < kNapsBeforeSleep;
  mode_.store(nap ? Mode::kNap : Mode::kSleep, std::memory_order_seq_cst);
  // This looks once more after the mode was published: an earlier command found the thread
  // awake and woke nobody.
  void* raw = nullptr;
  gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
  if ((writable_ && batches_->HasWork()) || (over() && !cancelled_)) {
    deadline = gpr_time_0(GPR_CLOCK_MONOTONIC);
  } else if (nap) {
    deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(kNap.count(), GPR_TIMESPAN));
  }
  const auto next = queue_.AsyncNext(&raw, ok, deadline);
  mode_.store(Mode::kAwake, std::memory_order_seq_cst);
  if (next != grpc::CompletionQueue::GOT_EVENT) {
    ++idle_naps_;
    return false;
  }
  *tag = static_cast<Tag>(reinterpret_cast<intptr_t>(raw));
  if (*tag == kWoken) alarm_set_.store(false, std::memory_order_release);
  return true;
}

void StepStream::Rep::WriteNext() {
  if (!writable_) return;
  const v1::StepRequest* request = batches_->Next();
  if (request == nullptr) return;
  idle_naps_ = 0;
  writable_ = false;
  stream_->Write(*request, AsPointer(kWritten));
}

bool StepStream::Rep::RunStream() {
  grpc::ClientContext context;
  stream_ = stub_->AsyncStep(&context, &queue_, AsPointer(kStarted));
  batches_->StartStream();
  writable_ = false;
  v1::StepResponse response;
  int running = 1;  // How many operations are on the queue besides the alarm.
  bool broken = false, finishing = false, answered = false;
  while (true) {
    if (over() && !cancelled_) {
      context.TryCancel();
      cancelled_ = broken = true;
      writable_ = false;
    }
    LetMatchesGoIfAway();
    if (!broken) {
      const bool could = writable_;
      WriteNext();
      if (could && !writable_) ++running;
    }
    if (broken && !finishing && running == 0) {
      finishing = true;
      ++running;
      stream_->Finish(&last_status_, AsPointer(kFinished));
    }
    Tag tag;
    bool ok = false;
    if (!NextEvent(&tag, &ok)) continue;
    if (tag == kWoken) continue;
    --running;
    if (tag == kFinished) break;
    if (!ok) {
      broken = true;
      writable_ = false;
      // A read or write that is still under way ends with the call.
      if (tag != kRead) context.TryCancel();
      continue;
    }
    if (tag == kWritten) writable_ = !broken;
    if (tag == kStarted) writable_ = !broken;
    if (tag == kRead) {
      answered = true;
      idle_naps_ = 0;
      batches_->OnResponse(&response);
    }
    if (tag != kWritten && !broken) {
      ++running;
      stream_->Read(&response, AsPointer(kRead));
    }
  }
  stream_.reset();
  return answered;
}

bool StepStream::Rep::Pause(milliseconds pause) {
  const auto until = steady_clock::now() + pause;
  writable_ = false;
  while (!over() && steady_clock::now() < until) {
    if (changed_.exchange(false, std::memory_order_seq_cst)) return true;
    void* raw = nullptr;
    bool ok = false;
    mode_.store(Mode::kSleep, std::memory_order_seq_cst);
    LetMatchesGoIfAway();
    const auto left = std::chrono::duration_cast<milliseconds>(until - steady_clock::now()).count() + 1;
    const auto deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(left, GPR_TIMESPAN));
    if (queue_.AsyncNext(&raw, &ok, deadline) == grpc::CompletionQueue::GOT_EVENT) {
      alarm_set_.store(false, std::memory_order_release);
    }
    mode_.store(Mode::kAwake, std::memory_order_seq_cst);
  }
  return false;
}

void StepStream::Rep::Run() {
  milliseconds retry = kFirstRetry;
  while (!over()) {
    if (RunStream()) retry = kFirstRetry;
    if (over()) break;
    if (EndsSession(last_status_.error_code())) {
      // A daemon that came back without the session does not know the member.
      state_->End(state_->away.load(std::memory_order_seq_cst)
                      ? absl::UnavailableError(
                            absl::StrCat("detached: the daemon was gone; the session did not come back: ",
                                         last_status_.error_message()))
                      : absl::AbortedError(last_status_.error_message()));
      break;
    }
    state_->reconnects.fetch_add(1, std::memory_order_relaxed);
    // A daemon answers on its attach socket some milliseconds before it listens here.
    retry = Pause(retry) ? kFirstRetry : std::min(retry * 2, kLastRetry);
    // The pause was here; the channel would add one of its own, which is 100 ms at least.
    grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  }
  // The session is over; calls are still answered until it is dismantled.
  idle_naps_ = kNapsBeforeSleep;
  while (!stop_.load(std::memory_order_seq_cst)) {
    mode_.store(Mode::kSleep, std::memory_order_seq_cst);
    batches_->Abort(state_->status());
    void* raw = nullptr;
    bool ok = false;
    if (!stop_.load(std::memory_order_seq_cst)) queue_.Next(&raw, &ok);
    alarm_set_.store(false, std::memory_order_release);
  }
}

StepStream::StepStream(const std::string& socket) : rep_(std::make_unique<Rep>(socket)) {}
StepStream::~StepStream() = default;

absl::StatusOr<v1::OpenSessionResult> StepStream::OpenSession(const v1::OpenSession& request,
                                                              steady_clock::time_point deadline) {
  grpc::ClientContext context;
  SetDeadline(&context, deadline);
  // The attach socket has answered, so there is a daemon: if it does not listen here yet, it soon will.
  context.set_wait_for_ready(true);
  v1::OpenSessionResult result;
  const grpc::Status status = rep_->stub()->OpenSession(&context, request, &result);
  if (!status.ok()) return FromGrpc(status);
  return result;
}

absl::StatusOr<v1::AddMemberResult> StepStream::AddMember(const v1::AddMember& request,
                                                          steady_clock::time_point deadline) {
  grpc::ClientContext context;
  SetDeadline(&context, deadline);
  // The attach socket has answered, so there is a daemon: if it does not listen here yet, it soon will.
  context.set_wait_for_ready(true);
  v1::AddMemberResult result;
  const grpc::Status status = rep_->stub()->AddMember(&context, request, &result);
  if (!status.ok()) return FromGrpc(status);
  return result;
}

void StepStream::Start(StepBatches* batches, SessionState* state) { rep_->Start(batches, state); }
void StepStream::Wake(Urgency urgency) { rep_->Wake(urgency); }
void StepStream::OnDaemonChange() { rep_->OnDaemonChange(); }
void StepStream::Stop() { rep_->Stop(); }

}  // namespace kvpool
