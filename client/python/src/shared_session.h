// A session shared by Python's objects: one lock around it, and a count of views of its blocks.
//
// A block with a view stays held until the view is gone, whoever releases it: releases meanwhile are `owed`,
// and done with the last view. So no view ever shows what another owner writes. The same holds for the
// session: closed while there are views of blocks, it ends with the last of them. Once it is closed and there
// is no view of any kind, its memory is unmapped and its threads end, however long Python keeps its object.
//
// To use the session is to have its turn, which is to hold mu_. Destructors of Python objects run on any
// thread and must not wait: what they give back is left in `dropped_`, and released by the next turn.
//
// Order of locks: the GIL is never taken under a lock of this class; mu_ before views_mu_.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_SHARED_SESSION_H_
#define KVPOOL_CLIENT_PYTHON_SRC_SHARED_SESSION_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "client/python/src/convert.h"
#include "client/python/src/gil.h"
#include "client/release_hint.h"
#include "client/session.h"
#include "proto/support/mutex.h"

namespace kvpool::python {

class SharedSession {
 public:
  // Opens a session, or joins one if `invitation` is not empty. REQUIRES: not the GIL.
  static std::shared_ptr<SharedSession> Open(SessionOptions options, const std::string& invitation);
  ~SharedSession();

  // Calls use(session) in a turn, without the GIL. ReleasedError: the session was closed. REQUIRES: the GIL.
  template <typename F>
  auto Use(F use) {
    const GilRelease released;
    return UseWithoutGil(std::move(use));
  }
  // The same for callers without the GIL.
  template <typename F>
  auto UseWithoutGil(F use) {
    const Turn turn(this);
    CheckUsable();
    return use(*session_);
  }
  // Only for calls that client/session.h marks "Any thread".
  Session& shared() { return *session_; }
  const Session& shared() const { return *session_; }
  void CheckUsable() const;

  // ---- Views. The null block stands for the whole pool.
  // ReleasedError: the memory is not mapped any more.
  void AddView(BlockRef block) ABSL_LOCKS_EXCLUDED(views_mu_);
  void DropView(BlockRef block) ABSL_LOCKS_EXCLUDED(views_mu_);
  uint64_t views() const ABSL_LOCKS_EXCLUDED(views_mu_);
  // Gives back a hold on each block, with the hint; of a block with a view, later. REQUIRES: a turn.
  void GiveBack(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint)
      ABSL_LOCKS_EXCLUDED(views_mu_);
  // The daemon is about to take these blocks, or a sequence to give them back: takes one more hold on each
  // that has a view and no such hold yet, to be given back with the hint. REQUIRES: a turn.
  void Shield(absl::Span<const BlockRef> blocks, const ReleaseHint& hint = {}) ABSL_LOCKS_EXCLUDED(views_mu_);

  // ---- For destructors: done in a later turn, after the current step.
  void DropBlocks(absl::Span<const BlockRef> blocks) ABSL_LOCKS_EXCLUDED(views_mu_);
  // Destroys `what` in a turn.
  void DropLater(std::shared_ptr<void> what) ABSL_LOCKS_EXCLUDED(views_mu_);

  // False: views keep it open, and it ends with the last of them. StatusError: the daemon has not answered in time; it frees
  // everything when it does, so only Close works from then on. REQUIRES: not the GIL.
  bool Close(Deadline deadline) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // Ends the session for this process' verbs; it hangs up, without closing, when its last object is gone.
  void Abandon() ABSL_LOCKS_EXCLUDED(views_mu_);
  bool closed() const { return closing_.load(std::memory_order_acquire); }
  // Closes all sessions of the process, for its end.
  static void CloseAll();

  // The oldest notice that was not taken yet, of each kind the newest; none: the deadline. Without the GIL.
  std::optional<v1::Notice> NextNotice(Deadline deadline) ABSL_LOCKS_EXCLUDED(notices_mu_);

 private:
  class Turn {
   public:
    explicit Turn(SharedSession* session) : session_(session) { session_->mu_.Lock(); }
    ~Turn() { session_->EndTurn(); }

   private:
    SharedSession* const session_;
  };
  struct Viewed {
    uint32_t views = 0;
    uint32_t owed = 0;  // Holds to give back with the last view.
    ReleaseHint hint;   // The hint of the last release.
  };
  struct Dropped {
    BlockRef block;
    ReleaseHint hint;
  };

  SharedSession() = default;
  void OnNotice(const v1::Notice& notice) ABSL_LOCKS_EXCLUDED(notices_mu_);
  // mu_ is held on entry and not on return.
  void EndTurn() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void ReleaseDropped(absl::Span<const Dropped> dropped);
  void ClearDropped() ABSL_LOCKS_EXCLUDED(views_mu_);
  bool ToDismantle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(views_mu_) {
    return over_ && !dismantled_ && viewed_.empty() && pool_views_ == 0;
  }
  // Dismantles the session if ToDismantle(). REQUIRES: a turn.
  void Dismantle() ABSL_LOCKS_EXCLUDED(views_mu_);
  bool HasDropped() const ABSL_LOCKS_EXCLUDED(views_mu_);
  // Releases what was dropped, unless another thread has its turn and will do it.
  void Settle() ABSL_NO_THREAD_SAFETY_ANALYSIS;

  Mutex mu_;  // Held by the thread that uses session_.
  std::atomic<bool> closing_{false};

  mutable Mutex views_mu_;
  std::unordered_map<uint64_t, Viewed> viewed_ ABSL_GUARDED_BY(views_mu_);  // Keyed by packed ref.
  std::vector<Dropped> dropped_ ABSL_GUARDED_BY(views_mu_);
  std::vector<std::shared_ptr<void>> dropped_objects_ ABSL_GUARDED_BY(views_mu_);
  bool ended_ ABSL_GUARDED_BY(views_mu_) = false;  // Closed, and no view of a block was left.
  uint64_t pool_views_ ABSL_GUARDED_BY(views_mu_) = 0;
  bool over_ ABSL_GUARDED_BY(views_mu_) = false;  // Close has ended it: nothing runs on its blocks any more.
  bool dismantled_ ABSL_GUARDED_BY(views_mu_) = false;

  Mutex notices_mu_;
  CondVar notices_wake_;
  uint64_t notices_seen_ ABSL_GUARDED_BY(notices_mu_) = 0;
  std::map<int, std::pair<uint64_t, v1::Notice>> notices_ ABSL_GUARDED_BY(notices_mu_);  // Keyed by kind.

  std::unique_ptr<Session> session_;  // Last, so that its threads end first.
};

// Keeps the session's memory mapped. ReleasedError: it is unmapped already.
class Mapped {
 public:
  explicit Mapped(SharedSession* session) : session_(session) { session_->AddView(kNullRef); }
  ~Mapped() { session_->DropView(kNullRef); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

 private:
  SharedSession* const session_;
};

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_SHARED_SESSION_H_
