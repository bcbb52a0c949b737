// Greedy-Dual-Size-Frequency (Cherkasova 1998) with the cost of prefill: what is cheap to
// compute anew leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_GDSF_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_GDSF_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct GdsfNode {
  double worth;
  uint64_t last_use;
  uint32_t accesses;
  uint32_t depth;
};

// worth = accesses * (1 + cost_per_depth * blocks in front) + the worth of the last victim at the block's
// last access. All blocks have one size; the cost of a block grows with the tokens in front of it, which its
// attention reads.
class GdsfPolicy final : public RankedPolicy<GdsfNode> {
 public:
  explicit GdsfPolicy(const PolicyOptions& options)
      : RankedPolicy(options.max_blocks), cost_per_depth_(options.cost_per_depth) {}

  std::string_view name() const override { return "gdsf"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t) override { node(block).last_use = ++uses_; }
  void OnEvict(BlockId block) override;

 private:
  Rank RankOfNode(const GdsfNode& node) const override {
    return {.major = RankOf(node.worth), .minor = node.last_use};
  }
  double Worth(const GdsfNode& node) const {
    return age_ + node.accesses * (1 + cost_per_depth_ * node.depth);
  }

  const double cost_per_depth_;
  double age_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_GDSF_H_
