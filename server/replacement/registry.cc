#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/replacement/lru.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

template <typename Policy>
std::unique_ptr<ReplacementPolicy> Make(uint32_t max_blocks) {
  return std::make_unique<Policy>(max_blocks);
}

constexpr PolicyEntry kPolicies[] = {
    {"lru", "least recently used, lower priorities first", Make<LruPolicy>},
};

}  // namespace

absl::Span<const PolicyEntry> ReplacementPolicies() { return kPolicies; }

absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         uint32_t max_blocks) {
  for (const PolicyEntry& policy : kPolicies) {
    if (policy.name == name) return policy.make(max_blocks);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "replacement policy \"", absl::string_view(name.data(), name.size()), "\" is unknown; there are: ",
      absl::StrJoin(kPolicies, ", ",
                    [](std::string* out, const PolicyEntry& policy) { out->append(policy.name); })));
}

}  // namespace kvpool
