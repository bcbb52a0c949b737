#include "server/replacement/policies/lru.h"

#include "proto/support/check.h"

namespace kvpool {

void LruPolicy::OnOffer(BlockId block) {
  const uint32_t b = Index(block);
  Node& node = nodes_[b];
  if (newest_ == 0 || node.last_use > nodes_[newest_].last_use) {
    node.older = newest_;
    node.newer = 0;
    (newest_ == 0 ? oldest_ : nodes_[newest_].newer) = b;
    newest_ = b;
  } else if (node.last_use < nodes_[oldest_].last_use) {
    node.older = 0;
    node.newer = oldest_;
    nodes_[oldest_].older = b;
    oldest_ = b;
  } else {
    node.between = 1;
    between_.emplace(uint64_t{node.last_use}, b);
    return;
  }
  ++listed_;
}

void LruPolicy::OnWithdraw(BlockId block) {
  const uint32_t b = Index(block);
  Node& node = nodes_[b];
  if (node.between != 0) {
    node.between = 0;
    between_.erase({uint64_t{node.last_use}, b});
    return;
  }
  KVPOOL_CHECK(node.older != 0 || oldest_ == b, "block %u is not on offer", b);
  (node.older == 0 ? oldest_ : nodes_[node.older].newer) = node.newer;
  (node.newer == 0 ? newest_ : nodes_[node.newer].older) = node.older;
  --listed_;
}

BlockId LruPolicy::Victim(uint64_t) {
  if (between_.empty()) return BlockId{oldest_};
  const auto& [last_use, block] = *between_.begin();
  return BlockId{oldest_ == 0 || last_use < nodes_[oldest_].last_use ? block : oldest_};
}

size_t LruPolicy::Upcoming(absl::Span<BlockId> blocks) const {
  size_t found = 0;
  for (uint32_t b = oldest_; b != 0 && found < blocks.size(); b = nodes_[b].newer)
    blocks[found++] = BlockId{b};
  return found;
}

void LruPolicy::Oldest(uint32_t count, std::vector<BlockId>* out) const {
  uint32_t listed = oldest_;
  auto between = between_.begin();
  for (; count > 0 && (listed != 0 || between != between_.end()); --count) {
    if (between != between_.end() && (listed == 0 || between->first < nodes_[listed].last_use)) {
      out->push_back(BlockId{between->second});
      ++between;
    } else {
      out->push_back(BlockId{listed});
      listed = nodes_[listed].newer;
    }
  }
}

}  // namespace kvpool
