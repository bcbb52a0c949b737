// One replacement policy takes over from another, with all that is in the cache, while verbs go on: the pool's lock is
// held for short steps only, as a machine is moved while it runs.
//
//   { lock; hand_over.Copy }     until true        what the old policy knows, block by block; what moved since it was
//                                                  copied is copied again
//   hand_over.Build                                shows the copy to the successor
//   { lock; hand_over.Finish }   until it answers  what verbs did since is shown to the successor, in their order:
//   hand_over.CatchUp            in between        much of it without the lock, the last of it under it
//
// The successor ends as if all had been done at once when Copy answered true, and it had then seen every event. Until
// Finish the old policy chooses.
#ifndef KVPOOL_SERVER_POOL_HAND_OVER_H_
#define KVPOOL_SERVER_POOL_HAND_OVER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "server/base/virtual_array.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"

namespace kvpool {

class BlockPool::HandOver {
 public:
  struct Options {
    uint32_t max_blocks = 0;  // Of the pool.
    // What verbs may do meanwhile: 64 MiB of events. Beyond it the copy is given up.
    uint32_t most_events = 1u << 21;
  };
  HandOver(const Options& options, std::unique_ptr<ReplacementPolicy> successor);
  // REQUIRES: before the first Copy, or after Finish or GiveUp.
  ~HandOver();
  HandOver(const HandOver&) = delete;
  HandOver& operator=(const HandOver&) = delete;

  // Under the lock: at most so many blocks more. True: all are copied. What a policy that thinks spares keeps the place
  // that it had when it was copied. One hand-over of a pool at a time.
  bool Copy(BlockPool* pool, TimeMs now, uint32_t blocks);
  // Without it. REQUIRES: Copy answered true.
  void Build();
  // Under the lock. The old policy, and the successor is in charge; or null: more than so many events have come, and
  // CatchUp is next. REQUIRES: Build was called, and not overrun.
  std::unique_ptr<ReplacementPolicy> Finish(BlockPool* pool, uint32_t events);
  // Without it: what Finish took.
  void CatchUp();
  // Under the lock: more events came than can be kept, and the old policy goes on.
  bool overrun() const;
  void GiveUp(BlockPool* pool);

 private:
  // What the pool knows of a block, and where the old policy has it.
  struct Place {
    Rank standing;
    uint64_t hash;
    uint32_t parent;
    uint32_t accessed_ms, sealed_ms;
    bool resident, cached, offered;
    bool moved;  // Since it was copied.
  };
  // A call of a policy.
  struct Event {
    enum class Kind : uint8_t { kInsert, kHit, kHint, kScore, kUsed, kOffer, kWithdraw, kEvict };
    Kind kind;
    UseHint hint = {};
    float score = 0;
    BlockId block = kNullBlock;
    BlockId parent = kNullBlock;
    TimeMs now_ms = 0;
    uint64_t hash = 0;
  };
  static_assert(sizeof(Event) == 32);
  class Recorder;

  void CopyBlock(const BlockPool& pool, uint32_t block);
  std::vector<uint32_t> ResidentByStanding() const;
  void Introduce(const std::vector<uint32_t>& in_order, TimeMs at);
  void Show(const Event& event);

  const Options options_;
  std::unique_ptr<ReplacementPolicy> successor_;
  Recorder* recorder_ = nullptr;  // The pool's policy meanwhile.

  VirtualArray<Place> places_;  // By block.
  uint32_t copied_ = 1;         // Blocks below this are copied.
  uint32_t rounds_ = 0;         // Of copying what moved, and of catching up.
  TimeMs now_ms_ = 0;           // When all was copied.
  std::vector<uint32_t> moved_;
  std::deque<Event> taken_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_HAND_OVER_H_
