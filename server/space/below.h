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
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kvpool/v1/engine.pb.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_pool.h"
#include "server/space/prefill_cost.h"
#include "server/space/space_facts.h"
#include "server/tiers/tier_set.h"

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
  uint64_t begun_ms = 0;
  std::optional<double> forecast_ms;  // None: too little was known.
};

// What was counted since the space was made. Nothing but uint64_t, as in PoolCounters.
struct BelowCounters {
  uint64_t demoted = 0;  // Blocks whose copy is below.
  uint64_t moved = 0;    // Copies thrown away, as their block was leased to another before they were done.
  uint64_t dropped =
      0;  // Copies that no tier took, or for which the list of those to be written had no room.
  // Blocks that left while there was no copy below, as far as the tier knows. One whose copy was on its way counts too.
  uint64_t unwritten = 0;
  uint64_t promoted = 0;       // Blocks that came up.
  uint64_t late = 0;           // Those that had not come when their match was answered.
  uint64_t lost = 0;           // Missing or damaged ones: what was behind them did not come up.
  uint64_t no_room = 0;        // Those for which no block could be leased.
  uint64_t waits = 0;          // Matches that waited.
  uint64_t refused_waits = 0;  // Matches that were answered at once, as too much waits or they are too large.
  uint64_t not_worth = 0;      // Blocks that were not asked for, as to compute them is faster.
  // Promotions that had a forecast and came whole; what they were to take, what they took, and how far off that was.
  uint64_t forecasts = 0, forecast_ms = 0, taken_ms = 0, error_ms = 0;
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
  static constexpr size_t kMostListed = 65536;  // Sealed or reused blocks that are still to be written.

  // Both outlive it.
  Below(const SpaceFacts* facts, BlockPool* pool) : facts_(*facts), pool_(*pool) {}
  // The tiers outlive it too. In a space without a name below there is nothing.
  void Use(TierSet* tiers);
  bool on() const { return tiers_ != nullptr && !tiers_->empty() && suspensions_ == 0; }
  // Nothing goes down or comes up until Resume was called as often: what the tenant has below is being erased.
  void Suspend() { ++suspensions_; }
  void Resume() { --suspensions_; }

  // ---- Up
  struct Found {
    uint64_t tokens = 0;  // Those of the asked prefix that are resident or below.
    std::vector<Promotion::Block> blocks;
    std::array<uint64_t, TierSet::kMost> bytes{};  // Indexed by slot: what each tier is to bring of them.
    std::shared_ptr<const TierView> tiers;         // These tiers have them.
    bool may_be_more = false;  // It would be longer with all that tiers do not know whether they have it.
  };
  // What to make of a block of which the tier does not know whether it is there. A match that is answered at once leaves it
  // out; one that has time tries it.
  enum class Unknown : uint8_t { kLeftOut, kTried };
  // The longest prefix of a valid match that is resident or below, if it has more than `tokens` tokens, which are resident: of a group
  // with a window its last one, of others all.
  Found Look(const v1::Match& match, uint64_t tokens, Unknown unknown) const;
  // What there is of one block, and what it would take to bring it up, or to compute it; for people. Empty: it is not below.
  std::string Describe(const BlockKey& key) const;
  // Says so in an answer. REQUIRES: on().
  Found Report(const v1::Match& match, v1::MatchResult* answer) const;
  // Milliseconds until all of it would be here, at least 1; none: too little is known. See LoadCost::Forecast.
  std::optional<double> ForecastMs(const Found& found, bool lately) const;
  // False: to compute what was found behind `resident` tokens is faster than to bring it up, or as much of it as comes within
  // `wait_ms`. Then it is counted.
  bool IsWorth(const Found& found, uint64_t resident, uint64_t wait_ms);
  // Whoever begins one hands it to Deferred::promotions. Null: too many are under way, or `session` has too many.
  std::shared_ptr<Promotion> Begin(uint64_t session, uint64_t now_ms, uint64_t wait_ms, Found found);
  bool UnderWay(uint64_t promotion) const { return under_way_.contains(promotion); }
  // Answers whose it was; 0: it is over already. `whole`: all of it came.
  uint64_t End(const Promotion& promotion, uint64_t now_ms, bool whole);
  bool anyone_waits(uint64_t session) const { return waits_.contains(session); }

  // ---- Down
  // A block that is to be copied, and why.
  struct Going {
    BlockPool::Departing block;
    TierOffer offer;
    uint32_t uses = 0;          // See uses().
    TierSet::Members owed = 0;  // 0: all that its rules name; otherwise these, or some of them.
  };
  // Of a block that was sealed, and of whose content it is known that so many requests had it.
  void Sealed(BlockRef ref, const BlockKey& key, uint32_t uses = 1);
  // Of blocks that a match has found, or that were computed again: one more request has them.
  void Reused(absl::Span<const uint64_t> refs);
  bool counts_uses() const { return uses_.has_value() && tiers_->takes(TierOffer::kReused); }
  // So many requests had the block since it was sealed, the one that computed it included, as far as they were counted.
  uint32_t uses(BlockId id) const { return uses_.has_value() ? (*uses_)[Index(id)] : 0; }
  // Those that were sealed or reused, and those that are owed to one of `taking`, taken from their lists; whoever does not copy
  // one lists it again.
  void TakeListed(uint32_t count, TierSet::Members taking, std::vector<Going>* out);
  void List(const Going& going);
  // Nothing is owed to the tier of this slot any more: it is not there.
  void Forget(size_t slot) { owed_[slot].clear(); }
  // All that was sealed or reused has been taken.
  bool all_taken() const { return listed_.empty(); }
  // Some tier is given what is next to leave.
  bool wants_leaving() const { return tiers_ != nullptr && tiers_->takes(TierOffer::kLeaves); }
  // Appends up to `count` of those, the most urgent first.
  void NextToLeave(uint32_t count, std::vector<Going>* out) const;
  // Counts those that have no copy.
  void Left(absl::Span<const Eviction> evictions);

  // The daemon's own hold on what comes up or moves. REQUIRES: the pool has room for a session.
  absl::StatusOr<Holder> holder();

  BelowCounters counters;
  // What engines report.
  PrefillCost prefill;

 private:
  const SpaceFacts& facts_;
  BlockPool& pool_;
  TierSet* tiers_ = nullptr;
  uint32_t suspensions_ = 0;
  uint64_t last_promotion_ = 0;
  absl::flat_hash_map<uint64_t, uint64_t> under_way_;  // The session that asked for it.
  absl::flat_hash_map<uint64_t, size_t> waits_;        // Keyed by session.
  std::deque<Going> listed_;
  // Indexed by slot. Each tier gets its own once it takes something again.
  std::array<std::deque<Going>, TierSet::kMost> owed_;
  std::optional<VirtualArray<uint8_t>>
      uses_;  // Indexed by id; kMostUses at most. None: there is nothing below.
  Holder holder_ = kNobody;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BELOW_H_
