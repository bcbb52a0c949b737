// Models with groups that have a window: what of them comes back from a tier.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/service/tier_test.h"

namespace kvpool {
namespace {

// A model whose second group has a window of two blocks: engines keep windows at the ends of requests, and none between.
class TierWindowTest : public TierTest {
 protected:
  static constexpr uint64_t kWindow = 2;

  void BeginHybrid() {
    v1::OpenSession request = OpenRequest();
    v1::LayerGroup* sliding = request.mutable_layout()->add_groups();
    sliding->set_name("sliding");
    sliding->add_layers(1);
    sliding->set_tokens_per_block(16);
    sliding->set_window_tokens(16 * kWindow);
    Begin(request, TierWrite::kEvict, 1);
  }
  // Seals so many blocks of the first group, and those of the second.
  void ComputeHybrid(const std::vector<std::string>& keys, size_t full, const std::vector<size_t>& windowed) {
    Compute({keys.begin(), keys.begin() + static_cast<ptrdiff_t>(full)});
    for (const size_t i : windowed) {
      const std::vector<uint64_t> block = engine_->Lease(1);
      ASSERT_EQ(block.size(), 1);
      Fill(block[0], keys[i]);
      v1::Operation seal = SealOp(block, {keys[i]});
      seal.mutable_seal()->set_group(1);
      EXPECT_EQ(engine_->Do(seal).seal().refused_size(), 0);
      engine_->Release(block);
    }
  }
  v1::Operation OfBoth(v1::Operation match) {
    v1::GroupKeys* second = match.mutable_match()->add_groups();
    *second = match.match().groups(0);
    second->set_group(1);
    return match;
  }
  v1::MatchResult AwaitBoth(const std::vector<std::string>& keys) {
    std::optional<v1::OperationResult> answer;
    engine_->Send(OfBoth(WaitOp(keys)), &answer);
    Move();
    EXPECT_TRUE(answer.has_value());
    if (!answer.has_value()) return {};
    EXPECT_EQ(answer->code(), 0) << answer->message();
    for (const v1::GroupHit& group : answer->match().groups()) {
      for (int i = 0; i < group.blocks_size(); ++i) {
        const uint64_t block = group.blocks(i);
        EXPECT_TRUE(block == 0 || Has(block, keys[static_cast<size_t>(i)])) << i;
      }
    }
    return answer->match();
  }
  void LetGoOfBoth(const v1::MatchResult& match) {
    for (const v1::GroupHit& group : match.groups()) {
      std::vector<uint64_t> held;
      for (const uint64_t block : group.blocks()) {
        if (block != 0) held.push_back(block);
      }
      if (!held.empty()) engine_->Release(held);
    }
  }
};

TEST_F(TierWindowTest, APrefixEndsWhereItsWindowIs) {
  BeginHybrid();
  const std::vector<std::string> keys = Keys("k", 6);
  ComputeHybrid(keys, 6, {0, 2, 3, 5});
  Move();
  PushOut();
  const v1::MatchResult at_once = engine_->Do(OfBoth(MatchOp(keys))).match();
  EXPECT_EQ(at_once.tokens(), 0);
  EXPECT_EQ(at_once.below_tokens(), 64);
  const v1::MatchResult match = AwaitBoth(keys);
  EXPECT_EQ(match.tokens(), 64);
  EXPECT_EQ(match.groups(1).blocks(0), 0);
  EXPECT_EQ(match.groups(1).blocks(1), 0);
  EXPECT_EQ(counters().promoted, 6) << "four, and the window at their end";
}

// Whatever lies above and below, it is the longest prefix that has all that it reads.
TEST_F(TierWindowTest, TheLongestPrefixThatHasAllItReads) {
  BeginHybrid();
  std::mt19937 dice(11);
  uint32_t found = 0;
  for (int round = 0; round < 200; ++round) {
    const std::vector<std::string> keys = Keys(absl::StrCat(round, "-"), 7);
    const size_t full = 1 + dice() % 7;
    std::vector<size_t> windowed;
    for (size_t i = 0; i < 7; ++i) {
      if (dice() % 4 != 0) windowed.push_back(i);
    }
    ComputeHybrid(keys, full, windowed);
    std::vector<bool> is_there(7);
    for (const size_t i : windowed) is_there[i] = true;
    Move();
    size_t longest = full;
    for (; longest > 0; --longest) {
      const size_t first = longest - std::min<size_t>(longest, kWindow);
      if (std::all_of(is_there.begin() + static_cast<ptrdiff_t>(first),
                      is_there.begin() + static_cast<ptrdiff_t>(longest), [](bool here) { return here; })) {
        break;
      }
    }
    // Some of it leaves the pool.
    const std::vector<uint64_t> others = engine_->Lease(1 + dice() % 14);
    engine_->Release(others);
    const v1::MatchResult at_once = engine_->Do(OfBoth(MatchOp(keys))).match();
    EXPECT_EQ(at_once.tokens() + at_once.below_tokens(), 16 * longest) << round;
    LetGoOfBoth(at_once);
    const v1::MatchResult match = AwaitBoth(keys);
    EXPECT_EQ(match.tokens(), 16 * longest) << round;
    LetGoOfBoth(match);
    found += at_once.below_tokens() > 0;
    PushOut();
  }
  EXPECT_GT(found, 100);
}

}  // namespace
}  // namespace kvpool
