// What an operator says of a tier: the words behind --tier.
//
//   file:PATH,capacity=BYTES[,write=evict|seal]
//   resp:HOST:PORT[,cluster=auto|on|off][,tls=on|off][,ca=FILE][,cert=FILE,key=FILE][,user=NAME][,password-file=FILE]
//       [,prefix=TEXT][,ttl=DURATION][,connections=N][,write=evict|seal]
//   s3:http[s]://HOST[:PORT]/BUCKET[,region=NAME][,style=path|virtual][,credentials-file=FILE][,profile=NAME][,ca=FILE]
//       [,prefix=TEXT][,connections=N][,write=evict|seal]
#ifndef KVPOOL_SERVER_TIER_OPTIONS_H_
#define KVPOOL_SERVER_TIER_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/tiers/resp_tier.h"
#include "server/tiers/s3_tier.h"
#include "server/tiers/tier.h"

namespace kvpool {

struct TierOptions {
  // A file tier has a folder.
  std::string path;
  uint64_t capacity_bytes = 0;
  // A store that nodes share, still without its password. Of the two one at most is there; none: it is a file tier.
  std::optional<RespTier::Options> resp;
  std::optional<S3Tier::Options> s3;
  std::string password_file;
  TierWrite write = TierWrite::kEvict;

  // Other nodes have it as well, so that its secret can't be made by one of them.
  bool shared() const { return resp.has_value() || s3.has_value(); }
};

// INVALID_ARGUMENT says which part is wrong, and what it may be.
absl::StatusOr<TierOptions> ParseTierOptions(std::string_view text);

// A tier that is open, and the secret that its keys are derived from.
struct OpenedTier {
  std::shared_ptr<Tier> tier;
  std::string secret;
};
// Without a file of its own, the secret is in the tier's folder. Errors begin with the flag's name.
absl::StatusOr<OpenedTier> OpenTier(const TierOptions& options, const std::string& key_file);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIER_OPTIONS_H_
