#include "client/replay/exact_lru.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvpool::replay {

uint64_t ExactLru::Serve(const Request& request) {
  uint64_t hits = 0;
  while (hits < request.hash_ids.size() && resident_.contains(request.hash_ids[hits])) ++hits;
  // Tail first. Blocks behind the leading run that are still there are found again, without having been hits.
  for (auto id = request.hash_ids.rbegin(); id != request.hash_ids.rend(); ++id) {
    if (const auto found = resident_.find(*id); found != resident_.end()) order_.erase(found->second);
    resident_[*id] = order_.insert(order_.begin(), *id);
  }
  while (resident_.size() > capacity_) {
    resident_.erase(order_.back());
    order_.pop_back();
    ++counts_.evictions;
  }
  ++counts_.requests;
  counts_.blocks += request.hash_ids.size();
  counts_.hit_blocks += hits;
  counts_.tokens += request.input_tokens;
  counts_.hit_tokens += TokensInBlocks(request, hits);
  return hits;
}

absl::StatusOr<HitCounts> SimulateLru(const std::vector<Request>& requests, uint64_t capacity_blocks) {
  if (const uint64_t largest = LargestRequestBlocks(requests); largest > capacity_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the largest request has ", largest, " blocks, the pool ", capacity_blocks));
  }
  ExactLru cache(capacity_blocks);
  for (const Request& request : requests) cache.Serve(request);
  return cache.counts();
}

uint64_t LargestRequestBlocks(const std::vector<Request>& requests) {
  uint64_t largest = 0;
  for (const Request& request : requests) largest = std::max<uint64_t>(largest, request.hash_ids.size());
  return largest;
}

}  // namespace kvpool::replay
