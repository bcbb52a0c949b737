// Least hit density: the block leaves that promises the fewest hits for the room and time it takes.
#ifndef KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_
#define KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "server/pool/virtual_array.h"
#include "server/replacement/policy.h"
#include "server/replacement/reuse_model.h"

namespace kvpool {

// After LHD (Beckmann, Chen and Cidon, NSDI 2018): what a block promises is learned by class and age, see
// reuse_model.h. Its class is what can be known of it when a use ends:
//
//   never found again   how often the prompt in front of it had been carried on when it was computed; how many
//                       blocks were new with it; whether it was the last of them, which the next prompt
//                       seldom repeats
//   found again         how often; how long it had waited the last time; how many blocks were new behind it in
//                       its latest use
//
// A content that left is remembered for a while, so that coming back counts as being found again.
//
// Blocks on offer are sorted into cells by class and by the epoch of their last use; all of a cell have one
// index. It is computed anew once an epoch, an epoch being a 64th of the blocks inserted.
class HitDensityPolicy final : public ReplacementPolicy {
 public:
  explicit HitDensityPolicy(const PolicyOptions& options);

  std::string_view name() const override { return "hit_density"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t now_ms) override;
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  Rank Standing(BlockId block) const override;
  void Prefetch(BlockId block) const override { nodes_.Prefetch(kvpool::Index(block)); }
  uint32_t offered() const override { return offered_; }
  // And ReuseModel::kBytes in all; of small pools more, as 65,536 contents that left are remembered.
  double bytes_per_block() const override { return sizeof(Node) + GhostList::kBytesPerGhost; }

 private:
  static constexpr int kTurnClasses = 3, kLengthClasses = 6,
                       kUnhitClasses = kTurnClasses * kLengthClasses * 2;
  static constexpr int kHitClasses = 6, kGapClasses = 6, kHitLengthClasses = 3;
  static constexpr int kClasses = kUnhitClasses + kHitClasses * kGapClasses * kHitLengthClasses;
  static constexpr uint32_t kRuns = 4096;

  struct Node {
    uint64_t hash;
    uint64_t used;          // In blocks inserted until then.
    uint32_t older, newer;  // In its cell.
    uint32_t parent;
    uint32_t run;     // The run of blocks that it was computed in,
    uint32_t latest;  // and the latest one behind it.
    uint32_t gap;     // Between its last use but one and its last hit.
    uint16_t place;   // In its own.
    uint8_t hits, turn;
    uint8_t cls;
    bool waits;  // A use ended and it was not found again since.
  };
  struct Cell {
    uint32_t oldest = 0, newest = 0;
    double index = 0;
  };
  using CellKey = uint64_t;  // Epoch << 8 | class.

  int ClassOf(const Node& node) const;
  CellKey CellOf(const Node& node) const { return node.used / epoch_blocks_ << 8 | node.cls; }
  double IndexOf(CellKey key) const;
  void Tick();

  VirtualArray<Node> nodes_;
  ReuseModel model_;
  GhostList past_;  // Hits and last use of what left.
  absl::btree_map<CellKey, Cell> cells_;
  absl::btree_set<std::pair<double, CellKey>> order_;  // Least index first.
  std::array<uint16_t, kRuns> run_lengths_{};          // Of the latest runs.
  uint64_t inserted_ = 0;
  uint64_t epoch_blocks_ = 64;
  uint64_t next_tick_ = 0, next_learning_ = 0;
  uint32_t last_inserted_ = 0, run_ = 0;
  uint32_t resident_ = 0, offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_HIT_DENSITY_H_
