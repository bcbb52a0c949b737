#include "server/replacement/policies/slru.h"

namespace kvpool {

void SlruPolicy::OnHit(BlockId block, uint64_t) {
  Move(Index(block), kProtected);
  while (uint64_t{size(kProtected)} * 5 > uint64_t{resident()} * 4) Move(Oldest(kProtected), kProbation);
}

BlockId SlruPolicy::Victim(uint64_t) {
  const uint32_t b = OldestOffered(kProbation);
  return BlockId{b != 0 ? b : OldestOffered(kProtected)};
}

}  // namespace kvpool
