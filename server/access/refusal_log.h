// Audit lines of what was refused, with who asked for what, and why. Thread-safe.
//
// Whoever is refused may come back at once, again and again: for each user and each reason, a status code, only kMostLines are
// logged in kWindow. The next line after it says how many were left out. Users beyond the first kMostUsers share, as do peers
// on the network.
#ifndef KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_
#define KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/access/peer.h"
#include "server/base/clock.h"

namespace kvpool {

class RefusalLog {
 public:
  static constexpr uint32_t kMostLines = 5;
  static constexpr uint64_t kWindowMs = 10000;
  static constexpr size_t kMostUsers = 64;

  // `event` is that of the lines, such as "opening refused".
  explicit RefusalLog(std::string event, const Clock* clock = MonotonicClock())
      : event_(std::move(event)), clock_(clock) {}
  void Add(const Peer& peer, std::string_view method, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Reason {
    uint64_t window_begin_ms = 0;
    uint32_t lines = 0;
    uint64_t left_out = 0;
  };
  using Reasons = std::array<Reason, 17>;  // Indexed by status code.

  Reasons& ReasonsOf(const Peer& peer, uint64_t now_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those who have been quiet for a window make room. What was left out of theirs is said with the next line of `others_`.
  void ForgetQuiet(uint64_t now_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string event_;
  const Clock* const clock_;
  Mutex mu_;
  std::map<uint32_t, Reasons> users_ ABSL_GUARDED_BY(mu_);  // Keyed by uid.
  Reasons others_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_
