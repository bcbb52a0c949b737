// What some calls wait for, and the thread that serves it: all of a call happens on that thread, verbs included, but for
// openings and operator calls, which CallWorkers carry out.
//
// Where several tenants have sessions, they take turns: what has arrived is read first, and then one batch or call is applied,
// of the tenant that was not served for longest. So a batch waits for one of each other tenant that has some, and not for
// all that another has sent.
//
// One queue for gRPC and one for frames is the default up to 7 cores. gRPC polls with one epoll set for the whole process, so that a
// second thread picks up half of the first one's events and has to wake it: on two cores a second queue makes
// a round trip of 64 operations 1.5 times as long, and throughput falls.
#ifndef KVPOOL_SERVER_RPC_RPC_QUEUE_H_
#define KVPOOL_SERVER_RPC_RPC_QUEUE_H_

#include <grpcpp/support/status.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/fair_queue.h"
#include "server/rpc/rpc_events.h"

namespace kvpool {

// The one place where our errors become gRPC's.
grpc::Status ToGrpcStatus(const absl::Status& status);

inline uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// The answer of a daemon that is about to end for another one.
absl::Status Resting();

// A call that has begun.
class RpcCall {
 public:
  // The server stops, and operations under way have been cancelled: the call has to end soon.
  virtual void Abandon() = 0;
  // The queue rests: the call ends if nothing of it is under way.
  virtual void OnRest() = 0;

 protected:
  ~RpcCall() = default;
};

class RpcQueue {
 public:
  // `several`: may sessions of more than one tenant be open? Only then do any wait for their turn.
  RpcQueue(std::unique_ptr<RpcEvents> events, std::function<bool()> several);
  // REQUIRES: Stop, if Start was called.
  ~RpcQueue();
  void Start();
  // In place of Start, for a thread that does other things as well: carries out the next thing that has come. False: nothing has.
  bool RunReady() { return RunNext(&RpcEvents::Look); }
  // REQUIRES: Server::Shutdown was called. Abandons the calls that are left, and joins the thread, if it has one.
  void Stop();

  // From now on no batch and no call of engines begins; streams end. REQUIRES: Stop was not called.
  void Rest();
  void GoOn() { resting_ = false; }
  // Any thread may look. What comes meanwhile is refused with Resting(): clients come again.
  bool resting() const { return resting_; }
  // So many calls have begun and not ended.
  size_t calls() const { return begun_; }

  // REQUIRES: it has gRPC's calls.
  grpc::ServerCompletionQueue* cq() { return events_->cq(); }
  std::unique_ptr<RpcAlarm> MakeAlarm() { return events_->MakeAlarm(); }

  // ---- On the queue's thread
  void Begin(RpcCall* call) {
    calls_.insert(call);
    ++begun_;
  }
  void End(RpcCall* call);
  // True: accept no further calls.
  bool stopping() const { return stopping_; }
  // A message of so many bytes was read.
  void CountRead(size_t bytes) { read_bytes_ += bytes; }
  // Does anything wait for its turn? Only then does it matter what is read.
  bool turns_wait() const { return !turns_.empty(); }
  // Carries out what the tenant has sent, a message of so many bytes, at once or when its turn comes: always, also when the queue rests or stops by then.
  // A stream has one batch waiting at most. The callers of unary verbs decide how many those are: CheckTurn comes first.
  void InTurn(const std::string& tenant, std::function<void()> work, size_t bytes);
  // RESOURCE_EXHAUSTED: no further verb of so many bytes may wait for this tenant's turn.
  absl::Status CheckTurn(const std::string& tenant, const std::string& verb, size_t bytes) const;

 private:
  void Run();
  // The next event, if there is one; else it is some tenant's turn. False: nothing waits for its turn, and `next` has no event.
  bool RunNext(bool (RpcEvents::*next)(RpcEvents::Event*));
  void OnStop(bool ok);
  void OnRested(bool ok);

  const std::unique_ptr<RpcEvents> events_;
  const std::function<bool()> several_;
  std::thread thread_;
  MethodTag<RpcQueue> stop_tag_{this, &RpcQueue::OnStop};
  MethodTag<RpcQueue> rest_tag_{this, &RpcQueue::OnRested};
  const std::unique_ptr<RpcAlarm> stop_alarm_ = MakeAlarm(), rest_alarm_ = MakeAlarm();
  std::atomic<bool> resting_{false};
  std::atomic<size_t> begun_{0};
  // ---- These belong to the thread.
  bool stopping_ = false;
  struct Turn {
    std::string tenant;
    std::function<void()> work;
    size_t bytes = 0;
  };
  FairQueue<Turn> turns_;
  absl::flat_hash_map<std::string, size_t> turn_bytes_;  // The sum of each tenant's that is not zero.
  // What came after the last turn.
  int events_since_ = 0;
  size_t read_bytes_ = 0;
  std::unordered_set<RpcCall*> calls_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_QUEUE_H_
