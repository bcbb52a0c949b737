// A trace as the simulator replays it: requests over dense content numbers.
#ifndef KVPOOL_SERVER_SIM_WORKLOAD_H_
#define KVPOOL_SERVER_SIM_WORKLOAD_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvpool::sim {

// Asks for a chain of blocks; only its leading run of resident ones is a hit.
struct Request {
  uint64_t now_ms = 0;
  uint64_t first = 0;  // Of Workload::contents.
  uint32_t blocks = 0;
  uint32_t tokens = 0;  // The last block may be part full.
};

struct Workload {
  std::string name;
  uint32_t tokens_per_block = 1;
  std::vector<Request> requests;
  uint32_t warm_up = 0;            // So many requests at the beginning are replayed and not counted.
  std::vector<uint32_t> contents;  // The requests' chains, one behind the other. Numbers from 0.
  uint32_t distinct = 0;           // Contents there are.

  absl::Span<const uint32_t> chain(const Request& r) const { return {contents.data() + r.first, r.blocks}; }
  uint64_t tokens_in(const Request& r, uint64_t blocks) const {
    return std::min<uint64_t>(r.tokens, blocks * tokens_per_block);
  }
  uint32_t largest_request() const;
};

struct WorkloadOptions {
  uint64_t max_requests = 0;  // 0: all.
  double from = 0, to = 1;    // The part of the requests that is replayed, as shares of all.
  double warm_up = 0;         // The part of those that is replayed and not counted.
  // CSV: bytes of a block; an object is as many blocks as its size takes. 0: one block, whatever its size.
  uint64_t block_bytes = 0;
};

// Reads a trace, plain or gzip: Mooncake's JSONL, or, if the name ends in .csv or .csv.gz, lines of
// key,time,size (time in ms; size in bytes; a first line of names is skipped); or makes one up, "synthetic:NAME"
// (synthetic.h). Errors start with "FILE:LINE: ".
absl::StatusOr<Workload> ReadWorkload(const std::string& path, const WorkloadOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_WORKLOAD_H_
