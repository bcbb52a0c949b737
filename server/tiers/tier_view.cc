#include "server/tiers/tier_view.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// What tiers are compared by: the time until so many more bytes are here.
constexpr uint64_t kComparedBytes = 1 << 20;

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
  const std::chrono::duration<double> seconds = now - begun.at;
  const RecentFit<2>::Sample size = {1, static_cast<double>(begun.bytes_out)};
  // One that was given up early says nothing; one that was waited for in vain takes longer than was thought.
  const bool longer = result == TierResult::kLate && seconds.count() > seconds_.At(size);
  if (result == TierResult::kDone || longer) seconds_.Add(size, seconds.count());
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

// ----------------------------------------------------------------------------------------------------- one tier

AttachedTier::AttachedTier(TierMember member, uint64_t id, size_t slot, const Facts& facts)
    : rule_(member.rule),
      spec_(std::move(member.spec)),
      id_(id),
      slot_(slot),
      facts_(facts),
      tier_(std::move(member.tier)) {}

void AttachedTier::LoadsBegin(uint64_t values) {
  MutexLock lock(&mu_);
  out_.loads += values;
}

void AttachedTier::LoadEnds() {
  MutexLock lock(&mu_);
  --out_.loads;
}

void AttachedTier::StoresBegin(uint64_t values) {
  MutexLock lock(&mu_);
  out_.stores += values;
}

void AttachedTier::StoreEnds() {
  MutexLock lock(&mu_);
  --out_.stores;
}

AttachedTier::Out AttachedTier::out() {
  MutexLock lock(&mu_);
  return out_;
}

// ----------------------------------------------------------------------------------------------------- the view

AttachedTier* TierView::at(size_t slot) const {
  for (const Entry& entry : entries_) {
    if (entry.tier->slot() == slot) return entry.tier.get();
  }
  return nullptr;
}

TierView::Members TierView::writers() const {
  Members writers = 0;
  for (const auto& [tier, writes] : entries_) writers |= writes ? BitOf(tier->slot()) : 0;
  return writers;
}

TierView::Members TierView::lasting() const {
  Members lasting = 0;
  for (const auto& [tier, writes] : entries_) {
    if (writes && tier->tier().lasting()) lasting |= BitOf(tier->slot());
  }
  return lasting;
}

uint64_t TierView::most_value_bytes() const {
  uint64_t most = 0;
  for (const Entry& entry : entries_) most = std::max(most, entry.tier->tier().most_value_bytes());
  return most;
}

// ------------------------------------------------------------------------------------------------------- up

std::vector<const TierView::Entry*> TierView::Order() const {
  std::vector<const Entry*> order;
  for (const Entry& entry : entries_) order.push_back(&entry);
  if (order.size() < 2) return order;
  std::array<double, kMost> seconds{};  // Indexed by slot.
  for (const Entry* entry : order)
    seconds[entry->tier->slot()] = entry->tier->cost().Forecast(kComparedBytes, false).value_or(0);
  std::stable_sort(order.begin(), order.end(), [&](const Entry* a, const Entry* b) {
    return seconds[a->tier->slot()] < seconds[b->tier->slot()];
  });
  return order;
}

void TierView::Find(absl::Span<const TierKey> keys, absl::Span<Found> found) const {
  std::fill(found.begin(), found.end(), Found{});
  std::vector<size_t> left(keys.size());  // Whoever surely has it goes in front of who may.
  std::iota(left.begin(), left.end(), 0);
  std::vector<TierKey> asked(keys.begin(), keys.end());
  std::vector<TierPresence> there(keys.size());
  for (const Entry* entry : Order()) {
    if (left.empty()) return;
    entry->tier->tier().Exists(asked, absl::MakeSpan(there).first(asked.size()));
    size_t kept = 0;
    for (size_t i = 0; i < left.size(); ++i) {
      Found& of_key = found[left[i]];
      if (there[i] == TierPresence::kYes ||
          (there[i] == TierPresence::kUnknown && of_key.presence == TierPresence::kNo)) {
        of_key = {there[i], static_cast<uint8_t>(entry->tier->slot())};
      }
      if (of_key.presence == TierPresence::kYes) continue;
      asked[kept] = asked[i];
      left[kept++] = left[i];
    }
    asked.resize(kept);
    left.resize(kept);
  }
}

std::optional<double> TierView::Forecast(const std::array<uint64_t, kMost>& bytes, bool lately) const {
  double seconds = 0;
  for (const Entry& entry : entries_) {
    const uint64_t of_tier = bytes[entry.tier->slot()];
    if (of_tier == 0) continue;
    const std::optional<double> takes = entry.tier->cost().Forecast(of_tier, lately);
    if (!takes.has_value()) return std::nullopt;
    seconds = std::max(seconds, *takes);
  }
  return seconds;
}

// ----------------------------------------------------------------------------------------------------- down

void TierView::Wanted(absl::Span<const Offered> offered, uint64_t value_bytes, size_t spaces,
                      absl::Span<Members> wanted) const {
  std::fill(wanted.begin(), wanted.end(), Members{0});
  std::vector<TierKey> keys;
  std::vector<size_t> of;
  std::vector<TierPresence> there;
  for (const auto& [attached, writes] : entries_) {
    Tier& tier = attached->tier();
    if (!writes || value_bytes > tier.most_value_bytes()) continue;
    const TierRule& rule = attached->rule();
    const Members bit = BitOf(attached->slot());
    // Half of it: values of many sizes leave gaps.
    const uint64_t capacity_bytes = attached->facts().capacity_bytes;
    const uint64_t share = capacity_bytes / 2 / std::max<size_t>(spaces, 1);
    const uint64_t places =
        capacity_bytes == 0 ? UINT64_MAX : std::max<uint64_t>(share / WholePages(value_bytes), 1);
    keys.clear();
    of.clear();
    for (size_t i = 0; i < offered.size(); ++i) {
      const Offered& block = offered[i];
      const bool by_rule =
          block.owed != 0 ? (block.owed & bit) != 0
          : rule.when == TierWrite::kReuse
              ? block.why != TierOffer::kSealed && block.uses >= rule.uses
              : block.why == TierOffer::kEnds ||
                    block.why == (rule.when == TierWrite::kEvict ? TierOffer::kLeaves : TierOffer::kSealed);
      if (!by_rule || (block.why == TierOffer::kLeaves && block.place >= places)) continue;
      keys.push_back(block.key);
      of.push_back(i);
    }
    there.resize(keys.size());
    tier.Exists(keys, absl::MakeSpan(there));
    for (size_t i = 0; i < of.size(); ++i) {
      if (there[i] != TierPresence::kYes) wanted[of[i]] |= bit;
    }
  }
}

}  // namespace kvpool
