#include "server/replacement/policies/workload_aware.h"

#include <algorithm>
#include <cmath>

namespace kvpool {
namespace {

// The time that blocks stay is averaged over about so many.
constexpr double kStayBlocks = 256;

}  // namespace

WorkloadAwarePolicy::WorkloadAwarePolicy(const PolicyOptions& options)
    : nodes_(options.max_blocks),
      places_(options.max_blocks),
      heaps_(kClasses, OfferHeap(&places_)),
      reuse_(kClasses, options.max_blocks) {}

int WorkloadAwarePolicy::ClassOf(const Node& node) {
  if (node.category != 0) return kTurnClasses * kHitClasses + node.category - 1;
  return std::min<int>(node.turn, kTurnClasses - 1) * kHitClasses + std::min<int>(node.hits, kHitClasses - 1);
}

double WorkloadAwarePolicy::ChanceOfReuse(int cls, uint64_t waited_ms) const {
  const double rate = 1 / reuse_.MeanWait(cls), share = reuse_.ShareOfBegun(cls);
  const double yet = share * std::exp(-rate * static_cast<double>(waited_ms));
  return yet * -std::expm1(-rate * stay_ms_) / (1 - share + yet);
}

void WorkloadAwarePolicy::OnInsert(BlockId block, const Content& content) {
  now_ms_ = std::max(now_ms_, content.now_ms);
  const Node& front = nodes_[Index(content.parent)];
  nodes_[Index(block)] = {
      .hash = content.hash,
      .turn = turns_.OnInsert(block, content, static_cast<uint8_t>(front.turn)),
      .depth = content.parent == kNullBlock ? 0 : front.depth + 1,
      .hits = static_cast<uint16_t>(reuse_.End(content.hash, content.now_ms).has_value() ? 1 : 0)};
}

void WorkloadAwarePolicy::OnHit(BlockId block, uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Node& node = nodes_[Index(block)];
  node.hits = static_cast<uint16_t>(std::min(node.hits + 1, 0xffff));
  node.category = 0;
  reuse_.End(node.hash, now_ms);
}

void WorkloadAwarePolicy::OnHint(BlockId block, const UseHint& hint) {
  if (hint.category != 0) nodes_[Index(block)].category = std::min(hint.category, kMaxCategory);
}

void WorkloadAwarePolicy::OnUsed(BlockId block, uint64_t now_ms) {
  Node& node = nodes_[Index(block)];
  now_ms_ = std::max(now_ms_, now_ms);
  turns_.OnUsed(block);
  node.used_ms = now_ms;
  node.cls = static_cast<uint64_t>(ClassOf(node));
  reuse_.Begin(node.hash, static_cast<int>(node.cls), now_ms);
}

void WorkloadAwarePolicy::OnOffer(BlockId block) {
  const Node& node = nodes_[Index(block)];
  heaps_[node.cls].Insert(Index(block), {.major = node.used_ms, .minor = UINT32_MAX - node.depth});
  ++offered_;
}

void WorkloadAwarePolicy::OnWithdraw(BlockId block) {
  heaps_[nodes_[Index(block)].cls].Remove(Index(block));
  --offered_;
}

void WorkloadAwarePolicy::OnEvict(BlockId block) {
  const auto stayed = static_cast<double>(now_ms_ - nodes_[Index(block)].used_ms);
  stay_ms_ = std::isinf(stay_ms_) ? stayed : stay_ms_ + (stayed - stay_ms_) / kStayBlocks;
}

BlockId WorkloadAwarePolicy::Victim(uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  uint32_t least = 0;
  double least_chance = 0;
  for (int cls = 0; cls < kClasses; ++cls) {
    const uint32_t b = heaps_[cls].first();
    if (b == 0) continue;
    const double chance = ChanceOfReuse(cls, now_ms_ - nodes_[b].used_ms);
    const bool later = least != 0 && chance == least_chance && nodes_[b].depth > nodes_[least].depth;
    if (least != 0 && chance >= least_chance && !later) continue;
    least = b;
    least_chance = chance;
  }
  return BlockId{least};
}

void WorkloadAwarePolicy::Prefetch(BlockId block, uint64_t) const {
  nodes_.Prefetch(Index(block));
  places_.Prefetch(Index(block));
}

}  // namespace kvpool
