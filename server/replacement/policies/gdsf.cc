#include "server/replacement/policies/gdsf.h"

#include <algorithm>

namespace kvpool {

void GdsfPolicy::OnInsert(BlockId block, const Content& content) {
  const uint32_t depth = content.parent == kNullBlock ? 0 : node(content.parent).depth + 1;
  GdsfNode& n = node(block);
  n = {.worth = 0, .last_use = ++uses_, .accesses = 1, .depth = depth};
  n.worth = Worth(n);
}

void GdsfPolicy::OnHit(BlockId block, uint64_t) {
  GdsfNode& n = node(block);
  ++n.accesses;
  n.worth = Worth(n);
}

void GdsfPolicy::OnEvict(BlockId block) { age_ = std::max(age_, node(block).worth); }

}  // namespace kvpool
