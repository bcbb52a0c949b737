// Tells in which turn of its conversation a block was computed, as far as the order of insertion shows it.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_TURNS_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_TURNS_H_

#include <algorithm>
#include <cstdint>

#include "proto/support/block_ref.h"
#include "server/replacement/policy.h"

namespace kvpool {

// The blocks of one prompt are inserted one after another. A block whose parent is not the block inserted
// last continues an earlier prompt, one turn later.
class Turns {
 public:
  static constexpr uint8_t kMost = 255;

  // `front` is the turn of the parent, if there is one.
  uint8_t OnInsert(BlockId block, const Content& content, uint8_t front) {
    const bool follows = content.parent == last_ && last_ != kNullBlock;
    last_ = block;
    if (content.parent == kNullBlock) return 0;
    return follows ? front : static_cast<uint8_t>(std::min<int>(front + 1, kMost));
  }
  // True if the block is the last of what was inserted together.
  bool OnUsed(BlockId block) {
    if (block != last_) return false;
    last_ = kNullBlock;
    return true;
  }

 private:
  BlockId last_ = kNullBlock;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_TURNS_H_
