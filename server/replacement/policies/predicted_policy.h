// The base of policies that predict one bit for each use. It makes the bits and keeps a
// wrong predictor harmless.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_PREDICTED_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_PREDICTED_POLICY_H_

#include <cstdint>

#include "server/base/virtual_array.h"
#include "server/replacement/parts/lru_shadow.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/parts/reuse_statistics.h"
#include "server/replacement/parts/turns.h"
#include "server/replacement/policies/lru.h"
#include "server/replacement/policy.h"

namespace kvpool {

// A use that ends has a bit: will the content be asked for again soon? An engine's hint decides; without one,
// what became of others of its class. A class is how often the block was found, which turn it belongs to, and
// whether it is the last block of its turn, which the next one seldom repeats. Soon means within kHorizon
// turnovers, the time in which as many blocks are inserted as are resident.
//
// The deriving class ranks blocks by the bit. LruShadow decides whether the least of them leaves or the least
// recently used block.
class PredictedPolicy : public ReplacementPolicy {
 public:
  void OnInsert(BlockId block, const Content& content) final;
  void OnHit(BlockId block, uint64_t now_ms) final;
  void OnHint(BlockId block, const UseHint& hint) final;
  void OnUsed(BlockId block, uint64_t now_ms) final;
  void OnOffer(BlockId block) final;
  void OnWithdraw(BlockId block) final;
  void OnEvict(BlockId block) final;
  BlockId Victim(uint64_t now_ms) final;
  void Prefetch(BlockId block, uint64_t hash) const final;
  uint32_t offered() const final { return heap_.size(); }
  // In the worst case, where all of the LRU's offers are in its set. LruShadow and ReuseStatistics add 2.2
  // MiB each.
  double bytes_per_block() const final { return sizeof(Node) + 4 + 24 + lru_.bytes_per_block() + 20; }

  enum class Guard { kNone, kLru };

 protected:
  struct Node {
    uint64_t hash;
    uint64_t last_use : 40;
    uint64_t hits : 8;
    uint64_t turn : 8;
    uint64_t said : 2;     // Reuse as the latest use hinted
    uint64_t returns : 1;  // the bit
    uint64_t tail : 1;     // last block of its turn
    uint32_t phase;        // owned by the deriving class
  };

  PredictedPolicy(const PolicyOptions& options, Guard guard);

  virtual Rank RankOfNode(const Node& node) const = 0;
  // A use ends, and the bit is known.
  virtual void Use(Node* node) {}
  // `least` would leave next.
  virtual void BeforeVictim(const Node& least) {}

 private:
  static constexpr int kHitClasses = 4, kTurnClasses = 3;
  static constexpr int kClasses = kHitClasses * kTurnClasses * 2;
  static constexpr uint64_t kHorizon = 8;
  static constexpr double kLikely = 0.5;

  static int ClassOf(const Node& node);

  const Guard guard_;
  VirtualArray<Node> nodes_;
  HeapPlaces places_;
  OfferHeap heap_;
  LruPolicy lru_;
  LruShadow shadow_;
  ReuseStatistics reuse_;
  Turns turns_;
  uint64_t inserted_ = 0, uses_ = 0, resident_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_PREDICTED_POLICY_H_
