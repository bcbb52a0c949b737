#include "server/sim/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "proto/support/check.h"

namespace kvpool::sim {
namespace {

BlockKey KeyOf(uint32_t content) {
  BlockKey key{.bytes = {}};
  std::memcpy(key.bytes.data(), &content, sizeof(content));
  return key;
}

}  // namespace

uint64_t Engine::Serve(uint64_t now_ms, absl::Span<const uint32_t> chain, uint32_t asked,
                       absl::Span<const UseHint> hints) {
  keys_.clear();
  for (const uint32_t content : chain) keys_.push_back(KeyOf(content));
  const GroupQuery query = {.group = 0, .keys = absl::MakeConstSpan(keys_).subspan(0, asked)};
  pool_.Match(session_, now_ms, {&query, 1}, &match_);
  std::vector<BlockRef>& held = match_.blocks[0];
  const size_t hits = held.size();
  const auto missing = static_cast<uint32_t>(keys_.size() - hits);
  ReclaimFor(missing, now_ms);
  const LeaseOutcome lease = pool_.Lease(session_, now_ms, missing, missing, &held);
  KVPOOL_CHECK(lease.leased == missing, "%u blocks leased of %u", lease.leased, missing);
  entries_.clear();
  for (size_t i = hits; i < keys_.size(); ++i) entries_.push_back({held[i], {&keys_[i], 1}});
  outcomes_.resize(entries_.size());
  pool_.Seal(session_, now_ms, hits == 0 ? nullptr : &keys_[hits - 1], entries_, absl::MakeSpan(outcomes_));
  // The blocks of an answer that were resident are now held as well.
  hints_.assign(hints.begin(), hints.end());
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    if (outcomes_[i].verdict != Verdict::kDuplicate) continue;
    held.push_back(outcomes_[i].canonical);
    if (!hints.empty()) hints_.push_back(hints[hits + i]);
  }
  Release(now_ms, held);
  return hits;
}

void Engine::Release(uint64_t now_ms, absl::Span<const BlockRef> held) {
  verdicts_.resize(held.size());
  hints_.resize(held.size());
  for (size_t end = held.size(); end > 0;) {
    size_t begin = end - 1;
    while (begin > 0 && hints_[begin - 1] == hints_[end - 1]) --begin;
    pool_.Release(session_, now_ms, hints_[begin], held.subspan(begin, end - begin),
                  absl::MakeSpan(verdicts_).subspan(begin, end - begin));
    end = begin;
  }
}

void Engine::ReclaimFor(uint32_t blocks, uint64_t now_ms) {
  AsyncPolicy* const policy = pool_.async_policy();
  if (policy == nullptr) return;
  const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  while (true) {
    const uint32_t free = pool_.counts()[static_cast<size_t>(BlockState::kFree)];
    if (free >= blocks) break;
    if (decision_.Prepare(policy, &breaker_, now_ms)) {
      // Virtual time stands still meanwhile.
      decision_.Rank([] { return uint64_t{0}; });
      decision_.Apply(policy, &breaker_, now_ms);
    }
    const uint32_t decided = std::max(policy->decided(), 1u);
    if (pool_.Reclaim(now_ms, std::min(blocks - free, decided), EvictReason::kDirect, nullptr) == 0) break;
  }
  decision_ns_ += std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace kvpool::sim
