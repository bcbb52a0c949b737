// Chained blocks in an order in which whoever goes from the last to the first finds none with a child left.
#ifndef KVPOOL_SERVER_DAEMON_ROOTS_FIRST_H_
#define KVPOOL_SERVER_DAEMON_ROOTS_FIRST_H_

#include <vector>

#include "absl/types/span.h"
#include "server/pool/pool_types.h"

namespace kvpool {

struct ChainedBlock {
  BlockRef ref;
  BlockId parent = kNullBlock;
};

// Each behind the one in front of it, whatever their ids say. Blocks that were looked at at different times may be in a
// circle: these come before all others.
std::vector<BlockRef> RootsFirst(absl::Span<const ChainedBlock> blocks);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_ROOTS_FIRST_H_
