// What an operator says of a tier: the words behind --tier.
//
//   host:capacity=BYTES[,write=RULE]
//   file:PATH,capacity=BYTES[,write=RULE]
//   resp:HOST:PORT[,cluster=auto|on|off][,tls=on|off][,ca=FILE][,cert=FILE,key=FILE][,user=NAME][,password-file=FILE]
//       [,prefix=TEXT][,ttl=DURATION][,connections=N][,write=RULE]
//   s3:http[s]://HOST[:PORT]/BUCKET[,region=NAME][,style=path|virtual][,credentials-file=FILE][,profile=NAME][,ca=FILE]
//       [,prefix=TEXT][,connections=N][,write=RULE]
//
// A RULE is evict, seal or reuse:N (TierWrite). What nodes share is written with seal if nothing else is said: what is
// asked for again is mostly asked for once (server/README.md has figures).
#ifndef KVPOOL_SERVER_TIER_OPTIONS_H_
#define KVPOOL_SERVER_TIER_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/daemon/options.h"
#include "server/devices.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/resp_tier.h"
#include "server/tiers/s3_tier.h"
#include "server/tiers/tier_set.h"

namespace kvpool {

enum class TierKind : uint8_t { kHost, kFile, kResp, kS3 };

struct TierOptions {
  TierKind kind = TierKind::kFile;
  std::string path;             // A file tier's folder.
  uint64_t capacity_bytes = 0;  // A host or file tier's.
  RespTier::Options resp;       // A resp tier's, still without its password.
  std::string password_file;
  S3Tier::Options s3;  // An s3 tier's; an empty region is that of the environment.
  TierRule rule;
  std::string text;  // All of it, as it was written.
};

// INVALID_ARGUMENT says which part is wrong, and what it may be.
absl::StatusOr<TierOptions> ParseTierOptions(std::string_view text);

// INVALID_ARGUMENT: they are too many, or two are of one kind, and metrics could not tell them apart.
absl::Status CheckTogether(const std::vector<TierOptions>& tiers);

// INVALID_ARGUMENT: nodes find in the tier what others have written, and --tier-key-file names no secret that all of them have.
absl::Status CheckTierKeyFile(const TierOptions& tier, const std::string& key_file);

// INVALID_ARGUMENT: a host tier and the host memory that is served are more than there is.
absl::Status CheckHostMemory(const std::vector<TierOptions>& tiers, const OpenedDevices& opened);
uint64_t ServedHostBytes(const OpenedDevices& opened);
absl::Status CheckHostMemory(const TierOptions& tier, uint64_t served_bytes);

// What all tiers of a daemon have in common.
struct TierSettings {
  std::string key_file;  // Empty: the secret is in the folder of a file tier, or in `state_dir`.
  // File of the keys that what outlives the daemon is sealed with; empty: it is not.
  std::string encryption_keys;
  std::string state_dir;
  uint64_t buffer_bytes = 0;  // A tier that seals has so much of its own each way, as the daemon has for all.
};
// What tiers are sealed with.
struct TierSeal {
  std::shared_ptr<EncryptionKeyFile> keys;  // Null: they are not.
  uint64_t buffer_bytes = 0;                // See TierSettings.
};
// Tiers that are open, and the secret that their keys are derived from.
struct OpenedTiers {
  std::vector<TierMember> members;
  std::string secret;
  TierSeal seal;
};
// Errors begin with the flag's name.
absl::StatusOr<OpenedTiers> OpenTiers(const std::vector<TierOptions>& tiers, const TierSettings& settings);

// What a daemon is that attaches a tier.
struct TierSite {
  std::string key_file;  // See OpenTiers.
  std::string secret;
  TierSeal seal;
  uint64_t served_host_bytes = 0;
};
// A tier that an operator attaches. INVALID_ARGUMENT: as for one that --tier names. Without a key file, a folder gets the
// daemon's secret when it is opened, so that a start with the folder finds what is written there. FAILED_PRECONDITION then: it has
// another one, and is as it was.
absl::StatusOr<NamedTier> NameTier(const TierSite& site, const std::string& text);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIER_OPTIONS_H_
