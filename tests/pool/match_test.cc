// Match: how long the prefix is, which blocks it has, what they cost, and why it is not longer.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/pool/block_pool.h"
#include "server/pool/match_search.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<BlockRef>;

TEST(Match, LeadingRunIsHeld) {
  TestPool t(8);
  const Holder a = t.Session(), b = t.Session();
  const Refs c = t.Cache(a, {"x", "y", "z"});
  const MatchOutcome m = t.Match(b, {"x", "y", "other", "z"});
  EXPECT_EQ(m.tokens, 2u);
  EXPECT_EQ(m.blocks, std::vector<Refs>({{c[0], c[1]}}));
  EXPECT_EQ(m.miss, MissReason::kNeverSeen);
  EXPECT_EQ(t.pool.holds(b, c[0].id), 1u);
  EXPECT_EQ(t.refs(c[0]), 2u) << "b, and its sealed child";
  EXPECT_EQ(t.state(c[2]), BlockState::kCached);
  EXPECT_EQ(t.Match(b, {"x"}).miss, MissReason::kNone);
  EXPECT_EQ(t.pool.holds(b, c[0].id), 2u);
  EXPECT_EQ(t.pool.counters().lookups, 2u);
  EXPECT_EQ(t.pool.counters().lookup_blocks, 5u);
  EXPECT_EQ(t.pool.counters().hit_blocks, 3u);
}

TEST(Match, LongRunsCrossTheChunksOfTheLookup) {
  TestPool t(300);
  const Holder a = t.Session();
  std::vector<std::string> names;
  for (int i = 0; i < 200; ++i) names.push_back("k" + std::to_string(i));
  const Refs c = t.Cache(a, names);
  EXPECT_EQ(t.Match(a, names).blocks[0], c);
  names[150] = "other";
  EXPECT_EQ(t.Match(a, names).tokens, 150u);
}

// A match in parts finds, holds and counts what one match of all keys does, wherever it ends and for whatever reason.
TEST(Match, PartsAreOneMatch) {
  constexpr size_t kKeys = 12;
  std::vector<std::string> names;
  for (size_t i = 0; i < kKeys; ++i) names.push_back("k" + std::to_string(i));
  const std::vector<BlockKey> keys = Keys(names);
  enum class End { kNone, kMissing, kEvicted, kCap, kCredit };
  for (const End end : {End::kNone, End::kMissing, End::kEvicted, End::kCap, End::kCredit}) {
    for (size_t place = 0; place < kKeys; ++place) {
      MatchOutcome found[2];
      uint32_t held[2], regret[2];
      uint64_t lookups[2], lookup_tokens[2], hit_tokens[2];
      for (const size_t part : {kKeys, size_t{3}}) {
        const bool whole = part == kKeys;
        TestPool t(32);
        const Holder a = t.Session();
        std::vector<std::string> cached = names;
        if (end == End::kMissing) cached.resize(place);
        const Refs blocks = cached.empty() ? Refs() : t.Cache(a, cached);
        if (end == End::kEvicted) t.Reclaim(static_cast<uint32_t>(kKeys - place));
        const auto most = static_cast<uint32_t>(place);
        const Holder b = t.Session({.guaranteed = 0, .max_blocks = end == End::kCap && most > 0 ? most : 0});
        // All but `place` of the available blocks are promised to another.
        if (end == End::kCredit) t.Session({.guaranteed = 32 - most});
        MatchOutcome& sum = found[whole];
        sum.blocks.resize(1);
        for (size_t at = 0; at < kKeys; at += part) {
          const GroupQuery query = {0, absl::MakeConstSpan(keys).subspan(at, part), 16};
          MatchOutcome out;
          if (sum.tokens < at * 16) {
            t.pool.CountMissed(t.now, query.keys);
            continue;
          }
          if (whole) {
            t.pool.Match(b, t.now, {&query, 1}, &out);
          } else {
            t.pool.MatchOn(b, t.now, {&query, 1}, &out);
          }
          sum.tokens += out.tokens;
          sum.miss = out.miss;
          sum.blocks[0].insert(sum.blocks[0].end(), out.blocks[0].begin(), out.blocks[0].end());
        }
        if (!whole) t.pool.CountLookup({.blocks = kKeys, .tokens = kKeys * 16, .hit_tokens = sum.tokens});
        held[whole] = t.pool.holds(b);
        regret[whole] = static_cast<uint32_t>(t.pool.counters().regret);
        lookups[whole] = t.pool.counters().lookups;
        lookup_tokens[whole] = t.pool.counters().lookup_tokens;
        hit_tokens[whole] = t.pool.counters().hit_tokens;
        EXPECT_EQ(t.pool.counters().lookup_blocks, kKeys);
      }
      EXPECT_EQ(found[0].tokens, found[1].tokens);
      EXPECT_EQ(found[0].blocks, found[1].blocks);
      EXPECT_EQ(found[0].miss, found[1].miss);
      EXPECT_EQ(held[0], held[1]);
      EXPECT_EQ(regret[0], regret[1]);
      EXPECT_EQ(lookups[0], 1u);
      EXPECT_EQ(lookups[1], 1u);
      EXPECT_EQ(lookup_tokens[0], lookup_tokens[1]);
      EXPECT_EQ(hit_tokens[0], hit_tokens[1]);
      EXPECT_EQ(held[0], found[0].blocks[0].size());
    }
  }
}

TEST(Match, GroupsHaveSeparateKeys) {
  TestPool t(8, {.windows = {0, 0}});
  const Holder a = t.Session();
  t.Cache(a, {"x"}, 0);
  EXPECT_EQ(t.Match(a, {"x"}, 1).tokens, 0u);
  EXPECT_EQ(t.Match(a, {"x"}, 0).tokens, 1u);
}

TEST(Match, EvictedAndRegrettedOnce) {
  TestPool t(8);
  const Holder a = t.Session();
  t.Cache(a, {"x", "y"});
  t.Reclaim(2);
  EXPECT_EQ(t.Match(a, {"x", "y", "z"}).miss, MissReason::kEvicted);
  EXPECT_EQ(t.pool.counters().regret, 2u);
  EXPECT_EQ(t.Match(a, {"x", "y", "z"}).miss, MissReason::kEvicted);
  EXPECT_EQ(t.pool.counters().regret, 2u) << "once for each eviction";
  EXPECT_EQ(*t.pool.EvictedAgo(Key("x"), t.now + 5), 5u);
  EXPECT_FALSE(t.pool.EvictedAgo(Key("z"), t.now).ok());
  t.Cache(a, {"x"});
  EXPECT_FALSE(t.pool.EvictedAgo(Key("x"), t.now).ok()) << "it is back";
  t.Reclaim(1);
  t.Match(a, {"x"});
  EXPECT_EQ(t.pool.counters().regret, 3u);
}

TEST(Match, WindowedGroupNeedsTheLastWindowAlone) {
  TestPool t(16, {.windows = {2}});
  const Holder a = t.Session();
  const Refs c = t.Cache(a, {"a", "b", "c", "d", "e"});
  EXPECT_EQ(t.pool.View(c[1].id, t.now)->parent, kNullBlock);
  t.pool.Reclaim(t.now, {c[0], c[2]}, EvictReason::kOperator, nullptr);
  MatchOutcome m = t.Match(a, {"a", "b", "c", "d", "e"});
  EXPECT_EQ(m.tokens, 5u);
  EXPECT_EQ(m.blocks[0], Refs({kNullRef, kNullRef, kNullRef, c[3], c[4]}));
  EXPECT_EQ(t.pool.holds(a, c[1].id), 0u);
  m = t.Match(a, {"a", "b", "c", "d", "f"});
  EXPECT_EQ(m.tokens, 0u) << "no length has its last two blocks, or both of the first";
  EXPECT_EQ(m.miss, MissReason::kWindow);
  EXPECT_TRUE(m.blocks[0].empty());
}

TEST(Match, ShortPrefixNeedsAllOfItsBlocksInAWindow) {
  TestPool t(16, {.windows = {3}});
  const Holder a = t.Session();
  const Refs c = t.Cache(a, {"a", "b"});
  EXPECT_EQ(t.Match(a, {"a", "b"}).blocks[0], c);
  EXPECT_EQ(t.Match(a, {"a", "b", "c"}).tokens, 2u);
}

// A hole shortens the prefix by a key or two, and what the last window was found to have is behind it then.
TEST(WindowedMatch, AWindowFullOfHolesIsLookedUpOnce) {
  constexpr uint32_t kKeys = 2048, kAtOnce = 32;
  TestPool t(kKeys, {.windows = {64}});
  const Holder a = t.Session();
  std::vector<std::string> names;
  for (uint32_t i = 0; i < kKeys; ++i) {
    names.push_back("w" + std::to_string(i));
    if (i % 2 == 1) t.Cache(a, {names.back()});
  }
  const std::vector<BlockKey> keys = Keys(names);
  const GroupQuery query{0, keys, 16};
  MatchSearch search(t.pool, {&query, 1});
  uint32_t looks = 1;
  while (!search.Look(kAtOnce)) ++looks;
  EXPECT_EQ(search.steps(), 0u);
  EXPECT_LE(looks, kKeys / kAtOnce + 1);
}

class JointMatch : public ::testing::Test {
 protected:
  // Two full groups of 2 and 3 tokens a block, and one of 2 with a window of 2.
  JointMatch() : t(32, {.windows = {0, 0, 2}}), a(t.Session()) {}
  MatchOutcome Match(const std::vector<std::string>& f, const std::vector<std::string>& g,
                     const std::vector<std::string>& w) {
    const std::vector<BlockKey> keys[] = {Keys(f, 0), Keys(g, 1), Keys(w, 2)};
    const GroupQuery queries[] = {{0, keys[0], 2}, {1, keys[1], 3}, {2, keys[2], 2}};
    MatchOutcome out;
    t.pool.Match(a, t.now, queries, &out);
    return out;
  }
  TestPool t;
  Holder a;
};

TEST_F(JointMatch, LengthIsWholeBlocksInEveryGroup) {
  const Refs f = t.Cache(a, {"a", "b", "c", "d", "e", "f"}, 0);
  const Refs g = t.Cache(a, {"a", "b", "c", "d"}, 1);
  const Refs w = t.Cache(a, {"a", "b", "c", "d", "e", "f"}, 2);
  MatchOutcome m =
      Match({"a", "b", "c", "d", "e", "f"}, {"a", "b", "c", "d"}, {"a", "b", "c", "d", "e", "f"});
  EXPECT_EQ(m.tokens, 12u);
  EXPECT_EQ(m.miss, MissReason::kNone);
  EXPECT_EQ(m.blocks[2], Refs({kNullRef, kNullRef, kNullRef, kNullRef, w[4], w[5]}));
  m = Match({"a", "b", "c", "d", "e", "x"}, {"a", "b", "c", "d"}, {"a", "b", "c", "d", "e", "f"});
  EXPECT_EQ(m.tokens, 6u) << "10 tokens are no whole blocks of 3";
  EXPECT_EQ(m.miss, MissReason::kNeverSeen);
  EXPECT_EQ(m.blocks[0], Refs({f[0], f[1], f[2]}));
  EXPECT_EQ(m.blocks[1], Refs({g[0], g[1]}));
  EXPECT_EQ(m.blocks[2], Refs({kNullRef, w[1], w[2]}));
  t.pool.CheckInvariants();
}

TEST_F(JointMatch, WindowShortensAll) {
  t.Cache(a, {"a", "b", "c", "d", "e", "f"}, 0);
  t.Cache(a, {"a", "b", "c", "d"}, 1);
  t.Cache(a, {"a", "b", "c", "d", "x", "f"}, 2);
  const MatchOutcome m =
      Match({"a", "b", "c", "d", "e", "f"}, {"a", "b", "c", "d"}, {"a", "b", "c", "d", "e", "f"});
  EXPECT_EQ(m.tokens, 6u);
  EXPECT_EQ(m.miss, MissReason::kWindow);
}

TEST(Match, CreditShortensIt) {
  TestPool t(6);
  const Holder a = t.Session(), b = t.Session();
  const Refs c = t.Cache(a, {"x", "y", "z", "w"});
  t.Session({.guaranteed = 4});
  const MatchOutcome m = t.Match(b, {"x", "y", "z", "w"});
  EXPECT_EQ(m.tokens, 2u);
  EXPECT_EQ(m.miss, MissReason::kCredit);
  EXPECT_EQ(m.blocks[0], Refs({c[0], c[1]}));
  EXPECT_EQ(t.pool.available(), t.pool.promised());
}

TEST(Match, ChainInFrontOfAMidwayMatchTakesCreditToo) {
  TestPool t(6);
  const Holder a = t.Session(), b = t.Session();
  const Refs c = t.Cache(a, {"x", "y", "z", "w"});
  const Holder g = t.Session({.guaranteed = 4});
  EXPECT_EQ(t.Match(b, {"z"}).miss, MissReason::kCredit) << "x and y would be sealed as well";
  EXPECT_EQ(t.Match(b, {"y", "z"}).tokens, 1u);
  EXPECT_EQ(t.pool.holdings(b).charged, 2u);
  EXPECT_EQ(t.state(c[0]), BlockState::kSealed);
  EXPECT_EQ(t.Lease(g, 4).size(), 4u);
}

TEST(Match, CapShortensIt) {
  TestPool t(6);
  const Holder a = t.Session(), b = t.Session({.max_blocks = 2});
  const Refs c = t.Cache(a, {"x", "y", "z"});
  MatchOutcome m = t.Match(b, {"x", "y", "z"});
  EXPECT_EQ(m.tokens, 2u);
  EXPECT_EQ(m.miss, MissReason::kCap);
  m = t.Match(b, {"x", "y", "z"});
  EXPECT_EQ(m.tokens, 2u) << "what it holds already is no more";
  EXPECT_EQ(t.pool.holds(b, c[1].id), 2u);
}

TEST(Match, WindowSlidesBackUnderACap) {
  TestPool t(16, {.windows = {0, 2}});
  const Holder a = t.Session(), b = t.Session({.max_blocks = 5});
  const Refs f = t.Cache(a, {"a", "b", "c", "d"}, 0);
  const Refs w = t.Cache(a, {"a", "b", "c", "d"}, 1);
  const std::vector<BlockKey> fk = Keys({"a", "b", "c", "d"}, 0), wk = Keys({"a", "b", "c", "d"}, 1);
  const GroupQuery queries[] = {{0, fk, 1}, {1, wk, 1}};
  MatchOutcome m;
  t.pool.Match(b, t.now, queries, &m);
  EXPECT_EQ(m.tokens, 3u);
  EXPECT_EQ(m.miss, MissReason::kCap);
  EXPECT_EQ(m.blocks, std::vector<Refs>({{f[0], f[1], f[2]}, {kNullRef, w[1], w[2]}}));
}

TEST(Match, QueriesThatCanNotBeAnswered) {
  TestPool t(4);
  const Holder a = t.Session();
  t.Cache(a, {"x"});
  const std::vector<BlockKey> keys = Keys({"x"});
  MatchOutcome m;
  for (const GroupQuery& query : {GroupQuery{1, keys, 1}, GroupQuery{UINT32_MAX, keys, 1},
                                  GroupQuery{0, keys, 0}, GroupQuery{0, {}, 1}}) {
    t.pool.Match(a, t.now, {&query, 1}, &m);
    EXPECT_EQ(m.tokens, 0u);
    ASSERT_EQ(m.blocks.size(), 1u);
    EXPECT_TRUE(m.blocks[0].empty());
  }
  t.pool.Match(a, t.now, {}, &m);
  EXPECT_EQ(m.tokens, 0u);
  // The block sizes have no common length within the request.
  const GroupQuery apart[] = {{0, keys, 4294967291u}, {0, keys, 4294967279u}};
  t.pool.Match(a, t.now, apart, &m);
  EXPECT_EQ(m.tokens, 0u);
  // A group that is asked for twice is held twice.
  const GroupQuery twice[] = {{0, keys, 1}, {0, keys, 1}};
  t.pool.Match(a, t.now, twice, &m);
  EXPECT_EQ(m.tokens, 1u);
  EXPECT_EQ(t.refs(m.blocks[0][0]), 2u);
}

TEST(Match, KeysOfAllShapesSpread) {
  // A counter in any one pair of bytes, the rest constant: the worst keys an engine could bring.
  TestPool t(60000);
  const Holder a = t.Session();
  for (int at = 0; at < 31; at += 6) {
    std::vector<BlockKey> keys(10000);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i].bytes.fill(static_cast<uint8_t>(at));
      keys[i].bytes[at] = static_cast<uint8_t>(i);
      keys[i].bytes[at + 1] = static_cast<uint8_t>(i >> 8);
    }
    for (const SealVerdict& outcome : t.Seal(a, t.Lease(a, 10000), keys)) {
      EXPECT_EQ(outcome.verdict, Verdict::kDone);
    }
  }
}

}  // namespace
}  // namespace kvpool
