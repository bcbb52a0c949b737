#include "server/replacement/w_tinylfu.h"

#include <algorithm>

namespace kvpool {

void WTinyLfuPolicy::OnInsert(BlockId block, const Content& content) {
  sketch_.Add(content.hash);
  Insert(Index(block), content.hash, kWindow);
}

void WTinyLfuPolicy::OnHit(BlockId block, uint64_t) {
  const uint32_t b = Index(block);
  sketch_.Add(hash(b));
  if (queue(b) == kWindow) return;  // Where it is, OnUsed says.
  Move(b, kProtected);
  const auto over = [&] {
    return uint64_t{size(kProtected)} * 5 > (uint64_t{size(kProtected)} + size(kProbation)) * 4;
  };
  while (over()) Move(Oldest(kProtected), kProbation);
}

uint32_t WTinyLfuPolicy::OldestOfMain() const {
  const uint32_t b = OldestOffered(kProbation);
  return b != 0 ? b : OldestOffered(kProtected);
}

// A newcomer that stays leaves the window: the window's overflow ends.
BlockId WTinyLfuPolicy::Victim(uint64_t) {
  while (size(kWindow) > std::max<uint32_t>(1, resident() / 100)) {
    const uint32_t newcomer = OldestOffered(kWindow);
    const uint32_t old = OldestOfMain();
    if (newcomer == 0) break;
    // Until main has had its share there is nothing to be displaced.
    if (old == 0 || sketch_.Count(hash(newcomer)) <= sketch_.Count(hash(old))) return BlockId{newcomer};
    Move(newcomer, kProbation);
    return BlockId{old};
  }
  const uint32_t old = OldestOfMain();
  return BlockId{old != 0 ? old : OldestOffered(kWindow)};
}

}  // namespace kvpool
