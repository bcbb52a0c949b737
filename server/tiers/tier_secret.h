// The secret that keys of tiers are derived from. Who has it and a tier's bytes knows which prefixes are there.
#ifndef KVPOOL_SERVER_TIERS_TIER_SECRET_H_
#define KVPOOL_SERVER_TIERS_TIER_SECRET_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

inline constexpr size_t kLeastTierSecretBytes = 32;
inline constexpr size_t kMostTierSecretBytes = 4096;

// The bytes of a file, all of them. INVALID_ARGUMENT names flag, file and limit: it can't be read, has another size than 32 to
// 4096 bytes, or others than its owner and group may read it, or others than its owner write it.
absl::StatusOr<std::string> ReadTierSecret(const std::string& flag, const std::string& path);
// The same of another secret, which has other limits.
absl::StatusOr<std::string> ReadSecretFile(const std::string& flag, const std::string& path,
                                           size_t least_bytes, size_t most_bytes);
// The secret of a file, which is made with random bytes if there is none: for a tier that no other node shares.
absl::StatusOr<std::string> ReadOrMakeTierSecret(const std::string& flag, const std::string& path);
// FAILED_PRECONDITION: there is such a file, and it has another secret.
absl::Status CheckTierSecret(const std::string& flag, const std::string& path, const std::string& secret);
// The same, and otherwise the file has this secret from now on.
absl::Status KeepTierSecret(const std::string& flag, const std::string& path, const std::string& secret);

// HKDF-SHA-256 (RFC 5869) with no salt, and with the label and SHA-256 of the fields, each behind its length, as its info.
std::array<uint8_t, 32> DeriveTierKey(std::string_view secret, std::string_view label,
                                      absl::Span<const std::string> fields);

// Moves when values or keys come to mean something else.
inline constexpr char kTierVersion[] = "kvpool tier 1";
// The digest of a tenant, which is named with what makes it another one than those of the same name ("default@1000").
TierOwner DeriveTierOwner(std::string_view secret, const std::string& tenant_scope);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_SECRET_H_
