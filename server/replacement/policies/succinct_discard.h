// Paging with discard bits (arXiv 2210.02775): blocks that are predicted not to return leave first.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_DISCARD_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_DISCARD_H_

#include <string_view>

#include "server/replacement/policies/predicted_policy.h"

namespace kvpool {

// Mark0 evicts any page whose bit says discard and, if there is none, a page that a marking algorithm would
// evict. LRU is such an algorithm, so in both cases the least recently used of them leaves: that is
// deterministic and, with perfect bits, as good as Belady's.
class SuccinctDiscardPolicy final : public PredictedPolicy {
 public:
  explicit SuccinctDiscardPolicy(const PolicyOptions& options, Guard guard = Guard::kLru)
      : PredictedPolicy(options, guard) {}

  std::string_view name() const override { return "succinct_discard"; }

 private:
  Rank RankOfNode(const Node& node) const override { return {.major = node.returns, .minor = node.last_use}; }
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SUCCINCT_DISCARD_H_
