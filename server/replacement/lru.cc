#include "server/replacement/lru.h"

#include <bit>

#include "proto/support/check.h"

namespace kvpool {

LruPolicy::LruPolicy(uint32_t max_blocks) : nodes_(max_blocks) {}

void LruPolicy::OnCached(BlockId block, const BlockFacts& facts) {
  KVPOOL_CHECK(nodes_[Index(block)].place == kNowhere, "block %u is cached already", Index(block));
  Append(Index(block), facts.priority);
  ++size_;
}

void LruPolicy::OnUncached(BlockId block) {
  Remove(Index(block));
  --size_;
}

void LruPolicy::OnTouched(BlockId block, const BlockFacts& facts) {
  Remove(Index(block));
  Append(Index(block), facts.priority);
}

void LruPolicy::OnPriority(BlockId block, uint8_t priority) {
  const uint32_t b = Index(block);
  Remove(b);
  Node& node = nodes_[b];
  List& list = lists_[priority];
  node = {.older = 0, .newer = list.oldest, .order = --first_order_, .priority = priority, .place = kListed};
  (list.oldest == 0 ? list.newest : nodes_[list.oldest].older) = b;
  list.oldest = b;
  present_[priority / 64] |= uint64_t{1} << priority % 64;
}

void LruPolicy::OnChildless(BlockId block) {
  Node& node = nodes_[Index(block)];
  if (node.place != kAside) return;
  node.place = kReady;
  ready_.insert(KeyOf(Index(block)));
}

void LruPolicy::Victims(uint32_t count, const Chain& chain, std::vector<BlockId>* victims) {
  // Answered blocks are set aside like those passed over, until OnUncached: the next choice must not be them.
  while (count > 0) {
    const uint32_t b = First();
    if (b == 0) return;
    Node& node = nodes_[b];
    if (node.place == kReady) {
      ready_.erase(KeyOf(b));
    } else {
      Unlink(b);
    }
    node.place = kAside;
    if (!chain.childless(BlockId{b})) continue;
    victims->push_back(BlockId{b});
    --count;
  }
}

void LruPolicy::Append(uint32_t block, uint8_t priority) {
  List& list = lists_[priority];
  nodes_[block] = {
      .older = list.newest, .newer = 0, .order = ++last_order_, .priority = priority, .place = kListed};
  (list.newest == 0 ? list.oldest : nodes_[list.newest].newer) = block;
  list.newest = block;
  present_[priority / 64] |= uint64_t{1} << priority % 64;
}

void LruPolicy::Remove(uint32_t block) {
  Node& node = nodes_[block];
  KVPOOL_CHECK(node.place != kNowhere, "block %u is not cached", block);
  if (node.place == kListed) {
    Unlink(block);
  } else if (node.place == kReady) {
    ready_.erase(KeyOf(block));
  }
  node.place = kNowhere;
}

void LruPolicy::Unlink(uint32_t block) {
  const Node& node = nodes_[block];
  List& list = lists_[node.priority];
  (node.older == 0 ? list.oldest : nodes_[node.older].newer) = node.newer;
  (node.newer == 0 ? list.newest : nodes_[node.newer].older) = node.older;
  if (list.oldest == 0) present_[node.priority / 64] &= ~(uint64_t{1} << node.priority % 64);
}

uint32_t LruPolicy::First() const {
  uint32_t listed = 0;
  for (size_t word = 0; word < present_.size() && listed == 0; ++word) {
    if (present_[word] != 0) listed = lists_[word * 64 + std::countr_zero(present_[word])].oldest;
  }
  if (ready_.empty()) return listed;
  if (listed == 0 || *ready_.begin() < KeyOf(listed)) return std::get<uint32_t>(*ready_.begin());
  return listed;
}

}  // namespace kvpool
