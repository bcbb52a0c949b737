// The threads that run a host device's kernels.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_WORKERS_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_WORKERS_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "proto/support/mutex.h"

namespace kvpool {

// A fixed set of threads. The caller's own is one of them: HostWorkers(1) starts none. Thread-safe: one Run
// is under way at a time, others wait.
class HostWorkers {
 public:
  // REQUIRES: threads is 1 to 1024.
  explicit HostWorkers(uint32_t threads);
  ~HostWorkers();
  HostWorkers(const HostWorkers&) = delete;
  HostWorkers& operator=(const HostWorkers&) = delete;

  uint32_t count() const { return static_cast<uint32_t>(threads_.size()) + 1; }
  // Calls work(item, worker) for every item in [0, items), on any thread and in any order, and returns when
  // all are done. `worker` is below count(), and calls with the same worker don't overlap. REQUIRES: `work`
  // does not call Run.
  using Work = absl::FunctionRef<void(uint32_t item, uint32_t worker)>;
  void Run(uint32_t items, Work work);

 private:
  void Loop(uint32_t worker);
  // Takes items until none are left.
  void Take(const Work& work, uint32_t items, uint32_t worker);

  Mutex run_mu_;  // the caller of Run holds it
  Mutex mu_ ABSL_ACQUIRED_AFTER(run_mu_);
  CondVar changed_;
  const Work* work_ ABSL_GUARDED_BY(mu_) = nullptr;
  uint32_t items_ ABSL_GUARDED_BY(mu_) = 0;
  // The number of calls of Run so far; a thread takes part in each once.
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 0;
  // Threads that are taking items, without the caller of Run.
  uint32_t busy_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<uint32_t> next_ = 0;  // the next item of this round
  std::vector<std::thread> threads_;
};

}  // namespace kvpool

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_WORKERS_H_
