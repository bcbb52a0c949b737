#include "server/replacement/policies/random.h"

namespace kvpool {

void RandomPolicy::OnOffer(BlockId block) {
  places_[Index(block)] = offered();
  blocks_.push_back(Index(block));
}

void RandomPolicy::OnWithdraw(BlockId block) {
  const uint32_t place = places_[Index(block)];
  blocks_[place] = blocks_.back();
  places_[blocks_[place]] = place;
  blocks_.pop_back();
}

BlockId RandomPolicy::Victim(uint64_t) {
  if (blocks_.empty()) return kNullBlock;
  // splitmix64. The high half of the product is nearly uniform, as the count is far below 2^64.
  uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return BlockId{blocks_[static_cast<uint64_t>(static_cast<unsigned __int128>(z) * blocks_.size() >> 64)]};
}

}  // namespace kvpool
