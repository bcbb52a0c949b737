// The pruning policies by name, in the order of registry.list: for the verbs, kvpool-lab, --help,
// `kvpoolctl policies` and the table in cuda/scorers/README.md.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_REGISTRY_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_REGISTRY_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

enum class PolicyId : uint32_t {};
inline constexpr char kDefaultPolicy[] = "paged_eviction";

absl::Span<const PolicyFacts* const> Policies();
const PolicyFacts& FactsOf(PolicyId id);
// INVALID_ARGUMENT lists the policies.
absl::StatusOr<PolicyId> FindPolicy(absl::string_view name);

// A policy with its parameters, and for a policy with kNeedHost the policy that it builds on.
struct BoundPolicy {
  PolicyId id{};
  Params params;
  PolicyId host{};
  Params host_params;

  const PolicyFacts& facts() const { return FactsOf(id); }
  bool has_host() const { return (facts().NeedsOf(params) & kNeedHost) != 0; }
  // The needs of the policy and of its host.
  Needs needs() const;
};

// `settings` are (name, value): ("pool", "max"); for a policy over a host also ("host", "snapkv") and
// ("host.pool", "max"). INVALID_ARGUMENT names the parameter, the value and the values that it may have.
absl::StatusOr<BoundPolicy> BindPolicy(absl::string_view name,
                                       absl::Span<const std::pair<std::string, std::string>> settings);

// A text for people: "K and V", "attention mass", "a query window", …
std::string DescribeNeeds(Needs needs);
// What of K and V a policy with these needs reads for a token of a plane: "K + V once, K". "once" is while its block stays
// as it is (records.h); the rest is read in each call.
std::string DescribeReads(Needs needs);
// A text for --help: a line for each policy and each of its parameters.
std::string PoliciesHelp();
// The table in cuda/scorers/README.md.
std::string PoliciesTable();

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_REGISTRY_H_
