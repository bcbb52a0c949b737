// The words of BlockPool: states, keys, verdicts, limits and counters. server/pool/block_pool.h says what they mean together.
#ifndef KVPOOL_SERVER_POOL_POOL_TYPES_H_
#define KVPOOL_SERVER_POOL_POOL_TYPES_H_

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/block_ref.h"

namespace kvpool {

enum class BlockState : uint8_t { kFree, kLeased, kSealed, kCached, kQuarantined };
inline constexpr int kBlockStates = 5;

// Index of a session in the pool; reused once FreeQuarantine was called and no block is charged to it.
enum class Holder : uint16_t {};
inline constexpr Holder kNobody{0xffff};

// Milliseconds on the caller's clock; only differences are used. Ages are kept in 32 bits: beyond 49 days
// they alias. Verbs without a time happen at the latest that was given.
using TimeMs = uint64_t;

// A key in the form the index holds: 32 bytes as they came, or the SHA-256 of keys of other lengths, which
// `raw` tells apart. Groups have separate key spaces.
struct BlockKey {
  std::array<uint8_t, 32> bytes;
  uint8_t group = 0;
  bool raw = true;

  // REQUIRES: key.size() in [1, 64], group < 16.
  static BlockKey From(std::string_view key, uint32_t group);
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

enum class Shortfall : uint8_t { kNone, kPressure, kCredit, kCap };
enum class MissReason : uint8_t { kNone, kNeverSeen, kEvicted, kCredit, kCap, kWindow };
enum class EvictReason : uint8_t { kBackground, kDirect, kOperator };
inline constexpr int kEvictReasons = 3;

using EvictedBlocks = std::array<uint64_t, kEvictReasons>;

// What a verb answers for one block.
enum class Verdict : uint8_t {
  kDone,
  kDuplicate,     // Seal: the key exists; the canonical block is held instead, unless duplicates are left.
  kUnknownBlock,  // Id outside the capacity, or the null block.
  kStale,         // The generation moved, or the block is free.
  kNotHeld,       // The session has no hold on it.
  kWrongState,  // Seal of a block that is not leased, Pin of one that is not resident. Seal without a key, or
                // with keys of several groups or of one that the pool lacks.
  kTooManyHolds,  // 65535 holds by one session.
  kOverPinBudget,
  kOverCredit,  // Pin of a cached block that is promised to sessions, or Seal of a key whose block is.
  kOverCap,     // Seal: the key exists, and one block more held is beyond SessionLimits::max_blocks.
};

struct SessionLimits {
  uint32_t guaranteed = 0;  // Blocks.
  uint32_t max_blocks = 0;  // Distinct blocks held at once; 0: no cap.
};

struct PoolOptions {
  uint32_t max_blocks = 0;  // Most the pool can grow to, the null block included. At least 1.
  // Per layer group: window in blocks, 0 for full attention. Its size is the number of groups, 1 to 16.
  std::vector<uint32_t> windows;
  double pin_budget = 0.25;  // Of the capacity: blocks pinned or retained above the default priority.
  uint32_t ghosts = 0;       // Evicted keys remembered; 0: a quarter of max_blocks, at most 4 Mi.
  // The first lease of a block makes the next generation. A pool that takes over memory whose old refs may
  // still be around begins behind theirs.
  uint32_t first_generation = 0;
};

// How dear blocks are, in place of the default priority.
struct Retention {
  uint8_t priority = 50;    // 0 to 100.
  TimeMs until = 0;         // Then it is the default again.
  TimeMs half_life_ms = 0;  // Each time it comes half the way to the default, in whole numbers; 0: it stays.
};

struct SealEntry {
  BlockRef block;
  absl::Span<const BlockKey> keys;  // At least one, of one group; the last is the chain's.
  bool leave_duplicate = false;     // The block that the key names already is touched, and not held.
};

struct SealOutcome {
  Verdict verdict = Verdict::kDone;
  BlockRef canonical;  // kNullRef unless kDone, or kDuplicate and held.
};

struct GroupQuery {
  uint32_t group = 0;
  absl::Span<const BlockKey> keys;
  uint32_t tokens_per_block = 1;
};

struct MatchOutcome {
  uint64_t tokens = 0;
  // Parallel to the queries: blocks in sequence order; kNullRef before a window.
  std::vector<std::vector<BlockRef>> blocks;
  MissReason miss = MissReason::kNone;
};

struct LeaseOutcome {
  uint32_t leased = 0;
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
  uint32_t age_ms;   // Since it was sealed.
  uint32_t idle_ms;  // Since it was last used.
};

// A reclaimed block, as histograms and logs want it.
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
  // Victims while a policy decides outside the lock: chosen by a decision, or by LRU since there was none in time.
  uint64_t decided_victims = 0, undecided_victims = 0;
  uint64_t regret = 0;  // Keys that were looked up after their eviction, while it was remembered.
  EvictedBlocks evicted{};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POOL_TYPES_H_
