// Adaptive replacement cache (Megiddo and Modha, FAST 2003).
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_ARC_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_ARC_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/queue_policy.h"

namespace kvpool {

// T1 has what was asked for once, T2 what was asked for again, both by last use; B1 and B2 remember what left
// them. A content that comes back from B1 says that T1 was too small, one from B2 that T2 was: `target_` is
// what T1 shall have. As in the paper but for one thing: which content is to come is not known when room is
// made for it, so that a T1 of exactly the target stays as it is.
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
