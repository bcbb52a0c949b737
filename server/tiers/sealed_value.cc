#include "server/tiers/sealed_value.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "server/tiers/aes_gcm.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

constexpr char kSealMagic[8] = {'K', 'V', 'P', 'S', 'E', 'A', 'L', '1'};
constexpr AesGcmIv kOnlyIv{};

using SealSalt = std::array<uint8_t, 24>;

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

std::string BytesOfName(const TierKey& name) {
  std::string bytes(name.space.begin(), name.space.end());
  bytes.append(name.block.begin(), name.block.end());
  bytes.push_back(static_cast<char>(name.group));
  bytes.push_back(static_cast<char>(name.raw));
  bytes.append(name.owner.begin(), name.owner.end());
  return bytes;
}

// What the tag covers beside the value.
std::string CoveredBy(const SealHeader& header, const TierKey& name) {
  return std::string(reinterpret_cast<const char*>(&header), offsetof(SealHeader, salt)) + BytesOfName(name);
}

// What is derived from a listed key; its memory is wiped when it goes.
struct DerivedKey {
  DerivedKey(const EncryptionKey& from, std::string_view label, absl::Span<const std::string> fields)
      : bytes(DeriveTierKey({reinterpret_cast<const char*>(from.secret.data()), from.secret.size()}, label,
                            fields)) {}
  ~DerivedKey() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
  DerivedKey(const DerivedKey&) = delete;
  DerivedKey& operator=(const DerivedKey&) = delete;
  AesGcmKey bytes;
};

SealSalt SaltOf(const TierKey& name, const EncryptionKey& key, std::string_view value) {
  const std::string bytes_of_name = BytesOfName(name);
  const DerivedKey mac_key(key, "sealed value: mac", {std::string(name.owner.begin(), name.owner.end())});
  const AesGcmTag mac = AesGmac(mac_key.bytes, value);
  const DerivedKey derived(key, "sealed value: salt", {bytes_of_name, std::string(mac.begin(), mac.end())});
  SealSalt salt;
  std::copy_n(derived.bytes.begin(), salt.size(), salt.begin());
  return salt;
}

// The key of one value.
DerivedKey KeyOfValue(const TierKey& name, const EncryptionKey& key, const SealSalt& salt) {
  return DerivedKey(
      key, "sealed value",
      {std::string(name.owner.begin(), name.owner.end()), std::string(salt.begin(), salt.end())});
}

}  // namespace

TierKey SealedName(TierKey key) {
  for (uint8_t& byte : key.space) byte = static_cast<uint8_t>(~byte);
  return key;
}

void SealValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& value, TierBuffer* sealed) {
  const std::string_view bytes(value.data(), value.bytes());
  SealHeader header{.magic = {}, .key_id = key.id, .salt = SaltOf(name, key, bytes), .tag = {}};
  std::memcpy(header.magic, kSealMagic, sizeof(kSealMagic));
  const DerivedKey own = KeyOfValue(name, key, header.salt);
  header.tag = AesGcmEncrypt(own.bytes, kOnlyIv, CoveredBy(header, name), bytes, sealed->data() + kSealBytes);
  std::memcpy(sealed->data(), &header, sizeof(header));
}

std::optional<EncryptionKeyId> SealedWith(const TierBuffer& sealed) {
  const SealHeader header = HeaderOf(sealed);
  if (std::memcmp(header.magic, kSealMagic, sizeof(kSealMagic)) != 0) return std::nullopt;
  return header.key_id;
}

bool OpenValue(const TierKey& name, const EncryptionKey& key, const TierBuffer& sealed, TierBuffer* value) {
  const SealHeader header = HeaderOf(sealed);
  const DerivedKey own = KeyOfValue(name, key, header.salt);
  const bool opens = AesGcmDecrypt(own.bytes, kOnlyIv, CoveredBy(header, name), header.tag,
                                   {sealed.data() + kSealBytes, value->bytes()}, value->data());
  if (!opens) std::fill_n(value->data(), value->bytes(), '\0');
  return opens;
}

}  // namespace kvpool
