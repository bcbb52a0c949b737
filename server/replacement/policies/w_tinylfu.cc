#include "server/replacement/policies/w_tinylfu.h"

#include <algorithm>

namespace kvpool {

void WTinyLfuPolicy::OnInsert(BlockId block, const Content& content) {
  if (Index(block) > highest_) {
    highest_ = Index(block);
    sketch_.Reserve(highest_ + 1);
  }
  sketch_.Add(content.hash);
  Insert(Index(block), content.hash, kWindow);
  // While the pool fills, a block that leaves the window displaces none.
  if (resident() <= most_resident_) return;
  most_resident_ = resident();
  if (size(kWindow) > WindowSize()) Move(Oldest(kWindow), kProbation);
}

uint32_t WTinyLfuPolicy::WindowSize() const { return std::max<uint32_t>(1, resident() / 100); }

void WTinyLfuPolicy::OnHit(BlockId block, uint64_t) {
  const uint32_t b = Index(block);
  sketch_.Add(hash(b));
  // In the window OnUsed moves it.
  if (queue(b) == kWindow) return;
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

// Room is made for a new content, so a full window is about to overflow.
BlockId WTinyLfuPolicy::Victim(uint64_t) {
  const uint32_t newcomer = OldestOffered(kWindow);
  const uint32_t old = OldestOfMain();
  if (newcomer == 0 || (old != 0 && size(kWindow) < WindowSize())) return BlockId{old};
  if (old == 0 || sketch_.Count(hash(newcomer)) <= sketch_.Count(hash(old))) return BlockId{newcomer};
  Move(newcomer, kProbation);
  return BlockId{old};
}

}  // namespace kvpool
