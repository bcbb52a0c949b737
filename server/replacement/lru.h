// Least recently used: the block whose last use ended longest ago leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_LRU_H_
#define KVPOOL_SERVER_REPLACEMENT_LRU_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/ranked_policy.h"

namespace kvpool {

// The node is the number of its last use.
class LruPolicy final : public RankedPolicy<uint64_t> {
 public:
  explicit LruPolicy(const PolicyOptions& options) : RankedPolicy(options.max_blocks) {}

  std::string_view name() const override { return "lru"; }
  void OnInsert(BlockId block, const Content&) override { node(block) = ++last_use_; }
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId block, uint64_t) override { node(block) = ++last_use_; }
  void OnEvict(BlockId) override {}

 private:
  Rank RankOfNode(const uint64_t& last_use) const override { return {.major = last_use}; }

  uint64_t last_use_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_LRU_H_
