// How long RPCs took, and how they failed. Each queue's thread counts in objects of its own, without a lock;
// a scrape adds them up.
#ifndef KVPOOL_SERVER_RPC_RPC_STATS_H_
#define KVPOOL_SERVER_RPC_RPC_STATS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/daemon/daemon.h"

namespace kvpool {

inline constexpr size_t kRpcBuckets = std::size(kCallBounds) + 1;
using CodeCounts = std::array<std::atomic<uint64_t>, 17>;  // Indexed by status code.

// One method on one thread. That thread writes, any thread reads.
class MethodStats {
 public:
  void Record(uint64_t nanoseconds, absl::StatusCode code);
  void CountError(absl::StatusCode code);

 private:
  friend class RpcStats;
  std::array<std::atomic<uint64_t>, kRpcBuckets> buckets_{};
  std::atomic<uint64_t> sum_ns_{0};
  CodeCounts errors_{};
};

// Why a connection to the Unix socket is closed before anything serves it.
enum class ConnectionRefusal : uint8_t {
  kOpenFiles,       // The daemon has no descriptor for it.
  kConnections,     // There are too many, in all or of its user.
  kCredentials,     // The kernel does not say who connected.
  kProtocol,        // It speaks neither HTTP/2 nor Step frames.
  kPrefaceTimeout,  // It says nothing.
  kDisplaced,       // It says nothing, and others came.
};
inline constexpr size_t kConnectionRefusals = 6;

class RpcStats {
 public:
  // A shard of `method` that only the caller's thread may write to. It lives as long as this object.
  MethodStats* Add(const std::string& method);

  // Any thread may.
  void CountRefusedOpening(absl::StatusCode code);
  void CountRefusedConnection(ConnectionRefusal why) {
    refused_connections_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }
  void CountPaced() { paced_.fetch_add(1, std::memory_order_relaxed); }

  // Name of a status code -> count, of codes that occurred.
  using Codes = std::map<std::string, uint64_t>;
  struct Method {
    HistogramSnapshot seconds;
    // Those that blame the daemon, or its limits, are there from the start, since Prometheus sees no increase from
    // no series to the first count.
    Codes errors;
  };
  struct Totals {
    std::map<std::string, Method> methods;
    Codes refused_openings;
    std::map<std::string, uint64_t> refused_connections;  // Each reason is there from the start.
    uint64_t paced =
        0;  // Batches that waited, and unary verbs that were refused, for their rule's verbs-a-second.
  };
  Totals Snapshot() const;

 private:
  mutable Mutex mu_;
  std::deque<std::pair<std::string, MethodStats>> shards_ ABSL_GUARDED_BY(mu_);
  CodeCounts refused_openings_{};
  std::array<std::atomic<uint64_t>, kConnectionRefusals> refused_connections_{};
  std::atomic<uint64_t> paced_{0};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_STATS_H_
