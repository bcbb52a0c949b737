// Answers, which the stream's thread delivers and the engine's thread waits for.
#ifndef KVPOOL_CLIENT_SESSION_ANSWER_STATE_H_
#define KVPOOL_CLIENT_SESSION_ANSWER_STATE_H_

#include <atomic>
#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/mutex.h"

namespace kvpool {

class Session;
class SessionRep;

// Wakes whoever waits for anything of a session. Most of the time nobody waits, and then Notify
// is one atomic operation.
class AnswerSignal {
 public:
  // True: `done` holds; false: it did not at the deadline. `done` runs under the signal's
  // lock and only reads.
  template <typename Done>
  bool Await(std::chrono::steady_clock::time_point deadline, Done done) ABSL_LOCKS_EXCLUDED(mu_) {
    if (done()) return true;
    // The waiter is counted before it looks again: either Notify sees it, or it sees the change that Notify
    // is about.
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    bool seen = false;
    {
      MutexLock lock(&mu_);
      while (!(seen = done())) {
        if (!cv_.WaitUntil(&mu_, deadline)) {
          seen = done();
          break;
        }
      }
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    return seen;
  }
  // Called after a change that somebody may wait for. REQUIRES: the change is a sequentially consistent
  // store, or comes before one.
  void Notify() ABSL_LOCKS_EXCLUDED(mu_) {
    if (waiters_.fetch_add(0, std::memory_order_seq_cst) == 0) return;
    MutexLock lock(&mu_);
    cv_.SignalAll();
  }

 private:
  std::atomic<int> waiters_{0};
  Mutex mu_;
  CondVar cv_;
};

// What a match of so many groups finds where there is no daemon.
inline v1::OperationResult NothingCached(int groups) {
  v1::OperationResult result;
  while (result.mutable_match()->groups_size() < groups) result.mutable_match()->add_groups();
  result.mutable_match()->set_miss(v1::MISS_REASON_GROWING);
  return result;
}

// One answer. `status` and `result` belong to the stream's thread until it sets kReady, and
// then to the engine's.
struct AnswerState {
  enum Phase { kWaiting, kReady, kAbandoned };

  bool ready() const { return phase.load(std::memory_order_seq_cst) == kReady; }
  // The holds in `result`, which nobody has taken yet.
  std::vector<BlockRef> Holds() const {
    std::vector<BlockRef> holds;
    for (const v1::GroupHit& hit : result.match().groups()) {
      for (const uint64_t ref : hit.blocks()) {
        if (ref != 0) holds.push_back(BlockRef::Unpack(ref));
      }
    }
    for (int i = 0; i < result.seal().canonical_size(); ++i) {
      const BlockRef ref = BlockRef::Unpack(result.seal().canonical(i));
      if (ref != kNullRef && !(ref == sealed[i])) holds.push_back(ref);
    }
    const v1::CompactResult& compacted = result.compact();
    for (int i = static_cast<int>(compacted.moved_from_block()); i < compacted.table_size(); ++i) {
      holds.push_back(BlockRef::Unpack(compacted.table(i)));
    }
    for (const v1::Sequence& sequence : result.choose_episode().sequences()) {
      for (const uint64_t ref : sequence.blocks()) holds.push_back(BlockRef::Unpack(ref));
    }
    return holds;
  }

  Session* session = nullptr;
  SessionRep* rep = nullptr;     // The session's, whose signal tells of the answer.
  std::vector<BlockRef> sealed;  // The caller's blocks of a seal, to tell duplicates from them.
  std::atomic<Phase> phase{kWaiting};
  absl::Status status;
  v1::OperationResult result;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_ANSWER_STATE_H_
