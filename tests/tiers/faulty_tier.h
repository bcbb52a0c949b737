// A tier in front of another one that misbehaves as stores do: answers come late, a batch is answered in part, a value is found
// damaged, the store is gone, or full.
#ifndef KVPOOL_TESTS_TIERS_FAULTY_TIER_H_
#define KVPOOL_TESTS_TIERS_FAULTY_TIER_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/tiers/tier.h"

namespace kvpool {

class FaultyTier final : public Tier {
 public:
  explicit FaultyTier(std::unique_ptr<Tier> tier) : tier_(std::move(tier)) {}
  ~FaultyTier() override { Answer(); }

  // A disk that hangs: answers wait until Answer is called.
  std::atomic<bool> hangs{false};
  // Loads are answered so much later, one after another.
  std::atomic<std::chrono::milliseconds> delay{std::chrono::milliseconds(0)};
  // Every second value of a batch is answered so, or every one; kDone: none is.
  std::atomic<TierResult> loads_fail{TierResult::kDone}, stores_fail{TierResult::kDone};
  std::atomic<bool> all_fail{false};
  // How many answers are held back.
  size_t held() {
    const std::lock_guard<std::mutex> lock(mu_);
    return held_.size();
  }
  void Answer() {
    hangs = false;
    std::vector<std::function<void()>> held;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      held.swap(held_);
    }
    for (const auto& answer : held) answer();
  }

  std::string_view name() const override { return tier_->name(); }
  bool lasting() const override { return tier_->lasting(); }
  uint64_t most_value_bytes() const override { return tier_->most_value_bytes(); }
  std::string path() const override { return tier_->path(); }
  std::string describe() const override { return tier_->describe(); }
  // A store that others share: the tier knows of nothing what it has.
  std::atomic<bool> knows_nothing{false};
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override {
    if (knows_nothing) return std::fill(found.begin(), found.end(), TierPresence::kUnknown);
    tier_->Exists(keys, found);
  }
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override {
    std::vector<TierLoad> whole;
    const std::vector<size_t> passed = Split(std::move(loads), loads_fail, &whole, done);
    tier_->Load(std::move(whole), deadline, Behind(passed, std::move(done)));
  }
  void Store(std::vector<TierStore> stores, Done done) override {
    std::vector<TierStore> whole;
    const std::vector<size_t> passed = Split(std::move(stores), stores_fail, &whole, done);
    tier_->Store(std::move(whole), Behind(passed, std::move(done)));
  }
  void Drain() override {
    tier_->Drain();
    Answer();
  }
  // What engines do while values are erased.
  std::function<void()> on_erase;
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override {
    if (on_erase) on_erase();
    return tier_->Erase(owner, keys, stop);
  }
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override { return tier_->CountOf(owner); }
  TierUsage usage() override { return tier_->usage(); }

 private:
  template <typename Item>
  std::vector<size_t> Split(std::vector<Item> items, TierResult fault, std::vector<Item>* whole,
                            const Done& done) {
    std::vector<size_t> passed;
    for (size_t i = 0; i < items.size(); ++i) {
      if (fault != TierResult::kDone && (all_fail || i % 2 == 1)) {
        Say([done, i, fault] { done(i, fault); });
        continue;
      }
      passed.push_back(i);
      whole->push_back(std::move(items[i]));
    }
    return passed;
  }
  Done Behind(std::vector<size_t> passed, Done done) {
    return [this, passed = std::move(passed), done = std::move(done)](size_t index, TierResult result) {
      std::this_thread::sleep_for(delay.load());
      Say([done, at = passed[index], result] { done(at, result); });
    };
  }
  void Say(std::function<void()> answer) {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (hangs) return held_.push_back(std::move(answer));
    }
    answer();
  }

  std::mutex mu_;
  std::vector<std::function<void()>> held_;
  const std::unique_ptr<Tier> tier_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_FAULTY_TIER_H_
