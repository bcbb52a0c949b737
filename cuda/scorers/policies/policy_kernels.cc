#include "cuda/scorers/policies/policy_kernels.h"

#include "cuda/scorers/host/host_team.h"
#include "kvpool_policies/all.h"
#include "proto/support/check.h"

namespace kvpool::scorers {
namespace {

using ScoreFunction = void (*)(const HostTeam&, const Plane&, const Params&, float*);
using BlocksFunction = void (*)(const HostTeam&, const ScoreContext&, PlaneRange, uint32_t, const Params&,
                                float*);

template <typename Policy>
constexpr BlocksFunction BlocksOf() {
  if constexpr (requires { &Policy::template ScoreBlocks<HostTeam>; }) {
    return &Policy::template ScoreBlocks<HostTeam>;
  } else {
    return nullptr;
  }
}

#define KVPOOL_SCORE(Policy) &Policy::Score<HostTeam>,
#define KVPOOL_BLOCKS(Policy) BlocksOf<Policy>(),
constexpr ScoreFunction kScore[] = {KVPOOL_POLICIES(KVPOOL_SCORE)};
constexpr BlocksFunction kBlocks[] = {KVPOOL_POLICIES(KVPOOL_BLOCKS)};
#undef KVPOOL_SCORE
#undef KVPOOL_BLOCKS

}  // namespace

void ScorePlane(PolicyId policy, const ScoreContext& context, uint32_t plane, uint32_t scratch_index,
                const Params& params, float* scores) {
  kScore[static_cast<uint32_t>(policy)](HostTeam(), context.At(plane, scratch_index), params, scores);
}

void ScoreBlocks(PolicyId policy, const ScoreContext& context, PlaneRange planes, uint32_t scratch_index,
                 const Params& params, float* block_scores) {
  const BlocksFunction blocks = kBlocks[static_cast<uint32_t>(policy)];
  KVPOOL_CHECK(blocks != nullptr, "policy %u has no blocks of its own", static_cast<uint32_t>(policy));
  blocks(HostTeam(), context, planes, scratch_index, params, block_scores);
}

}  // namespace kvpool::scorers
