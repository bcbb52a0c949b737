#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "server/tiers/tier_secret.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::HasSubstr;

std::string Write(const TierFolder& folder, const std::string& bytes, mode_t mode) {
  const std::string path = folder.path() + "/secret";
  unlink(path.c_str());
  std::ofstream(path) << bytes;
  chmod(path.c_str(), mode);
  return path;
}

TEST(TierSecret, IsAllOfTheFile) {
  TierFolder folder;
  EXPECT_EQ(*ReadTierSecret("tier-key-file", Write(folder, std::string(32, 'k'), 0600)),
            std::string(32, 'k'));
  EXPECT_EQ(*ReadTierSecret("tier-key-file", Write(folder, std::string(4096, 'k'), 0440)),
            std::string(4096, 'k'));
}

TEST(TierSecret, ErrorsNameFlagFileAndLimit) {
  TierFolder folder;
  const auto why = [&](const std::string& path) {
    return std::string(ReadTierSecret("tier-key-file", path).status().message());
  };
  const std::string here = "--tier-key-file=" + folder.path() + "/secret: ";
  EXPECT_EQ(why(Write(folder, std::string(31, 'k'), 0600)), here + "it has 31 bytes; must have 32 to 4096");
  EXPECT_EQ(why(Write(folder, std::string(4097, 'k'), 0600)),
            here + "it has 4097 bytes; must have 32 to 4096");
  EXPECT_EQ(why(Write(folder, std::string(32, 'k'), 0604)),
            here + "its mode is 604; at most 640, for it is a secret");
  EXPECT_EQ(why(Write(folder, std::string(32, 'k'), 0620)),
            here + "its mode is 620; at most 640, for it is a secret");
  EXPECT_THAT(why(folder.path() + "/none"), HasSubstr("it can't be opened: No such file"));
  EXPECT_THAT(why(folder.path()), HasSubstr("it is no regular file"));
}

TEST(TierSecret, IsMadeOnceAndIsNobodyElses) {
  TierFolder folder;
  const std::string path = folder.path() + "/key";
  const std::string made = *ReadOrMakeTierSecret("tier", path);
  EXPECT_EQ(made.size(), 32);
  EXPECT_EQ(*ReadOrMakeTierSecret("tier", path), made);
  struct stat facts {};
  ASSERT_EQ(stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600);
}

TEST(TierSecret, EveryFieldAndItsBordersMatter) {
  const std::string secret(32, 'k'), other(32, 'l');
  const auto derived = DeriveTierKey(secret, "label", {"ab", "c"});
  EXPECT_EQ(DeriveTierKey(secret, "label", {"ab", "c"}), derived);
  EXPECT_NE(DeriveTierKey(other, "label", {"ab", "c"}), derived);
  EXPECT_NE(DeriveTierKey(secret, "other", {"ab", "c"}), derived);
  EXPECT_NE(DeriveTierKey(secret, "label", {"a", "bc"}), derived);
  EXPECT_NE(DeriveTierKey(secret, "label", {"ab", "c", ""}), derived);
  EXPECT_NE(DeriveTierKey(secret, "label", {std::string(100000, 'x')}), derived);
}

// The same must come out in every version of kvpool and of OpenSSL: computed by Python's hmac and hashlib.
TEST(TierSecret, IsHkdf) {
  std::string hex;
  for (const uint8_t byte : DeriveTierKey(std::string(32, 'k'), "label", {"ab", "c"})) {
    static constexpr char kDigits[] = "0123456789abcdef";
    hex += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  EXPECT_EQ(hex, "e0a9db8be2dab6dfb53bd1b03a2ec143127fca8a7509144ebc48e45e76383471");
}

}  // namespace
}  // namespace kvpool
