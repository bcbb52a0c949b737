// Lease, Seal, Release, Ref, sessions, credit, generations: each rule of the class comment by itself.
#include "server/pool/block_pool.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

using V = Verdict;
using Verdicts = std::vector<Verdict>;

TEST(BlockPool, GrowsUpToItsMost) {
  TestPool t(4, {.max_blocks = 11});
  EXPECT_EQ(t.pool.capacity(), 4u);
  EXPECT_TRUE(t.pool.Grow(6).ok());
  const absl::Status more = t.pool.Grow(1);
  EXPECT_EQ(more.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(more.message(), "1 blocks more asked, 10 there are, 10 at most");
  EXPECT_TRUE(t.pool.Grow(0).ok());
  EXPECT_FALSE(t.pool.Grow(UINT32_MAX).ok());
  const Holder a = t.Session();
  EXPECT_EQ(t.Lease(a, 10).back().id, BlockId{10});
}

TEST(BlockPool, AnyBlocksLeaveAndComeBackAsStrangers) {
  TestPool t(12, {.max_blocks = 21});
  const Holder a = t.Session();
  const std::vector<BlockRef> blocks = t.Lease(a, 12);
  const std::vector<BlockRef> middle(blocks.begin() + 3, blocks.begin() + 7);
  t.Release(a, middle);
  t.pool.Vacate({4, 8});
  EXPECT_FALSE(t.pool.Enter({13, 14}).ok()) << "others are to go";
  t.pool.Withhold(3);
  EXPECT_FALSE(t.pool.Shrink());
  t.pool.Withhold(1);
  ASSERT_TRUE(t.pool.Shrink());
  EXPECT_EQ(t.pool.capacity(), 8u);
  EXPECT_EQ(t.pool.end_block(), 13u);
  EXPECT_FALSE(t.pool.View(BlockId{4}, t.now).ok());
  EXPECT_TRUE(t.pool.View(BlockId{8}, t.now).ok());
  EXPECT_EQ(t.pool.lowest_free(), UINT32_MAX);
  EXPECT_EQ(t.Release(a, middle), Verdicts(4, V::kStale));
  t.pool.CheckInvariants();

  EXPECT_EQ(t.pool.Enter({0, 2}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(t.pool.Enter({13, 22}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(t.pool.Enter({3, 5}).message(), "of blocks 3 to 4 some are there already");
  EXPECT_EQ(t.pool.Enter({6, 9}).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(t.pool.Enter({5, 7}).ok());
  EXPECT_EQ(t.pool.Enter({5, 6}).code(), absl::StatusCode::kFailedPrecondition);
  t.pool.CheckInvariants();
  const std::vector<BlockRef> again = t.Lease(a, 2);
  EXPECT_EQ(again[0].id, BlockId{5});
  EXPECT_EQ(again[0].generation, middle[1].generation + 1);
  EXPECT_EQ(t.Release(a, middle), Verdicts(4, V::kStale)) << "they are of before the blocks left";
  // What leaves beside holes is one with them, and what leaves last takes the holes in front of it along.
  t.Release(a, again);
  t.Release(a, {blocks.begin() + 7, blocks.end()});
  t.pool.Vacate({8, 13});
  t.pool.Withhold(5);
  ASSERT_TRUE(t.pool.Shrink());
  EXPECT_EQ(t.pool.end_block(), 7u);
  t.pool.Vacate({5, 7});
  t.pool.Withhold(2);
  ASSERT_TRUE(t.pool.Shrink());
  EXPECT_EQ(t.pool.end_block(), 4u);
  t.pool.CheckInvariants();
  // They come back one range after the other, in any order.
  ASSERT_TRUE(t.pool.Enter({10, 13}).ok());
  ASSERT_TRUE(t.pool.Enter({4, 6}).ok());
  ASSERT_TRUE(t.pool.Enter({6, 10}).ok());
  t.pool.CheckInvariants();
  EXPECT_EQ(t.pool.capacity(), 12u);
  for (const BlockRef block : t.Lease(a, 9))
    EXPECT_GT(block.generation, blocks[Index(block.id) - 1].generation);
}

TEST(BlockPool, WhatIsToGoIsLeasedLastWhereverItLies) {
  TestPool t(6);
  const Holder a = t.Session();
  t.pool.Vacate({2, 4});
  const std::vector<BlockRef> blocks = t.Lease(a, 5);
  EXPECT_EQ(blocks[0].id, BlockId{1});
  EXPECT_EQ(blocks[1].id, BlockId{4});
  EXPECT_EQ(blocks[4].id, BlockId{2});
  EXPECT_EQ(t.pool.lowest_free(), 3u);
  t.pool.Withhold(1);
  EXPECT_EQ(t.pool.lowest_free(), UINT32_MAX);
  EXPECT_FALSE(t.pool.Shrink()) << "one is leased";
  EXPECT_TRUE(t.pool.PutBack(1));
  EXPECT_EQ(t.pool.lowest_free(), UINT32_MAX);
  EXPECT_FALSE(t.pool.PutBack(1));
  EXPECT_EQ(t.pool.lowest_free(), 3u);
  t.pool.CheckInvariants();
}

TEST(BlockPool, LeasesAllItWasAskedForOrAtLeastMin) {
  TestPool t(4);
  const Holder a = t.Session();
  std::vector<BlockRef> blocks;
  LeaseOutcome outcome = t.pool.Lease(a, t.now, 5, 5, &blocks);
  EXPECT_EQ(outcome.leased, 0u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kPressure);
  EXPECT_TRUE(blocks.empty());
  outcome = t.pool.Lease(a, t.now, 5, 1, &blocks);
  EXPECT_EQ(outcome.leased, 4u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kPressure);
  EXPECT_EQ(blocks.size(), 4u);
  for (const BlockRef& block : blocks) EXPECT_NE(block.id, kNullBlock);
  EXPECT_EQ(t.pool.Lease(a, t.now, 0, 0, &blocks).shortfall, Shortfall::kNone);
}

TEST(BlockPool, CapCountsDistinctBlocksHeld) {
  TestPool t(8);
  const Holder a = t.Session({.max_blocks = 3});
  std::vector<BlockRef> blocks;
  const LeaseOutcome outcome = t.pool.Lease(a, t.now, 4, 1, &blocks);
  EXPECT_EQ(outcome.leased, 3u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kCap);
  EXPECT_EQ(t.Ref(a, blocks), Verdicts({V::kDone, V::kDone, V::kDone}));
  EXPECT_EQ(t.pool.holdings(a).leased, 3u);
}

TEST(BlockPool, GuaranteeIsThereWhateverOthersDo) {
  TestPool t(10);
  const Holder a = t.Session({.guaranteed = 4});
  const Holder b = t.Session();
  std::vector<BlockRef> blocks;
  const LeaseOutcome outcome = t.pool.Lease(b, t.now, 10, 0, &blocks);
  EXPECT_EQ(outcome.leased, 6u);
  EXPECT_EQ(outcome.shortfall, Shortfall::kCredit);
  EXPECT_EQ(t.pool.guaranteed_free(a), 4u);
  EXPECT_EQ(t.Lease(a, 4).size(), 4u);
  EXPECT_EQ(t.pool.promised(), 0u);
  EXPECT_EQ(t.pool.Lease(a, t.now, 1, 0, &blocks).shortfall, Shortfall::kPressure);
}

TEST(BlockPool, PromisesNoMoreThanThereIs) {
  TestPool t(100);
  t.Session({.guaranteed = 88});
  const absl::Status refused = t.pool.AddSession({.guaranteed = 64}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(), "64 blocks guaranteed asked, 12 unpromised of 100");
  const absl::Status capped = t.pool.AddSession({.guaranteed = 5, .max_blocks = 4}).status();
  EXPECT_EQ(capped.code(), absl::StatusCode::kInvalidArgument);
}

TEST(BlockPool, ChargeEndsWhenTheBlockIsAvailableNotWhenItsSessionLetsGo) {
  TestPool t(4);
  const Holder a = t.Session({.guaranteed = 2});
  const Holder b = t.Session();
  const std::vector<BlockRef> blocks = t.Chain(a, {"x", "y"});
  EXPECT_EQ(t.Match(b, {"x", "y"}).tokens, 2u);
  t.Release(a, blocks);
  EXPECT_EQ(t.pool.holdings(a).charged, 2u) << "b holds the memory still";
  EXPECT_EQ(t.pool.guaranteed_free(a), 0u);
  t.Release(b, blocks);
  EXPECT_EQ(t.pool.holdings(a).charged, 0u);
  EXPECT_EQ(t.pool.guaranteed_free(a), 2u);
}

TEST(BlockPool, SealMakesFindableAndImmutable) {
  TestPool t(4);
  const Holder a = t.Session();
  const BlockRef block = t.LeaseOne(a);
  EXPECT_EQ(t.pool.Find(Key("x")), kNullRef);
  const SealVerdict outcome = t.Seal(a, {block}, {Key("x")})[0];
  EXPECT_EQ(outcome.verdict, V::kDone);
  EXPECT_EQ(outcome.canonical, block) << "the lease's ref is good after Seal";
  EXPECT_EQ(t.pool.Find(Key("x")), block);
  EXPECT_EQ(t.state(block), BlockState::kSealed);
  EXPECT_EQ(t.Seal(a, {block}, {Key("y")})[0].verdict, V::kWrongState);
  EXPECT_EQ(t.pool.holdings(a).leased, 0u);
  EXPECT_EQ(t.pool.holdings(a).referenced, 1u);
}

TEST(BlockPool, SealOfAKeyThatExistsHoldsTheCanonicalBlock) {
  TestPool t(4);
  const Holder a = t.Session(), b = t.Session();
  const BlockRef canonical = t.Cache(a, {"x"})[0];
  const BlockRef own = t.LeaseOne(b);
  const SealVerdict outcome = t.Seal(b, {own}, {Key("x")})[0];
  EXPECT_EQ(outcome.verdict, V::kDuplicate);
  EXPECT_EQ(outcome.canonical, canonical);
  EXPECT_EQ(t.state(own), BlockState::kLeased);
  EXPECT_EQ(t.state(canonical), BlockState::kSealed);
  EXPECT_EQ(t.pool.holds(b, canonical.id), 1u);
  EXPECT_EQ(t.pool.holdings(b).charged, 2u);
  EXPECT_EQ(t.Release(b, {canonical, own}), Verdicts({V::kDone, V::kDone}));
  EXPECT_EQ(t.state(own), BlockState::kFree);
  EXPECT_EQ(t.state(canonical), BlockState::kCached);
}

TEST(BlockPool, ADuplicateThatIsLeftIsTouchedAndTakesNoCredit) {
  TestPool t(5);
  const Holder a = t.Session();
  t.Cache(a, {"x"});
  t.Cache(a, {"y"});
  const Holder capped = t.Session({.max_blocks = 2});
  const std::vector<BlockRef> own = t.Lease(capped, 2);
  const Holder b = t.Session({.guaranteed = 2});
  const std::vector<BlockKey> keys = Keys({"z", "x"});
  std::vector<SealEntry> entries;
  for (size_t i = 0; i < 2; ++i) {
    entries.push_back({.block = own[i], .keys = {&keys[i], 1}, .leave_duplicate = true});
  }
  std::vector<SealVerdict> out(2);
  t.pool.Seal(capped, t.now, nullptr, entries, absl::MakeSpan(out));
  EXPECT_EQ(out[0].canonical, own[0]) << "its key is new";
  EXPECT_EQ(out[1].verdict, V::kDuplicate);
  EXPECT_EQ(out[1].canonical, kNullRef);
  EXPECT_EQ(t.state(own[1]), BlockState::kLeased);
  EXPECT_EQ(t.pool.counters().deduplicated, 1u);
  EXPECT_EQ(t.count(BlockState::kCached), 2u) << "nobody holds x";
  EXPECT_EQ(t.Reclaim(1), Keys({"y"})) << "x was used last";
  EXPECT_EQ(t.Lease(b, 2).size(), 2u);
}

TEST(BlockPool, SealOfDuplicatesWithinACall) {
  TestPool t(6);
  const Holder a = t.Session();
  const std::vector<BlockRef> b = t.Lease(a, 4);
  // The second entry repeats the first's key, the third the first's block.
  const std::vector<SealVerdict> out =
      t.Seal(a, {b[0], b[1], b[0], b[3]}, {Key("x"), Key("x"), Key("z"), Key("w")});
  EXPECT_EQ(out[0].verdict, V::kDone);
  EXPECT_EQ(out[1].verdict, V::kDuplicate);
  EXPECT_EQ(out[1].canonical, b[0]);
  EXPECT_EQ(t.pool.holds(a, b[0].id), 2u);
  EXPECT_EQ(out[2].verdict, V::kWrongState);
  EXPECT_EQ(out[2].canonical, kNullRef);
  EXPECT_EQ(out[3].verdict, V::kDone);
  EXPECT_EQ(t.pool.View(b[3].id, t.now)->parent, kNullBlock) << "key z names nothing";
}

TEST(BlockPool, ParentIsTheCanonicalBlockInFront) {
  TestPool t(8);
  const Holder a = t.Session(), b = t.Session();
  const std::vector<BlockRef> first = t.Chain(a, {"x", "y"});
  const std::vector<BlockRef> own = t.Lease(b, 3);
  const std::vector<SealVerdict> out = t.Seal(b, own, Keys({"x", "y", "z"}));
  EXPECT_EQ(out[1].canonical, first[1]);
  EXPECT_EQ(t.pool.View(own[2].id, t.now)->parent, first[1].id);
  // The parent may also be named by key, or be behind an entry that was refused.
  const BlockKey z = Key("z");
  const BlockRef next = t.LeaseOne(a);
  EXPECT_EQ(t.Seal(a, {kNullRef, next}, {Key("y"), Key("q")}, &z)[0].verdict, V::kUnknownBlock);
  EXPECT_EQ(t.pool.View(next.id, t.now)->parent, first[1].id);
}

TEST(BlockPool, SealedChildHoldsItsChain) {
  TestPool t(4);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Chain(a, {"x", "y", "z"});
  EXPECT_EQ(t.Release(a, {c[0], c[1]}), Verdicts({V::kDone, V::kDone}));
  EXPECT_EQ(t.state(c[0]), BlockState::kSealed);
  EXPECT_EQ(t.refs(c[0]), 1u);
  EXPECT_EQ(t.Release(a, {c[0]}), Verdicts({V::kNotHeld})) << "its child's ref is not the session's";
  EXPECT_EQ(t.pool.Reclaim(t.now, 4, EvictReason::kBackground, nullptr), 0u);
  t.Release(a, {c[2]});
  EXPECT_EQ(t.count(BlockState::kCached), 3u);
  EXPECT_EQ(t.Reclaim(2), Keys({"z", "y"}));
}

TEST(BlockPool, LinkToACachedParentTakesCreditOrIsLeftOut) {
  TestPool t(4);
  const Holder a = t.Session();
  t.Cache(a, {"x", "y"});
  const BlockRef own = t.LeaseOne(a);
  const Holder b = t.Session({.guaranteed = 2});
  const BlockKey y = Key("y");
  EXPECT_EQ(t.Seal(a, {own}, {Key("z")}, &y)[0].verdict, V::kDone);
  EXPECT_EQ(t.pool.View(own.id, t.now)->parent, kNullBlock) << "x and y would both be sealed";
  EXPECT_EQ(t.Lease(b, 2).size(), 2u);
}

TEST(BlockPool, CanonicalBlockTakesCreditAndCap) {
  TestPool t(4);
  const Holder a = t.Session();
  t.Cache(a, {"x", "y"});
  const BlockRef own = t.LeaseOne(a);
  const Holder c = t.Session({.max_blocks = 1});
  const BlockRef capped = t.LeaseOne(c);
  EXPECT_EQ(t.Seal(c, {capped}, {Key("x")})[0].verdict, V::kOverCap);
  const Holder b = t.Session({.guaranteed = 2});
  const SealVerdict outcome = t.Seal(a, {own}, {Key("y")})[0];
  EXPECT_EQ(outcome.verdict, V::kOverCredit);
  EXPECT_EQ(outcome.canonical, kNullRef);
  EXPECT_EQ(t.state(own), BlockState::kLeased);
  EXPECT_EQ(t.Lease(b, 2).size(), 2u);
}

TEST(BlockPool, SeveralKeysNameABlock) {
  TestPool t(6);
  const Holder a = t.Session();
  const std::vector<BlockRef> b = t.Lease(a, 4);
  std::vector<BlockKey> keys = Keys({"alias1", "alias2", "x"});
  SealEntry entry = {b[0], keys};
  SealVerdict outcome;
  t.pool.Seal(a, t.now, nullptr, {&entry, 1}, {&outcome, 1});
  EXPECT_EQ(outcome.verdict, V::kDone);
  for (const BlockKey& key : keys) EXPECT_EQ(t.pool.Find(key), b[0]);
  EXPECT_EQ(t.Match(a, {"alias1"}).blocks[0], std::vector<BlockRef>({b[0]}));
  // A chain key that is an alias of another block makes a duplicate.
  EXPECT_EQ(t.Seal(a, {b[1]}, {Key("alias2")})[0].canonical, b[0]);
  // Of several keys the chain's decides; those that name a block keep naming it.
  keys = Keys({"alias1", "alias3", "alias3", "y"});
  entry = {b[2], keys};
  t.pool.Seal(a, t.now, nullptr, {&entry, 1}, {&outcome, 1});
  EXPECT_EQ(outcome.verdict, V::kDone);
  EXPECT_EQ(t.pool.Find(Key("alias1")), b[0]);
  EXPECT_EQ(t.pool.Find(Key("alias3")), b[2]);
  // A key may not be both.
  EXPECT_EQ(t.Seal(a, {b[3]}, {Key("alias3")})[0].canonical, b[2]);
  t.pool.CheckInvariants();
  while (t.Release(a, {b[2]})[0] == V::kDone) {
  }
  t.Reclaim(1);
  EXPECT_EQ(t.pool.Find(Key("alias3")), kNullRef);
  EXPECT_TRUE(t.pool.EvictedAgo(Key("alias3"), t.now).ok());
}

TEST(BlockPool, SealWithKeysThatDoNotFit) {
  TestPool t(4, {.windows = {0, 0}});
  const Holder a = t.Session();
  const BlockRef block = t.LeaseOne(a);
  for (const std::vector<BlockKey>& keys :
       {std::vector<BlockKey>{}, {Key("x", 0), Key("x", 1)}, {Key("x", 2)}}) {
    const SealEntry entry = {block, keys};
    SealVerdict outcome;
    t.pool.Seal(a, t.now, nullptr, {&entry, 1}, {&outcome, 1});
    EXPECT_EQ(outcome.verdict, V::kWrongState);
    EXPECT_EQ(outcome.canonical, kNullRef);
  }
  EXPECT_EQ(t.state(block), BlockState::kLeased);
}

TEST(BlockPool, GenerationMovesAtLeaseAndAtNothingElse) {
  TestPool t(1);
  const Holder a = t.Session(), b = t.Session();
  const BlockRef first = t.Cache(a, {"x"})[0];
  EXPECT_EQ(t.Match(b, {"x"}).blocks[0][0], first);
  t.Release(b, {first});
  EXPECT_EQ(t.Reclaim(1), Keys({"x"}));
  EXPECT_EQ(t.Release(a, {first}), Verdicts({V::kStale})) << "free";
  const BlockRef second = t.LeaseOne(b);
  EXPECT_EQ(second.id, first.id);
  EXPECT_NE(second.generation, first.generation);
  EXPECT_EQ(t.Release(b, {first}), Verdicts({V::kStale}));
  EXPECT_EQ(t.Seal(b, {first}, {Key("y")})[0].verdict, V::kStale);
  EXPECT_EQ(t.Ref(b, {first}), Verdicts({V::kStale}));
  EXPECT_EQ(t.Pin({first}, 5000), Verdicts({V::kStale}));
  EXPECT_EQ(t.Retain({first}, {.priority = 60, .until = 5000}), Verdicts({V::kStale}));
  EXPECT_EQ(t.pool.Touch(t.now, {first}), 0u);
  EXPECT_EQ(t.pool.Unpin({first}), 0u);
  EXPECT_EQ(t.pool.counters().refused_stale, 8u);
}

TEST(BlockPool, BlocksThatAreNoneAreRefused) {
  TestPool t(2, {.max_blocks = 100});
  const Holder a = t.Session();
  const std::vector<BlockRef> bad = {kNullRef,         {BlockId{0}, 7},   {BlockId{3}, 0},
                                     {BlockId{99}, 1}, {BlockId{100}, 1}, {BlockId{UINT32_MAX}, UINT32_MAX}};
  const Verdicts unknown(bad.size(), V::kUnknownBlock);
  EXPECT_EQ(t.Release(a, bad), unknown);
  EXPECT_EQ(t.Ref(a, bad), unknown);
  EXPECT_EQ(t.Pin(bad, 5000), unknown);
  EXPECT_EQ(t.Retain(bad, {.priority = 10, .until = 5000}), unknown);
  EXPECT_EQ(t.pool.Touch(t.now, bad), 0u);
  EXPECT_EQ(t.pool.Unpin(bad), 0u);
  EXPECT_EQ(t.pool.Reclaim(t.now, bad, EvictReason::kOperator, nullptr), 0u);
  for (const SealVerdict& outcome : t.Seal(a, bad, Keys({"a", "b", "c", "d", "e", "f"}))) {
    EXPECT_EQ(outcome.verdict, V::kUnknownBlock);
  }
  EXPECT_FALSE(t.pool.View(BlockId{0}, t.now).ok());
  EXPECT_EQ(t.pool.View(BlockId{3}, t.now).status().message(), "block 3 is not one of 1 to 2");
  EXPECT_EQ(t.Release(a, {{BlockId{1}, 0}}), Verdicts({V::kStale})) << "never leased";
}

TEST(BlockPool, ForeignBlocksAreNotHeld) {
  TestPool t(3);
  const Holder a = t.Session(), b = t.Session();
  const BlockRef leased = t.LeaseOne(a);
  const BlockRef sealed = t.Chain(a, {"x"})[0];
  EXPECT_EQ(t.Release(b, {leased, sealed}), Verdicts({V::kNotHeld, V::kNotHeld}));
  EXPECT_EQ(t.Ref(b, {leased, sealed}), Verdicts({V::kNotHeld, V::kNotHeld}));
  EXPECT_EQ(t.Seal(b, {leased}, {Key("y")})[0].verdict, V::kNotHeld);
  EXPECT_EQ(t.Pin({leased}, 5000), Verdicts({V::kWrongState}));
  EXPECT_EQ(t.Retain({leased}, {.priority = 10, .until = 5000}), Verdicts({V::kWrongState}));
  EXPECT_EQ(t.pool.Touch(t.now, {leased, sealed}), 1u);
}

TEST(BlockPool, ABlockNamedTwiceLosesTwoHolds) {
  TestPool t(2);
  const Holder a = t.Session();
  const BlockRef block = t.LeaseOne(a);
  EXPECT_EQ(t.Ref(a, {block, block}), Verdicts({V::kDone, V::kDone}));
  EXPECT_EQ(t.pool.holds(a, block.id), 3u);
  EXPECT_EQ(t.Release(a, {block, block}), Verdicts({V::kDone, V::kDone}));
  EXPECT_EQ(t.state(block), BlockState::kLeased);
  EXPECT_EQ(t.Release(a, {block, block}), Verdicts({V::kStale, V::kDone})) << "the tail is first";
  EXPECT_EQ(t.state(block), BlockState::kFree);
}

TEST(BlockPool, HoldsOfOneSessionAreBounded) {
  TestPool t(2);
  const Holder a = t.Session(), b = t.Session();
  const BlockRef block = t.Chain(a, {"x"})[0];
  const std::vector<BlockRef> many(65535, block);
  const Verdicts verdicts = t.Ref(a, many);
  EXPECT_EQ(verdicts[65533], V::kDone);
  EXPECT_EQ(verdicts[65534], V::kTooManyHolds);
  EXPECT_EQ(t.Match(a, {"x"}).miss, MissReason::kCap);
  EXPECT_EQ(t.Seal(a, {t.LeaseOne(a)}, {Key("x")})[0].verdict, V::kTooManyHolds);
  EXPECT_EQ(t.Match(b, {"x"}).tokens, 1u);
  t.Release(a, many);
  EXPECT_EQ(t.pool.holds(a, block.id), 0u);
  EXPECT_EQ(t.refs(block), 1u);
}

TEST(BlockPool, HeldBlocksOfARangeAreCounted) {
  TestPool t(5000);
  const Holder a = t.Session(), b = t.Session();
  std::vector<BlockRef> blocks = t.Lease(a, 4000);
  t.Lease(b, 10);
  // Every third is let go, and the rest of it held twice.
  std::vector<BlockRef> some, rest;
  for (const BlockRef block : blocks) (Index(block.id) % 3 == 0 ? some : rest).push_back(block);
  t.Release(a, some);
  t.Ref(a, rest);
  for (const auto& [first, end] : std::vector<std::pair<uint32_t, uint32_t>>{{0, 0},
                                                                             {0, 1},
                                                                             {1, 2},
                                                                             {3, 4},
                                                                             {0, 1024},
                                                                             {0, 1025},
                                                                             {1023, 1025},
                                                                             {1024, 2048},
                                                                             {1000, 3100},
                                                                             {2048, 4096},
                                                                             {3999, 4011},
                                                                             {0, 5000},
                                                                             {4500, 5000},
                                                                             {0, UINT32_MAX},
                                                                             {UINT32_MAX - 1, UINT32_MAX}}) {
    uint32_t held = 0;
    for (uint32_t id = first; id < std::min(end, 5001u); ++id)
      held += t.pool.holds(a, BlockId{id}) > 0 ? 1 : 0;
    EXPECT_EQ(t.pool.held_in(a, first, end), held) << first << " to " << end;
  }
  EXPECT_EQ(t.pool.held_in(b, 0, UINT32_MAX), 10);
  EXPECT_EQ(t.pool.held_in(kNobody, 0, UINT32_MAX), 0);
}

TEST(BlockPool, EndedSessionsBlocksWaitInQuarantine) {
  TestPool t(6);
  const Holder a = t.Session({.guaranteed = 4}), b = t.Session();
  const std::vector<BlockRef> chain = t.Chain(a, {"x", "y"});
  const BlockRef leased = t.LeaseOne(a);
  t.Ref(a, {leased, chain[1]});
  t.Match(b, {"x"});
  t.pool.EndSession(a);
  EXPECT_EQ(t.pool.promised(), 0u);
  EXPECT_EQ(t.state(leased), BlockState::kQuarantined);
  EXPECT_EQ(t.state(chain[1]), BlockState::kSealed) << "its processes may read";
  t.pool.CheckInvariants();
  // The session's verbs do nothing any more.
  std::vector<BlockRef> out;
  EXPECT_EQ(t.pool.Lease(a, t.now, 1, 0, &out).shortfall, Shortfall::kCap);
  EXPECT_EQ(t.Release(a, {leased, chain[0]}), Verdicts({V::kNotHeld, V::kNotHeld}));
  EXPECT_EQ(t.Ref(a, {chain[0]}), Verdicts({V::kNotHeld}));
  EXPECT_EQ(t.Seal(a, {leased}, {Key("z")})[0].verdict, V::kNotHeld);
  EXPECT_EQ(t.Match(a, {"x"}).miss, MissReason::kCap);
  EXPECT_EQ(t.Lease(b, 3).size(), 3u) << "none of them quarantined";

  EXPECT_EQ(t.pool.FreeQuarantine(a), 5u);
  EXPECT_EQ(t.state(leased), BlockState::kFree);
  EXPECT_EQ(t.state(chain[0]), BlockState::kSealed);
  EXPECT_EQ(t.state(chain[1]), BlockState::kCached);
  EXPECT_EQ(t.pool.FreeQuarantine(a), 0u);
}

TEST(BlockPool, SessionIndexIsReusedWhenNothingIsChargedToIt) {
  TestPool t(4);
  const Holder a = t.Session(), b = t.Session();
  const BlockRef block = t.Chain(a, {"x"})[0];
  t.Match(b, {"x"});
  t.pool.EndSession(a);
  t.pool.FreeQuarantine(a);
  EXPECT_EQ(t.pool.holdings(a).charged, 1u);
  EXPECT_NE(t.Session(), a);
  t.Release(b, {block});
  EXPECT_EQ(t.Session(), a);
}

TEST(BlockPool, BlockOfALastGenerationIsRetiredAndBreaksNoPromise) {
  TestPool t(4, {.first_generation = UINT32_MAX - 2});
  const Holder a = t.Session(), b = t.Session({.guaranteed = 1});
  std::vector<BlockRef> blocks = t.Lease(a, 3);
  EXPECT_EQ(blocks[0].generation, UINT32_MAX - 1);
  t.Release(a, blocks);
  blocks = t.Lease(a, 3);
  EXPECT_EQ(blocks[0].generation, UINT32_MAX);
  // A cached one can be found, but nobody may count on it.
  t.Seal(a, {blocks[0], blocks[1]}, Keys({"x", "y"}));
  t.Release(a, {blocks[0], blocks[1]});
  EXPECT_EQ(t.count(BlockState::kCached), 2u);
  EXPECT_EQ(t.pool.available(), 1u);
  EXPECT_EQ(t.pool.holdings(a).charged, 3u);
  t.pool.CheckInvariants();
  EXPECT_EQ(t.Match(a, {"x", "y"}).tokens, 2u) << "takes nothing that is available";
  t.Release(a, {blocks[0], blocks[1]});
  EXPECT_EQ(t.pool.Reclaim(t.now, {blocks[1]}, EvictReason::kOperator, nullptr), 0u) << "left, not freed";
  EXPECT_EQ(t.state(blocks[1]), BlockState::kQuarantined);
  t.Release(a, {blocks[2]});
  EXPECT_EQ(t.state(blocks[2]), BlockState::kQuarantined);
  t.pool.CheckInvariants();
  EXPECT_EQ(t.Lease(b, 1).size(), 1u) << "the promise";
  std::vector<BlockRef> out;
  EXPECT_EQ(t.pool.Lease(a, t.now, 4, 0, &out).leased, 0u);
  t.pool.EndSession(a);
  t.pool.FreeQuarantine(a);
  EXPECT_EQ(t.Session(), a) << "retired blocks keep no session index";
  EXPECT_EQ(t.Release(b, {blocks[2]}), Verdicts({V::kNotHeld}));
  EXPECT_EQ(t.count(BlockState::kQuarantined), 2u) << "for ever";
}

TEST(BlockPool, LeaseReclaimsWhenFreeBlocksRunShort) {
  TestPool t(4);
  const Holder a = t.Session();
  t.Cache(a, {"x", "y", "z"});
  t.now += 70;
  EXPECT_EQ(t.Lease(a, 3).size(), 3u);
  EXPECT_EQ(t.count(BlockState::kCached), 1u);
  const std::vector<Eviction> evictions = t.pool.TakeDirectEvictions();
  ASSERT_EQ(evictions.size(), 2u);
  EXPECT_EQ(evictions[0].key, Key("z"));
  EXPECT_EQ(evictions[0].lifetime_ms, 70u);
  EXPECT_TRUE(t.pool.TakeDirectEvictions().empty());
  EXPECT_EQ(t.pool.counters().evicted[static_cast<size_t>(EvictReason::kDirect)], 2u);
}

TEST(BlockPool, ReclaimOfVictimsSkipsWhatMovedAndTakesChildrenFirst) {
  TestPool t(6);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y", "z"});
  const std::vector<BlockRef> d = t.Cache(a, {"p", "q"});
  const BlockRef stale = {c[2].id, c[2].generation + 1};
  std::vector<Eviction> log;
  EXPECT_EQ(t.pool.Reclaim(t.now, {stale, kNullRef, d[0]}, EvictReason::kOperator, &log), 0u)
      << "q is behind p";
  EXPECT_EQ(t.pool.Reclaim(t.now, {c[0], c[1], c[2], c[1], d[1]}, EvictReason::kOperator, &log), 4u);
  ASSERT_EQ(log.size(), 4u);
  EXPECT_EQ(log[0].key, Key("z"));
  EXPECT_EQ(log[1].key, Key("y"));
  EXPECT_EQ(log[2].key, Key("x"));
  EXPECT_EQ(log[3].key, Key("q"));
  t.Match(a, {"p"});
  EXPECT_EQ(t.pool.Reclaim(t.now, {d[0]}, EvictReason::kOperator, &log), 0u) << "held";
  EXPECT_EQ(t.pool.counters().evicted[static_cast<size_t>(EvictReason::kOperator)], 4u);
}

TEST(BlockPool, KeysOfOtherLengthsAreDigested) {
  EXPECT_TRUE(BlockKey::From(std::string(32, 'x'), 3).raw);
  EXPECT_FALSE(BlockKey::From("x", 3).raw);
  EXPECT_NE(BlockKey::From("x", 0), BlockKey::From("x", 1));
  // SHA-256("abc"), FIPS 180-2 appendix B.1.
  EXPECT_EQ(BlockKey::From("abc", 0).bytes[0], 0xba);
  EXPECT_EQ(BlockKey::From("abc", 0).bytes[31], 0xad);
  // The digest itself as a key of 32 bytes is another key.
  const BlockKey digested = BlockKey::From("abc", 0);
  const BlockKey given =
      BlockKey::From({reinterpret_cast<const char*>(digested.bytes.data()), digested.bytes.size()}, 0);
  TestPool t(2);
  const Holder a = t.Session();
  t.Seal(a, {t.LeaseOne(a)}, {digested});
  EXPECT_NE(t.pool.Find(digested), kNullRef);
  EXPECT_EQ(t.pool.Find(given), kNullRef);
}

TEST(BlockPool, ViewTellsAllOfABlock) {
  TestPool t(3);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y"});
  t.now += 30;
  t.pool.Touch(t.now, {c[1]});
  t.now += 12;
  const BlockView view = *t.pool.View(c[1].id, t.now);
  EXPECT_EQ(view.ref, c[1]);
  EXPECT_EQ(view.key, Key("y"));
  EXPECT_EQ(view.parent, c[0].id);
  EXPECT_EQ(view.age_ms, 42u);
  EXPECT_EQ(view.idle_ms, 12u);
  EXPECT_EQ(view.owner, kNobody);
  EXPECT_EQ(view.priority, kDefaultPriority);
  EXPECT_FALSE(view.pinned);
  EXPECT_EQ(t.pool.View(c[0].id, t.now)->children, 1u);
}

TEST(SetPolicy, TakesOverWhatIsThere) {
  for (const PolicyEntry& between : ReplacementPolicies()) {
    TestPool t(12, {.pin_budget = 0.5});
    const Holder a = t.Session();
    t.Cache(a, {"x", "y"});
    ++t.now;
    const std::vector<BlockRef> held = t.Chain(a, {"p", "q"});
    const std::vector<BlockRef> kept = t.Cache(a, {"k"});
    t.Retain(kept, {.priority = 60, .until = 5000});
    ++t.now;
    t.Cache(a, {"z"});
    for (const std::string_view name : {between.name, std::string_view("lru")}) {
      t.pool.SetPolicy(t.now, *MakeReplacementPolicy(name, 12));
      EXPECT_EQ(t.pool.policy().name(), name);
      t.pool.CheckInvariants();
    }
    t.Release(a, held);
    EXPECT_EQ(t.count(BlockState::kCached), 6u);
    const std::vector<BlockKey> left = t.Reclaim(6);
    EXPECT_EQ(left.size(), 6u) << between.name;
    EXPECT_EQ(left.back(), Key("k")) << between.name;
    // The first policy has LRU's order, the second none of its own.
    if (between.name == "lru" || between.name == "random") {
      EXPECT_EQ(left, Keys({"y", "x", "z", "q", "p", "k"})) << between.name;
    }
  }
}

}  // namespace
}  // namespace kvpool
