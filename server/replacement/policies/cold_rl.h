// Cold-RL (arXiv 2508.12485): among the coldest blocks on offer a dueling Q-network chooses those that leave.
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
#include "server/replacement/policies/async_policy.h"
#include "server/replacement/policies/lru.h"

namespace kvpool {

// What the network sees of a block. Times are in turnovers, the time in which as many blocks are inserted as
// are resident, so weights fit other capacities and traces that run faster or slower.
struct ColdRlView {
  // The time since its content was inserted.
  double age = 0;
  // Blocks of its chain up to it: the room that an object of several blocks takes.
  double size = 1;
  // Hits, also those before it last left while they are remembered.
  double hits = 0;
  // The time between its last two accesses; negative if there was one access.
  double inter_arrival = -1;
  // The time since its last access. It stands in for the remaining retention: the pool offers no block whose
  // retention runs.
  double idle = 0;
  // The cost of computing it anew, relative to the first block of a chain.
  double cost = 1;

  std::array<float, QNetwork::kInputs> Features() const;
};

// The order of last use decides which blocks are judged, and is the answer where a decision is late. Being
// spared counts as a use, so that a few blocks worth keeping do not stay the coldest for ever.
class ColdRlPolicy : public AsyncPolicy {
 public:
  static constexpr uint32_t kCandidates = 64;
  // One candidate in so many leaves by a decision, and as many may be spared. The more leave, the less of the
  // network's time each takes.
  static constexpr uint32_t kLeaveOneIn = 4;

  static WeightsShape Shape();
  // REQUIRES: options.weights have that shape.
  explicit ColdRlPolicy(const PolicyOptions& options);

  std::string_view name() const override { return "cold_rl"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t now_ms) override { lru_.OnUsed(block, now_ms); }
  void OnOffer(BlockId block) override {
    nodes_[Index(block)].offered = 1;
    lru_.OnOffer(block);
  }
  void OnWithdraw(BlockId block) override {
    nodes_[Index(block)].offered = 0;
    lru_.OnWithdraw(block);
  }
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

  std::shared_ptr<const Ranker> ranker() const override { return ranker_; }
  void Show(uint64_t now_ms, Candidates* out) override;
  // The unit of time of ColdRlView.
  double turnover_ms() const { return std::max(insert_gap_ms_ * resident_, 1.0); }

 protected:
  uint64_t LastUseOnOffer(BlockId block) const override {
    return nodes_[Index(block)].offered ? lru_.last_use(block) : 0;
  }
  void OnSpared(BlockId block) override;

 private:
  struct Node {
    uint64_t hash;
    uint64_t inserted_ms : 63;
    uint64_t offered : 1;
    uint64_t accessed_ms;
    uint32_t gap_ms;  // the gap between its last two accesses; kNoGap: there was one
    uint32_t hits : 16;
    uint32_t depth : 16;  // blocks in front of it, at most kMostDepth
  };
  static_assert(sizeof(Node) == 32);
  static constexpr uint32_t kNoGap = UINT32_MAX, kMostHits = 0xffff, kMostDepth = 0xffff;

  ColdRlView ViewOf(const Node& node, uint64_t now_ms) const;
  static void Access(Node* node, uint64_t now_ms);

  const std::shared_ptr<const Ranker> ranker_;
  const double cost_per_depth_;
  LruPolicy lru_;
  VirtualArray<Node> nodes_;
  // The number has the last access in its upper 48 bits, then hits.
  GhostList ghosts_;
  uint32_t resident_ = 0;
  uint64_t last_insert_ms_ = 0;
  // Means over some thousand inserts.
  double insert_gap_ms_ = 0;
  uint64_t inserts_ = 0;
  uint64_t hits_since_insert_ = 0;
  double hits_per_insert_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_COLD_RL_H_
