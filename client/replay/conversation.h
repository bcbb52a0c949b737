// A workload shaped like the public conversation trace, for machines without that trace.
//
// Conversations begin as a Poisson process. Each has turns; a turn's prompt is everything said before, the
// last answer and a new message, so consecutive turns share a prefix up to the last full block. All begin
// with the same system prompt. Some turns drop what was attached before and attach something else: they share
// only a first part. The process has run for an hour when the first request is recorded, as it had when the
// trace was taken.
//
// The constants in conversation.cc are fitted to the trace's quantiles of input length and growth per turn,
// gaps between turns, share of turns that continue, turns per conversation, and hit ratios of LRU from 1,000
// to 50,000 blocks. tests/tools/conversation_test.cc checks the workload against these.
#ifndef KVPOOL_CLIENT_REPLAY_CONVERSATION_H_
#define KVPOOL_CLIENT_REPLAY_CONVERSATION_H_

#include <cstdint>
#include <vector>

#include "proto/formats/trace.h"

namespace kvpool::replay {

struct ConversationOptions {
  uint64_t seed = 1;
  uint64_t requests = 12031;  // The trace's own number, in one hour.
};

// The same options give the same requests on every machine.
std::vector<Request> GenerateConversation(const ConversationOptions& options);

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_CONVERSATION_H_
