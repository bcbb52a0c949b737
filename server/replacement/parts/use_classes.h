// What can be known of a block when a use of it ends, as one of some thousand classes.
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

// Time is counted in blocks inserted. Blocks that are computed one behind the other are a *run*: what a prompt
// had that none before it had. Lengths count units of about 512 tokens.
//
//   never found again   the turn of its run, which is how often the prompt in front had been carried on, not
//                       counting what many share; how long the prompt is, and the run; whether it is the run's
//                       last block, which the next prompt seldom repeats
//   found again         how often; how long it had waited the last time; how long the latest run behind it is,
//                       and how long the prompt up to there
//
// A use that ends begins a *wait*, of the block's class then. It ends when the content is asked for again; one that
// left is remembered for a while, so its wait goes on, and coming back counts as being found again.
class UseClasses {
 public:
  static constexpr int kTurns = 6, kTotals = 12, kFresh = 4;
  static constexpr int kHits = 6, kGaps = 6, kHitFresh = 3, kHitTotals = 4;
  static constexpr int kUnhit = kTurns * kTotals * kFresh * 2;
  static constexpr int kClasses = kUnhit + kHits * kGaps * kHitFresh * kHitTotals;
  // Classes that are alike: by turn, a coarser length and whether it is the last; by hits and wait.
  static constexpr int kGroups = kTurns * 3 * 2 + kHits * kGaps;

  // What a class says.
  struct Use {
    int turn = 0, total = 0, fresh = 0, last = 0;  // Of what was never found again: hits is 0.
    int hits = 0, gap = 0, hit_fresh = 0, hit_total = 0;
  };
  static Use UseOf(int cls);
  static int GroupOf(int cls);

  explicit UseClasses(const PolicyOptions& options);

  struct Wait {
    int cls;
    uint64_t since;
  };

  // As ReplacementPolicy's, at a time that does not fall. Of OnInsert and OnHit: the wait that this ends.
  std::optional<Wait> OnInsert(uint32_t block, const Content& content, uint64_t now);
  std::optional<Wait> OnHit(uint32_t block, uint64_t now);
  // Answers its class.
  int OnUsed(uint32_t block, uint64_t now);
  // `forgotten` is told of each wait that is no longer watched.
  void OnEvict(uint32_t block, uint64_t now, absl::FunctionRef<void(const Wait&)> forgotten);

  // All that wait, for a walk in steps: those there are in slots [0, slots()), in no order that means anything.
  uint32_t slots() const { return highest_ + 1 + past_.slots(); }
  std::optional<Wait> InSlot(uint32_t slot, uint64_t now) const;

  int cls(uint32_t block) const { return nodes_[block].cls; }
  uint64_t used(uint32_t block) const { return nodes_[block].used; }
  uint32_t resident() const { return resident_; }
  void Prefetch(uint32_t block, uint64_t hash) const {
    nodes_.Prefetch(block);
    past_.Prefetch(hash);
  }
  // Of small pools more, as 16,384 contents that left are remembered.
  static constexpr size_t kNodeBytes = 40;
  static constexpr double kBytesPerBlock = kNodeBytes + PastContents::kBytesPerContent;

 private:
  static constexpr uint32_t kRuns = 4096;

  struct Node {
    uint64_t hash;
    uint64_t used;  // When its last use ended.
    uint32_t parent;
    uint32_t run;     // The run it was computed in,
    uint32_t latest;  // and the latest one behind it.
    uint32_t depth;   // Blocks in front of it.
    uint16_t cls;     // Of its last use.
    uint8_t hits, turn;
    uint8_t gap;  // Between its last use but one and its last hit, as a class says it.
    bool waits;   // A use ended and it was not found again since.
  };
  static_assert(sizeof(Node) == kNodeBytes);
  struct Run {
    uint32_t front = 0, length = 0;
    bool open = false;  // No use of a block of it ended yet.
  };

  void BeginRun(uint32_t front, uint32_t length) { runs_[++run_ % kRuns] = {front, length, true}; }
  int ClassOf(const Node& node) const;
  static uint8_t TurnBehind(const Node& front);
  static std::optional<Wait> WaitOf(const PastContents::Past& past, uint64_t now);

  const uint32_t blocks_per_unit_;
  VirtualArray<Node> nodes_;
  PastContents past_;              // Class, hits and turn of what left.
  std::array<Run, kRuns> runs_{};  // The latest ones.
  uint32_t run_ = 0;
  uint32_t resident_ = 0, highest_ = 0;
  uint64_t evicted_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_USE_CLASSES_H_
