// The memory of one (tenant, fingerprint) and the sessions in it, behind one mutex.
//
//   {
//     SpaceTurn turn(space);                     // Locks mu, and reads the clock once.
//     space.batches.Apply(turn, member, ...);    // Changes the state; defers what must not be done under mu.
//   }                                            // Unlocks mu, then carries out what was deferred.
//
// Code that wakes, sends and ends nothing takes a SpaceLock instead. Nothing else takes mu, so that each hold of
// it is measured.
//
// Locks, in this order: growth_mu (one thread at a time makes or destroys slabs; held across device calls),
// the registry's mutex, mu. No device call, send or listener runs under mu.
#ifndef KVPOOL_SERVER_SPACE_SPACE_H_
#define KVPOOL_SERVER_SPACE_SPACE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/clock.h"
#include "server/space/batch.h"
#include "server/space/device_budget.h"
#include "server/space/device_verbs.h"
#include "server/space/freed_memory.h"
#include "server/space/slab_places.h"
#include "server/space/space_owner.h"
#include "server/space/space_state.h"
#include "server/space/space_table.h"
#include "server/space/verbs.h"

namespace kvpool {

class Settlement;

// A session of an earlier daemon that may go on: it has no member yet, but these.
struct Resumable {
  std::shared_ptr<Session> session;
  struct Member {
    MemberIdentity identity;
    std::unique_ptr<MemberLog> log;
    std::shared_ptr<OldMember> old;
  };
  std::vector<Member> members;
};

class Space {
 public:
  // What a space works with; all but the policy outlive it. `event_log` may be null.
  struct Parts {
    std::unique_ptr<ReplacementPolicy> policy;
    std::vector<RunnerOrWhy> runners;  // Indexed by rank.
    DeviceBudget* budget = nullptr;
    FreedMemory* freed = nullptr;
    EventLog* event_log = nullptr;
    SpaceOwner* owner = nullptr;
    const Clock* clock = nullptr;
    // Both or none: what the pool's options have as their table, and who keeps it.
    std::unique_ptr<SpaceTable> table;
    KeeperLink* keeper = nullptr;
    bool measure_work = false;  // The processor time of each hold of mu.
    bool verify = false;        // What is sealed gets a sum: ContentChecks.
  };
  Space(SpaceFacts facts, const PoolOptions& options, Parts parts);

  // Makes one more slab on every rank, or on none. RESOURCE_EXHAUSTED: the space is at its largest, or the
  // budget or a device is out of memory. `settlement` is carried out by the caller, once growth_mu is free.
  absl::Status MakeSlab(Settlement* settlement) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu)
      ABSL_LOCKS_EXCLUDED(mu);
  // The space needs what it was about to give: it gives nothing that is not leaving, as long as its caller has growth_mu.
  void CancelGiveBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu) ABSL_LOCKS_EXCLUDED(mu);
  // One step of giving back (GiveBack::Step), with what is to be done outside the mutex. `settlement` is as in MakeSlab.
  GiveBack::Next GiveBackStep(Settlement* settlement) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu)
      ABSL_LOCKS_EXCLUDED(mu);
  // Goes on where an earlier daemon was killed: with what its table says, these slabs, which the budget has counted, and the
  // processes that it had as members. REQUIRES: it is called first.
  struct Inheritance {
    Kept table;
    std::unique_ptr<SlabPlaces> places;  // Null: the slabs have none.
    Kept kept_places;
    std::vector<SlabRow> rows;
    // Of all sessions.
    std::vector<std::shared_ptr<OldMember>> members;
    std::vector<Resumable> sessions;  // They are of this space.
    std::vector<LostSession> lost;    // This is known before.
  };
  // `resumed` gets the sessions that go on, once their members come back.
  RecoveredPool Recover(Inheritance inheritance, std::vector<std::shared_ptr<Session>>* resumed)
      ABSL_LOCKS_EXCLUDED(growth_mu, mu);
  // Gives back what sessions of an earlier daemon held whose processes have ended.
  void CollectOldSessions() ABSL_LOCKS_EXCLUDED(mu);
  // Destroys the slabs of a closed space. When it returns they are gone, whichever thread destroyed them.
  // Closed: no process has them mapped, and they are not to be found by the next daemon.
  enum class Slabs : bool { kStayWithOthers, kClosed };
  void DestroySlabs(Slabs slabs) ABSL_LOCKS_EXCLUDED(growth_mu, mu);

  // The bytes of all slabs on one rank. Reading them takes no lock, so a caller that sums over many spaces
  // does not wait for each one's verbs.
  uint64_t slab_bytes() const { return slab_bytes_.load(std::memory_order_relaxed); }
  uint64_t NowMs() const { return clock_->NowMs(); }
  // Carries out what turns have deferred: see Settlement.
  void Settle(Settlement* settlement) ABSL_LOCKS_EXCLUDED(mu);
  // Lets those in who wait for mu, each once. Work that is done in slices calls it between two of them: mu is not fair, and
  // a thread that takes it again right after it let go would keep it from verbs until all slices are done. Those who come
  // later are not waited for: under a load that always has somebody wait, work in slices has to get on too.
  void GiveWay() ABSL_LOCKS_EXCLUDED(mu);

  // What it may have and what is its own follow from give_back's terms, which have changed.
  void ApplyTerms() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // A session opens by a rule, whose terms bound what is made for it already. Once no opening is under way, those of the last
  // that succeeded count, as that rule says them since: KeepTerms is also for one that was read again.
  void BeginOpening(const GiveBack::Terms& of_rule) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void KeepTerms(const std::string& rule, const GiveBack::Terms& of_rule) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // For the next daemon: what operators and the rule of the last opening say.
  void KeepShares() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void EndOpening() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // A match may have content to compare first. For those who have no lock; it is true for a while longer.
  bool may_doubt() const { return may_doubt_.load(std::memory_order_relaxed); }
  void LookWhetherItDoubts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    may_doubt_.store(state.checks.compares(), std::memory_order_relaxed);
  }
  // GiveBack::weight() and its priority(), for those who have no lock.
  uint32_t weight() const { return weight_.load(std::memory_order_relaxed); }
  v1::PriorityClass priority() const { return priority_.load(std::memory_order_relaxed); }

  const SpaceFacts facts;
  const std::unique_ptr<SpaceTable> table;  // Null: nothing outlives the daemon. The pool lives in it.
  Mutex growth_mu ABSL_ACQUIRED_BEFORE(mu);
  Mutex mu;
  SpaceState state ABSL_GUARDED_BY(mu);
  BlockVerbs verbs ABSL_GUARDED_BY(mu);
  DeviceVerbs device_verbs ABSL_GUARDED_BY(mu);
  Batches batches ABSL_GUARDED_BY(mu);

 private:
  std::atomic<uint32_t> weight_{0};
  std::atomic<v1::PriorityClass> priority_{v1::PRIORITY_CLASS_STANDARD};
  std::atomic<bool> may_doubt_{false};
  friend class SpaceLock;
  friend class SpaceTurn;
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION(mu);
  void Unlock() ABSL_UNLOCK_FUNCTION(mu);
  // Tells their callers of verbs that were parked when their session ended.
  void AnswerDropped(Settlement* settlement) ABSL_LOCKS_EXCLUDED(mu);
  // Sends what is in the outbox, in order, unless another thread is at it.
  void SendFrames(Settlement* settlement) ABSL_LOCKS_EXCLUDED(mu);
  absl::StatusOr<SlabRow> MakeRow(const Growth::Place& place, uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu);
  // The pool's tables grow for so many blocks.
  void ExpectBlocks(uint32_t blocks) ABSL_LOCKS_EXCLUDED(mu);
  // Where slabs lie is kept from now on, if it was not: then any of them may go.
  absl::Status KeepPlaces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu) ABSL_LOCKS_EXCLUDED(mu);
  // The pool needs no lock for it.
  void ExpectMemory(uint32_t blocks) ABSL_NO_THREAD_SAFETY_ANALYSIS { state.pool.Expect(blocks); }
  // From its return on the next daemon finds the slab.
  absl::Status KeepRow(SlabRow* row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu);
  void DestroyRow(SlabRow row, Slabs slabs);
  absl::Status CopyAll(absl::Span<const GiveBack::Copy> copies);
  absl::Status SendFrame(OutgoingFrame out);
  // Whether the session goes on.
  WhyLost Resume(Turn& turn, const RecoveredPool& found, Resumable* old) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  DeviceBudget* const budget_;
  FreedMemory* const freed_;
  SpaceOwner* const owner_;
  const Clock* const clock_;
  KeeperLink* const keeper_;
  const bool measure_work_;
  Kept kept_table_ ABSL_GUARDED_BY(growth_mu);                     // It is kept with the first slab.
  std::unique_ptr<SlabPlaces> places_ ABSL_GUARDED_BY(growth_mu);  // Null: there has been no hole yet.
  Kept kept_places_ ABSL_GUARDED_BY(growth_mu);
  std::atomic<uint64_t> slab_bytes_{0};
  std::atomic<uint32_t> waiting_{0};            // So many threads wait for mu,
  std::atomic<uint32_t> let_in_{0};             // and so many waited and got it.
  uint64_t locked_ns_ ABSL_GUARDED_BY(mu) = 0;  // When mu was taken, by a clock of its own,
  uint64_t worked_ns_ ABSL_GUARDED_BY(mu) =
      0;  // and with measure_work_ what the thread had had of a processor.
};

// The space's mutex, held to the end of the scope.
class ABSL_SCOPED_LOCKABLE SpaceLock {
 public:
  explicit SpaceLock(Space& space) ABSL_EXCLUSIVE_LOCK_FUNCTION(space.mu) : space_(space) { space_.Lock(); }
  ~SpaceLock() ABSL_UNLOCK_FUNCTION() { space_.Unlock(); }
  SpaceLock(const SpaceLock&) = delete;
  SpaceLock& operator=(const SpaceLock&) = delete;

 private:
  Space& space_;
};

// What turns at a space deferred; carried out at the end of its scope, where the caller holds no lock
// of the daemon.
class Settlement {
 public:
  explicit Settlement(Space& space) : space_(space) {}
  ~Settlement() { space_.Settle(this); }
  Settlement(const Settlement&) = delete;
  Settlement& operator=(const Settlement&) = delete;
  Deferred& pending() { return pending_; }

 protected:
  Space& space_;

 private:
  Deferred pending_;
};

// A turn at a space, from the lock to the unlock. With a settlement of the caller's, that is where it
// defers to: for a turn that is one of several, or under growth_mu. Else it settles by itself, right
// after the unlock.
class ABSL_SCOPED_LOCKABLE SpaceTurn : private Settlement, public Turn {
 public:
  // Their bodies lock and unlock by halves, which the analysis does not follow; it checks their callers.
  explicit SpaceTurn(Space& space) ABSL_EXCLUSIVE_LOCK_FUNCTION(space.mu) ABSL_NO_THREAD_SAFETY_ANALYSIS
      : SpaceTurn(space, this) {}
  SpaceTurn(Space& space, Settlement* settlement)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(space.mu) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  ~SpaceTurn() ABSL_UNLOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Pause(Rest rest) override ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Outside(absl::FunctionRef<void()> work) override ABSL_NO_THREAD_SAFETY_ANALYSIS;

 private:
  static uint64_t LockAndReadClock(Space& space) ABSL_NO_THREAD_SAFETY_ANALYSIS;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_H_
