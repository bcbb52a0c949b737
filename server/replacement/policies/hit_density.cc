#include "server/replacement/policies/hit_density.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

// The pace of learning begins with one step per inserted block and halves after so many rounds, down to one
// step per eight blocks. The first rounds teach the most; later ones spread their cost over more blocks.
constexpr uint32_t kRoundsOfAPace = 16;
constexpr uint32_t kSlowestPace = 3;
// Slots swept per inserted block, in groups of so many. At half the pace every other group is looked at,
// others in each round, and counts twice.
constexpr uint32_t kSweptSlots = 16, kGroupSlots = 4;
// Inserts between two refreshes of cells, and the most cells of one refresh.
constexpr uint64_t kRefreshBlocks = 8, kMostRefreshed = 16;

const std::vector<int>& Groups() {
  static const auto groups = [] {
    std::vector<int> of(UseClasses::kClasses);
    for (int c = 0; c < UseClasses::kClasses; ++c) of[c] = UseClasses::GroupOf(c);
    return of;
  }();
  return groups;
}

}  // namespace

HitDensityPolicy::HitDensityPolicy(const PolicyOptions& options, ReuseModel::Prior prior)
    : classes_(options),
      model_(Groups(), std::move(prior)),
      places_(options.max_blocks),
      cell_places_(size_t{options.max_blocks} + 1),
      epoch_blocks_(std::max<uint64_t>(64, options.max_blocks / 64)) {}

void HitDensityPolicy::OnInsert(BlockId block, const Content& content) {
  const auto ended = classes_.OnInsert(kvpool::Index(block), content, inserted_);
  if (ended.has_value()) model_.Hit(ended->cls, inserted_ - ended->since);
  ++inserted_;
  if (inserted_ % (1u << pace()) == 0) Learn(content.now_ms);
  if (inserted_ % kRefreshBlocks == 0) RefreshCells();
}

void HitDensityPolicy::OnHit(BlockId block, uint64_t) {
  const auto ended = classes_.OnHit(kvpool::Index(block), inserted_);
  if (ended.has_value()) model_.Hit(ended->cls, inserted_ - ended->since);
}

void HitDensityPolicy::OnUsed(BlockId block, uint64_t) {
  model_.Begin(classes_.OnUsed(kvpool::Index(block), inserted_));
}

void HitDensityPolicy::OnEvict(BlockId block) {
  classes_.OnEvict(kvpool::Index(block), inserted_,
                   [this](const UseClasses::Wait& wait) { model_.Forget(wait.cls, inserted_ - wait.since); });
}

// One step: of the sweep over open waits, then a class at a time.
void HitDensityPolicy::Learn(uint64_t now_ms) {
  model_.SetBlocks(classes_.resident());
  if (swept_ < classes_.slots()) {
    const uint32_t end = std::min(swept_ + (kSweptSlots << pace()), classes_.slots());
    for (; swept_ < end; swept_ += kGroupSlots << pace()) {
      for (uint32_t slot = swept_; slot < std::min(swept_ + kGroupSlots, end); ++slot) {
        const auto wait = classes_.InSlot(slot, inserted_);
        // A wait younger than the sweep counts in the next one.
        if (wait.has_value() && wait->since <= sweep_began_) {
          model_.Show(wait->cls, inserted_ - wait->since, 1 << pace());
        }
      }
    }
    for (uint32_t slot = swept_; slot < swept_ + (kSweptSlots << pace()); slot += kGroupSlots << pace()) {
      classes_.PrefetchSlots(slot, kGroupSlots);
    }
  } else if (!model_.LearnNext()) {
    model_.BeginRound(inserted_, now_ms);
    ++rounds_;
    swept_ = kGroupSlots * (rounds_ % (1u << pace()));
    sweep_began_ = inserted_;
  }
}

uint32_t HitDensityPolicy::pace() const { return std::min(kSlowestPace, rounds_ / kRoundsOfAPace); }

double HitDensityPolicy::IndexOf(CellKey key) const {
  const uint64_t middle = (key >> 16) * epoch_blocks_ + epoch_blocks_ / 2;
  return model_.Index(static_cast<int>(key & 0xffff), inserted_ > middle ? inserted_ - middle : 0);
}

uint32_t HitDensityPolicy::CellOf(CellKey key) {
  if (cells_[latest_cell_].oldest != 0 && cells_[latest_cell_].key == key) return latest_cell_;
  const auto [it, is_new] = cell_of_.try_emplace(key);
  if (is_new) {
    if (unused_cells_.empty()) {
      unused_cells_.push_back(static_cast<uint32_t>(cells_.size()));
      cells_.emplace_back();
    }
    it->second = unused_cells_.back();
    unused_cells_.pop_back();
    Cell& cell = cells_[it->second];
    cell = {.key = key, .index = IndexOf(key)};
    order_.Insert(it->second, {RankOf(cell.index), key});
  }
  return latest_cell_ = it->second;
}

void HitDensityPolicy::OnOffer(BlockId block) {
  const uint32_t b = kvpool::Index(block);
  const uint32_t c = CellOf(KeyOf(b));
  Cell& cell = cells_[c];
  places_[b] = {.older = cell.newest, .newer = 0, .cell = c};
  (cell.newest == 0 ? cell.oldest : places_[cell.newest].newer) = b;
  cell.newest = b;
  ++offered_;
}

void HitDensityPolicy::OnWithdraw(BlockId block) {
  const Place& place = places_[kvpool::Index(block)];
  Cell& cell = cells_[place.cell];
  (place.older == 0 ? cell.oldest : places_[place.older].newer) = place.newer;
  (place.newer == 0 ? cell.newest : places_[place.newer].older) = place.older;
  --offered_;
  if (cell.oldest != 0) return;
  order_.Remove(place.cell);
  cell_of_.erase(cell.key);
  unused_cells_.push_back(place.cell);
}

Rank HitDensityPolicy::Standing(BlockId block) const {
  const uint32_t b = kvpool::Index(block);
  return {.major = RankOf(IndexOf(KeyOf(b))), .minor = classes_.used(b)};
}

BlockId HitDensityPolicy::Victim(uint64_t) { return BlockId{cells_[order_.first()].oldest}; }

size_t HitDensityPolicy::Upcoming(absl::Span<BlockId> blocks) const {
  std::array<BlockId, 16> cells;
  const size_t most = order_.NearTop(absl::MakeSpan(cells));
  size_t n = 0;
  for (size_t cell = 0; cell < most; ++cell) {
    for (uint32_t b = cells_[kvpool::Index(cells[cell])].oldest; b != 0 && n < blocks.size();
         b = places_[b].newer) {
      blocks[n++] = BlockId{b};
    }
  }
  return n;
}

void HitDensityPolicy::Prefetch(BlockId block, uint64_t hash) const {
  classes_.Prefetch(kvpool::Index(block), hash);
  places_.Prefetch(kvpool::Index(block));
}

// Refreshes every cell once in four epochs, unless there are too many; ages are a quarter apart.
void HitDensityPolicy::RefreshCells() {
  const uint64_t cells = std::min(kMostRefreshed, kRefreshBlocks * cells_.size() / (4 * epoch_blocks_) + 1);
  for (uint64_t i = 0; i < cells; ++i) {
    refreshed_ = refreshed_ + 1 < cells_.size() ? refreshed_ + 1 : 0;
    Cell& cell = cells_[refreshed_];
    if (cell.oldest == 0) continue;
    const double index = IndexOf(cell.key);
    if (index == cell.index) continue;
    cell.index = index;
    order_.Remove(refreshed_);
    order_.Insert(refreshed_, {RankOf(index), cell.key});
  }
}

}  // namespace kvpool
