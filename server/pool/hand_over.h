// One replacement policy takes over from another, with all that is in the cache, while verbs go on. The
// pool's lock is held for short steps only, as in the live migration of a virtual machine.
//
//   { lock; hand_over.Copy }     until true        copies what the old policy knows, block by block, and
//                                                  again what moved since it was copied
//   hand_over.Build                                shows the copy to the successor, or is stopped
//   { lock; hand_over.Finish }   until it answers  shows the successor what verbs did since, in their order:
//   hand_over.CatchUp            in between        the last of it under the lock, the rest without it
//
// The successor ends as if all had been shown at once when Copy answered true, and every event after that.
// Until Finish answers, the old policy chooses.
#ifndef KVPOOL_SERVER_POOL_HAND_OVER_H_
#define KVPOOL_SERVER_POOL_HAND_OVER_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
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
    // PoolOptions::max_blocks of the pool.
    uint32_t max_blocks = 0;
    // Events that verbs may cause meanwhile, in 64 MiB. Beyond it the copy is overrun.
    uint32_t most_events = 1u << 21;
  };
  HandOver(const Options& options, std::unique_ptr<ReplacementPolicy> successor);
  // REQUIRES: before the first Copy, or after Finish or GiveUp.
  ~HandOver();
  HandOver(const HandOver&) = delete;
  HandOver& operator=(const HandOver&) = delete;

  // Without the lock, before the first Copy: the pool has so many blocks, whose memory comes now.
  void Expect(uint32_t blocks) { places_.Populate(std::min<size_t>(uint64_t{blocks} + 1, places_.size())); }
  // Under the lock: copies at most `blocks` more. True: all are copied. A block that a decision of an
  // AsyncPolicy spares keeps the rank that it was copied with. A pool has one hand-over at a time.
  bool Copy(BlockPool* pool, TimeMs now, uint32_t blocks);
  // Without the lock. False: `stop` was set, and GiveUp is next, within some milliseconds of that. REQUIRES: Copy answered true.
  bool Build(const std::atomic<bool>* stop = nullptr);
  // Under the lock. Answers the old policy, once the successor is in charge; or null if more than `events`
  // events have come: CatchUp is next. REQUIRES: Build was called, and not overrun().
  std::unique_ptr<ReplacementPolicy> Finish(BlockPool* pool, uint32_t events);
  // Without the lock: shows the successor the events that Finish took.
  void CatchUp();
  // Under the lock: whether more events came than are kept. GiveUp is then next.
  bool overrun() const;
  // Under the lock: the old policy goes on.
  void GiveUp(BlockPool* pool);

 private:
  // What the pool knows of a block, and how the old policy ranks it.
  struct Place {
    Rank standing;
    uint64_t hash;
    uint32_t parent;
    uint32_t accessed_ms, sealed_ms;
    bool resident, cached, offered;
    bool moved;  // True if a verb has touched the block since it was copied.
  };
  // One call of a ReplacementPolicy.
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
  // Both are done in part only once they are to stop.
  std::vector<uint32_t> ResidentByStanding() const;
  void Introduce(const std::vector<uint32_t>& in_order, TimeMs at);
  // Asked for each of very many blocks: looks now and then.
  bool StopsAt(size_t block) const;
  bool stops() const { return stop_ != nullptr && stop_->load(std::memory_order_relaxed); }
  void Show(const Event& event);

  const Options options_;
  std::unique_ptr<ReplacementPolicy> successor_;
  // The pool's policy meanwhile.
  Recorder* recorder_ = nullptr;
  const std::atomic<bool>* stop_ = nullptr;

  VirtualArray<Place> places_;  // Indexed by block.
  uint32_t copied_ = 1;         // Blocks below this are copied.
  uint32_t rounds_ = 0;         // Rounds of copying what moved, then rounds of catching up.
  TimeMs now_ms_ = 0;           // When all was copied.
  std::deque<uint32_t> moved_;  // A vector would be copied as it grows, under the lock.
  std::deque<Event> taken_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_HAND_OVER_H_
