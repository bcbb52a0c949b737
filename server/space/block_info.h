// What an operator is told of blocks and keys, in the messages of operator.proto.
#ifndef KVPOOL_SERVER_SPACE_BLOCK_INFO_H_
#define KVPOOL_SERVER_SPACE_BLOCK_INFO_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvpool/v1/operator.pb.h"
#include "server/pool/block_pool.h"
#include "server/space/space_state.h"

namespace kvpool {

v1::BlockState WireState(BlockState state);
// "free", "leased", …
const char* StateName(BlockState state);
void FillCounts(const std::array<uint32_t, kBlockStates>& blocks, uint32_t capacity, v1::StateCounts* counts);
void FillBlock(const SpaceState& state, const BlockView& view, v1::BlockInfo* info);

// The resident block of a key, given as it was sealed, or as the 32 bytes that listings show for keys of
// another length. kNullRef: no block has it.
BlockRef FindByKey(const BlockPool& pool, const std::string& key, uint32_t group);
// The blocks in front of a block, the first of the chain first, and the block itself last; of a chain longer than
// `most`, the last ones.
std::vector<BlockRef> ChainOf(const BlockPool& pool, BlockRef block, uint64_t now,
                              size_t most = std::numeric_limits<size_t>::max());

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BLOCK_INFO_H_
