#include "client/prefix_hasher.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace kvpool {
namespace {

std::string U32(uint32_t value) {
  std::string bytes(4, '\0');
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

// The definition in the header, written down as it reads, over OpenSSL's EVP.
PrefixKey Sha256(const std::string& message) {
  PrefixKey key;
  unsigned size = 0;
  EXPECT_EQ(EVP_Digest(message.data(), message.size(), key.data(), &size, EVP_sha256(), nullptr), 1);
  return key;
}

std::string AsBytes(const PrefixKey& key) { return std::string(KeyBytes({&key, 1})); }

PrefixKey ReferenceNext(const PrefixKey& parent, const std::vector<uint32_t>& tokens,
                        const std::vector<std::string_view>& extra_keys) {
  std::string message = AsBytes(parent) + U32(tokens.size());
  for (const uint32_t token : tokens) message += U32(token);
  for (const std::string_view extra : extra_keys) message += U32(extra.size()) + std::string(extra);
  return Sha256(message);
}

std::vector<uint32_t> Tokens(size_t count) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 100'000);
  return tokens;
}

TEST(PrefixHasher, RootBindsSeedAndSalt) {
  const std::string seed(32, 's');
  EXPECT_EQ(PrefixHasher(seed).root(), Sha256("kvpool.prefix.v1" + seed + U32(0)));
  EXPECT_EQ(PrefixHasher(seed, "tenant").root(), Sha256("kvpool.prefix.v1" + seed + U32(6) + "tenant"));
}

// Sizes on both sides of SHA-256's padding borders, and of what is hashed in one piece.
TEST(PrefixHasher, AgreesWithItsDefinition) {
  const PrefixHasher hasher("seed");
  for (const size_t count : {0, 1, 4, 5, 6, 7, 16, 20, 21, 22, 23, 32, 64, 255, 256, 257, 4096}) {
    const std::vector<uint32_t> tokens = Tokens(count);
    EXPECT_EQ(hasher.Next(hasher.root(), tokens), ReferenceNext(hasher.root(), tokens, {}))
        << count << " tokens";
    const std::vector<std::string_view> extra = {"adapter 7", "", "image"};
    EXPECT_EQ(hasher.Next(hasher.root(), tokens, extra), ReferenceNext(hasher.root(), tokens, extra))
        << count << " tokens and extra keys";
  }
}

TEST(PrefixHasher, ChainsFullBlocksOnly) {
  const PrefixHasher hasher("seed", "salt");
  const std::vector<uint32_t> tokens = Tokens(16 * 3 + 15);
  const std::vector<PrefixKey> keys = hasher.Chain(tokens, 16);
  ASSERT_EQ(keys.size(), 3u);
  PrefixKey parent = hasher.root();
  for (size_t i = 0; i < keys.size(); ++i) {
    parent = hasher.Next(parent, absl::MakeSpan(tokens).subspan(i * 16, 16));
    EXPECT_EQ(keys[i], parent) << "block " << i;
  }
}

TEST(PrefixHasher, KeysDifferWhereContentDiffers) {
  const PrefixHasher hasher("seed");
  const std::vector<uint32_t> tokens = Tokens(16);
  const PrefixKey key = hasher.Next(hasher.root(), tokens);
  EXPECT_NE(key, PrefixHasher("other seed").Next(PrefixHasher("other seed").root(), tokens));
  EXPECT_NE(key, PrefixHasher("seed", "salt").Chain(tokens, 16)[0]);
  EXPECT_NE(key, hasher.Next(key, tokens));
  EXPECT_NE(hasher.Next(key, tokens, {"ab", "c"}), hasher.Next(key, tokens, {"a", "bc"}));
}

}  // namespace
}  // namespace kvpool
