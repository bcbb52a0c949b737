// The tiers of a daemon, as one. Each has a rule of its own of what it is given, and all are given it from the pool: a tier
// takes nothing from another. What several have is loaded from the one that will be the first to have brought it, as
// measured, and from the next if it turns out not to be there.
//
// Thread-safe.
#ifndef KVPOOL_SERVER_TIERS_TIER_SET_H_
#define KVPOOL_SERVER_TIERS_TIER_SET_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/base/recent_fit.h"
#include "server/tiers/tier.h"

namespace kvpool {

struct TierMember {
  std::shared_ptr<Tier> tier;
  TierRule rule;
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

class TierSet {
 public:
  static constexpr size_t kMost = 8;
  using Members = uint8_t;  // A bit for each.

  // At most kMost members, at least one.
  explicit TierSet(std::vector<TierMember> members);
  // What is under way is answered first.
  ~TierSet() { Drain(); }
  const std::vector<TierMember>& members() const { return members_; }
  // None takes a value of more bytes.
  uint64_t most_value_bytes() const;
  // Some member is given blocks for this reason.
  bool takes(TierOffer offer) const { return takes_[static_cast<size_t>(offer)]; }
  // Some member is given a block once so many requests had it.
  bool takes_after(uint32_t uses) const {
    return uses <= TierRule::kMostUses && (uint64_t{1} << uses & reuse_) != 0;
  }
  // Some member is to have a block that so many requests had, by the time it leaves.
  bool keeps(uint32_t uses) const {
    const uint64_t up_to = (uint64_t{2} << std::min(uses, TierRule::kMostUses)) - 1;
    return keeps_all_ || (reuse_ & up_to) != 0;
  }
  Members lasting() const;

  // ---- Up
  struct Found {
    TierPresence presence = TierPresence::kNo;
    uint8_t member = 0;  // The one to ask, unless presence is kNo.
  };
  // From memory, at once. `found` is as long as `keys`.
  void Find(absl::Span<const TierKey> keys, absl::Span<Found> found);
  // Seconds until so many bytes of each member would be here; none: too little is known of one of them. See LoadCost::Forecast.
  std::optional<double> Forecast(const std::array<uint64_t, kMost>& bytes, bool lately);
  LoadCost::Measured measured(size_t member) { return costs_[member].measured(); }
  // As Tier::Load.
  void Load(std::vector<TierLoad> loads, Tier::Deadline deadline, Tier::Done done);

  // ---- Down
  // A block that may be written.
  struct Offered {
    TierKey key;
    TierOffer why = TierOffer::kEnds;
    uint32_t uses = 0;   // So many requests had it.
    uint32_t place = 0;  // So many of its space leave before it; kLeaves has it.
    Members owed = 0;    // Not 0: these are to have it, whatever their rules say now.
  };
  // Who is to be given each, by their rules, and does not have it. What leaves next takes so much of a member at most: if it
  // took more than there is, the last copies would push out the first, and each round would write all of them again.
  void Wanted(absl::Span<const Offered> offered, uint64_t value_bytes, size_t spaces,
              absl::Span<Members> wanted) const;
  // What became of one value.
  struct Stored {
    Members done = 0;     // They have it.
    Members refused = 0;  // There is no room for it.
    Members failed = 0;   // The store said no.
  };
  // One member has answered, and the others may not yet.
  using StoreAnswer = std::function<void(size_t index, size_t member)>;
  using StoreDone = std::function<void(size_t index, const Stored& stored)>;
  // Each value goes to the members that `to` names, at least one.
  void Store(std::vector<TierStore> stores, std::vector<Members> to, StoreAnswer answer, StoreDone done);

  // Waits until all is answered that was asked for before.
  void Drain();

 private:
  struct Loading;
  struct Storing;
  void LoadFrom(const std::shared_ptr<Loading>& loading, size_t member, std::vector<size_t> which);
  void Loaded(const std::shared_ptr<Loading>& loading, size_t member, size_t index, TierResult result);
  // The members, the one that would be the first to bring something in front. One of which too little is known is tried first.
  std::array<uint8_t, kMost> Order();

  const std::vector<TierMember> members_;
  std::array<LoadCost, kMost> costs_;
  std::array<uint64_t, kMost> capacity_bytes_{};  // 0: nobody knows.
  std::array<bool, 4> takes_{};                   // Indexed by TierOffer.
  bool keeps_all_ = false;
  uint64_t reuse_ = 0;  // Bit N: some member is given a block after N uses.
  Mutex mu_;
  CondVar answered_;
  uint64_t loading_ ABSL_GUARDED_BY(mu_) = 0;  // Values that are not answered.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_SET_H_
