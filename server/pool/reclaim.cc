#include <algorithm>

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

AsyncPolicy* BlockPool::async_policy() { return rep_->policy.asked()->async(); }

}  // namespace kvpool
