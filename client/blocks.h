// Blocks: holds on blocks of a session's space, given back when it goes.
#ifndef KVPOOL_CLIENT_BLOCKS_H_
#define KVPOOL_CLIENT_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "proto/support/block_ref.h"

namespace kvpool {

class Session;

// `after` of a verb is a step number, 0 for now, or this: the step begun last, or now if none was begun. It
// is the default everywhere, because it is right whatever the device still does.
inline constexpr uint64_t kCurrentStep = ~uint64_t{0};

// One hold on each of a list of blocks in sequence order: leases (the engine writes) or references (it
// reads). Move-only; destruction releases after the current step. It is used on its session's thread, and
// must be gone before the session. Null refs, which stand before a window, are skipped.
class Blocks {
 public:
  Blocks() = default;
  // Adopts one hold on each ref.
  Blocks(Session* session, absl::Span<const BlockRef> refs)
      : session_(session), refs_(refs.begin(), refs.end()) {}
  // `count` null refs, to be filled through slots().
  Blocks(Session* session, uint32_t count) : session_(session), refs_(count) {}
  Blocks(Blocks&& other) noexcept : session_(other.session_), refs_(std::move(other.refs_)) {
    other.refs_.clear();
  }
  Blocks& operator=(Blocks&& other) noexcept {
    if (this != &other) {
      Release();
      session_ = other.session_;
      refs_ = std::move(other.refs_);
      other.refs_.clear();
    }
    return *this;
  }
  ~Blocks() {
    if (!refs_.empty()) Release();
  }

  size_t size() const { return refs_.size(); }
  bool empty() const { return refs_.empty(); }
  BlockRef operator[](size_t i) const { return refs_[i]; }
  absl::Span<const BlockRef> refs() const { return refs_; }
  absl::Span<BlockRef> slots() { return absl::MakeSpan(refs_); }

  // Appends what `more` holds. REQUIRES: both belong to one session.
  void Append(Blocks&& more);
  // Moves the blocks behind the first `count` out. REQUIRES: count <= size().
  Blocks SplitFrom(size_t count);
  // Gives everything back once step `after` is done.
  void Release(uint64_t after = kCurrentStep);
  // Lets go of the handle and keeps the holds: the caller gives them back with Session::Release.
  absl::InlinedVector<BlockRef, 4> Detach();

 private:
  Session* session_ = nullptr;
  absl::InlinedVector<BlockRef, 4> refs_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_BLOCKS_H_
