// What the threads of a session tell each other besides the command ring and the magazine.
#ifndef KVPOOL_CLIENT_SESSION_SESSION_STATE_H_
#define KVPOOL_CLIENT_SESSION_SESSION_STATE_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "client/session/answer_state.h"
#include "client/session/prefill_reports.h"
#include "client/session/refusals.h"
#include "proto/support/mutex.h"

namespace kvpool {

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

  AnswerSignal signal;  // Notified of each change below that somebody may wait for.
  std::atomic<bool> open{true};
  // The daemon was asked to close it, and frees everything when it hears of it. Cleared if it refuses.
  std::atomic<bool> closing{false};
  std::atomic<bool> closed{false};  // The engine itself closed it.
  std::atomic<bool> away{false};    // The daemon is gone, and its successor may take the session over.
  mutable Mutex mu;
  absl::Status end_reason ABSL_GUARDED_BY(mu);

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
  std::atomic<uint32_t> mapped_blocks{0};  // Blocks in mapped slabs, the null block included.
  std::atomic<uint32_t> slabs_asked_back{0};

  RefusalRecord refusals;

  // Counters; see SessionCounters.
  std::atomic<uint64_t> batches{0}, operations{0}, blocks{0}, leased{0}, refused{0}, reconnects{0};
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_SESSION_STATE_H_
