#include "server/space/block_info.h"

#include <algorithm>
#include <cstring>

namespace kvpool {

v1::BlockState WireState(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return v1::BLOCK_STATE_FREE;
    case BlockState::kLeased:
      return v1::BLOCK_STATE_LEASED;
    case BlockState::kSealed:
      return v1::BLOCK_STATE_SEALED;
    case BlockState::kCached:
      return v1::BLOCK_STATE_CACHED;
    case BlockState::kQuarantined:
      return v1::BLOCK_STATE_QUARANTINED;
    case BlockState::kWithheld:
      return v1::BLOCK_STATE_WITHHELD;
  }
  return v1::BLOCK_STATE_UNSPECIFIED;
}

const char* StateName(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return "free";
    case BlockState::kLeased:
      return "leased";
    case BlockState::kSealed:
      return "sealed";
    case BlockState::kCached:
      return "cached";
    case BlockState::kQuarantined:
      return "quarantined";
    case BlockState::kWithheld:
      return "withheld";
  }
  return "";
}

void FillCounts(const std::array<uint32_t, kBlockStates>& blocks, uint32_t capacity,
                v1::StateCounts* counts) {
  counts->set_free(counts->free() + blocks[static_cast<int>(BlockState::kFree)]);
  counts->set_leased(counts->leased() + blocks[static_cast<int>(BlockState::kLeased)]);
  counts->set_sealed(counts->sealed() + blocks[static_cast<int>(BlockState::kSealed)]);
  counts->set_cached(counts->cached() + blocks[static_cast<int>(BlockState::kCached)]);
  counts->set_quarantined(counts->quarantined() + blocks[static_cast<int>(BlockState::kQuarantined)]);
  counts->set_withheld(counts->withheld() + blocks[static_cast<int>(BlockState::kWithheld)]);
  counts->set_capacity(counts->capacity() + capacity);
}

void FillBlock(const SpaceState& state, const BlockView& view, v1::BlockInfo* info) {
  info->set_block(Index(view.ref.id));
  info->set_generation(view.ref.generation);
  info->set_state(WireState(view.state));
  const bool resident = view.state == BlockState::kSealed || view.state == BlockState::kCached;
  if (resident) {
    info->set_group(view.key.group);
    info->set_key(view.key.bytes.data(), view.key.bytes.size());
    info->set_parent(Index(view.parent));
    info->set_children(view.children);
    info->set_pinned(view.pinned);
    info->set_priority(view.priority);
    info->set_age_seconds(view.age_ms / 1000.0);
    info->set_idle_seconds(view.idle_ms / 1000.0);
  }
  info->set_refs(view.refs);
  if (const Session* owner = state.sessions.of(view.owner)) info->set_owner_session(owner->terms.id);
}

BlockRef FindByKey(const BlockPool& pool, const std::string& key, uint32_t group) {
  const BlockKey as_sealed = BlockKey::From(key, group);
  const BlockRef block = pool.Find(as_sealed);
  if (block != kNullRef || key.size() != as_sealed.bytes.size()) return block;
  BlockKey as_shown = as_sealed;
  as_shown.raw = false;
  return pool.Find(as_shown);
}

std::vector<BlockRef> ChainOf(const BlockPool& pool, BlockRef block, uint64_t now, size_t most) {
  std::vector<BlockRef> chain;
  for (BlockId id = block.id; id != kNullBlock && chain.size() < most;) {
    const absl::StatusOr<BlockView> view = pool.View(id, now);
    if (!view.ok()) break;
    chain.push_back(view->ref);
    id = view->parent;
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace kvpool
