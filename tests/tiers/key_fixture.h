// A file of encryption keys for tests, in a folder that goes with it, and tiers that seal with them.
#ifndef KVPOOL_TESTS_TIERS_KEY_FIXTURE_H_
#define KVPOOL_TESTS_TIERS_KEY_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "server/tiers/encryption_keys.h"
#include "server/tiers/sealed_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {

inline std::string TestTierSecret() { return std::string(32, 's'); }
// 64 hexadecimal digits, others for each digit that is given.
inline std::string KeyDigits(char digit) { return std::string(62, digit) + "5a"; }

class KeyFileFixture {
 public:
  explicit KeyFileFixture(const std::string& text) {
    Write(text);
    auto opened = EncryptionKeyFile::Open("tier-encryption-keys", path(), TestTierSecret());
    EXPECT_TRUE(opened.ok()) << opened.status();
    file_ = *std::move(opened);
  }
  std::string path() const { return folder_.path() + "/keys"; }
  const std::shared_ptr<EncryptionKeyFile>& file() const { return file_; }
  // As a rename does it.
  void Write(const std::string& text) const {
    const std::string made = path() + ".new";
    std::ofstream(made) << text;
    chmod(made.c_str(), 0600);
    rename(made.c_str(), path().c_str());
  }
  // Whoever has the file knows of it from then on.
  void Change(const std::string& text) {
    Write(text);
    Look();
  }
  void Look() {
    now_ += std::chrono::hours(1);
    file_->Look(now_);
  }

 private:
  const TierFolder folder_;
  std::shared_ptr<EncryptionKeyFile> file_;
  EncryptionKeyFile::Clock::time_point now_ = EncryptionKeyFile::Clock::now();
};

inline std::unique_ptr<SealedTier> SealTier(std::unique_ptr<Tier> behind, const KeyFileFixture& keys,
                                            const SealedTier::Options& options = {.buffer_bytes = 8 << 20}) {
  auto sealed = SealedTier::Make(std::move(behind), keys.file(), options);
  EXPECT_TRUE(sealed.ok()) << sealed.status();
  return *std::move(sealed);
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_KEY_FIXTURE_H_
