// Adaptive replacement cache (Megiddo and Modha, FAST 2003).
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_ARC_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_ARC_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/queue_policy.h"

namespace kvpool {

// T1 holds contents that were asked for once, T2 those asked for again, both in order of last use; B1 and B2
// remember what left them. A content that comes back from B1 shows that T1 was too small, one from B2 that T2
// was: `target_` is the size that T1 should have. One thing differs from the paper: the next content is not
// known when room is made for it, so a T1 of exactly the target keeps its size.
class ArcPolicy final : public QueuePolicy<2> {
 public:
  explicit ArcPolicy(const PolicyOptions& options) : QueuePolicy(options.max_blocks) {}

  std::string_view name() const override { return "arc"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t) override { Move(Index(block), kT2); }
  void OnUsed(BlockId block, uint64_t) override { Move(Index(block), queue(Index(block))); }
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  void Prefetch(BlockId block, uint64_t hash) const override {
    QueuePolicy::Prefetch(block, hash);
    b1_.Prefetch(hash);
    b2_.Prefetch(hash);
  }
  double bytes_per_block() const override {
    return QueuePolicy::bytes_per_block() + 2 * GhostList::kBytesPerGhost;
  }

 private:
  enum Queue { kT1, kT2 };

  GhostList b1_, b2_;
  uint32_t target_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_ARC_H_
