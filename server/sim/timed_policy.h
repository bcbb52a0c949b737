// Measures the time that a policy takes.
#ifndef KVPOOL_SERVER_SIM_TIMED_POLICY_H_
#define KVPOOL_SERVER_SIM_TIMED_POLICY_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "server/replacement/policy.h"

namespace kvpool::sim {

// Reading the clock costs as much as most of the calls, so one call in kOneIn is measured, and the least time
// that a reading took is subtracted.
class TimedPolicy final : public ReplacementPolicy {
 public:
  TimedPolicy(std::unique_ptr<ReplacementPolicy> policy, double* total_ns)
      : policy_(std::move(policy)), total_ns_(*total_ns) {}

  std::string_view name() const override { return policy_->name(); }
  void OnInsert(BlockId block, const Content& content) override {
    Timed([&] { policy_->OnInsert(block, content); });
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    Timed([&] { policy_->OnHit(block, now_ms); });
  }
  void OnHint(BlockId block, const UseHint& hint) override {
    Timed([&] { policy_->OnHint(block, hint); });
  }
  void OnScore(BlockId block, float score) override {
    Timed([&] { policy_->OnScore(block, score); });
  }
  void OnUsed(BlockId block, uint64_t now_ms) override {
    Timed([&] { policy_->OnUsed(block, now_ms); });
  }
  void OnOffer(BlockId block) override {
    Timed([&] { policy_->OnOffer(block); });
  }
  void OnWithdraw(BlockId block) override {
    Timed([&] { policy_->OnWithdraw(block); });
  }
  void OnEvict(BlockId block) override {
    Timed([&] { policy_->OnEvict(block); });
  }
  BlockId Victim(uint64_t now_ms) override {
    BlockId victim = kNullBlock;
    Timed([&] { victim = policy_->Victim(now_ms); });
    return victim;
  }
  size_t Upcoming(absl::Span<BlockId> blocks) const override { return policy_->Upcoming(blocks); }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_->Prefetch(block, hash); }
  Rank Standing(BlockId block) const override { return policy_->Standing(block); }
  uint32_t offered() const override { return policy_->offered(); }
  double bytes_per_block() const override { return policy_->bytes_per_block(); }
  // The engine that asks for decisions measures them.
  AsyncPolicy* async() override { return policy_->async(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kOneIn = 17;  // odd, as calls come in patterns of even lengths

  static double Nanoseconds(Clock::duration d) { return std::chrono::duration<double, std::nano>(d).count(); }
  template <typename Call>
  void Timed(Call call) {
    if (++calls_ % kOneIn != 0) return call();
    const Clock::time_point begin = Clock::now();
    call();
    const double ns = Nanoseconds(Clock::now() - begin) - look_ns_;
    // Calls in which the thread was interrupted are left out, as each would count kOneIn times.
    if (ns > 0 && ns < kInterruptedNs) total_ns_ += ns * kOneIn;
  }
  static double LeastLook() {
    double least = 1e9;
    for (int i = 0; i < 100; ++i) {
      const Clock::time_point begin = Clock::now();
      least = std::min(least, Nanoseconds(Clock::now() - begin));
    }
    return least;
  }

  static constexpr double kInterruptedNs = 50e3;
  const double look_ns_ = LeastLook();
  const std::unique_ptr<ReplacementPolicy> policy_;
  double& total_ns_;
  uint64_t calls_ = 0;
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TIMED_POLICY_H_
