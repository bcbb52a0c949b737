// What a shared prefix cache with LRU would do with a trace that is served request by request, with nothing
// in flight.
//
// Replays are compared with it, so it is written to be obviously right, not fast. A request hits its leading
// run of resident blocks, takes room for the rest, and at its end touches its blocks from the tail to the
// root. So a parent is always used later than its children, and the least recently used block is a leaf.
#ifndef KVPOOL_CLIENT_REPLAY_EXACT_LRU_H_
#define KVPOOL_CLIENT_REPLAY_EXACT_LRU_H_

#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/formats/trace.h"

namespace kvpool::replay {

struct HitCounts {
  uint64_t requests = 0;
  uint64_t blocks = 0, hit_blocks = 0;
  uint64_t tokens = 0, hit_tokens = 0;
  uint64_t evictions = 0;

  double block_ratio() const {
    return blocks == 0 ? 0 : static_cast<double>(hit_blocks) / static_cast<double>(blocks);
  }
  double token_ratio() const {
    return tokens == 0 ? 0 : static_cast<double>(hit_tokens) / static_cast<double>(tokens);
  }
};

struct ExactLruOptions {
  uint64_t capacity_blocks = 0;
  bool decode = false;  // A request also needs blocks for its answer, which nobody keeps.
};

class ExactLru {
 public:
  explicit ExactLru(const ExactLruOptions& options) : options_(options) {}

  // Returns how many leading blocks were resident. REQUIRES: the request fits into the capacity.
  uint64_t Serve(const Request& request);
  const HitCounts& counts() const { return counts_; }

 private:
  const ExactLruOptions options_;
  std::list<uint64_t> order_;  // Hash ids, most recently used first.
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> resident_;
  HitCounts counts_;
};

// Serves all requests. INVALID_ARGUMENT: one has more blocks than the capacity.
absl::StatusOr<HitCounts> SimulateLru(const std::vector<Request>& requests, const ExactLruOptions& options);

// Blocks that a request's answer needs beyond those of its prompt.
uint64_t DecodeBlocks(const Request& request);

// Blocks of the largest request.
struct LargestRequestOptions {
  bool decode = false;
};
uint64_t LargestRequestBlocks(const std::vector<Request>& requests, const LargestRequestOptions& options);

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_EXACT_LRU_H_
