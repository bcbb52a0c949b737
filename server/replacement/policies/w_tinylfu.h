// W-TinyLFU (Einziger, Friedman and Manes, 2017): a newcomer stays only if it is asked for more than
// what it displaces.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_W_TINYLFU_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_W_TINYLFU_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/frequency_sketch.h"
#include "server/replacement/parts/queue_policy.h"

namespace kvpool {

// A window of a hundredth of the blocks takes new contents; the rest is a segmented LRU, four fifths of it
// protected. When the window overflows, its least recently used block and that of the probation are compared
// by a sketch of past accesses: the less frequent leaves, or the newcomer if they are equal.
class WTinyLfuPolicy final : public QueuePolicy<3> {
 public:
  explicit WTinyLfuPolicy(const PolicyOptions& options)
      : QueuePolicy(options.max_blocks), sketch_(options.max_blocks) {}

  std::string_view name() const override { return "w_tinylfu"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t) override { Move(Index(block), queue(Index(block))); }
  void OnEvict(BlockId block) override { Remove(Index(block)); }
  BlockId Victim(uint64_t now_ms) override;
  double bytes_per_block() const override { return QueuePolicy::bytes_per_block() + 4; }

 private:
  enum Queue { kWindow, kProbation, kProtected };
  uint32_t WindowSize() const;
  uint32_t OldestOfMain() const;

  FrequencySketch sketch_;
  uint32_t highest_ = 0;  // The highest block that had a content.
  uint32_t most_resident_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_W_TINYLFU_H_
