// A second block pool, written to be obviously right: it derives states from who holds what, counts
// sums when asked for them and keeps orders as lists that it searches. It is quadratic, for pools of a
// few dozen blocks.
#ifndef KVPOOL_TESTS_POOL_MODEL_H_
#define KVPOOL_TESTS_POOL_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "server/pool/block_pool.h"

namespace kvpool {

// A key by its number; the pool's BlockKey is made of both.
struct ModelKey {
  uint32_t group = 0;
  uint32_t number = 0;
  friend auto operator<=>(const ModelKey&, const ModelKey&) = default;
};
BlockKey ToBlockKey(const ModelKey& key);

class Model {
 public:
  explicit Model(const PoolOptions& options) : options(options), blocks(1) {}

  enum class Phase { kUnused, kOpen, kEnded, kGone };
  struct Session {
    Phase phase = Phase::kUnused;
    SessionLimits limits;
    uint32_t promised = 0;  // So much of its guarantee.
  };
  struct Block {
    uint32_t generation = 0;
    BlockState state = BlockState::kFree;
    bool there = true;  // Else its memory was given back.
    bool retired = false;
    std::map<int, uint32_t> holds;  // session -> holds
    int owner = -1;
    std::vector<ModelKey> keys;  // the chain's key is the first
    uint32_t parent = 0;
    TimeMs sealed = 0, accessed = 0;
    TimeMs pin_until = 0, retain_until = 0;
    bool pinned = false;
    uint8_t priority = 50;
    TimeMs retention_due = 0, half_life = 0;
    bool never_reused = false;

    // The priority by which it leaves.
    uint8_t standing() const { return priority == 50 && never_reused ? 0 : priority; }
    bool resident() const { return state == BlockState::kSealed || state == BlockState::kCached; }
    bool last_generation() const { return generation == UINT32_MAX; }
  };
  struct Query {
    uint32_t group;
    uint32_t tokens_per_block;
    std::vector<uint32_t> numbers;
  };

  // ---- The verbs of BlockPool
  bool Grow(uint32_t count);
  int AddSession(const SessionLimits& limits, uint32_t coming);  // -1: refused
  bool Promise(int session);
  void EndSession(int session);
  uint64_t FreeQuarantine(int session);
  LeaseOutcome Lease(int session, uint32_t count, uint32_t min, std::vector<BlockRef>* out);
  SealVerdict SealOne(int session, BlockRef ref, const std::vector<ModelKey>& keys, bool leave_duplicate,
                      uint32_t parent);
  MatchOutcome Match(int session, const std::vector<Query>& queries);
  Verdict Release(int session, BlockRef ref, bool never);
  Verdict Ref(int session, BlockRef ref);
  bool Touch(BlockRef ref);
  Verdict Pin(BlockRef ref, TimeMs until);
  bool Unpin(BlockRef ref);
  Verdict SetRetention(BlockRef ref, const Retention& retention);
  bool SetScore(BlockRef ref);
  void Expire();
  bool Enter(const BlockRange& range);
  void Vacate(const BlockRange& range);
  bool PutBack(uint32_t most);
  void Withhold(uint32_t most);
  bool Shrink();
  bool Move(int session, BlockRef from, BlockRef to);
  uint32_t Reclaim(uint32_t count, EvictReason reason, std::vector<uint32_t>* log);
  uint32_t Reclaim(const std::vector<BlockRef>& victims, EvictReason reason, std::vector<uint32_t>* log);

  // ---- Derived
  uint32_t Find(const ModelKey& key) const;
  uint32_t count(BlockState state) const;
  uint32_t available() const;
  uint32_t promised() const;
  uint32_t charged(int session) const;
  uint32_t unused(int session) const;
  uint32_t unmet(int session) const {
    return open(session) ? sessions[session].limits.guaranteed - sessions[session].promised : 0;
  }
  uint64_t all_holds(int session) const;
  uint32_t held(int session) const;
  uint32_t holds(int session, uint32_t b) const;
  uint32_t budgeted() const;
  uint32_t pin_budget() const { return static_cast<uint32_t>(options.pin_budget * capacity()); }
  uint32_t end_block() const { return static_cast<uint32_t>(blocks.size()); }
  uint32_t capacity() const {
    return static_cast<uint32_t>(
        std::count_if(blocks.begin() + 1, blocks.end(), [](const Block& b) { return b.there; }));
  }
  const BlockRange& going() const { return going_; }
  bool vacating() const { return going_.size() > 0; }
  uint32_t refs(uint32_t b) const;
  uint32_t children(uint32_t b) const;
  bool open(int session) const {
    return session >= 0 && session < static_cast<int>(sessions.size()) &&
           sessions[session].phase == Phase::kOpen;
  }

  const PoolOptions options;
  std::vector<Block> blocks;  // [0] is the null block.
  std::vector<Session> sessions;
  // The caller clears it.
  std::vector<uint32_t> direct_evictions;
  // The choices of another policy than LRU, in order. One is taken if the choice is the policy's and the
  // block may leave.
  bool has_choices = false;
  std::vector<uint32_t> choices;
  PoolCounters counters;
  TimeMs now = 0;
  // When a key was evicted, and whether it was asked for since.
  std::map<ModelKey, std::pair<TimeMs, bool>> evicted;

 private:
  Verdict Resolve(BlockRef ref);
  bool IsBudgeted(uint32_t b) const { return blocks[b].pinned || blocks[b].priority > 50; }
  bool HasPinnedChild(uint32_t b) const;
  uint32_t CapRoom(int session) const;
  bool free(uint32_t b) const { return blocks[b].there && blocks[b].state == BlockState::kFree; }
  uint32_t FreeToKeep() const;
  uint32_t NextFree() const;
  uint32_t Headroom(int session) const { return available() - promised() + unused(session); }
  // How many available blocks are among these and those in front of them.
  uint32_t CreditNeed(const std::set<uint32_t>& taken) const;
  void SetOwner(uint32_t b, int owner);
  // Derives sealed and cached from who holds what. The blocks that this takes out of the cache are
  // charged to `taker`.
  void Settle(int taker);
  void Cache(uint32_t b);
  void Uncache(uint32_t b);
  void Free(uint32_t b);
  uint32_t Victim();
  void Evict(uint32_t b, EvictReason reason, std::vector<uint32_t>* log);
  void SetPriority(uint32_t b, const Retention& retention, TimeMs since);
  void EndPin(uint32_t b);
  SealVerdict HoldCanonical(int session, uint32_t b);
  MissReason CountMisses(const std::vector<Query>& queries, uint64_t step, uint64_t asked, uint64_t run,
                         uint64_t steps);

  std::vector<uint32_t> order_;  // cached blocks by last use, the oldest first
  BlockRange going_;
  std::map<uint32_t, uint32_t> generations_;  // Those of blocks that have left.
  std::vector<int> unused_slots_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_POOL_MODEL_H_
