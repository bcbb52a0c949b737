// Least hit density: the block leaves that promises the fewest hits for the room and time it takes.
#ifndef KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_
#define KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "server/pool/virtual_array.h"
#include "server/replacement/policy.h"
#include "server/replacement/reuse_model.h"
#include "server/replacement/use_classes.h"

namespace kvpool {

// After LHD (Beckmann, Chen and Cidon, NSDI 2018): what a block promises is learned by class (use_classes.h) and
// age (reuse_model.h), from what comes back while it runs.
//
// Blocks on offer are sorted into cells by class and by the epoch of their last use, an epoch being a 64th of the
// blocks that the pool may have; all of a cell have one index. With each block inserted some cells' indices are
// computed anew and a step is learned: nothing is ever done to all of them at once.
class HitDensityPolicy : public ReplacementPolicy {
 public:
  explicit HitDensityPolicy(const PolicyOptions& options) : HitDensityPolicy(options, {}) {}

  std::string_view name() const override { return "hit_density"; }
  void OnInsert(BlockId block, const Content& content) final;
  void OnHit(BlockId block, uint64_t now_ms) final;
  void OnUsed(BlockId block, uint64_t now_ms) final;
  void OnOffer(BlockId block) final;
  void OnWithdraw(BlockId block) final;
  void OnEvict(BlockId block) final { classes_.OnEvict(kvpool::Index(block)); }
  BlockId Victim(uint64_t now_ms) final;
  Rank Standing(BlockId block) const final;
  void Prefetch(BlockId block) const final;
  uint32_t offered() const final { return offered_; }
  // And ReuseModel::kBytes in all.
  double bytes_per_block() const final { return sizeof(Place) + UseClasses::kBytesPerBlock; }

 protected:
  HitDensityPolicy(const PolicyOptions& options, ReuseModel::Prior prior);

 private:
  struct Place {
    uint32_t older, newer;  // In its cell.
    uint16_t cls;
  };
  struct Cell {
    uint32_t oldest = 0, newest = 0;
    double index = 0;
  };
  using CellKey = uint64_t;  // Epoch << 16 | class.

  CellKey CellOf(uint32_t block) const {
    return classes_.used(block) / epoch_blocks_ << 16 | places_[block].cls;
  }
  double IndexOf(CellKey key) const;
  void RefreshCells();

  UseClasses classes_;
  ReuseModel model_;
  VirtualArray<Place> places_;
  absl::btree_map<CellKey, Cell> cells_;
  absl::btree_set<std::pair<double, CellKey>> order_;  // Least index first.
  const uint64_t epoch_blocks_;
  CellKey refreshed_ = 0;  // The cells up to this one were, in this round.
  uint64_t inserted_ = 0;
  uint32_t offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_
