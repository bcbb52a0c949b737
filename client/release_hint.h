// What an engine expects of blocks that it gives back.
#ifndef KVPOOL_CLIENT_RELEASE_HINT_H_
#define KVPOOL_CLIENT_RELEASE_HINT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"

namespace kvpool {

// Advice to the replacement policy, except for REUSE_NEVER, which binds; see v1::Release.
struct ReleaseHint {
  static constexpr uint32_t kMaxCategory = 15;
  v1::Reuse reuse = v1::REUSE_UNSPECIFIED;
  uint32_t category = 0;  // 1 to 15, in the engine's own numbering of kinds of requests; 0: not said.
  friend bool operator==(const ReleaseHint&, const ReleaseHint&) = default;
};
// INVALID_ARGUMENT: the daemon would refuse it, with the field and its limit.
absl::Status CheckHint(const ReleaseHint& hint);

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_RELEASE_HINT_H_
