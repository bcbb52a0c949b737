// AES-256-GCM (NIST SP 800-38D), by OpenSSL, which uses what the processor has for it.
#ifndef KVPOOL_SERVER_TIERS_AES_GCM_H_
#define KVPOOL_SERVER_TIERS_AES_GCM_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace kvpool {

using AesGcmKey = std::array<uint8_t, 32>;
using AesGcmIv = std::array<uint8_t, 12>;
using AesGcmTag = std::array<uint8_t, 16>;

// `out` has room for as many bytes as `in` has. `more` is not encrypted, and the tag covers it too.
// REQUIRES: no two calls have the same key and iv.
AesGcmTag AesGcmEncrypt(const AesGcmKey& key, const AesGcmIv& iv, std::string_view more, std::string_view in,
                        char* out);

// False: some bit of these is not what it was, and nothing of `out` may be used.
bool AesGcmDecrypt(const AesGcmKey& key, const AesGcmIv& iv, std::string_view more, const AesGcmTag& tag,
                   std::string_view in, char* out);

// The tag of this text alone, under an iv of zeros: a hash that nobody can aim at who has no key. REQUIRES: the key serves nothing
// else, and nobody is shown a tag: of two, the key could be computed.
AesGcmTag AesGmac(const AesGcmKey& key, std::string_view text);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_AES_GCM_H_
