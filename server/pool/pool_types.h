// The types that BlockPool speaks in: states, keys, verdicts, limits and counters. server/pool/block_pool.h
// says what they mean together.
#ifndef KVPOOL_SERVER_POOL_POOL_TYPES_H_
#define KVPOOL_SERVER_POOL_POOL_TYPES_H_

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/block_ref.h"

namespace kvpool {

enum class BlockState : uint8_t { kFree, kLeased, kSealed, kCached, kQuarantined, kWithheld };
inline constexpr int kBlockStates = 6;
// Its memory can't be given back: a session may read or write it, and it does not move.
inline constexpr bool IsInUse(BlockState state) {
  return state == BlockState::kLeased || state == BlockState::kSealed || state == BlockState::kQuarantined;
}

// The blocks from `first` on, up to `end`, which is not one of them.
struct BlockRange {
  uint32_t first = 0, end = 0;
  uint32_t size() const { return end - first; }
  bool contains(uint32_t block) const { return first <= block && block < end; }
  friend bool operator==(const BlockRange&, const BlockRange&) = default;
};

// The index of a session in the pool. It is reused once FreeQuarantine was called and no block is
// charged to it.
enum class Holder : uint16_t {};
inline constexpr Holder kNobody{0xffff};

// Milliseconds on the caller's clock; only differences are used. Ages are kept in 32 bits, so they wrap after
// 49 days. Verbs without a time happen at the latest time that a verb was given.
using TimeMs = uint64_t;

// A key in the form that the index holds. Each group has its own key space.
struct BlockKey {
  // The key itself if it has 32 bytes, which `raw` says; else its SHA-256.
  std::array<uint8_t, 32> bytes;
  uint8_t group = 0;
  bool raw = true;

  // REQUIRES: key.size() in [1, 64], group < 16.
  static BlockKey From(std::string_view key, uint32_t group);
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

// kReclaiming: the rest is cached, and more of it leaves than one lease waits for.
enum class Shortfall : uint8_t { kNone, kPressure, kCredit, kCap, kReclaiming };
enum class MissReason : uint8_t { kNone, kNeverSeen, kEvicted, kCredit, kCap, kWindow };
// kDamaged: its content was not what was sealed.
enum class EvictReason : uint8_t { kBackground, kDirect, kOperator, kDamaged };
inline constexpr int kEvictReasons = 4;

using EvictedBlocks = std::array<uint64_t, kEvictReasons>;

// What a verb answers for one block.
enum class Verdict : uint8_t {
  kDone,
  // Seal: the key exists; the canonical block is held instead, unless the entry leaves duplicates.
  kDuplicate,
  // The id is the null block's, or higher than that of any block.
  kUnknownBlock,
  // The generation moved, or the block is free.
  kStale,
  // The session has no hold on the block.
  kNotHeld,
  // Seal: the block is not leased; there is no key; or the keys are of several groups, or of one that the
  // pool lacks. Pin and SetRetention: the block is not resident.
  kWrongState,
  // The session holds the block 65,535 times.
  kTooManyHolds,
  kOverPinBudget,
  // Pin of a cached block that is promised to sessions, or Seal of a key whose block is.
  kOverCredit,
  // Seal: the key exists, and holding its block would exceed SessionLimits::max_blocks.
  kOverCap,
  // Pin, or Seal of a key that exists: the call has visited as many blocks in front of those that it names as
  // one call may.
  kTooFar,
  // Seal: the key exists, and the session has not mapped its block.
  kUnmapped,
  // Seal: the key exists, and its block is to be compared first with what was sealed.
  kDoubted,
};

// The name of holds of the pool's owner itself, in a table that outlives it: they end with its process.
inline constexpr uint64_t kOwnersId = UINT64_MAX;

struct SessionLimits {
  uint32_t guaranteed = 0;  // Blocks.
  uint32_t max_blocks = 0;  // Distinct blocks held at once; 0: no cap.
};

struct PoolOptions {
  // The most blocks that the pool can grow to, with the null block. At least 1.
  uint32_t max_blocks = 0;
  // Memory comes in slabs of so many blocks, the first from block 0 on, and goes in such: leases keep to few of them
  // (lease_order.h). 0: it is of one piece.
  uint32_t slab_blocks = 0;
  // One per layer group, 1 to 16 of them: the window in blocks, 0 for full attention.
  std::vector<uint32_t> windows;
  // The share of the capacity that may be pinned or retained above the default priority.
  double pin_budget = 0.25;
  // How many evicted keys are remembered; 0: a quarter of the blocks, at most 4 Mi.
  uint32_t ghosts = 0;
  // A block's first lease has the generation after this one. A pool that takes over memory whose old refs may
  // still be around begins behind theirs.
  uint32_t first_generation = 0;
  // Memory of PoolTable::Bytes(max_blocks, table_sessions) bytes that outlives the pool, and a process that is killed:
  // zero, or as a pool of the same options left it (BlockPool::Recover). Null: the pool has its own.
  void* table = nullptr;
  uint32_t table_sessions = 0;  // So many sessions at once have room in the table for their holds.
  // It has room for sums of content and for aliases (PoolTable::Bytes). A table of the version before has not.
  bool table_has_sums = false;
  // Sums of content are kept, and what Recover finds with a sum is doubted.
  bool keeps_sums = false;
};

// A priority that blocks have in place of the default one, for a time.
struct Retention {
  uint8_t priority = 50;  // 0 to 100.
  // When the priority is the default again.
  TimeMs until = 0;
  // After each half-life the priority has come half the way to the default, in whole numbers; 0: it stays.
  TimeMs half_life_ms = 0;
};

struct SealEntry {
  BlockRef block;
  // One to kMaxKeysPerBlock keys of one group. The last is the chain's, those before it are aliases.
  absl::Span<const BlockKey> keys;
  // If the chain's key names a block already, that block is touched instead of held.
  bool leave_duplicate = false;
};

struct SealVerdict {
  Verdict verdict = Verdict::kDone;
  // kNullRef unless the verdict is kDone, or kDuplicate with the canonical block held.
  BlockRef canonical;
};

struct GroupQuery {
  uint32_t group = 0;
  absl::Span<const BlockKey> keys;
  uint32_t tokens_per_block = 1;
};

struct MatchOutcome {
  uint64_t tokens = 0;
  uint64_t asked_tokens = 0;  // Those are whole blocks of every group.
  // Parallel to the queries: each one's blocks in sequence order, kNullRef in front of a window.
  std::vector<std::vector<BlockRef>> blocks;
  MissReason miss = MissReason::kNone;
};

// What one lookup asked for and found.
struct LookupCounts {
  uint64_t blocks = 0;      // Keys that were asked for.
  uint64_t tokens = 0;      // The prefix that was asked for.
  uint64_t hit_tokens = 0;  // The prefix that was found.
};

// Why a block that was in use is not found any more after a recovery: it is free, or its holders' alone. The names are label values of a metric.
enum class BlockLoss : uint8_t {
  kChecksum,   // It was sealed, and its record is damaged.
  kLayout,     // It was sealed in a layer group that the pool has not.
  kDuplicate,  // It was sealed under a key that names another: its record is damaged.
  kNoSlab,     // It was sealed in memory that is not there any more.
  kTorn,       // It was sealed in the turn that was torn, of which nobody had heard.
  kUnsealed,   // It was leased, and its session is not known any more.
};
inline constexpr std::array<const char*, 6> kBlockLossNames = {"checksum", "layout", "duplicate",
                                                               "slab",     "torn",   "unsealed"};
inline constexpr size_t kBlockLosses = kBlockLossNames.size();

// What a pool found in a table that an earlier process left.
struct RecoveredPool {
  struct Session {
    uint64_t id = 0;  // AddSession got it.
    Holder holder = kNobody;
    uint64_t holds = 0;
  };
  std::vector<Session> sessions;  // They have ended: FreeQuarantine gives back what they hold.
  uint32_t cached = 0, held = 0, quarantined = 0;
  // The last turn that was torn and could not be undone, as too much of it was done; 0: none. No session may go on that is as
  // old.
  uint64_t half_turn = 0;
  std::array<uint32_t, kBlockLosses> lost{};  // Indexed by BlockLoss.
  uint32_t cut_links = 0;                     // Links to parents that are not there.
  uint32_t lost_aliases = 0;                  // Blocks whose further keys are damaged, or were not kept.
  uint32_t unsummed = 0;  // Blocks without a sum, which are believed; counted with keeps_sums.
  bool forgets_sums =
      false;  // Sums are kept, and the table has no room for them: the next process finds none.
  // Sealed blocks whose records are damaged.
  uint32_t damaged() const {
    return lost_as(BlockLoss::kChecksum) + lost_as(BlockLoss::kLayout) + lost_as(BlockLoss::kDuplicate);
  }
  uint32_t lost_as(BlockLoss why) const { return lost[static_cast<size_t>(why)]; }
};

struct LeaseOutcome {
  uint32_t leased = 0;
  bool more = false;  // It stopped at `most`: the rest may be had now.
  Shortfall shortfall = Shortfall::kNone;
};

struct BlockView {
  BlockRef ref;
  BlockState state;
  BlockKey key;
  uint32_t refs;
  BlockId parent;
  uint32_t children;
  bool pinned;
  uint8_t priority;
  Holder owner;
  // The time since the block was sealed, and since its last use; 0 unless it is resident.
  uint32_t age_ms;
  uint32_t idle_ms;
};

// What histograms and logs need to know of a reclaimed block.
struct Eviction {
  BlockId block;
  BlockKey key;
  uint32_t lifetime_ms;
  uint32_t idle_ms;
};

// What was counted since the pool was made. Nothing but uint64_t and arrays of it: sums add word by word
// (server/base/counters.h). The metrics have a line for each (server/metrics/metrics.cc).
struct PoolCounters {
  uint64_t leased = 0, sealed = 0, deduplicated = 0, released = 0, refused_stale = 0;
  uint64_t lookups = 0, lookup_blocks = 0, hit_blocks = 0, lookup_tokens = 0, hit_tokens = 0;
  // Victims of an AsyncPolicy: chosen by a decision, and LRU's where there was none.
  uint64_t decided_victims = 0, undecided_victims = 0;
  // Keys looked up after they were evicted, while their eviction was remembered; each eviction counts once.
  uint64_t regret = 0;
  uint64_t moved = 0;  // Blocks whose content has moved to another, for memory to be given back.
  EvictedBlocks evicted{};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POOL_TYPES_H_
