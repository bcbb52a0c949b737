#include "server/daemon/roots_first.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"

namespace kvpool {

std::vector<BlockRef> RootsFirst(absl::Span<const ChainedBlock> blocks) {
  constexpr uint32_t kPlaced = UINT32_MAX;
  absl::flat_hash_map<BlockId, size_t> places;
  for (size_t i = 0; i < blocks.size(); ++i) places[blocks[i].ref.id] = i;
  std::vector<uint32_t> children(blocks.size());
  for (const ChainedBlock& block : blocks) {
    if (const auto parent = places.find(block.parent); parent != places.end()) ++children[parent->second];
  }
  std::vector<BlockRef> refs;
  refs.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    // Goes up from each leaf, as far as the other children of what is there have been passed.
    for (size_t at = i; children[at] == 0;) {
      refs.push_back(blocks[at].ref);
      children[at] = kPlaced;
      const auto parent = places.find(blocks[at].parent);
      if (parent == places.end()) break;
      at = parent->second;
      --children[at];
    }
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (children[i] != kPlaced) refs.push_back(blocks[i].ref);
  }
  std::reverse(refs.begin(), refs.end());
  return refs;
}

}  // namespace kvpool
