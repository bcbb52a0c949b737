// Threads for calls that may take long: openings and operator calls. The RPC queues' threads run verbs, which
// so wait neither for a slab that is made nor for a policy that is changed.
//
// Peers decide how many such calls there are, so that threads, calls that wait for one, and the bytes of those
// calls are bounded. A call beyond the bounds is refused.
#ifndef KVPOOL_SERVER_RPC_CALL_WORKERS_H_
#define KVPOOL_SERVER_RPC_CALL_WORKERS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "proto/support/mutex.h"

namespace kvpool {

class CallWorkers {
 public:
  struct Options {
    std::string calls;  // What they run, in the words of a refusal.
    int threads = 1;
    size_t most_waiting = 0;
    size_t most_waiting_bytes = 0;
  };
  explicit CallWorkers(Options options);
  // Calls that have begun are carried through, the others are dropped.
  ~CallWorkers();
  CallWorkers(const CallWorkers&) = delete;
  CallWorkers& operator=(const CallWorkers&) = delete;

  // Runs `work`, whose request has so many bytes, on one of the threads. RESOURCE_EXHAUSTED: too many wait, and
  // it will not run.
  absl::Status Start(size_t bytes, std::function<void()> work);

 private:
  struct Waiting {
    size_t bytes = 0;
    std::function<void()> work;
  };
  void Run();

  const Options options_;
  Mutex mu_;
  CondVar wanted_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mu_);
  size_t waiting_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> threads_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_CALL_WORKERS_H_
