#include "server/space/below.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

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

Below::Found Below::Look(const v1::Match& match, uint64_t tokens, Unknown unknown) const {
  struct Run {
    uint64_t begin = 0;
    std::vector<BlockKey> keys;
    std::vector<bool> resident, tried;
  };
  Found found{.tokens = tokens};
  uint64_t end = UINT64_MAX, step = 1;
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
    size_t end_of_run = SIZE_MAX;
    for (bool goes_on = true; goes_on && run.begin + run.keys.size() < last;) {
      std::array<TierKey, kLookedAtOnce> asked;
      std::array<TierPresence, kLookedAtOnce> there{};
      const size_t before = run.keys.size();
      const size_t n = std::min<uint64_t>(kLookedAtOnce, last - run.begin - before);
      for (size_t i = 0; i < n; ++i) {
        run.keys.push_back(KeyAt(group, run.begin + before + i));
        run.resident.push_back(pool_.Find(run.keys.back()) != kNullRef);
        asked[i] = TierKeyOf(facts_, run.keys.back());
      }
      tier_->Exists(absl::MakeConstSpan(asked).first(n), absl::MakeSpan(there).first(n));
      for (size_t i = 0; i < n && goes_on; ++i) {
        const bool is_unknown = there[i] == TierPresence::kUnknown && !run.resident[before + i];
        run.tried.push_back(is_unknown);
        if (run.resident[before + i] || there[i] == TierPresence::kYes) continue;
        if (is_unknown && unknown == Unknown::kTried) continue;
        end_of_run = std::min(end_of_run, before + i);
        goes_on = is_unknown;
      }
    }
    run.keys.resize(std::min(run.keys.size(), end_of_run));
    end = std::min(end, (run.begin + run.keys.size()) * tokens_per_block);
  }
  end -= end % step;
  if (end <= tokens) return found;
  found.tokens = end;
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
    }
  }
  return found;
}

Below::Found Below::Report(const v1::Match& match, v1::MatchResult* answer) const {
  Found found = Look(match, answer->tokens(), Unknown::kLeftOut);
  if (found.blocks.empty()) return found;
  answer->set_below_tokens(found.tokens - answer->tokens());
  answer->set_below(std::string(tier_->name()));
  return found;
}

std::shared_ptr<Promotion> Below::Begin(uint64_t session, uint64_t until_ms,
                                        std::vector<Promotion::Block> blocks) {
  size_t& waits = waits_[session];
  if (under_way_.size() >= kMostPromotions || waits >= kMostWaits) {
    if (waits == 0) waits_.erase(session);
    return nullptr;
  }
  auto promotion = std::make_shared<Promotion>();
  promotion->id = ++last_promotion_;
  promotion->until_ms = until_ms;
  promotion->blocks = std::move(blocks);
  under_way_[promotion->id] = session;
  ++waits;
  return promotion;
}

uint64_t Below::End(uint64_t promotion) {
  const auto ended = under_way_.find(promotion);
  if (ended == under_way_.end()) return 0;
  const uint64_t session = ended->second;
  under_way_.erase(ended);
  if (const auto waits = waits_.find(session); waits != waits_.end() && --waits->second == 0) {
    waits_.erase(waits);
  }
  return session;
}

void Below::Sealed(BlockRef ref, const BlockKey& key) {
  if (sealed_.size() == kMostSealed) {
    ++counters.dropped;
    return;
  }
  sealed_.push_back({ref, key});
}

void Below::NextDown(uint32_t count, std::vector<BlockPool::Departing>* out) {
  if (write_ == TierWrite::kEvict) return pool_.NextToLeave(count, out);
  for (; count > 0 && !sealed_.empty(); --count) {
    out->push_back(sealed_.front());
    sealed_.pop_front();
  }
}

void Below::Left(absl::Span<const Eviction> evictions) {
  if (!on()) return;
  for (; !evictions.empty(); evictions.remove_prefix(std::min(kLookedAtOnce, evictions.size()))) {
    const auto some = evictions.first(std::min(kLookedAtOnce, evictions.size()));
    std::array<TierKey, kLookedAtOnce> keys;
    std::array<TierPresence, kLookedAtOnce> there{};
    for (size_t i = 0; i < some.size(); ++i) keys[i] = TierKeyOf(facts_, some[i].key);
    tier_->Exists(absl::MakeConstSpan(keys).first(some.size()), absl::MakeSpan(there).first(some.size()));
    // Under write=evict the mover asks for what is about to leave. Of what it has not come to, a tier that nodes share knows nothing.
    const bool asked_for = write_ == TierWrite::kEvict;
    for (size_t i = 0; i < some.size(); ++i) {
      counters.unwritten +=
          there[i] == TierPresence::kNo || (asked_for && there[i] == TierPresence::kUnknown);
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
