#include "server/replacement/hit_density.h"

#include <algorithm>
#include <bit>

#include "server/replacement/offer_heap.h"

namespace kvpool {
namespace {

// Inserted blocks between two lessons, at least.
constexpr uint64_t kLearnEvery = 2048;
// Contents that left and are remembered: as many as there are blocks, and at least so many.
constexpr uint32_t kLeastPast = 1u << 16;

}  // namespace

HitDensityPolicy::HitDensityPolicy(const PolicyOptions& options)
    : nodes_(options.max_blocks),
      model_(kClasses),
      epoch_blocks_(std::max<uint64_t>(64, options.max_blocks / 64)) {}

int HitDensityPolicy::ClassOf(const Node& node) const {
  const uint32_t run_length = run_ - node.latest < kRuns ? run_lengths_[node.latest % kRuns] : UINT16_MAX;
  const int length = std::min<int>(std::bit_width((run_length + 1) / 4), kLengthClasses - 1);
  if (node.hits == 0) {
    const int turn = std::min<int>(node.turn, kTurnClasses - 1);
    const int tail = node.place + 1u == run_length ? 1 : 0;
    return (turn * kLengthClasses + length) * 2 + tail;
  }
  const int hits = (node.hits < 5 ? node.hits : node.hits < 9 ? 5 : 6) - 1;
  const int gap = std::min<int>(std::bit_width(node.gap / 1024u), kGapClasses - 1);
  return kUnhitClasses + (hits * kGapClasses + gap) * kHitLengthClasses +
         std::min(length, kHitLengthClasses - 1);
}

void HitDensityPolicy::OnInsert(BlockId block, const Content& content) {
  const uint32_t b = kvpool::Index(block), parent = kvpool::Index(content.parent);
  Node& node = nodes_[b];
  const Node& front = nodes_[parent];
  node = {.hash = content.hash, .used = inserted_, .parent = parent};
  const bool follows = parent != 0 && parent == last_inserted_ && !front.waits;
  const uint64_t* const past = past_.Find(node.hash);
  if (past != nullptr) {
    // It is found again, only not here.
    node.hits = static_cast<uint8_t>(std::min<uint64_t>(*past % 256 + 1, 255));
    node.turn = static_cast<uint8_t>(*past >> 8);
    node.gap = static_cast<uint32_t>(std::min<uint64_t>(inserted_ - (*past >> 16), UINT32_MAX));
    past_.Remove(node.hash);
    if (!follows || front.hits == 0) run_lengths_[++run_ % kRuns] = 0;
  } else if (follows && front.hits == 0) {
    node.turn = front.turn;
    node.place = static_cast<uint16_t>(std::min(front.place + 1, 0xfffe));
    run_lengths_[run_ % kRuns] = static_cast<uint16_t>(node.place + 1);
  } else {
    node.turn = parent == 0 ? 0 : static_cast<uint8_t>(std::min(front.turn + 1, 255));
    run_lengths_[++run_ % kRuns] = 1;
  }
  node.run = node.latest = run_;
  last_inserted_ = b;
  model_.EndWait(node.hash, inserted_);
  ++inserted_;
  ++resident_;
  if (inserted_ >= next_tick_) Tick();
}

void HitDensityPolicy::OnHit(BlockId block, uint64_t) {
  Node& node = nodes_[kvpool::Index(block)];
  node.hits = static_cast<uint8_t>(std::min(node.hits + 1, 255));
  if (node.waits) node.gap = static_cast<uint32_t>(std::min<uint64_t>(inserted_ - node.used, UINT32_MAX));
  node.waits = false;
  model_.EndWait(node.hash, inserted_);
}

void HitDensityPolicy::OnUsed(BlockId block, uint64_t) {
  Node& node = nodes_[kvpool::Index(block)];
  node.used = inserted_;
  Node& parent = nodes_[node.parent];
  if (static_cast<int32_t>(node.latest - parent.latest) > 0) parent.latest = node.latest;
  node.cls = static_cast<uint8_t>(ClassOf(node));
  node.waits = true;
  model_.BeginWait(node.hash, node.cls, inserted_);
}

void HitDensityPolicy::OnEvict(BlockId block) {
  const Node& node = nodes_[kvpool::Index(block)];
  past_.Add(node.hash, node.used << 16 | uint64_t{node.turn} << 8 | node.hits);
  past_.Trim(std::max(kLeastPast, resident_));
  --resident_;
}

double HitDensityPolicy::IndexOf(CellKey key) const {
  const uint64_t middle = (key >> 8) * epoch_blocks_ + epoch_blocks_ / 2;
  return model_.Index(static_cast<int>(key & 0xff), inserted_ > middle ? inserted_ - middle : 0);
}

void HitDensityPolicy::OnOffer(BlockId block) {
  const uint32_t b = kvpool::Index(block);
  Node& node = nodes_[b];
  const auto [it, is_new] = cells_.try_emplace(CellOf(node));
  Cell& cell = it->second;
  if (is_new) {
    cell.index = IndexOf(it->first);
    order_.emplace(cell.index, it->first);
  }
  node.older = cell.newest;
  node.newer = 0;
  (cell.newest == 0 ? cell.oldest : nodes_[cell.newest].newer) = b;
  cell.newest = b;
  ++offered_;
}

void HitDensityPolicy::OnWithdraw(BlockId block) {
  const Node& node = nodes_[kvpool::Index(block)];
  const auto it = cells_.find(CellOf(node));
  Cell& cell = it->second;
  (node.older == 0 ? cell.oldest : nodes_[node.older].newer) = node.newer;
  (node.newer == 0 ? cell.newest : nodes_[node.newer].older) = node.older;
  --offered_;
  if (cell.oldest != 0) return;
  order_.erase({cell.index, it->first});
  cells_.erase(it);
}

Rank HitDensityPolicy::Standing(BlockId block) const {
  const Node& node = nodes_[kvpool::Index(block)];
  return {.major = RankOf(IndexOf(CellOf(node))), .minor = node.used};
}

BlockId HitDensityPolicy::Victim(uint64_t) {
  return BlockId{order_.empty() ? 0 : cells_.find(order_.begin()->second)->second.oldest};
}

void HitDensityPolicy::Tick() {
  next_tick_ = inserted_ + epoch_blocks_;
  model_.SetBlocks(resident_);
  if (inserted_ >= next_learning_) {
    model_.Learn(inserted_);
    next_learning_ = inserted_ + std::max<uint64_t>(epoch_blocks_, kLearnEvery);
  }
  order_.clear();
  for (auto& [key, cell] : cells_) {
    cell.index = IndexOf(key);
    order_.emplace(cell.index, key);
  }
}

}  // namespace kvpool
