// How a value lies in a tier that others may read: encrypted, in the form of one that is 64 bytes larger.
//
//   at 0    "KVPSEAL1": 1 is the version of this form
//   at 8    id of the key that the value's own is derived from (encryption_keys.h)
//   at 24   salt: 24 random bytes
//   at 48   tag
//   at 64   the value's bytes, with AES-256-GCM. What the tag covers as well: the 24 bytes in front of the salt, and the whole
//           tier key, so that a value is opened under no other name and for no other tenant
//
// Each value has a key of its own: HKDF-SHA-256 of the listed key, with the owner and the salt as info. So there is nothing to
// count, and nothing for daemons, nodes and restarts to agree on: a key serves one value once, under an iv of zeros. NIST SP 800-38D asks
// that the chance of one iv twice under one key be 2^-32 at most (section 8). Here that is two equal salts for one tenant: of n
// values n^2 / 2^193, which is 2^-32 at 2^80 of them. Random ivs of 96 bits under one key would end at 2^32 values (section 8.3).
#ifndef KVPOOL_SERVER_TIERS_SEALED_VALUE_H_
#define KVPOOL_SERVER_TIERS_SEALED_VALUE_H_

#include <array>
#include <cstdint>
#include <optional>

#include "server/tiers/buffers.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

inline constexpr uint64_t kSealBytes = 64;
using SealSalt = std::array<uint8_t, 24>;

// The name that the value of this key has when it is sealed: one of another space. So a value that was written in the clear is
// never found for a sealed one, nor the other way round. The name of a sealed one's name is the key again.
TierKey SealedName(TierKey key);

// Fills `sealed`. REQUIRES: that has kSealBytes more than the value, and nothing was sealed with this salt before.
void SealValue(const TierKey& name, const EncryptionKey& key, const SealSalt& salt, const TierBuffer& value,
               TierBuffer* sealed);
// Which key opens it; nothing: it is no sealed value.
std::optional<EncryptionKeyId> SealedWith(const TierBuffer& sealed);
// False: it was not sealed with this key under this name, or is not as it was sealed; then `value` is all zeros. REQUIRES: it
// has kSealBytes less than `sealed`.
bool OpenValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& sealed, TierBuffer* value);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_SEALED_VALUE_H_
