// The blocks that an operation names, and its weight in the limits on parked verbs, whichever verb it is.
#ifndef KVPOOL_SERVER_WIRE_OPERATION_H_
#define KVPOOL_SERVER_WIRE_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

// Does the verb run on the device, outside the space's mutex?
inline bool IsDeviceOperation(v1::Operation::VerbCase verb) {
  return verb == v1::Operation::kScore || verb == v1::Operation::kSelect || verb == v1::Operation::kPrune ||
         verb == v1::Operation::kCompact || verb == v1::Operation::kPlanBudgets;
}

// Does the verb have several lists of blocks, or arrays beside them?
inline bool NamesLists(v1::Operation::VerbCase verb) {
  return IsDeviceOperation(verb) || verb == v1::Operation::kPutEpisode;
}

// Does the verb take or give back block sets that it does not name block by block?
inline bool IsOfSets(const v1::Operation& operation) {
  return operation.has_choose_episode() || operation.has_put_episode();
}

// The lists of blocks that an operation names; none for lease, match, fence and the verbs of the session.
using BlockLists = std::vector<const google::protobuf::RepeatedField<uint64_t>*>;
// The list of a verb that has exactly one; empty for all other verbs.
const google::protobuf::RepeatedField<uint64_t>& BlocksOf(const v1::Operation& operation);
// The lists of a verb that has several. Device operations: the sequences, and the blocks that signals are
// read from. put_episode: its sequences.
BlockLists BlockListsOf(const v1::Operation& operation);
size_t CountBlocks(const v1::Operation& operation);
// The operation's weight in the limits on parked verbs: its blocks, plus the size of the
// arrays and keys that it carries.
size_t WeightOf(const v1::Operation& operation);
// A session has at most so many. A question is compared with each: with 64 of 4,096 numbers in some 0.2 ms.
inline constexpr uint32_t kMaxEpisodes = 64;
// What an operation takes beside its blocks and keys, as the work that so many of them are: numbers that it compares, moves or
// plans. Nothing has to be checked before.
size_t NumbersOf(const v1::Operation& operation);
// The ids of the blocks that the operation names; one that is named twice is there twice.
std::vector<uint32_t> BlockIdsOf(const v1::Operation& operation);

// Calls visit(block id) for each block that the operation names, as often as it is named.
template <typename Visit>
void ForEachBlock(const v1::Operation& operation, Visit visit) {
  const auto visit_list = [&visit](const google::protobuf::RepeatedField<uint64_t>& list) {
    for (const uint64_t wire : list) visit(Index(BlockRef::Unpack(wire).id));
  };
  if (!NamesLists(operation.verb_case())) return visit_list(BlocksOf(operation));
  for (const auto* list : BlockListsOf(operation)) visit_list(*list);
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_OPERATION_H_
