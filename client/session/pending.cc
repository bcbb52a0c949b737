// Pending<…>: the engine's thread waits for an AnswerState, converts it, or abandons it.
#include <utility>

#include "client/session.h"
#include "client/session/answer_state.h"
#include "client/session/session_rep.h"

namespace kvpool {
namespace {

absl::StatusOr<MatchHit> Take(AnswerState* state, MatchHit*) {
  const v1::MatchResult& result = state->result.match();
  MatchHit hit;
  hit.tokens = result.tokens();
  hit.miss = result.miss();
  hit.below_tokens = result.below_tokens();
  hit.below_ms = result.below_ms();
  hit.may_be_below = result.may_be_below();
  for (const v1::GroupHit& group : result.groups()) {
    Blocks& blocks = hit.groups.emplace_back(state->session, group.blocks_size());
    for (int i = 0; i < group.blocks_size(); ++i) blocks.slots()[i] = BlockRef::Unpack(group.blocks(i));
  }
  return hit;
}

absl::StatusOr<SealOutcome> Take(AnswerState* state, SealOutcome*) {
  const v1::SealResult& result = state->result.seal();
  SealOutcome outcome;
  outcome.duplicates = Blocks(state->session, state->Holds());
  outcome.canonical.reserve(result.canonical_size());
  for (const uint64_t ref : result.canonical()) outcome.canonical.push_back(BlockRef::Unpack(ref));
  outcome.refused.assign(result.refused().begin(), result.refused().end());
  return outcome;
}

absl::StatusOr<Flushed> Take(AnswerState*, Flushed*) { return Flushed(); }

absl::StatusOr<v1::ScoreResult> Take(AnswerState* state, v1::ScoreResult*) {
  return std::move(*state->result.mutable_score());
}
absl::StatusOr<v1::SelectResult> Take(AnswerState* state, v1::SelectResult*) {
  return std::move(*state->result.mutable_select());
}
absl::StatusOr<v1::PruneResult> Take(AnswerState* state, v1::PruneResult*) {
  return std::move(*state->result.mutable_prune());
}
absl::StatusOr<v1::CompactResult> Take(AnswerState* state, v1::CompactResult*) {
  return std::move(*state->result.mutable_compact());
}
absl::StatusOr<v1::PlanBudgetsResult> Take(AnswerState* state, v1::PlanBudgetsResult*) {
  return std::move(*state->result.mutable_plan_budgets());
}
absl::StatusOr<v1::PutEpisodeResult> Take(AnswerState* state, v1::PutEpisodeResult*) {
  return std::move(*state->result.mutable_put_episode());
}
absl::StatusOr<EpisodeHit> Take(AnswerState* state, EpisodeHit*) {
  const v1::ChooseEpisodeResult& result = state->result.choose_episode();
  EpisodeHit hit{.name = result.name(), .similarity = result.similarity()};
  for (const v1::Sequence& sequence : result.sequences()) {
    EpisodeTable& table = hit.tables.emplace_back();
    table.group = sequence.group();
    table.blocks = Blocks(state->session, sequence.blocks_size());
    for (int i = 0; i < sequence.blocks_size(); ++i) {
      table.blocks.slots()[i] = BlockRef::Unpack(sequence.blocks(i));
    }
    table.last_block_tokens = sequence.last_block_tokens();
  }
  return hit;
}

}  // namespace

template <typename Answer>
bool Pending<Answer>::Ready() const {
  // It may lie in the socket, where nobody has looked since.
  return state_ != nullptr && state_->rep->Look([this] { return state_->ready(); });
}

template <typename Answer>
absl::StatusOr<Answer> Pending<Answer>::Wait(Deadline deadline) {
  if (state_ == nullptr) return absl::FailedPreconditionError("the answer was taken already");
  AnswerState* state = state_.get();
  if (!state->rep->Await(deadline, [state] { return state->ready(); })) {
    return absl::DeadlineExceededError("no answer from the daemon in time");
  }
  const std::shared_ptr<AnswerState> taken = std::move(state_);
  if (!state->status.ok()) return state->status;
  return Take(state, static_cast<Answer*>(nullptr));
}

template <typename Answer>
void Pending<Answer>::Abandon() {
  if (state_ == nullptr) return;
  // Either the stream's thread finds it abandoned and returns the holds, or they have come
  // and are returned here.
  if (state_->phase.exchange(AnswerState::kAbandoned, std::memory_order_acq_rel) == AnswerState::kReady) {
    state_->session->Release(state_->Holds(), 0);
  }
  state_.reset();
}

template class Pending<MatchHit>;
template class Pending<SealOutcome>;
template class Pending<Flushed>;
template class Pending<v1::ScoreResult>;
template class Pending<v1::SelectResult>;
template class Pending<v1::PruneResult>;
template class Pending<v1::CompactResult>;
template class Pending<v1::PlanBudgetsResult>;
template class Pending<v1::PutEpisodeResult>;
template class Pending<EpisodeHit>;

}  // namespace kvpool
