// Conversations to hold policies to.
#ifndef KVPOOL_TESTS_REPLACEMENT_CONVERSATIONS_H_
#define KVPOOL_TESTS_REPLACEMENT_CONVERSATIONS_H_

#include "server/sim/workload.h"

namespace kvpool {

// The public trace where it is at hand, else made ones: what is said of policies holds on both. Fewer requests under
// sanitizers.
sim::Workload Conversations();

}  // namespace kvpool

#endif  // KVPOOL_TESTS_REPLACEMENT_CONVERSATIONS_H_
