// Which slabs leases come from, and how many are left without a block in use.
#include "server/pool/lease_order.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/pool/block_pool.h"
#include "server/pool/free_set.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

using ::testing::ElementsAre;

std::vector<uint32_t> Ids(const std::vector<BlockRef>& blocks) {
  std::vector<uint32_t> ids;
  for (const BlockRef& block : blocks) ids.push_back(Index(block.id));
  return ids;
}

TEST(LeaseOrder, TakesTheFirstSlabAndThenTheOneWithMostInUse) {
  TestPool t(15, {.slab_blocks = 4});
  const Holder a = t.Session();
  std::vector<BlockRef> blocks = t.Lease(a, 15);
  // One is in use in the slab from block 4 on, three in that from 8 on, and two in that from 12 on.
  t.Release(a, {blocks[0], blocks[3], blocks[4], blocks[5], blocks[9], blocks[12], blocks[13]});
  EXPECT_EQ(t.pool.lowest_free(), 1u);
  EXPECT_THAT(Ids(t.Lease(a, 1)), ElementsAre(1));
  // Two and three are alike, and the lower slab is next; as blocks come in use there it stays the next.
  EXPECT_THAT(Ids(t.Lease(a, 6)), ElementsAre(10, 13, 14, 4, 5, 6));
  t.pool.CheckInvariants();
}

TEST(LeaseOrder, WhatIsSealedOrQuarantinedCountsAndWhatIsCachedDoesNot) {
  TestPool t(31, {.slab_blocks = 8});
  const Holder a = t.Session(), b = t.Session();
  const std::vector<BlockRef> first = t.Lease(a, 7);
  const std::vector<BlockRef> cached = t.Cache(a, {"a", "b", "c", "d", "e", "f"});  // 8 to 13.
  ASSERT_EQ(cached[0].id, BlockId{8});
  const std::vector<BlockRef> rest = t.Lease(a, 2);
  const std::vector<BlockRef> quarantined = t.Lease(b, 1);
  ASSERT_EQ(quarantined[0].id, BlockId{16});
  t.Release(a, rest);
  t.pool.EndSession(b);
  EXPECT_EQ(t.pool.lowest_free(), 17u) << "six are cached in the slab in front, and none is in use";
  ASSERT_EQ(t.Match(a, {"a", "b"}).tokens, 2u);
  EXPECT_EQ(t.pool.lowest_free(), 14u);
  t.pool.CheckInvariants();
  t.Release(a, {cached[0], cached[1]});
  EXPECT_EQ(t.pool.lowest_free(), 17u);
  t.pool.FreeQuarantine(b);
  EXPECT_EQ(t.pool.lowest_free(), 14u);
  t.pool.CheckInvariants();
}

TEST(LeaseOrder, WhatIsToGoIsLastHoweverMuchIsInUseThere) {
  TestPool t(15, {.slab_blocks = 4});
  const Holder a = t.Session();
  const std::vector<BlockRef> blocks = t.Lease(a, 15);
  t.Release(a, {blocks[6], blocks[8], blocks[9], blocks[10]});
  // A slab is all of that but its first block, which is to stay.
  t.pool.Vacate({5, 8});
  EXPECT_THAT(Ids(t.Lease(a, 4)), ElementsAre(9, 10, 11, 7));
  t.Release(a, {blocks[4], blocks[5], blocks[11]});
  t.Release(a, {{BlockId{4}, blocks[3].generation}});
  EXPECT_THAT(Ids(t.Lease(a, 3)), ElementsAre(12, 4, 5)) << "one is in use there, and three are behind it";
  t.pool.CheckInvariants();
  while (t.pool.PutBack(1)) t.pool.CheckInvariants();
  EXPECT_EQ(t.pool.lowest_free(), 6u);
}

// Slabs in which nothing was in use, on average, and how many there could have been.
struct Unused {
  double slabs = 0, ideal = 0;
};

constexpr uint32_t kSlabs = 64;
constexpr uint32_t kSlabBlocks = 64;

// Sequences of 4 to 31 blocks come and grow as tides of 16 and 64 % of the load turn. One of 1,000 lasts for thousands of
// steps, others for up to 220. Half of them are cached when they end, if any are, and a third of all begins with one that was.
Unused Churn(uint32_t slab_blocks, bool caches) {
  constexpr uint32_t kBlocks = kSlabs * kSlabBlocks;
  constexpr uint32_t kSteps = 20'000, kWarmUp = 4'000, kTide = 2'500;
  struct Sequence {
    uint32_t id = 0, blocks = 0, ends = 0;
    bool is_kept = false;
    std::vector<BlockRef> held;
  };
  TestPool t(kBlocks - 1, {.slab_blocks = slab_blocks});
  const Holder a = t.Session();
  std::mt19937_64 random(20261128);
  std::vector<Sequence> live;
  std::vector<std::pair<uint32_t, uint32_t>> kept;  // Sequences, and how long they were.
  uint32_t ids = 0, committed = 0;
  const auto keys_of = [](uint32_t id, uint32_t from, uint32_t end) {
    std::vector<std::string> names;
    for (uint32_t i = from; i < end; ++i) names.push_back(absl::StrCat(id, ".", i));
    return names;
  };
  const auto grow = [&](Sequence* s) {
    const std::vector<BlockRef> more = t.Lease(a, 1);
    if (s->is_kept) {
      const auto at = static_cast<uint32_t>(s->held.size());
      const BlockKey parent = Key(absl::StrCat(s->id, ".", at - (at > 0 ? 1 : 0)));
      t.Seal(a, more, Keys(keys_of(s->id, at, at + 1)), at > 0 ? &parent : nullptr);
    }
    s->held.push_back(more[0]);
  };
  Unused unused;
  uint32_t looks = 0;
  for (uint32_t step = 0; step < kSteps; ++step) {
    ++t.now;
    const uint32_t load = kBlocks / 100 * (step / kTide % 2 == 0 ? 4 : 16);
    while (committed < load) {
      Sequence s = {.id = ++ids, .blocks = 4 + static_cast<uint32_t>(random() % 28)};
      s.ends = step + (random() % 1000 == 0 ? 2'000 + random() % 8'000 : 20 + random() % 200);
      s.is_kept = caches && random() % 2 == 0;
      if (s.is_kept && !kept.empty() && random() % 3 == 0) {
        const auto& [id, blocks] = kept[kept.size() - 1 - random() % std::min<size_t>(kept.size(), 300)];
        s.id = id;
        s.held = t.Match(a, keys_of(id, 0, std::min(blocks, s.blocks))).blocks[0];
      }
      while (s.held.size() < s.blocks / 2) grow(&s);
      committed += s.blocks;
      live.push_back(std::move(s));
    }
    for (size_t i = 0; i < live.size();) {
      Sequence& s = live[i];
      if (step < s.ends) {
        if (s.held.size() < s.blocks && random() % 8 == 0) grow(&s);
        ++i;
        continue;
      }
      if (s.is_kept) kept.emplace_back(s.id, static_cast<uint32_t>(s.held.size()));
      t.Release(a, s.held);
      committed -= s.blocks;
      if (i + 1 < live.size()) s = std::move(live.back());
      live.pop_back();
    }
    const auto free = [&t] { return t.pool.counts()[static_cast<size_t>(BlockState::kFree)]; };
    if (free() < kBlocks / 20)
      t.pool.Reclaim(t.now, kBlocks / 10 - free(), EvictReason::kBackground, nullptr);
    if (step < kWarmUp || step % 50 != 0) continue;
    uint32_t in_use = 0;
    for (uint32_t slab = 0; slab < kSlabs; ++slab) {
      const auto counts = t.pool.CountIn({std::max(1u, slab * kSlabBlocks), (slab + 1) * kSlabBlocks});
      const uint32_t here =
          counts[static_cast<size_t>(BlockState::kLeased)] + counts[static_cast<size_t>(BlockState::kSealed)];
      in_use += here;
      if (here == 0) ++unused.slabs;
    }
    unused.ideal += kSlabs - std::max(1u, (in_use + 1 + kSlabBlocks - 1) / kSlabBlocks);
    ++looks;
  }
  t.pool.CheckInvariants();
  return {unused.slabs / looks, unused.ideal / looks};
}

TEST(LeaseOrder, LeavesMoreSlabsUnusedThanTheLowestBlockDoes) {
  // A pool of one piece leases the lowest free block of all.
  const Unused by_use = Churn(kSlabBlocks, /*caches=*/true), lowest = Churn(0, /*caches=*/true);
  std::printf("cached: %.2f slabs unused of %.2f, where the lowest block is leased %.2f of %.2f\n",
              by_use.slabs, by_use.ideal, lowest.slabs, lowest.ideal);
  EXPECT_GT(by_use.slabs, 1.2 * lowest.slabs);
  const Unused alone = Churn(kSlabBlocks, /*caches=*/false), lowest_alone = Churn(0, /*caches=*/false);
  std::printf("uncached: %.2f of %.2f, and %.2f of %.2f\n", alone.slabs, alone.ideal, lowest_alone.slabs,
              lowest_alone.ideal);
  EXPECT_GT(alone.slabs, .9 * alone.ideal);
  EXPECT_GT(alone.slabs, .99 * lowest_alone.slabs);
}

// Blocks go between free, in use and cached, and ranges of them leave and come back, one after the other by chance. What is next
// is what a look at all slabs finds.
void Walk(uint32_t end, uint32_t slab_blocks, uint64_t seed) {
  enum class State : uint8_t { kAbsent, kFree, kInUse, kCached };
  LeaseOrder order(end, slab_blocks);
  FreeSet free(end);
  std::vector<State> states(end, State::kAbsent);
  std::vector<uint32_t> in_use(order.slabs()), to_lease(order.slabs());
  // Where no size is given all is one slab.
  const uint32_t blocks_each = slab_blocks == 0 ? end : slab_blocks;
  std::mt19937_64 random(seed);
  const auto below = [&random](uint32_t most) { return static_cast<uint32_t>(random() % most); };
  // Free blocks of the range, which have left or come, by state.
  const auto turn = [&](BlockRange range, State from, State to) {
    for (uint32_t b = range.first; b < range.end; ++b) {
      if (states[b] != from) continue;
      states[b] = to;
      to_lease[order.SlabOf(b)] += to == State::kFree ? 1 : -1;
    }
  };
  const auto any_range = [&] {
    const uint32_t first = 1 + below(end - 1);
    return BlockRange{first, std::min(end, first + 1 + below(3 * blocks_each))};
  };
  turn({1, end}, State::kAbsent, State::kFree);
  free.InsertRange(1, end);
  order.Add(free, {1, end});
  for (int step = 0; step < 3000; ++step) {
    uint32_t next = UINT32_MAX;
    for (uint32_t slab = 0; slab < order.slabs(); ++slab) {
      if (to_lease[slab] == 0) continue;
      if (next == UINT32_MAX || (next != 0 && std::bit_width(in_use[slab]) > std::bit_width(in_use[next]))) {
        next = slab;
      }
    }
    const BlockRange answer = order.next();
    ASSERT_EQ(answer.size() == 0, next == UINT32_MAX) << step;
    if (next != UINT32_MAX) {
      ASSERT_EQ(order.SlabOf(answer.first), next) << step;
      ASSERT_TRUE(answer.first == 0 || order.SlabOf(answer.first - 1) == next - 1) << step;
      ASSERT_EQ(order.SlabOf(answer.end - 1), next) << step;
    }
    switch (const uint32_t dice = below(16)) {
      case 0: {  // All that is free there leaves.
        const BlockRange range = any_range();
        order.Remove(free, range);
        turn(range, State::kFree, State::kAbsent);
        for (uint32_t b = range.first; b < range.end; ++b) free.Erase(b);
        break;
      }
      case 1: {  // What is absent comes.
        const BlockRange range = any_range();
        for (uint32_t b = range.first; b < range.end; ++b) {
          if (states[b] != State::kAbsent) continue;
          free.Insert(b);
          order.Add(b, /*was_in_use=*/false);
        }
        turn(range, State::kAbsent, State::kFree);
        break;
      }
      default: {
        if (dice < 8 && next != UINT32_MAX) {
          uint32_t leased[64];
          const uint32_t count = free.Pop(answer.first, answer.end, 1 + below(8), leased);
          ASSERT_GT(count, 0u);
          ASSERT_TRUE(std::none_of(states.begin() + answer.first, states.begin() + leased[0],
                                   [](State state) { return state == State::kFree; }))
              << step << ": not the lowest";
          order.Lease(leased[0], count);
          for (uint32_t i = 0; i < count; ++i) {
            ASSERT_EQ(order.SlabOf(leased[i]), next);
            states[leased[i]] = State::kInUse;
          }
          in_use[next] += count;
          to_lease[next] -= count;
          break;
        }
        const uint32_t b = 1 + below(end - 1), slab = order.SlabOf(b);
        if (states[b] == State::kInUse && below(2) == 0) {  // It is cached.
          order.EndUse(b);
          --in_use[slab];
          states[b] = State::kCached;
        } else if (states[b] == State::kCached && below(2) == 0) {  // It is matched.
          order.Use(b);
          ++in_use[slab];
          states[b] = State::kInUse;
        } else if (states[b] == State::kInUse || states[b] == State::kCached) {
          const bool was_in_use = states[b] == State::kInUse;
          free.Insert(b);
          order.Add(b, was_in_use);
          in_use[slab] -= was_in_use ? 1 : 0;
          ++to_lease[slab];
          states[b] = State::kFree;
        }
      }
    }
  }
}

TEST(LeaseOrder, IsWhatALookAtAllSlabsFinds) {
  uint64_t seed = 1;
  // One block a slab counts as two, one slab may be all there is, and the last one is smaller where that does not come out even.
  for (const uint32_t end : {2u, 17u, 64u, 65u, 1000u, 8191u}) {
    for (const uint32_t slab_blocks : {0u, 1u, 2u, 3u, 5u, 16u, 63u, 64u, 65u, 1000u, 100'000u}) {
      SCOPED_TRACE(absl::StrCat(end, " blocks in slabs of ", slab_blocks));
      ASSERT_NO_FATAL_FAILURE(Walk(end, slab_blocks, ++seed));
    }
  }
}

}  // namespace
}  // namespace kvpool
