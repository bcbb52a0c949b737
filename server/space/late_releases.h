// Releases that have to wait, when more verbs are parked than the limit on them allows. A release is never
// refused, so these are kept as refs and counts instead of as verbs: they were answered when they came, and
// take one entry for each block and step, however often it is named.
//
//   fold   refs with one due step and one hint, in the order they came, and how many holds go for each
//
// There are few folds: beyond kMostFolds a release joins an existing one, whose step becomes the later of the two, as
// it is always safe to release later. Holds bound the refs: the caller adds only those that the session holds.
//
// They wait for their step, and for device operations on their blocks. Verbs that come later do not wait for
// them, since until then the blocks are held. Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_LATE_RELEASES_H_
#define KVPOOL_SERVER_SPACE_LATE_RELEASES_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

class LateReleases {
 public:
  static constexpr size_t kMostFolds = 16;

  bool empty() const { return folds_.empty(); }
  // Blocks that are named, each counted once for each fold.
  size_t blocks() const { return blocks_; }
  // Whether Take might have something, once `passed` is passed.
  bool due(uint64_t passed) const { return earliest_due_ <= passed; }

  // Takes one more hold off each of `refs` when step `due` is passed. `release` has the hint.
  void Add(uint64_t due, const v1::Release& release, absl::Span<const BlockRef> refs);
  // The next release whose step is passed, of those among the first `count` refs that are not held up; it may
  // be empty, and there may be more. Each ref is named once for each hold.
  v1::Release Take(uint64_t passed, size_t count, absl::FunctionRef<bool(uint32_t block)> held_up);

 private:
  struct Fold {
    uint64_t due = 0;
    v1::Reuse reuse = v1::REUSE_UNSPECIFIED;
    uint32_t category = 0;
    std::deque<uint64_t> order;  // Each ref once, packed.
    absl::flat_hash_map<uint64_t, uint32_t> holds;
  };
  Fold* FoldFor(uint64_t due, const v1::Release& release);
  void FindEarliest();

  std::deque<Fold> folds_;
  size_t blocks_ = 0;
  uint64_t earliest_due_ = UINT64_MAX;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_LATE_RELEASES_H_
