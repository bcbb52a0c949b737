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

// A request asks for a chain of blocks, of which the leading run of resident ones is a hit. The missing ones
// are computed, and then the blocks of the answer, which nobody asked for.
struct Request {
  uint64_t now_ms = 0;
  // The index of its chain in Workload::contents.
  uint64_t first = 0;
  uint32_t blocks = 0;
  uint32_t answer_blocks = 0;
  uint32_t tokens = 0;  // the last block may be partly full
  // Of a sample: how many leading blocks stand for themselves alone.
  uint32_t common_blocks = 0;
};

struct Workload {
  std::string name;
  uint32_t tokens_per_block = 1;
  std::vector<Request> requests;
  // How many requests at the beginning are replayed and not counted.
  uint32_t warm_up = 0;
  // The requests' chains one after another. Contents are numbered from 0.
  std::vector<uint32_t> contents;
  // The number of different contents.
  uint32_t distinct = 0;
  // Parallel to contents: the hint with which its request releases it. Empty: there are no hints.
  std::vector<UseHint> hints;
  // Of a sample (sample.h): how many blocks each one stands for unless it is common, and how many are common.
  uint32_t one_in = 1, common_blocks = 0;
  // Of a sample, parallel to contents: how many blocks were in front of each one in the whole workload.
  std::vector<uint32_t> fronts;

  absl::Span<const uint32_t> asked(const Request& r) const { return {contents.data() + r.first, r.blocks}; }
  absl::Span<const uint32_t> chain(const Request& r) const {
    return {contents.data() + r.first, uint64_t{r.blocks} + r.answer_blocks};
  }
  // The hints of the request's chain; empty if the workload has none.
  absl::Span<const UseHint> hints_of(const Request& r) const {
    if (hints.empty()) return {};
    return {hints.data() + r.first, uint64_t{r.blocks} + r.answer_blocks};
  }
  uint64_t tokens_in(const Request& r, uint64_t blocks) const {
    return std::min<uint64_t>(r.tokens, blocks * tokens_per_block);
  }
  // A text that says how large it is.
  std::string Describe() const;
  uint32_t largest_request() const;
  // The capacity that is as tight for the sample as `blocks` are for the whole workload.
  uint32_t ScaledCapacity(uint32_t blocks) const {
    const uint32_t common = std::min(blocks, common_blocks);
    return common + (blocks - common) / one_in;
  }
};

struct WorkloadOptions {
  uint64_t max_requests = 0;  // 0: all.
  // The part of the requests that is replayed, as shares of all; then the share of that part that
  // is not counted.
  double from = 0, to = 1;
  double warm_up = 0;
  // CSV: the bytes of a block; an object has as many blocks as its size takes. 0: an object has one block.
  uint64_t block_bytes = 0;
  uint64_t space = 0;  // event log: the space to replay; 0: the only one there is
  uint64_t seed = 1;   // synthetic trace: its seed
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_WORKLOAD_H_
