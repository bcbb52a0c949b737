// FastCAOTE: CAOTE with the mean of V in place of the head's output, which needs no weighted sum.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/value_error.h"

namespace kvpool::scorers {

struct FastCaote : ValueErrorPolicy<HeadOutput::kMean> {
  static constexpr PolicyFacts kFacts = {
      .name = "fast_caote",
      .title = "FastCAOTE",
      .source = "arXiv 2504.14051",
      .description = "CAOTE with the mean of the values in place of the head's output.",
      .needs = kNeeds,
      .params = kParams,
      .default_host = "h2o",
      .own_blocks = HasOwnBlocks,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_
