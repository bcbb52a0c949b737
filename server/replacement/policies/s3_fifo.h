// S3-FIFO (Yang et al., SOSP 2023): most new contents are never asked for again, so they pass a
// small queue first.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_S3_FIFO_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_S3_FIFO_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/queue_policy.h"

namespace kvpool {

// Three FIFO queues: small, a tenth of the blocks, where new contents begin; main; and a ghost, as long as
// main may be. A content counts its hits, up to 3. A content that leaves small goes to main if it has more
// than one hit, else to the ghost; one that comes back while the ghost has it begins in main. A content with
// hits that leaves main is put at its end with one hit fewer.
class S3FifoPolicy final : public QueuePolicy<2> {
 public:
  explicit S3FifoPolicy(const PolicyOptions& options) : QueuePolicy(options.max_blocks) {}

  std::string_view name() const override { return "s3_fifo"; }
  void OnInsert(BlockId block, const Content& content) override {
    Insert(Index(block), content.hash, ghost_.Remove(content.hash) ? kMain : kSmall);
  }
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId, uint64_t) override {}
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  void Prefetch(BlockId block, uint64_t hash) const override {
    QueuePolicy::Prefetch(block, hash);
    ghost_.Prefetch(hash);
  }
  double bytes_per_block() const override {
    return QueuePolicy::bytes_per_block() + GhostList::kBytesPerGhost;
  }

 private:
  enum Queue { kSmall, kMain };

  GhostList ghost_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_S3_FIFO_H_
