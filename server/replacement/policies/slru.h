// Segmented LRU: a block that was found again is protected as long as there is room.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SLRU_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SLRU_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/queue_policy.h"

namespace kvpool {

// Two queues in order of last use. New blocks are on probation; a hit protects one. When more than four
// fifths are protected, the one of them used longest ago returns to probation, as the newest there. Blocks on
// probation leave first.
class SlruPolicy final : public QueuePolicy<2> {
 public:
  explicit SlruPolicy(const PolicyOptions& options) : QueuePolicy(options.max_blocks) {}

  std::string_view name() const override { return "slru"; }
  void OnInsert(BlockId block, const Content& content) override {
    Insert(Index(block), content.hash, kProbation);
  }
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t now_ms) override { Move(Index(block), queue(Index(block))); }
  void OnEvict(BlockId block) override { Remove(Index(block)); }
  BlockId Victim(uint64_t now_ms) override;

 private:
  enum Queue { kProbation, kProtected };
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SLRU_H_
