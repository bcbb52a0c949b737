// The form of sealed values, and the keys that open them.
#include "server/tiers/sealed_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>

#include "absl/strings/escaping.h"
#include "server/tiers/aes_gcm.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/tier_secret.h"
#include "tests/tiers/key_fixture.h"

namespace kvpool {
namespace {

using testing::HasSubstr;
using testing::Not;

template <typename Bytes>
Bytes FromHex(const std::string& hex) {
  const std::string text = absl::HexStringToBytes(hex);
  Bytes bytes;
  EXPECT_EQ(text.size(), bytes.size());
  std::memcpy(bytes.data(), text.data(), bytes.size());
  return bytes;
}

struct GcmCase {
  const char *key, *iv, *more, *plain, *cipher, *tag;
};

// Test cases 13, 14, 15 and 16 of McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)", which SP 800-38D is.
constexpr GcmCase kGcmCases[] = {
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000", "", "",
     "", "530f8afbc74536b9a963b4f1c4cb738b"},
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000", "",
     "00000000000000000000000000000000", "cea7403d4d606b6e074ec5d3baf39d18",
     "d0d1c8a799996bf0265b98b5d48ab919"},
    {"feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888", "",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf"
     "5"
     "aa0de657ba637b391aafd255",
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6"
     "3"
     "93ba7a0abcc9f662898015ad",
     "b094dac5d93471bdec1a502270e3cc6c"},
    {"feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888",
     "feedfacedeadbeeffeedfacedeadbeefabaddad2",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf"
     "5"
     "aa0de657ba637b39",
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6"
     "3"
     "93ba7a0abcc9f662",
     "76fc6ece0f4e1768cddf8853bb2d551b"}};

TEST(AesGcm, IsThatOfItsAuthors) {
  for (const GcmCase& of : kGcmCases) {
    const auto key = FromHex<AesGcmKey>(of.key);
    const auto iv = FromHex<AesGcmIv>(of.iv);
    const std::string more = absl::HexStringToBytes(of.more), plain = absl::HexStringToBytes(of.plain);
    std::string cipher(plain.size(), '\0'), back(plain.size(), '\0');
    const AesGcmTag tag = AesGcmEncrypt(key, iv, more, plain, cipher.data());
    EXPECT_EQ(absl::BytesToHexString(cipher), of.cipher);
    EXPECT_EQ(tag, FromHex<AesGcmTag>(of.tag));
    EXPECT_TRUE(AesGcmDecrypt(key, iv, more, tag, cipher, back.data()));
    EXPECT_EQ(back, plain);
    AesGcmTag other = tag;
    other[15] ^= 1;
    EXPECT_FALSE(AesGcmDecrypt(key, iv, more, other, cipher, back.data()));
    EXPECT_FALSE(AesGcmDecrypt(key, iv, more + "x", tag, cipher, back.data()));
  }
}

std::shared_ptr<const EncryptionKeys> ParseKeys(const std::string& text) {
  const auto keys = EncryptionKeys::Parse(text, TestTierSecret());
  EXPECT_TRUE(keys.ok()) << keys.status();
  return *keys;
}

class SealedForm : public testing::Test {
 protected:
  std::shared_ptr<TierBuffer> SealIt(const TierKey& name) const {
    auto sealed = BufferStock(0).Take(kSealBytes + kValueBytes);
    SealValue(name, key_, salt_, *ValueOf(1), sealed.get());
    return sealed;
  }
  // Whether it opens, and is what it was.
  bool Opens(const TierKey& name, const EncryptionKey& key, const TierBuffer& sealed) const {
    const auto value = BufferStock(0).Take(sealed.bytes() - kSealBytes);
    std::memset(value->data(), 'x', value->bytes());
    const bool opens = OpenValue(name, key, sealed, value.get());
    if (!opens) {
      EXPECT_EQ(std::string(value->data(), value->bytes()), std::string(value->bytes(), '\0'));
      return false;
    }
    EXPECT_EQ(std::memcmp(value->data(), ValueOf(1)->data(), value->bytes()), 0);
    return true;
  }

  const std::shared_ptr<const EncryptionKeys> keys_ =
      ParseKeys("* 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n* " + KeyDigits('b'));
  const EncryptionKey key_ = keys_->Of(OwnerOf(1))[0];
  const SealSalt salt_ = [] {
    SealSalt salt;
    for (size_t i = 0; i < salt.size(); ++i) salt[i] = static_cast<uint8_t>(100 + i);
    return salt;
  }();
  const TierKey name_ = SealedName(KeyOf(1));
};

// The same must come out in every version of kvpool and of OpenSSL: computed by Python's hmac and hashlib, and AESGCM of its
// cryptography.
TEST_F(SealedForm, IsWhatItWas) {
  const std::string said = "what users said";
  auto value = BufferStock(0).Take(said.size());
  std::memcpy(value->data(), said.data(), said.size());
  auto sealed = BufferStock(0).Take(kSealBytes + said.size());
  TierKey name = name_;
  name.raw = true;
  SealValue(name, key_, salt_, *value, sealed.get());
  EXPECT_EQ(
      absl::BytesToHexString({sealed->data(), sealed->bytes()}),
      "4b56505345414c318da70749cac300baf3d4893d0ab455426465666768696a6b6c6d6e6f707172737475767778797a7b271a"
      "606571158c5e68b3e793cc4dff63df787e80af698480195e3e6befc2e8");
}

TEST_F(SealedForm, OpensWithItsKeyUnderItsName) {
  const auto sealed = SealIt(name_);
  EXPECT_EQ(SealedWith(*sealed), key_.id);
  EXPECT_TRUE(Opens(name_, key_, *sealed));
  EXPECT_FALSE(Opens(name_, keys_->Of(OwnerOf(1))[1], *sealed)) << "another key";
  const auto differs = [&](const std::function<void(TierKey*)>& change) {
    TierKey name = name_;
    change(&name);
    return !Opens(name, key_, *sealed);
  };
  EXPECT_TRUE(differs([](TierKey* name) { ++name->space[31]; }));
  EXPECT_TRUE(differs([](TierKey* name) { ++name->block[31]; }));
  EXPECT_TRUE(differs([](TierKey* name) { ++name->group; }));
  EXPECT_TRUE(differs([](TierKey* name) { name->raw = !name->raw; }));
  EXPECT_TRUE(differs([](TierKey* name) { ++name->owner[15]; }));
}

TEST_F(SealedForm, EveryBitMatters) {
  const auto sealed = SealIt(name_);
  const uint64_t bits = 8 * sealed->bytes();
  for (uint64_t bit = 0; bit < bits; bit += bit < 8 * (kSealBytes + 16) ? 1 : 997) {
    sealed->data()[bit / 8] = static_cast<char>(sealed->data()[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(Opens(name_, key_, *sealed)) << bit;
    // Who looks at it first is told the same.
    EXPECT_EQ(SealedWith(*sealed).has_value(), bit >= 64) << bit;
    sealed->data()[bit / 8] = static_cast<char>(sealed->data()[bit / 8] ^ 1 << bit % 8);
  }
  EXPECT_TRUE(Opens(name_, key_, *sealed));
}

TEST_F(SealedForm, OneThatWasCutOrHasMoreDoesNotOpen) {
  const auto sealed = SealIt(name_);
  for (const uint64_t bytes : {kSealBytes, kSealBytes + 1, sealed->bytes() - 1, sealed->bytes() + 1}) {
    const auto other = BufferStock(0).Take(bytes);
    std::memset(other->data(), 0, bytes);
    std::memcpy(other->data(), sealed->data(), std::min(bytes, sealed->bytes()));
    EXPECT_FALSE(Opens(name_, key_, *other)) << bytes;
  }
}

TEST_F(SealedForm, ANameIsAnotherOneAndComesBack) {
  EXPECT_FALSE(SealedName(KeyOf(1)) == KeyOf(1));
  EXPECT_EQ(SealedName(KeyOf(1)).owner, OwnerOf(1)) << "by which it is erased";
  EXPECT_TRUE(SealedName(SealedName(KeyOf(1))) == KeyOf(1));
}

// ---------------------------------------------------------------------------------------------------- keys

TierOwner TenantOf(const std::string& name) { return DeriveTierOwner(TestTierSecret(), name); }

TEST(EncryptionKeys, ATenantsFirstLineSealsAndAllOfItsLinesOpen) {
  const auto keys =
      ParseKeys("# tenant key\n\n  acme\t" + KeyDigits('a') + "\r\nacme " + KeyDigits('B') + "\nguest@1000 " +
                KeyDigits('c') + "\n* " + KeyDigits('d') + "\n* " + KeyDigits('e'));
  EXPECT_EQ(keys->size(), 5);
  const auto acme = keys->Of(TenantOf("acme")), guest = keys->Of(TenantOf("guest@1000")),
             other = keys->Of(TenantOf("nobody"));
  ASSERT_EQ(acme.size(), 2);
  EXPECT_EQ(acme[0].secret[0], 0xaa);
  EXPECT_EQ(acme[0].secret[31], 0x5a);
  EXPECT_EQ(acme[1].secret[0], 0xbb);
  ASSERT_EQ(guest.size(), 1);
  ASSERT_EQ(other.size(), 2);
  EXPECT_EQ(other[0].secret[0], 0xdd);
  EXPECT_EQ(keys->Find(TenantOf("acme"), acme[1].id), &acme[1]);
  EXPECT_EQ(keys->Find(TenantOf("nobody"), other[1].id), &other[1]);
  EXPECT_EQ(keys->Find(TenantOf("acme"), other[0].id), nullptr) << "it has those of its own alone";
  EXPECT_EQ(keys->Find(TenantOf("guest@1000"), acme[0].id), nullptr);
  EXPECT_EQ(keys->Find(TenantOf("nobody"), acme[0].id), nullptr);
}

TEST(EncryptionKeys, WithoutALineOfStarsOthersHaveNone) {
  EXPECT_TRUE(ParseKeys("acme " + KeyDigits('a'))->Of(TenantOf("nobody")).empty());
  EXPECT_TRUE(ParseKeys("# all gone\n")->Of(TenantOf("acme")).empty());
}

TEST(EncryptionKeys, ErrorsNameTheLineAndNothingOfAKey) {
  const std::string key = KeyDigits('a');
  const auto why = [](const std::string& text) {
    return std::string(EncryptionKeys::Parse(text, TestTierSecret()).status().message());
  };
  EXPECT_EQ(why("#\n" + key), "line 2: it has 1 words; must be TENANT KEY");
  EXPECT_EQ(why("acme = " + key), "line 1: it has 3 words; must be TENANT KEY");
  EXPECT_EQ(why("* " + key + "\nacme " + key.substr(1)),
            "line 2: the key has 63 characters; must be 64 hexadecimal digits");
  EXPECT_EQ(why("acme " + key + "0"), "line 1: the key has 65 characters; must be 64 hexadecimal digits");
  EXPECT_EQ(why("acme " + key.substr(1) + "g"),
            "line 1: the key has 64 characters, one of which is no hexadecimal digit; must be 64 hexadecimal "
            "digits");
  EXPECT_EQ(why(key + " acme"),
            "line 1: the key has 4 characters, one of which is no hexadecimal digit; must be 64 hexadecimal "
            "digits");
  EXPECT_EQ(why("ac/me " + key), "line 1: the tenant must be * or of the letters, digits and ._-@");
  EXPECT_EQ(why(std::string(257, 'x') + " " + key), "line 1: the tenant has 257 bytes; must have 1 to 256");
  EXPECT_EQ(why("acme " + key + "\n\nguest " + key), "line 3: it has the key of line 1");
  EXPECT_EQ(why("acme " + KeyDigits('A') + "\nacme " + key), "line 2: it has the key of line 1");
  for (const std::string& text : {"acme = " + key, key + " acme", "acme " + key + "0"})
    EXPECT_THAT(why(text), Not(HasSubstr("aaaa")));
}

TEST(EncryptionKeyFile, ErrorsNameFlagFileAndLine) {
  TierFolder folder;
  const std::string path = folder.path() + "/keys", here = "--tier-encryption-keys=" + path + ": ";
  const auto why = [&](const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    const auto file = EncryptionKeyFile::Open("tier-encryption-keys", path, TestTierSecret());
    return std::string(file.status().message());
  };
  EXPECT_THAT(
      std::string(EncryptionKeyFile::Open("tier-encryption-keys", path, TestTierSecret()).status().message()),
      HasSubstr(here + "it can't be opened: No such file"));
  EXPECT_EQ(why("* " + KeyDigits('a'), 0644), here + "its mode is 644; at most 640, for it is a secret");
  EXPECT_EQ(why("* " + KeyDigits('a'), 0600), "");
  EXPECT_EQ(why("*\n", 0600), here + "line 1: it has 1 words; must be TENANT KEY");
  EXPECT_EQ(why(std::string(kMostEncryptionKeyFileBytes + 1, '\n'), 0600),
            here + "it has 1048577 bytes; must have 0 to 1048576");
}

TEST(EncryptionKeyFile, IsReadAgainWhenItIsAnotherAndGood) {
  KeyFileFixture fixture("* " + KeyDigits('a'));
  const auto first = fixture.file()->keys();
  fixture.Look();
  EXPECT_EQ(fixture.file()->keys(), first) << "it is the same";
  fixture.Change("* " + KeyDigits('b'));
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xbb);
  fixture.Change("* nothing\n");
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xbb) << "it is wrong";
  std::remove(fixture.path().c_str());
  fixture.Look();
  EXPECT_EQ(fixture.file()->keys()->size(), 1) << "it is gone";
  fixture.Change("# nobody has a key\n");
  EXPECT_EQ(fixture.file()->keys()->size(), 0);
}

TEST(EncryptionKeyFile, IsLookedAtOnceASecond) {
  KeyFileFixture fixture("* " + KeyDigits('a'));
  const auto now = EncryptionKeyFile::Clock::now();
  fixture.file()->Look(now);
  fixture.Write("* " + KeyDigits('b'));
  fixture.file()->Look(now + std::chrono::milliseconds(999));
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xaa);
  fixture.file()->Look(now + std::chrono::milliseconds(1000));
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xbb);
}

}  // namespace
}  // namespace kvpool
