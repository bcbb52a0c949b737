#include "server/space/below.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// Keys that are looked up together.
constexpr size_t kLookedAtOnce = 64;
// A step of several groups that is longer than this is that of no engine.
constexpr uint64_t kMostStepTokens = 1 << 30;

BlockKey KeyAt(const v1::GroupKeys& group, uint64_t index) {
  return BlockKey::From(std::string_view(group.keys()).substr(index * group.key_bytes(), group.key_bytes()),
                        group.group());
}

}  // namespace

void Below::Use(TierSet* tiers) {
  tiers_ = facts_.tier_space.has_value() ? tiers : nullptr;
  if (tiers_ != nullptr && tiers_->takes(TierOffer::kReused) && !uses_.has_value())
    uses_.emplace(facts_.geometry.max_blocks + 1);
}

Below::Found Below::Look(const v1::Match& match, uint64_t tokens, Unknown unknown) const {
  struct Run {
    uint64_t begin = 0;
    std::vector<BlockKey> keys;
    std::vector<bool> resident, tried;
    std::vector<uint8_t> tiers;  // Which has it.
  };
  Found found{.tokens = tokens};
  uint64_t end = UINT64_MAX, possible_end = UINT64_MAX, step = 1;
  std::vector<Run> runs;
  const size_t most = kMostLooked / static_cast<size_t>(match.groups_size());
  for (const v1::GroupKeys& group : match.groups()) {
    const uint64_t tokens_per_block =
        facts_.layout.groups(static_cast<int>(group.group())).tokens_per_block();
    step = std::lcm(step, tokens_per_block);
    if (step > kMostStepTokens) return found;
    Run& run = runs.emplace_back();
    run.begin = tokens / tokens_per_block;
    const uint64_t last = std::min<uint64_t>(group.keys().size() / group.key_bytes(), run.begin + most);
    // The run ends at what is not there, or left out. Behind what is left out the tier is asked all the same: then it knows
    // when the next match comes.
    size_t end_of_run = SIZE_MAX, possible_end_of_run = SIZE_MAX;
    for (bool goes_on = true; goes_on && run.begin + run.keys.size() < last;) {
      std::array<TierKey, kLookedAtOnce> asked;
      std::array<TierSet::Found, kLookedAtOnce> there;
      const size_t before = run.keys.size();
      const size_t n = std::min<uint64_t>(kLookedAtOnce, last - run.begin - before);
      for (size_t i = 0; i < n; ++i) {
        run.keys.push_back(KeyAt(group, run.begin + before + i));
        run.resident.push_back(pool_.Find(run.keys.back()) != kNullRef);
        asked[i] = TierKeyOf(facts_, run.keys.back());
      }
      tiers_->Find(absl::MakeConstSpan(asked).first(n), absl::MakeSpan(there).first(n));
      for (size_t i = 0; i < n && goes_on; ++i) {
        const TierPresence presence = there[i].presence;
        const bool is_unknown = presence == TierPresence::kUnknown && !run.resident[before + i];
        run.tried.push_back(is_unknown);
        run.tiers.push_back(there[i].member);
        if (run.resident[before + i] || presence == TierPresence::kYes) continue;
        if (is_unknown && unknown == Unknown::kTried) continue;
        end_of_run = std::min(end_of_run, before + i);
        goes_on = is_unknown;
        if (!goes_on) possible_end_of_run = before + i;
      }
    }
    possible_end =
        std::min(possible_end, (run.begin + std::min(run.keys.size(), possible_end_of_run)) * tokens_per_block);
    run.keys.resize(std::min(run.keys.size(), end_of_run));
    end = std::min(end, (run.begin + run.keys.size()) * tokens_per_block);
  }
  end -= end % step;
  found.may_be_more = possible_end - possible_end % step > std::max(end, tokens);
  if (end <= tokens) return found;
  found.tokens = end;
  const uint64_t value_bytes = facts_.layout.block_bytes() * facts_.devices.size();
  for (int g = 0; g < match.groups_size(); ++g) {
    const v1::GroupKeys& group = match.groups(g);
    const uint64_t tokens_per_block =
        facts_.layout.groups(static_cast<int>(group.group())).tokens_per_block();
    const Run& run = runs[static_cast<size_t>(g)];
    for (uint64_t i = 0; run.begin + i < end / tokens_per_block; ++i) {
      if (run.resident[i]) continue;
      Promotion::Block block{.key = run.keys[i], .tried = run.tried[i]};
      if (run.begin + i > 0) block.parent = KeyAt(group, run.begin + i - 1);
      found.blocks.push_back(std::move(block));
      found.bytes[run.tiers[i]] += value_bytes;
    }
  }
  return found;
}

Below::Found Below::Report(const v1::Match& match, v1::MatchResult* answer) const {
  Found found = Look(match, answer->tokens(), Unknown::kLeftOut);
  answer->set_may_be_below(found.may_be_more);
  if (found.blocks.empty()) return found;
  answer->set_below_tokens(found.tokens - answer->tokens());
  if (const std::optional<double> ms = ForecastMs(found, /*lately=*/false); ms.has_value())
    answer->set_below_ms(static_cast<uint32_t>(std::min(*ms, static_cast<double>(UINT32_MAX))));
  std::vector<std::string> names;
  for (size_t i = 0; i < tiers_->members().size(); ++i) {
    if (found.bytes[i] > 0) names.emplace_back(tiers_->members()[i].tier->name());
  }
  answer->set_below(absl::StrJoin(names, ","));
  return found;
}

std::string Below::Describe(const BlockKey& key) const {
  if (!on()) return "";
  const TierKey name = TierKeyOf(facts_, key);
  TierSet::Found there;
  tiers_->Find({&name, 1}, {&there, 1});
  if (there.presence == TierPresence::kNo) return "";
  const std::string tier(tiers_->members()[there.member].tier->name());
  if (there.presence == TierPresence::kUnknown)
    return absl::StrCat("may be below, in ", tier, ", which a match that waits asks for it");
  Found found;
  found.bytes[there.member] = facts_.layout.block_bytes() * facts_.devices.size();
  const std::optional<double> load_ms = ForecastMs(found, /*lately=*/false);
  const uint64_t tokens = facts_.layout.groups(key.group).tokens_per_block();
  const std::optional<double> saved = prefill.Saved(tokens, 0);
  return absl::StrCat("below, in ", tier, "; to bring it up takes ",
                      load_ms.has_value() ? absl::StrFormat("%.1f ms", *load_ms)
                                          : "nobody knows how long, as too little was loaded",
                      ", to compute its ", tokens, " tokens, with none in front, ",
                      saved.has_value() ? absl::StrFormat("%.1f ms", 1000 * *saved)
                                        : "nobody knows how long, as engines don't say");
}

std::optional<double> Below::ForecastMs(const Found& found, bool lately) const {
  const std::optional<double> seconds = tiers_->Forecast(found.bytes, lately);
  if (!seconds.has_value()) return std::nullopt;
  return std::max(1.0, 1000 * *seconds);
}

bool Below::IsWorth(const Found& found, uint64_t resident, uint64_t wait_ms) {
  const std::optional<double> load_ms = ForecastMs(found, /*lately=*/true);
  if (!load_ms.has_value()) return true;
  // What comes later is not waited for.
  const double part = std::min(1.0, static_cast<double>(wait_ms) / *load_ms);
  const auto tokens = static_cast<uint64_t>(part * static_cast<double>(found.tokens - resident));
  const std::optional<double> saved = prefill.Saved(tokens, resident);
  if (!saved.has_value() || part * *load_ms < 1000 * *saved) return true;
  counters.not_worth += found.blocks.size();
  return false;
}

std::shared_ptr<Promotion> Below::Begin(uint64_t session, uint64_t now_ms, uint64_t wait_ms, Found found) {
  size_t& waits = waits_[session];
  if (under_way_.size() >= kMostPromotions || waits >= kMostWaits) {
    if (waits == 0) waits_.erase(session);
    return nullptr;
  }
  auto promotion = std::make_shared<Promotion>();
  promotion->id = ++last_promotion_;
  promotion->until_ms = now_ms + wait_ms;
  promotion->begun_ms = now_ms;
  promotion->forecast_ms = ForecastMs(found, /*lately=*/false);
  promotion->blocks = std::move(found.blocks);
  under_way_[promotion->id] = session;
  ++waits;
  return promotion;
}

uint64_t Below::End(const Promotion& promotion, uint64_t now_ms, bool whole) {
  const auto ended = under_way_.find(promotion.id);
  if (ended == under_way_.end()) return 0;
  const uint64_t session = ended->second;
  under_way_.erase(ended);
  if (const auto waits = waits_.find(session); waits != waits_.end() && --waits->second == 0) {
    waits_.erase(waits);
  }
  if (whole && promotion.forecast_ms.has_value()) {
    const auto forecast = static_cast<uint64_t>(*promotion.forecast_ms + .5);
    const uint64_t taken = now_ms - promotion.begun_ms;
    ++counters.forecasts;
    counters.forecast_ms += forecast;
    counters.taken_ms += taken;
    counters.error_ms += std::max(forecast, taken) - std::min(forecast, taken);
  }
  return session;
}

void Below::Sealed(BlockRef ref, const BlockKey& key, uint32_t uses) {
  if (tiers_ == nullptr) return;
  if (uses_.has_value()) (*uses_)[Index(ref.id)] = static_cast<uint8_t>(uses);
  if (tiers_->takes(TierOffer::kSealed))
    List({.block = {ref, key}, .offer = TierOffer::kSealed, .uses = uses});
  // One that moved may have been listed where it was; one that has left before, and was computed again, is had twice.
  if (uses > 1 && tiers_->takes(TierOffer::kReused))
    List({.block = {ref, key}, .offer = TierOffer::kReused, .uses = uses});
}

void Below::Reused(absl::Span<const uint64_t> refs) {
  if (!uses_.has_value() || tiers_ == nullptr) return;
  for (const uint64_t packed : refs) {
    const BlockRef ref = BlockRef::Unpack(packed);
    if (ref == kNullRef) continue;
    uint8_t& uses = (*uses_)[Index(ref.id)];
    // It was sealed under a daemon before this one: somebody has computed it.
    if (uses == 0) uses = 1;
    if (uses == TierRule::kMostUses) continue;
    if (!tiers_->takes_after(++uses)) continue;
    const absl::StatusOr<BlockView> view = pool_.View(ref.id, 0);
    if (view.ok()) List({.block = {ref, view->key}, .offer = TierOffer::kReused, .uses = uses});
  }
}

void Below::List(const Going& going) {
  const auto add = [&](std::deque<Going>* list, TierSet::Members owed) {
    if (list->size() == kMostListed) {
      ++counters.dropped;
      return;
    }
    list->push_back(going);
    list->back().owed = owed;
  };
  if (going.owed == 0) return add(&listed_, 0);
  for (size_t member = 0; member < TierSet::kMost; ++member) {
    const auto bit = static_cast<TierSet::Members>(1u << member);
    if ((going.owed & bit) != 0) add(&owed_[member], bit);
  }
}

void Below::TakeListed(uint32_t count, TierSet::Members taking, std::vector<Going>* out) {
  const auto take = [out](std::deque<Going>* list, uint32_t most) {
    for (; most > 0 && !list->empty(); --most) {
      out->push_back(list->front());
      list->pop_front();
    }
  };
  // Half each: whatever is sealed meanwhile, what is owed goes on.
  take(&listed_, count / 2);
  for (size_t member = 0; member < TierSet::kMost; ++member) {
    if ((taking >> member & 1) != 0) take(&owed_[member], count / 2);
  }
}

void Below::NextToLeave(uint32_t count, std::vector<Going>* out) const {
  std::vector<BlockPool::Departing> next;
  pool_.NextToLeave(count, &next);
  for (const BlockPool::Departing& block : next) {
    out->push_back({.block = block, .offer = TierOffer::kLeaves, .uses = uses(block.ref.id)});
  }
}

void Below::Left(absl::Span<const Eviction> evictions) {
  if (!on()) return;
  // Under write=evict the mover asks for what is about to leave. Of what it has not come to, a tier that nodes share knows nothing.
  const bool asked_for = wants_leaving();
  for (; !evictions.empty(); evictions.remove_prefix(std::min(kLookedAtOnce, evictions.size()))) {
    const auto some = evictions.first(std::min(kLookedAtOnce, evictions.size()));
    std::array<TierKey, kLookedAtOnce> keys;
    std::array<TierSet::Found, kLookedAtOnce> there;
    for (size_t i = 0; i < some.size(); ++i) keys[i] = TierKeyOf(facts_, some[i].key);
    tiers_->Find(absl::MakeConstSpan(keys).first(some.size()), absl::MakeSpan(there).first(some.size()));
    for (size_t i = 0; i < some.size(); ++i) {
      const bool missing = there[i].presence == TierPresence::kNo ||
                           (asked_for && there[i].presence == TierPresence::kUnknown);
      counters.unwritten += missing && tiers_->keeps(uses(some[i].block));
    }
  }
}

absl::StatusOr<Holder> Below::holder() {
  if (holder_ == kNobody) {
    ASSIGN_OR_RETURN(holder_, pool_.AddSession({}, 0, kOwnersId));
  }
  return holder_;
}

}  // namespace kvpool
