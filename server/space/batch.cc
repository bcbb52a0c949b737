#include "server/space/batch.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/scoring/budget_plan.h"
#include "server/space/in_parts.h"
#include "server/wire/step_writer.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// So many repetitions of one parked unary call may wait for its end together.
constexpr size_t kMaxWaiters = 16;

// The matches of a batch compare what is doubted for so long together: a thread for large calls is busy meanwhile, and an upgrade
// waits.
constexpr uint64_t kCompareMs = 100;

// Operations of a batch whose blocks and keys are prefetched together.
constexpr size_t kPrefetchedOperations = 64;
// In a pool of fewer blocks, at some 90 bytes a block, all of it is in a processor's cache, and prefetching would cost more
// than it saves.
constexpr uint32_t kPrefetchedPool = 16 << 10;

// Taking a verb out of its queue and putting it back takes as long as so many names.
constexpr uint64_t kNamesOfAMove = 8;

// What an operation takes whatever it names, at most: a refusal in words is some microseconds.
constexpr size_t kNamesOfOperation = 4;

// The completions in one response have at most so many bytes, or there is one. With the answer to a batch (AnswerRoom) the
// response stays below gRPC's 4 MiB.
constexpr size_t kResponseCompletionBytes = 1 << 20;
// So many bytes of results of its own parked verbs may be in their places in the answer to a batch. The others come as
// completions.
constexpr size_t kFoldedBytes = 1 << 20;

// An answer of more bytes has its memory made ready; a name is 8 bytes of an answer at most.
constexpr size_t kLargeAnswer = 64 << 10, kNamesOfLargeAnswer = kLargeAnswer / 8;

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

// One whose chains turn out to be long, or that looks much up in a tier, is not.
constexpr size_t kMostWhole = 4 * Turn::kNames;

// Whether it is applied without a pause: so a daemon that is killed has applied all of it or nothing, and its session goes on in
// the next one. It may be 0.7 ms of work, where each block that it leases has another one evicted.
bool IsWhole(const Session& session, const BatchSize& size, size_t operations) {
  // The end of a session gives back all that it holds.
  if (size.closes) return false;
  const uint64_t parked = size.fences ? session.parked_names.load(std::memory_order_relaxed) : 0;
  return size.names + size.beside + parked + operations * kNamesOfOperation <= Turn::kNames;
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
  const absl::Span<const v1::Operation* const> operations(request.operations().data(),
                                                          static_cast<size_t>(request.operations_size()));
  // One of more operations is refused, whatever they name.
  const BatchSize size = SizeOf(operations.subspan(0, kMaxBatchOperations));
  if (const absl::Status status = ValidateBatch(request, size); !status.ok()) {
    SetStatus(status, response);
    return {};
  }
  AwaitOthers(turn, *session);
  Acknowledge(turn, member, request.acknowledged());
  switch (member->answers.Look(request.sequence())) {
    case AnswerWindow::Seen::kForgotten:
      SetStatus(Forgotten(request.sequence(), *member), response);
      return {};
    case AnswerWindow::Seen::kRemembered:
      Replay(member, request.sequence(), response);
      SetFreeBlocks(*session, response);
      AddPending(turn.now, member, stream, request.sequence(), response);
      return {};
    case AnswerWindow::Seen::kNew:
      break;
  }
  for (const v1::PrefillSample& sample : request.prefills()) {
    state_.below.prefill.Add(sample.tokens(), sample.tokens_before(),
                             static_cast<double>(sample.microseconds()) / 1e6);
  }
  session->applying = true;
  session->explained = 0;
  const absl::Cleanup applied = [session] { session->applying = false; };
  CompareFirst(turn, *session, operations);
  if (session->ended) {
    SetStatus(absl::AbortedError(session->end_reason), response);
    AddPending(turn.now, member, stream, 0, response);
    return {};
  }
  if (member->log != nullptr) member->log->BeginBatch();
  std::optional<Turn::Unbroken> whole;
  if (member->log != nullptr && IsWhole(*session, size, operations.size())) whole.emplace(turn);
  Results* const results = response->mutable_results();
  results->Swap(&left);
  const int asked = request.operations_size();
  while (results->size() > asked) results->RemoveLast();
  results->Reserve(asked);
  AnswerRoom room;
  Place place{.sequence = request.sequence(), .room = &room};
  const bool prefetches = asked > 1 && state_.pool.capacity() >= kPrefetchedPool;
  for (const v1::Operation& operation : request.operations()) {
    if (prefetches && place.index % kPrefetchedOperations == 0) {
      verbs_.Prefetch(*session, operations.subspan(place.index, kPrefetchedOperations));
    }
    v1::OperationResult* const result =
        ResultAt(static_cast<int>(place.index), operation.verb_case(), results);
    ApplyOne(turn, member, operation, place, result);
    // An operation that was not applied has no other result.
    if (result->code() != 0 || result->parked()) result->clear_result();
    ++place.index;
    turn.Worked(kNamesOfOperation);
    if (turn.worked() > kMostWhole) whole.reset();
    turn.Breathe();
  }
  // The memory of a large answer comes while the mutex is free: page by page it is a millisecond.
  std::string memory;
  if (size.names > kNamesOfLargeAnswer) {
    const size_t bytes = MostOfStep(*response);
    if (bytes > kLargeAnswer) turn.Outside([&] { memory.resize(bytes); });
  }
  // A verb was parked and applied inside this batch: the answer has its result, for a repetition too.
  size_t room_in_place = kFoldedBytes;
  for (bool more = member->completions.any_waiting(); more; turn.Breathe()) {
    const std::vector<uint32_t> folded =
        member->completions.Fold(&room_in_place, Completions::kMostFolded, response);
    for (const uint32_t index : folded) member->owed.Fold(request.sequence(), index);
    turn.Worked(folded.size());
    more = folded.size() == Completions::kMostFolded;
  }
  // What goes on now may be much, and is not the batch's: that is over before.
  const bool others_go_on = session->readmit || session->parked.late().due(session->passed);
  if (!others_go_on) {
    EndApplying(turn, session);
    SetFreeBlocks(*session, response);
    AddPending(turn.now, member, stream, request.sequence(), response);
  }
  const std::string_view remembered =
      member->answers.Remember(request.sequence(), *response, std::move(memory));
  // The log says that the batch was done only once it says what it left behind.
  Settle(session);
  if (member->log != nullptr) member->log->EndBatch();
  Settle(session);
  if (!others_go_on) return remembered;
  whole.reset();
  EndApplying(turn, session);
  Settle(session);
  SetFreeBlocks(*session, response);
  AddPending(turn.now, member, stream, request.sequence(), response);
  return {};
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
    Acknowledge(turn, member, call.acknowledged());
    switch (member->answers.Look(call.sequence())) {
      case AnswerWindow::Seen::kForgotten:
        status = Forgotten(call.sequence(), *member);
        break;
      case AnswerWindow::Seen::kRemembered:
        return RepeatUnary(turn, member, call.sequence(), std::move(done));
      case AnswerWindow::Seen::kNew:
        break;
    }
  }
  if (!status.ok()) {
    SetStatus(status, result);
    turn.deferred.answers.push_back({{std::move(done)}, std::move(*result)});
    return;
  }
  session->applying = true;
  session->explained = 0;
  const absl::Cleanup applied = [session] { session->applying = false; };
  operation.set_after(call.after());
  const v1::Operation* const alone = &operation;
  CompareFirst(turn, *session, {&alone, 1});
  if (session->ended) {
    SetStatus(absl::AbortedError(session->end_reason), result);
    turn.deferred.answers.push_back({{std::move(done)}, std::move(*result)});
    return;
  }
  if (member->log != nullptr) member->log->BeginBatch();
  std::optional<Turn::Unbroken> whole;
  if (member->log != nullptr && IsWhole(*session, SizeOf({&alone, 1}), 1)) whole.emplace(turn);
  AnswerRoom room;
  ApplyOne(turn, member, operation, {.sequence = call.sequence(), .waiter = &done, .room = &room}, result);
  member->answers.Remember(call.sequence(), response);
  // The log says that the call was done only once it says what it left behind.
  Settle(session);
  if (member->log != nullptr) member->log->EndBatch();
  whole.reset();
  if (!result->parked()) turn.deferred.answers.push_back({{std::move(done)}, std::move(*result)});
  EndApplying(turn, session);
  Settle(session);
}

void Batches::Acknowledge(Turn& turn, Member* member, uint64_t through) {
  member->answers.Acknowledge(through);
  member->owed.HearAnswers(member->answers.acknowledged());
  bool more = true;
  while (more) {
    more = member->completions.Acknowledge(through, Turn::kNames, &member->owed);
    if (member->owed.any_heard()) ReleaseHeard(turn, member);
    if (!more) return;
    turn.Worked(Turn::kNames);
    turn.Breathe();
    AwaitOthers(turn, *member->session);
  }
}

void Batches::ReleaseHeard(Turn& turn, Member* member) {
  Session* session = member->session;
  if (session->ended) return;
  session->applying = true;
  const absl::Cleanup applied = [session] { session->applying = false; };
  // In the turn in which the log forgets the result it says that something of it is still under way.
  Settle(session);
  while (member->owed.any_heard() && !session->ended) {
    const std::vector<BlockRef> refs = member->owed.Take(Turn::kNames);
    session->parked.ReleaseLate(/*due=*/0, v1::Release(), refs);
    turn.Worked(refs.size());
    turn.Breathe();
  }
  EndApplying(turn, session);
  Settle(session);
}

void Batches::CompareFirst(Turn& turn, const Session& session,
                           absl::Span<const v1::Operation* const> operations) {
  const uint64_t until = turn.now + kCompareMs;
  for (const v1::Operation* const operation : operations) {
    if (session.ended || !session.ready || !state_.checks.compares() || turn.now >= until) return;
    if (!operation->has_match() || operation->after() > session.passed) continue;
    if (!Validate(turn, *operation).ok() || session.ended) continue;
    state_.checks.BeforeMatch(turn, session, operation->match(), until);
  }
}

void Batches::Settle(Session* session) const {
  session->CountParked();
  const bool unsettled =
      session->admitting || !session->parked.late().empty() || session->episodes.size() > 0 ||
      absl::c_any_of(session->members, [](const auto& member) { return member->owed.any_heard(); });
  for (const auto& member : session->members) {
    if (member->log != nullptr) member->log->SetUnsettled(unsettled);
  }
}

void Batches::AwaitOthers(Turn& turn, const Session& session) {
  while (session.applying) turn.Pause(Turn::Rest::kLong);
}

void Batches::EndApplying(Turn& turn, Session* session) {
  if (std::exchange(session->readmit, false) && !session->ended) Readmit(turn, session);
  if (session->parked.late().due(session->passed)) ReleaseLate(turn, session);
  state_.pressure.AfterVerbs(turn);
}

void Batches::Replay(Member* member, uint64_t sequence, v1::StepResponse* response) {
  const size_t there = member->answers.Replay(sequence, response);
  response->set_sequence(sequence);  // The answer to a unary call lacks it.
  const size_t most = AnswerWindow::kMostKept - std::min(member->answers.kept(), AnswerWindow::kMostKept);
  size_t room = kFoldedBytes - std::min(there, kFoldedBytes);
  for (const uint32_t index : member->completions.Fold(&room, most, response)) {
    member->owed.Fold(sequence, index);
    member->answers.Keep(sequence, index, response->results(static_cast<int>(index)));
  }
}

void Batches::RepeatUnary(Turn& turn, Member* member, uint64_t sequence, Waiter done) {
  v1::StepResponse first;
  Replay(member, sequence, &first);
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
  const absl::Status status = Validate(turn, operation);
  // An operation before this one may have ended it.
  if (session->ended) return SetStatus(absl::AbortedError(session->end_reason), result);
  if (!status.ok()) return SetStatus(status, result);
  const absl::StatusOr<ParkedVerbs::Wait> wait = WaitOf(turn, session, operation);
  if (!wait.ok()) return SetStatus(wait.status(), result);
  if (wait->due <= session->passed && !wait->held_up && !NeedsDevice(operation)) {
    if (operation.has_match() && operation.match().wait_ms() > 0 &&
        WaitForBelow(turn, member, operation, place)) {
      return result->set_parked(true);
    }
    if (session->ended) return SetStatus(absl::AbortedError(session->end_reason), result);
    return ApplyVerb(turn, member, operation, place.room, result);
  }
  turn.Worked(WeightOf(operation));
  if (operation.has_release() && !CheckRoom(*member, operation, wait->due).ok()) {
    return ParkLate(turn, session, operation.release(), wait->due, result);
  }
  const absl::Status parked = ParkOrStart(turn, member, operation, place, *wait);
  if (!parked.ok()) return SetStatus(parked, result);
  result->set_parked(true);
}

absl::Status Batches::Validate(Turn& turn, const v1::Operation& operation) const {
  const auto groups = static_cast<uint32_t>(state_.facts.layout.groups_size());
  if (!NamesLists(operation.verb_case()) || WeightOf(operation) <= Turn::kNames)
    return ValidateOperation(operation, groups);
  // That no block is named twice takes as long as several parts do, and needs nothing of the space.
  absl::Status status;
  turn.Outside([&] { status = ValidateOperation(operation, groups); });
  return status;
}

void Batches::Count(v1::Operation::VerbCase verb, const v1::OperationResult& result) {
  state_.counters.errors[verb] += result.code() != 0;
  state_.counters.refused_blocks[verb] += static_cast<uint64_t>(RefusedBlocks(result));
}

void Batches::ParkLate(Turn& turn, Session* session, const v1::Release& release, uint64_t due,
                       v1::OperationResult* result) {
  std::optional<size_t> from = 0;
  while ((from = verbs_.ReleaseLate(session, release, due, *from, result)).has_value()) {
    turn.Worked(Turn::kNames);
    turn.Breathe();
    if (!session->ended) continue;
    result->clear_result();
    return SetStatus(absl::AbortedError(session->end_reason), result);
  }
}

absl::StatusOr<ParkedVerbs::Wait> Batches::WaitOf(Turn& turn, Session* session,
                                                  const v1::Operation& operation) {
  ParkedVerbs::Wait wait{.due = operation.after()};
  if (!session->parked.AnyWaitFor(operation)) return wait;
  if (CountBlocks(operation) <= Turn::kNames) return session->parked.WaitOf(operation);
  RETURN_IF_ERROR(
      ForBlocks(turn, operation, session, [&](Blocks part) { session->parked.Extend(part, &wait); }));
  return wait;
}

absl::Status Batches::ForBlocks(Turn& turn, const v1::Operation& operation, const Session* session,
                                absl::FunctionRef<void(Blocks part)> visit) {
  const std::vector<uint32_t> blocks = BlockIdsOf(operation);
  return InParts(turn, *session, Blocks(blocks), [&](size_t, Blocks part) { visit(part); });
}

absl::Status Batches::StandLast(Turn& turn, ParkedVerb* verb) {
  Session* const session = verb->member->session;
  verb->gate = session->parked.Enter();
  return ForBlocks(turn, verb->operation, session,
                   [&](Blocks part) { session->parked.StandLast(verb->gate, part); });
}

void Batches::Leave(Turn& turn, Session* session, BlockGates::Id gate) {
  while (session->parked.Leave(gate, Turn::kNames)) {
    turn.Worked(Turn::kNames);
    turn.Breathe();
  }
}

absl::Status Batches::ParkOrStart(Turn& turn, Member* member, const v1::Operation& operation,
                                  const Place& place, const ParkedVerbs::Wait& wait) {
  Session* session = member->session;
  RETURN_IF_ERROR(CheckRoom(*member, operation, wait.due));
  ParkedVerb verb{.member = member,
                  .sequence = place.sequence,
                  .index = place.index,
                  .operation = operation,
                  .on_stream = place.waiter == nullptr,
                  .bytes = ParkedVerbs::BytesOf(operation, session->terms.ranks)};
  const bool on_stream = place.waiter == nullptr;
  const bool for_step = wait.due > session->passed;
  if (!for_step && !wait.held_up) {
    const absl::Status started = StartOnDevice(turn, &verb, place.waiter);
    if (!started.ok()) {
      Leave(turn, session, verb.gate);
      return started;
    }
    if (member->log != nullptr) member->log->Park(place.sequence, place.index, on_stream, operation);
    return absl::OkStatus();
  }
  if (for_step) {
    RETURN_IF_ERROR(
        ForBlocks(turn, operation, session, [&](Blocks part) { session->parked.Name(wait.due, part); }));
  } else {
    RETURN_IF_ERROR(StandLast(turn, &verb));
  }
  if (member->log != nullptr) member->log->Park(place.sequence, place.index, on_stream, operation);
  if (place.waiter != nullptr) verb.waiters.push_back(std::move(*place.waiter));
  if (for_step) {
    session->parked.Park(wait.due, std::move(verb));
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
  if (names <= ParkedVerbs::kMaxNames) {
    RETURN_IF_ERROR(CheckBytes(what, member, operation));
    return CheckCompletionRoom(what, member);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", parked.verbs, " verbs with ", parked.blocks, " blocks are parked, ",
                   member.completions.size(), " completions have not been acknowledged; limit ",
                   ParkedVerbs::kMaxNames, " in all; step ", session.passed, " is passed"));
}

absl::Status Batches::CheckBytes(const std::string& what, const Member& member,
                                 const v1::Operation& operation) const {
  const ParkedBytes& parked = member.session->parked.bytes();
  const size_t bytes = ParkedVerbs::BytesOf(operation, member.session->terms.ranks);
  if (parked.bytes() + bytes <= parked.limit()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(what, ": it takes ", bytes, " bytes, and what is parked ",
                                                   parked.bytes(), "; limit ", parked.limit(), ", with ",
                                                   ParkedBytes::bytes_of_all(), " bytes of all sessions"));
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
  RETURN_IF_ERROR(CheckBytes("device operation", member, operation));
  return CheckCompletionRoom("device operation", member);
}

absl::Status Batches::StartOnDevice(Turn& turn, ParkedVerb* verb, Waiter* waiter) {
  Session* session = verb->member->session;
  MemberLog* const log = verb->member->log.get();
  // Until the log says which they are, the session holds blocks that nobody knows of. Whoever called settles it anew.
  const bool within_another = std::exchange(session->admitting, true);
  const absl::Cleanup over = [&] { session->admitting = within_another; };
  Settle(session);
  absl::StatusOr<std::shared_ptr<DeviceOperation>> operation =
      device_verbs_.Prepare(turn, session, verb->operation);
  if (!operation.ok()) return operation.status();
  if ((*operation)->lacks_blocks) {
    // Blocks may come while the turn pauses.
    session->lacks_blocks = true;
    lacking_[session->terms.id] = session->weak_from_this();
    if (verb->gate == 0) RETURN_IF_ERROR(StandLast(turn, verb));
    if (waiter != nullptr) verb->waiters.push_back(std::move(*waiter));
    session->parked.ParkBehind(std::move(*verb));
    return absl::OkStatus();
  }
  const size_t named = WeightOf(verb->operation);
  std::vector<uint32_t> blocks;
  if (verb->gate == 0) {
    blocks = BlockIdsOf(verb->operation);
    verb->gate = session->parked.Enter();
  }
  for (const BlockRef ref : (*operation)->destinations) blocks.push_back(Index(ref.id));
  // The turn may pause here, and not from Submit on: the answer that says that it is parked is remembered before it has one.
  RETURN_IF_ERROR(InParts(turn, *session, Blocks(blocks),
                          [&](size_t, Blocks part) { session->parked.StandFirst(verb->gate, part); }));
  RETURN_IF_ERROR(device_verbs_.Submit(turn, *operation));
  if (log != nullptr) log->Lend(verb->sequence, verb->index, (*operation)->destinations);
  if (waiter != nullptr) verb->waiters.push_back(std::move(*waiter));
  verb->operation.Clear();  // The device operation has it.
  session->parked.Start((*operation)->id, std::move(*verb), named);
  return absl::OkStatus();
}

bool Batches::WaitForBelow(Turn& turn, Member* member, const v1::Operation& operation, const Place& place) {
  Session* session = member->session;
  Below& below = state_.below;
  const v1::Match& match = operation.match();
  if (!below.on() || !session->ready || session->warming_up() > 0) return false;
  turn.Worked(Below::Looked(CountNames(operation)) + CountNames(operation));
  const std::optional<uint64_t> tokens = verbs_.ResidentTokens(turn, *session, match);
  if (!tokens.has_value()) return false;
  Below::Found found = below.Look(match, *tokens, Below::Unknown::kTried);
  if (found.blocks.empty()) return false;
  if (operation.ByteSizeLong() > Below::kMostWaitBytes || !CheckRoom(*member, operation, 0).ok()) {
    ++below.counters.refused_waits;
    return false;
  }
  if (!below.IsWorth(found, *tokens, match.wait_ms())) return false;
  const auto promotion = below.Begin(session->terms.id, turn.now, match.wait_ms(), std::move(found));
  ++(promotion == nullptr ? below.counters.refused_waits : below.counters.waits);
  if (promotion == nullptr) return false;
  const bool on_stream = place.waiter == nullptr;
  if (member->log != nullptr) member->log->Park(place.sequence, place.index, on_stream, operation);
  ParkedVerb verb{.member = member,
                  .sequence = place.sequence,
                  .index = place.index,
                  .operation = operation,
                  .on_stream = on_stream,
                  .bytes = ParkedVerbs::BytesOf(operation, session->terms.ranks),
                  .promotion = promotion->id};
  if (!on_stream) verb.waiters.push_back(std::move(*place.waiter));
  session->parked.ParkBehind(std::move(verb));
  waiting_[session->terms.id] = session->weak_from_this();
  turn.deferred.promotions.push_back(promotion);
  return true;
}

void Batches::AnswerWaiting(Turn& turn, uint64_t id) {
  const auto waits = waiting_.find(id);
  if (waits == waiting_.end()) return;
  const std::shared_ptr<Session> session = waits->second.lock();
  const bool over = session == nullptr || session->ended;
  if (over || !state_.below.anyone_waits(id)) waiting_.erase(waits);
  if (over) return;
  if (session->applying) {
    session->readmit = true;
  } else {
    Readmit(turn, session.get());
    Settle(session.get());
  }
}

void Batches::Resume(Turn& turn, ParkedVerb verb) {
  Session* const session = verb.member->session;
  if (verb.promotion != 0 && state_.below.UnderWay(verb.promotion)) {
    turn.Worked(kNamesOfAMove);
    return session->parked.ParkBehind(std::move(verb));
  }
  // While it is looked at it is parked nowhere. If its session ends meanwhile it is answered here.
  absl::Status status;
  if (verb.gate == 0) {
    ParkedVerbs::Wait wait;
    status = ForBlocks(turn, verb.operation, session, [&](Blocks part) {
      session->parked.Unname(part);
      if (session->parked.AnyWaitFor(verb.operation)) session->parked.Extend(part, &wait);
    });
    if (status.ok() && wait.held_up) {
      status = StandLast(turn, &verb);
      if (status.ok()) return session->parked.ParkBehind(std::move(verb));
    }
  }
  v1::OperationResult result;
  const Unacknowledged& unheard = verb.member->completions.bytes();
  if (status.ok() && NeedsDevice(verb.operation)) {
    turn.Worked(WeightOf(verb.operation));
    // There was room for its result when it was parked; those of verbs in front of it may have taken that.
    if (verb.on_stream) status = CheckCompletionRoom("device operation", *verb.member);
    if (status.ok()) status = StartOnDevice(turn, &verb, nullptr);
    if (status.ok()) return;
  }
  if (!status.ok()) {
    SetStatus(status, &result);
  } else {
    AnswerRoom room;
    if (verb.on_stream) room = AnswerRoom::OfCompletions(unheard.bytes(), unheard.limit());
    ApplyVerb(turn, verb.member, verb.operation, &room, &result);
  }
  turn.Worked(kNamesOfOperation);
  Count(verb.operation.verb_case(), result);
  const BlockGates::Id gate = verb.gate;
  state_.sessions.Complete(turn, std::move(verb), result);
  Leave(turn, session, gate);
}

void Batches::OnOperationDone(Turn& turn, DeviceOperation* operation) {
  Session* session = operation->session.get();
  const auto is_it = [operation](const auto& other) { return other.get() == operation; };
  auto& listed = session->device_operations;
  if (std::none_of(listed.begin(), listed.end(), is_it)) return;
  // As long as it is listed, nothing that its session holds goes to others, if that ends meanwhile.
  if (!session->ended) device_verbs_.Commit(turn, operation).IgnoreError();
  std::erase_if(listed, is_it);
  if (session->ended) {
    if (listed.empty() && session->free_when_over) state_.sessions.Free(turn, session);
    return;
  }
  if (!operation->status.ok()) {
    operation->result.Clear();
    SetStatus(operation->status, &operation->result);
  }
  ParkedVerb verb = session->parked.Finish(operation->id);
  const BlockGates::Id gate = verb.gate;
  if (state_.facts.kept && operation->status.ok())
    verb.member->owed.Add(verb.sequence, verb.index, verb.on_stream, std::move(operation->released));
  state_.sessions.Complete(turn, std::move(verb), operation->result);
  Leave(turn, session, gate);
  // A batch that is half applied may name what an operation would be prepared on, or lease its destinations.
  if (session->applying) {
    session->readmit = true;
  } else if (!session->ended) {
    Readmit(turn, session);
  }
  Settle(session);
  state_.pressure.AfterVerbs(turn);
}

void Batches::GoOnWhenReady(const std::shared_ptr<Session>& session) {
  session->lacks_blocks = true;
  lacking_[session->terms.id] = session;
}

void Batches::RetryLackingBlocks(Turn& turn) {
  for (auto& [id, weak] : std::exchange(lacking_, {})) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr || session->ended) continue;
    if (session->applying) {
      // The next round looks. If a batch, or a round of admissions, began anew whenever blocks may have come, it need not end.
      lacking_[id] = weak;
      continue;
    }
    if (session->parked.late().due(session->passed)) ReleaseLate(turn, session.get());
    Settle(session.get());
    if (!session->lacks_blocks) continue;
    if (session->ready) {
      Readmit(turn, session.get());
      Settle(session.get());
    } else {
      lacking_[id] = weak;
    }
  }
}

void Batches::Readmit(Turn& turn, Session* session) {
  // A batch of the session waits until this is over, and an operation that ends meanwhile leaves word.
  const bool within_batch = std::exchange(session->applying, true);
  if (!within_batch) session->explained = 0;
  const bool within_another = std::exchange(session->admitting, true);
  Settle(session);
  // What its calls would wait for may be as much as a large call is, whoever let it go.
  ++session->large_calls;
  do {
    session->readmit = false;
    // One that has slabs to map lacks blocks until it has mapped them.
    if (session->ready) {
      session->lacks_blocks = false;
      session->parked.AdmitLacking();
    } else {
      // What waited for a promotion that is over goes on once they are mapped, and nobody else says when that is.
      session->lacks_blocks = true;
      lacking_[session->terms.id] = session->weak_from_this();
    }
    while (true) {
      turn.Breathe();
      std::optional<ParkedVerb> verb = session->parked.Admit();
      if (!verb.has_value()) break;
      Resume(turn, *std::move(verb));
    }
  } while (session->readmit && !session->ended);
  --session->large_calls;
  session->admitting = within_another;
  session->applying = within_batch;
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

void Batches::ApplyVerb(Turn& turn, Member* member, const v1::Operation& operation, AnswerRoom* room,
                        v1::OperationResult* result) {
  switch (operation.verb_case()) {
    case v1::Operation::kFence:
      return Fence(turn, member, operation.fence(), result);
    case v1::Operation::kWarmupDone:
      member->warmup_done = true;
      if (member->log != nullptr) member->log->OnWarmupDone();
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
    case v1::Operation::kPlanBudgets: {
      turn.Worked(NumbersOf(operation));
      absl::Status planned = PlanLayerBudgets(operation.plan_budgets(), {}, result->mutable_plan_budgets());
      if (planned.ok()) planned = room->Take("plan_budgets", result->plan_budgets().ByteSizeLong());
      return Answer(planned, result);
    }
    case v1::Operation::kPutEpisode:
      turn.Worked(NumbersOf(operation));
      return Answer(
          episodes_.Put(turn, member->session, operation.put_episode(), result->mutable_put_episode()),
          result);
    case v1::Operation::kChooseEpisode:
      turn.Worked(NumbersOf(operation));
      return Answer(episodes_.Choose(turn, member->session, operation.choose_episode(), room,
                                     result->mutable_choose_episode()),
                    result);
    case v1::Operation::kScore:
    case v1::Operation::kSelect:
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
  if (member->log != nullptr) member->log->SetFence(member->fence);
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

bool Batches::TakePending(uint64_t now, Member* member, const StreamListener* stream,
                          v1::StepResponse* response) {
  // A stream that was replaced delivers nothing any more, and the new one would confirm what it took.
  if (stream != nullptr && member->listener.get() != stream) return false;
  if (!member->pending()) return false;
  member->completions.Take(kResponseCompletionBytes, response);
  member->notices.Take(now, response);
  return true;
}

void Batches::AddPending(uint64_t now, Member* member, const StreamListener* stream, uint64_t sequence,
                         v1::StepResponse* response) {
  if (stream != nullptr && member->listener.get() != stream) return;
  TakePending(now, member, stream, response);
  if (member->completions.any_waiting()) state_.sessions.Touch(member);
  if (sequence != 0) member->completions.ConfirmBy(sequence);
}

}  // namespace kvpool
