// A sequence whose heads are spread over ranks, each scored on its own device: their rows brought together, as if one
// device had all heads. Heads of rank 0 come first.
//
// Ranks have equally many heads, so a mean over heads is the mean of the ranks' means. Heads are reduced before layers are:
// where those two reductions differ, a rank gives a row a layer for what is to become one row.
#ifndef KVPOOL_CUDA_SCORERS_RANK_ROWS_H_
#define KVPOOL_CUDA_SCORERS_RANK_ROWS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cuda/scorers/score.h"

namespace kvpool::scorers {

// What each of `ranks` ranks is to be asked for `asked`, which has the shape of one rank.
ScoreRequest RequestOfRank(const ScoreRequest& asked, uint32_t rank, uint32_t ranks);
// Rows of `asked` over all ranks.
uint32_t RowsOfRanks(const ScoreRequest& asked, uint32_t ranks);

// What ranks gave by `plan`, that of RequestOfRank: by_rank[rank][row * items + i], to rows[row * items + i] of `asked`.
struct RankRows {
  const ScoreRequest* asked = nullptr;
  const ScorePlan* plan = nullptr;
  absl::Span<const float* const> by_rank;
  uint64_t items = 0;
};
void JoinTokenRows(const RankRows& ranks, float* rows);
// Of blocks that a policy scores itself: it has its own mean over the heads of a layer.
void JoinOwnBlockRows(const RankRows& ranks, float* rows);
// Blocks out of the joined rows of tokens.
void ReduceBlockRows(const ScoreRequest& asked, uint32_t rows, const float* token_rows, float* block_rows);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_RANK_ROWS_H_
