#include "server/replacement/parts/shadow_cache.h"

#include <utility>

namespace kvpool {

ShadowCache::ShadowCache(std::unique_ptr<ReplacementPolicy> policy, uint32_t slots)
    : policy_(std::move(policy)), capacity_(slots), slots_(slots + 1) {
  for (uint32_t s = slots; s > 0; --s) unused_.push_back(s);
}

void ShadowCache::Offer(uint32_t slot) {
  Slot& s = slots_[slot];
  if (s.offered || s.in_use || s.children != 0) return;
  s.offered = true;
  policy_->OnOffer(BlockId{slot});
}

void ShadowCache::Withdraw(uint32_t slot) {
  if (!slots_[slot].offered) return;
  slots_[slot].offered = false;
  policy_->OnWithdraw(BlockId{slot});
}

void ShadowCache::Evict(uint32_t slot) {
  Withdraw(slot);
  policy_->OnEvict(BlockId{slot});
  slot_of_.erase(slots_[slot].hash);
  unused_.push_back(slot);
  const uint32_t parent = slots_[slot].parent;
  if (parent == 0) return;
  --slots_[parent].children;
  Offer(parent);
}

bool ShadowCache::Access(uint64_t hash, uint64_t parent, uint64_t now_ms) {
  const auto it = slot_of_.find(hash);
  if (it != slot_of_.end()) {
    Withdraw(it->second);
    slots_[it->second].in_use = true;
    policy_->OnHit(BlockId{it->second}, now_ms);
    return true;
  }
  while (slot_of_.size() >= capacity_) {
    const BlockId victim = policy_->Victim(now_ms);
    if (victim == kNullBlock) break;  // All of it is in use.
    Evict(Index(victim));
  }
  if (unused_.empty()) return false;
  const uint32_t slot = unused_.back();
  unused_.pop_back();
  const auto front = parent == 0 ? slot_of_.end() : slot_of_.find(parent);
  const uint32_t in_front = front == slot_of_.end() ? 0 : front->second;
  if (in_front != 0) {
    Withdraw(in_front);
    ++slots_[in_front].children;
  }
  slots_[slot] = {.hash = hash, .parent = in_front, .children = 0, .in_use = true, .offered = false};
  slot_of_.emplace(hash, slot);
  policy_->OnInsert(BlockId{slot}, {.hash = hash, .parent = BlockId{in_front}, .now_ms = now_ms});
  return false;
}

void ShadowCache::Used(uint64_t hash, uint64_t now_ms) {
  const auto it = slot_of_.find(hash);
  if (it == slot_of_.end()) return;
  Withdraw(it->second);
  slots_[it->second].in_use = false;
  policy_->OnUsed(BlockId{it->second}, now_ms);
  Offer(it->second);
}

}  // namespace kvpool
