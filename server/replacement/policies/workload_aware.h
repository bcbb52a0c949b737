// By how likely the next use is, from the reuse times of each category of requests (Wang et al., USENIX ATC 2025,
// arXiv 2506.02634).
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

// Of the uses of a category a share p is followed by another, after a time that is fitted by an exponential
// distribution of rate r. The block leaves for which a use in the time that blocks stay in the cache, L, is least
// likely, given that it has waited for t already:
//
//   p e^-rt (1 - e^-rL) / (1 - p + p e^-rt)
//
// In a category that is the one used longest ago; of those used together, as the blocks of a prompt are, the later
// offset. The category is the engine's, or else follows from the turn of the conversation that computed the block and
// how often it was found since.
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
  // And ReuseStatistics::kBytes in all.
  double bytes_per_block() const override { return sizeof(Node) + sizeof(uint32_t) + 24; }

 private:
  static constexpr int kTurnClasses = 4, kHitClasses = 3;
  static constexpr int kClasses = kTurnClasses * kHitClasses + kMaxCategory;

  struct Node {
    uint64_t hash;
    uint64_t used_ms : 48;
    uint64_t cls : 8;
    uint64_t turn : 8;
    uint32_t depth;  // Blocks in front of it.
    uint16_t hits;
    uint8_t category;  // Of the latest use that had one; 0: none did since it was found again.
  };
  static_assert(sizeof(Node) == 24);

  static int ClassOf(const Node& node);
  double ChanceOfReuse(int cls, uint64_t waited_ms) const;

  VirtualArray<Node> nodes_;
  HeapPlaces places_;
  std::vector<OfferHeap> heaps_;  // By class; of each, what was used longest ago first.
  ReuseStatistics reuse_;
  Turns turns_;
  uint64_t now_ms_ = 0;
  // From its last use to its leaving, of the blocks that left lately. Until one has, a block is thought to stay.
  double stay_ms_ = std::numeric_limits<double>::infinity();
  uint32_t offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_WORKLOAD_AWARE_H_
