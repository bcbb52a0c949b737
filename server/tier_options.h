// What an operator says of a tier: the words behind --tier.
//
//   host:capacity=BYTES[,write=RULE]
//   file:PATH,capacity=BYTES[,write=RULE]
//   resp:HOST:PORT[,cluster=auto|on|off][,tls=on|off][,ca=FILE][,cert=FILE,key=FILE][,user=NAME][,password-file=FILE]
//       [,prefix=TEXT][,ttl=DURATION][,connections=N][,write=RULE]
//
// A RULE is evict, seal or reuse:N (TierWrite). What nodes share is written with reuse:2 if nothing else is said: of what is
// computed most is never asked for again.
#ifndef KVPOOL_SERVER_TIER_OPTIONS_H_
#define KVPOOL_SERVER_TIER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/devices.h"
#include "server/tiers/resp_tier.h"
#include "server/tiers/tier_set.h"

namespace kvpool {

enum class TierKind : uint8_t { kHost, kFile, kResp };

struct TierOptions {
  TierKind kind = TierKind::kFile;
  std::string path;             // A file tier's folder.
  uint64_t capacity_bytes = 0;  // A host or file tier's.
  RespTier::Options resp;       // A resp tier's, still without its password.
  std::string password_file;
  TierRule rule;
};

// Nodes find in it what others have written.
inline bool IsShared(TierKind kind) { return kind == TierKind::kResp; }

// INVALID_ARGUMENT says which part is wrong, and what it may be.
absl::StatusOr<TierOptions> ParseTierOptions(std::string_view text);

// INVALID_ARGUMENT: they are too many, or two are of one kind, and metrics could not tell them apart.
absl::Status CheckTogether(const std::vector<TierOptions>& tiers);

// INVALID_ARGUMENT: a host tier and the host memory that is served are more than there is.
absl::Status CheckHostMemory(const std::vector<TierOptions>& tiers, const OpenedDevices& opened);

// Tiers that are open, and the secret that their keys are derived from.
struct OpenedTiers {
  std::vector<TierMember> members;
  std::string secret;
};
// Without `key_file` the secret is in the folder of a file tier, or in `state_dir`. Errors begin with the flag's name.
absl::StatusOr<OpenedTiers> OpenTiers(const std::vector<TierOptions>& tiers, const std::string& key_file,
                                      const std::string& state_dir);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIER_OPTIONS_H_
