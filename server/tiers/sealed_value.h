// How a value lies in a tier that others may read: encrypted, in the form of one that is 64 bytes larger.
//
//   at 0    "KVPSEAL1": 1 is the version of this form
//   at 8    id of the key that the value's own is derived from (encryption_keys.h)
//   at 24   salt, 24 bytes
//   at 48   tag
//   at 64   the value's bytes, with AES-256-GCM. What the tag covers as well: the 24 bytes in front of the salt, and the whole
//           tier key, so that a value is opened under no other name and for no other tenant
//
// Each value has a key of its own: HKDF-SHA-256 of the listed key, with the owner and the salt as info. It serves that value alone,
// under an iv of zeros. The salt is HKDF-SHA-256 too, of the whole tier key and of a GMAC of the bytes, whose key is derived from the
// listed one: a function of what is sealed (a synthetic iv, RFC 5297 and RFC 8452). So there is nothing to count, no generator to
// trust, and nothing for daemons, nodes, restarts and copies of a machine to agree on; and nodes that write the same bytes
// write the same sealed ones. Who reads the store sees by that whether two values of one name are equal, and nothing else.
//
// NIST SP 800-38D asks that the chance of one iv twice under one key be 2^-32 at most (section 8). Here that is one salt for two
// different values of a tenant. Of n values two salts are equal by n^2 / 2^193, which is 2^-32 at 2^80 values; and two values of
// one name, of b blocks of 16 bytes at most, have one GMAC by b / 2^128, at most 2^-99. Random ivs of 96 bits under one key would
// end at 2^32 values (section 8.3).
#ifndef KVPOOL_SERVER_TIERS_SEALED_VALUE_H_
#define KVPOOL_SERVER_TIERS_SEALED_VALUE_H_

#include <cstdint>
#include <optional>

#include "server/tiers/buffers.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

inline constexpr uint64_t kSealBytes = 64;

// The name that the value of this key has when it is sealed: one of another space. So a value that was written in the clear is
// never found for a sealed one, nor the other way round. The name of a sealed one's name is the key again.
TierKey SealedName(TierKey key);

// Fills `sealed`. REQUIRES: that has kSealBytes more than the value.
void SealValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& value, TierBuffer* sealed);
// Which key opens it; nothing: it is no sealed value.
std::optional<EncryptionKeyId> SealedWith(const TierBuffer& sealed);
// False: it was not sealed with this key under this name, or is not as it was sealed; then `value` is all zeros. REQUIRES: it
// has kSealBytes less than `sealed`.
bool OpenValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& sealed, TierBuffer* value);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_SEALED_VALUE_H_
