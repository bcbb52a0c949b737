// A session as Python's objects share it: one lock around it, and who looks at its blocks.
//
// A block that a view shows stays held until the view is gone, whoever releases it: what has been released meanwhile is
// `owed`, and given back with the last view. So no view ever shows what another owner writes. The same with the session:
// closed while there are views of blocks, it ends with the last of them. Once it is closed and there is no view of any kind
// its memory is unmapped and its threads end, however long Python keeps its object.
//
// Destructors of Python objects run on any thread and must not wait: what they give back is left in `dropped_`, and goes
// with whoever holds the lock next.
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
#include "client/release_hint.h"
#include "client/session.h"
#include "proto/support/mutex.h"

namespace kvpool::python {

class SharedSession {
 public:
  // Without the GIL. `invitation` empty: opens a session; otherwise joins one.
  static std::shared_ptr<SharedSession> Open(SessionOptions options, const std::string& invitation);
  ~SharedSession();

  // Calls use(session) under the lock, without the GIL. With the GIL; ReleasedError: the session was closed.
  template <typename F>
  auto Use(F use) {
    nb::gil_scoped_release released;
    return UseWithoutGil(std::move(use));
  }
  // The same for callers without the GIL.
  template <typename F>
  auto UseWithoutGil(F use) {
    const Turn turn(this);
    CheckUsable();
    return use(*session_);
  }
  // What any thread may ask without a turn; see client/session.h.
  Session& shared() { return *session_; }
  const Session& shared() const { return *session_; }
  void CheckUsable() const;

  // ---- Views. Of the null block: of the whole pool.
  // ReleasedError: the memory is not mapped any more.
  void AddView(BlockRef block) ABSL_LOCKS_EXCLUDED(views_mu_);
  void DropView(BlockRef block) ABSL_LOCKS_EXCLUDED(views_mu_);
  uint64_t views() const ABSL_LOCKS_EXCLUDED(views_mu_);
  // Gives back a hold on each, those that are looked at later, and says what is expected of them. In a turn.
  void GiveBack(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint)
      ABSL_LOCKS_EXCLUDED(views_mu_);
  // Blocks that the daemon is about to take, or a sequence to give back: those that are looked at are held once more, for
  // their views, unless they are already, and given back with the hint. In a turn.
  void Shield(absl::Span<const BlockRef> blocks, const ReleaseHint& hint = {}) ABSL_LOCKS_EXCLUDED(views_mu_);

  // ---- From destructors: later, after the current step.
  void DropBlocks(absl::Span<const BlockRef> blocks) ABSL_LOCKS_EXCLUDED(views_mu_);
  // Something that has to be destroyed in a turn.
  void DropLater(std::shared_ptr<void> what) ABSL_LOCKS_EXCLUDED(views_mu_);

  // False: views keep it open; it ends with the last of them. Without the GIL.
  bool Close(Deadline deadline) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // Ends for this process' verbs, and hangs up when the last object of it is gone, saying nothing of what still runs.
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
    ReleaseHint hint;   // Of the one given back last.
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
  // If it is over and nobody looks at its memory. In a turn.
  void Dismantle() ABSL_LOCKS_EXCLUDED(views_mu_);
  bool HasDropped() const ABSL_LOCKS_EXCLUDED(views_mu_);
  // Does what was dropped now, unless another thread has its turn and will.
  void Settle() ABSL_NO_THREAD_SAFETY_ANALYSIS;

  Mutex mu_;  // Who has it uses session_, where that is of one thread at a time.
  std::atomic<bool> closing_{false};

  mutable Mutex views_mu_;
  std::unordered_map<uint64_t, Viewed> viewed_ ABSL_GUARDED_BY(views_mu_);  // By packed ref.
  std::vector<Dropped> dropped_ ABSL_GUARDED_BY(views_mu_);
  std::vector<std::shared_ptr<void>> dropped_objects_ ABSL_GUARDED_BY(views_mu_);
  bool ended_ ABSL_GUARDED_BY(views_mu_) = false;  // Closed, and no view of a block was left.
  uint64_t pool_views_ ABSL_GUARDED_BY(views_mu_) = 0;
  bool over_ ABSL_GUARDED_BY(views_mu_) = false;  // Ended by Close: nothing of it runs any more.
  bool dismantled_ ABSL_GUARDED_BY(views_mu_) = false;

  Mutex notices_mu_;
  CondVar notices_wake_;
  uint64_t notices_seen_ ABSL_GUARDED_BY(notices_mu_) = 0;
  std::map<int, std::pair<uint64_t, v1::Notice>> notices_ ABSL_GUARDED_BY(notices_mu_);  // By kind.

  std::unique_ptr<Session> session_;  // Last, so that its threads end first.
};

// Its memory stays mapped. ReleasedError: it is not any more.
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
