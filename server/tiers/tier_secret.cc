#include "server/tiers/tier_secret.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "proto/support/unique_fd.h"
#include "server/base/random_bytes.h"

namespace kvpool {
namespace {

absl::Status Wrong(const std::string& flag, const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": ", what));
}

// One that can't be looked at, or a link to what is not there now, is not to be replaced.
bool IsThere(const std::string& path) {
  struct stat facts {};
  return lstat(path.c_str(), &facts) == 0 || errno != ENOENT;
}

// It is there whole or not at all.
absl::Status Write(const std::string& flag, const std::string& path, const std::string& secret) {
  const std::string made = path + ".new";
  unlink(made.c_str());
  const UniqueFd file(open(made.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid() ||
      write(file.get(), secret.data(), secret.size()) != static_cast<ssize_t>(secret.size()) ||
      fsync(file.get()) != 0 || rename(made.c_str(), path.c_str()) != 0) {
    return Wrong(flag, path, std::string(absl::ErrnoToStatus(errno, "it can't be made").message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadTierSecret(const std::string& flag, const std::string& path) {
  return ReadSecretFile(flag, path, kLeastTierSecretBytes, kMostTierSecretBytes);
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& flag, const std::string& path,
                                           size_t least_bytes, size_t most_bytes) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!file.valid() || fstat(file.get(), &facts) != 0) {
    return Wrong(flag, path, std::string(absl::ErrnoToStatus(errno, "it can't be opened").message()));
  }
  if (!S_ISREG(facts.st_mode)) return Wrong(flag, path, "it is no regular file");
  if (facts.st_uid != geteuid() && facts.st_uid != 0) {
    return Wrong(flag, path,
                 absl::StrCat("it belongs to uid ", facts.st_uid, ", and must to the daemon's, ", geteuid(),
                              ", or root's"));
  }
  if ((facts.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return Wrong(
        flag, path,
        absl::StrCat("its mode is ", absl::Hex(facts.st_mode >> 6 & 7), absl::Hex(facts.st_mode >> 3 & 7),
                     absl::Hex(facts.st_mode & 7), "; at most 640, for it is a secret"));
  }
  std::string secret(most_bytes + 1, '\0');
  const ssize_t bytes = read(file.get(), secret.data(), secret.size());
  if (bytes < 0)
    return Wrong(flag, path, std::string(absl::ErrnoToStatus(errno, "it can't be read").message()));
  secret.resize(static_cast<size_t>(bytes));
  if (secret.size() < least_bytes || secret.size() > most_bytes) {
    return Wrong(
        flag, path,
        absl::StrCat("it has ", facts.st_size, " bytes; must have ", least_bytes, " to ", most_bytes));
  }
  return secret;
}

absl::StatusOr<std::string> ReadOrMakeTierSecret(const std::string& flag, const std::string& path) {
  if (IsThere(path)) return ReadTierSecret(flag, path);
  std::string secret = RandomBytes(kLeastTierSecretBytes);
  RETURN_IF_ERROR(Write(flag, path, secret));
  return secret;
}

absl::Status CheckTierSecret(const std::string& flag, const std::string& path, const std::string& secret) {
  if (!IsThere(path)) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string there, ReadTierSecret(flag, path));
  if (there == secret) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--", flag, "=", path,
                   ": it is another secret than the daemon's, which would find nothing of what lies there: "
                   "start the daemon with this tier, or with --tier-key-file=",
                   path));
}

absl::Status KeepTierSecret(const std::string& flag, const std::string& path, const std::string& secret) {
  RETURN_IF_ERROR(CheckTierSecret(flag, path, secret));
  return IsThere(path) ? absl::OkStatus() : Write(flag, path, secret);
}

std::array<uint8_t, 32> DeriveTierKey(std::string_view secret, std::string_view label,
                                      absl::Span<const std::string> fields) {
  std::string text;
  for (const std::string& field : fields) {
    for (int shift = 0; shift < 64; shift += 8)
      text.push_back(static_cast<char>(uint64_t{field.size()} >> shift));
    text += field;
  }
  // Fields may be longer than OpenSSL takes as info.
  std::string info(label);
  info.resize(label.size() + SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(info.data() + label.size()));
  std::array<uint8_t, 32> derived;
  size_t bytes = derived.size();
  const std::unique_ptr<EVP_PKEY_CTX, decltype(&EVP_PKEY_CTX_free)> context(
      EVP_PKEY_CTX_new_id(EVP_PKEY_HKDF, nullptr), &EVP_PKEY_CTX_free);
  const auto at = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  const bool derives =
      context != nullptr && EVP_PKEY_derive_init(context.get()) > 0 &&
      EVP_PKEY_CTX_set_hkdf_md(context.get(), EVP_sha256()) > 0 &&
      EVP_PKEY_CTX_set1_hkdf_key(context.get(), at(secret), static_cast<int>(secret.size())) > 0 &&
      EVP_PKEY_CTX_add1_hkdf_info(context.get(), at(info), static_cast<int>(info.size())) > 0 &&
      EVP_PKEY_derive(context.get(), derived.data(), &bytes) > 0;
  KVPOOL_CHECK(derives && bytes == derived.size(), "OpenSSL has no HKDF of %zu bytes of info", info.size());
  return derived;
}

TierOwner DeriveTierOwner(std::string_view secret, const std::string& tenant_scope) {
  const TierSpace digest = DeriveTierKey(secret, "tier owner", {kTierVersion, tenant_scope});
  TierOwner owner;
  std::copy_n(digest.begin(), owner.size(), owner.begin());
  return owner;
}

}  // namespace kvpool
