// Least hit density: the block leaves that promises the fewest hits for the room and time it takes.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_HIT_DENSITY_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_HIT_DENSITY_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/base/virtual_array.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/parts/reuse_model.h"
#include "server/replacement/parts/use_classes.h"
#include "server/replacement/policy.h"

namespace kvpool {

// After LHD (Beckmann, Chen and Cidon, NSDI 2018): the policy learns while it runs what blocks promise, by
// class (use_classes.h) and age (reuse_model.h).
//
// Blocks on offer are sorted into cells by class and by the epoch of their last use; an epoch is a 64th of
// the blocks that the pool may have. All blocks of a cell have one index. Every few inserts one step of
// learning is done and the indices of some cells are computed anew, so no call ever visits all of them.
class HitDensityPolicy : public ReplacementPolicy {
 public:
  explicit HitDensityPolicy(const PolicyOptions& options) : HitDensityPolicy(options, {}) {}

  std::string_view name() const override { return "hit_density"; }
  void OnInsert(BlockId block, const Content& content) final;
  void OnHit(BlockId block, uint64_t now_ms) final;
  void OnUsed(BlockId block, uint64_t now_ms) final;
  void OnOffer(BlockId block) final;
  void OnWithdraw(BlockId block) final;
  void OnEvict(BlockId block) final;
  BlockId Victim(uint64_t now_ms) final;
  // Those of one cell.
  size_t Upcoming(absl::Span<BlockId> blocks) const final;
  Rank Standing(BlockId block) const final;
  void Prefetch(BlockId block, uint64_t hash) const final;
  uint32_t offered() const final { return offered_; }
  double bytes_per_block() const final { return sizeof(Place) + UseClasses::kBytesPerBlock; }

 protected:
  HitDensityPolicy(const PolicyOptions& options, ReuseModel::Prior prior);

 private:
  struct Place {
    uint32_t older, newer;  // neighbours in its cell
    uint32_t cell;
  };
  using CellKey = uint64_t;  // epoch << 16 | class
  struct Cell {
    CellKey key = 0;
    double index = 0;
    uint32_t oldest = 0, newest = 0;  // 0: the cell is unused.
  };

  CellKey KeyOf(uint32_t block) const {
    return classes_.used(block) / epoch_blocks_ << 16 | static_cast<CellKey>(classes_.cls(block));
  }
  uint32_t CellOf(CellKey key);
  double IndexOf(CellKey key) const;
  uint32_t pace() const;
  void Learn(uint64_t now_ms);
  void RefreshCells();

  UseClasses classes_;
  ReuseModel model_;
  VirtualArray<Place> places_;
  // The cells, numbered from 1; their numbers by key; the unused ones; and the used ones, least index first.
  std::vector<Cell> cells_{1};
  absl::flat_hash_map<CellKey, uint32_t> cell_of_;
  std::vector<uint32_t> unused_cells_;
  HeapPlaces cell_places_;
  OfferHeap order_{&cell_places_};
  const uint64_t epoch_blocks_;
  uint32_t latest_cell_ = 0;  // The next block is most often of the same cell.
  uint32_t refreshed_ = 0;    // The cell that was refreshed last.

  uint32_t rounds_ = 0;       // Rounds of learning.
  uint32_t swept_ = 0;        // Slots of classes_ swept in this round.
  uint64_t sweep_began_ = 0;  // inserted_ when this sweep began
  uint64_t inserted_ = 0;
  uint32_t offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_HIT_DENSITY_H_
