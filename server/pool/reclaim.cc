#include <algorithm>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

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
  if (thinking == nullptr || thinking->offered() == 0) return false;
  thinking->Show(now, out);
  for (BlockRef& ref : out->blocks) ref.generation = r.records[Index(ref.id)].generation;
  return true;
}

void BlockPool::Decide(const Candidates& candidates, const Ranking& ranking) {
  Rep& r = *rep_;
  ThinkingPolicy* const thinking = r.policy->thinking();
  KVPOOL_CHECK(thinking != nullptr, "policy %s does not think", std::string(r.policy->name()).c_str());
  const absl::Span<const uint32_t> order = ranking.order;
  const size_t leave = std::min<size_t>(candidates.may_leave, order.size());
  r.decided.clear();
  r.next_decided = 0;
  for (const uint32_t i : order.first(leave)) {
    r.decided.push_back({candidates.blocks[i], candidates.last_uses[i]});
  }
  for (const uint32_t i : order.last(std::min<size_t>(ranking.spared, order.size() - leave))) {
    if (r.AsShown(*thinking, {candidates.blocks[i], candidates.last_uses[i]})) {
      thinking->OnSpared(candidates.blocks[i].id);
    }
  }
}

uint32_t BlockPool::decided() const {
  return static_cast<uint32_t>(rep_->decided.size() - rep_->next_decided);
}

bool PoolRep::AsShown(const ThinkingPolicy& thinking, const Decided& d) const {
  const BlockRecord& record = records[Index(d.block.id)];
  return record.generation == d.block.generation && record.has(BlockRecord::kOffered) &&
         priority(Index(d.block.id)) == kDefaultPriority && thinking.last_use(d.block.id) == d.last_use;
}

uint32_t PoolRep::PopDecided(const ThinkingPolicy& thinking) {
  while (next_decided < decided.size()) {
    const Decided& d = decided[next_decided++];
    if (AsShown(thinking, d)) return Index(d.block.id);
  }
  return 0;
}

}  // namespace kvpool
