#include "server/replacement/policies/predicted_policy.h"

#include <algorithm>
#include <optional>

namespace kvpool {

PredictedPolicy::PredictedPolicy(const PolicyOptions& options, Guard guard)
    : guard_(guard),
      nodes_(options.max_blocks),
      places_(options.max_blocks),
      heap_(&places_),
      lru_(options),
      shadow_(options.max_blocks),
      reuse_(kClasses, options.max_blocks) {}

int PredictedPolicy::ClassOf(const Node& node) {
  const int hits = std::min<int>(node.hits, kHitClasses - 1);
  const int turn = std::min<int>(node.turn, kTurnClasses - 1);
  return (hits * kTurnClasses + turn) * 2 + static_cast<int>(node.tail);
}

void PredictedPolicy::OnInsert(BlockId block, const Content& content) {
  const uint8_t front = static_cast<uint8_t>(nodes_[Index(content.parent)].turn);
  Node& node = nodes_[Index(block)];
  node = {.hash = content.hash, .turn = turns_.OnInsert(block, content, front)};
  // A content that comes back counts as found again, though not in the cache.
  if (const std::optional<int> cls = reuse_.End(content.hash, inserted_)) {
    node.hits = static_cast<uint64_t>(*cls / (kTurnClasses * 2) + 1);
  }
  ++inserted_;
  ++resident_;
  shadow_.OnMiss(content.hash);
  lru_.OnInsert(block, content);
}

void PredictedPolicy::OnHit(BlockId block, uint64_t) {
  Node& node = nodes_[Index(block)];
  node.hits = std::min<uint64_t>(node.hits + 1, 255);
  node.said = static_cast<uint64_t>(Reuse::kUnknown);
  node.tail = 0;
  reuse_.End(node.hash, inserted_);
  shadow_.OnHit(node.hash);
}

void PredictedPolicy::OnHint(BlockId block, const UseHint& hint) {
  if (hint.reuse != Reuse::kUnknown) nodes_[Index(block)].said = static_cast<uint64_t>(hint.reuse);
}

void PredictedPolicy::OnUsed(BlockId block, uint64_t now_ms) {
  Node& node = nodes_[Index(block)];
  node.last_use = ++uses_;
  if (turns_.OnUsed(block)) node.tail = 1;
  const int cls = ClassOf(node);
  const auto said = static_cast<Reuse>(node.said);
  node.returns = said == Reuse::kUnknown ? reuse_.ChanceOfEnded(cls) > kLikely : said == Reuse::kExpected;
  const uint64_t horizon = kHorizon * resident_;
  if (inserted_ > horizon) reuse_.GiveUp(inserted_ - horizon);
  reuse_.Begin(node.hash, cls, inserted_);
  shadow_.OnUsed(node.hash);
  lru_.OnUsed(block, now_ms);
  Use(&node);
}

void PredictedPolicy::OnOffer(BlockId block) {
  heap_.Insert(Index(block), RankOfNode(nodes_[Index(block)]));
  lru_.OnOffer(block);
}

void PredictedPolicy::OnWithdraw(BlockId block) {
  heap_.Remove(Index(block));
  lru_.OnWithdraw(block);
}

void PredictedPolicy::OnEvict(BlockId block) {
  --resident_;
  shadow_.OnEvict(nodes_[Index(block)].hash);
}

BlockId PredictedPolicy::Victim(uint64_t now_ms) {
  if (heap_.empty()) return kNullBlock;
  BeforeVictim(nodes_[heap_.first()]);
  const bool own = guard_ == Guard::kNone || shadow_.PolicyMayChoose();
  return own ? BlockId{heap_.first()} : lru_.Victim(now_ms);
}

void PredictedPolicy::Prefetch(BlockId block, uint64_t hash) const {
  nodes_.Prefetch(Index(block));
  places_.Prefetch(Index(block));
  lru_.Prefetch(block, hash);
}

}  // namespace kvpool
