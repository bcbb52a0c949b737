// What one call may do is bounded, whatever a session holds and however long chains are: the rest is refused,
// or done by Tidy slice by slice. The model's pools are far too small for that.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/linear_hash.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_record.h"
#include "server/pool/key_hash.h"
#include "server/pool/prefix_index.h"
#include "server/replacement/policy.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

using V = Verdict;
using Verdicts = std::vector<Verdict>;

constexpr uint32_t kSlice = BlockPool::kTidySlice;
// A chain that no call may visit from its tip to its root.
constexpr uint32_t kLong = 20000;

std::vector<std::string> Names(const std::string& prefix, uint32_t count) {
  std::vector<std::string> names;
  for (uint32_t i = 0; i < count; ++i) names.push_back(prefix + std::to_string(i));
  return names;
}

void TidyAll(TestPool* t) {
  for (bool more = true; more;) {
    more = t->pool.Tidy(kSlice);
    t->pool.CheckInvariants();
  }
}

size_t Count(const Verdicts& verdicts, Verdict verdict) {
  return static_cast<size_t>(std::count(verdicts.begin(), verdicts.end(), verdict));
}

// ---------------------------------------------------------------------------------------- ends of sessions

TEST(Slices, LeasesOfAnEndedSessionAreNobodysBeforeTheyAreFreed) {
  TestPool t(4 * kSlice);
  const Holder a = t.Session({.guaranteed = 100}), b = t.Session();
  const std::vector<BlockRef> blocks = t.Lease(a, 4 * kSlice);
  t.Ref(a, {blocks[0], blocks[0]});
  t.pool.EndSession(a);
  EXPECT_EQ(t.count(BlockState::kQuarantined), kSlice);
  EXPECT_EQ(t.count(BlockState::kLeased), 3 * kSlice) << "the others are to follow";
  EXPECT_EQ(t.pool.holdings(a).leased, 4 * kSlice) << "counted without a walk";
  EXPECT_EQ(t.pool.available(), 0u);
  EXPECT_EQ(t.Release(a, {blocks[0]}), Verdicts({V::kNotHeld}));
  EXPECT_EQ(t.Seal(a, {blocks[0]}, {Key("x")})[0].verdict, V::kNotHeld);
  EXPECT_EQ(t.Seal(b, {blocks[0]}, {Key("x")})[0].verdict, V::kNotHeld);
  std::vector<BlockRef> none;
  EXPECT_EQ(t.pool.Lease(b, t.now, 1, 0, &none).leased, 0u);
  t.pool.CheckInvariants();

  EXPECT_EQ(t.pool.FreeQuarantine(a), 4u * kSlice + 2) << "all of them, though not at once";
  EXPECT_EQ(t.count(BlockState::kFree), kSlice);
  EXPECT_TRUE(t.pool.untidy());
  t.pool.CheckInvariants();
  // Whoever leases meanwhile gets what was freed, and no slice takes it away again.
  const std::vector<BlockRef> mine = t.Lease(b, kSlice);
  std::set<uint32_t> ids;
  for (const BlockRef ref : mine) ids.insert(Index(ref.id));
  TidyAll(&t);
  for (const BlockRef ref : t.Lease(b, 3 * kSlice)) EXPECT_TRUE(ids.insert(Index(ref.id)).second);
  EXPECT_EQ(t.pool.holds(b), 4u * kSlice);
}

TEST(Slices, QuarantineEndsWhetherItWasCompleteOrNot) {
  TestPool t(4 * kSlice);
  const Holder a = t.Session(), b = t.Session();
  t.Lease(a, 2 * kSlice);
  t.Lease(b, 2 * kSlice);
  t.pool.EndSession(a);
  t.pool.EndSession(b);
  TidyAll(&t);
  EXPECT_EQ(t.count(BlockState::kQuarantined), 4 * kSlice);
  t.pool.FreeQuarantine(a);
  EXPECT_EQ(t.pool.FreeQuarantine(a), 0u) << "once";
  const Holder c = t.Session();
  EXPECT_NE(c, a) << "the index is in use until all is freed";
  TidyAll(&t);
  EXPECT_EQ(t.Session(), a);
  t.pool.FreeQuarantine(b);
  TidyAll(&t);
  EXPECT_EQ(t.count(BlockState::kFree), 4 * kSlice);
}

TEST(Slices, SealedBlocksOfAnEndedSessionBecomeCachedTailFirst) {
  TestPool t(3 * kSlice);
  const Holder a = t.Session(), b = t.Session();
  const std::vector<BlockRef> chain = t.Chain(a, Names("x", 3 * kSlice));
  t.Match(b, Names("x", 10));
  t.pool.EndSession(a);
  t.pool.FreeQuarantine(a);
  EXPECT_EQ(t.count(BlockState::kCached), kSlice);
  EXPECT_EQ(t.state(chain.back()), BlockState::kCached);
  TidyAll(&t);
  EXPECT_EQ(t.count(BlockState::kCached), 3 * kSlice - 10);
  EXPECT_EQ(t.Reclaim(1)[0], Key("x" + std::to_string(3 * kSlice - 1)));
}

// --------------------------------------------------------------------------------------------------- chains

class LongChain : public testing::Test {
 protected:
  // Held by its tip alone, as if it had been matched there when it was shorter.
  void HoldByItsTip() {
    blocks = t.Chain(a, names);
    t.Release(a, {blocks.begin(), blocks.end() - 1});
    ASSERT_EQ(t.count(BlockState::kSealed), kLong);
  }
  void CacheAll() {
    blocks = t.Cache(a, names);
    ASSERT_EQ(t.count(BlockState::kCached), kLong);
  }
  BlockRef tip() const { return blocks.back(); }

  TestPool t{kLong + 5000, {.pin_budget = 1}};
  const Holder a = t.Session();
  const std::vector<std::string> names = Names("x", kLong);
  std::vector<BlockRef> blocks;
};

TEST_F(LongChain, AReleaseIsDoneAndTheChainFollows) {
  HoldByItsTip();
  EXPECT_EQ(t.Release(a, {tip()}), Verdicts({V::kDone}));
  EXPECT_EQ(t.state(tip()), BlockState::kCached);
  const uint32_t cached = t.count(BlockState::kCached);
  EXPECT_GT(cached, 1000u);
  EXPECT_LT(cached, 10000u);
  EXPECT_TRUE(t.pool.untidy());
  t.pool.CheckInvariants();
  // What is to follow can be found and held meanwhile, and is given back like any other.
  MatchOutcome found = t.Match(a, Names("x", 100));
  ASSERT_EQ(found.tokens, 100u);
  TidyAll(&t);
  EXPECT_EQ(t.count(BlockState::kSealed), 100u);
  EXPECT_EQ(t.pool.holdings(a).charged, 100u);
  t.Release(a, found.blocks[0]);
  EXPECT_EQ(t.count(BlockState::kCached), kLong);
}

TEST_F(LongChain, AMatchOfItsTipAloneIsNotAnswered) {
  CacheAll();
  const MatchOutcome of_tip = t.Match(a, {names.back()});
  EXPECT_EQ(of_tip.tokens, 0u);
  EXPECT_EQ(of_tip.miss, MissReason::kCredit);
  EXPECT_EQ(t.count(BlockState::kCached), kLong) << "nothing was taken";
  EXPECT_EQ(t.Match(a, {names[3000]}).tokens, 1u) << "near enough to the root";
  EXPECT_EQ(t.Match(a, names).tokens, kLong);
  EXPECT_EQ(t.Match(a, {names.back()}).tokens, 1u) << "it is held";
}

TEST_F(LongChain, APinOfItsTipNeedsThoseInFrontFirst) {
  CacheAll();
  EXPECT_EQ(t.Pin({tip()}, 2000), Verdicts({V::kTooFar}));
  EXPECT_EQ(t.pool.pinned(), 0u);
  for (size_t at = 3999; at < kLong; at += 4000) EXPECT_EQ(t.Pin({blocks[at]}, 2000), Verdicts({V::kDone}));
  EXPECT_EQ(t.pool.pinned(), kLong);
  t.pool.Unpin(blocks);
  EXPECT_EQ(Count(t.Pin(blocks, 2000), V::kDone), kLong) << "those named may be as many as they are";
  t.pool.Unpin(blocks);
  const std::vector<BlockRef> tail_first(blocks.rbegin(), blocks.rend());
  EXPECT_EQ(Count(t.Pin(tail_first, 2000), V::kDone), kLong) << "in any order";
}

TEST_F(LongChain, PinsEndSliceBySlice) {
  CacheAll();
  t.Pin(blocks, 2000);
  EXPECT_TRUE(t.pool.Expire(2000, 1000));
  t.pool.CheckInvariants();
  while (t.pool.Expire(2000, 1000)) {
  }
  EXPECT_EQ(t.pool.pinned(), 0u);
  EXPECT_EQ(t.count(BlockState::kCached), kLong);
}

TEST_F(LongChain, ASealBehindOneThatIsTooLongIsNotLinked) {
  CacheAll();
  const BlockRef mine = t.LeaseOne(a), other = t.LeaseOne(a);
  const BlockKey parent = Key(names.back());
  EXPECT_EQ(t.Seal(a, {mine}, {Key("behind")}, &parent)[0].verdict, V::kDone);
  EXPECT_EQ(t.pool.View(mine.id, t.now)->parent, kNullBlock);
  EXPECT_EQ(t.Seal(a, {other}, {parent})[0].verdict, V::kTooFar) << "to be held in place of it";
  EXPECT_EQ(t.state(other), BlockState::kLeased);
  EXPECT_EQ(t.count(BlockState::kCached), kLong);
}

// ---------------------------------------------------------------------------------- many names of one chain

// A verb counts the blocks that it visits besides those that it names (PoolRep::steps_left). Were a chain walked anew for each
// name, it would come to an end of them, and what is too much would be kTooFar.

TEST(ManyNames, PinsBeyondTheBudgetAreRefusedOneByOne) {
  TestPool t(40000, {.pin_budget = 0.25});
  const Holder a = t.Session();
  const std::vector<BlockRef> blocks = t.Cache(a, Names("x", 30000));
  const std::vector<BlockRef> tips(30000, blocks.back());
  EXPECT_EQ(t.Pin(tips, 2000), Verdicts(30000, V::kOverPinBudget))
      << "10,000 blocks in front are visited once";
  const Verdicts verdicts = t.Pin(blocks, 2000);
  EXPECT_EQ(Count(verdicts, V::kDone), 10000u);
  EXPECT_EQ(Count(verdicts, V::kOverPinBudget), 20000u);
  EXPECT_EQ(t.Pin(tips, 3000), Verdicts(30000, V::kOverPinBudget)) << "the same block again and again";
}

TEST(ManyNames, SealsOfKeysThatAreCachedAndPromisedAreRefusedOneByOne) {
  constexpr uint32_t kNamed = 15000;
  TestPool t(2 * kNamed + 10);
  const Holder a = t.Session({.guaranteed = kNamed});
  t.Cache(a, Names("x", kNamed));
  const std::vector<BlockRef> own = t.Lease(a, kNamed);
  t.Session({.guaranteed = kNamed + 10 - 100});  // 100 are left.
  const std::vector<BlockKey> tips(kNamed, Key("x" + std::to_string(kNamed - 1)));
  for (const SealVerdict& outcome : t.Seal(a, own, tips)) {
    ASSERT_EQ(outcome.verdict, V::kOverCredit) << "100 blocks in front are visited once";
  }
  const std::vector<SealVerdict> outcomes = t.Seal(a, own, Keys(Names("x", kNamed)));
  for (uint32_t i = 0; i < kNamed; ++i) {
    ASSERT_EQ(outcomes[i].verdict, i < 100 ? V::kDuplicate : V::kOverCredit) << i;
  }
  EXPECT_EQ(t.pool.available(), t.pool.promised());
}

// Many branches of one chain, none of which fits. Whoever names them all is told of some, and of the others
// that it is too much for one call.
TEST(ManyNames, BranchesOfOneChainAreNotEachWalkedToTheRoot) {
  constexpr uint32_t kTrunk = 3000, kBranches = 500;
  TestPool t(8000, {.pin_budget = 3000.5 / 8000});
  const Holder a = t.Session();
  const std::vector<BlockRef> trunk = t.Chain(a, Names("x", kTrunk));
  const BlockKey fork = Key("x" + std::to_string(kTrunk - 1));
  const std::vector<BlockRef> leaves = t.Lease(a, kBranches);
  for (uint32_t i = 0; i < kBranches; ++i) {
    EXPECT_EQ(t.Seal(a, {leaves[i]}, {Key("leaf" + std::to_string(i))}, &fork)[0].verdict, V::kDone);
  }
  const Verdicts verdicts = t.Pin(leaves, 2000);
  EXPECT_EQ(verdicts[0], V::kOverPinBudget);
  EXPECT_GT(Count(verdicts, V::kTooFar), kBranches / 2);
  EXPECT_EQ(t.Pin({trunk.back()}, 2000), Verdicts({V::kDone}));
  EXPECT_EQ(Count(t.Pin(leaves, 2000), V::kOverPinBudget), kBranches);
}

// The children of one that moves are found among all that were noted since all was looked at.
TEST(ManyNames, OfAParentWhoseChildrenCameAndWentAllIsLookedAtAnew) {
  constexpr uint32_t kMostChildren = 1024, kKeep = 100;
  TestPool t(2 * kKeep);
  const Holder a = t.Session(), own = t.Session();
  const std::vector<BlockRef> blocks = t.Lease(a, 2 * kKeep);
  const BlockRef parent = blocks.back();
  const BlockKey key = Key("parent");
  t.Seal(a, {parent}, {key});
  t.Release(a, blocks);
  t.pool.Vacate({kKeep + 1, 2 * kKeep + 1});
  while (!t.pool.NoteChildren(kSlice)) {
  }
  for (uint32_t i = 0; i <= 4 * kMostChildren; ++i) {
    t.Reclaim(t.pool.View(parent.id, t.now)->children);
    const BlockRef child = t.LeaseOne(a);
    t.Seal(a, {child}, {Key("child" + std::to_string(i))}, &key);
    t.Release(a, {child});
  }
  const BlockRef to = t.LeaseOne(own);
  EXPECT_FALSE(t.pool.Move(own, t.now, parent, to, kMostChildren));
  while (!t.pool.NoteChildren(kSlice)) {
  }
  EXPECT_TRUE(t.pool.Move(own, t.now, parent, to, kMostChildren));
  EXPECT_EQ(t.Match(a, {"parent"}).blocks[0], std::vector<BlockRef>{to});
}

// --------------------------------------------------------------------------------------------------- leases

TEST(Slices, ALeaseReclaimsSoManyAndTheNextGoesOn) {
  TestPool t(6000);
  const Holder a = t.Session();
  t.Cache(a, Names("x", 6000));
  std::vector<BlockRef> blocks;
  LeaseOutcome outcome = t.pool.Lease(a, t.now, 5000, 1, &blocks);
  EXPECT_EQ(outcome.leased, 2048u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kReclaiming);
  t.Release(a, blocks);
  blocks.clear();
  outcome = t.pool.Lease(a, t.now, 6000, 6000, &blocks);
  EXPECT_EQ(outcome.leased, 0u) << "4096 are less than the least";
  EXPECT_EQ(outcome.shortfall, Shortfall::kReclaiming);
  EXPECT_EQ(t.count(BlockState::kFree), 4096u) << "but there for the next";
  outcome = t.pool.Lease(a, t.now, 6000, 6000, &blocks);
  EXPECT_EQ(outcome.leased, 6000u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kNone);
}

// ----------------------------------------------------------------------------------------------- guarantees

TEST(Guarantee, MayRestOnBlocksToComeAndTakesThemBeforeOthers) {
  TestPool t(10, {.max_blocks = 100});
  const Holder a = t.Session();
  t.Lease(a, 6);
  EXPECT_EQ(t.pool.AddSession({.guaranteed = 20}, 15).status().message(),
            "20 blocks guaranteed asked, 4 unpromised of 10, 15 unpromised to come");
  const Holder b = *t.pool.AddSession({.guaranteed = 20}, 16);
  EXPECT_EQ(t.pool.unmet(b), 16u);
  EXPECT_EQ(t.pool.holdings(b).limits.guaranteed, 20u);
  std::vector<BlockRef> blocks;
  EXPECT_EQ(t.pool.Lease(a, t.now, 10, 0, &blocks).leased, 0u) << "what there was is promised";
  EXPECT_TRUE(t.pool.Grow(10).ok());
  EXPECT_FALSE(t.pool.Promise(b));
  EXPECT_EQ(t.pool.Lease(a, t.now, 10, 0, &blocks).leased, 0u) << "and so is the first part of what came";
  EXPECT_TRUE(t.pool.Grow(10).ok());
  EXPECT_TRUE(t.pool.Promise(b));
  EXPECT_EQ(t.pool.Lease(a, t.now, 10, 0, &blocks).leased, 4u);
  EXPECT_EQ(t.Lease(b, 20).size(), 20u);
}

TEST(Guarantee, ThatWasNotPromisedWholeEndsWithItsSession) {
  TestPool t(10, {.max_blocks = 100});
  const Holder a = *t.pool.AddSession({.guaranteed = 20}, 16);
  t.pool.EndSession(a);
  EXPECT_EQ(t.pool.promised(), 0u);
  EXPECT_EQ(t.pool.unmet(a), 0u);
  EXPECT_TRUE(t.pool.Promise(a)) << "there is nothing more to promise";
  EXPECT_EQ(t.pool.promised(), 0u);
}

// ----------------------------------------------------------------------------------------- large capacities

// As many pages as it was told, no verb's touch any more.
TEST(VirtualArrayTest, WhatIsPopulatedIsThere) {
  constexpr size_t kPage = 4096, kPages = 2000;
  VirtualArray<uint64_t> array(kPages * kPage / sizeof(uint64_t));
  const auto there = [&](size_t page) {
    unsigned char is_there = 0;
    EXPECT_EQ(mincore(reinterpret_cast<char*>(&array[0]) + page * kPage, kPage, &is_there), 0);
    return (is_there & 1) != 0;
  };
  for (const size_t pages : {size_t{600}, size_t{100}, kPages}) {
    array.Populate(pages * kPage / sizeof(uint64_t));
    size_t found = 0;
    for (size_t page = 0; page < pages; ++page) found += there(page);
    EXPECT_EQ(found, pages);
    if (pages == 600) {
      EXPECT_FALSE(there(kPages - 1));
    }
  }
}

TEST(PrefixIndex, HasABucketForEachOfMoreThanHalfOfAllIds) {
  VirtualArray<BlockRecord> records(16);
  PrefixIndex index(3'000'000'000, &records);
  EXPECT_EQ(index.bytes(), uint64_t{4} << 32);
  EXPECT_TRUE(index.Grow(3'000'000'000, 1)) << "nothing is in it that would have to move";
  EXPECT_EQ(index.buckets(), uint64_t{1} << 32);
  for (uint32_t b = 1; b < 16; ++b) {
    const BlockKey key = Key("block " + std::to_string(b));
    records[b].set_key(key);
    index.Insert(HashKey(key), b);
  }
  for (uint32_t b = 1; b < 16; ++b) {
    const BlockKey key = Key("block " + std::to_string(b));
    EXPECT_EQ(index.Find(HashKey(key), key), b);
    EXPECT_EQ(records[b].next_in_bucket, 0u) << "block " << b << " shares a bucket";
  }
}

// A hash keeps its place until that is split, and has it or the new one then.
TEST(LinearHash, EachSplitMovesHashesOfOnePlaceToTheNewOne) {
  std::mt19937_64 random(3);
  std::vector<uint64_t> hashes(2000);
  for (uint64_t& hash : hashes) hash = random();
  LinearHash places(1);
  for (uint64_t added = 1; added < 300; ++added) {
    const LinearHash before = places;
    const uint64_t split = places.Split();
    EXPECT_EQ(split, before.next());
    ASSERT_EQ(places.places(), added + 1);
    uint32_t stayed = 0, moved = 0;
    for (const uint64_t hash : hashes) {
      ASSERT_EQ(places.PlaceOf(hash), LinearHash(added + 1).PlaceOf(hash)) << "it is as one that began so";
      if (before.PlaceOf(hash) != split) {
        ASSERT_EQ(places.PlaceOf(hash), before.PlaceOf(hash));
      } else {
        ASSERT_TRUE(places.PlaceOf(hash) == split || places.PlaceOf(hash) == added);
        ++(places.PlaceOf(hash) == split ? stayed : moved);
      }
    }
    // The last places have some seven hashes each.
    EXPECT_TRUE(added > 100 || (stayed > 0 && moved > 0)) << added << ": " << stayed << " and " << moved;
  }
}

TEST(LinearHash, PlacesGrowWithTheItemsAndAreNeverFewer) {
  uint64_t before = 1;
  for (uint64_t items = 1; items <= 100'000; ++items) {
    const uint64_t places = LinearHash::PlacesFor(items);
    ASSERT_GE(places, items);
    ASSERT_LE(places, std::bit_ceil(items));
    ASSERT_LE(places - before, 4u) << items;
    before = places;
  }
  EXPECT_EQ(LinearHash::PlacesFor(3'000'000'000), uint64_t{1} << 32);
  EXPECT_EQ(LinearHash::PlacesFor((5u << 20) + 1), 8u << 20)
      << "a quarter beyond four, there are those of eight";
}

uint64_t AnonymousBytes() {
  std::ifstream status("/proc/self/smaps_rollup");
  std::string word;
  uint64_t kib = 0;
  while (status >> word && word != "Anonymous:") {
  }
  status >> kib;
  EXPECT_TRUE(status) << "this kernel does not say how much memory there is";
  return kib << 10;
}

// With a largest size of 2 Mi blocks the index and the ghosts could come to have 8 MiB each.
TEST(Tables, AreAsLargeAsTheBlocksThatHaveCome) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "a sanitizer keeps memory of its own beside all that is touched";
  constexpr uint32_t kMost = 2u << 20, kBlocks = 8192;
  // Memory that comes only now is the allocator's from here on.
  std::vector<BlockRef> blocks(kBlocks);
  std::vector<BlockKey> keys(kBlocks);
  std::vector<SealEntry> entries(kBlocks);
  std::vector<SealVerdict> outcomes(kBlocks);
  std::vector<Verdict> verdicts(kBlocks);
  const uint64_t before = AnonymousBytes();
  BlockPool pool({.max_blocks = kMost, .windows = {0}}, *MakeReplacementPolicy("lru", kMost));
  pool.Expect(kBlocks);
  uint32_t slices = 1;
  while (!pool.Prepare(kBlocks, 64)) ++slices;
  EXPECT_GE(slices, kBlocks / 4 / 4 / 64 - 1) << "sets of four ghosts, 64 in each slice";
  ASSERT_TRUE(pool.Grow(kBlocks - 1).ok());
  const Holder session = *pool.AddSession({});
  // Several times as many keys as there are blocks come and go.
  for (uint32_t round = 0; round < 30; ++round) {
    blocks.clear();
    ASSERT_GT(pool.Lease(session, round, kBlocks - 1, 0, &blocks).leased, 0u);
    for (uint32_t i = 0; i < blocks.size(); ++i) {
      keys[i] = Key(absl::StrCat(round, " ", i));
      entries[i] = {blocks[i], {&keys[i], 1}};
    }
    const auto sealed = absl::MakeSpan(entries).subspan(0, blocks.size());
    pool.Seal(session, round, nullptr, sealed, absl::MakeSpan(outcomes).subspan(0, blocks.size()));
    pool.Release(session, round, blocks, absl::MakeSpan(verdicts).subspan(0, blocks.size()));
  }
  EXPECT_GT(pool.counters().evicted[static_cast<size_t>(EvictReason::kDirect)], 4 * kBlocks);
  pool.CheckInvariants();
  const uint64_t records = kBlocks * sizeof(BlockRecord);
  const uint64_t after = AnonymousBytes();
  // With the policy's nodes, holds and what is kept for the verbs.
  EXPECT_LT(after - before, records + (1u << 20)) << (after - before) / 1024 << " KiB";
}

// What was found before the tables grow is found after each step, and what leaves meanwhile is remembered as that.
TEST(Tables, GrowAroundWhatIsInThem) {
  constexpr uint32_t kMost = 1u << 14, kFirst = 1000;
  TestPool t(kFirst - 1, {.max_blocks = kMost, .ghosts = kMost});
  const Holder session = t.Session();
  std::vector<BlockRef> blocks = t.Lease(session, kFirst - 1);
  std::vector<BlockKey> keys;
  for (uint32_t i = 0; i < kFirst - 1; ++i) keys.push_back(Key(absl::StrCat("key ", i)));
  std::vector<SealEntry> entries;
  for (uint32_t i = 0; i < kFirst - 1; ++i) entries.push_back({blocks[i], {&keys[i], 1}});
  std::vector<SealVerdict> outcomes(entries.size());
  t.pool.Seal(session, t.now, nullptr, entries, absl::MakeSpan(outcomes));
  std::vector<Verdict> verdicts(blocks.size());
  t.pool.Release(session, t.now, blocks, absl::MakeSpan(verdicts));
  uint32_t steps = 0, left = 0;
  for (bool done = false; !done; ++steps) {
    done = t.pool.Prepare(kMost, 100);
    left += t.pool.Reclaim(t.now, 2, EvictReason::kOperator, nullptr);
    uint32_t found = 0;
    for (uint32_t i = 0; i < kFirst - 1; ++i) {
      const BlockRef at = t.pool.Find(keys[i]);
      if (at != kNullRef) {
        ASSERT_EQ(at, blocks[i]) << "step " << steps;
        ++found;
      } else {
        ASSERT_TRUE(t.pool.EvictedAgo(keys[i], t.now).ok()) << "step " << steps;
      }
    }
    ASSERT_EQ(found, kFirst - 1 - left) << "step " << steps;
    if (steps % 16 == 0) t.pool.CheckInvariants();
  }
  EXPECT_EQ(steps, (kMost - 1024 + 99) / 100);
  EXPECT_EQ(left, 2 * steps);
}

// ---------------------------------------------------------------------------------------------- chosen keys

// Without words that nobody knows, keys that have one of the mixer's own in two places have one hash.
TEST(KeyHash, WhoKnowsTheSourceChoosesNoKeysOfOneHash) {
  const KeyHashWords random = RandomKeyHashWords();
  std::set<uint64_t> known, hidden;
  for (uint64_t i = 0; i < 1000; ++i) {
    BlockKey key{};
    const uint64_t words[4] = {kPublicKeyHash.words[0], i, kPublicKeyHash.words[2], i * i};
    std::memcpy(key.bytes.data(), words, sizeof(words));
    known.insert(HashKeyWith(kPublicKeyHash, key));
    hidden.insert(HashKeyWith(random, key));
  }
  EXPECT_EQ(known.size(), 1u);
  EXPECT_EQ(hidden.size(), 1000u);
}

// ------------------------------------------------------------------------------------------------ at random

// Sessions of thousands of blocks that share chains, end and are tidied up, in any order.
TEST(Slices, AtRandomNoBlockHasTwoOwners) {
  constexpr uint32_t kBlocks = 12000;
  std::mt19937_64 random(7);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  TestPool t(kBlocks, {.pin_budget = 0.5});
  struct Open {
    Holder holder;
    std::vector<BlockRef> leased, held;
  };
  std::vector<Open> open;
  std::vector<Holder> ended;
  for (int step = 0; step < 1500; ++step) {
    ++t.now;
    if (open.size() < 3) open.push_back({*t.pool.AddSession({.guaranteed = below(10)}, 10), {}, {}});
    t.pool.Promise(open.front().holder);
    Open& o = open[below(static_cast<uint32_t>(open.size()))];
    const std::string prefix(1, static_cast<char>('a' + below(4)));
    switch (below(8)) {
      case 0:
      case 1: {
        std::vector<BlockRef> blocks;
        t.pool.Lease(o.holder, t.now, 1 + below(4000), 0, &blocks);
        for (const BlockRef ref : blocks) {
          for (const Open& other : open) {
            for (const Holder holder : ended) EXPECT_EQ(t.pool.holds(holder, ref.id), 0u);
            EXPECT_EQ(t.pool.holds(other.holder, ref.id), other.holder == o.holder ? 1u : 0u);
          }
        }
        o.leased.insert(o.leased.end(), blocks.begin(), blocks.end());
        break;
      }
      case 2: {
        const std::vector<std::string> names = Names(prefix, static_cast<uint32_t>(o.leased.size()));
        const std::vector<SealVerdict> outcomes = t.Seal(o.holder, o.leased, Keys(names));
        for (size_t i = 0; i < outcomes.size(); ++i) {
          if (outcomes[i].verdict == V::kDone || outcomes[i].verdict == V::kDuplicate) {
            o.held.push_back(outcomes[i].canonical);
          }
          if (outcomes[i].verdict != V::kDone) o.held.push_back(o.leased[i]);
        }
        o.leased.clear();
        break;
      }
      case 3: {
        const MatchOutcome match = t.Match(o.holder, Names(prefix, 1 + below(6000)));
        o.held.insert(o.held.end(), match.blocks[0].begin(), match.blocks[0].end());
        break;
      }
      case 4: {
        // All but the last, in any part of it: a chain may be held by its tip alone.
        std::vector<BlockRef> some(o.held.begin(),
                                   o.held.begin() + below(static_cast<uint32_t>(o.held.size() + 1)));
        o.held.erase(o.held.begin(), o.held.begin() + static_cast<std::ptrdiff_t>(some.size()));
        EXPECT_EQ(Count(t.Release(o.holder, some), V::kDone), some.size());
        break;
      }
      case 5:
        t.pool.EndSession(o.holder);
        ended.push_back(o.holder);
        std::swap(o, open.back());
        open.pop_back();
        break;
      case 6:
        if (ended.empty()) break;
        t.pool.FreeQuarantine(ended.front());
        ended.erase(ended.begin());
        break;
      case 7:
        t.Pin({{BlockId{1 + below(kBlocks)}, 1 + below(3)}}, t.now + 5);
        t.pool.Expire(t.now, 100);
        break;
    }
    if (below(2) == 0) t.pool.Tidy(1 + below(kSlice));
    EXPECT_GE(t.pool.available(), t.pool.promised());
    if (step % 16 == 0) t.pool.CheckInvariants();
  }
  for (const Open& o : open) {
    t.pool.EndSession(o.holder);
    ended.push_back(o.holder);
  }
  for (const Holder holder : ended) t.pool.FreeQuarantine(holder);
  while (t.pool.Expire(t.now + 10, 1000)) {
  }
  TidyAll(&t);
  EXPECT_EQ(t.count(BlockState::kFree) + t.count(BlockState::kCached), kBlocks) << "all came back";
}

}  // namespace
}  // namespace kvpool
