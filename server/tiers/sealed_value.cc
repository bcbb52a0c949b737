#include "server/tiers/sealed_value.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "server/tiers/aes_gcm.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

constexpr char kSealMagic[8] = {'K', 'V', 'P', 'S', 'E', 'A', 'L', '1'};
constexpr AesGcmIv kOnlyIv{};

struct SealHeader {
  char magic[8];
  EncryptionKeyId key_id;
  SealSalt salt;
  AesGcmTag tag;
};
static_assert(sizeof(SealHeader) == kSealBytes && offsetof(SealHeader, salt) == 24);

SealHeader HeaderOf(const TierBuffer& sealed) {
  SealHeader header;
  std::memcpy(&header, sealed.data(), sizeof(header));
  return header;
}

// What the tag covers beside the value.
std::string CoveredBy(const SealHeader& header, const TierKey& name) {
  std::string covered(reinterpret_cast<const char*>(&header), offsetof(SealHeader, salt));
  covered.append(name.space.begin(), name.space.end());
  covered.append(name.block.begin(), name.block.end());
  covered.push_back(static_cast<char>(name.group));
  covered.push_back(static_cast<char>(name.raw));
  covered.append(name.owner.begin(), name.owner.end());
  return covered;
}

// The key of one value; its memory is wiped when it goes.
struct ValueKey {
  ValueKey(const EncryptionKey& from, const TierOwner& owner, const SealSalt& salt)
      : bytes(DeriveTierKey(
            {reinterpret_cast<const char*>(from.secret.data()), from.secret.size()}, "sealed value",
            {std::string(owner.begin(), owner.end()), std::string(salt.begin(), salt.end())})) {}
  ~ValueKey() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
  ValueKey(const ValueKey&) = delete;
  ValueKey& operator=(const ValueKey&) = delete;
  AesGcmKey bytes;
};

}  // namespace

TierKey SealedName(TierKey key) {
  for (uint8_t& byte : key.space) byte = static_cast<uint8_t>(~byte);
  return key;
}

void SealValue(const TierKey& name, const EncryptionKey& key, const SealSalt& salt, const TierBuffer& value,
               TierBuffer* sealed) {
  SealHeader header{.magic = {}, .key_id = key.id, .salt = salt, .tag = {}};
  std::memcpy(header.magic, kSealMagic, sizeof(kSealMagic));
  const ValueKey own(key, name.owner, salt);
  header.tag = AesGcmEncrypt(own.bytes, kOnlyIv, CoveredBy(header, name), {value.data(), value.bytes()},
                             sealed->data() + kSealBytes);
  std::memcpy(sealed->data(), &header, sizeof(header));
}

std::optional<EncryptionKeyId> SealedWith(const TierBuffer& sealed) {
  const SealHeader header = HeaderOf(sealed);
  if (std::memcmp(header.magic, kSealMagic, sizeof(kSealMagic)) != 0) return std::nullopt;
  return header.key_id;
}

bool OpenValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& sealed, TierBuffer* value) {
  const SealHeader header = HeaderOf(sealed);
  const ValueKey own(key, name.owner, header.salt);
  const bool opens = AesGcmDecrypt(own.bytes, kOnlyIv, CoveredBy(header, name), header.tag,
                                   {sealed.data() + kSealBytes, value->bytes()}, value->data());
  if (!opens) std::fill_n(value->data(), value->bytes(), '\0');
  return opens;
}

}  // namespace kvpool
