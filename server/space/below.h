// What is below the pool of one space: what a match says of it, what is brought up, and who waits for that.
//
// A block that is brought up is an ordinary one: leased by a holder of the daemon's own (so only from what is promised to
// nobody), filled, and sealed behind its parent. Until it is sealed nobody finds it, and from then on it is as any other. So
// no tier can give a block two owners, and the pool has no state for what is on its way.
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_BELOW_H_
#define KVPOOL_SERVER_SPACE_BELOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kvpool/v1/engine.pb.h"
#include "server/pool/block_pool.h"
#include "server/space/space_facts.h"
#include "server/tiers/tier.h"

namespace kvpool {

// REQUIRES: the space has a name below the pool.
inline TierKey TierKeyOf(const SpaceFacts& facts, const BlockKey& key) {
  return {.space = *facts.tier_space,
          .block = key.bytes,
          .group = key.group,
          .raw = key.raw,
          .owner = facts.tier_owner};
}

// Blocks that are to be brought up, for one match. Each group's come root first.
struct Promotion {
  struct Block {
    BlockKey key;
    std::optional<BlockKey> parent;  // The key in front; none at the root.
    bool tried = false;              // The tier does not know whether it is there: it may well be missing.
  };
  uint64_t id = 0;
  uint64_t until_ms = 0;  // What has not come by then is not waited for.
  std::vector<Block> blocks;
};

// What was counted since the space was made. Nothing but uint64_t, as in PoolCounters.
struct BelowCounters {
  uint64_t demoted = 0;  // Blocks whose copy is below.
  uint64_t moved = 0;    // Copies thrown away, as their block was leased to another before they were done.
  uint64_t dropped =
      0;  // Copies that the tier did not take, or for which write=seal had no room in its list.
  // Blocks that left while there was no copy below, as far as the tier knows. One whose copy was on its way counts too.
  uint64_t unwritten = 0;
  uint64_t promoted = 0;       // Blocks that came up.
  uint64_t late = 0;           // Those that had not come when their match was answered.
  uint64_t lost = 0;           // Missing or damaged ones: what was behind them did not come up.
  uint64_t no_room = 0;        // Those for which no block could be leased.
  uint64_t waits = 0;          // Matches that waited.
  uint64_t refused_waits = 0;  // Matches that were answered at once, as too much waits or they are too large.
};

class Below {
 public:
  // Keys that one match looks up below the pool.
  static constexpr size_t kMostLooked = 1024;
  // So many of the keys of a match are looked up there at most, which is work.
  static size_t Looked(size_t keys) { return std::min(keys, kMostLooked); }
  static constexpr size_t kMostWaits = 64;             // Matches of one session that wait, or prefetch.
  static constexpr size_t kMostWaitBytes = 512 << 10;  // One that waits is kept: 64 of them are 32 MiB.
  static constexpr size_t kMostPromotions = 1024;      // The space may have so many under way.
  static constexpr size_t kMostSealed = 65536;         // Sealed blocks that are still to be written.

  // Both outlive it.
  Below(const SpaceFacts* facts, BlockPool* pool) : facts_(*facts), pool_(*pool) {}
  // The tier outlives it too. Without one, or in a space without a name below, there is nothing.
  void Use(Tier* tier, TierWrite write) {
    tier_ = facts_.tier_space.has_value() ? tier : nullptr;
    write_ = write;
  }
  bool on() const { return tier_ != nullptr && suspensions_ == 0; }
  // Nothing goes down or comes up until Resume was called as often: what the tenant has below is being erased.
  void Suspend() { ++suspensions_; }
  void Resume() { --suspensions_; }

  // ---- Up
  struct Found {
    uint64_t tokens = 0;  // Those of the asked prefix that are resident or below.
    std::vector<Promotion::Block> blocks;
  };
  // What to make of a block of which the tier does not know whether it is there. A match that is answered at once leaves it
  // out; one that has time tries it.
  enum class Unknown : uint8_t { kLeftOut, kTried };
  // What is behind the first `tokens` tokens of a valid match. Of a group with a window it finds runs that go on from there.
  Found Look(const v1::Match& match, uint64_t tokens, Unknown unknown) const;
  // Says so in an answer. REQUIRES: on().
  Found Report(const v1::Match& match, v1::MatchResult* answer) const;
  // Whoever begins one hands it to Deferred::promotions. Null: too many are under way, or `session` has too many.
  std::shared_ptr<Promotion> Begin(uint64_t session, uint64_t until_ms, std::vector<Promotion::Block> blocks);
  bool UnderWay(uint64_t promotion) const { return under_way_.contains(promotion); }
  // Answers whose it was; 0: it is over already.
  uint64_t End(uint64_t promotion);
  bool anyone_waits(uint64_t session) const { return waits_.contains(session); }

  // ---- Down
  // With write=seal, of each block that was sealed.
  bool wants_sealed() const { return tier_ != nullptr && write_ == TierWrite::kSeal; }
  void Sealed(BlockRef ref, const BlockKey& key);
  // Appends up to `count` blocks that are to be copied, the most urgent first. Those that were sealed are taken from their list:
  // whoever does not copy them says Sealed again.
  void NextDown(uint32_t count, std::vector<BlockPool::Departing>* out);
  // Counts those that have no copy.
  void Left(absl::Span<const Eviction> evictions);

  // The daemon's own hold on what comes up or moves. REQUIRES: the pool has room for a session.
  absl::StatusOr<Holder> holder();

  BelowCounters counters;

 private:
  const SpaceFacts& facts_;
  BlockPool& pool_;
  Tier* tier_ = nullptr;
  TierWrite write_ = TierWrite::kEvict;
  uint32_t suspensions_ = 0;
  uint64_t last_promotion_ = 0;
  absl::flat_hash_map<uint64_t, uint64_t> under_way_;  // The session that asked for it.
  absl::flat_hash_map<uint64_t, size_t> waits_;        // Keyed by session.
  std::deque<BlockPool::Departing> sealed_;
  Holder holder_ = kNobody;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BELOW_H_
