// Paging with phase bits (arXiv 2210.02775, Mark&Predict): marking, with a word about the next phase.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_PHASE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_PHASE_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/policies/predicted_policy.h"

namespace kvpool {

// A block is marked when it is used. Unmarked ones leave, first those whose last bit says that the next phase does
// not ask for them; of alike ones the least recently used, where the paper draws one. When all on offer are marked a
// new phase begins and none is. Each block knows the phase in which it was marked last, so that a phase begins at no
// cost; one that was not on offer for a whole phase goes before those of the phase that has ended.
class SuccinctPhasePolicy final : public PredictedPolicy {
 public:
  explicit SuccinctPhasePolicy(const PolicyOptions& options, Guard guard = Guard::kLru)
      : PredictedPolicy(options, guard) {}

  std::string_view name() const override { return "succinct_phase"; }

 private:
  Rank RankOfNode(const Node& node) const override {
    return {.major = uint64_t{node.phase} << 1 | node.returns, .minor = node.last_use};
  }
  void Use(Node* node) override { node->phase = phase_; }
  void BeforeVictim(const Node& least) override {
    if (least.phase == phase_) ++phase_;
  }

  uint32_t phase_ = 1;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_PHASE_H_
