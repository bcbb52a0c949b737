// What an engine expects of blocks that it gives back.
#ifndef KVPOOL_CLIENT_RELEASE_HINT_H_
#define KVPOOL_CLIENT_RELEASE_HINT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"

namespace kvpool {

// As in v1::Release: advice to the replacement policy, but for REUSE_NEVER, which binds.
struct ReleaseHint {
  static constexpr uint32_t kMaxCategory = 15;
  v1::Reuse reuse = v1::REUSE_UNSPECIFIED;
  uint32_t category = 0;  // 1 to 15 as the engine numbers its kinds of requests; 0: not said.
  friend bool operator==(const ReleaseHint&, const ReleaseHint&) = default;
};
// INVALID_ARGUMENT: one that the daemon would refuse, with the field and its limit.
absl::Status CheckHint(const ReleaseHint& hint);

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_RELEASE_HINT_H_
