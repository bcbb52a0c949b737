// CAOTE: the error that a token's loss makes in the head's output, with another policy's scores as attention.
//
// The error is exact for these scores, of a token and of a block (value_error.h).
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/value_error.h"

namespace kvpool::scorers {

struct Caote : ValueErrorPolicy<HeadOutput::kWeighted> {
  static constexpr PolicyFacts kFacts = {
      .name = "caote",
      .title = "CAOTE",
      .source = "arXiv 2504.14051",
      .description =
          "Weighs each token by what its loss does to the head's output: host score, brought to sum 1, as "
          "attention, times the distance of its value from the output. Blocks get the exact form for a whole "
          "block.",
      .needs = kNeeds,
      .params = kParams,
      .default_host = "h2o",
      .own_blocks = HasOwnBlocks,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_
