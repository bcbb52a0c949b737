// Bytes that a member has been answered and has not acknowledged: the answers that its AnswerWindow keeps, or
// its completions.
#ifndef KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_
#define KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_

#include <cstddef>

#include "server/space/counted_bytes.h"

namespace kvpool {

struct BoundsOnUnacknowledged {
  // What one member may have of each kind. A stream has at most 16 unanswered batches, whose answers must all be here when it
  // breaks: one that refuses nothing has half a MiB of refs at most, or a MiB of what AnswerRoom bounds.
  static constexpr size_t kMaxBytes = 16 << 20;
  static constexpr size_t kMaxBytesOfAll = 512 << 20;
  static constexpr size_t kSmallBytes = 256 << 10;  // More than most ever need.
};
using Unacknowledged = CountedBytes<BoundsOnUnacknowledged>;

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_
