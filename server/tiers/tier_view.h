// The tiers of a daemon at one moment: which has a value, which is the first to have brought it, which is to have a copy.
//
// A view does not change. Whoever asks it and uses what it says later keeps it meanwhile: a tier that has left since is
// destroyed, and its slot given to another, after the last view of it is gone (TierSet).
//
// Thread-safe.
#ifndef KVPOOL_SERVER_TIERS_TIER_VIEW_H_
#define KVPOOL_SERVER_TIERS_TIER_VIEW_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/base/recent_fit.h"
#include "server/tiers/tier.h"

namespace kvpool {

struct TierMember {
  std::shared_ptr<Tier> tier;
  TierRule rule;
  std::string spec;  // What --tier says of it.
};

// "evict", "seal", "reuse:2".
std::string TextOf(const TierRule& rule);

// Why blocks are offered.
enum class TierOffer : uint8_t {
  kLeaves,  // They are next to leave the pool.
  kSealed,
  kReused,  // One more request had them.
  kEnds,    // Their space is used by nobody, or the daemon ends.
};

// What loads of one tier take: a part that each has, and one for each byte that it waits for, its own and those that were
// asked for before.
class LoadCost {
 public:
  // What was measured before means little.
  static constexpr uint64_t kLeastSamples = 32;
  struct Begun {
    std::chrono::steady_clock::time_point at;
    uint64_t bytes_out = 0;  // Its own are among them.
  };
  Begun Begin(uint64_t bytes);
  // What was brought counts, and what was late: it would have taken longer.
  void End(const Begun& begun, uint64_t bytes, TierResult result);
  // Seconds until so many more bytes would be here; none: too little was measured. `lately`: none also if nobody has asked it for
  // anything lately: somebody should, as it may be better by now.
  std::optional<double> Forecast(uint64_t bytes, bool lately);
  // Seconds, and bytes a second; 0: not known.
  struct Measured {
    double seconds = 0, bytes_per_second = 0;
  };
  Measured measured();

 private:
  static constexpr auto kForgotten = std::chrono::seconds(10);
  Mutex mu_;
  RecentFit<2> seconds_ ABSL_GUARDED_BY(mu_){256};
  uint64_t bytes_out_ ABSL_GUARDED_BY(mu_) = 0;
  std::chrono::steady_clock::time_point last_ ABSL_GUARDED_BY(mu_);
};

// One tier of a set, from when it is attached until it is destroyed.
class AttachedTier {
 public:
  struct Facts {
    uint64_t capacity_bytes = 0;  // Its own; 0: nobody knows.
    bool by_operator = false;
  };
  AttachedTier(TierMember member, uint64_t id, size_t slot, const Facts& facts);
  Tier& tier() const { return *tier_; }
  const TierRule& rule() const { return rule_; }
  const std::string& spec() const { return spec_; }
  // No other one of the set ever has it.
  uint64_t id() const { return id_; }
  // It is no other's as long as this one lives.
  size_t slot() const { return slot_; }
  const Facts& facts() const { return facts_; }
  LoadCost& cost() { return cost_; }
  // Values that it was asked for, and given, and has not answered.
  struct Out {
    uint64_t loads = 0, stores = 0;
  };
  void LoadsBegin(uint64_t values);
  void LoadEnds();
  void StoresBegin(uint64_t values);
  void StoreEnds();
  Out out();

 private:
  const TierRule rule_;
  const std::string spec_;
  const uint64_t id_;
  const size_t slot_;
  const Facts facts_;
  LoadCost cost_;
  Mutex mu_;
  Out out_ ABSL_GUARDED_BY(mu_);
  // It is the last member: its last answers use all the others.
  const std::shared_ptr<Tier> tier_;
};

class TierView {
 public:
  static constexpr size_t kMost = 8;
  using Members = uint8_t;  // A bit for each slot.
  static constexpr Members BitOf(size_t slot) { return static_cast<Members>(1u << slot); }

  struct Entry {
    std::shared_ptr<AttachedTier> tier;
    bool writes = true;  // False: it is given nothing.
  };
  // At most kMost, ordered as they were attached, no two of which have one slot.
  explicit TierView(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  const std::vector<Entry>& entries() const { return entries_; }
  // Null: none has this slot.
  AttachedTier* at(size_t slot) const;
  // Those that are given something, and those of them whose values outlive the daemon.
  Members writers() const;
  Members lasting() const;
  // None takes a value of more bytes.
  uint64_t most_value_bytes() const;

  // ---- Up
  struct Found {
    TierPresence presence = TierPresence::kNo;
    uint8_t slot = 0;  // The one to ask, unless presence is kNo.
  };
  // From memory, at once. `found` is as long as `keys`.
  void Find(absl::Span<const TierKey> keys, absl::Span<Found> found) const;
  // Seconds until so many bytes of each slot would be here; none: too little is known of one of them. See LoadCost::Forecast.
  std::optional<double> Forecast(const std::array<uint64_t, kMost>& bytes, bool lately) const;
  // The entries, the one that would be the first to bring something in front. One of which too little is known is tried first.
  std::vector<const Entry*> Order() const;

  // ---- Down
  // A block that may be written.
  struct Offered {
    TierKey key;
    TierOffer why = TierOffer::kEnds;
    uint32_t uses = 0;   // So many requests had it.
    uint32_t place = 0;  // So many of its space leave before it; kLeaves has it.
    Members owed = 0;    // Not 0: these are to have it, whatever their rules say now.
  };
  // Who is to be given each, by their rules, and does not have it. What leaves next takes so much of a tier at most: if it
  // took more than there is, the last copies would push out the first, and each round would write all of them again.
  void Wanted(absl::Span<const Offered> offered, uint64_t value_bytes, size_t spaces,
              absl::Span<Members> wanted) const;

 private:
  const std::vector<Entry> entries_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_VIEW_H_
