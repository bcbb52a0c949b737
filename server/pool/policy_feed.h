// Tells a pool's policy of events, a little later than they happen.
//
// What a policy makes of an event is of no use to the verb that caused it: it is wanted when a victim is. So events
// are written down here, and the policy is told of them when somebody asks it something, when there is no room for
// more, or when the pool's owner has nothing more urgent to do. It is told of all of them, in order, before it is
// asked: what it answers is what it would have answered had it been told at once.
//
// Not thread-safe, const members included: the mutex around the pool is around it.
#ifndef KVPOOL_SERVER_POOL_POLICY_FEED_H_
#define KVPOOL_SERVER_POOL_POLICY_FEED_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/replacement/policy.h"

namespace kvpool {

class PolicyFeed {
 public:
  // What the policy may be told of at once: some 10 us.
  static constexpr size_t kMostUntold = 256;

  explicit PolicyFeed(std::unique_ptr<ReplacementPolicy> policy) : policy_(std::move(policy)) {}

  // ---- Events, as ReplacementPolicy has them
  void OnInsert(BlockId block, const Content& content) {
    Add({.hash = content.hash,
         .now_ms = content.now_ms,
         .block = block,
         .parent = content.parent,
         .kind = Kind::kInsert});
  }
  void OnHit(BlockId block, uint64_t now_ms) { Add({.now_ms = now_ms, .block = block, .kind = Kind::kHit}); }
  void OnUsed(BlockId block, uint64_t now_ms) {
    Add({.now_ms = now_ms, .block = block, .kind = Kind::kUsed});
  }
  void OnOffer(BlockId block) { Add({.block = block, .kind = Kind::kOffer}); }
  void OnWithdraw(BlockId block) { Add({.block = block, .kind = Kind::kWithdraw}); }
  void OnEvict(BlockId block) { Add({.block = block, .kind = Kind::kEvict}); }
  // Those are rare.
  void OnHint(BlockId block, const UseHint& hint) { asked()->OnHint(block, hint); }
  void OnScore(BlockId block, float score) { asked()->OnScore(block, score); }

  // How many events the policy was not told of.
  size_t untold() const { return untold_; }
  void TellAll() const {
    if (untold_ > 0) TellEvents();
  }
  // The policy, told of everything: to ask it, but not to tell it of events.
  ReplacementPolicy* asked() const {
    TellAll();
    return policy_.get();
  }
  // This holds for as long as it is the policy.
  bool decides_outside() const { return policy_->async() != nullptr; }
  // Advice, which does not wait for events.
  void Prefetch(BlockId block, uint64_t hash) const { policy_->Prefetch(block, hash); }

  // Another takes its place; the caller sees to it that this one knows what it has to. The one before has
  // been told of everything.
  enum class Tell { kLater, kAtOnce };
  void Set(std::unique_ptr<ReplacementPolicy> policy, Tell tell) {
    TellAll();
    policy_ = std::move(policy);
    most_ = tell == Tell::kAtOnce ? 1 : kMostUntold;
  }
  std::unique_ptr<ReplacementPolicy> Take() {
    TellAll();
    return std::move(policy_);
  }

 private:
  enum class Kind : uint8_t { kInsert, kHit, kUsed, kOffer, kWithdraw, kEvict };
  struct Event {
    uint64_t hash = 0, now_ms = 0;
    BlockId block = kNullBlock, parent = kNullBlock;
    Kind kind = Kind::kInsert;
  };
  void TellEvents() const;
  void Add(const Event& event) {
    events_[untold_++] = event;
    if (untold_ >= most_) TellAll();
  }

  std::unique_ptr<ReplacementPolicy> policy_;
  size_t most_ = kMostUntold;
  mutable size_t untold_ = 0;
  std::array<Event, kMostUntold> events_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POLICY_FEED_H_
