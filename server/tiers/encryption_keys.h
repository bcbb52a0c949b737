// The keys that values of tiers are sealed with (sealed_value.h), from a file that is a secret.
//
//   # tenant  key
//   acme      64 hexadecimal digits
//   guest     none
//   *         64 hexadecimal digits
//
// A tenant is named as kvpoolctl spaces does. Its first line is what its values are sealed with from now on, and the others open
// what was sealed before. The lines of * are for all tenants that no line names; each value's own key is derived with its
// tenant's digest, so that none of these opens what is another's. A tenant that has lines has those alone: one whose only line
// says none has no key, also where there is a *.
#ifndef KVPOOL_SERVER_TIERS_ENCRYPTION_KEYS_H_
#define KVPOOL_SERVER_TIERS_ENCRYPTION_KEYS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/tiers/file_mark.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

// Some ten thousand lines.
inline constexpr size_t kMostEncryptionKeyFileBytes = 1 << 20;

// Derived from the key: what is sealed names it, and no two keys can be taken for one.
using EncryptionKeyId = std::array<uint8_t, 16>;

// Its memory is wiped when it goes.
struct EncryptionKey {
  EncryptionKey() = default;
  EncryptionKey(const EncryptionKey&) = default;
  EncryptionKey& operator=(const EncryptionKey&) = default;
  ~EncryptionKey();

  std::array<uint8_t, 32> secret{};
  EncryptionKeyId id{};
};

// All that one file says.
class EncryptionKeys {
 public:
  // INVALID_ARGUMENT says which line is wrong, and how; nothing of a key is in it. Tenants are looked for by their digests, which
  // need the tier's secret (tier_secret.h). The last line has an end too: a part of a file is not taken for all of it.
  static absl::StatusOr<std::shared_ptr<const EncryptionKeys>> Parse(std::string_view text,
                                                                     std::string_view tier_secret);
  // The first one seals. None: the tenant has no key.
  absl::Span<const EncryptionKey> Of(const TierOwner& owner) const;
  // Null: it is none of the tenant's.
  const EncryptionKey* Find(const TierOwner& owner, const EncryptionKeyId& id) const;
  size_t size() const { return size_; }

 private:
  absl::flat_hash_map<TierOwner, std::vector<EncryptionKey>> tenants_;
  std::vector<EncryptionKey> others_;  // Lines of *.
  size_t size_ = 0;
};

// The file. One that is replaced or changed is read again. Thread-safe.
class EncryptionKeyFile {
 public:
  using Clock = std::chrono::steady_clock;
  // So often it is asked whether the file is another: what it has no more is forgotten by then.
  static constexpr std::chrono::seconds kLookPause{1};

  // INVALID_ARGUMENT names flag, file and line.
  static absl::StatusOr<std::unique_ptr<EncryptionKeyFile>> Open(const std::string& flag,
                                                                 const std::string& path,
                                                                 const std::string& tier_secret);
  // From memory.
  std::shared_ptr<const EncryptionKeys> keys() ABSL_LOCKS_EXCLUDED(mu_);
  // Reads the file if it is another, the last look was long ago, and nobody else does. Where it can't be read, is empty or wrong, the
  // keys stay those of before, the log says why once, and the next look reads it again.
  void Look(Clock::time_point now) ABSL_LOCKS_EXCLUDED(look_mu_, mu_);

 private:
  EncryptionKeyFile(std::string flag, std::string path, std::string tier_secret)
      : flag_(std::move(flag)), path_(std::move(path)), tier_secret_(std::move(tier_secret)) {}
  void LookAlone(Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(look_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(look_mu_) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string flag_, path_, tier_secret_;
  Mutex look_mu_;  // Whoever has it reads the file.
  FileMark mark_ ABSL_GUARDED_BY(look_mu_);
  Clock::time_point look_at_ ABSL_GUARDED_BY(look_mu_);
  std::string said_ ABSL_GUARDED_BY(look_mu_);  // Why the last look changed nothing.
  Mutex mu_ ABSL_ACQUIRED_AFTER(look_mu_);
  std::shared_ptr<const EncryptionKeys> keys_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_ENCRYPTION_KEYS_H_
