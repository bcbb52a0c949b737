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

PrefixKey ReferenceSalted(const PrefixKey& parent, const std::string& salt) {
  return Sha256("kvpool.salted.v1" + AsBytes(parent) + U32(salt.size()) + salt);
}

std::string Hex(const PrefixKey& key) {
  std::string digits;
  for (const uint8_t byte : key) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
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

// Engines of other releases and languages make these keys, too. Python's hashlib made them here.
TEST(PrefixHasher, KeysAreThoseOfEveryRelease) {
  const auto second_of = [](const PrefixHasher& hasher) { return Hex(hasher.Chain(Tokens(8), 4)[1]); };
  EXPECT_EQ(second_of(PrefixHasher("seed")),
            "fe15895af665ffe48d55a62923b494ea10c835f395b4d3efffc6fcf911ea3713");
  EXPECT_EQ(second_of(PrefixHasher("seed", "salt", 0)),
            "3c778f26b6cf031fab37fe50e510d65224ea531891566d579a18ac6439c701a0");
  EXPECT_EQ(second_of(PrefixHasher("seed", "salt", 6)),
            "600050598d3edc571975ac87b2759344f8973c143e2137624bc18bdb6624567f");
}

TEST(PrefixHasher, ASoftSaltCountsFromTheBlockThatHoldsItsPosition) {
  const std::vector<std::string_view> extra = {"adapter 7"};
  const std::vector<uint32_t> tokens = Tokens(48);
  for (const uint32_t size : {1u, 4u, 16u}) {
    const std::vector<PrefixKey> none = PrefixHasher("seed").Chain(tokens, size, extra);
    for (const uint64_t from : {1u, 3u, 4u, 15u, 16u, 17u, 31u, 32u, 47u}) {
      const PrefixHasher hasher("seed", "salt", from);
      EXPECT_EQ(hasher.root(), PrefixHasher("seed").root());
      const std::vector<PrefixKey> keys = hasher.Chain(tokens, size, extra);
      ASSERT_EQ(keys.size(), tokens.size() / size);
      PrefixKey parent = hasher.root();
      for (size_t i = 0; i < keys.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "blocks of " << size << ", salt from " << from << ", block " << i);
        const size_t first = i * size, end = first + size;
        if (i == from / size) parent = ReferenceSalted(parent, "salt");
        parent = ReferenceNext(parent, {tokens.begin() + first, tokens.begin() + end}, extra);
        EXPECT_EQ(keys[i], parent);
        EXPECT_EQ(keys[i] == none[i], end <= from);
      }
    }
  }
}

TEST(PrefixHasher, BlockByBlockASoftSaltCountsAsInAChain) {
  const std::vector<uint32_t> tokens = Tokens(64);
  for (const uint64_t from : {uint64_t{0}, uint64_t{1}, uint64_t{16}, uint64_t{20}, uint64_t{63},
                              uint64_t{64}, uint64_t{1} << 32, UINT64_MAX}) {
    const PrefixHasher hasher("seed", "salt", from);
    EXPECT_EQ(hasher.needs_positions(), from > 0);
    std::vector<PrefixKey> keys;
    for (size_t at = 0; at < tokens.size(); at += 16) {
      keys.push_back(hasher.NextAt(keys.empty() ? hasher.root() : keys.back(), at,
                                   absl::MakeSpan(tokens).subspan(at, 16)));
    }
    EXPECT_EQ(keys, hasher.Chain(tokens, 16)) << "salt from " << from;
    if (from >= 64) {
      EXPECT_EQ(keys, PrefixHasher("seed").Chain(tokens, 16)) << "nothing is behind " << from;
    }
  }
}

TEST(PrefixHasher, WhereTheSaltedBlockBeginsDecides) {
  const std::vector<uint32_t> tokens = Tokens(64);
  const auto chain = [&](std::string_view salt, uint64_t from) {
    return PrefixHasher("seed", salt, from).Chain(tokens, 16);
  };
  EXPECT_EQ(chain("a", 33), chain("a", 40));
  EXPECT_EQ(chain("a", 32), chain("a", 47));
  const std::vector<PrefixKey> a = chain("a", 40), later = chain("a", 48), b = chain("b", 40),
                               hard = chain("a", 0), in_first = chain("a", 1), none = chain("", 0);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i] == b[i], i < 2) << "another salt, block " << i;
    EXPECT_EQ(a[i] == later[i], i < 2) << "the same salt one block later, block " << i;
    EXPECT_EQ(later[i] == none[i], i < 3) << "block " << i;
    EXPECT_NE(a[i], hard[i]) << "block " << i;
    EXPECT_NE(in_first[i], hard[i]) << "block " << i;
    EXPECT_NE(in_first[i], none[i]) << "block " << i;
  }
}

TEST(PrefixHasher, APartialBlockIsSaltedIfItHoldsTheTokenOrIsBehindIt) {
  const PrefixHasher hasher("seed", "salt", 20), none("seed");
  const std::vector<uint32_t> tokens = Tokens(32);
  const absl::Span<const uint32_t> all = tokens;
  const PrefixKey parent = none.Next(none.root(), all.first(16));
  EXPECT_EQ(hasher.NextAt(parent, 16, all.subspan(16, 4)), none.Next(parent, all.subspan(16, 4)));
  EXPECT_EQ(hasher.NextAt(parent, 16, all.subspan(16, 5)),
            none.Next(ReferenceSalted(parent, "salt"), all.subspan(16, 5)));
  EXPECT_EQ(hasher.NextAt(parent, 20, all.subspan(20, 1)),
            none.Next(ReferenceSalted(parent, "salt"), all.subspan(20, 1)));
  EXPECT_EQ(hasher.NextAt(parent, 21, all.subspan(21, 4)), none.Next(parent, all.subspan(21, 4)));
  EXPECT_EQ(hasher.NextAt(parent, UINT64_MAX, all), none.Next(parent, all)) << "far behind it";
  EXPECT_EQ(hasher.NextAt(parent, 20, {}), none.Next(parent, {})) << "no token";
}

// A salt is in a message of its own, so that nothing a caller chooses otherwise stands in its place.
TEST(PrefixHasher, NothingElseImitatesASoftSalt) {
  const std::vector<uint32_t> tokens = Tokens(32);
  const absl::Span<const uint32_t> second = absl::MakeConstSpan(tokens).subspan(16);
  const PrefixHasher none("seed"), soft("seed", "salt", 16);
  const PrefixKey parent = none.Chain(tokens, 16)[0], key = soft.Chain(tokens, 16)[1];
  const PrefixKey salted = ReferenceSalted(parent, "salt");
  const std::string message = "kvpool.salted.v1" + AsBytes(parent) + U32(4) + "salt";
  for (const std::vector<std::string_view>& extra : std::vector<std::vector<std::string_view>>{
           {"salt"}, {"kvpool.salted.v1", "salt"}, {message}, {KeyBytes({&salted, 1})}}) {
    EXPECT_NE(none.Next(parent, second, extra), key);
    EXPECT_NE(soft.NextAt(parent, 16, second, extra), key);
    EXPECT_NE(PrefixHasher("seed", "salt").Chain(tokens, 16, extra)[1], key);
  }
  EXPECT_NE(PrefixHasher("seed", message).Chain(tokens, 16)[1], key);
  EXPECT_NE(PrefixHasher("seed", message).root(), salted);
  EXPECT_NE(PrefixHasher(AsBytes(parent), "salt").root(), salted);
  EXPECT_NE(none.BehindPruning(parent, {}, "salt"), salted);
  // What ends a salt is not what begins the next thing.
  EXPECT_NE(PrefixHasher("seed", std::string_view("salt\0", 5), 16).Chain(tokens, 16)[1], key);
  std::vector<uint32_t> spelled(message.size() / 4);
  std::memcpy(spelled.data(), message.data(), spelled.size() * 4);
  EXPECT_NE(none.Next(parent, spelled), salted);
}

TEST(PrefixHasher, AnEmptySaltIsNoneWhereverItCountsFrom) {
  const std::vector<uint32_t> tokens = Tokens(64);
  const PrefixHasher hasher("seed", "", 16);
  EXPECT_FALSE(hasher.needs_positions());
  EXPECT_EQ(hasher.Chain(tokens, 16), PrefixHasher("seed").Chain(tokens, 16));
  EXPECT_EQ(hasher.Next(hasher.root(), tokens), PrefixHasher("seed").Next(hasher.root(), tokens));
  EXPECT_EQ(hasher.BehindPruning(hasher.root(), tokens, "digest"),
            PrefixHasher("seed").BehindPruning(hasher.root(), tokens, "digest"));
}

TEST(PrefixHasher, BehindAPruningASoftSaltCounts) {
  const std::vector<uint32_t> tokens = Tokens(20);
  const absl::Span<const uint32_t> open = absl::MakeConstSpan(tokens).subspan(16);
  const PrefixHasher none("seed"), hard("seed", "salt"), soft("seed", "salt", 1000);
  const PrefixKey parent = none.Chain(tokens, 16)[0];
  std::string message = "kvpool.pruned.v1" + AsBytes(parent) + U32(4);
  for (const uint32_t token : open) message += U32(token);
  const PrefixKey pruned = Sha256(message + U32(6) + "digest");
  EXPECT_EQ(none.BehindPruning(parent, open, "digest"), pruned);
  EXPECT_EQ(hard.BehindPruning(parent, open, "digest"), pruned) << "the salt is in the parent";
  EXPECT_EQ(soft.BehindPruning(parent, open, "digest"), ReferenceSalted(pruned, "salt"));
  EXPECT_NE(soft.BehindPruning(parent, open, "digest"),
            PrefixHasher("seed", "other", 1000).BehindPruning(parent, open, "digest"));
}

TEST(PrefixHasherDeathTest, ASoftSaltIsNotLeftOut) {
  const PrefixHasher hasher("seed", "salt", 16);
  EXPECT_DEATH(hasher.Next(hasher.root(), Tokens(16)), "needs the block's position");
}

}  // namespace
}  // namespace kvpool
