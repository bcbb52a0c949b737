#include "server/tiers/tier_set.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/check.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"

namespace kvpool {

TierSet::TierSet(std::vector<TierMember> members) {
  KVPOOL_CHECK(members.size() <= kMost, "%zu tiers", members.size());
  MutexLock lock(&mu_);
  for (TierMember& member : members) {
    const AttachedTier::Facts facts{.capacity_bytes = member.tier->usage().capacity_bytes};
    AttachLocked(std::move(member), facts);
  }
  Publish();
}

std::shared_ptr<const TierView> TierSet::view() const {
  MutexLock lock(&mu_);
  return view_;
}

void TierSet::Publish() {
  std::vector<TierView::Entry> entries;
  uint8_t takes = 1u << static_cast<size_t>(TierOffer::kEnds);
  uint64_t reuse = 0;
  bool keeps_all = false;
  for (const auto& [tier, state] : ListLocked()) {
    if (state == State::kDetaching) continue;
    const bool writes = state == State::kAttached;
    entries.push_back({.tier = tier, .writes = writes});
    if (!writes) continue;
    const TierRule& rule = tier->rule();
    const bool seal = rule.when == TierWrite::kSeal, again = rule.when == TierWrite::kReuse;
    takes |= 1u << static_cast<size_t>(seal ? TierOffer::kSealed : TierOffer::kLeaves);
    if (again) takes |= 1u << static_cast<size_t>(TierOffer::kReused);
    if (again) reuse |= uint64_t{1} << std::min(rule.uses, TierRule::kMostUses);
    keeps_all |= !again;
  }
  empty_ = entries.empty();
  takes_ = takes;
  reuse_ = reuse;
  keeps_all_ = keeps_all;
  view_ = std::make_shared<const TierView>(std::move(entries));
}

void TierSet::Drain() {
  for (const auto& [tier, state] : list()) tier->tier().Drain();
  // A value that one tier did not have may be asked of another that was waited for before.
  MutexLock lock(&mu_);
  while (loading_ > 0) answered_.Wait(&mu_);
}

// ------------------------------------------------------------------------------------------------------- up

// One call of Load.
struct TierSet::Loading {
  std::vector<TierLoad> loads;
  Tier::Deadline deadline;
  Tier::Done done;
  // Each value is with one tier at a time, whose answer is the only one to look at it.
  struct Way {
    LoadCost::Begun begun;
    std::vector<uint64_t> tried;  // Ids.
  };
  std::vector<Way> ways;
};

void TierSet::Load(std::vector<TierLoad> loads, Tier::Deadline deadline, Tier::Done done) {
  const size_t count = loads.size();
  {
    MutexLock lock(&mu_);
    loading_ += count;
  }
  std::vector<TierKey> keys;
  for (const TierLoad& load : loads) keys.push_back(load.key);
  std::vector<TierView::Found> found(count);
  const std::shared_ptr<const TierView> view = this->view();
  view->Find(keys, absl::MakeSpan(found));
  const auto loading = std::make_shared<Loading>(Loading{.loads = std::move(loads),
                                                         .deadline = deadline,
                                                         .done = std::move(done),
                                                         .ways = std::vector<Loading::Way>(count)});
  std::array<std::vector<size_t>, kMost> of_slot;
  std::vector<size_t> nowhere;
  for (size_t i = 0; i < count; ++i) {
    (found[i].presence == TierPresence::kNo ? nowhere : of_slot[found[i].slot]).push_back(i);
  }
  // What nobody has is asked of the first: it counts the miss.
  if (!view->entries().empty()) {
    std::vector<size_t>& first = of_slot[view->entries().front().tier->slot()];
    first.insert(first.end(), nowhere.begin(), nowhere.end());
    nowhere.clear();
  }
  for (const TierView::Entry& entry : view->entries()) {
    std::vector<size_t>& which = of_slot[entry.tier->slot()];
    if (!which.empty()) LoadFrom(loading, entry.tier.get(), std::move(which));
  }
  for (const size_t i : nowhere) Answer(*loading, i, TierResult::kMiss);
}

// The answers of a tier come before it is destroyed, and hold no reference: the last one would destroy it on its own thread.
void TierSet::LoadFrom(const std::shared_ptr<Loading>& loading, AttachedTier* tier,
                       std::vector<size_t> which) {
  std::vector<TierLoad> loads;
  for (const size_t i : which) {
    loads.push_back(loading->loads[i]);
    loading->ways[i].tried.push_back(tier->id());
    loading->ways[i].begun = tier->cost().Begin(loading->loads[i].into->bytes());
  }
  tier->LoadsBegin(which.size());
  tier->tier().Load(std::move(loads), loading->deadline,
                    [this, loading, tier, which = std::move(which)](size_t index, TierResult result) {
                      Loaded(loading, tier, which[index], result);
                    });
}

void TierSet::Loaded(const std::shared_ptr<Loading>& loading, AttachedTier* tier, size_t index,
                     TierResult result) {
  tier->cost().End(loading->ways[index].begun, loading->loads[index].into->bytes(), result);
  const bool missing = result == TierResult::kMiss || result == TierResult::kCorrupt ||
                       result == TierResult::kFailed || result == TierResult::kFull;
  if (!missing || std::chrono::steady_clock::now() >= loading->deadline || !AskNext(loading, index))
    Answer(*loading, index, result);
  tier->LoadEnds();
}

bool TierSet::AskNext(const std::shared_ptr<Loading>& loading, size_t index) {
  const std::shared_ptr<const TierView> view = this->view();
  const std::vector<uint64_t>& tried = loading->ways[index].tried;
  for (const TierView::Entry* entry : view->Order()) {
    AttachedTier* const tier = entry->tier.get();
    if (std::count(tried.begin(), tried.end(), tier->id()) > 0) continue;
    TierPresence there = TierPresence::kNo;
    tier->tier().Exists({&loading->loads[index].key, 1}, {&there, 1});
    if (there == TierPresence::kNo) continue;
    LoadFrom(loading, tier, {index});
    return true;
  }
  return false;
}

void TierSet::Answer(const Loading& loading, size_t index, TierResult result) {
  loading.done(index, result);
  MutexLock lock(&mu_);
  if (--loading_ == 0) answered_.SignalAll();
}

// ----------------------------------------------------------------------------------------------------- down

void TierSet::Store(const TierView& view, std::vector<TierStore> stores, std::vector<Members> to,
                    StoreDone done) {
  const auto answer = std::make_shared<const StoreDone>(std::move(done));
  for (const TierView::Entry& entry : view.entries()) {
    AttachedTier* const tier = entry.tier.get();
    std::vector<TierStore> of_tier;
    std::vector<size_t> which;
    for (size_t i = 0; i < stores.size(); ++i) {
      if ((to[i] & TierView::BitOf(tier->slot())) == 0) continue;
      of_tier.push_back(stores[i]);
      which.push_back(i);
    }
    if (which.empty()) continue;
    tier->StoresBegin(which.size());
    tier->tier().Store(std::move(of_tier),
                       [tier, answer, which = std::move(which)](size_t index, TierResult result) {
                         (*answer)(which[index], tier->slot(), result);
                         tier->StoreEnds();
                       });
  }
}

// ------------------------------------------------------------------------------------------ tiers that come and go

std::vector<TierSet::Listed> TierSet::ListLocked() const {
  std::vector<Listed> listed;
  for (const Place& place : places_) {
    if (place.tier != nullptr) listed.push_back({place.tier, place.state});
  }
  std::sort(listed.begin(), listed.end(),
            [](const Listed& a, const Listed& b) { return a.tier->id() < b.tier->id(); });
  return listed;
}

std::vector<TierSet::Listed> TierSet::list() const {
  MutexLock lock(&mu_);
  return ListLocked();
}

std::vector<std::string> TierSet::closing() const {
  MutexLock lock(&mu_);
  std::vector<std::string> names;
  for (const Place& place : places_) {
    if (place.state == State::kClosing && place.taken()) names.push_back(place.name);
  }
  return names;
}

TierSet::Place* TierSet::Find(std::string_view name, std::initializer_list<State> states) {
  const auto found = std::find_if(places_.begin(), places_.end(), [&](const Place& place) {
    return place.taken() && place.name == name &&
           std::find(states.begin(), states.end(), place.state) != states.end();
  });
  return found == places_.end() ? nullptr : &*found;
}

absl::Status TierSet::NoSuchTier(std::string_view name) const {
  std::vector<std::string> names;
  for (const auto& [tier, state] : ListLocked()) names.emplace_back(tier->tier().name());
  return absl::NotFoundError(
      absl::StrCat("tier is \"", std::string(name), "\"; ",
                   names.empty() ? "there is none" : absl::StrCat("there are ", absl::StrJoin(names, ", "))));
}

absl::Status TierSet::CheckRoomLocked(std::string_view name) const {
  size_t taken = 0;
  for (const Place& place : places_) {
    taken += place.taken();
    if (place.name != name || (place.state != State::kAttached && place.state != State::kDraining)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("tier ", std::string(name), ": one is attached; at most one of each kind"));
  }
  if (taken < kMost) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("tier ", std::string(name), ": there are ", taken,
                                                    " with those that are being detached; limit ", kMost));
}

absl::Status TierSet::CheckRoom(std::string_view name) const {
  MutexLock lock(&mu_);
  return CheckRoomLocked(name);
}

std::shared_ptr<AttachedTier> TierSet::AttachLocked(TierMember member, const AttachedTier::Facts& facts) {
  const auto free =
      std::find_if(places_.begin(), places_.end(), [](const Place& place) { return !place.taken(); });
  std::string name(member.tier->name());
  const auto slot = static_cast<size_t>(free - places_.begin());
  const uint64_t id = ++last_id_;
  *free = {.state = State::kAttached,
           .tier = std::make_shared<AttachedTier>(std::move(member), id, slot, facts),
           .name = std::move(name),
           .id = id};
  return free->tier;
}

absl::StatusOr<std::shared_ptr<AttachedTier>> TierSet::Attach(TierMember member) {
  const AttachedTier::Facts facts{.capacity_bytes = member.tier->usage().capacity_bytes, .by_operator = true};
  MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckRoomLocked(member.tier->name()));
  std::shared_ptr<AttachedTier> attached = AttachLocked(std::move(member), facts);
  Publish();
  return attached;
}

absl::StatusOr<uint64_t> TierSet::SetWrites(std::string_view name, bool writes) {
  MutexLock lock(&mu_);
  Place* const place = Find(name, {State::kAttached, State::kDraining});
  if (place == nullptr) return NoSuchTier(name);
  place->state = writes ? State::kAttached : State::kDraining;
  Publish();
  return place->id;
}

absl::StatusOr<uint64_t> TierSet::Detach(std::string_view name) {
  MutexLock lock(&mu_);
  if (Place* const place = Find(name, {State::kAttached, State::kDraining}); place != nullptr) {
    place->state = State::kDetaching;
    Publish();
    return place->id;
  }
  const Place* const going = Find(name, {State::kDetaching, State::kClosing});
  if (going == nullptr) return NoSuchTier(name);
  return going->id;
}

std::optional<AttachedTier::Out> TierSet::OutOf(uint64_t id) const {
  MutexLock lock(&mu_);
  for (const Place& place : places_) {
    if (!place.taken() || place.id != id) continue;
    return place.tier == nullptr ? AttachedTier::Out() : place.tier->out();
  }
  return std::nullopt;
}

std::vector<std::shared_ptr<AttachedTier>> TierSet::TakeIdle() {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<AttachedTier>> idle;
  for (Place& place : places_) {
    // The place's reference is the only one. No view that has the tier is given out any more, so that it stays at that, and
    // what it was asked for does not grow.
    if (place.state != State::kDetaching || place.tier.use_count() > 1) continue;
    const AttachedTier::Out out = place.tier->out();
    if (out.loads + out.stores > 0) continue;
    place.state = State::kClosing;
    idle.push_back(std::move(place.tier));
  }
  return idle;
}

void TierSet::Close(std::shared_ptr<AttachedTier> tier) {
  const auto closed = std::make_shared<std::atomic<bool>>(false);
  {
    MutexLock lock(&mu_);
    places_[tier->slot()].closed = closed;
  }
  // The thread has the only reference, whichever of the two goes on first.
  const auto last = std::make_shared<std::shared_ptr<AttachedTier>>(std::move(tier));
  const auto close = [closed, last] {
    last->reset();
    *closed = true;
  };
  try {
    NamedThread("tier-closing", close).detach();
  } catch (const std::system_error&) {
    close();  // The system has no thread for it.
  }
}

}  // namespace kvpool
