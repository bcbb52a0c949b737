// What an operation of the contract names and weighs, whichever verb it is.
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
  return verb == v1::Operation::kScore || verb == v1::Operation::kPrune || verb == v1::Operation::kCompact ||
         verb == v1::Operation::kPlanBudgets;
}

// Does the verb have several lists of blocks, or arrays beside them?
inline bool NamesLists(v1::Operation::VerbCase verb) {
  return IsDeviceOperation(verb) || verb == v1::Operation::kPutEpisode;
}

// The lists of blocks that an operation names; none for lease, match, fence and the verbs of the session.
using BlockLists = std::vector<const google::protobuf::RepeatedField<uint64_t>*>;
// Of verbs with one list, or none.
const google::protobuf::RepeatedField<uint64_t>& BlocksOf(const v1::Operation& operation);
// Of device operations, sequences and what signals are read from; of put_episode, its sequences.
BlockLists BlockListsOf(const v1::Operation& operation);
size_t CountBlocks(const v1::Operation& operation);
// What it counts in the bounds on what is parked: blocks, and the size of what it carries.
size_t WeightOf(const v1::Operation& operation);
// By id, as often as they are named.
std::vector<uint32_t> BlockIdsOf(const v1::Operation& operation);

// Calls visit(block id) for each block that the operation names, as often as it does.
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
