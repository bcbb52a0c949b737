// Least likely to be used again, by the reuse times of each category of requests (Wang et al., USENIX ATC
// 2025, arXiv 2506.02634).
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_WORKLOAD_AWARE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_WORKLOAD_AWARE_H_

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "server/base/virtual_array.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/parts/reuse_statistics.h"
#include "server/replacement/parts/turns.h"
#include "server/replacement/policy.h"

namespace kvpool {

// In a category a share p of the uses is followed by another, after a time that an exponential distribution
// of rate r fits. Given that a block has waited for a time t, the chance of a use within L, the time that
// blocks stay in the cache, is
//
//   p e^-rt (1 - e^-rL) / (1 - p + p e^-rt)
//
// and the block with the least chance leaves. Within a category that is the one used longest ago; among those
// used together, as the blocks of a prompt are, the deepest. The category is the engine's, or else follows
// from the turn of the conversation that computed the block and how often it was found since.
class WorkloadAwarePolicy final : public ReplacementPolicy {
 public:
  explicit WorkloadAwarePolicy(const PolicyOptions& options);

  std::string_view name() const override { return "workload_aware"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnHint(BlockId block, const UseHint& hint) override;
  void OnUsed(BlockId block, uint64_t now_ms) override;
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  void Prefetch(BlockId block, uint64_t) const override;
  uint32_t offered() const override { return offered_; }
  // ReuseStatistics adds 2.2 MiB.
  double bytes_per_block() const override { return sizeof(Node) + sizeof(uint32_t) + 24; }

 private:
  static constexpr int kTurnClasses = 4, kHitClasses = 3;
  static constexpr int kClasses = kTurnClasses * kHitClasses + kMaxCategory;

  struct Node {
    uint64_t hash;
    uint64_t used_ms : 48;
    uint64_t cls : 8;
    uint64_t turn : 8;
    uint32_t depth;  // blocks in front of it
    uint16_t hits;
    uint8_t category;  // the category of the latest use that had one; 0: none since it was found again
  };
  static_assert(sizeof(Node) == 24);

  static int ClassOf(const Node& node);
  double ChanceOfReuse(int cls, uint64_t waited_ms) const;

  VirtualArray<Node> nodes_;
  HeapPlaces places_;
  // One heap per class, least recently used first.
  std::vector<OfferHeap> heaps_;
  ReuseStatistics reuse_;
  Turns turns_;
  uint64_t now_ms_ = 0;
  // The mean time from last use to eviction of the blocks that left lately. Until one has left, blocks are
  // taken to stay for ever.
  double stay_ms_ = std::numeric_limits<double>::infinity();
  uint32_t offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_WORKLOAD_AWARE_H_
