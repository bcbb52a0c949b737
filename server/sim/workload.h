// A trace as the simulator replays it: requests over dense content numbers.
#ifndef KVPOOL_SERVER_SIM_WORKLOAD_H_
#define KVPOOL_SERVER_SIM_WORKLOAD_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/replacement/policy.h"

namespace kvpool::sim {

// Asks for a chain of blocks; only its leading run of resident ones is a hit. What is missing is computed, and the
// blocks of the answer behind it, which nobody asked for.
struct Request {
  uint64_t now_ms = 0;
  uint64_t first = 0;  // Of Workload::contents.
  uint32_t blocks = 0;
  uint32_t answer_blocks = 0;
  uint32_t tokens = 0;         // The last block may be part full.
  uint32_t common_blocks = 0;  // Of a sample: so many leading blocks stand for themselves alone.
};

struct Workload {
  std::string name;
  uint32_t tokens_per_block = 1;
  std::vector<Request> requests;
  uint32_t warm_up = 0;            // So many requests at the beginning are replayed and not counted.
  std::vector<uint32_t> contents;  // The requests' chains, one behind the other. Numbers from 0.
  uint32_t distinct = 0;           // Contents there are.
  std::vector<UseHint>
      hints;  // Parallel to contents: what is said of each as its request ends. Empty: nothing.
  // Of a sample, see sample.h: each block that is not common stands for so many; the common ones there are.
  uint32_t one_in = 1, common_blocks = 0;
  std::vector<uint32_t>
      fronts;  // Of a sample, parallel to contents: blocks in front of each when it was drawn.

  absl::Span<const uint32_t> asked(const Request& r) const { return {contents.data() + r.first, r.blocks}; }
  absl::Span<const uint32_t> chain(const Request& r) const {
    return {contents.data() + r.first, uint64_t{r.blocks} + r.answer_blocks};
  }
  // Of its chain; empty: there are none in the workload.
  absl::Span<const UseHint> hints_of(const Request& r) const {
    if (hints.empty()) return {};
    return {hints.data() + r.first, uint64_t{r.blocks} + r.answer_blocks};
  }
  uint64_t tokens_in(const Request& r, uint64_t blocks) const {
    return std::min<uint64_t>(r.tokens, blocks * tokens_per_block);
  }
  // Its size in words.
  std::string Describe() const;
  uint32_t largest_request() const;
  // Room for the sample that is as tight as so many blocks are for all.
  uint32_t ScaledCapacity(uint32_t blocks) const {
    const uint32_t common = std::min(blocks, common_blocks);
    return common + (blocks - common) / one_in;
  }
};

struct WorkloadOptions {
  uint64_t max_requests = 0;  // 0: all.
  double from = 0, to = 1;    // The part of the requests that is replayed, as shares of all.
  double warm_up = 0;         // The part of those that is replayed and not counted.
  // CSV: bytes of a block; an object is as many blocks as its size takes. 0: one block, whatever its size.
  uint64_t block_bytes = 0;
  uint64_t space = 0;  // Event log: the space to replay; 0: the only one there is.
  uint64_t seed = 1;   // Of a synthetic trace.
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_WORKLOAD_H_
