#include "server/tiers/s3_value.h"

#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/support/check.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

constexpr char kObjectMagic[4] = {'K', 'V', 'S', '3'};
constexpr uint32_t kVersion = 1;

// A header as it is stored; all numbers are little-endian.
struct StoredHeader {
  char magic[4];
  uint32_t version;
  uint32_t checksum;  // CRC-32C of this with a checksum of 0.
  uint32_t value_crc;
  uint64_t value_bytes;
  uint8_t key_digest[16];
  uint8_t owner[16];
  uint8_t reserved[8];  // Zero
};
static_assert(sizeof(StoredHeader) == kS3HeaderBytes && std::endian::native == std::endian::little);

std::array<uint8_t, SHA256_DIGEST_LENGTH> DigestOf(const TierKey& key) {
  std::string bytes;
  bytes.append(key.space.begin(), key.space.end());
  bytes.append(key.block.begin(), key.block.end());
  bytes.push_back(static_cast<char>(key.group));
  bytes.push_back(static_cast<char>(key.raw));
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  return digest;
}

template <typename Bytes>
std::string Hex(const Bytes& bytes) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

template <typename Bytes>
bool FromHex(absl::string_view text, Bytes* bytes) {
  if (text.size() != 2 * bytes->size() || !std::all_of(text.begin(), text.end(), [](unsigned char c) {
        return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
      })) {
    return false;
  }
  const std::string read = absl::HexStringToBytes(text);
  std::memcpy(bytes->data(), read.data(), read.size());
  return true;
}

uint32_t Checksum(StoredHeader header) {
  header.checksum = 0;
  return Crc32c(&header, sizeof(header));
}

std::string Root(const std::string& prefix) { return absl::StrCat(prefix, "/1/"); }

}  // namespace

std::string S3OwnerPrefix(const std::string& prefix, const TierOwner& owner) {
  return absl::StrCat(Root(prefix), Hex(owner), "/");
}

std::string S3ObjectName(const std::string& prefix, const TierKey& key) {
  return absl::StrCat(S3OwnerPrefix(prefix, key.owner), Hex(key.space), "/",
                      absl::Hex(DigestOf(key)[0], absl::kZeroPad2), "/", Hex(key.block), "-",
                      absl::Hex(key.group, absl::kZeroPad2), "-", key.raw ? "1" : "0");
}

std::optional<TierKey> S3KeyOf(const std::string& prefix, std::string_view name) {
  absl::string_view rest(name.data(), name.size());
  if (!absl::ConsumePrefix(&rest, Root(prefix))) return std::nullopt;
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, absl::ByAnyChar("/-"));
  if (parts.size() != 6) return std::nullopt;
  TierKey key;
  std::array<uint8_t, 1> group;
  if (!FromHex(parts[0], &key.owner) || !FromHex(parts[1], &key.space) || !FromHex(parts[3], &key.block) ||
      !FromHex(parts[4], &group)) {
    return std::nullopt;
  }
  key.group = group[0];
  key.raw = parts[5] == "1";
  // All else that a name can say follows from the key.
  return S3ObjectName(prefix, key) == name ? std::optional(key) : std::nullopt;
}

std::array<char, kS3HeaderBytes> MakeS3Header(const TierKey& key, const S3Header& header) {
  StoredHeader stored{.version = kVersion, .value_crc = header.value_crc, .value_bytes = header.value_bytes};
  std::memcpy(stored.magic, kObjectMagic, sizeof(kObjectMagic));
  std::memcpy(stored.key_digest, DigestOf(key).data(), sizeof(stored.key_digest));
  std::memcpy(stored.owner, key.owner.data(), sizeof(stored.owner));
  stored.checksum = Checksum(stored);
  std::array<char, kS3HeaderBytes> bytes;
  std::memcpy(bytes.data(), &stored, sizeof(stored));
  return bytes;
}

std::optional<S3Header> ReadS3Header(const TierKey& key, std::string_view bytes) {
  StoredHeader stored;
  KVPOOL_CHECK(bytes.size() == sizeof(stored), "a header of %zu bytes", bytes.size());
  std::memcpy(&stored, bytes.data(), sizeof(stored));
  if (std::memcmp(stored.magic, kObjectMagic, sizeof(kObjectMagic)) != 0 || stored.version != kVersion ||
      stored.checksum != Checksum(stored) ||
      std::memcmp(stored.key_digest, DigestOf(key).data(), sizeof(stored.key_digest)) != 0 ||
      std::memcmp(stored.owner, key.owner.data(), sizeof(stored.owner)) != 0) {
    return std::nullopt;
  }
  return S3Header{.value_bytes = stored.value_bytes, .value_crc = stored.value_crc};
}

}  // namespace kvpool
