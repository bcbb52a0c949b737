#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {

uint32_t BlockPool::Reclaim(TimeMs now, uint32_t count, EvictReason reason, std::vector<Eviction>* log) {
  Rep& r = *rep_;
  r.BeginVerb(now, 0);
  const uint32_t free = r.count(BlockState::kFree);
  return r.EvictUntilFree(count > r.capacity - free ? r.capacity : free + count, reason, log);
}

uint32_t BlockPool::Reclaim(TimeMs now, absl::Span<const BlockRef> victims, EvictReason reason,
                            std::vector<Eviction>* log) {
  Rep& r = *rep_;
  r.BeginVerb(now, victims.size());
  const uint32_t free = r.count(BlockState::kFree);
  for (const BlockRef& ref : victims) {
    if (r.Resolve(ref) != Verdict::kDone) continue;
    BlockRecord& record = r.records[Index(ref.id)];
    if (record.state() == BlockState::kCached) record.flags |= BlockRecord::kListed;
  }
  // Evicts each victim without children, then the listed blocks in front of it as their last child leaves. A
  // block that this call freed has no flags, so it is not evicted twice.
  for (const BlockRef& ref : victims) {
    if (ref.id == kNullBlock || Index(ref.id) > r.extent) continue;
    for (uint32_t b = Index(ref.id); b != 0;) {
      const BlockRecord& record = r.records[b];
      if (!record.has(BlockRecord::kListed) || record.children != 0) break;
      const uint32_t parent = record.parent;
      r.Evict(b, reason, log);
      b = parent;
    }
  }
  for (const BlockRef& ref : victims) {
    if (ref.id == kNullBlock || Index(ref.id) > r.extent) continue;
    r.records[Index(ref.id)].flags &= static_cast<uint8_t>(~BlockRecord::kListed);
  }
  return r.count(BlockState::kFree) - free;
}

void BlockPool::NextToLeave(uint32_t count, std::vector<Departing>* out) {
  Rep& r = *rep_;
  const size_t before = out->size(), most = before + count;
  absl::flat_hash_set<uint32_t> seen;
  const auto add_chain = [&](uint32_t b) {
    for (; b != 0 && out->size() < most && r.records[b].state() == BlockState::kCached;
         b = r.records[b].parent) {
      if (!seen.insert(b).second) return;
      if (!r.is_condemned(b)) out->push_back({r.RefOf(b), r.records[b].block_key()});
    }
  };
  for (const auto& [priority, accessed_ms, block] : r.retained) {
    if (priority >= kDefaultPriority || out->size() == most) break;
    add_chain(block);
  }
  std::vector<BlockId> upcoming(count);
  const size_t named = r.policy.asked()->Upcoming(absl::MakeSpan(upcoming));
  for (size_t i = 0; i < named; ++i) add_chain(Index(upcoming[i]));
  if (named > 0 || r.policy.asked()->offered() == 0) return;
  for (uint32_t visited = 0; visited < std::min(count, r.extent) && out->size() < most; ++visited) {
    r.departing_at = r.departing_at % r.extent + 1;
    add_chain(r.departing_at);
  }
}

bool BlockPool::IsResident(BlockRef ref) const {
  if (ref.id == kNullBlock || Index(ref.id) > rep_->extent) return false;
  const BlockRecord& record = rep_->records[Index(ref.id)];
  return record.generation == ref.generation && record.resident();
}

AsyncPolicy* BlockPool::async_policy() { return rep_->policy.asked()->async(); }

}  // namespace kvpool
