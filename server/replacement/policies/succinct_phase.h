// Paging with phase bits (arXiv 2210.02775, Mark&Predict): marking with a prediction of the next phase.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_PHASE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_PHASE_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/policies/predicted_policy.h"

namespace kvpool {

// A block is marked when it is used. Unmarked blocks leave, first those whose last bit says that the next
// phase does not ask for them; among equals the least recently used leaves, where the paper draws one. When
// all on offer are marked a new phase begins, in which none is. Each block has the phase in which it was
// marked last, so a new phase costs nothing; a block that was not on offer for a whole phase leaves before
// those marked in the phase that ended.
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
