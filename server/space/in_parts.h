// Much that is looked at or changed under the space's mutex, part by part.
#ifndef KVPOOL_SERVER_SPACE_IN_PARTS_H_
#define KVPOOL_SERVER_SPACE_IN_PARTS_H_

#include <cstddef>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/support/status_macros.h"
#include "server/space/session.h"
#include "server/space/turn.h"

namespace kvpool {

// Calls visit(first, part) for each part, which begins at `first` and is as much work as Turn::kNames are; so many of `names`
// are as much as one. Others get in after each, and anything may have changed then. ABORTED: the session has ended, and
// nothing more is visited. An error of `visit` ends it, too.
template <typename Name, typename Visit>
absl::Status InParts(Turn& turn, const Session& session, absl::Span<const Name> names, Visit visit,
                     size_t as_much_as_one = 1) {
  for (size_t first = 0; first < names.size(); first += Turn::kNames * as_much_as_one) {
    const absl::Span<const Name> part = names.subspan(first, Turn::kNames * as_much_as_one);
    if constexpr (std::is_void_v<decltype(visit(first, part))>) {
      visit(first, part);
    } else {
      RETURN_IF_ERROR(visit(first, part));
    }
    turn.Worked(part.size() / as_much_as_one);
    turn.Breathe();
    if (session.ended) return absl::AbortedError(session.end_reason);
  }
  return absl::OkStatus();
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_IN_PARTS_H_
