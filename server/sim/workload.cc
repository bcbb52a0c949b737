#include "server/sim/workload.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvpool::sim {

std::string Workload::Describe() const {
  uint64_t blocks = 0;
  for (const Request& r : requests) blocks += r.blocks;
  if (one_in != 1) {
    return absl::StrFormat("%d requests, a sample of %d blocks of %d tokens, one in %d", requests.size(),
                           blocks, tokens_per_block, one_in);
  }
  return absl::StrFormat("%d requests, %d blocks of %d tokens, %d of them distinct", requests.size(), blocks,
                         tokens_per_block, distinct);
}

uint32_t Workload::largest_request() const {
  uint32_t largest = 0;
  for (const Request& r : requests) largest = std::max(largest, r.blocks + r.answer_blocks);
  return largest;
}

}  // namespace kvpool::sim
