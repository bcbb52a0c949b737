// What the threads of a session tell each other besides the command ring and the magazine.
#ifndef KVPOOL_CLIENT_SESSION_SESSION_STATE_H_
#define KVPOOL_CLIENT_SESSION_SESSION_STATE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <vector>

#include "absl/status/status.h"
#include "client/session/answer_state.h"
#include "client/session/prefill_reports.h"
#include "client/session/refusals.h"
#include "proto/support/mutex.h"

namespace kvpool {

// Blocks from `first` on, up to `end`, whose memory is mapped.
struct MappedRange {
  uint32_t first = 0, end = 0;
};

struct SessionState {
  // Ends the session. The first reason stays.
  void End(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mu) {
    {
      MutexLock lock(&mu);
      if (!end_reason.ok()) return;
      end_reason = reason;
    }
    open.store(false, std::memory_order_seq_cst);
    signal.Notify();
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu) {
    if (closed.load(std::memory_order_acquire)) {
      return absl::FailedPreconditionError("the session was closed");
    }
    if (open.load(std::memory_order_acquire)) return absl::OkStatus();
    MutexLock lock(&mu);
    return end_reason;
  }

  // In any order, and none touches another but at its ends.
  void SetMapped(std::vector<MappedRange> ranges) ABSL_LOCKS_EXCLUDED(mu) {
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    mapped_blocks.store(ranges.empty() ? 0 : ranges.back().end, std::memory_order_seq_cst);
    MutexLock lock(&mu);
    mapped.clear();
    for (const MappedRange& range : ranges) {
      if (!mapped.empty() && mapped.back().end == range.first) {
        mapped.back().end = range.end;
      } else {
        mapped.push_back(range);
      }
    }
  }
  std::vector<MappedRange> mapped_ranges() const ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(&mu);
    return mapped;
  }
  bool is_mapped(uint32_t block) const ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(&mu);
    const auto after = std::upper_bound(mapped.begin(), mapped.end(), block,
                                        [](uint32_t b, const MappedRange& range) { return b < range.first; });
    return after != mapped.begin() && block < std::prev(after)->end;
  }

  AnswerSignal signal;  // Notified of each change below that somebody may wait for.
  std::atomic<bool> open{true};
  // The daemon was asked to close it, and frees everything when it hears of it. Cleared if it refuses.
  std::atomic<bool> closing{false};
  std::atomic<bool> closed{false};  // The engine itself closed it.
  std::atomic<bool> away{false};    // The daemon is gone, and its successor may take the session over.
  mutable Mutex mu;
  absl::Status end_reason ABSL_GUARDED_BY(mu);
  std::vector<MappedRange> mapped ABSL_GUARDED_BY(mu);  // They are sorted; none touches the next.

  // Engine -> stream thread.
  std::atomic<uint64_t> completed_step{0};  // This member is done with it.
  // Keys asked for and not answered: each may use up one block of the credit.
  std::atomic<uint64_t> match_keys_pending{0};
  PrefillReports prefills;

  // Stream thread -> engine.
  std::atomic<uint64_t> passed_step{0};
  std::atomic<uint64_t> credit{0};  // Blocks that the unused guarantee promises, as last heard.
  std::atomic<uint64_t> sink{0};    // A packed ref.
  std::atomic<int> shortfall{0};    // v1::Shortfall of the last refill.
  std::atomic<uint64_t> refills_answered{0};
  std::atomic<bool> pressure{false};
  std::atomic<bool> draining{false};

  // Attach thread -> engine. They go down, too, the last three also by the engine's thread: see GiveBack.
  std::atomic<uint32_t> capacity_blocks{0};
  std::atomic<uint32_t> mapped_slabs{0};
  std::atomic<uint32_t> mapped_blocks{0};  // Blocks that are mapped are below this one.
  // Until when the first of the next counts; Time::max(): nobody says.
  using Time = std::chrono::steady_clock::time_point;
  std::atomic<Time> asked_back_until{Time::max()};
  std::atomic<uint32_t> slabs_asked_back{0};

  RefusalRecord refusals;

  // Counters; see SessionCounters.
  std::atomic<uint64_t> batches{0}, operations{0}, blocks{0}, leased{0}, refused{0}, reconnects{0};
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_SESSION_STATE_H_
