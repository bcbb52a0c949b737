#include "server/batch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/validate.h"

namespace kvpool {
namespace {

// Repetitions of one parked unary call that wait for its end together.
constexpr size_t kMaxWaiters = 16;

template <typename Message>  // OperationResult or StepResponse: both carry a code and a message.
void SetStatus(const absl::Status& status, Message* message) {
  message->set_code(static_cast<int>(status.code()));
  message->set_message(status.message().data(), status.message().size());
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
  if (due <= session->passed) {
    ApplyVerb(member, operation, now, result, deferred);
    return;
  }
  const size_t names = session->parked.names() + member->completions.size() +
                       member->sent_completions.size() + BlocksOf(operation).size() + 1;
  if (names > ParkedVerbs::kMaxNames) {
    SetStatus(absl::ResourceExhaustedError(
                  absl::StrCat("verb for after step ", due, ": ", session->parked.size(), " verbs with ",
                               session->parked.names() - session->parked.size(), " blocks are parked, ",
                               member->completions.size(), " completions wait; limit ",
                               ParkedVerbs::kMaxNames, " in all; step ", session->passed, " is passed")),
              result);
    return;
  }
  ParkedVerb verb;
  verb.member = member;
  verb.sequence = place.sequence;
  verb.index = place.index;
  verb.on_stream = place.waiter == nullptr;
  if (place.waiter != nullptr) verb.waiters.push_back(std::move(*place.waiter));
  verb.operation = operation;
  session->parked.Park(due, std::move(verb));
  result->set_parked(true);
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
      v1::OperationResult completed;
      ApplyVerb(verb->member, verb->operation, now, &completed, deferred);
      state_.Complete(std::move(*verb), completed, deferred);
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
  for (v1::Completion& completion : member->completions) {
    *response->add_completions() = completion;
    member->sent_completions.push_back({std::move(completion), 0});
  }
  member->completions.clear();
  member->notices.Take(response);
  return true;
}

}  // namespace kvpool
