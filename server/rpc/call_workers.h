// Threads for calls that may take long: openings and operator calls. The RPC queues' threads run verbs, which
// so wait neither for a slab that is made nor for a policy that is changed.
//
// Peers decide how many such calls there are, so that threads, calls that wait for one, and the bytes of those
// calls are bounded. A call beyond the bounds is refused. Calls of one owner run one after another: however many it
// has, it takes one thread. Tenants, or users, take turns at the threads, and none takes all the places.
#ifndef KVPOOL_SERVER_RPC_CALL_WORKERS_H_
#define KVPOOL_SERVER_RPC_CALL_WORKERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/fair_queue.h"

namespace kvpool {

class CallWorkers {
 public:
  struct Options {
    std::string calls;  // What they run, in the words of a refusal.
    int threads = 1;    // 0: tests call RunReady.
    size_t most_waiting = 0;
    size_t most_waiting_bytes = 0;
    // "tenant", "user": who takes turns, of whom one has at most half of the places. Empty: nobody is told apart.
    std::string turns_by;
  };
  explicit CallWorkers(Options options);
  // Calls that have begun are carried through, the others are dropped.
  ~CallWorkers();
  CallWorkers(const CallWorkers&) = delete;
  CallWorkers& operator=(const CallWorkers&) = delete;

  struct Call {
    size_t bytes = 0;    // The size of its request.
    uint64_t owner = 0;  // 0: it has none.
    std::string tenant;  // Its tenant or its user, as Options::turns_by says.
  };
  // Runs `work` on one of the threads. RESOURCE_EXHAUSTED: too many wait, and it will not run.
  absl::Status Start(const Call& call, std::function<void()> work);
  // The same for a call whose stream holds the request and sends no other before the answer: it has a place always.
  void StartHeld(const Call& call, std::function<void()> work);
  // How many calls of this owner wait.
  size_t waiting(uint64_t owner);
  // No call runs, and none waits.
  bool idle();
  // Runs the next call, if there is one, on the caller's thread. False: there is none.
  bool RunReady();

 private:
  struct Waiting {
    Call call;
    bool held = false;
    std::function<void()> work;
  };
  struct Places {
    size_t calls = 0, bytes = 0;
  };
  void Run();
  absl::Status CheckPlace(const Call& call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Leave(const Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A thread runs it from now on, or does no longer.
  void Begin(const Waiting& next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(uint64_t owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The next call whose owner has none running; none: there is none.
  std::optional<Waiting> Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  Mutex mu_;
  CondVar wanted_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  FairQueue<Waiting> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> running_ ABSL_GUARDED_BY(mu_);  // The owners.
  size_t at_work_ ABSL_GUARDED_BY(mu_) = 0;             // Threads that run a call.
  Places taken_ ABSL_GUARDED_BY(mu_);                   // What calls have that wait and were not held,
  absl::flat_hash_map<std::string, Places> taken_by_
      ABSL_GUARDED_BY(mu_);  // and those of a tenant that has some.
  std::vector<std::thread> threads_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_CALL_WORKERS_H_
