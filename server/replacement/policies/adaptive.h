// Follows the policy that would have found the most lately.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_ADAPTIVE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_ADAPTIVE_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "server/base/virtual_array.h"
#include "server/replacement/parts/shadow_cache.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Candidates. Each is told all that happens to the pool's blocks, so that it knows the whole of the cache and has
// learned what it learns whenever its turn comes: to switch is to ask another one for the next victim, which costs
// nothing and needs no hand-over. The first is the one to begin with.
//
// Shadows. Beside the pool each candidate has a shadow cache in which it alone decides: of contents drawn by hash,
// one in so many, at a capacity as much smaller. An access to a drawn content is a hit or a miss of the pool, and of
// each shadow. A candidate has won the accesses that only its shadow found, less those that only the pool found.
// The blocks of a chain are found or missed together, so it is runs of them that count as independent.
//
// Judgement. Once a window of accesses, with old ones fading: the candidate that has won most takes over if that is
// more than chance would give (two standard deviations) and more than a thousandth of all. Then nothing is judged
// until the cache had time to become its own. A sample is thinner than the pool, which may make a policy look worse
// than it is: how much is measured while it is the active one, as its shadow and the pool then differ in nothing
// else, and is added to what it wins later.
class AdaptivePolicy final : public ReplacementPolicy {
 public:
  explicit AdaptivePolicy(const PolicyOptions& options);

  std::string_view name() const override { return "adaptive"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnHint(BlockId block, const UseHint& hint) override;
  void OnScore(BlockId block, float score) override;
  void OnUsed(BlockId block, uint64_t now_ms) override;
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  void OnEvict(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override { return active().Victim(now_ms); }
  size_t Upcoming(absl::Span<BlockId> blocks) const override { return active().Upcoming(blocks); }
  Rank Standing(BlockId block) const override { return active().Standing(block); }
  void Prefetch(BlockId block, uint64_t hash) const override;
  uint32_t offered() const override { return active().offered(); }
  double bytes_per_block() const override { return bytes_per_block_; }

  // ---- For tests and figures
  // Whose victims leave now, and how often that changed.
  std::string_view following() const { return active().name(); }
  uint32_t switches() const { return switches_; }

 private:
  struct Node {
    uint64_t hash;      // 0: it was not drawn.
    uint64_t in_front;  // Hash of the nearest that was, in front of it; 0: none.
  };
  struct Candidate {
    std::unique_ptr<ReplacementPolicy> policy;
    std::unique_ptr<ShadowCache> shadow;
    // Accesses that only its shadow found less those that only the pool did, and the variance of that; fading.
    double won = 0, variance = 0;
    int won_in_run = 0;
    double bias = 0;  // Share of accesses that its shadow was last seen to miss by itself.
  };

  ReplacementPolicy& active() const { return *candidates_[active_].policy; }
  bool Drawn(uint64_t hash) const;
  void Observe(const Node& node, bool found, uint64_t now_ms);
  void EndRun();
  void Judge();

  std::vector<Candidate> candidates_;
  size_t active_ = 0;
  const uint64_t seed_;
  const uint32_t one_in_;
  VirtualArray<Node> nodes_;
  uint32_t resident_ = 0;
  bool full_ = false;       // Something had to leave: shadows have a capacity.
  double accesses_ = 0;     // That `won` is of; fading.
  uint64_t last_hash_ = 0;  // Of the drawn content that was accessed last.
  int64_t until_judgement_ = 0;
  int settling_ = 0;  // Windows to let pass.
  uint32_t switches_ = 0;
  double bytes_per_block_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_ADAPTIVE_H_
