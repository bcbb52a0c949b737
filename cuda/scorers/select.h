// The choice of tokens or blocks that leave, given their scores.
//
// They leave in the order NaN, -Inf, …, +Inf; equal scores leave lowest index (oldest) first; -0 and 0 are
// equal. Protected ones never leave. The same scores give the same victims on every device.
#ifndef KVPOOL_CUDA_SCORERS_SELECT_H_
#define KVPOOL_CUDA_SCORERS_SELECT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/policies/registry.h"

namespace kvpool::scorers {

struct IndexRange {
  uint32_t begin = 0;
  uint32_t end = 0;  // exclusive
};

// Marks with 1 the tokens that stay in any case, and the others with 0. `marks` has shape.tokens entries.
void MarkProtectedTokens(const Protection& protection, absl::Span<const IndexRange> ranges,
                         const KvShape& shape, absl::Span<uint8_t> marks);
// Marks with 1 the blocks that stay in any case: those with a token that does, and a last block that is not
// full. `marks` has shape.blocks() entries.
void MarkProtectedBlocks(const Protection& protection, absl::Span<const IndexRange> token_ranges,
                         const KvShape& shape, absl::Span<uint8_t> marks);

// Writes the indices of the `count` lowest of `scores` that are not protected, ascending, to `victims`.
// `keys` is workspace of scores.size() words. INVALID_ARGUMENT: fewer than `count` are not protected; with
// the numbers.
absl::Status SelectVictims(absl::Span<const float> scores, absl::Span<const uint8_t> protected_marks,
                           uint32_t count, absl::Span<uint64_t> keys, absl::Span<uint32_t> victims);

// The same for each of `rows` rows of scores with the same marks: victims[row * count + i]. `keys` grows to
// one row.
absl::Status SelectRows(const float* scores, uint32_t rows, absl::Span<const uint8_t> protected_marks,
                        uint32_t count, std::vector<uint64_t>* keys, absl::Span<uint32_t> victims);
// AdaKV (arXiv 2407.11550, algorithm 1; kvpress's AdaKVPress): the rows of a layer's heads share what stays. Of
// rows * kept items, kept being items - count - discarded, those of the highest scores over all rows do, but in each row its
// own highest LeastKept(kept, safeguard) in any case, and none but its own highest `most`. Protected ones are among these,
// first of all. Of equal scores the oldest leaves first, and of equally old ones the first row's. Where rows have fewer items
// than there is room for, fewer stay.
struct SharedChoice {
  uint32_t rows = 0;
  uint32_t count = 0;  // leave each row by their scores, on average
  double safeguard = 0.2;
  uint32_t most = UINT32_MAX;            // stay in a row at most; at least `kept`
  absl::Span<const uint32_t> discarded;  // marked items that leave every row besides, ascending
  absl::Span<const IndexRange> absent;   // items that each row has not; empty: all have all
};
uint32_t LeastKept(uint32_t kept, double safeguard);
// Victims ascending by row, of scores[row][item], those discarded and absent not among them; together they are rows * count
// if none is absent. INVALID_ARGUMENT: fewer than that are not protected, or rows * items is 2^32 or more.
absl::StatusOr<std::vector<std::vector<uint32_t>>> SelectShared(const float* scores,
                                                                const SharedChoice& choice,
                                                                absl::Span<const uint8_t> protected_marks);
// LU-KV (arXiv 2602.08585; kvpress's LUKVPress): how many of `items` each head of a layer keeps, where head h loses the share
// lost[h], as a model's heads were found to bear it. The heads' sum is rounded once: what is left of it when each is rounded
// down goes to the heads of the largest remainders, of equal ones to the first. Each keeps at least `least`, at most all.
// REQUIRES: least <= items.
std::vector<uint32_t> KeptByShares(absl::Span<const float> lost, uint32_t items, uint32_t least);
// INVALID_ARGUMENT: there are not `count` that are not protected.
absl::Status CheckCandidates(absl::Span<const uint8_t> protected_marks, uint32_t count);

// The policy's protection, that of its query window included.
Protection ProtectionOf(const BoundPolicy& policy, const KvShape& shape, uint32_t window_tokens,
                        uint32_t budget_tokens);

// The number of tokens that leave when a sequence is compacted to `budget_tokens`, and of full blocks that
// leave when it is pruned block by block. Tokens behind the last full block do not count against a budget in
// blocks: a sequence may be up to a block above it, and in steady state loses one block for each that fills.
uint32_t TokensOverBudget(const BoundPolicy& policy, const KvShape& shape, uint32_t budget_tokens);
uint32_t BlocksOverBudget(const KvShape& shape, uint32_t budget_tokens);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_SELECT_H_
