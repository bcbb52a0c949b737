// Several tiers as one.
#include "server/tiers/tier_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/tiers/host_tier.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;
using testing::ElementsAre;

// A tier whose loads take a time that depends on their bytes.
class SlowTier final : public Tier {
 public:
  SlowTier(std::chrono::microseconds each, std::chrono::nanoseconds per_byte)
      : each_(each), per_byte_(per_byte) {}
  std::atomic<int> loads{0};
  std::string_view name() const override { return "slow"; }
  uint64_t most_value_bytes() const override { return tier_.most_value_bytes(); }
  std::string path() const override { return ""; }
  std::string describe() const override { return ""; }
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override {
    tier_.Exists(keys, found);
  }
  void Load(std::vector<TierLoad> batch, Deadline deadline, Done done) override {
    for (size_t i = 0; i < batch.size(); ++i) {
      ++loads;
      std::this_thread::sleep_for(each_ + per_byte_ * batch[i].into->bytes());
      tier_.Load({batch[i]}, deadline, [&](size_t, TierResult result) { done(i, result); });
    }
  }
  void Store(std::vector<TierStore> stores, Done done) override { tier_.Store(std::move(stores), done); }
  void Drain() override {}
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop) override {
    return tier_.Erase(owner, keys, stop);
  }
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override { return tier_.CountOf(owner); }
  TierUsage usage() override { return tier_.usage(); }

 private:
  const std::chrono::microseconds each_;
  const std::chrono::nanoseconds per_byte_;
  HostTier tier_{16 << 20};
};

class TierSetTest : public testing::Test {
 protected:
  static std::shared_ptr<FaultyTier> Faulty() {
    return std::make_shared<FaultyTier>(std::make_unique<HostTier>(16 << 20));
  }
  static std::vector<TierKey> KeysOf(const std::vector<uint32_t>& numbers) {
    std::vector<TierKey> keys;
    for (const uint32_t number : numbers) keys.push_back(KeyOf(number));
    return keys;
  }
  // What became of each.
  static std::vector<TierSet::Stored> StoreIn(TierSet* set, const std::vector<uint32_t>& numbers,
                                              TierSet::Members to) {
    std::vector<TierStore> stores;
    for (const uint32_t number : numbers) stores.push_back({KeyOf(number), ValueOf(number)});
    std::vector<TierSet::Stored> answers(numbers.size());
    std::vector<int> answered(numbers.size());
    set->Store(std::move(stores), std::vector<TierSet::Members>(numbers.size(), to),
               [&](size_t index, const TierSet::Stored& stored) {
                 answers[index] = stored;
                 ++answered[index];
               });
    set->Drain();
    EXPECT_THAT(answered, Each(1));
    return answers;
  }
  static std::vector<TierResult> LoadFrom(TierSet* set, const std::vector<uint32_t>& numbers,
                                          Tier::Deadline deadline = Tier::Deadline::max()) {
    std::vector<TierLoad> loads;
    for (const uint32_t number : numbers) loads.push_back({KeyOf(number), BufferStock(0).Take(kValueBytes)});
    std::vector<TierLoad> kept = loads;
    std::vector<TierResult> results(numbers.size(), TierResult::kFailed);
    std::vector<int> answered(numbers.size());
    set->Load(std::move(loads), deadline, [&](size_t index, TierResult result) {
      results[index] = result;
      ++answered[index];
    });
    set->Drain();
    EXPECT_THAT(answered, Each(1));
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (results[i] != TierResult::kDone) continue;
      const auto right = ValueOf(numbers[i]);
      EXPECT_EQ(std::string_view(kept[i].into->data(), kValueBytes),
                std::string_view(right->data(), kValueBytes))
          << i;
    }
    return results;
  }
  static std::vector<TierSet::Members> Wanted(const TierSet& set, TierOffer offer, uint32_t uses) {
    std::vector<TierSet::Offered> offered;
    for (const uint32_t number : {1u, 2u})
      offered.push_back({.key = KeyOf(number), .why = offer, .uses = uses});
    std::vector<TierSet::Members> wanted(2);
    set.Wanted(offered, kValueBytes, 1, absl::MakeSpan(wanted));
    return wanted;
  }
};

TEST_F(TierSetTest, EachIsGivenWhatItsRuleSays) {
  const auto evict = Faulty(), seal = Faulty(), reuse = Faulty();
  TierSet set({{evict, {.when = TierWrite::kEvict}},
               {seal, {.when = TierWrite::kSeal}},
               {reuse, {.when = TierWrite::kReuse, .uses = 3}}});
  EXPECT_THAT(Wanted(set, TierOffer::kSealed, 1), Each(0b010));
  EXPECT_THAT(Wanted(set, TierOffer::kReused, 2), Each(0));
  EXPECT_THAT(Wanted(set, TierOffer::kReused, 3), Each(0b100));
  EXPECT_THAT(Wanted(set, TierOffer::kLeaves, 1), Each(0b001));
  EXPECT_THAT(Wanted(set, TierOffer::kLeaves, 4), Each(0b101));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 1), Each(0b011));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 3), Each(0b111));
  EXPECT_TRUE(set.takes_after(3));
  EXPECT_FALSE(set.takes_after(2));
  StoreIn(&set, {1}, 0b001);
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 3), ElementsAre(0b110, 0b111));
  EXPECT_EQ(set.lasting(), 0) << "host memory is not";
}

// Half of what a tier holds, shared by all spaces, or the next round would write what this one pushed out.
TEST_F(TierSetTest, OfWhatLeavesEachIsGivenWhatItHasRoomFor) {
  const auto small = std::make_shared<HostTier>(100 * WholePages(kValueBytes));
  TierSet set({{small, {}}, {Faulty(), {}}, {small, {.when = TierWrite::kReuse}}});
  std::vector<TierSet::Offered> offered;
  for (uint32_t i = 0; i < 60; ++i) {
    offered.push_back({.key = KeyOf(i), .why = TierOffer::kLeaves, .uses = 2, .place = i});
  }
  std::vector<TierSet::Members> wanted(offered.size());
  set.Wanted(offered, kValueBytes, 2, absl::MakeSpan(wanted));
  EXPECT_EQ(wanted[24], 0b111);
  EXPECT_EQ(wanted[25], 0b010);
  EXPECT_EQ(wanted[59], 0b010);
}

TEST_F(TierSetTest, OfWhatLeavesTooEarlyNobodyIsMissing) {
  TierSet set({{Faulty(), {.when = TierWrite::kReuse, .uses = 3}}});
  EXPECT_FALSE(set.keeps(2));
  EXPECT_TRUE(set.keeps(3));
  EXPECT_TRUE(set.keeps(1000));
  EXPECT_TRUE(TierSet({{Faulty(), {}}}).keeps(0));
}

TEST_F(TierSetTest, AnAnswerSaysWhoHasTheValue) {
  const auto full = Faulty(), gone = Faulty(), whole = Faulty();
  full->all_fail = gone->all_fail = true;
  full->stores_fail = TierResult::kFull;
  gone->stores_fail = TierResult::kFailed;
  TierSet set({{full, {}}, {gone, {}}, {whole, {}}});
  for (const TierSet::Stored& stored : StoreIn(&set, {1, 2}, 0b111)) {
    EXPECT_EQ(stored.done, 0b100);
    EXPECT_EQ(stored.refused, 0b001);
    EXPECT_EQ(stored.failed, 0b010);
  }
  EXPECT_EQ(StoreIn(&set, {3}, 0b010)[0].done, 0);
}

TEST_F(TierSetTest, WhatOneLosesTheOtherHas) {
  const auto first = Faulty(), second = Faulty();
  TierSet set({{first, {}}, {second, {}}});
  StoreIn(&set, Numbers(10), 0b11);
  for (const TierResult fault :
       {TierResult::kMiss, TierResult::kCorrupt, TierResult::kFailed, TierResult::kFull}) {
    first->loads_fail = fault;
    EXPECT_THAT(LoadFrom(&set, Numbers(10)), Each(TierResult::kDone));
  }
  EXPECT_EQ(second->usage().counters.loaded, 20u) << "half of each batch";
  second->loads_fail = TierResult::kFailed;
  first->all_fail = second->all_fail = true;
  EXPECT_THAT(LoadFrom(&set, {1}), ElementsAre(TierResult::kFailed));
}

TEST_F(TierSetTest, WhatIsLateIsNotAskedForElsewhere) {
  const auto first = Faulty(), second = Faulty();
  TierSet set({{first, {}}, {second, {}}});
  StoreIn(&set, {1}, 0b11);
  EXPECT_THAT(LoadFrom(&set, {1}, Tier::Deadline::min()), ElementsAre(TierResult::kLate));
  EXPECT_EQ(second->usage().counters.late, 0u);
}

TEST_F(TierSetTest, WhoSurelyHasItIsAskedBeforeWhoMay) {
  const auto shared = Faulty(), own = Faulty();
  TierSet set({{shared, {}}, {own, {}}});
  StoreIn(&set, {1}, 0b11);
  StoreIn(&set, {2}, 0b01);
  shared->knows_nothing = true;
  const std::vector<TierKey> keys = KeysOf({1, 2, 3});
  std::vector<TierSet::Found> found(3);
  set.Find(keys, absl::MakeSpan(found));
  EXPECT_EQ(found[0].presence, TierPresence::kYes);
  EXPECT_EQ(found[0].member, 1);
  EXPECT_EQ(found[1].presence, TierPresence::kUnknown);
  EXPECT_EQ(found[1].member, 0);
  EXPECT_EQ(found[2].presence, TierPresence::kUnknown);
  EXPECT_THAT(LoadFrom(&set, {1, 2, 3}),
              ElementsAre(TierResult::kDone, TierResult::kDone, TierResult::kMiss));
}

TEST_F(TierSetTest, TheFasterOneIsAsked) {
  const auto slow = std::make_shared<SlowTier>(std::chrono::milliseconds(2), std::chrono::nanoseconds(0));
  const auto fast = Faulty();
  TierSet set({{slow, {}}, {fast, {}}});
  StoreIn(&set, Numbers(100), 0b11);
  EXPECT_FALSE(set.Forecast({kValueBytes, 0}, false).has_value());
  // Both are tried until enough is known of them.
  for (uint32_t i = 0; i < 3 * LoadCost::kLeastSamples; ++i) LoadFrom(&set, {i});
  EXPECT_GE(set.Forecast({kValueBytes, 0}, false).value_or(0), .002);
  EXPECT_LT(set.Forecast({0, kValueBytes}, false).value_or(1), .002);
  const int before = slow->loads;
  LoadFrom(&set, Numbers(50));
  EXPECT_EQ(slow->loads, before);
}

TEST_F(TierSetTest, AForecastGrowsWithWhatIsAskedFor) {
  const auto slow = std::make_shared<SlowTier>(std::chrono::microseconds(500), std::chrono::nanoseconds(100));
  TierSet set({{slow, {}}});
  StoreIn(&set, Numbers(20), 1);
  for (int round = 0; round < 4; ++round) {
    LoadFrom(&set, Numbers(20));
    LoadFrom(&set, {1});
  }
  // A value takes a millisecond here, more on a machine that does other things.
  const double one = set.Forecast({kValueBytes}, true).value_or(0);
  const double hundred = set.Forecast({100 * kValueBytes}, true).value_or(0);
  EXPECT_GT(one, .0003);
  EXPECT_GT(hundred, 20 * one);
  EXPECT_GT(set.measured(0).bytes_per_second, 0);
}

}  // namespace
}  // namespace kvpool
