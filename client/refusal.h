// A verb that the daemon refused, or applied to some of its blocks only, when no call was waiting for its answer.
#ifndef KVPOOL_CLIENT_REFUSAL_H_
#define KVPOOL_CLIENT_REFUSAL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace kvpool {

struct Refusal {
  std::string verb;     // "pin", as in v1::Operation.
  uint64_t blocks = 0;  // How many of its blocks; 0: the verb names none, as a lease.
  absl::Status status;  // Why; of several blocks, the first one's reason.
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_REFUSAL_H_
