// Joins the rows of a sequence whose heads are spread over ranks, each of which scores its own on its device:
// the result is that of one device with all heads. Heads of rank 0 come first.
//
// Ranks have equally many heads, so a mean over heads is the mean of the ranks' means. Heads are reduced
// before layers: where the two reductions differ, a rank computes a row for each layer even if one row is
// asked for.
#ifndef KVPOOL_CUDA_SCORERS_RANK_ROWS_H_
#define KVPOOL_CUDA_SCORERS_RANK_ROWS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cuda/scorers/score.h"

namespace kvpool::scorers {

// The request that rank `rank` of `ranks` runs for `asked`, which has the shape of one rank.
ScoreRequest RequestOfRank(const ScoreRequest& asked, uint32_t rank, uint32_t ranks);
// The number of rows of `asked` over all ranks.
uint32_t RowsOfRanks(const ScoreRequest& asked, uint32_t ranks);

// The rows of each rank, by_rank[rank][row * items + i], by the plan of its RequestOfRank. The functions
// below fill rows[row * items + i] of `asked`.
struct RankRows {
  const ScoreRequest* asked = nullptr;
  const ScorePlan* plan = nullptr;
  absl::Span<const float* const> by_rank;
  uint64_t items = 0;
};
void JoinTokenRows(const RankRows& ranks, float* rows);
// For block scores that are the policy's own, which are means over the heads of a layer.
void JoinOwnBlockRows(const RankRows& ranks, float* rows);
// Block scores from the joined rows of tokens.
void ReduceBlockRows(const ScoreRequest& asked, uint32_t rows, const float* token_rows, float* block_rows);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_RANK_ROWS_H_
