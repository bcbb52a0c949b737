// From one replacement policy to the next, with all that is in the cache.
#include <algorithm>
#include <utility>
#include <vector>

#include "server/pool/pool_rep.h"

namespace kvpool {

// By the old policy's order, then by last use. The tail of a chain was used before its head.
std::vector<uint32_t> BlockPool::Rep::ResidentByStanding() const {
  struct Place {
    Rank standing;
    uint32_t idle_ms, depth, block;
  };
  const auto now32 = static_cast<uint32_t>(now_ms);
  std::vector<uint32_t> depths(next_new);
  std::vector<Place> places;
  places.reserve(count(BlockState::kSealed) + count(BlockState::kCached));
  std::vector<uint32_t> chain;
  for (uint32_t b = 1; b < next_new; ++b) {
    if (!records[b].resident()) continue;
    for (uint32_t a = b; a != 0 && depths[a] == 0; a = records[a].parent) chain.push_back(a);
    for (; !chain.empty(); chain.pop_back()) depths[chain.back()] = depths[records[chain.back()].parent] + 1;
    places.push_back({policy->Standing(BlockId{b}), now32 - records[b].accessed_ms, depths[b], b});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    if (a.standing != b.standing) return a.standing < b.standing;
    if (a.idle_ms != b.idle_ms) return a.idle_ms > b.idle_ms;
    return a.depth != b.depth ? a.depth > b.depth : a.block < b.block;
  });
  std::vector<uint32_t> blocks;
  blocks.reserve(places.size());
  for (const Place& place : places) blocks.push_back(place.block);
  return blocks;
}

// Each block once, and no block before the one in front of it.
void BlockPool::Rep::Introduce(const std::vector<uint32_t>& in_order, TimeMs at,
                               ReplacementPolicy* successor) const {
  std::vector<bool> known(next_new);
  known[0] = true;
  std::vector<uint32_t> chain;
  for (const uint32_t b : in_order) {
    for (uint32_t a = b; !known[a]; a = records[a].parent) chain.push_back(a);
    for (; !chain.empty(); chain.pop_back()) {
      const BlockRecord& r = records[chain.back()];
      known[chain.back()] = true;
      successor->OnInsert(BlockId{chain.back()},
                          {.hash = HashKey(r.block_key()), .parent = BlockId{r.parent}, .now_ms = at});
    }
  }
}

std::unique_ptr<ReplacementPolicy> BlockPool::SetPolicy(TimeMs now,
                                                        std::unique_ptr<ReplacementPolicy> policy) {
  Rep& r = *rep_;
  r.SeeTime(now);
  const auto now32 = static_cast<uint32_t>(r.now_ms);
  const std::vector<uint32_t> blocks = r.ResidentByStanding();
  // Time never falls: all came when the oldest did, and a use is no earlier than the one told before it.
  uint32_t oldest_ms = 0;
  for (const uint32_t b : blocks) oldest_ms = std::max(oldest_ms, now32 - r.records[b].sealed_ms);
  TimeMs told = r.now_ms - std::min<TimeMs>(oldest_ms, r.now_ms);
  r.Introduce(blocks, told, policy.get());
  // What is held is used until its last holder lets go, and will be heard of then.
  for (const uint32_t b : blocks) {
    if (r.records[b].state() != BlockState::kCached) continue;
    told = std::max<TimeMs>(told, r.now_ms - std::min<TimeMs>(now32 - r.records[b].accessed_ms, r.now_ms));
    policy->OnUsed(BlockId{b}, told);
  }
  for (const uint32_t b : blocks) {
    const bool offered = r.records[b].has(BlockRecord::kOffered);
    if (offered && r.priority(b) == kDefaultPriority) policy->OnOffer(BlockId{b});
  }
  // What the old one decided is not the new one's will.
  r.decided.clear();
  r.next_decided = 0;
  return std::exchange(r.policy, std::move(policy));
}

}  // namespace kvpool
