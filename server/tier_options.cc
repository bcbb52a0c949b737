#include "server/tier_options.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/support/status_macros.h"
#include "server/devices.h"
#include "server/tiers/file_tier.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

absl::Status Wrong(const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, "; a tier is written file:PATH,capacity=BYTES[,write=evict|seal]"));
}

}  // namespace

absl::StatusOr<TierOptions> ParseTierOptions(std::string_view text) {
  TierOptions options;
  std::vector<std::string> parts = absl::StrSplit(absl::string_view(text.data(), text.size()), ',');
  absl::string_view path = parts[0];
  if (!absl::ConsumePrefix(&path, "file:"))
    return Wrong(absl::StrCat("\"", parts[0], "\" begins with no file:"));
  if (path.empty() || path[0] != '/') return Wrong(absl::StrCat("\"", path, "\" is no absolute path"));
  options.path = std::string(path);
  for (size_t i = 1; i < parts.size(); ++i) {
    absl::string_view value = parts[i];
    if (absl::ConsumePrefix(&value, "capacity=")) {
      const absl::StatusOr<uint64_t> bytes = ParseBytes({value.data(), value.size()});
      if (!bytes.ok()) return Wrong(absl::StrCat("capacity: ", bytes.status().message()));
      options.capacity_bytes = *bytes;
    } else if (absl::ConsumePrefix(&value, "write=")) {
      if (value != "evict" && value != "seal") {
        return Wrong(absl::StrCat("write is \"", value, "\", neither evict nor seal"));
      }
      options.write = value == "seal" ? TierWrite::kSeal : TierWrite::kEvict;
    } else {
      return Wrong(absl::StrCat("\"", parts[i], "\" is neither capacity= nor write="));
    }
  }
  if (options.capacity_bytes < FileTier::kLeastCapacityBytes) {
    return Wrong(absl::StrCat("capacity is ", options.capacity_bytes, " bytes; must be at least ",
                              FileTier::kLeastCapacityBytes));
  }
  return options;
}

absl::StatusOr<OpenedTier> OpenTier(const TierOptions& options, const std::string& key_file) {
  ASSIGN_OR_RETURN(std::shared_ptr<Tier> tier,
                   FileTier::Open({.path = options.path, .capacity_bytes = options.capacity_bytes}));
  absl::StatusOr<std::string> secret = key_file.empty() ? ReadOrMakeTierSecret("tier", options.path + "/key")
                                                        : ReadTierSecret("tier-key-file", key_file);
  if (!secret.ok()) return secret.status();
  return OpenedTier{std::move(tier), *std::move(secret)};
}

}  // namespace kvpool
