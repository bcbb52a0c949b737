// Cold-RL (arXiv 2508.12485): of the coldest blocks on offer, a dueling Q-network chooses those that leave.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_COLD_RL_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_COLD_RL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "server/base/virtual_array.h"
#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/q_network.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policies/lru.h"
#include "server/replacement/thinking_policy.h"

namespace kvpool {

// What the network sees of a block. Times are in turnovers: the time in which as many blocks are inserted as are
// resident. So weights fit other capacities, and traces that run faster or slower.
struct ColdRlView {
  double age = 0;   // Since its content was inserted.
  double size = 1;  // Blocks of its chain up to it: what an object of several blocks holds while it stays.
  double hits = 0;  // Also before it last left, while that is remembered.
  double inter_arrival = -1;  // Between its last two accesses; negative: there was one.
  double idle = 0;  // Since its last access. A policy is offered nothing whose retention runs: in its place.
  double cost = 1;  // Of computing it anew, relative to the first of a chain.

  std::array<float, QNetwork::kInputs> Features() const;
};

// The order of last use decides which blocks are judged, and is the answer where no decision is there in time. Being
// spared counts as a use: a few blocks worth keeping must not stand in front of all others for good.
class ColdRlPolicy final : public ThinkingPolicy {
 public:
  static constexpr uint32_t kCandidates = 64;
  // One in so many candidates leaves by a decision, and as many may be spared. Fewer is more thinking for each block.
  static constexpr uint32_t kLeaveOneIn = 4;

  static WeightsShape Shape();
  // REQUIRES: options.weights are of that shape.
  explicit ColdRlPolicy(const PolicyOptions& options);

  std::string_view name() const override { return "cold_rl"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t now_ms) override { lru_.OnUsed(block, now_ms); }
  void OnOffer(BlockId block) override { lru_.OnOffer(block); }
  void OnWithdraw(BlockId block) override { lru_.OnWithdraw(block); }
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override { return lru_.Victim(now_ms); }
  void Prefetch(BlockId block, uint64_t hash) const override {
    lru_.Prefetch(block, hash);
    ghosts_.Prefetch(hash);
    nodes_.Prefetch(Index(block));
  }
  uint32_t offered() const override { return lru_.offered(); }
  double bytes_per_block() const override {
    return lru_.bytes_per_block() + sizeof(Node) + GhostList::kBytesPerGhost;
  }

  std::shared_ptr<const Judge> judge() const override { return judge_; }
  void Show(uint64_t now_ms, Candidates* out) override;
  uint64_t last_use(BlockId block) const override { return lru_.last_use(block); }
  void OnSpared(BlockId block) override;
  // What times are measured in.
  double turnover_ms() const { return std::max(insert_gap_ms_ * resident_, 1.0); }

 private:
  struct Node {
    uint64_t hash;
    uint64_t inserted_ms;
    uint64_t accessed_ms;
    uint32_t gap_ms;  // Between the last two accesses; kNoGap: there was one.
    uint32_t hits : 16;
    uint32_t depth : 16;  // Blocks in front of it, at most kMostDepth.
  };
  static_assert(sizeof(Node) == 32);
  static constexpr uint32_t kNoGap = UINT32_MAX, kMostHits = 0xffff, kMostDepth = 0xffff;

  ColdRlView ViewOf(const Node& node, uint64_t now_ms) const;
  static void Access(Node* node, uint64_t now_ms);

  const std::shared_ptr<const Judge> judge_;
  const double cost_per_depth_;
  LruPolicy lru_;
  VirtualArray<Node> nodes_;
  GhostList ghosts_;  // Last access in the upper 48 bits, and hits.
  uint32_t resident_ = 0;
  uint64_t last_insert_ms_ = 0;
  double insert_gap_ms_ = 0;  // Mean, of some thousand inserts.
  uint64_t inserts_ = 0;
  uint64_t hits_since_insert_ = 0;
  double hits_per_insert_ = 0;  // Likewise.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_COLD_RL_H_
