// Any block on offer, each as likely as the others.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_RANDOM_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_RANDOM_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "server/base/virtual_array.h"
#include "server/replacement/policy.h"

namespace kvpool {

class RandomPolicy final : public ReplacementPolicy {
 public:
  explicit RandomPolicy(const PolicyOptions& options) : places_(options.max_blocks), state_(options.seed) {}

  std::string_view name() const override { return "random"; }
  void OnInsert(BlockId, const Content&) override {}
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId, uint64_t) override {}
  void OnEvict(BlockId) override {}
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  void Prefetch(BlockId block, uint64_t) const override { places_.Prefetch(Index(block)); }
  uint32_t offered() const override { return static_cast<uint32_t>(blocks_.size()); }
  double bytes_per_block() const override { return 2 * sizeof(uint32_t); }

 private:
  std::vector<uint32_t> blocks_;   // the blocks on offer, in any order
  VirtualArray<uint32_t> places_;  // each block's index in blocks_
  uint64_t state_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_RANDOM_H_
