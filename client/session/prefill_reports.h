// Prefills that an engine has reported and that the daemon has not been told of.
#ifndef KVPOOL_CLIENT_SESSION_PREFILL_REPORTS_H_
#define KVPOOL_CLIENT_SESSION_PREFILL_REPORTS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "client/session/spin_lock.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/limits.h"

namespace kvpool {

// Thread-safe. Of more than fit into a batch the newest are kept.
class PrefillReports {
 public:
  void Add(uint64_t tokens, uint64_t tokens_before, uint64_t microseconds) {
    SpinLockHolder lock(&lock_);
    reports_[next_++ % kMaxPrefillSamples] = {tokens, tokens_before, microseconds};
    any_.store(true, std::memory_order_relaxed);
  }
  // Moves them into a batch.
  void Take(v1::StepRequest* request) {
    if (!any_.load(std::memory_order_relaxed)) return;
    SpinLockHolder lock(&lock_);
    for (size_t i = next_ < kMaxPrefillSamples ? 0 : next_ - kMaxPrefillSamples; i < next_; ++i) {
      const Report& report = reports_[i % kMaxPrefillSamples];
      v1::PrefillSample& sample = *request->add_prefills();
      sample.set_tokens(report.tokens);
      sample.set_tokens_before(report.tokens_before);
      sample.set_microseconds(report.microseconds);
    }
    next_ = 0;
    any_.store(false, std::memory_order_relaxed);
  }

 private:
  struct Report {
    uint64_t tokens, tokens_before, microseconds;
  };
  SpinLock lock_;
  std::array<Report, kMaxPrefillSamples> reports_ ABSL_GUARDED_BY(lock_);
  size_t next_ ABSL_GUARDED_BY(lock_) = 0;
  std::atomic<bool> any_{false};
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_PREFILL_REPORTS_H_
