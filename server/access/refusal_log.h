// Audit lines of what was refused, with who asked for what, and why. Thread-safe.
//
// Whoever is refused may come back at once, again and again: of each reason, a status code, only kMostLines are logged in
// kWindow. The next line after it says how many were left out.
#ifndef KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_
#define KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/access/peer.h"

namespace kvpool {

class RefusalLog {
 public:
  static constexpr uint32_t kMostLines = 5;
  static constexpr auto kWindow = std::chrono::seconds(10);

  // `event` is that of the lines, such as "opening refused".
  explicit RefusalLog(std::string event) : event_(std::move(event)) {}
  void Add(const Peer& peer, std::string_view method, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Reason {
    std::chrono::steady_clock::time_point window_begin;
    uint32_t lines = 0;
    uint64_t left_out = 0;
  };

  const std::string event_;
  Mutex mu_;
  std::array<Reason, 17> reasons_ ABSL_GUARDED_BY(mu_);  // Indexed by status code.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_REFUSAL_LOG_H_
