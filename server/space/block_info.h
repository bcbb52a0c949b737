// Blocks and keys in the words of the operator's contract.
#ifndef KVPOOL_SERVER_SPACE_BLOCK_INFO_H_
#define KVPOOL_SERVER_SPACE_BLOCK_INFO_H_

#include <cstdint>
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

// The session that a holder of the pool stands for; null: none that is still there.
const Session* SessionOf(const SpaceState& state, Holder holder);

// The resident block of a key as a person knows it: as it was sealed, or in the 32 bytes that the index shows
// for keys of another length.
BlockRef FindByKey(const BlockPool& pool, const std::string& key, uint32_t group);
// The chain in front of a block, itself last.
std::vector<BlockRef> ChainOf(const BlockPool& pool, BlockRef block, uint64_t now);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BLOCK_INFO_H_
