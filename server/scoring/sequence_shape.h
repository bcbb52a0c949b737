// A layer group of a strided layout, and a sequence in it, in the scorers' types.
#ifndef KVPOOL_SERVER_SCORING_SEQUENCE_SHAPE_H_
#define KVPOOL_SERVER_SCORING_SEQUENCE_SHAPE_H_

#include "absl/status/statusor.h"
#include "cuda/scorers/parts/kv_view.h"
#include "kvpool/v1/layout.pb.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// REQUIRES: not DTYPE_UNSPECIFIED.
scorers::KvDtype DtypeOf(v1::Dtype dtype);

// The view of `sequence`, its blocks' addresses left out. INVALID_ARGUMENT: last_block_tokens, or
// more than kMaxSequenceTokens.
absl::StatusOr<scorers::KvView> ViewOfGroup(const v1::LayerGroup& group, const v1::Sequence& sequence);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_SEQUENCE_SHAPE_H_
