#include <algorithm>

#include "proto/support/check.h"
#include "server/pool/pool_rep.h"
#include "server/replacement/thinking_policy.h"

namespace kvpool {

uint32_t BlockPool::Reclaim(TimeMs now, uint32_t count, EvictReason reason, std::vector<Eviction>* log) {
  Rep& r = *rep_;
  r.SeeTime(now);
  const uint32_t free = r.count(BlockState::kFree);
  return r.EvictUntilFree(count > r.capacity - free ? r.capacity : free + count, reason, log);
}

uint32_t BlockPool::Reclaim(TimeMs now, absl::Span<const BlockRef> victims, EvictReason reason,
                            std::vector<Eviction>* log) {
  Rep& r = *rep_;
  r.SeeTime(now);
  const uint32_t free = r.count(BlockState::kFree);
  for (const BlockRef& ref : victims) {
    if (r.Resolve(ref) != Verdict::kDone) continue;
    BlockRecord& record = r.records[Index(ref.id)];
    if (record.state() == BlockState::kCached) record.flags |= BlockRecord::kListed;
  }
  // Each victim that has no children, and then the listed ones in front of it as their last child leaves.
  // A block freed by this call has no flags: it is not met again.
  for (const BlockRef& ref : victims) {
    if (ref.id == kNullBlock || Index(ref.id) > r.capacity) continue;
    for (uint32_t b = Index(ref.id); b != 0;) {
      const BlockRecord& record = r.records[b];
      if (!record.has(BlockRecord::kListed) || record.children != 0) break;
      const uint32_t parent = record.parent;
      r.Evict(b, reason, log);
      b = parent;
    }
  }
  for (const BlockRef& ref : victims) {
    if (ref.id == kNullBlock || Index(ref.id) > r.capacity) continue;
    r.records[Index(ref.id)].flags &= static_cast<uint8_t>(~BlockRecord::kListed);
  }
  return r.count(BlockState::kFree) - free;
}

std::shared_ptr<const Judge> BlockPool::judge() const {
  ThinkingPolicy* const thinking = rep_->policy->thinking();
  return thinking == nullptr ? nullptr : thinking->judge();
}

bool BlockPool::ShowCandidates(TimeMs now, Candidates* out) {
  Rep& r = *rep_;
  r.SeeTime(now);
  out->Clear();
  ThinkingPolicy* const thinking = r.policy->thinking();
  // Cheap ones leave first, whatever the policy thinks.
  const bool cheap = !r.retained.empty() && std::get<0>(*r.retained.begin()) < kDefaultPriority;
  if (thinking == nullptr || cheap || thinking->offered() == 0) return false;
  thinking->Show(now, out);
  for (BlockRef& ref : out->blocks) ref.generation = r.records[Index(ref.id)].generation;
  return true;
}

uint32_t BlockPool::Reclaim(TimeMs now, uint32_t count, const Candidates& candidates,
                            absl::Span<const uint32_t> order, EvictReason reason,
                            std::vector<Eviction>* log) {
  Rep& r = *rep_;
  r.SeeTime(now);
  ThinkingPolicy* const thinking = r.policy->thinking();
  KVPOOL_CHECK(thinking != nullptr, "policy %s does not think", std::string(r.policy->name()).c_str());
  const uint32_t free = r.count(BlockState::kFree);
  const auto as_shown = [&](uint32_t i) {
    const BlockRef ref = candidates.blocks[i];
    const BlockRecord& record = r.records[Index(ref.id)];
    return record.generation == ref.generation && record.has(BlockRecord::kOffered) &&
           r.priority(Index(ref.id)) == kDefaultPriority &&
           thinking->last_use(ref.id) == candidates.last_uses[i];
  };
  const uint32_t most = std::min(count, candidates.may_leave);
  size_t next = 0;
  for (; next < order.size() && r.count(BlockState::kFree) - free < most; ++next) {
    if (as_shown(order[next])) r.Evict(Index(candidates.blocks[order[next]].id), reason, log);
  }
  const size_t spared_from = std::max(next, order.size() - std::min<size_t>(order.size(), most));
  for (size_t i = spared_from; i < order.size(); ++i) {
    if (as_shown(order[i])) thinking->OnSpared(candidates.blocks[order[i]].id);
  }
  return r.count(BlockState::kFree) - free;
}

}  // namespace kvpool
