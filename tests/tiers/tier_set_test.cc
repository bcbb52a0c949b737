// Several tiers as one.
#include "server/tiers/tier_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/support/mutex.h"
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
  // Waits until a tier that is detaching is gone.
  static void Close(TierSet* set, uint64_t id) {
    while (set->OutOf(id).has_value()) {
      for (std::shared_ptr<AttachedTier>& tier : set->TakeIdle()) set->Close(std::move(tier));
      std::this_thread::yield();
    }
  }
  static std::vector<TierKey> KeysOf(const std::vector<uint32_t>& numbers) {
    std::vector<TierKey> keys;
    for (const uint32_t number : numbers) keys.push_back(KeyOf(number));
    return keys;
  }
  // Who has each.
  static std::vector<TierSet::Members> StoreIn(TierSet* set, const std::vector<uint32_t>& numbers,
                                               TierSet::Members to) {
    std::vector<TierStore> stores;
    for (const uint32_t number : numbers) stores.push_back({KeyOf(number), ValueOf(number)});
    std::vector<TierSet::Members> stored(numbers.size()), answered(numbers.size());
    set->Store(*set->view(), std::move(stores), std::vector<TierSet::Members>(numbers.size(), to),
               [&](size_t index, size_t slot, TierResult result) {
                 EXPECT_EQ(answered[index] & TierView::BitOf(slot), 0) << "it answers once";
                 answered[index] |= TierView::BitOf(slot);
                 if (result == TierResult::kDone) stored[index] |= TierView::BitOf(slot);
               });
    set->Drain();
    EXPECT_THAT(answered, Each(to));
    return stored;
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
    std::vector<TierView::Offered> offered;
    for (const uint32_t number : {1u, 2u})
      offered.push_back({.key = KeyOf(number), .why = offer, .uses = uses});
    std::vector<TierSet::Members> wanted(2);
    set.view()->Wanted(offered, kValueBytes, 1, absl::MakeSpan(wanted));
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
  EXPECT_EQ(set.view()->lasting(), 0) << "host memory is not";
}

// Half of what a tier holds, shared by all spaces, or the next round would write what this one pushed out.
TEST_F(TierSetTest, OfWhatLeavesEachIsGivenWhatItHasRoomFor) {
  const auto small = std::make_shared<HostTier>(100 * WholePages(kValueBytes));
  TierSet set({{small, {}}, {Faulty(), {}}, {small, {.when = TierWrite::kReuse}}});
  std::vector<TierView::Offered> offered;
  for (uint32_t i = 0; i < 60; ++i) {
    offered.push_back({.key = KeyOf(i), .why = TierOffer::kLeaves, .uses = 2, .place = i});
  }
  std::vector<TierSet::Members> wanted(offered.size());
  set.view()->Wanted(offered, kValueBytes, 2, absl::MakeSpan(wanted));
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
  EXPECT_THAT(StoreIn(&set, {1, 2}, 0b111), Each(0b100));
  EXPECT_THAT(StoreIn(&set, {3}, 0b010), ElementsAre(0));
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
  std::vector<TierView::Found> found(3);
  set.view()->Find(keys, absl::MakeSpan(found));
  EXPECT_EQ(found[0].presence, TierPresence::kYes);
  EXPECT_EQ(found[0].slot, 1);
  EXPECT_EQ(found[1].presence, TierPresence::kUnknown);
  EXPECT_EQ(found[1].slot, 0);
  EXPECT_EQ(found[2].presence, TierPresence::kUnknown);
  EXPECT_THAT(LoadFrom(&set, {1, 2, 3}),
              ElementsAre(TierResult::kDone, TierResult::kDone, TierResult::kMiss));
}

TEST_F(TierSetTest, TheFasterOneIsAsked) {
  const auto slow = std::make_shared<SlowTier>(std::chrono::milliseconds(2), std::chrono::nanoseconds(0));
  const auto fast = Faulty();
  TierSet set({{slow, {}}, {fast, {}}});
  StoreIn(&set, Numbers(100), 0b11);
  EXPECT_FALSE(set.view()->Forecast({kValueBytes, 0}, false).has_value());
  // Both are tried until enough is known of them.
  for (uint32_t i = 0; i < 3 * LoadCost::kLeastSamples; ++i) LoadFrom(&set, {i});
  EXPECT_GE(set.view()->Forecast({kValueBytes, 0}, false).value_or(0), .002);
  EXPECT_LT(set.view()->Forecast({0, kValueBytes}, false).value_or(1), .002);
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
  const double one = set.view()->Forecast({kValueBytes}, true).value_or(0);
  const double hundred = set.view()->Forecast({100 * kValueBytes}, true).value_or(0);
  EXPECT_GT(one, .0003);
  EXPECT_GT(hundred, 20 * one);
  EXPECT_GT(set.view()->at(0)->cost().measured().bytes_per_second, 0);
}

// ------------------------------------------------------------------------------------------ tiers that come and go

// Answers on a thread of its own, as stores do, and says when it is gone.
class ThreadTier final : public Tier {
 public:
  ThreadTier(std::string name, std::atomic<int>* alive) : name_(std::move(name)), alive_(*alive) {
    ++alive_;
    thread_ = std::thread([this] { Work(); });
  }
  // On its own thread it could not wait for itself.
  ~ThreadTier() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.SignalAll();
    }
    thread_.join();
    --alive_;
  }
  std::string_view name() const override { return name_; }
  uint64_t most_value_bytes() const override { return tier_.most_value_bytes(); }
  std::string path() const override { return ""; }
  std::string describe() const override { return ""; }
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override {
    tier_.Exists(keys, found);
  }
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override {
    Add([this, loads = std::move(loads), deadline, done = std::move(done)] {
      tier_.Load(loads, deadline, done);
    });
  }
  void Store(std::vector<TierStore> stores, Done done) override {
    Add([this, stores = std::move(stores), done = std::move(done)] { tier_.Store(stores, done); });
  }
  void Drain() override {
    MutexLock lock(&mu_);
    while (!tasks_.empty() || working_) changed_.Wait(&mu_);
  }
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop) override {
    return tier_.Erase(owner, keys, stop);
  }
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override { return tier_.CountOf(owner); }
  TierUsage usage() override { return tier_.usage(); }

 private:
  void Add(std::function<void()> task) {
    MutexLock lock(&mu_);
    tasks_.push_back(std::move(task));
    changed_.SignalAll();
  }
  void Work() {
    MutexLock lock(&mu_);
    while (true) {
      while (tasks_.empty() && !stopping_) changed_.Wait(&mu_);
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      working_ = true;
      mu_.Unlock();
      task();
      mu_.Lock();
      working_ = false;
      changed_.SignalAll();
    }
  }

  const std::string name_;
  std::atomic<int>& alive_;
  HostTier tier_{4 << 20};
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool working_ ABSL_GUARDED_BY(mu_) = false, stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

TEST_F(TierSetTest, WithoutAnyNothingIsFound) {
  TierSet set({});
  EXPECT_TRUE(set.empty());
  EXPECT_FALSE(set.takes(TierOffer::kLeaves));
  EXPECT_FALSE(set.keeps(TierRule::kMostUses));
  EXPECT_EQ(set.view()->writers(), 0);
  EXPECT_THAT(LoadFrom(&set, {1, 2}), Each(TierResult::kMiss));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 9), Each(0));
}

TEST_F(TierSetTest, OneThatComesIsUsed) {
  TierSet set({});
  const std::shared_ptr<const TierView> before = set.view();
  ASSERT_TRUE(set.Attach({Faulty(), {.when = TierWrite::kReuse, .uses = 5}, "host"}).ok());
  EXPECT_FALSE(set.empty());
  EXPECT_TRUE(set.takes_after(5));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 5), Each(0b1));
  EXPECT_THAT(StoreIn(&set, {1}, 0b1), ElementsAre(0b1));
  EXPECT_THAT(LoadFrom(&set, {1}), ElementsAre(TierResult::kDone));
  EXPECT_TRUE(before->entries().empty()) << "a view does not change";
}

TEST_F(TierSetTest, OneOfEachKindAndEightInAll) {
  TierSet set({{Faulty(), {}}});
  const absl::Status second = set.Attach({Faulty(), {}, ""}).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(std::string(second.message()), "tier host: one is attached; at most one of each kind");
  EXPECT_TRUE(set.CheckRoom("file").ok());
  const TierSet full(std::vector<TierMember>(TierSet::kMost, {Faulty(), {}, ""}));
  EXPECT_EQ(std::string(full.CheckRoom("file").message()),
            "tier file: there are 8 with those that are being detached; limit 8");
  EXPECT_EQ(std::string(set.Detach("file").status().message()), "tier is \"file\"; there are host");
  EXPECT_EQ(std::string(TierSet({}).Detach("x").status().message()), "tier is \"x\"; there is none");
}

TEST_F(TierSetTest, OneThatDrainsIsLoadedFromAndGivenNothing) {
  TierSet set({{Faulty(), {}}});
  StoreIn(&set, {1}, 0b1);
  ASSERT_TRUE(set.SetWrites("host", false).ok());
  EXPECT_FALSE(set.takes(TierOffer::kLeaves));
  EXPECT_FALSE(set.keeps(9));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 9), Each(0));
  EXPECT_EQ(set.view()->writers(), 0);
  EXPECT_THAT(LoadFrom(&set, {1}), ElementsAre(TierResult::kDone));
  ASSERT_TRUE(set.SetWrites("host", true).ok());
  EXPECT_TRUE(set.takes(TierOffer::kLeaves));
  EXPECT_THAT(Wanted(set, TierOffer::kEnds, 9), ElementsAre(0, 0b1));
}

TEST_F(TierSetTest, OneThatGoesAnswersWhatItWasAskedForAndNothingElse) {
  const auto first = Faulty(), second = Faulty();
  TierSet set({{first, {}}, {second, {}}});
  StoreIn(&set, {1}, 0b11);
  first->hangs = true;
  std::optional<TierResult> loaded, stored;
  set.Load({{KeyOf(1), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
           [&](size_t, TierResult result) { loaded = result; });
  set.Store(*set.view(), {{KeyOf(2), ValueOf(2)}}, {0b1},
            [&](size_t, size_t, TierResult result) { stored = result; });
  const uint64_t id = *set.Detach("host");
  EXPECT_EQ(set.OutOf(id)->loads, 1u);
  EXPECT_EQ(set.OutOf(id)->stores, 1u);
  EXPECT_TRUE(set.TakeIdle().empty());
  EXPECT_THAT(LoadFrom(&set, {1}), ElementsAre(TierResult::kDone)) << "of the other one";
  first->Answer();
  EXPECT_EQ(loaded, TierResult::kDone);
  EXPECT_EQ(stored, TierResult::kDone);
  EXPECT_EQ(set.TakeIdle().size(), 1u);
  EXPECT_TRUE(set.TakeIdle().empty()) << "once";
}

TEST_F(TierSetTest, ASlotIsNoOthersUntilNobodyUsesIt) {
  std::atomic<int> alive{0};
  TierSet set({});
  const auto slot_of = [&](const std::string& name) {
    return (*set.Attach({std::make_shared<ThreadTier>(name, &alive), {}, ""}))->slot();
  };
  ASSERT_EQ(slot_of("a"), 0u);
  std::shared_ptr<const TierView> view = set.view();
  const uint64_t id = *set.Detach("a");
  EXPECT_TRUE(set.TakeIdle().empty()) << "a view has it";
  EXPECT_EQ(slot_of("b"), 1u);
  EXPECT_EQ(slot_of("a"), 2u) << "another one of its name may come";
  EXPECT_EQ(*set.Detach("a") > id, true) << "that one is meant from then on";
  view = nullptr;
  std::vector<std::shared_ptr<AttachedTier>> idle = set.TakeIdle();
  ASSERT_EQ(idle.size(), 2u);
  EXPECT_THAT(set.closing(), ElementsAre("a", "a"));
  EXPECT_EQ(slot_of("c"), 3u) << "others have notes of the slots";
  for (std::shared_ptr<AttachedTier>& tier : idle) set.Close(std::move(tier));
  while (set.OutOf(id).has_value() || !set.closing().empty()) std::this_thread::yield();
  EXPECT_EQ(alive, 2) << "they were destroyed before";
  EXPECT_EQ(slot_of("a"), 0u);
}

// What one tier was tried for does not count for the one that has its slot after it.
TEST_F(TierSetTest, ALoadThatTriedTheOneBeforeTriesTheNextOne) {
  const auto before = Faulty(), hanging = Faulty();
  TierSet set({{before, {}}, {hanging, {}}});
  StoreIn(&set, {1}, 0b11);
  before->all_fail = hanging->all_fail = true;
  before->loads_fail = hanging->loads_fail = TierResult::kFailed;
  hanging->hangs = true;
  std::optional<TierResult> loaded;
  set.Load({{KeyOf(1), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
           [&](size_t, TierResult result) { loaded = result; });
  ASSERT_EQ(hanging->held(), 1u) << "the first one has failed";
  Close(&set, *set.Detach("host"));
  const auto next = std::make_shared<SlowTier>(std::chrono::microseconds(0), std::chrono::nanoseconds(0));
  ASSERT_EQ((*set.Attach({next, {}, ""}))->slot(), 0u);
  next->Store({{KeyOf(1), ValueOf(1)}}, [](size_t, TierResult) {});
  hanging->Answer();
  EXPECT_EQ(loaded, TierResult::kDone);
}

// Every answer comes, of the tier that was asked, while tiers come and go.
TEST_F(TierSetTest, TiersComeAndGoUnderLoad) {
  constexpr int kChanges = 60, kUsers = 3;
  std::atomic<int> alive{0};
  std::atomic<bool> done{false};
  std::atomic<uint64_t> wrong{0}, loaded{0};
  {
    TierSet set({});
    std::vector<std::thread> users;
    for (uint32_t user = 0; user < kUsers; ++user) {
      users.emplace_back([&, user] {
        for (uint32_t i = user; !done; ++i) {
          const uint32_t number = i % 64;
          const std::shared_ptr<const TierView> view = set.view();
          TierView::Offered offered{.key = KeyOf(number)};
          TierSet::Members to = 0;
          view->Wanted({&offered, 1}, kValueBytes, 1, {&to, 1});
          std::array<uint64_t, TierSet::kMost> ids{};
          for (const TierView::Entry& entry : view->entries()) ids[entry.tier->slot()] = entry.tier->id();
          set.Store(*view, {{KeyOf(number), ValueOf(number)}}, {to},
                    [&, ids](size_t, size_t slot, TierResult) {
                      // It is in its slot until this returns.
                      const std::vector<TierSet::Listed> listed = set.list();
                      wrong += std::none_of(listed.begin(), listed.end(), [&](const TierSet::Listed& there) {
                        return there.tier->slot() == slot && there.tier->id() == ids[slot];
                      });
                    });
          const std::shared_ptr<TierBuffer> buffer = BufferStock(0).Take(kValueBytes);
          std::promise<TierResult> answer;
          set.Load({{KeyOf(number), buffer}}, Tier::Deadline::max(),
                   [&](size_t, TierResult result) { answer.set_value(result); });
          const TierResult result = answer.get_future().get();
          const auto right = ValueOf(number);
          loaded += result == TierResult::kDone;
          wrong += result == TierResult::kDone && std::string_view(buffer->data(), kValueBytes) !=
                                                      std::string_view(right->data(), kValueBytes);
        }
      });
    }
    for (int change = 0; change < kChanges; ++change) {
      const std::string name = change % 2 == 0 ? "a" : "b";
      ASSERT_TRUE(set.Attach({std::make_shared<ThreadTier>(name, &alive), {}, ""}).ok());
      for (const uint64_t before = loaded; loaded < before + 8;) std::this_thread::yield();
      if (change == 0) continue;
      const std::string goes = change % 2 == 0 ? "b" : "a";
      ASSERT_TRUE(set.SetWrites(goes, change % 3 == 0).ok());
      Close(&set, *set.Detach(goes));
      EXPECT_EQ(alive, 1);
    }
    done = true;
    for (std::thread& user : users) user.join();
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(alive, 0);
}

}  // namespace
}  // namespace kvpool
