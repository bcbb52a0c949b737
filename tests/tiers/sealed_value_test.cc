// The form of sealed values, and the keys that open them.
#include "server/tiers/sealed_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

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
    SealValue(name, key_, *ValueOf(1), sealed.get());
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

  const std::shared_ptr<const EncryptionKeys> keys_ = ParseKeys(
      "* 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n* " + KeyDigits('b') + "\n");
  const EncryptionKey key_ = keys_->Of(OwnerOf(1))[0];
  const TierKey name_ = SealedName(KeyOf(1));
};

// The same must come out in every version of kvpool and of OpenSSL: computed by Python's hmac and hashlib, and AESGCM of its
// cryptography.
TEST_F(SealedForm, IsWhatItWas) {
  const std::string said = "what users said";
  auto value = BufferStock(0).Take(said.size());
  std::memcpy(value->data(), said.data(), said.size());
  auto sealed = BufferStock(0).Take(kSealBytes + said.size());
  SealValue(name_, key_, *value, sealed.get());
  EXPECT_EQ(
      absl::BytesToHexString({sealed->data(), sealed->bytes()}),
      "4b56505345414c318da70749cac300baf3d4893d0ab455423a0bf902613564598a25e4fce63a5d1f705b5e9fdc787a065240"
      "f2ea7a6a5c6f40a7dcbd150cbcf6b45af8fe387ee203f49ebb4ca7cee9");
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

// Other bytes, another name or another key: another salt, and so another key of the value's own. The same ones: the same bytes on
// every node, after every start, and in every copy of a machine.
TEST_F(SealedForm, TheSaltIsAFunctionOfAllThatIsSealed) {
  std::set<std::string> salts;
  uint32_t sealed_values = 0;
  const auto seal = [&](const TierKey& name, const EncryptionKey& key, const TierBuffer& value) {
    auto sealed = BufferStock(0).Take(kSealBytes + value.bytes());
    SealValue(name, key, value, sealed.get());
    salts.insert(std::string(sealed->data() + 24, 24));
    ++sealed_values;
    return std::string(sealed->data(), sealed->bytes());
  };
  const auto value = ValueOf(1);
  const std::string once = seal(name_, key_, *value);
  EXPECT_EQ(seal(name_, key_, *value), once);
  --sealed_values;
  for (uint64_t bit = 0; bit < 8 * kValueBytes; bit += 37) {
    value->data()[bit / 8] = static_cast<char>(value->data()[bit / 8] ^ 1 << bit % 8);
    seal(name_, key_, *value);
    value->data()[bit / 8] = static_cast<char>(value->data()[bit / 8] ^ 1 << bit % 8);
  }
  for (uint64_t bytes = 1; bytes < 100; ++bytes) {
    const auto zeros = BufferStock(0).Take(bytes);
    std::memset(zeros->data(), 0, bytes);
    seal(name_, key_, *zeros);
  }
  for (const auto& change : std::vector<std::function<void(TierKey*)>>{
           [](TierKey* name) { ++name->space[0]; }, [](TierKey* name) { ++name->block[0]; },
           [](TierKey* name) { ++name->group; }, [](TierKey* name) { name->raw = !name->raw; },
           [](TierKey* name) { ++name->owner[0]; }}) {
    TierKey name = name_;
    change(&name);
    seal(name, key_, *value);
  }
  seal(name_, keys_->Of(OwnerOf(1))[1], *value);
  EXPECT_EQ(salts.size(), sealed_values);
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
                KeyDigits('c') + "\n* " + KeyDigits('d') + "\n* " + KeyDigits('e') + "\n");
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
  EXPECT_TRUE(ParseKeys("acme " + KeyDigits('a') + "\n")->Of(TenantOf("nobody")).empty());
  EXPECT_TRUE(ParseKeys("# all gone\n")->Of(TenantOf("acme")).empty());
}

TEST(EncryptionKeys, ATenantMayHaveNoneBesideAKeyOfAllOthers) {
  const auto keys = ParseKeys("acme none\n* " + KeyDigits('a') + "\nacme none\n");
  EXPECT_TRUE(keys->Of(TenantOf("acme")).empty());
  EXPECT_EQ(keys->Find(TenantOf("acme"), keys->Of(TenantOf("nobody"))[0].id), nullptr);
  EXPECT_EQ(keys->size(), 1);
}

TEST(EncryptionKeys, APartOfAFileIsNotTakenForAllOfIt) {
  const std::string text = "acme " + KeyDigits('a') + "\n* " + KeyDigits('b') + "\n";
  for (size_t bytes = 0; bytes < text.size(); ++bytes) {
    const bool parses = EncryptionKeys::Parse(text.substr(0, bytes), TestTierSecret()).ok();
    EXPECT_EQ(parses, bytes > 0 && text[bytes - 1] == '\n') << bytes;
  }
}

TEST(EncryptionKeys, ErrorsNameTheLineAndNothingOfAKey) {
  const std::string key = KeyDigits('a');
  const auto why = [](const std::string& text) {
    return std::string(EncryptionKeys::Parse(text + "\n", TestTierSecret()).status().message());
  };
  EXPECT_EQ(why("#\n" + key), "line 2: it has 1 words; must be TENANT KEY");
  EXPECT_EQ(why("acme = " + key), "line 1: it has 3 words; must be TENANT KEY");
  EXPECT_EQ(why("* " + key + "\nacme " + key.substr(1)),
            "line 2: the key has 63 characters; must be 64 hexadecimal digits, or none");
  EXPECT_EQ(why("acme " + key + "0"),
            "line 1: the key has 65 characters; must be 64 hexadecimal digits, or none");
  EXPECT_EQ(why("acme " + key.substr(1) + "g"),
            "line 1: the key has 64 characters, one of which is no hexadecimal digit; must be 64 hexadecimal "
            "digits, or none");
  EXPECT_EQ(why(key + " acme"),
            "line 1: the key has 4 characters, one of which is no hexadecimal digit; must be 64 hexadecimal "
            "digits, or none");
  EXPECT_EQ(why("ac/me " + key), "line 1: the tenant must be * or of the letters, digits and ._-@");
  EXPECT_EQ(why(std::string(257, 'x') + " " + key), "line 1: the tenant has 257 bytes; must have 1 to 256");
  EXPECT_EQ(why("acme " + key + "\n\nguest " + key), "line 3: it has the key of line 1");
  EXPECT_EQ(why("acme " + KeyDigits('A') + "\nacme " + key), "line 2: it has the key of line 1");
  EXPECT_EQ(why("acme none\nacme " + key), "line 2: the tenant has a key, and by line 1 none");
  EXPECT_EQ(why("acme " + key + "\nacme none"), "line 2: the tenant has a key, and by line 2 none");
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
  EXPECT_EQ(why("* " + KeyDigits('a') + "\n", 0600), "");
  EXPECT_EQ(why("* " + KeyDigits('a'), 0600),
            here + "its last line has no end: it may not be all of the file");
  EXPECT_EQ(why("*\n", 0600), here + "line 1: it has 1 words; must be TENANT KEY");
  EXPECT_EQ(why(std::string(kMostEncryptionKeyFileBytes + 1, '\n'), 0600),
            here + "it has 1048577 bytes; must have 1 to 1048576");
}

TEST(EncryptionKeyFile, IsReadAgainWhenItIsAnotherAndGood) {
  const std::string line_a = "* " + KeyDigits('a') + "\n", line_b = "* " + KeyDigits('b') + "\n";
  KeyFileFixture fixture(line_a);
  const auto first = [&] { return fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0]; };
  const auto before = fixture.file()->keys();
  fixture.Look();
  EXPECT_EQ(fixture.file()->keys(), before) << "it is the same";
  fixture.Change(line_b);
  EXPECT_EQ(first(), 0xbb);
  fixture.Change("* nothing\n");
  EXPECT_EQ(first(), 0xbb) << "it is wrong";
  fixture.Change("");
  EXPECT_EQ(first(), 0xbb) << "somebody is about to write it";
  fixture.Change("* " + KeyDigits('a'));
  EXPECT_EQ(first(), 0xbb) << "somebody is writing it";
  std::remove(fixture.path().c_str());
  fixture.Look();
  EXPECT_EQ(first(), 0xbb) << "it is gone";
  fixture.Change("# nobody has a key\n");
  EXPECT_EQ(fixture.file()->keys()->size(), 0);
}

// What could not be read, for want of a descriptor or so, is read by the next look, though it is the same file.
TEST(EncryptionKeyFile, ThatCouldNotBeReadIsTriedAgain) {
  KeyFileFixture fixture("* " + KeyDigits('a') + "\n");
  fixture.Write("* " + KeyDigits('b') + "\n");
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  fixture.Look();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xaa);
  fixture.Look();
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xbb);
}

TEST(EncryptionKeyFile, IsLookedAtOnceASecond) {
  KeyFileFixture fixture("* " + KeyDigits('a') + "\n");
  const auto now = EncryptionKeyFile::Clock::now();
  fixture.file()->Look(now);
  fixture.Write("* " + KeyDigits('b') + "\n");
  fixture.file()->Look(now + std::chrono::milliseconds(999));
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xaa);
  fixture.file()->Look(now + std::chrono::milliseconds(1000));
  EXPECT_EQ(fixture.file()->keys()->Of(TenantOf("x"))[0].secret[0], 0xbb);
}

}  // namespace
}  // namespace kvpool
