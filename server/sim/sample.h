// Draws a part of a workload that stands for all of it, so that long traces are replayed in a fraction
// of the time.
//
// As in SHARDS (Waldspurger et al., FAST 2015) the hash of a content decides whether the sample has every use
// of it or none, and the capacity shrinks by as much. Contents that more than a hundredth of the requests ask
// for (system prompts) are in every sample and stand for themselves alone: else drawing one of them or not
// would decide the result.
//
// Single blocks are drawn, not chains. A resident block has its chain resident in front of it, so a block is
// part of a request's leading run if and only if it is resident, whatever else was drawn: the share of hits
// among drawn blocks is that among all. Drawing whole chains or conversations would keep the form of chains.
// But these are a hundred times fewer and of very unequal length, so the few that fit at a time fill the
// cache less evenly: on the conversation trace the error was ten times larger, and biased as well. What
// sampling blocks loses is that form: policies that look at how many blocks are new together see fewer.
#ifndef KVPOOL_SERVER_SIM_SAMPLE_H_
#define KVPOOL_SERVER_SIM_SAMPLE_H_

#include <cstdint>

#include "server/sim/workload.h"

namespace kvpool::sim {

struct SampleOptions {
  uint32_t one_in = 1;  // 1 or more; 1 is the whole workload
  uint64_t seed = 1;
};

Workload Sample(const Workload& workload, const SampleOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_SAMPLE_H_
