// The classes of the module; each file binds some of them in one function.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_BIND_H_
#define KVPOOL_CLIENT_PYTHON_SRC_BIND_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/python/src/convert.h"
#include "client/python/src/shared_session.h"

namespace kvpool::python {

struct PyLayout {
  v1::Layout proto;
};

// Holds on blocks, like client/blocks.h: released once, by whoever comes first.
class PyBlocks {
 public:
  PyBlocks(std::shared_ptr<SharedSession> session, std::vector<BlockRef> refs, bool writable)
      : session_(std::move(session)), refs_(std::move(refs)), writable_(refs_.size(), writable) {}
  PyBlocks(PyBlocks&& other) noexcept
      : session_(std::move(other.session_)),
        refs_(std::exchange(other.refs_, {})),
        writable_(std::exchange(other.writable_, {})),
        released_(std::exchange(other.released_, true)) {}
  ~PyBlocks();
  PyBlocks(const PyBlocks&) = delete;
  PyBlocks& operator=(const PyBlocks&) = delete;

  const std::shared_ptr<SharedSession>& session() const { return session_; }
  // This and the members below raise ReleasedError once the holds are released.
  const std::vector<BlockRef>& refs() const;
  bool released() const { return released_; }
  BlockRef at(int64_t index) const { return refs()[Offset(index)]; }
  bool writable(int64_t index) const { return writable_[Offset(index)]; }
  // Makes later views read-only.
  void MarkSealed() { writable_.assign(writable_.size(), false); }
  void Release(std::optional<uint64_t> after, const ReleaseHint& hint = {});
  // Moves the holds to the caller.
  std::vector<BlockRef> Take();
  PyBlocks Split(size_t count);
  void Extend(PyBlocks* more);

 private:
  size_t Offset(int64_t index) const;

  std::shared_ptr<SharedSession> session_;
  std::vector<BlockRef> refs_;
  std::vector<bool> writable_;
  bool released_ = false;
};

// An answer that is on its way. It is abandoned under its session's lock.
template <typename Answer>
class PyPending {
 public:
  PyPending(std::shared_ptr<SharedSession> session, Pending<Answer> pending)
      : session_(std::move(session)), state_(std::make_shared<State>(std::move(pending))) {}
  PyPending(PyPending&&) noexcept = default;
  ~PyPending() {
    if (state_ != nullptr) session_->DropLater(std::move(state_));
  }

  const std::shared_ptr<SharedSession>& session() const { return session_; }
  // False while another thread waits for it.
  bool ready() const {
    if (!state_->mu.TryLock()) return false;
    const bool ready = state_->pending.Ready();
    state_->mu.Unlock();
    return ready;
  }
  // REQUIRES: the GIL, which is released while it waits.
  Answer Wait(Timeout timeout) {
    return ValueOf(Await(timeout, [this](Deadline deadline) {
      MutexLock lock(&state_->mu);  // If several threads wait for the same answer, one gets it.
      return state_->pending.Wait(deadline);
    }));
  }

 private:
  struct State {
    explicit State(Pending<Answer> answer) : pending(std::move(answer)) {}
    Mutex mu;
    Pending<Answer> pending;
  };
  std::shared_ptr<SharedSession> session_;
  std::shared_ptr<State> state_;
};

// A Blocks, or a list of refs.
std::vector<BlockRef> RefsOf(nb::handle blocks);
// A Blocks of references that takes the holds over.
nb::object BlocksObject(const std::shared_ptr<SharedSession>& session, Blocks holds);
std::vector<uint64_t> Packed(absl::Span<const BlockRef> refs);

// Blocks of one sequence in one layer group, in order, for callers without a LiveSequence.
struct PyBlockTable {
  nb::object blocks;  // A Blocks.
  uint32_t group = 0;
  uint32_t last_block_tokens = 0;  // 0: it is full.

  PyBlocks& held() const { return nb::cast<PyBlocks&>(blocks); }
};

// Copies strings, numbers and booleans under their names, written as the proto wants them: "true", "7".
void SetParams(const nb::dict& params, google::protobuf::Map<std::string, std::string>* to);

void BindLayout(nb::module_& module);
void BindBlocks(nb::module_& module);
void BindCopies(nb::module_& module);
void BindSession(nb::module_& module);
void BindScoring(nb::module_& module);
void BindSequence(nb::module_& module);
// These add methods to the class Session.
void BindSharing(nb::module_& module);
void BindDevice(nb::module_& module);
void BindEpisodes(nb::module_& module);

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_BIND_H_
