#include "server/tiers/encryption_keys.h"

#include <openssl/crypto.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

constexpr char kAllOthers[] = "*", kNoKeyAtAll[] = "none";
constexpr size_t kMostTenantBytes = 256;

absl::Status WrongLine(int number, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", what));
}

uint8_t DigitOf(char digit) {
  return static_cast<uint8_t>(absl::ascii_isdigit(static_cast<unsigned char>(digit))
                                  ? digit - '0'
                                  : absl::ascii_tolower(static_cast<unsigned char>(digit)) - 'a' + 10);
}

// What is wrong with a tenant's name; empty: nothing. The name is not said: it may be a key in the wrong place.
std::string WhyNoTenant(absl::string_view name) {
  if (name.size() > kMostTenantBytes)
    return absl::StrCat("the tenant has ", name.size(), " bytes; must have 1 to ", kMostTenantBytes);
  const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-' || c == '@';
  });
  return plain || name == kAllOthers ? "" : "the tenant must be * or of the letters, digits and ._-@";
}

std::string WhyNoKey(absl::string_view digits, size_t key_bytes) {
  const auto other =
      std::find_if_not(digits.begin(), digits.end(), [](unsigned char c) { return absl::ascii_isxdigit(c); });
  if (other == digits.end() && digits.size() == 2 * key_bytes) return "";
  return absl::StrCat("the key has ", digits.size(), " characters",
                      other == digits.end() ? "" : ", one of which is no hexadecimal digit", "; must be ",
                      2 * key_bytes, " hexadecimal digits, or ", kNoKeyAtAll);
}

}  // namespace

EncryptionKey::~EncryptionKey() { OPENSSL_cleanse(secret.data(), secret.size()); }

absl::StatusOr<std::shared_ptr<const EncryptionKeys>> EncryptionKeys::Parse(std::string_view text,
                                                                            std::string_view tier_secret) {
  auto keys = std::make_shared<EncryptionKeys>();
  if (text.empty() || text.back() != '\n')
    return absl::InvalidArgumentError("its last line has no end: it may not be all of the file");
  absl::flat_hash_map<TierOwner, int> line_of_none;
  absl::flat_hash_map<EncryptionKeyId, int> line_of;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    if (words.size() != 2)
      return WrongLine(number, absl::StrCat("it has ", words.size(), " words; must be TENANT KEY"));
    EncryptionKey key;
    if (const std::string why = WhyNoTenant(words[0]); !why.empty()) return WrongLine(number, why);
    const TierOwner owner = DeriveTierOwner(tier_secret, std::string(words[0]));
    std::vector<EncryptionKey>& of_tenant = words[0] == kAllOthers ? keys->others_ : keys->tenants_[owner];
    if (words[1] == kNoKeyAtAll) line_of_none.try_emplace(owner, number);
    if (const auto none = line_of_none.find(owner); none != line_of_none.end()) {
      if (words[1] == kNoKeyAtAll && of_tenant.empty()) continue;
      return WrongLine(number, absl::StrCat("the tenant has a key, and by line ", none->second, " none"));
    }
    if (const std::string why = WhyNoKey(words[1], key.secret.size()); !why.empty())
      return WrongLine(number, why);
    for (size_t i = 0; i < key.secret.size(); ++i) {
      key.secret[i] = static_cast<uint8_t>(DigitOf(words[1][2 * i]) << 4 | DigitOf(words[1][2 * i + 1]));
    }
    const std::string_view secret(reinterpret_cast<const char*>(key.secret.data()), key.secret.size());
    const auto id = DeriveTierKey(secret, "encryption key id", {});
    std::copy_n(id.begin(), key.id.size(), key.id.begin());
    // A tenant whose key is forgotten is forgotten only where nobody else has that key.
    const auto [first, is_new] = line_of.try_emplace(key.id, number);
    if (!is_new) return WrongLine(number, absl::StrCat("it has the key of line ", first->second));
    of_tenant.push_back(key);
    ++keys->size_;
  }
  return keys;
}

absl::Span<const EncryptionKey> EncryptionKeys::Of(const TierOwner& owner) const {
  const auto found = tenants_.find(owner);
  return found == tenants_.end() ? others_ : found->second;
}

const EncryptionKey* EncryptionKeys::Find(const TierOwner& owner, const EncryptionKeyId& id) const {
  const absl::Span<const EncryptionKey> keys = Of(owner);
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const EncryptionKey& key) { return key.id == id; });
  return found == keys.end() ? nullptr : &*found;
}

absl::StatusOr<std::unique_ptr<EncryptionKeyFile>> EncryptionKeyFile::Open(const std::string& flag,
                                                                           const std::string& path,
                                                                           const std::string& tier_secret) {
  std::unique_ptr<EncryptionKeyFile> file(new EncryptionKeyFile(flag, path, tier_secret));
  MutexLock lock(&file->look_mu_);
  RETURN_IF_ERROR(file->Read());
  return file;
}

absl::Status EncryptionKeyFile::Read() {
  mark_.Set(path_);
  ASSIGN_OR_RETURN(std::string text, ReadSecretFile(flag_, path_, 1, kMostEncryptionKeyFileBytes));
  absl::StatusOr<std::shared_ptr<const EncryptionKeys>> keys = EncryptionKeys::Parse(text, tier_secret_);
  OPENSSL_cleanse(text.data(), text.size());
  if (!keys.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag_, "=", path_, ": ", keys.status().message()));
  }
  LogInfo("tier's encryption keys were read", {{"file", path_}, {"keys", (*keys)->size()}});
  MutexLock lock(&mu_);
  keys_ = *std::move(keys);
  return absl::OkStatus();
}

std::shared_ptr<const EncryptionKeys> EncryptionKeyFile::keys() {
  MutexLock lock(&mu_);
  return keys_;
}

void EncryptionKeyFile::Look(Clock::time_point now) {
  if (!look_mu_.TryLock()) return;
  LookAlone(now);
  look_mu_.Unlock();
}

void EncryptionKeyFile::LookAlone(Clock::time_point now) {
  if (now < look_at_) return;
  look_at_ = now + kLookPause;
  if (mark_.Holds(path_)) return;
  const absl::Status read = Read();
  if (!read.ok()) mark_ = FileMark();
  if (!read.ok() && said_ != read.message())
    LogWarning("tier's encryption keys stay as they were", {{"error", read}});
  said_ = std::string(read.message());
}

}  // namespace kvpool
