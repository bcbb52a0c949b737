// The LRU policy by itself, against its definition: a scan of ordered lists.
#include "server/replacement/lru.h"

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace kvpool {
namespace {

class Parents final : public ReplacementPolicy::Chain {
 public:
  bool childless(BlockId block) const override {
    ++examined[block];
    return !parents.contains(block);
  }
  std::set<BlockId> parents;
  mutable std::map<BlockId, int> examined;
};

std::vector<BlockId> Victims(LruPolicy* lru, uint32_t count, const Parents& chain) {
  std::vector<BlockId> victims;
  lru->Victims(count, chain, &victims);
  return victims;
}

using Ids = std::vector<BlockId>;

TEST(Lru, OldestUseFirst) {
  LruPolicy lru(8);
  const Parents chain;
  for (uint32_t b = 1; b <= 4; ++b) lru.OnCached(BlockId{b}, {});
  lru.OnTouched(BlockId{1}, {});
  lru.OnUncached(BlockId{3});
  EXPECT_EQ(lru.size(), 3u);
  EXPECT_EQ(Victims(&lru, 9, chain), Ids({BlockId{2}, BlockId{4}, BlockId{1}}));
}

TEST(Lru, PassedOverBlocksKeepTheirPlaceAndAreMetOnce) {
  LruPolicy lru(8);
  Parents chain;
  for (uint32_t b = 1; b <= 5; ++b) lru.OnCached(BlockId{b}, {});
  chain.parents = {BlockId{1}, BlockId{2}, BlockId{3}};
  EXPECT_EQ(Victims(&lru, 1, chain), Ids({BlockId{4}}));
  lru.OnUncached(BlockId{4});
  // The younger of the passed ones is childless first; then the older too: the older goes first.
  chain.parents = {BlockId{3}};
  lru.OnChildless(BlockId{2});
  lru.OnChildless(BlockId{1});
  EXPECT_EQ(Victims(&lru, 3, chain), Ids({BlockId{1}, BlockId{2}, BlockId{5}}));
  EXPECT_EQ(chain.examined[BlockId{3}], 1);
}

TEST(Lru, LowerPrioritiesFirst) {
  LruPolicy lru(8);
  const Parents chain;
  lru.OnCached(BlockId{1}, {.priority = 100});
  lru.OnCached(BlockId{2}, {.priority = 64});
  lru.OnCached(BlockId{3}, {.priority = 63});
  lru.OnCached(BlockId{4}, {.priority = 0});
  lru.OnCached(BlockId{5}, {.priority = 63});
  lru.OnPriority(BlockId{1}, 63);
  EXPECT_EQ(Victims(&lru, 9, chain), Ids({BlockId{4}, BlockId{1}, BlockId{3}, BlockId{5}, BlockId{2}}));
}

// The definition: lists in order, nothing ever leaves its place.
class ScanOfLists {
 public:
  void Cached(uint32_t b, uint8_t priority) {
    lists_[priority].push_back(b);
    of_[b] = priority;
  }
  void Uncached(uint32_t b) {
    lists_[of_.at(b)].remove(b);
    of_.erase(b);
  }
  void Priority(uint32_t b, uint8_t priority) {
    Uncached(b);
    lists_[priority].push_front(b);
    of_[b] = priority;
  }
  uint32_t Victim(const Parents& chain) const {
    for (const auto& [priority, list] : lists_) {
      for (const uint32_t b : list) {
        if (!chain.parents.contains(BlockId{b})) return b;
      }
    }
    return 0;
  }
  bool contains(uint32_t b) const { return of_.contains(b); }
  size_t size() const { return of_.size(); }

 private:
  std::map<uint8_t, std::list<uint32_t>> lists_;
  std::map<uint32_t, uint8_t> of_;
};

TEST(Lru, IsExact) {
  constexpr uint32_t kBlocks = 24;
  LruPolicy lru(kBlocks + 1);
  ScanOfLists scan;
  Parents chain;
  std::mt19937 random(20240611);
  const uint8_t priorities[] = {0, 50, 51, 100};
  for (int step = 0; step < 200000; ++step) {
    const uint32_t b = 1 + random() % kBlocks;
    const uint8_t priority = priorities[random() % 4];
    const bool cached = scan.contains(b);
    switch (random() % 7) {
      case 0:
      case 1:
        if (cached) break;
        lru.OnCached(BlockId{b}, {.priority = priority});
        scan.Cached(b, priority);
        if (random() % 2 == 0) chain.parents.insert(BlockId{b});
        break;
      case 2:
        if (!cached) break;
        lru.OnUncached(BlockId{b});
        scan.Uncached(b);
        chain.parents.erase(BlockId{b});
        break;
      case 3:
        if (!cached) break;
        lru.OnTouched(BlockId{b}, {.priority = priority});
        scan.Uncached(b);
        scan.Cached(b, priority);
        break;
      case 4:
        if (!cached) break;
        lru.OnPriority(BlockId{b}, priority);
        scan.Priority(b, priority);
        break;
      case 5:
        if (!cached) break;
        chain.parents.erase(BlockId{b});
        lru.OnChildless(BlockId{b});
        break;
      case 6: {
        const uint32_t expected = scan.Victim(chain);
        const Ids victims = Victims(&lru, 1, chain);
        ASSERT_EQ(victims, expected == 0 ? Ids() : Ids({BlockId{expected}})) << "step " << step;
        if (expected == 0) break;
        lru.OnUncached(BlockId{expected});
        scan.Uncached(expected);
      }
    }
    ASSERT_EQ(lru.size(), scan.size());
  }
}

TEST(Registry, NamesItsPolicies) {
  EXPECT_EQ((*MakeReplacementPolicy("lru", 16))->name(), "lru");
  const absl::Status unknown = MakeReplacementPolicy("best", 16).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "\"best\" is unknown; there are: lru")) << unknown;
}

}  // namespace
}  // namespace kvpool
