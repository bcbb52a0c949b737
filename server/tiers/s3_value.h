// How a value lies in a bucket: as one object, a header in front of its bytes.
//
//   PREFIX/1/OWNER/SPACE/DD/BLOCK-GG-R   its name. OWNER, SPACE and BLOCK are those of the tier key in hex, GG is the group, R is 1 for
//                                        raw bytes; DD are the first two digits of the key's digest, so that no folder of a store
//                                        that has such is large. 1 is the version of this form.
//   object                               S3Header, then the value
//
// The owner comes first: what a tenant has is what one listing finds. The header, and not the object's metadata, says what the
// bytes must be, since one answer has both, and copies by others' tools lose metadata.
#ifndef KVPOOL_SERVER_TIERS_S3_VALUE_H_
#define KVPOOL_SERVER_TIERS_S3_VALUE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/tiers/tier_key.h"

namespace kvpool {

inline constexpr size_t kS3HeaderBytes = 64;

// What the names of all objects of an owner begin with.
std::string S3OwnerPrefix(const std::string& prefix, const TierOwner& owner);
std::string S3ObjectName(const std::string& prefix, const TierKey& key);
// The key of such a name; nothing: it is none.
std::optional<TierKey> S3KeyOf(const std::string& prefix, std::string_view name);

struct S3Header {
  uint64_t value_bytes = 0;
  uint32_t value_crc = 0;  // CRC-32C
};
std::array<char, kS3HeaderBytes> MakeS3Header(const TierKey& key, const S3Header& header);
// Nothing: it was not written for this key, or is not as it was written. REQUIRES: it has kS3HeaderBytes.
std::optional<S3Header> ReadS3Header(const TierKey& key, std::string_view bytes);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_VALUE_H_
