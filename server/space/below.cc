#include "server/space/below.h"

#include <algorithm>
#include <array>
#include <cstdint>
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

// What a match asks of one group, and what there is of it.
class AskedGroup {
 public:
  AskedGroup(const v1::GroupKeys& keys, const v1::LayerGroup& layout)
      : keys_(keys),
        tokens_per_block_(layout.tokens_per_block()),
        window_((uint64_t{layout.window_tokens()} + tokens_per_block_ - 1) / tokens_per_block_) {}

  uint64_t keys() const { return keys_.keys().size() / keys_.key_bytes(); }
  BlockKey KeyOf(uint64_t block) const {
    return BlockKey::From(std::string_view(keys_.keys()).substr(block * keys_.key_bytes(), keys_.key_bytes()),
                          keys_.group());
  }
  uint64_t tokens_per_block() const { return tokens_per_block_; }
  uint64_t window() const { return window_; }  // Blocks; 0: there is none.
  // The first block that a prefix of so many reads.
  uint64_t First(uint64_t blocks) const { return window_ == 0 || blocks <= window_ ? 0 : blocks - window_; }

  // Those from here on are looked up, one after the other.
  void Begin(uint64_t block) { begin_ = block; }
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return begin_ + there_.size(); }
  // False: it is nowhere.
  bool Add(bool resident, const TierView::Found& below) {
    There there = There::kNo;
    if (resident) {
      there = There::kResident;
    } else if (below.presence != TierPresence::kNo) {
      there = below.presence == TierPresence::kYes ? There::kBelow : There::kUnknown;
    }
    for (const bool with_unknown : {false, true}) {
      const bool gap = there == There::kNo || (there == There::kUnknown && !with_unknown);
      behind_gap_[with_unknown].push_back(gap ? end() + 1 : BehindLastGap(end(), with_unknown));
      if (gap) first_gap_[with_unknown] = std::min(first_gap_[with_unknown], end());
    }
    there_.push_back(there);
    slots_.push_back(below.slot);
    return there != There::kNo;
  }
  // Behind the last one, or before the one that is nowhere, where that ended the look.
  uint64_t run_end() const { return there_.empty() || there_.back() != There::kNo ? end() : end() - 1; }
  // Of the prefixes of at most so many blocks no longer one is there than this; this one may not be, either. `with_unknown`: what tiers
  // do not know is there.
  uint64_t Longest(uint64_t blocks, bool with_unknown) const {
    if (window_ == 0) return std::min(blocks, first_gap_[with_unknown]);
    const uint64_t first = First(blocks);
    if (blocks <= begin_ || first < begin_) return 0;  // Nothing is known of what it reads.
    const uint64_t behind_gap = BehindLastGap(blocks, with_unknown);
    return behind_gap > first ? behind_gap - 1 : blocks;
  }
  bool resident(uint64_t block) const { return there_[block - begin_] == There::kResident; }
  bool unknown(uint64_t block) const { return there_[block - begin_] == There::kUnknown; }
  uint8_t slot(uint64_t block) const { return slots_[block - begin_]; }

 private:
  enum class There : uint8_t { kNo, kUnknown, kBelow, kResident };
  // The block behind the last one that is not there, among those before `blocks`; 0: there is none.
  uint64_t BehindLastGap(uint64_t blocks, bool with_unknown) const {
    return blocks <= begin_ ? 0 : behind_gap_[with_unknown][blocks - begin_ - 1];
  }

  const v1::GroupKeys& keys_;
  const uint64_t tokens_per_block_, window_;
  uint64_t begin_ = 0;
  // Indexed by block - begin_.
  std::vector<There> there_;
  std::vector<uint8_t> slots_;  // Those of the tiers that have it.
  // Of either, without what tiers do not know, and with it: where the last gap of what ends here ends, and the first gap of all.
  std::array<std::vector<uint64_t>, 2> behind_gap_;
  std::array<uint64_t, 2> first_gap_{UINT64_MAX, UINT64_MAX};
};

}  // namespace

void Below::Use(TierSet* tiers) {
  tiers_ = facts_.tier_space.has_value() ? tiers : nullptr;
  // Tiers that ask for it may come later.
  if (tiers_ != nullptr && !uses_.has_value()) uses_.emplace(facts_.geometry.max_blocks + 1);
}

Below::Found Below::Look(const v1::Match& match, uint64_t tokens, Unknown unknown) const {
  Found found{.tokens = tokens, .blocks = {}, .tiers = tiers_->view()};
  uint64_t step = 1;
  std::vector<AskedGroup> groups;
  const size_t most = kMostLooked / static_cast<size_t>(match.groups_size());
  for (const v1::GroupKeys& keys : match.groups()) {
    const v1::LayerGroup& layout = facts_.layout.groups(static_cast<int>(keys.group()));
    step = std::lcm(step, layout.tokens_per_block());
    if (step > kMostStepTokens) return found;
    groups.emplace_back(keys, layout);
  }
  const auto look = [&](AskedGroup* group, uint64_t end, bool ends_at_gap) {
    while (group->end() < end) {
      std::array<TierKey, kLookedAtOnce> asked;
      std::array<TierView::Found, kLookedAtOnce> there;
      const size_t n = std::min<uint64_t>(kLookedAtOnce, end - group->end());
      for (size_t i = 0; i < n; ++i) asked[i] = TierKeyOf(facts_, group->KeyOf(group->end() + i));
      found.tiers->Find(absl::MakeConstSpan(asked).first(n), absl::MakeSpan(there).first(n));
      for (size_t i = 0; i < n; ++i) {
        const bool resident = pool_.Find(group->KeyOf(group->end())) != kNullRef;
        if (!group->Add(resident, there[i]) && ends_at_gap) return;
      }
    }
  };
  // Where groups without a window end, the others are asked for what they have in front of there. What is behind a key of which the
  // tier does not know is asked for all the same: then it knows when the next match comes.
  uint64_t end = UINT64_MAX;
  for (AskedGroup& group : groups) {
    group.Begin(tokens / group.tokens_per_block());
    const uint64_t last = std::min<uint64_t>(group.keys(), group.begin() + most);
    if (group.window() == 0) look(&group, last, /*ends_at_gap=*/true);
    end = std::min(end, (group.window() == 0 ? group.run_end() : last) * group.tokens_per_block());
  }
  for (AskedGroup& group : groups) {
    if (group.window() == 0) continue;
    const uint64_t last = end / group.tokens_per_block();
    const uint64_t first = group.First(tokens / group.tokens_per_block() + 1);
    group.Begin(std::min(last, std::max(first, last - std::min<uint64_t>(last, most))));
    look(&group, last, /*ends_at_gap=*/false);
  }
  const auto longest = [&](bool with_unknown) {
    uint64_t length = end - end % step;
    for (bool shorter = true; shorter && length > tokens;) {
      shorter = false;
      for (const AskedGroup& group : groups) {
        const uint64_t good =
            group.Longest(length / group.tokens_per_block(), with_unknown) * group.tokens_per_block();
        if (good >= length) continue;
        length = good - good % step;
        shorter = true;
      }
    }
    return std::max(length, tokens);
  };
  found.tokens = longest(unknown == Unknown::kTried);
  found.may_be_more = longest(true) > found.tokens;
  if (found.tokens <= tokens) return found;
  const uint64_t value_bytes = facts_.layout.block_bytes() * facts_.devices.size();
  for (const AskedGroup& group : groups) {
    const uint64_t blocks = found.tokens / group.tokens_per_block();
    for (uint64_t i = std::max(group.begin(), group.First(blocks)); i < blocks; ++i) {
      if (group.resident(i)) continue;
      Promotion::Block block{.key = group.KeyOf(i), .tried = group.unknown(i)};
      if (i > 0) block.parent = group.KeyOf(i - 1);
      found.blocks.push_back(std::move(block));
      found.bytes[group.slot(i)] += value_bytes;
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
  for (const TierView::Entry& entry : found.tiers->entries()) {
    if (found.bytes[entry.tier->slot()] > 0) names.emplace_back(entry.tier->tier().name());
  }
  answer->set_below(absl::StrJoin(names, ","));
  return found;
}

std::string Below::Describe(const BlockKey& key) const {
  if (!on()) return "";
  const TierKey name = TierKeyOf(facts_, key);
  Found found{.blocks = {}, .tiers = tiers_->view()};
  TierView::Found there;
  found.tiers->Find({&name, 1}, {&there, 1});
  if (there.presence == TierPresence::kNo) return "";
  const std::string tier(found.tiers->at(there.slot)->tier().name());
  if (there.presence == TierPresence::kUnknown)
    return absl::StrCat("may be below, in ", tier, ", which a match that waits asks for it");
  found.bytes[there.slot] = facts_.layout.block_bytes() * facts_.devices.size();
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
  const std::optional<double> seconds = found.tiers->Forecast(found.bytes, lately);
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
  (*uses_)[Index(ref.id)] = static_cast<uint8_t>(uses);
  if (tiers_->takes(TierOffer::kSealed))
    List({.block = {ref, key}, .offer = TierOffer::kSealed, .uses = uses});
  // One that moved may have been listed where it was; one that has left before, and was computed again, is had twice.
  if (uses > 1 && tiers_->takes(TierOffer::kReused))
    List({.block = {ref, key}, .offer = TierOffer::kReused, .uses = uses});
}

void Below::Reused(absl::Span<const uint64_t> refs) {
  if (!counts_uses()) return;
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
  for (size_t slot = 0; slot < TierSet::kMost; ++slot) {
    const TierSet::Members bit = TierView::BitOf(slot);
    if ((going.owed & bit) != 0) add(&owed_[slot], bit);
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
  for (size_t slot = 0; slot < TierSet::kMost; ++slot) {
    if ((taking & TierView::BitOf(slot)) != 0) take(&owed_[slot], count / 2);
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
  const std::shared_ptr<const TierView> tiers = tiers_->view();
  for (; !evictions.empty(); evictions.remove_prefix(std::min(kLookedAtOnce, evictions.size()))) {
    const auto some = evictions.first(std::min(kLookedAtOnce, evictions.size()));
    std::array<TierKey, kLookedAtOnce> keys;
    std::array<TierView::Found, kLookedAtOnce> there;
    for (size_t i = 0; i < some.size(); ++i) keys[i] = TierKeyOf(facts_, some[i].key);
    tiers->Find(absl::MakeConstSpan(keys).first(some.size()), absl::MakeSpan(there).first(some.size()));
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
