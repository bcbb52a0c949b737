#include "cuda/scorers/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/parts/order.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool::scorers {
namespace {

void Mark(uint64_t begin, uint64_t end, absl::Span<uint8_t> marks) {
  end = std::min<uint64_t>(end, marks.size());
  for (uint64_t i = begin; i < end; ++i) marks[i] = 1;
}

uint64_t Before(uint64_t all, uint64_t last) { return all - std::min(all, last); }

absl::Status TooFewCandidates(size_t candidates, size_t all, uint32_t count) {
  if (candidates >= count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(count, " of ", all, " must leave for the budget, but ",
                                                 all - candidates, " are protected"));
}

}  // namespace

void MarkProtectedTokens(const Protection& protection, absl::Span<const IndexRange> ranges,
                         const KvShape& shape, absl::Span<uint8_t> marks) {
  KVPOOL_CHECK(marks.size() == shape.tokens, "%zu marks for %u tokens", marks.size(), shape.tokens);
  std::fill(marks.begin(), marks.end(), 0);
  const uint64_t per_block = shape.tokens_per_block;
  Mark(0, protection.first_tokens, marks);
  Mark(0, protection.first_blocks * per_block, marks);
  Mark(Before(shape.tokens, protection.last_tokens), shape.tokens, marks);
  if (protection.last_blocks != 0) {
    // The tokens of so many full blocks, and those behind the last full one.
    const uint64_t rest = shape.tokens % per_block;
    Mark(Before(shape.tokens, protection.last_blocks * per_block + rest), shape.tokens, marks);
  }
  for (const IndexRange& range : ranges) Mark(range.begin, range.end, marks);
}

void MarkProtectedBlocks(const Protection& protection, absl::Span<const IndexRange> token_ranges,
                         const KvShape& shape, absl::Span<uint8_t> marks) {
  const uint64_t blocks = shape.blocks(), per_block = shape.tokens_per_block;
  KVPOOL_CHECK(marks.size() == blocks, "%zu marks for %zu blocks", marks.size(), size_t{blocks});
  std::fill(marks.begin(), marks.end(), 0);
  const auto mark_tokens = [&](uint64_t begin, uint64_t end) {
    if (begin < end) Mark(begin / per_block, (end + per_block - 1) / per_block, marks);
  };
  Mark(0, protection.first_blocks, marks);
  mark_tokens(0, protection.first_tokens);
  mark_tokens(Before(shape.tokens, protection.last_tokens), shape.tokens);
  const uint64_t full = shape.tokens / per_block;
  if (protection.last_blocks != 0) Mark(Before(full, protection.last_blocks), blocks, marks);
  // A block that is not full is being written.
  Mark(full, blocks, marks);
  for (const IndexRange& range : token_ranges) mark_tokens(range.begin, range.end);
}

absl::Status SelectVictims(absl::Span<const float> scores, absl::Span<const uint8_t> protected_marks,
                           uint32_t count, absl::Span<uint64_t> keys, absl::Span<uint32_t> victims) {
  KVPOOL_CHECK(
      protected_marks.size() == scores.size() && keys.size() >= scores.size() && victims.size() >= count,
      "%zu scores, %zu marks, %zu keys, room for %zu of %u victims", scores.size(), protected_marks.size(),
      keys.size(), victims.size(), count);
  size_t candidates = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (protected_marks[i] == 0) keys[candidates++] = OrderOf(scores[i], static_cast<uint32_t>(i));
  }
  RETURN_IF_ERROR(TooFewCandidates(candidates, scores.size(), count));
  const auto end = keys.begin() + count;
  if (count > 0 && count < candidates) std::nth_element(keys.begin(), end, keys.begin() + candidates);
  for (uint32_t i = 0; i < count; ++i) victims[i] = static_cast<uint32_t>(keys[i]);
  std::sort(victims.begin(), victims.begin() + count);
  return absl::OkStatus();
}

absl::Status SelectRows(const float* scores, uint32_t rows, absl::Span<const uint8_t> protected_marks,
                        uint32_t count, std::vector<uint64_t>* keys, absl::Span<uint32_t> victims) {
  const size_t items = protected_marks.size();
  if (keys->size() < items) keys->resize(items);
  for (uint32_t row = 0; row < rows; ++row) {
    RETURN_IF_ERROR(SelectVictims({scores + row * items, items}, protected_marks, count,
                                  absl::MakeSpan(*keys), victims.subspan(size_t{row} * count, count)));
  }
  return absl::OkStatus();
}

uint32_t LeastKept(uint32_t kept, double safeguard) {
  if (kept == 0 || safeguard <= 0) return 0;
  return std::max(1u, static_cast<uint32_t>(std::min(safeguard, 1.0) * kept));
}

absl::StatusOr<std::vector<std::vector<uint32_t>>> SelectShared(const float* scores,
                                                                const SharedChoice& choice,
                                                                absl::Span<const uint8_t> protected_marks) {
  const size_t items = protected_marks.size();
  if (uint64_t{choice.rows} * items > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(choice.rows, " heads of ", items,
                                                   " items share a budget; together they may be ",
                                                   std::numeric_limits<uint32_t>::max()));
  }
  RETURN_IF_ERROR(CheckCandidates(protected_marks, choice.count));
  const size_t kept = items - choice.count - choice.discarded.size();
  const size_t least = LeastKept(static_cast<uint32_t>(kept), choice.safeguard);
  size_t room = choice.rows * kept;  // Stay besides those that do in any case.
  std::vector<std::vector<uint32_t>> victims(choice.rows);
  std::vector<uint64_t> keys, of_row;
  for (uint32_t row = 0; row < choice.rows; ++row) {
    const IndexRange absent = choice.absent.empty() ? IndexRange{} : choice.absent[row];
    const auto is_there = [&](uint32_t i) { return i < absent.begin || i >= absent.end; };
    of_row.clear();
    size_t own = 0;
    for (uint32_t i = 0; i < items; ++i) {
      if (!is_there(i)) continue;
      if (protected_marks[i] == 0) {
        of_row.push_back(OrderOf(scores[row * items + i], i));
      } else {
        ++own;
      }
    }
    own -= std::count_if(choice.discarded.begin(), choice.discarded.end(), is_there);
    const size_t at_most = choice.most - std::min<size_t>(choice.most, own);
    const size_t safe = std::min({least - std::min(least, own), at_most, of_row.size()});
    const auto end = of_row.end() - static_cast<ptrdiff_t>(safe);
    std::nth_element(of_row.begin(), end, of_row.end());
    const auto begin = end - static_cast<ptrdiff_t>(
                                 std::min<size_t>(at_most - safe, static_cast<size_t>(end - of_row.begin())));
    std::nth_element(of_row.begin(), begin, end);
    for (auto key = of_row.begin(); key != begin; ++key) victims[row].push_back(static_cast<uint32_t>(*key));
    for (auto key = begin; key != end; ++key) {
      const uint32_t item = static_cast<uint32_t>(*key);
      keys.push_back((*key >> 32 << 32) | (item * choice.rows + row));
    }
    room -= own + safe;  // Not below 0: neither is above `kept`.
  }
  const size_t leaving = keys.size() - std::min(keys.size(), room);
  std::nth_element(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(leaving), keys.end());
  for (size_t i = 0; i < leaving; ++i) {
    const uint32_t place = static_cast<uint32_t>(keys[i]);
    victims[place % choice.rows].push_back(place / choice.rows);
  }
  for (std::vector<uint32_t>& of : victims) std::sort(of.begin(), of.end());
  return victims;
}

std::vector<uint32_t> KeptByShares(absl::Span<const float> lost, uint32_t items, uint32_t least) {
  const auto heads = static_cast<uint32_t>(lost.size());
  std::vector<float> remainders(heads);
  std::vector<uint32_t> kept(heads);
  float sum = 0;
  uint64_t whole = 0;
  for (uint32_t head = 0; head < heads; ++head) {
    const float ideal = std::clamp(1 - lost[head], 0.0f, 1.0f) * static_cast<float>(items);
    kept[head] = static_cast<uint32_t>(ideal);
    remainders[head] = ideal - static_cast<float>(kept[head]);
    sum += ideal;
    whole += kept[head];
  }
  const auto rounded = static_cast<uint64_t>(std::nearbyint(sum));
  const uint64_t more = rounded > whole ? std::min<uint64_t>(rounded - whole, heads) : 0;
  std::vector<uint32_t> order(heads);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return remainders[a] > remainders[b]; });
  for (uint64_t i = 0; i < more; ++i) ++kept[order[i]];
  for (uint32_t& of_head : kept) of_head = std::clamp(of_head, least, items);
  return kept;
}

absl::Status CheckCandidates(absl::Span<const uint8_t> protected_marks, uint32_t count) {
  return TooFewCandidates(std::count(protected_marks.begin(), protected_marks.end(), 0),
                          protected_marks.size(), count);
}

Protection ProtectionOf(const BoundPolicy& policy, const KvShape& shape, uint32_t window_tokens,
                        uint32_t budget_tokens) {
  const PolicyFacts& facts = policy.facts();
  Protection protection;
  if (facts.protect != nullptr) protection = facts.protect(policy.params, shape, budget_tokens);
  // A policy over a host protects the same tokens as the host.
  bool window = facts.protect_window;
  if (policy.has_host()) {
    const PolicyFacts& host = FactsOf(policy.host);
    if (host.protect != nullptr) protection = host.protect(policy.host_params, shape, budget_tokens);
    window = window || host.protect_window;
  }
  if (window) protection.last_tokens = std::max(protection.last_tokens, window_tokens);
  return protection;
}

uint32_t TokensOverBudget(const BoundPolicy& policy, const KvShape& shape, uint32_t budget_tokens) {
  const PolicyFacts& facts = policy.facts();
  const uint32_t target =
      facts.compact_to == nullptr ? budget_tokens : facts.compact_to(policy.params, shape, budget_tokens);
  return shape.tokens > target ? shape.tokens - target : 0;
}

uint32_t BlocksOverBudget(const KvShape& shape, uint32_t budget_tokens) {
  const uint64_t per_block = shape.tokens_per_block;
  const uint64_t full = shape.tokens / per_block * per_block;
  // Tokens behind the last full block do not count: the sequence may fill up to less than a block above
  // the budget.
  if (full <= budget_tokens) return 0;
  return static_cast<uint32_t>((full - budget_tokens + per_block - 1) / per_block);
}

}  // namespace kvpool::scorers
