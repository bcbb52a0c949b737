#include "server/space/growth.h"

#include <cmath>
#include <utility>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// Growth that made no step for so long is none: the device does not answer. It is twice what a member
// is waited for.
constexpr uint64_t kGrowthStallMs = 2 * kPatienceMs;
// A space grows when less than this part of it is spare. A larger one is used up faster, by more engines.
constexpr uint32_t kAheadShare = 32;

}  // namespace

Growth::Growth(const SpaceFacts* facts, BlockPool* pool) : facts_(*facts), pool_(*pool) {
  ahead_blocks_ = AheadBlocks();
}

// --------------------------------------------------------------------------------------------------- slabs

uint64_t Growth::bytes() const {
  uint64_t bytes = 0;
  for (const SlabRow& row : slabs_) bytes += row.bytes * row.by_rank.size();
  if (leaving_.has_value()) bytes += leaving_->bytes * leaving_->by_rank.size();
  return bytes;
}

const SlabRow& Growth::RowOf(BlockId block) const {
  const auto after =
      std::upper_bound(by_block_.begin(), by_block_.end(), Index(block),
                       [this](uint32_t index, uint32_t place) { return index < slabs_[place].first_block; });
  const SlabRow* const row = after == by_block_.begin() ? nullptr : &slabs_[*(after - 1)];
  KVPOOL_CHECK(row != nullptr && Index(block) < row->end_block(), "block %u is in no slab", Index(block));
  return *row;
}

uint64_t Growth::AddressOf(BlockId block, size_t rank) const {
  const SlabRow& row = RowOf(block);
  return row.by_rank[rank]->address() +
         uint64_t{Index(block) - row.first_block} * facts_.geometry.block_stride_bytes;
}

bool Growth::complete() const {
  // An IPC space is one allocation for life, whatever its size came to be.
  if (facts_.kind == v1::SPACE_KIND_IPC) return !slabs_.empty();
  if (made_blocks() >= max_blocks()) return true;
  return !gone_.empty() && gone_.front().room_blocks > max_blocks() - made_blocks();
}

uint32_t Growth::max_blocks() const {
  const SpaceGeometry& geometry = facts_.geometry;
  if (limit_blocks_ >= geometry.max_blocks) return geometry.max_blocks;
  const uint32_t unit = geometry.blocks_in(geometry.unit_bytes);
  return std::max(unit, (limit_blocks_ + 1) / unit * unit);
}

void Growth::set_limit(uint32_t blocks, uint64_t now) {
  if (std::exchange(limit_blocks_, blocks) == blocks) return;
  // A device that failed is not asked again before its time for the sake of a higher limit.
  complete() ? set_may_grow(false) : Unblock(now);
}

Growth::Place Growth::NextPlace() const {
  if (!gone_.empty()) return gone_.front();
  if (slabs_.empty()) return {.room_blocks = facts_.geometry.max_blocks};
  const SlabRow& last = slabs_[by_block_.back()];
  return {.index = last.index + 1,
          .first_block = last.end_block(),
          .room_blocks = facts_.geometry.max_blocks - last.end_block()};
}

void Growth::ForgetBehindLast() {
  const uint32_t end = by_block_.empty() ? 0 : slabs_[by_block_.back()].end_block();
  std::erase_if(gone_, [end](const Place& place) { return place.first_block >= end; });
}

void Growth::FindGone() {
  const uint32_t unit = facts_.geometry.blocks_in(facts_.geometry.unit_bytes);
  for (size_t i = 1; i < by_block_.size(); ++i) {
    const SlabRow& before = slabs_[by_block_[i - 1]];
    const SlabRow& behind = slabs_[by_block_[i]];
    if (behind.index <= before.index + 1) continue;
    // Nobody knows any more how many blocks each had: whole units, and none more than the largest slab.
    const uint32_t count = behind.index - before.index - 1,
                   units = (behind.first_block - before.end_block()) / unit;
    uint32_t first = before.end_block();
    for (uint32_t k = 0; k < count; ++k) {
      const uint32_t blocks = (units / count + (k < units % count ? 1 : 0)) * unit;
      if (blocks == 0) break;
      gone_.push_back(
          {.index = before.index + 1 + k, .first_block = first, .room_blocks = blocks, .whole = true});
      first += blocks;
    }
  }
}

void Growth::Add(SlabRow row, uint64_t now) {
  row.made_ms = now;
  std::erase_if(gone_, [&row](const Place& place) { return place.index == row.index; });
  slabs_.push_back(std::move(row));
  Reindex();
  growing_ = true;
  moved_ms_ = now;
  own_until_ms_ = own_again_ms_ = 0;
}

void Growth::Reindex() {
  const size_t count = slabs_.size();
  blocks_of_.resize(count);
  lowest_from_.resize(count);
  by_block_.resize(count);
  uint32_t blocks = 0, lowest = UINT32_MAX;
  for (size_t i = 0; i < count; ++i) {
    blocks_of_[i] = blocks += slabs_[i].block_count;
    by_block_[i] = static_cast<uint32_t>(i);
  }
  for (size_t i = count; i-- > 0;) lowest_from_[i] = lowest = std::min(lowest, slabs_[i].first_block);
  std::sort(by_block_.begin(), by_block_.end(),
            [this](uint32_t a, uint32_t b) { return slabs_[a].first_block < slabs_[b].first_block; });
}

bool Growth::in_order() const {
  uint32_t index = 0, end = 0;
  const auto is_next = [&](const SlabRow& row) {
    const bool next = row.index == index && row.first_block == end;
    ++index;
    end = row.end_block();
    return next;
  };
  return std::all_of(slabs_.begin(), slabs_.end(), is_next) && (!leaving_.has_value() || is_next(*leaving_));
}

void Growth::PutInOrder() {
  if (!all_entered() || in_order()) return;
  std::sort(slabs_.begin(), slabs_.end(),
            [](const SlabRow& a, const SlabRow& b) { return a.index < b.index; });
  Reindex();
}

void Growth::EnterNext(uint64_t now) {
  // The null block is no part of the pool's capacity.
  const SlabRow& row = slabs_[entered_];
  LearnAhead();
  const absl::Status status = pool_.Enter({std::max(1u, row.first_block), row.end_block()});
  KVPOOL_CHECK(status.ok(), "space %lu slab %u: %s", facts_.id, row.index, status.ToString().c_str());
  ++entered_;
  moved_ms_ = now;
  SetWatermarks();
  wanted_blocks_ = 0;  // Who wants more asks again.
}

void Growth::Adopt(std::vector<SlabRow> rows, uint64_t now) {
  for (SlabRow& row : rows) Add(std::move(row), now);
  FindGone();
  entered_ = static_cast<uint32_t>(slabs_.size());
  SetWatermarks();
}

void Growth::SetWatermarks() {
  // At least one: a watermark that rounds to nothing would never ask for anything.
  low_blocks_ = std::max<uint32_t>(1, std::ceil(facts_.low_watermark * pool_.capacity()));
  high_blocks_ = std::max<uint32_t>(low_blocks_ + 1, std::ceil(facts_.high_watermark * pool_.capacity()));
  ahead_blocks_ = AheadBlocks();
}

std::vector<SlabRow> Growth::TakeSlabs() {
  KVPOOL_CHECK(closed_, "space %lu is open", facts_.id);
  if (leaving_.has_value()) slabs_.push_back(TakeLeft());
  entered_ = 0;
  std::vector<SlabRow> slabs = std::exchange(slabs_, {});
  Reindex();
  return slabs;
}

uint32_t Growth::Leave(BlockRange blocks, uint64_t now) {
  const auto row = std::find_if(slabs_.begin(), slabs_.end(), [&](const SlabRow& other) {
    return other.first_block == blocks.first && other.end_block() == blocks.end;
  });
  KVPOOL_CHECK(!leaving_.has_value() && all_entered() && row != slabs_.end() && row->index != 0,
               "space %lu: blocks %u to %u leave out of turn", facts_.id, blocks.first, blocks.end - 1);
  const auto place = static_cast<uint32_t>(row - slabs_.begin());
  leaving_ = std::move(*row);
  slabs_.erase(row);
  Reindex();
  --entered_;
  moved_ms_ = now;
  SetWatermarks();
  return place;
}

SlabRow Growth::TakeLeft() {
  SlabRow row = *std::move(leaving_);
  leaving_.reset();
  const Place place = {
      .index = row.index, .first_block = row.first_block, .room_blocks = row.block_count, .whole = true};
  gone_.insert(std::lower_bound(gone_.begin(), gone_.end(), place,
                                [](const Place& a, const Place& b) { return a.index < b.index; }),
               place);
  ForgetBehindLast();
  return row;
}

// -------------------------------------------------------------------------------------- whether to make one

uint32_t Growth::AheadBlocks() const {
  const uint64_t slab = facts_.geometry.blocks_in(facts_.geometry.slab_bytes), capacity = pool_.capacity();
  const uint64_t least = slab / 4, most = std::max(least, std::min(4 * slab, capacity / 4));
  const uint64_t ahead = std::clamp(std::max<uint64_t>(capacity / kAheadShare, learned_blocks_), least, most);
  return std::max(low_blocks_, static_cast<uint32_t>(std::min<uint64_t>(ahead, UINT32_MAX)));
}

void Growth::LearnAhead() {
  if (std::exchange(came_short_, false)) {
    learned_blocks_ = 2 * std::min(ahead_blocks_, UINT32_MAX / 2);
  } else if (spare_blocks() > ahead_blocks_ / 2) {
    learned_blocks_ /= 2;
  }
}

uint32_t Growth::spare_blocks() const {
  const uint32_t free = free_blocks();
  return promises_count_ ? free - std::min(free, pool_.promised()) : free;
}

bool Growth::short_of_blocks() const {
  return uint64_t{spare_blocks()} + coming_blocks() < std::max(ahead_blocks_, wanted_blocks_);
}

bool Growth::has_unused_slab() const {
  const uint64_t slab = facts_.geometry.blocks_in(facts_.geometry.slab_bytes);
  return uint64_t{spare_blocks()} + coming_blocks() >= std::max(ahead_blocks_, wanted_blocks_) + slab;
}

void Growth::set_may_grow(bool may_grow) {
  may_grow_ = may_grow;
  EndIfDone();
}

void Growth::Block(uint64_t retry_ms) {
  retry_ms_ = retry_ms;
  set_may_grow(false);
}

void Growth::Unblock(uint64_t now) {
  if (now >= retry_ms_) set_may_grow(true);
}

void Growth::EndIfDone() {
  if (!WantsSlab()) growing_ = false;
}

void Growth::Review(uint64_t now) {
  // Others gave back meanwhile, or it is on its way.
  if (uint64_t{spare_blocks()} + coming_blocks() >= wanted_blocks_) wanted_blocks_ = 0;
  if (growing_ || !WantsSlab()) return;
  growing_ = true;
  moved_ms_ = now;
}

// -------------------------------------------------------------------------------------------------- blocks

bool Growth::WaitForOwn(uint64_t now) {
  if (!own_elsewhere_ || !blocked() || leaving_.has_value()) return false;
  if (waits_for_own(now)) return true;
  if (now < own_again_ms_) return false;
  own_until_ms_ = now + kOwnWaitMs;
  own_again_ms_ = own_until_ms_ + kOwnPauseMs;
  return true;
}

bool Growth::GrowFor(uint32_t blocks, uint64_t now) {
  const bool can_grow = may_grow() || !all_entered();
  if (!can_grow && !WaitForOwn(now)) return false;
  Want(blocks);
  came_short_ = true;
  if (!can_grow) return true;
  if (!std::exchange(growing_, true)) moved_ms_ = now;
  return now - moved_ms_ < kGrowthStallMs;
}

SpaceLease Growth::Lease(Holder session, uint64_t now, uint32_t count, uint32_t min,
                         std::vector<BlockRef>* out, uint32_t most) {
  const uint32_t wanted = std::min(count, pool_.cap_room(session));
  const uint32_t credit = pool_.credit_room(session);
  uint32_t at_once = std::min({wanted, free_blocks(), credit});
  const uint64_t to_come = std::max(max_blocks() - 1, pool_.capacity()) - pool_.capacity();
  // Nothing is missing, or slabs can't bring what is.
  if (at_once == wanted || wanted < min || credit + to_come < min) {
    return {.outcome = pool_.Lease(session, now, count, min, out, most)};
  }
  if (at_once < min) at_once = 0;
  if (!GrowFor(wanted - at_once, now)) return {.outcome = pool_.Lease(session, now, count, min, out, most)};
  if (credit < wanted) CountPromises();
  SpaceLease lease{.growing = true};
  if (at_once > 0) lease.outcome = pool_.Lease(session, now, at_once, at_once, out, most);
  return lease;
}

}  // namespace kvpool
