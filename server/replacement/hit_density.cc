#include "server/replacement/hit_density.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "server/replacement/offer_heap.h"

namespace kvpool {
namespace {

// Cells that are looked at with one block inserted, at most.
constexpr uint64_t kMostRefreshed = 8;

std::vector<int> Groups() {
  std::vector<int> groups;
  for (int c = 0; c < UseClasses::kClasses; ++c) groups.push_back(UseClasses::GroupOf(c));
  return groups;
}

}  // namespace

HitDensityPolicy::HitDensityPolicy(const PolicyOptions& options, ReuseModel::Prior prior)
    : classes_(options),
      model_(Groups(), std::move(prior)),
      places_(options.max_blocks),
      epoch_blocks_(std::max<uint64_t>(64, options.max_blocks / 64)) {}

void HitDensityPolicy::OnInsert(BlockId block, const Content& content) {
  const uint32_t b = kvpool::Index(block);
  classes_.OnInsert(b, content, inserted_);
  model_.EndWait(content.hash, inserted_);
  ++inserted_;
  model_.SetBlocks(classes_.resident());
  model_.Step(inserted_, content.now_ms);
  RefreshCells();
}

void HitDensityPolicy::OnHit(BlockId block, uint64_t) {
  const uint32_t b = kvpool::Index(block);
  classes_.OnHit(b, inserted_);
  model_.EndWait(classes_.hash(b), inserted_);
}

void HitDensityPolicy::OnUsed(BlockId block, uint64_t) {
  const uint32_t b = kvpool::Index(block);
  const int cls = classes_.OnUsed(b, inserted_);
  places_[b].cls = static_cast<uint16_t>(cls);
  model_.BeginWait(classes_.hash(b), cls, inserted_);
}

double HitDensityPolicy::IndexOf(CellKey key) const {
  const uint64_t middle = (key >> 16) * epoch_blocks_ + epoch_blocks_ / 2;
  return model_.Index(static_cast<int>(key & 0xffff), inserted_ > middle ? inserted_ - middle : 0);
}

void HitDensityPolicy::OnOffer(BlockId block) {
  const uint32_t b = kvpool::Index(block);
  const auto [it, is_new] = cells_.try_emplace(CellOf(b));
  Cell& cell = it->second;
  if (is_new) {
    cell.index = IndexOf(it->first);
    order_.emplace(cell.index, it->first);
  }
  Place& place = places_[b];
  place.older = cell.newest;
  place.newer = 0;
  (cell.newest == 0 ? cell.oldest : places_[cell.newest].newer) = b;
  cell.newest = b;
  ++offered_;
}

void HitDensityPolicy::OnWithdraw(BlockId block) {
  const uint32_t b = kvpool::Index(block);
  const Place& place = places_[b];
  const auto it = cells_.find(CellOf(b));
  Cell& cell = it->second;
  (place.older == 0 ? cell.oldest : places_[place.older].newer) = place.newer;
  (place.newer == 0 ? cell.newest : places_[place.newer].older) = place.older;
  --offered_;
  if (cell.oldest != 0) return;
  order_.erase({cell.index, it->first});
  cells_.erase(it);
}

Rank HitDensityPolicy::Standing(BlockId block) const {
  const uint32_t b = kvpool::Index(block);
  return {.major = RankOf(IndexOf(CellOf(b))), .minor = classes_.used(b)};
}

BlockId HitDensityPolicy::Victim(uint64_t) {
  return BlockId{order_.empty() ? 0 : cells_.find(order_.begin()->second)->second.oldest};
}

void HitDensityPolicy::Prefetch(BlockId block) const {
  classes_.Prefetch(kvpool::Index(block));
  places_.Prefetch(kvpool::Index(block));
}

// All cells in four epochs, if they are not too many: ages are told apart by a quarter.
void HitDensityPolicy::RefreshCells() {
  const uint64_t cells = std::min(kMostRefreshed, cells_.size() / (4 * epoch_blocks_) + 1);
  auto it = cells_.upper_bound(refreshed_);
  for (uint64_t i = 0; i < cells; ++i, ++it) {
    if (it == cells_.end()) {
      refreshed_ = 0;
      return;
    }
    refreshed_ = it->first;
    const double index = IndexOf(it->first);
    if (index == it->second.index) continue;
    order_.erase({it->second.index, it->first});
    it->second.index = index;
    order_.emplace(index, it->first);
  }
}

}  // namespace kvpool
