// Who may use which block next, against a model that looks at all who stand there.
#include "server/space/block_gates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvpool {
namespace {

using Id = BlockGates::Id;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<Id> Leave(BlockGates* gates, Id id) {
  std::vector<Id> next;
  while (gates->Leave(id, 2, &next)) {
  }
  return next;
}

TEST(BlockGatesTest, WhoIsFirstEverywhereMayGo) {
  BlockGates gates;
  const Id a = gates.Enter(), b = gates.Enter(), c = gates.Enter();
  gates.StandLast(a, {1, 2});
  gates.StandLast(b, {2, 3});
  gates.StandLast(c, {1, 3});
  EXPECT_TRUE(gates.may_go(a));
  EXPECT_FALSE(gates.may_go(b));
  EXPECT_FALSE(gates.may_go(c));
  EXPECT_EQ(gates.first(3), b);
  EXPECT_THAT(Leave(&gates, a), ElementsAre(b)) << "c is behind b";
  EXPECT_FALSE(gates.contains(4));
  EXPECT_THAT(Leave(&gates, b), ElementsAre(c));
  EXPECT_THAT(Leave(&gates, c), IsEmpty());
  EXPECT_TRUE(gates.empty());
}

TEST(BlockGatesTest, ABlockNamedTwiceHoldsItselfUpNowhere) {
  BlockGates gates;
  const Id a = gates.Enter(), b = gates.Enter();
  gates.StandLast(a, {7, 7});
  gates.StandLast(b, {7, 7, 8, 7});
  EXPECT_TRUE(gates.may_go(a));
  EXPECT_THAT(Leave(&gates, a), ElementsAre(b));
  EXPECT_THAT(Leave(&gates, b), IsEmpty());
  EXPECT_TRUE(gates.empty());
}

TEST(BlockGatesTest, WhoComesInFrontHoldsUpTheOneThatWasFirst) {
  BlockGates gates;
  const Id a = gates.Enter(), b = gates.Enter();
  gates.StandLast(a, {1});
  gates.StandFirst(b, {1, 1, 2});
  EXPECT_FALSE(gates.may_go(a));
  EXPECT_TRUE(gates.may_go(b));
  EXPECT_EQ(gates.first(1), b);
  EXPECT_THAT(Leave(&gates, b), ElementsAre(a));
}

TEST(BlockGatesTest, WhoComesAndLeavesInPartsHoldsUpWhatIsLeft) {
  BlockGates gates;
  const Id a = gates.Enter(), b = gates.Enter(), c = gates.Enter(), d = gates.Enter();
  gates.StandLast(a, {1, 2});
  gates.StandLast(a, {2, 3});
  gates.StandLast(b, {3});
  gates.StandLast(c, {1});
  std::vector<Id> next;
  EXPECT_TRUE(gates.Leave(a, 1, &next));
  EXPECT_THAT(next, ElementsAre(b)) << "the third block is left first";
  EXPECT_TRUE(gates.stands(a));
  EXPECT_FALSE(gates.may_go(c));
  EXPECT_EQ(gates.first(1), a);
  // Others may come in front of it, and leave, meanwhile.
  gates.StandFirst(d, {1, 2});
  EXPECT_TRUE(gates.Leave(a, 1, &next));
  EXPECT_FALSE(gates.Leave(a, 1, &next));
  EXPECT_FALSE(gates.stands(a));
  EXPECT_FALSE(gates.may_go(c)) << "it is behind d now";
  EXPECT_EQ(gates.first(2), d);
  EXPECT_THAT(Leave(&gates, d), ElementsAre(c));
  EXPECT_THAT(Leave(&gates, b), IsEmpty());
  EXPECT_THAT(Leave(&gates, c), IsEmpty());
  EXPECT_TRUE(gates.empty());
}

TEST(BlockGatesTest, TheLastInALineLeavesFromBehindOthers) {
  BlockGates gates;
  const Id a = gates.Enter(), b = gates.Enter(), c = gates.Enter();
  gates.StandLast(a, {1, 2});
  std::vector<Id> next;
  EXPECT_TRUE(gates.Leave(a, 1, &next));
  gates.StandFirst(b, {1});
  EXPECT_FALSE(gates.Leave(a, 1, &next));
  gates.StandLast(c, {1});
  EXPECT_FALSE(gates.may_go(c));
  EXPECT_THAT(Leave(&gates, b), ElementsAre(c));
}

TEST(BlockGatesTest, NobodyStandsWhereNobodyCame) {
  BlockGates gates;
  EXPECT_FALSE(gates.may_go(0));
  EXPECT_FALSE(gates.may_go(1));
  EXPECT_EQ(gates.first(1), 0u);
  const Id a = gates.Enter();  // A verb without blocks.
  EXPECT_TRUE(gates.may_go(a));
  EXPECT_THAT(Leave(&gates, a), IsEmpty());
}

// Lines of ids, looked at as a whole each time.
class Model {
 public:
  bool MayGo(Id id) const {
    return std::all_of(lines_.begin(), lines_.end(), [id](const auto& line) {
      return line.second.front() == id || !std::count(line.second.begin(), line.second.end(), id);
    });
  }
  void Stand(Id id, const std::vector<uint32_t>& blocks, bool first) {
    for (const uint32_t block : std::set(blocks.begin(), blocks.end())) {
      std::deque<Id>& line = lines_[block];
      first ? line.push_front(id) : line.push_back(id);
    }
    ids_.insert(id);
  }
  std::set<Id> Leave(Id id) {
    std::set<Id> before = Free();
    for (auto line = lines_.begin(); line != lines_.end();) {
      std::erase(line->second, id);
      line = line->second.empty() ? lines_.erase(line) : std::next(line);
    }
    ids_.erase(id);
    std::set<Id> next = Free();
    for (const Id other : before) next.erase(other);
    return next;
  }
  std::set<Id> Free() const {
    std::set<Id> free;
    for (const Id id : ids_) {
      if (MayGo(id)) free.insert(id);
    }
    return free;
  }
  Id First(uint32_t block) const {
    const auto line = lines_.find(block);
    return line == lines_.end() ? 0 : line->second.front();
  }

 private:
  std::map<uint32_t, std::deque<Id>> lines_;
  std::set<Id> ids_;
};

TEST(BlockGatesTest, AgreesWithTheModel) {
  constexpr uint32_t kBlocks = 12;
  std::mt19937 random(7);
  BlockGates gates;
  Model model;
  std::map<Id, std::set<uint32_t>> stands;
  int left = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::set<Id> free = model.Free();
    if (stands.size() < 8 && random() % 2 == 0) {
      const Id id = gates.Enter();
      std::vector<uint32_t> blocks(random() % 6);
      for (uint32_t& block : blocks) block = random() % kBlocks;
      const bool first = random() % 8 == 0;
      first ? gates.StandFirst(id, blocks) : gates.StandLast(id, blocks);
      model.Stand(id, blocks, first);
      stands[id].insert(blocks.begin(), blocks.end());
    } else if (!free.empty() && random() % 4 == 0) {
      // As a device operation does whose destinations others name already.
      const Id id = *free.begin();
      const uint32_t block = random() % kBlocks;
      if (!stands[id].insert(block).second) continue;
      gates.StandFirst(id, {block});
      model.Stand(id, {block}, true);
    } else if (!free.empty()) {
      const Id id = *std::next(free.begin(), static_cast<long>(random() % free.size()));
      EXPECT_THAT(Leave(&gates, id), testing::UnorderedElementsAreArray(model.Leave(id)));
      stands.erase(id);
      ++left;
    }
    for (const auto& [id, blocks] : stands) ASSERT_EQ(gates.may_go(id), model.MayGo(id)) << "step " << i;
    for (uint32_t block = 0; block < kBlocks; ++block) ASSERT_EQ(gates.first(block), model.First(block));
  }
  EXPECT_GT(left, 3000);
}

}  // namespace
}  // namespace kvpool
