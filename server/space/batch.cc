#include "server/space/batch.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/scoring/budget_plan.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// Repetitions of one parked unary call that wait for its end together.
constexpr size_t kMaxWaiters = 16;

// Completions of one member that are not known to have arrived, in bytes, beyond which no device operation starts: an
// answer of theirs can be large.
constexpr size_t kMaxCompletionBytes = 16 << 20;
// Completions of one response; at least one whatever its size. The response stays below gRPC's 4 MiB with the half that
// answers to a batch may have.
constexpr size_t kResponseCompletionBytes = 1 << 20;

// Budgets planned by statistics need no device.
bool NeedsDevice(const v1::Operation& operation) {
  return IsDeviceOperation(operation.verb_case()) &&
         !(operation.has_plan_budgets() && operation.plan_budgets().sequences().empty());
}

template <typename Message>  // OperationResult or StepResponse: both carry a code and a message.
void SetStatus(const absl::Status& status, Message* message) {
  message->set_code(static_cast<int>(status.code()));
  message->set_message(status.message().data(), status.message().size());
}

// What was filled in stays if all went well.
void Answer(const absl::Status& status, v1::OperationResult* result) {
  if (status.ok()) return;
  result->clear_result();
  SetStatus(status, result);
}

absl::Status Forgotten(uint64_t sequence, uint64_t floor) {
  return absl::OutOfRangeError(
      absl::StrCat("sequence ", sequence, " is forgotten: answers through ", floor, " are gone"));
}

// A completion that the repeated answer carries already need not come again.
void DropCompletions(uint64_t sequence, Member* member) {
  std::erase_if(member->completions,
                [sequence](const v1::Completion& completion) { return completion.sequence() == sequence; });
  std::erase_if(member->sent_completions,
                [sequence](const SentCompletion& sent) { return sent.completion.sequence() == sequence; });
}

// What was sent up to now has arrived when the answer to this batch, which is behind it on the stream, has.
void ConfirmBy(uint64_t sequence, Member* member) {
  for (SentCompletion& sent : member->sent_completions) {
    if (sent.confirmed_by == 0) sent.confirmed_by = sequence;
  }
}

}  // namespace

std::string_view Batches::Apply(Member* member, const v1::StepRequest& request, uint64_t now,
                                v1::StepResponse* response, Deferred* deferred) {
  response->set_sequence(request.sequence());
  member->last_call_ms = now;
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
  member->answers.Acknowledge(request.acknowledged());
  std::erase_if(member->sent_completions, [&request](const SentCompletion& sent) {
    return sent.confirmed_by != 0 && sent.confirmed_by <= request.acknowledged();
  });
  switch (member->answers.Look(request.sequence())) {
    case AnswerWindow::Seen::kForgotten:
      SetStatus(Forgotten(request.sequence(), member->answers.floor()), response);
      return {};
    case AnswerWindow::Seen::kRemembered:
      member->answers.Replay(request.sequence(), response);
      DropCompletions(request.sequence(), member);
      SetFreeBlocks(*session, response);
      TakePending(member, response);
      ConfirmBy(request.sequence(), member);
      return {};
    case AnswerWindow::Seen::kNew:
      break;
  }
  if (session->ended) {
    SetStatus(absl::AbortedError(session->end_reason), response);
    TakePending(member, response);
    return {};
  }
  response->mutable_results()->Reserve(request.operations_size());
  Place place{.sequence = request.sequence()};
  for (const v1::Operation& operation : request.operations()) {
    ApplyOne(member, operation, place, now, response->add_results(), deferred);
    ++place.index;
  }
  if (!member->completions.empty()) {
    // Parked and applied inside this batch: the answer has the result, for a repetition too.
    for (v1::Completion& completion : member->completions) {
      if (completion.sequence() != request.sequence()) continue;
      *response->mutable_results(static_cast<int>(completion.index())) = completion.result();
    }
    DropCompletions(request.sequence(), member);
  }
  state_.AfterVerbs(now, deferred);
  SetFreeBlocks(*session, response);
  TakePending(member, response);
  ConfirmBy(request.sequence(), member);
  return member->answers.Remember(request.sequence(), *response);
}

void Batches::SetFreeBlocks(const Session& session, v1::StepResponse* response) const {
  if (session.holder != kNobody) response->set_free_blocks(state_.pool.guaranteed_free(session.holder));
}

void Batches::ApplyUnary(Member* member, const v1::Call& call, v1::Operation operation, Waiter done,
                         uint64_t now, Deferred* deferred) {
  v1::StepResponse response;
  v1::OperationResult* result = response.add_results();
  Session* session = member->session;
  member->last_call_ms = now;
  absl::Status status = ValidateCall(call, operation);
  if (status.ok()) {
    member->answers.Acknowledge(call.acknowledged());
    switch (member->answers.Look(call.sequence())) {
      case AnswerWindow::Seen::kForgotten:
        status = Forgotten(call.sequence(), member->answers.floor());
        break;
      case AnswerWindow::Seen::kRemembered:
        RepeatUnary(member, call.sequence(), std::move(done), deferred);
        return;
      case AnswerWindow::Seen::kNew:
        if (session->ended) status = absl::AbortedError(session->end_reason);
        break;
    }
  }
  if (!status.ok()) {
    SetStatus(status, result);
    deferred->answers.push_back({{std::move(done)}, std::move(*result)});
    return;
  }
  operation.set_after(call.after());
  ApplyOne(member, operation, {.sequence = call.sequence(), .waiter = &done}, now, result, deferred);
  member->answers.Remember(call.sequence(), response);
  if (!result->parked()) deferred->answers.push_back({{std::move(done)}, std::move(*result)});
  state_.AfterVerbs(now, deferred);
}

void Batches::RepeatUnary(Member* member, uint64_t sequence, Waiter done, Deferred* deferred) {
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
    std::vector<Waiter>& waiters = member->session->parked.Find(member, sequence, 0)->waiters;
    if (waiters.size() < kMaxWaiters) {
      waiters.push_back(std::move(done));
      return;
    }
    result.Clear();
    SetStatus(
        absl::ResourceExhaustedError(absl::StrCat("sequence ", sequence, " is parked and ", waiters.size(),
                                                  " calls wait for it already; limit ", kMaxWaiters)),
        &result);
  }
  deferred->answers.push_back({{std::move(done)}, std::move(result)});
}

void Batches::ApplyOne(Member* member, const v1::Operation& operation, const Place& place, uint64_t now,
                       v1::OperationResult* result, Deferred* deferred) {
  Session* session = member->session;
  ++state_.counters.operations[operation.verb_case()];
  if (session->ended) {  // By an operation before this one.
    SetStatus(absl::AbortedError(session->end_reason), result);
    return;
  }
  const absl::Status status = ValidateOperation(operation, state_.facts.layout.groups_size());
  if (!status.ok()) {
    SetStatus(status, result);
    return;
  }
  const uint64_t due = session->parked.Due(operation);
  const bool waits = due > session->passed, held_up = session->parked.HeldUp(operation);
  if (!waits && !held_up && !NeedsDevice(operation)) {
    return ApplyVerb(member, operation, now, result, deferred);
  }
  const absl::Status parked = ParkOrStart(member, operation, place, due, held_up, now);
  if (!parked.ok()) return SetStatus(parked, result);
  result->set_parked(true);
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
  const ParkedVerbs::Tally& parked = session.parked.plain();
  const size_t names =
      parked.names() + member.completions.size() + member.sent_completions.size() + WeightOf(operation) + 1;
  if (names <= ParkedVerbs::kMaxNames) return absl::OkStatus();
  const std::string what =
      due > session.passed ? absl::StrCat("verb for after step ", due) : std::string("verb behind another");
  return absl::ResourceExhaustedError(absl::StrCat(what, ": ", parked.verbs, " verbs with ", parked.blocks,
                                                   " blocks are parked, ", member.completions.size(),
                                                   " completions wait; limit ", ParkedVerbs::kMaxNames,
                                                   " in all; step ", session.passed, " is passed"));
}

absl::Status Batches::CheckDeviceRoom(const Member& member, const v1::Operation& operation) const {
  const ParkedVerbs::Tally& parked = member.session->parked.on_device();
  const size_t names = parked.names() + WeightOf(operation) + 1;
  if (names > ParkedVerbs::kMaxDeviceNames) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "device operation of ", WeightOf(operation), " blocks, its size counted with them: ", parked.verbs,
        " with ", parked.blocks, " are not over; limit ", ParkedVerbs::kMaxDeviceNames, " in all"));
  }
  size_t bytes = 0;
  for (const v1::Completion& completion : member.completions) bytes += completion.ByteSizeLong();
  for (const SentCompletion& sent : member.sent_completions) bytes += sent.completion.ByteSizeLong();
  if (bytes <= kMaxCompletionBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("device operation: ", bytes,
                                                   " bytes of completions have not been acknowledged; limit ",
                                                   kMaxCompletionBytes));
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

void Batches::Resume(ParkedVerb verb, uint64_t now, Deferred* deferred) {
  v1::OperationResult result;
  if (NeedsDevice(verb.operation)) {
    const absl::Status started = StartOnDevice(&verb, nullptr, now);
    if (started.ok()) return;
    SetStatus(started, &result);
  } else {
    ApplyVerb(verb.member, verb.operation, now, &result, deferred);
  }
  state_.Complete(std::move(verb), result, deferred);
}

void Batches::OnOver(DeviceOperation* operation, uint64_t now, Deferred* deferred) {
  Session* session = operation->session.get();
  if (!state_.RemoveOperation(operation)) return;
  if (session->ended) {
    if (session->device_operations.empty() && session->free_when_over) state_.Free(session, now, deferred);
    return;
  }
  device_verbs_.Settle(operation, now);
  if (!operation->status.ok()) {
    operation->result.Clear();
    SetStatus(operation->status, &operation->result);
  }
  state_.Complete(session->parked.Finish(operation->id), operation->result, deferred);
  Readmit(session, now, deferred);
  state_.AfterVerbs(now, deferred);
}

void Batches::ResumeShort(uint64_t now, Deferred* deferred) {
  // One of them may close its session: the list is not walked meanwhile.
  std::vector<std::shared_ptr<Session>> lacking;
  for (Session* session : state_.sessions) {
    if (session->lacks_blocks && session->ready) lacking.push_back(session->shared_from_this());
  }
  for (const auto& session : lacking) Readmit(session.get(), now, deferred);
}

void Batches::Readmit(Session* session, uint64_t now, Deferred* deferred) {
  session->lacks_blocks = false;
  session->parked.BeginReadmission();
  while (std::optional<ParkedVerb> verb = session->parked.NextReadmitted()) {
    Resume(*std::move(verb), now, deferred);
  }
}

void Batches::ApplyVerb(Member* member, const v1::Operation& operation, uint64_t now,
                        v1::OperationResult* result, Deferred* deferred) {
  switch (operation.verb_case()) {
    case v1::Operation::kFence:
      return Fence(member, operation.fence(), now, result, deferred);
    case v1::Operation::kWarmupDone:
      member->warmup_done = true;
      return result->mutable_warmup_done()->set_waiting_for(member->session->warming_up());
    case v1::Operation::kCloseSession:
      return CloseSession(member, now, result->mutable_close_session(), deferred);
    case v1::Operation::kLease:
    case v1::Operation::kSeal:
    case v1::Operation::kMatch:
    case v1::Operation::kRelease:
    case v1::Operation::kRef:
    case v1::Operation::kTouch:
    case v1::Operation::kPin:
    case v1::Operation::kUnpin:
    case v1::Operation::kSetRetention:
      return verbs_.Apply(member->session, operation, now, result);
    case v1::Operation::kPlanBudgets:
      return Answer(PlanLayerBudgets(operation.plan_budgets(), {}, result->mutable_plan_budgets()), result);
    case v1::Operation::kPutEpisode:
      return Answer(
          episodes_.Put(member->session, operation.put_episode(), now, result->mutable_put_episode()),
          result);
    case v1::Operation::kChooseEpisode:
      return Answer(episodes_.Choose(member->session, operation.choose_episode(), now,
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

void Batches::Fence(Member* member, const v1::Fence& fence, uint64_t now, v1::OperationResult* result,
                    Deferred* deferred) {
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
      Resume(*std::move(verb), now, deferred);
    }
  }
  result->mutable_fence()->set_passed(session->passed);
}

void Batches::CloseSession(Member* member, uint64_t now, v1::CloseSessionResult* result, Deferred* deferred) {
  Session* session = member->session;
  state_.EndSession(session, EndKind::kClosed,
                    absl::StrCat("session ", session->terms.id, " was closed by member ", member->index),
                    member, now, deferred);
  // The engine's word that nothing of it still runs.
  result->set_released_blocks(state_.Free(session, now, deferred));
}

bool Batches::TakePending(Member* member, v1::StepResponse* response) {
  if (!member->pending()) return false;
  size_t bytes = 0;
  while (!member->completions.empty()) {
    v1::Completion& completion = member->completions.front();
    bytes += completion.ByteSizeLong();
    if (response->completions_size() > 0 && bytes > kResponseCompletionBytes) break;
    *response->add_completions() = completion;
    member->sent_completions.push_back({std::move(completion), 0});
    member->completions.pop_front();
  }
  member->notices.Take(response);
  if (!member->completions.empty()) state_.Touch(member);
  return true;
}

}  // namespace kvpool
