// Runs one device's parts of operations, one after the other, on a thread of its own.
//
// An operation has a part for each rank, on the runner of the rank's device. The runner that finishes the
// last part answers the operation, or sends Compact's second round of parts; runners never wait for each
// other. Until it is over, the operation has a place on each of its runners, and a runner that is asked to
// stop goes on until no place is taken, so that every part that is sent is also run or refused. Places are
// bounded: an operation that finds none is refused with the numbers.
//
// Tenants take turns at a device, part by part, and one tenant has at most three quarters of the places.
//
// Workspace, staged signals and the feature cache (server/scoring/feature_cache.h) belong to the thread and
// are used again, so that in the steady state an operation allocates nothing on the device. A sticky error of
// the device ends the process: a corrupted pool is never served.
#ifndef KVPOOL_SERVER_SCORING_DEVICE_RUNNER_H_
#define KVPOOL_SERVER_SCORING_DEVICE_RUNNER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cuda/kv_compute.h"
#include "proto/support/mutex.h"
#include "server/base/fair_queue.h"
#include "server/base/histogram.h"
#include "server/scoring/device_operation.h"
#include "server/scoring/feature_cache.h"
#include "server/scoring/operations_snapshot.h"
#include "server/scoring/quality_guard.h"
#include "server/scoring/score_work.h"

namespace kvpool {

class DeviceRunner {
 public:
  struct Options {
    std::string device;  // Its id, for errors.
    uint32_t queue_limit = 256;
    size_t feature_cache_bytes = 0;
    // The limit of one operation: workspace, signals, and features that are not cached.
    size_t workspace_bytes = 0;
    absl::Duration time_limit = absl::InfiniteDuration();
    QualityGuard* guard = nullptr;  // Outlives the runner; null: nothing is measured.
    bool thread = true;             // False: it has none, and its owner calls RunNext.
  };
  using Operation = std::shared_ptr<DeviceOperation>;
  // `over` is called on the thread of a runner, under no lock, once for each operation that Submit took.
  DeviceRunner(const Options& options, std::unique_ptr<KvCompute> compute,
               std::function<void(const Operation&)> over);
  // Stops, and returns when no operation has a place here. REQUIRES: the runners that share operations with
  // it were all told to Stop; another would run what is queued there, and this one would wait for it. Without a
  // thread nothing is queued.
  ~DeviceRunner();

  // The part that runs is the last: queued and new ones are refused, UNAVAILABLE. Returns at once.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);
  // Stops, and waits for the part that runs.
  void End();

  // For planning: const, any thread.
  const KvCompute& compute() const { return *compute_; }
  const Options& options() const { return options_; }
  // Runs the part that is next, or refuses it; false: there was none. For the runner's thread, or for its owner if
  // it has none. `compute` may call this of another runner, and whatever else is under no lock.
  bool RunNext() ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the operation to the runners of all its ranks, or to none. RESOURCE_EXHAUSTED: one of them has no
  // place. UNAVAILABLE: one of them stops.
  static absl::Status Submit(const Operation& operation);
  // Counts an operation that was refused because its session had as many as it may have.
  void CountSessionRefusal() ABSL_LOCKS_EXCLUDED(mu_);

  DeviceOperationsSnapshot Snapshot() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Part {
    Operation operation;
    uint32_t rank = 0;
  };
  absl::Status Enter(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  void Push(Part part, bool in_front) ABSL_LOCKS_EXCLUDED(mu_);
  // A part for each rank.
  static void SendParts(const Operation& operation, bool in_front);
  // The operation's next step, once all parts that were sent are done.
  void Advance(const Operation& operation);

  void Loop();
  absl::Status RunPart(const Part& part, bool stopping);
  // What is done once the operation is answered.
  absl::Status RunSecondPart(DeviceOperation* operation, uint32_t rank);
  void Count(const DeviceOperation& operation) ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  const std::unique_ptr<KvCompute> compute_;
  const std::function<void(const Operation&)> over_;
  ScoreWork work_;  // Belongs to thread_.

  Mutex mu_;
  CondVar changed_;
  FairQueue<Part> queue_ ABSL_GUARDED_BY(mu_);
  uint32_t places_ ABSL_GUARDED_BY(mu_) = 0;                        // Operations that have a place.
  std::map<std::string, uint32_t> places_of_ ABSL_GUARDED_BY(mu_);  // The same of each tenant that has some.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::map<std::pair<std::string, std::string>, Histogram> seconds_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, std::string>, uint64_t> operations_ ABSL_GUARDED_BY(mu_);
  DeviceCounters counters_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // Last: it uses all the others.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_DEVICE_RUNNER_H_
