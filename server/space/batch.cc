#include "server/space/batch.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/scoring/budget_plan.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// So many repetitions of one parked unary call may wait for its end together.
constexpr size_t kMaxWaiters = 16;

// Operations of a batch whose blocks and keys are prefetched together.
constexpr size_t kPrefetchedOperations = 64;

// The completions in one response have at most so many bytes, or there is one. With the half MiB that answers
// to a batch may have, the response stays below gRPC's 4 MiB.
constexpr size_t kResponseCompletionBytes = 1 << 20;

// Budgets planned by statistics need no device.
bool NeedsDevice(const v1::Operation& operation) {
  return IsDeviceOperation(operation.verb_case()) &&
         !(operation.has_plan_budgets() && operation.plan_budgets().sequences().empty());
}

// The blocks that a verb was not applied to, where it says so one by one.
int RefusedBlocks(const v1::OperationResult& result) {
  switch (result.result_case()) {
    case v1::OperationResult::kSeal:
      return result.seal().refused_size();
    case v1::OperationResult::kRelease:
      return result.release().refused_size();
    case v1::OperationResult::kRef:
      return result.ref().refused_size();
    case v1::OperationResult::kPin:
      return result.pin().refused_size();
    case v1::OperationResult::kSetRetention:
      return result.set_retention().refused_size();
    default:
      return 0;
  }
}

template <typename Message>  // OperationResult or StepResponse: both carry a code and a message.
void SetStatus(const absl::Status& status, Message* message) {
  message->set_code(static_cast<int>(status.code()));
  message->set_message(status.message().data(), status.message().size());
}

// Leaves what was filled in if all went well.
void Answer(const absl::Status& status, v1::OperationResult* result) {
  if (status.ok()) return;
  result->clear_result();
  SetStatus(status, result);
}

using Results = google::protobuf::RepeatedPtrField<v1::OperationResult>;
// The groups of a match whose memory is kept: each may hold a whole batch's blocks.
constexpr int kMaxKeptGroups = 2;

// The result at `index`, empty, for an operation with this verb. Where an earlier batch left one there its memory is
// used again, the inner message's too if the verb was the same: that is there and empty then.
v1::OperationResult* ResultAt(int index, v1::Operation::VerbCase verb, Results* results) {
  if (index == results->size()) return results->Add();
  v1::OperationResult* result = results->Mutable(index);
  result->set_code(0);
  if (!result->message().empty()) result->clear_message();
  result->set_parked(false);
  switch (result->result_case()) {
    case v1::OperationResult::kLease:
      if (verb != v1::Operation::kLease) break;
      result->mutable_lease()->Clear();
      return result;
    case v1::OperationResult::kSeal:
      if (verb != v1::Operation::kSeal) break;
      result->mutable_seal()->Clear();
      return result;
    case v1::OperationResult::kMatch:
      if (verb != v1::Operation::kMatch || result->match().groups_size() > kMaxKeptGroups) break;
      result->mutable_match()->Clear();
      return result;
    case v1::OperationResult::kRelease:
      if (verb != v1::Operation::kRelease) break;
      result->mutable_release()->Clear();
      return result;
    default:
      break;
  }
  result->clear_result();
  return result;
}

absl::Status Forgotten(uint64_t sequence, const Member& member) {
  if (member.session->ended) return absl::AbortedError(member.session->end_reason);
  return absl::OutOfRangeError(absl::StrCat("sequence ", sequence, " is forgotten: answers through ",
                                            member.answers.floor(), " are gone"));
}

}  // namespace

std::string_view Batches::Apply(Turn& turn, Member* member, const v1::StepRequest& request,
                                v1::StepResponse* response, const StreamListener* stream) {
  Results left;  // An earlier batch left these.
  left.Swap(response->mutable_results());
  response->set_sequence(request.sequence());
  member->last_call_ms = turn.now;
  ++state_.counters.batches;
  Session* session = member->session;
  if (!request.member_token().empty() && request.member_token() != member->identity.token) {
    SetStatus(absl::InvalidArgumentError("member_token is not that of this stream"), response);
    return {};
  }
  if (const absl::Status status = ValidateBatch(request); !status.ok()) {
    SetStatus(status, response);
    return {};
  }
  AwaitOthers(turn, *session);
  member->answers.Acknowledge(request.acknowledged());
  member->completions.Acknowledge(request.acknowledged());
  switch (member->answers.Look(request.sequence())) {
    case AnswerWindow::Seen::kForgotten:
      SetStatus(Forgotten(request.sequence(), *member), response);
      return {};
    case AnswerWindow::Seen::kRemembered:
      member->answers.Replay(request.sequence(), response);
      member->completions.Fold(response);
      SetFreeBlocks(*session, response);
      AddPending(member, stream, request.sequence(), response);
      return {};
    case AnswerWindow::Seen::kNew:
      break;
  }
  if (session->ended) {
    SetStatus(absl::AbortedError(session->end_reason), response);
    AddPending(member, stream, 0, response);
    return {};
  }
  session->applying = true;
  const absl::Cleanup applied = [session] { session->applying = false; };
  Results* const results = response->mutable_results();
  results->Swap(&left);
  const int asked = request.operations_size();
  while (results->size() > asked) results->RemoveLast();
  results->Reserve(asked);
  Place place{.sequence = request.sequence()};
  for (const v1::Operation& operation : request.operations()) {
    if (place.index % kPrefetchedOperations == 0 && asked > 1) {
      verbs_.Prefetch(*session, absl::MakeConstSpan(request.operations().data(), asked)
                                    .subspan(place.index, kPrefetchedOperations));
    }
    v1::OperationResult* const result =
        ResultAt(static_cast<int>(place.index), operation.verb_case(), results);
    ApplyOne(turn, member, operation, place, result);
    // An operation that was not applied has no other result.
    if (result->code() != 0 || result->parked()) result->clear_result();
    ++place.index;
    turn.Breathe();
  }
  // A verb was parked and applied inside this batch: the answer has its result, for a repetition too.
  if (member->completions.any_waiting()) member->completions.Fold(response);
  EndApplying(turn, session);
  SetFreeBlocks(*session, response);
  AddPending(member, stream, request.sequence(), response);
  return member->answers.Remember(request.sequence(), *response);
}

void Batches::SetFreeBlocks(const Session& session, v1::StepResponse* response) const {
  if (session.holder != kNobody) response->set_free_blocks(state_.pool.guaranteed_free(session.holder));
}

void Batches::ApplyUnary(Turn& turn, Member* member, const v1::Call& call, v1::Operation operation,
                         Waiter done) {
  v1::StepResponse response;
  v1::OperationResult* result = response.add_results();
  Session* session = member->session;
  member->last_call_ms = turn.now;
  absl::Status status = ValidateCall(call, operation);
  if (status.ok()) {
    AwaitOthers(turn, *session);
    member->answers.Acknowledge(call.acknowledged());
    switch (member->answers.Look(call.sequence())) {
      case AnswerWindow::Seen::kForgotten:
        status = Forgotten(call.sequence(), *member);
        break;
      case AnswerWindow::Seen::kRemembered:
        return RepeatUnary(turn, member, call.sequence(), std::move(done));
      case AnswerWindow::Seen::kNew:
        if (session->ended) status = absl::AbortedError(session->end_reason);
        break;
    }
  }
  if (!status.ok()) {
    SetStatus(status, result);
    turn.deferred.answers.push_back({{std::move(done)}, std::move(*result)});
    return;
  }
  session->applying = true;
  const absl::Cleanup applied = [session] { session->applying = false; };
  operation.set_after(call.after());
  ApplyOne(turn, member, operation, {.sequence = call.sequence(), .waiter = &done}, result);
  member->answers.Remember(call.sequence(), response);
  if (!result->parked()) turn.deferred.answers.push_back({{std::move(done)}, std::move(*result)});
  EndApplying(turn, session);
}

void Batches::AwaitOthers(Turn& turn, const Session& session) {
  while (session.applying) turn.Pause(Turn::Rest::kLong);
}

void Batches::EndApplying(Turn& turn, Session* session) {
  if (std::exchange(session->readmit, false) && !session->ended) Readmit(turn, session);
  if (session->parked.late().due(session->passed)) ReleaseLate(turn, session);
  state_.pressure.AfterVerbs(turn);
}

void Batches::RepeatUnary(Turn& turn, Member* member, uint64_t sequence, Waiter done) {
  v1::StepResponse first;
  member->answers.Replay(sequence, &first);
  v1::OperationResult result;
  if (first.results_size() != 1) {
    SetStatus(absl::InvalidArgumentError(absl::StrCat("sequence ", sequence, " was a batch of ",
                                                      first.results_size(), " operations")),
              &result);
  } else {
    result = first.results(0);
  }
  if (result.parked()) {
    ParkedVerb* const verb = member->session->parked.Find(member, sequence, 0);
    if (verb != nullptr && verb->waiters.size() < kMaxWaiters) {
      verb->waiters.push_back(std::move(done));
      return;
    }
    result.Clear();
    SetStatus(verb == nullptr ? Forgotten(sequence, *member)
                              : absl::ResourceExhaustedError(absl::StrCat(
                                    "sequence ", sequence, " is parked and ", verb->waiters.size(),
                                    " calls wait for it already; limit ", kMaxWaiters)),
              &result);
  }
  turn.deferred.answers.push_back({{std::move(done)}, std::move(result)});
}

void Batches::ApplyOne(Turn& turn, Member* member, const v1::Operation& operation, const Place& place,
                       v1::OperationResult* result) {
  Session* session = member->session;
  ++state_.counters.operations[operation.verb_case()];
  const absl::Cleanup count = [&] { Count(operation.verb_case(), *result); };
  // An operation before this one may have ended it.
  if (session->ended) return SetStatus(absl::AbortedError(session->end_reason), result);
  const absl::Status status = ValidateOperation(operation, state_.facts.layout.groups_size());
  if (!status.ok()) return SetStatus(status, result);
  const uint64_t due = session->parked.Due(operation);
  const bool waits = due > session->passed, held_up = session->parked.HeldUp(operation);
  if (!waits && !held_up && !NeedsDevice(operation)) {
    return ApplyVerb(turn, member, operation, result);
  }
  turn.Worked(WeightOf(operation));
  if (operation.has_release() && !CheckRoom(*member, operation, due).ok()) {
    return verbs_.ReleaseLate(session, operation.release(), due, result);
  }
  const absl::Status parked = ParkOrStart(member, operation, place, due, held_up, turn.now);
  if (!parked.ok()) return SetStatus(parked, result);
  result->set_parked(true);
}

void Batches::Count(v1::Operation::VerbCase verb, const v1::OperationResult& result) {
  state_.counters.errors[verb] += result.code() != 0;
  state_.counters.refused_blocks[verb] += static_cast<uint64_t>(RefusedBlocks(result));
}

absl::Status Batches::ParkOrStart(Member* member, const v1::Operation& operation, const Place& place,
                                  uint64_t due, bool held_up, uint64_t now) {
  Session* session = member->session;
  RETURN_IF_ERROR(CheckRoom(*member, operation, due));
  ParkedVerb verb{.member = member,
                  .sequence = place.sequence,
                  .index = place.index,
                  .operation = operation,
                  .on_stream = place.waiter == nullptr};
  const bool waits = due > session->passed;
  if (!waits && !held_up) return StartOnDevice(&verb, place.waiter, now);
  if (place.waiter != nullptr) verb.waiters.push_back(std::move(*place.waiter));
  if (waits) {
    session->parked.Park(due, std::move(verb));
  } else {
    session->parked.ParkBehind(std::move(verb));
  }
  return absl::OkStatus();
}

absl::Status Batches::CheckRoom(const Member& member, const v1::Operation& operation, uint64_t due) const {
  const Session& session = *member.session;
  if (IsDeviceOperation(operation.verb_case())) return CheckDeviceRoom(member, operation);
  const ParkedVerbs::Tally& parked = session.parked.on_host();
  const size_t names = parked.names() + member.completions.size() + WeightOf(operation) + 1;
  const std::string what =
      due > session.passed ? absl::StrCat("verb for after step ", due) : std::string("verb behind another");
  if (names <= ParkedVerbs::kMaxNames) return CheckCompletionRoom(what, member);
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", parked.verbs, " verbs with ", parked.blocks, " blocks are parked, ",
                   member.completions.size(), " completions have not been acknowledged; limit ",
                   ParkedVerbs::kMaxNames, " in all; step ", session.passed, " is passed"));
}

absl::Status Batches::CheckCompletionRoom(const std::string& what, const Member& member) const {
  const Unacknowledged& bytes = member.completions.bytes();
  if (!bytes.over_limit()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", bytes.bytes(), " bytes of completions have not been acknowledged; limit ",
                   bytes.limit(), ", with ", Unacknowledged::bytes_of_all(), " bytes of all members"));
}

absl::Status Batches::CheckDeviceRoom(const Member& member, const v1::Operation& operation) const {
  const ParkedVerbs::Tally& parked = member.session->parked.on_device();
  const size_t names = parked.names() + WeightOf(operation) + 1;
  if (names > ParkedVerbs::kMaxDeviceNames) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "device operation of ", WeightOf(operation), " blocks, its size counted with them: ", parked.verbs,
        " with ", parked.blocks, " are not over; limit ", ParkedVerbs::kMaxDeviceNames, " in all"));
  }
  return CheckCompletionRoom("device operation", member);
}

absl::Status Batches::StartOnDevice(ParkedVerb* verb, Waiter* waiter, uint64_t now) {
  Session* session = verb->member->session;
  absl::StatusOr<std::shared_ptr<DeviceOperation>> operation =
      device_verbs_.Prepare(session, verb->operation, now);
  if (!operation.ok()) return operation.status();
  if ((*operation)->lacks_blocks) {
    if (waiter != nullptr) verb->waiters.push_back(std::move(*waiter));
    session->parked.ParkBehind(std::move(*verb));
    session->lacks_blocks = true;
    lacking_[session->terms.id] = session->weak_from_this();
    return absl::OkStatus();
  }
  const size_t named = WeightOf(verb->operation);
  std::vector<uint32_t> blocks = BlockIdsOf(verb->operation);
  for (const BlockRef ref : (*operation)->destinations) blocks.push_back(Index(ref.id));
  const absl::Status submitted = device_verbs_.Submit(*operation, now);
  if (!submitted.ok()) return submitted;
  if (waiter != nullptr) verb->waiters.push_back(std::move(*waiter));
  verb->operation.Clear();  // The device operation has it.
  session->parked.Start((*operation)->id, std::move(*verb), std::move(blocks), named);
  return absl::OkStatus();
}

void Batches::Resume(Turn& turn, ParkedVerb verb) {
  v1::OperationResult result;
  if (NeedsDevice(verb.operation)) {
    const absl::Status started = StartOnDevice(&verb, nullptr, turn.now);
    if (started.ok()) return;
    SetStatus(started, &result);
  } else {
    ApplyVerb(turn, verb.member, verb.operation, &result);
  }
  Count(verb.operation.verb_case(), result);
  state_.sessions.Complete(turn, std::move(verb), result);
}

void Batches::OnOperationDone(Turn& turn, DeviceOperation* operation) {
  Session* session = operation->session.get();
  const size_t listed = std::erase_if(session->device_operations,
                                      [operation](const auto& other) { return other.get() == operation; });
  if (listed == 0) return;
  if (session->ended) {
    if (session->device_operations.empty() && session->free_when_over) state_.sessions.Free(turn, session);
    return;
  }
  device_verbs_.Commit(operation, turn.now);
  if (!operation->status.ok()) {
    operation->result.Clear();
    SetStatus(operation->status, &operation->result);
  }
  state_.sessions.Complete(turn, session->parked.Finish(operation->id), operation->result);
  // A batch that is half applied may name what an operation would be prepared on, or lease its destinations.
  if (session->applying) {
    session->readmit = true;
  } else {
    Readmit(turn, session);
  }
  state_.pressure.AfterVerbs(turn);
}

void Batches::RetryLackingBlocks(Turn& turn) {
  for (auto& [id, weak] : std::exchange(lacking_, {})) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr || session->ended) continue;
    if (session->applying) {
      lacking_[id] = weak;
      continue;
    }
    if (session->parked.late().due(session->passed)) ReleaseLate(turn, session.get());
    if (!session->lacks_blocks) continue;
    if (session->ready) {
      Readmit(turn, session.get());
    } else {
      lacking_[id] = weak;
    }
  }
}

void Batches::Readmit(Turn& turn, Session* session) {
  const Turn::Unbroken unbroken(turn);  // Nobody else may begin a readmission meanwhile.
  session->lacks_blocks = false;
  session->parked.BeginReadmission();
  while (std::optional<ParkedVerb> verb = session->parked.NextReadmitted()) {
    Resume(turn, *std::move(verb));
  }
  if (session->parked.late().due(session->passed)) ReleaseLate(turn, session);
}

void Batches::ReleaseLate(Turn& turn, Session* session) {
  if (session->ended) return;
  v1::Operation operation;
  *operation.mutable_release() = session->parked.TakeLate(session->passed);
  // Those that device operations hold up go when these are over.
  if (operation.release().blocks().empty()) return;
  v1::OperationResult result;
  const Turn::Unbroken unbroken(turn);
  ApplyToBlocks(turn, session, operation, &result);
  Count(v1::Operation::kRelease, result);
  if (!session->parked.late().due(session->passed)) return;
  lacking_[session->terms.id] = session->weak_from_this();
  turn.deferred.housekeep = true;
}

void Batches::ApplyVerb(Turn& turn, Member* member, const v1::Operation& operation,
                        v1::OperationResult* result) {
  switch (operation.verb_case()) {
    case v1::Operation::kFence:
      return Fence(turn, member, operation.fence(), result);
    case v1::Operation::kWarmupDone:
      member->warmup_done = true;
      return result->mutable_warmup_done()->set_waiting_for(member->session->warming_up());
    case v1::Operation::kCloseSession:
      return CloseSession(turn, member, result->mutable_close_session());
    case v1::Operation::kLease:
    case v1::Operation::kSeal:
    case v1::Operation::kMatch:
    case v1::Operation::kRelease:
    case v1::Operation::kRef:
    case v1::Operation::kTouch:
    case v1::Operation::kPin:
    case v1::Operation::kUnpin:
    case v1::Operation::kSetRetention:
      return ApplyToBlocks(turn, member->session, operation, result);
    case v1::Operation::kPlanBudgets:
      return Answer(PlanLayerBudgets(operation.plan_budgets(), {}, result->mutable_plan_budgets()), result);
    case v1::Operation::kPutEpisode:
      return Answer(
          episodes_.Put(member->session, operation.put_episode(), turn.now, result->mutable_put_episode()),
          result);
    case v1::Operation::kChooseEpisode:
      return Answer(episodes_.Choose(member->session, operation.choose_episode(), turn.now,
                                     result->mutable_choose_episode()),
                    result);
    case v1::Operation::kScore:
    case v1::Operation::kPrune:
    case v1::Operation::kCompact:
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
    case v1::Operation::VERB_NOT_SET:
      break;
  }
  KVPOOL_CHECK(false, "verb %d was not refused", operation.verb_case());
}

void Batches::ApplyToBlocks(Turn& turn, Session* session, const v1::Operation& operation,
                            v1::OperationResult* result) {
  std::optional<size_t> done = 0;
  while ((done = verbs_.Apply(turn, session, operation, *done, result)).has_value()) {
    turn.Breathe();
    if (!session->ended) continue;
    result->clear_result();
    return SetStatus(absl::AbortedError(session->end_reason), result);
  }
}

void Batches::Fence(Turn& turn, Member* member, const v1::Fence& fence, v1::OperationResult* result) {
  Session* session = member->session;
  if (member->identity.scheduler) {
    SetStatus(absl::FailedPreconditionError(absl::StrCat("fence from member ", member->index,
                                                         ", the scheduler; only ranks report fences")),
              result);
    return;
  }
  member->fence = std::max(member->fence, fence.step());
  if (session->UpdatePassed()) {
    while (!session->ended) {
      std::optional<ParkedVerb> verb = session->parked.Pop(session->passed);
      if (!verb.has_value()) break;
      Resume(turn, *std::move(verb));
      turn.Breathe();
    }
  }
  result->mutable_fence()->set_passed(session->passed);
}

void Batches::CloseSession(Turn& turn, Member* member, v1::CloseSessionResult* result) {
  Session* session = member->session;
  state_.sessions.End(turn, session, EndKind::kClosed,
                      absl::StrCat("session ", session->terms.id, " was closed by member ", member->index),
                      member);
  // The engine gives its word that nothing of it still runs.
  result->set_released_blocks(state_.sessions.Free(turn, session));
}

bool Batches::TakePending(Member* member, v1::StepResponse* response) {
  if (!member->pending()) return false;
  member->completions.Take(kResponseCompletionBytes, response);
  member->notices.Take(response);
  return true;
}

void Batches::AddPending(Member* member, const StreamListener* stream, uint64_t sequence,
                         v1::StepResponse* response) {
  // A stream that was replaced while its batch was applied delivers nothing any more.
  if (stream != nullptr && member->listener.get() != stream) return;
  TakePending(member, response);
  if (member->completions.any_waiting()) state_.sessions.Touch(member);
  if (sequence != 0) member->completions.ConfirmBy(sequence);
}

}  // namespace kvpool
