// The tiers of a daemon, as one. Each has a rule of its own of what it is given, and all are given it from the pool: a tier
// takes nothing from another. What several have is loaded from the one that will be the first to have brought it, as
// measured, and from the next if it turns out not to be there.
//
// Tiers come and go. A slot is exactly one of
//
//   state        in the view   what its tier is asked for                left by
//   free         no                                                      Attach
//   attached     yes           loads, and stores by its rule             Drain, Detach
//   draining     yes           loads                                     Drain (writes again), Detach
//   detaching    no            nothing; what is under way is answered    TakeIdle, once nobody uses it
//   closing      no            it is being destroyed                     the end of that
//
// What others note of a tier by its slot is gone when Close is called, which REQUIRES that: so a note never means another tier
// than it did when it was made. Of those that are attached or draining no two have one name.
//
// Thread-safe.
#ifndef KVPOOL_SERVER_TIERS_TIER_SET_H_
#define KVPOOL_SERVER_TIERS_TIER_SET_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/tiers/tier.h"
#include "server/tiers/tier_view.h"

namespace kvpool {

class TierSet {
 public:
  static constexpr size_t kMost = TierView::kMost;
  using Members = TierView::Members;

  // At most kMost members.
  explicit TierSet(std::vector<TierMember> members);
  // What is under way is answered first. REQUIRES: nobody has a view.
  ~TierSet() { Drain(); }
  std::shared_ptr<const TierView> view() const;

  // ---- What the view of this moment says, for those who keep nothing of it
  // There is none.
  bool empty() const { return empty_.load(std::memory_order_relaxed); }
  // Some tier is given blocks for this reason.
  bool takes(TierOffer offer) const {
    return (takes_.load(std::memory_order_relaxed) >> static_cast<size_t>(offer) & 1) != 0;
  }
  // Some tier is given a block once so many requests had it.
  bool takes_after(uint32_t uses) const {
    return uses <= TierRule::kMostUses && (uint64_t{1} << uses & reuse_.load(std::memory_order_relaxed)) != 0;
  }
  // Some tier is to have a block that so many requests had, by the time it leaves.
  bool keeps(uint32_t uses) const {
    const uint64_t up_to = (uint64_t{2} << std::min(uses, TierRule::kMostUses)) - 1;
    return keeps_all_.load(std::memory_order_relaxed) ||
           (reuse_.load(std::memory_order_relaxed) & up_to) != 0;
  }

  // ---- Up
  // As Tier::Load.
  void Load(std::vector<TierLoad> loads, Tier::Deadline deadline, Tier::Done done);

  // ---- Down
  // What became of one value in the tier of one slot.
  using StoreDone = std::function<void(size_t index, size_t slot, TierResult result)>;
  // Each value goes to those of `view` that `to` names, and each of these answers.
  void Store(const TierView& view, std::vector<TierStore> stores, std::vector<Members> to, StoreDone done);

  // Waits until all is answered that was asked for before.
  void Drain();

  // ---- Tiers that come and go
  enum class State : uint8_t { kFree, kAttached, kDraining, kDetaching, kClosing };
  struct Listed {
    std::shared_ptr<AttachedTier> tier;
    State state = State::kAttached;
    // Views have it.
    bool in_view() const { return state == State::kAttached || state == State::kDraining; }
  };
  // Those that are attached, draining or detaching, as they were attached.
  std::vector<Listed> list() const;
  // Names of those that are closing.
  std::vector<std::string> closing() const;
  // FAILED_PRECONDITION: a tier of this name is attached or drains, or there are kMost with those that are going.
  absl::Status CheckRoom(std::string_view name) const;
  // The same, and otherwise views that are asked for from now on have it.
  absl::StatusOr<std::shared_ptr<AttachedTier>> Attach(TierMember member);
  // Views from now on say that the tier is given nothing, or again what its rule says. Answers its id. NOT_FOUND: none of this
  // name is attached or drains.
  absl::StatusOr<uint64_t> SetWrites(std::string_view name, bool writes);
  // Views from now on don't have the tier. Answers its id, also if it is going already. NOT_FOUND: there is none of this name.
  absl::StatusOr<uint64_t> Detach(std::string_view name);
  // What this tier has not answered; none: it is gone.
  std::optional<AttachedTier::Out> OutOf(uint64_t id) const;
  // Those that are detaching, to which nobody else has a reference, and which have answered all. They are closing from now on.
  std::vector<std::shared_ptr<AttachedTier>> TakeIdle();
  // Destroys it on a thread of its own, which nobody waits for: a disk may hang, and much memory takes long to be given back.
  // REQUIRES: TakeIdle answered it, the caller has the only reference, and nobody has a note of its slot.
  void Close(std::shared_ptr<AttachedTier> tier);

 private:
  struct Loading;
  struct Place {
    State state = State::kFree;
    std::shared_ptr<AttachedTier> tier;  // Null where it is free or closing.
    std::string name;
    uint64_t id = 0;
    // Of one that is closing: it is destroyed, and its slot is free.
    std::shared_ptr<const std::atomic<bool>> closed;
    bool taken() const { return state != State::kFree && !(closed != nullptr && *closed); }
  };
  void LoadFrom(const std::shared_ptr<Loading>& loading, AttachedTier* tier, std::vector<size_t> which);
  void Loaded(const std::shared_ptr<Loading>& loading, AttachedTier* tier, size_t index, TierResult result);
  // Asks one that was not tried. False: none of these may have it.
  bool AskNext(const std::shared_ptr<Loading>& loading, size_t index);
  void Answer(const Loading& loading, size_t index, TierResult result);
  absl::Status CheckRoomLocked(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<AttachedTier> AttachLocked(TierMember member, const AttachedTier::Facts& facts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Null: there is none in one of these states.
  Place* Find(std::string_view name, std::initializer_list<State> states) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status NoSuchTier(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<Listed> ListLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the view of the places, and what it says.
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  CondVar answered_;
  // Each has its tier until nobody else has: whoever lets go of a view or of a tier never destroys one.
  std::array<Place, kMost> places_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const TierView> view_ ABSL_GUARDED_BY(mu_);
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t loading_ ABSL_GUARDED_BY(mu_) = 0;  // Values that are not answered.
  std::atomic<bool> empty_{true}, keeps_all_{false};
  std::atomic<uint8_t> takes_{0};   // A bit for each TierOffer.
  std::atomic<uint64_t> reuse_{0};  // Bit N: some tier is given a block after N uses.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_SET_H_
