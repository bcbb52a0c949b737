// Runs the formula of any policy on the host.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_POLICY_KERNELS_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_POLICY_KERNELS_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/policies/registry.h"

namespace kvpool::scorers {

// Fills scores[0, tokens) of one plane.
void ScorePlane(PolicyId policy, const ScoreContext& context, uint32_t plane, uint32_t scratch_index,
                const Params& params, float* scores);
// Fills the policy's own block scores. REQUIRES: FactsOf(policy).own_blocks(params).
void ScoreBlocks(PolicyId policy, const ScoreContext& context, PlaneRange planes, uint32_t scratch_index,
                 const Params& params, float* block_scores);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_POLICY_KERNELS_H_
