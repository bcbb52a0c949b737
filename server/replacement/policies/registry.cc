#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policies/arc.h"
#include "server/replacement/policies/cold_rl.h"
#include "server/replacement/policies/fifo.h"
#include "server/replacement/policies/gdsf.h"
#include "server/replacement/policies/hit_density.h"
#include "server/replacement/policies/learned.h"
#include "server/replacement/policies/length_aware.h"
#include "server/replacement/policies/lfu.h"
#include "server/replacement/policies/lru.h"
#include "server/replacement/policies/lru_k.h"
#include "server/replacement/policies/random.h"
#include "server/replacement/policies/retention.h"
#include "server/replacement/policies/s3_fifo.h"
#include "server/replacement/policies/score_weighted.h"
#include "server/replacement/policies/sieve.h"
#include "server/replacement/policies/slru.h"
#include "server/replacement/policies/succinct_discard.h"
#include "server/replacement/policies/succinct_phase.h"
#include "server/replacement/policies/w_tinylfu.h"
#include "server/replacement/policies/workload_aware.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

template <typename Policy>
absl::StatusOr<std::unique_ptr<ReplacementPolicy>> Make(const PolicyOptions& options) {
  if (options.weights != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(options.weights->source(), ": weights of policy ",
                                                   options.weights->policy(),
                                                   ", but the policy that is asked for has none"));
  }
  return std::make_unique<Policy>(options);
}

// For policies with weights.
template <typename Policy>
absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeTrained(const PolicyOptions& options) {
  PolicyOptions trained = options;
  const WeightsShape shape = Policy::Shape();
  if (trained.weights == nullptr) {
    ASSIGN_OR_RETURN(trained.weights, Weights::BuiltIn(shape.policy));
  }
  RETURN_IF_ERROR(trained.weights->Check(shape));
  return std::make_unique<Policy>(trained);
}

constexpr PolicyEntry kPolicies[] = {
    {"lru", "least recently used", Make<LruPolicy>},
    {"fifo", "first in, first out", Make<FifoPolicy>},
    {"random", "any, each as likely", Make<RandomPolicy>},
    {"lru_k", "last access but one longest ago (LRU-2)", Make<LruKPolicy>},
    {"lfu", "least frequently used, with ageing", Make<LfuPolicy>},
    {"slru", "segmented LRU: found again is protected", Make<SlruPolicy>},
    {"arc", "adaptive between recency and frequency", Make<ArcPolicy>},
    {"s3_fifo", "small, main and ghost FIFO queues", Make<S3FifoPolicy>},
    {"sieve", "FIFO with a hand that spares what was asked for", Make<SievePolicy>},
    {"w_tinylfu", "LRU window, and admission by past frequency", Make<WTinyLfuPolicy>},
    {"gdsf", "frequency times the cost of prefill, with ageing", Make<GdsfPolicy>},
    {"length_aware", "least frequently used, deeper in the prompt first", Make<LengthAwarePolicy>},
    {"retention", "priorities earned by use and hints, halved with each turnover", Make<RetentionPolicy>},
    {"workload_aware", "least likely to be asked for again, by category of request",
     Make<WorkloadAwarePolicy>},
    {"score_weighted", "least recently used, block scores shifting it", Make<ScoreWeightedPolicy>},
    {"succinct_discard", "what is predicted not to return first, LRU where that fails",
     Make<SuccinctDiscardPolicy>},
    {"succinct_phase", "marking, with a prediction of the next phase, LRU where that fails",
     Make<SuccinctPhasePolicy>},
    {"hit_density", "fewest hits to come for the room and time, learned by class and age",
     Make<HitDensityPolicy>},
    {"learned", "hit_density with a trained network to begin with", MakeTrained<LearnedPolicy>},
    {"cold_rl", "of the coldest, those that a trained Q-network would not keep (Cold-RL)",
     MakeTrained<ColdRlPolicy>},
};

}  // namespace

absl::Span<const PolicyEntry> ReplacementPolicies() { return kPolicies; }

absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         const PolicyOptions& options) {
  for (const PolicyEntry& policy : kPolicies) {
    if (policy.name == name) return policy.make(options);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "replacement policy \"", absl::string_view(name.data(), name.size()), "\" is unknown; there are: ",
      absl::StrJoin(kPolicies, ", ",
                    [](std::string* out, const PolicyEntry& policy) { out->append(policy.name); })));
}

absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         uint32_t max_blocks) {
  return MakeReplacementPolicy(name, PolicyOptions{.max_blocks = max_blocks});
}

}  // namespace kvpool
