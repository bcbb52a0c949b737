// First in, first out: the block that was computed longest ago leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_FIFO_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_FIFO_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

// The node is the number of the block's insertion.
class FifoPolicy final : public RankedPolicy<uint64_t> {
 public:
  explicit FifoPolicy(const PolicyOptions& options) : RankedPolicy(options.max_blocks) {}

  std::string_view name() const override { return "fifo"; }
  void OnInsert(BlockId block, const Content&) override { node(block) = ++insertions_; }
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId, uint64_t) override {}
  void OnEvict(BlockId) override {}

 private:
  Rank RankOfNode(const uint64_t& insertion) const override { return {.major = insertion}; }

  uint64_t insertions_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_FIFO_H_
