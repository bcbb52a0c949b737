// Every pruning policy by name: what --help, `kvpoolctl policies`, the table in README.md, the verbs and
// kvpool-lab go by. The order is that of registry.list.
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
// INVALID_ARGUMENT names the policies there are.
absl::StatusOr<PolicyId> FindPolicy(absl::string_view name);

// A policy with its parameters, and the policy it builds on where it has one.
struct BoundPolicy {
  PolicyId id{};
  Params params;
  PolicyId host{};  // Of a policy with kNeedHost.
  Params host_params;

  const PolicyFacts& facts() const { return FactsOf(id); }
  bool has_host() const { return (facts().NeedsOf(params) & kNeedHost) != 0; }
  // With those of the host.
  Needs needs() const;
};

// `settings` are (name, value): "pool" = "7"; "host" = "h2o" and "host.pool" = "7" for policies over a host.
// INVALID_ARGUMENT names the parameter, the value and what it may be.
absl::StatusOr<BoundPolicy> BindPolicy(absl::string_view name,
                                       absl::Span<const std::pair<std::string, std::string>> settings);

// "K and V", "attention mass", "a query window", … for people.
std::string DescribeNeeds(Needs needs);
// One line a policy with its parameters, for --help.
std::string PoliciesHelp();
// The table of README.md.
std::string PoliciesTable();

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_REGISTRY_H_
