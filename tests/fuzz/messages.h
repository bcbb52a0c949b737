// Messages of peers: those that fit, and what choices and bytes make of them.
#ifndef KVPOOL_TESTS_FUZZ_MESSAGES_H_
#define KVPOOL_TESTS_FUZZ_MESSAGES_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/layout.pb.h"
#include "kvpool/v1/score.pb.h"
#include "tests/fuzz/input.h"

namespace kvpool::fuzz {

inline constexpr uint64_t kBlockBytes = 1024;
inline constexpr uint32_t kTokensPerBlock = 4, kKvHeads = 2, kHeadDim = 8;

// One group of one layer: bytes that mean something to the engine alone, or K and V that can be scored.
v1::Layout OpaqueLayout();
v1::Layout ScoredLayout();
// A group of as many layers follows, in which two blocks are a window.
void AddWindowedGroup(v1::Layout* layout);
// One to three of its numbers become their neighbours, or any others: strides that are no multiple of the
// element, planes that overlap or leave the block, groups and layers in any number.
void Vary(Input* input, v1::Layout* layout);

// Score, Select, Prune, Compact or PlanBudgets of a sequence of these blocks. It mostly fits ScoredLayout(). Arrays may be in
// `scratch`.
v1::Operation DeviceOperationOn(Input* input, const std::vector<uint64_t>& blocks,
                                const std::vector<uint64_t>& scratch);

// Some of the fields that are numbers, keys or choices, small ones mostly.
void FillPlainly(Input* input, google::protobuf::Message* message);
// Parses what the input has next, a length first. False: it is no such message.
bool ParseNext(Input* input, google::protobuf::Message* message);
// Bytes do not find refs of blocks that exist: wherever `message` names blocks, numbers below 64 become refs.
void NameBlocks(const std::vector<uint64_t>& refs, google::protobuf::Message* message);

// For a look into one input: KVPOOL_FUZZ_TRACE=1 prints what is said.
void Trace(const char* what, uint64_t session, const google::protobuf::Message& message);

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_MESSAGES_H_
