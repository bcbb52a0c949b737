#include "server/replacement/policies/cold_rl.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

// Candidates ranked between two looks at the clock: some 5 us of work.
constexpr uint32_t kSlice = 8;
// The means are over about so many inserts.
constexpr double kInsertWindow = 4096;
// A spared block must promise this share of the mean hits of a block, which a few popular blocks drive up.
constexpr float kSpareFrom = 0.4f;

Ranker RankerOf(const QNetwork& network) {
  return [network](const Candidates& candidates, absl::FunctionRef<bool()> late) -> std::optional<Ranking> {
    const size_t count = candidates.blocks.size();
    std::vector<float> merit(count);
    for (size_t i = 0; i < count; ++i) {
      const QNetwork::Q q = network.Evaluate(&candidates.features[i * QNetwork::kInputs]);
      merit[i] = q.keep - q.evict;
      if (i % kSlice == kSlice - 1 && late()) return std::nullopt;
    }
    Ranking ranking;
    ranking.order.resize(count);
    std::iota(ranking.order.begin(), ranking.order.end(), 0u);
    std::stable_sort(ranking.order.begin(), ranking.order.end(),
                     [&](uint32_t a, uint32_t b) { return merit[a] < merit[b]; });
    const auto worth = std::count_if(merit.begin(), merit.end(),
                                     [&](float m) { return m > kSpareFrom * candidates.hits_per_insert; });
    ranking.spared = std::min(static_cast<uint32_t>(worth), candidates.may_leave);
    if (late()) return std::nullopt;
    return ranking;
  };
}

}  // namespace

std::array<float, QNetwork::kInputs> ColdRlView::Features() const {
  // The binary logarithm of the turnovers, from a 256th of one on, scaled to about -1 to 1.
  const auto time = [](double turnovers) {
    return static_cast<float>(std::log2(std::min(turnovers, 1e6) + 1.0 / 256) / 8);
  };
  const auto count = [](double n) { return static_cast<float>(std::log2(n + 1) / 8); };
  return {time(age),   count(size),
          count(hits), inter_arrival < 0 ? 2.0f : time(inter_arrival),
          time(idle),  static_cast<float>(std::log2(cost))};
}

WeightsShape ColdRlPolicy::Shape() {
  return {.policy = "cold_rl",
          .format = "1",
          .features = "age,size,hits,inter_arrival,idle,cost",
          .tensors = QNetwork::Tensors()};
}

ColdRlPolicy::ColdRlPolicy(const PolicyOptions& options)
    : ranker_(std::make_shared<const Ranker>(RankerOf(QNetwork(*options.weights)))),
      cost_per_depth_(options.cost_per_depth),
      lru_(options),
      nodes_(options.max_blocks) {}

void ColdRlPolicy::Access(Node* node, uint64_t now_ms) {
  node->gap_ms = static_cast<uint32_t>(std::min<uint64_t>(now_ms - node->accessed_ms, kNoGap - 1));
  node->hits = std::min<uint32_t>(node->hits + 1u, kMostHits);
  node->accessed_ms = now_ms;
}

void ColdRlPolicy::OnInsert(BlockId block, const Content& content) {
  lru_.OnInsert(block, content);
  const uint32_t depth = content.parent == kNullBlock ? 0 : nodes_[Index(content.parent)].depth + 1u;
  Node& node = nodes_[Index(block)];
  node = {.hash = content.hash,
          .inserted_ms = content.now_ms,
          .offered = 0,
          .accessed_ms = content.now_ms,
          .gap_ms = kNoGap,
          .hits = 0,
          .depth = std::min(depth, kMostDepth)};
  if (const uint64_t* const before = ghosts_.Find(content.hash)) {
    node.accessed_ms = *before >> 16;
    node.hits = *before & kMostHits;
    Access(&node, content.now_ms);
    ghosts_.Remove(content.hash);
  }
  ++resident_;
  ++inserts_;
  if (inserts_ > 1) {
    const auto gap = static_cast<double>(content.now_ms - last_insert_ms_);
    insert_gap_ms_ += (gap - insert_gap_ms_) / std::min(static_cast<double>(inserts_ - 1), kInsertWindow);
  }
  last_insert_ms_ = content.now_ms;
  const double hits = std::exchange(hits_since_insert_, 0);
  hits_per_insert_ += (hits - hits_per_insert_) / std::min(static_cast<double>(inserts_), kInsertWindow);
}

void ColdRlPolicy::OnHit(BlockId block, uint64_t now_ms) {
  Access(&nodes_[Index(block)], now_ms);
  ++hits_since_insert_;
}

void ColdRlPolicy::OnEvict(BlockId block) {
  const Node& node = nodes_[Index(block)];
  ghosts_.Add(node.hash, node.accessed_ms << 16 | node.hits);
  ghosts_.Trim(resident_);
  --resident_;
}

ColdRlView ColdRlPolicy::ViewOf(const Node& node, uint64_t now_ms) const {
  const double turnover = turnover_ms();
  const auto since = [&](uint64_t ms) { return static_cast<double>(now_ms - ms) / turnover; };
  return {.age = since(node.inserted_ms),
          .size = node.depth + 1.0,
          .hits = static_cast<double>(node.hits),
          .inter_arrival = node.gap_ms == kNoGap ? -1 : node.gap_ms / turnover,
          .idle = since(node.accessed_ms),
          .cost = 1 + cost_per_depth_ * node.depth};
}

void ColdRlPolicy::Show(uint64_t now_ms, Candidates* out) {
  lru_.Oldest(kCandidates, &out->blocks);
  out->hits_per_insert = static_cast<float>(hits_per_insert_);
  out->may_leave = std::max(static_cast<uint32_t>(out->blocks.size()) / kLeaveOneIn, 1u);
  for (const BlockId block : out->blocks) nodes_.Prefetch(Index(block));
  for (const BlockId block : out->blocks) {
    out->last_uses.push_back(lru_.last_use(block));
    const auto features = ViewOf(nodes_[Index(block)], now_ms).Features();
    out->features.insert(out->features.end(), features.begin(), features.end());
  }
}

void ColdRlPolicy::OnSpared(BlockId block) {
  lru_.OnWithdraw(block);
  lru_.OnUsed(block, 0);
  lru_.OnOffer(block);
}

}  // namespace kvpool
