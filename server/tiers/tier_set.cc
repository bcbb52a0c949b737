#include "server/tiers/tier_set.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

// What members are compared by: the time until so many more bytes are here.
constexpr uint64_t kComparedBytes = 1 << 20;

constexpr TierSet::Members BitOf(size_t member) { return static_cast<TierSet::Members>(1u << member); }

}  // namespace

std::string TextOf(const TierRule& rule) {
  if (rule.when == TierWrite::kReuse) return absl::StrCat("reuse:", rule.uses);
  return rule.when == TierWrite::kSeal ? "seal" : "evict";
}

// ---------------------------------------------------------------------------------------------------- costs

LoadCost::Begun LoadCost::Begin(uint64_t bytes) {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(&mu_);
  bytes_out_ += bytes;
  return {.at = now, .bytes_out = bytes_out_};
}

void LoadCost::End(const Begun& begun, uint64_t bytes, TierResult result) {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(&mu_);
  bytes_out_ -= bytes;
  last_ = now;
  if (result != TierResult::kDone && result != TierResult::kLate) return;
  const std::chrono::duration<double> seconds = now - begun.at;
  seconds_.Add({1, static_cast<double>(begun.bytes_out)}, seconds.count());
}

std::optional<double> LoadCost::Forecast(uint64_t bytes, bool lately) {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(&mu_);
  // While something is on its way it will tell; nobody has to try.
  const bool forgotten = lately && bytes_out_ == 0 && now - last_ > kForgotten;
  if (seconds_.samples() < kLeastSamples || forgotten) return std::nullopt;
  return seconds_.At({1, static_cast<double>(bytes_out_ + bytes)});
}

LoadCost::Measured LoadCost::measured() {
  MutexLock lock(&mu_);
  if (seconds_.samples() == 0) return {};
  const auto& [fixed, per_byte] = seconds_.coefficients();
  return {.seconds = fixed, .bytes_per_second = per_byte > 0 ? 1 / per_byte : 0};
}

// ---------------------------------------------------------------------------------------------------- the set

TierSet::TierSet(std::vector<TierMember> members) : members_(std::move(members)) {
  KVPOOL_CHECK(!members_.empty() && members_.size() <= kMost, "%zu tiers", members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    const TierMember& member = members_[i];
    capacity_bytes_[i] = member.tier->usage().capacity_bytes;
    const bool reuse = member.rule.when == TierWrite::kReuse;
    takes_[static_cast<size_t>(TierOffer::kLeaves)] |= member.rule.when != TierWrite::kSeal;
    takes_[static_cast<size_t>(TierOffer::kSealed)] |= member.rule.when == TierWrite::kSeal;
    takes_[static_cast<size_t>(TierOffer::kReused)] |= reuse;
    keeps_all_ |= !reuse;
    if (reuse) reuse_ |= uint64_t{1} << std::min(member.rule.uses, TierRule::kMostUses);
  }
  takes_[static_cast<size_t>(TierOffer::kEnds)] = true;
}

uint64_t TierSet::most_value_bytes() const {
  uint64_t most = 0;
  for (const TierMember& member : members_) most = std::max(most, member.tier->most_value_bytes());
  return most;
}

TierSet::Members TierSet::lasting() const {
  Members lasting = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].tier->lasting()) lasting |= BitOf(i);
  }
  return lasting;
}

void TierSet::Drain() {
  // A value that one member did not have may be asked of another that was waited for before.
  while (true) {
    for (const TierMember& member : members_) member.tier->Drain();
    MutexLock lock(&mu_);
    if (loading_ == 0) return;
  }
}

// ------------------------------------------------------------------------------------------------------- up

std::array<uint8_t, TierSet::kMost> TierSet::Order() {
  std::array<uint8_t, kMost> order;
  std::iota(order.begin(), order.end(), 0);
  if (members_.size() == 1) return order;
  std::array<double, kMost> seconds{};
  for (size_t i = 0; i < members_.size(); ++i)
    seconds[i] = costs_[i].Forecast(kComparedBytes, false).value_or(0);
  std::stable_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(members_.size()),
                   [&](uint8_t a, uint8_t b) { return seconds[a] < seconds[b]; });
  return order;
}

void TierSet::Find(absl::Span<const TierKey> keys, absl::Span<Found> found) {
  std::fill(found.begin(), found.end(), Found{});
  const std::array<uint8_t, kMost> order = Order();
  std::vector<size_t> left(keys.size());  // Whoever surely has it goes in front of who may.
  std::iota(left.begin(), left.end(), 0);
  std::vector<TierKey> asked(keys.begin(), keys.end());
  std::vector<TierPresence> there(keys.size());
  for (size_t at = 0; at < members_.size() && !left.empty(); ++at) {
    members_[order[at]].tier->Exists(asked, absl::MakeSpan(there).first(asked.size()));
    size_t kept = 0;
    for (size_t i = 0; i < left.size(); ++i) {
      Found& of_key = found[left[i]];
      if (there[i] == TierPresence::kYes ||
          (there[i] == TierPresence::kUnknown && of_key.presence == TierPresence::kNo)) {
        of_key = {there[i], order[at]};
      }
      if (of_key.presence == TierPresence::kYes) continue;
      asked[kept] = asked[i];
      left[kept++] = left[i];
    }
    asked.resize(kept);
    left.resize(kept);
  }
}

std::optional<double> TierSet::Forecast(const std::array<uint64_t, kMost>& bytes, bool lately) {
  double seconds = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (bytes[i] == 0) continue;
    const std::optional<double> of_member = costs_[i].Forecast(bytes[i], lately);
    if (!of_member.has_value()) return std::nullopt;
    seconds = std::max(seconds, *of_member);
  }
  return seconds;
}

// One call of Load.
struct TierSet::Loading {
  std::vector<TierLoad> loads;
  Tier::Deadline deadline;
  Tier::Done done;
  // Each value is with one member at a time, whose answer is the only one to look at it.
  struct Way {
    LoadCost::Begun begun;
    Members tried = 0;
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
  std::vector<Found> found(count);
  Find(keys, absl::MakeSpan(found));
  const auto loading = std::make_shared<Loading>(Loading{.loads = std::move(loads),
                                                         .deadline = deadline,
                                                         .done = std::move(done),
                                                         .ways = std::vector<Loading::Way>(count)});
  std::array<std::vector<size_t>, kMost> of_member;
  // What nobody has is asked of the first: it counts the miss.
  for (size_t i = 0; i < count; ++i) of_member[found[i].member].push_back(i);
  for (size_t member = 0; member < members_.size(); ++member) {
    if (!of_member[member].empty()) LoadFrom(loading, member, std::move(of_member[member]));
  }
}

void TierSet::LoadFrom(const std::shared_ptr<Loading>& loading, size_t member, std::vector<size_t> which) {
  std::vector<TierLoad> loads;
  for (const size_t i : which) {
    loads.push_back(loading->loads[i]);
    loading->ways[i].tried |= BitOf(member);
    loading->ways[i].begun = costs_[member].Begin(loading->loads[i].into->bytes());
  }
  members_[member].tier->Load(
      std::move(loads), loading->deadline,
      [this, loading, member, which = std::move(which)](size_t index, TierResult result) {
        Loaded(loading, member, which[index], result);
      });
}

void TierSet::Loaded(const std::shared_ptr<Loading>& loading, size_t member, size_t index,
                     TierResult result) {
  TierLoad& load = loading->loads[index];
  costs_[member].End(loading->ways[index].begun, load.into->bytes(), result);
  const bool missing = result == TierResult::kMiss || result == TierResult::kCorrupt ||
                       result == TierResult::kFailed || result == TierResult::kFull;
  if (missing && std::chrono::steady_clock::now() < loading->deadline) {
    for (const uint8_t other : Order()) {
      if (other >= members_.size() || (loading->ways[index].tried & BitOf(other)) != 0) continue;
      TierPresence there = TierPresence::kNo;
      members_[other].tier->Exists({&load.key, 1}, {&there, 1});
      if (there == TierPresence::kNo) continue;
      return LoadFrom(loading, other, {index});
    }
  }
  // Others of the batch may be out for long.
  load.into.reset();
  loading->done(index, result);
  MutexLock lock(&mu_);
  --loading_;
}

// ----------------------------------------------------------------------------------------------------- down

void TierSet::Wanted(absl::Span<const Offered> offered, uint64_t value_bytes, size_t spaces,
                     absl::Span<Members> wanted) const {
  std::fill(wanted.begin(), wanted.end(), Members{0});
  std::vector<TierKey> keys;
  std::vector<size_t> of;
  std::vector<TierPresence> there;
  for (size_t m = 0; m < members_.size(); ++m) {
    const auto& [tier, rule] = members_[m];
    if (value_bytes > tier->most_value_bytes()) continue;
    // Half of it: values of many sizes leave gaps.
    const uint64_t share = capacity_bytes_[m] / 2 / std::max<size_t>(spaces, 1);
    const uint64_t places =
        capacity_bytes_[m] == 0 ? UINT64_MAX : std::max<uint64_t>(share / WholePages(value_bytes), 1);
    keys.clear();
    of.clear();
    for (size_t i = 0; i < offered.size(); ++i) {
      const Offered& block = offered[i];
      const bool by_rule =
          rule.when == TierWrite::kReuse
              ? block.why != TierOffer::kSealed && block.uses >= rule.uses
              : block.why == TierOffer::kEnds ||
                    block.why == (rule.when == TierWrite::kEvict ? TierOffer::kLeaves : TierOffer::kSealed);
      if (!by_rule || (block.why == TierOffer::kLeaves && block.place >= places)) continue;
      keys.push_back(block.key);
      of.push_back(i);
    }
    there.resize(keys.size());
    tier->Exists(keys, absl::MakeSpan(there));
    for (size_t i = 0; i < of.size(); ++i) {
      if (there[i] != TierPresence::kYes) wanted[of[i]] |= BitOf(m);
    }
  }
}

// One call of Store.
struct TierSet::Storing {
  Mutex mu;
  std::vector<Stored> answers ABSL_GUARDED_BY(mu);
  std::vector<Members> left ABSL_GUARDED_BY(mu);  // They have not answered.
  StoreDone done;
};

void TierSet::Store(std::vector<TierStore> stores, std::vector<Members> to, StoreDone done) {
  const auto storing = std::make_shared<Storing>();
  {
    MutexLock lock(&storing->mu);
    storing->answers.resize(stores.size());
    storing->left = to;
  }
  storing->done = std::move(done);
  for (size_t member = 0; member < members_.size(); ++member) {
    const Members bit = BitOf(member);
    std::vector<TierStore> of_member;
    std::vector<size_t> which;
    for (size_t i = 0; i < stores.size(); ++i) {
      if ((to[i] & bit) == 0) continue;
      of_member.push_back(stores[i]);
      which.push_back(i);
    }
    if (which.empty()) continue;
    members_[member].tier->Store(std::move(of_member),
                                 [storing, bit, which = std::move(which)](size_t index, TierResult result) {
                                   const size_t i = which[index];
                                   Stored answer;
                                   {
                                     MutexLock lock(&storing->mu);
                                     Stored& of_value = storing->answers[i];
                                     (result == TierResult::kDone     ? of_value.done
                                      : result == TierResult::kFailed ? of_value.failed
                                                                      : of_value.refused) |= bit;
                                     storing->left[i] &= static_cast<Members>(~bit);
                                     if (storing->left[i] != 0) return;
                                     answer = of_value;
                                   }
                                   storing->done(i, answer);
                                 });
  }
}

}  // namespace kvpool
