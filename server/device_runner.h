// Runs the device operations of one device, one after the other, on a thread of its own.
//
// The queue is bounded: an operation that finds it full is refused with the numbers. Workspace, staged signals and
// features kept (server/feature_cache.h) belong to the thread and are used again, so that in the steady state an
// operation allocates nothing on the device. An error of the device that is sticky ends the process: a corrupted pool is
// never served.
#ifndef KVPOOL_SERVER_DEVICE_RUNNER_H_
#define KVPOOL_SERVER_DEVICE_RUNNER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cuda/kv_compute.h"
#include "proto/support/mutex.h"
#include "server/device_operation.h"
#include "server/feature_cache.h"
#include "server/histogram.h"
#include "server/score_work.h"
#include "server/snapshot.h"

namespace kvpool {

class DeviceRunner {
 public:
  struct Options {
    std::string device;  // For errors.
    uint32_t queue_limit = 256;
    size_t feature_cache_bytes = 0;
    size_t workspace_bytes = 0;  // Most that one operation may use: workspace, signals, features not kept.
  };
  using Operation = std::shared_ptr<DeviceOperation>;
  // `over` is called on the runner's thread, under none of its locks, once for each operation that Submit took.
  DeviceRunner(const Options& options, std::unique_ptr<KvCompute> compute,
               std::function<void(const Operation&)> over);
  // Ends what runs; what is still queued is over, UNAVAILABLE.
  ~DeviceRunner();

  // For planning: const, any thread.
  const KvCompute& compute() const { return *compute_; }
  const Options& options() const { return options_; }
  // RESOURCE_EXHAUSTED: the queue is full.
  absl::Status Submit(Operation operation) ABSL_LOCKS_EXCLUDED(mu_);

  DeviceOperationsSnapshot Snapshot() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop();
  void RunOne(const Operation& operation);
  void Count(const DeviceOperation& operation, double seconds) ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  const std::unique_ptr<KvCompute> compute_;
  const std::function<void(const Operation&)> over_;
  ScoreWork work_;  // The thread's.

  Mutex mu_;
  CondVar changed_;
  std::deque<Operation> queue_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::map<std::pair<std::string, std::string>, Histogram> seconds_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, std::string>, uint64_t> operations_ ABSL_GUARDED_BY(mu_);
  uint64_t pruned_blocks_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t moved_blocks_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;  // Last: it uses all the others.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DEVICE_RUNNER_H_
