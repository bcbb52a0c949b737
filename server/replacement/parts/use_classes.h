// Sorts uses of blocks into some thousand classes, by all that can be known of a block when a use of it ends.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_USE_CLASSES_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_USE_CLASSES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "server/base/virtual_array.h"
#include "server/replacement/parts/past_contents.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Time is counted in inserted blocks. Blocks that are computed one after another are a *run*: the part of a
// prompt that no earlier prompt had. Lengths count units of about 512 tokens. What makes a class:
//
//   never found again   the turn of its run: how often the prompt in front of it had been continued, not
//                       counting blocks that many share
//                       the lengths of its prompt and of its run
//                       whether it is its run's last block, which the next prompt seldom repeats
//   found again         how often
//                       how long it had waited the last time
//                       the lengths of the latest run behind it, and of the prompt up to there
//
// A use that ends begins a *wait*, which has the class that the block has then and ends when the content is
// asked for again. A content that left is remembered for a while: its wait goes on, and if it comes back it
// counts as found again.
class UseClasses {
 public:
  static constexpr int kTurns = 6, kTotals = 12, kFresh = 4;
  static constexpr int kHits = 6, kGaps = 6, kHitFresh = 3, kHitTotals = 4;
  static constexpr int kUnhit = kTurns * kTotals * kFresh * 2;
  static constexpr int kClasses = kUnhit + kHits * kGaps * kHitFresh * kHitTotals;
  // Groups of similar classes: by turn, a coarser length and whether it is the last block; or by
  // hits and wait.

  // What a class says of a use.
  struct Use {
    int turn = 0, total = 0, fresh = 0, last = 0;         // set where hits == 0
    int hits = 0, gap = 0, hit_fresh = 0, hit_total = 0;  // set where hits > 0
  };
  static Use UseOf(int cls);
  static int GroupOf(int cls);

  explicit UseClasses(const PolicyOptions& options);

  struct Wait {
    int cls;
    uint64_t since;
  };

  // The events of a ReplacementPolicy, at times that never fall. OnInsert and OnHit answer the wait
  // that they end.
  std::optional<Wait> OnInsert(uint32_t block, const Content& content, uint64_t now);
  std::optional<Wait> OnHit(uint32_t block, uint64_t now);
  // Answers the class of the use.
  int OnUsed(uint32_t block, uint64_t now);
  // `forgotten` is told of each wait that is no longer watched.
  void OnEvict(uint32_t block, uint64_t now, absl::FunctionRef<void(const Wait&)> forgotten);

  // All open waits, for a walk in steps: they are in slots [0, slots()), in no meaningful order.
  uint32_t slots() const { return highest_ + 1 + past_.slots(); }
  std::optional<Wait> InSlot(uint32_t slot, uint64_t now) const;
  // So few, from `slot` on, that their ends are in all cache lines of theirs.
  void PrefetchSlots(uint32_t slot, uint32_t count) const {
    for (const uint32_t end : {slot, slot + count - 1}) {
      if (end < slots()) end <= highest_ ? nodes_.Prefetch(end) : past_.PrefetchSlot(end - highest_ - 1);
    }
  }

  int cls(uint32_t block) const { return nodes_[block].cls; }
  uint64_t used(uint32_t block) const { return nodes_[block].used; }
  uint32_t resident() const { return resident_; }
  void Prefetch(uint32_t block, uint64_t hash) const {
    nodes_.Prefetch(block);
    past_.Prefetch(hash);
  }
  // Small pools take more, as at least 16,384 contents that left are remembered.
  static constexpr size_t kNodeBytes = 40;
  static constexpr double kBytesPerBlock = kNodeBytes + PastContents::kBytesPerContent;

 private:
  static constexpr uint32_t kRuns = 4096;

  struct Node {
    uint64_t hash;
    uint64_t used;  // When its last use ended.
    uint32_t parent;
    // The run that it was computed in, and the latest one behind it.
    uint32_t run;
    uint32_t latest;
    uint32_t depth;  // How many blocks are in front of it.
    uint16_t cls;    // The class of its last use.
    uint8_t hits, turn;
    // The wait that its last hit ended, in the steps of a class.
    uint8_t gap;
    // True if a use has ended and the block was not found again since.
    bool waits;
  };
  static_assert(sizeof(Node) == kNodeBytes);
  struct Run {
    uint32_t front = 0, length = 0;
    bool open = false;  // True until a use of one of its blocks ends.
  };

  void BeginRun(uint32_t front, uint32_t length) { runs_[++run_ % kRuns] = {front, length, true}; }
  int ClassOf(const Node& node) const;
  static uint8_t TurnBehind(const Node& front);
  static std::optional<Wait> WaitOf(const PastContents::Past& past, uint64_t now);

  const uint32_t blocks_per_unit_;
  VirtualArray<Node> nodes_;
  // Contents that left, with class, hits and turn as their number.
  PastContents past_;
  // The latest runs.
  std::array<Run, kRuns> runs_{};
  uint32_t run_ = 0;
  uint32_t resident_ = 0, highest_ = 0;
  uint64_t evicted_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_USE_CLASSES_H_
