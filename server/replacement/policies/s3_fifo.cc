#include "server/replacement/policies/s3_fifo.h"

#include <algorithm>

namespace kvpool {
namespace {

constexpr uint8_t kMostHits = 3;

}  // namespace

void S3FifoPolicy::OnHit(BlockId block, uint64_t) {
  const uint32_t b = Index(block);
  set_mark(b, std::min<uint8_t>(kMostHits, static_cast<uint8_t>(mark(b) + 1)));
}

void S3FifoPolicy::OnEvict(BlockId block) {
  const uint32_t b = Index(block);
  if (queue(b) == kSmall) ghost_.Add(hash(b), 0);
  ghost_.Trim(static_cast<uint32_t>(uint64_t{resident()} * 9 / 10));
  Remove(b);
}

// The loop ends: each turn moves a block out of small or takes a hit off one of main.
BlockId S3FifoPolicy::Victim(uint64_t) {
  for (;;) {
    const uint32_t small = OldestOffered(kSmall);
    const uint32_t main = OldestOffered(kMain);
    if (small != 0 && (uint64_t{size(kSmall)} * 10 >= resident() || main == 0)) {
      if (mark(small) <= 1) return BlockId{small};
      set_mark(small, 0);
      Move(small, kMain);
    } else {
      if (main == 0 || mark(main) == 0) return BlockId{main};
      set_mark(main, static_cast<uint8_t>(mark(main) - 1));
      Move(main, kMain);
    }
  }
}

}  // namespace kvpool
