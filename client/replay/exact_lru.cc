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
  const uint64_t room = options_.capacity_blocks - (options_.decode ? DecodeBlocks(request) : 0);
  while (resident_.size() > room) {
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

uint64_t DecodeBlocks(const Request& request) {
  const auto blocks = [](uint64_t tokens) { return (tokens + kTokensPerBlock - 1) / kTokensPerBlock; };
  return blocks(uint64_t{request.input_tokens} + request.output_tokens) - blocks(request.input_tokens);
}

uint64_t LargestRequestBlocks(const std::vector<Request>& requests, const LargestRequestOptions& options) {
  uint64_t largest = 0;
  for (const Request& request : requests) {
    largest = std::max(largest, request.hash_ids.size() + (options.decode ? DecodeBlocks(request) : 0));
  }
  return largest;
}

absl::StatusOr<HitCounts> SimulateLru(const std::vector<Request>& requests, const ExactLruOptions& options) {
  const uint64_t largest = LargestRequestBlocks(requests, {.decode = options.decode});
  if (largest > options.capacity_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the largest request has ", largest, " blocks, the pool ", options.capacity_blocks));
  }
  ExactLru cache(options);
  for (const Request& request : requests) cache.Serve(request);
  return cache.counts();
}

}  // namespace kvpool::replay
