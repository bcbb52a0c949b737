#include "server/replacement/policies/arc.h"

#include <algorithm>

namespace kvpool {

void ArcPolicy::OnInsert(BlockId block, const Content& content) {
  const uint32_t blocks = resident() + 1;
  const uint32_t b1 = b1_.size(), b2 = b2_.size();
  int queue = kT1;
  if (b1_.Remove(content.hash)) {
    target_ = std::min(blocks, target_ + std::max<uint32_t>(1, b2 / b1));
    queue = kT2;
  } else if (b2_.Remove(content.hash)) {
    target_ -= std::min(target_, std::max<uint32_t>(1, b1 / b2));
    queue = kT2;
  }
  Insert(Index(block), content.hash, queue);
}

void ArcPolicy::OnEvict(BlockId block) {
  const uint32_t b = Index(block);
  const uint32_t blocks = resident();
  (queue(b) == kT1 ? b1_ : b2_).Add(hash(b), 0);
  Remove(b);
  // T1 and B1 name at most as many contents as there are blocks, all four at most twice as many.
  b1_.Trim(blocks - std::min(blocks, size(kT1)));
  b2_.Trim(2 * blocks - std::min(2 * blocks, resident() + b1_.size()));
}

BlockId ArcPolicy::Victim(uint64_t) {
  const uint32_t once = OldestOffered(kT1);
  const uint32_t again = OldestOffered(kT2);
  return BlockId{once != 0 && (size(kT1) > target_ || again == 0) ? once : again};
}

}  // namespace kvpool
