#include "server/replacement/policies/lru_k.h"

namespace kvpool {

void LruKPolicy::OnInsert(BlockId block, const Content& content) {
  const uint64_t* const before = history_.Find(content.hash);
  node(block) = {.hash = content.hash,
                 .last = ++accesses_,
                 .previous = before == nullptr ? 0 : *before,
                 .last_use = ++uses_};
  history_.Remove(content.hash);
  ++resident_;
}

void LruKPolicy::OnHit(BlockId block, uint64_t) {
  node(block).previous = node(block).last;
  node(block).last = ++accesses_;
}

void LruKPolicy::OnEvict(BlockId block) {
  history_.Add(node(block).hash, node(block).last);
  history_.Trim(resident_);
  --resident_;
}

}  // namespace kvpool
