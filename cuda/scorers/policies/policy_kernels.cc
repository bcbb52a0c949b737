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
constexpr BlocksFunction kBlocksOf = nullptr;
#define KVPOOL_BLOCKS_OF(Policy) \
  template <>                    \
  constexpr BlocksFunction kBlocksOf<Policy> = &Policy::ScoreBlocks<HostTeam>;
KVPOOL_BLOCK_POLICIES(KVPOOL_BLOCKS_OF)
#undef KVPOOL_BLOCKS_OF

#define KVPOOL_LISTED(Policy)                                                             \
  static_assert((kBlocksOf<Policy> != nullptr) == (Policy::kFacts.own_blocks != nullptr), \
                "registry.list says whether " #Policy " has blocks of its own");
KVPOOL_POLICIES(KVPOOL_LISTED)
#undef KVPOOL_LISTED

#define KVPOOL_SCORE(Policy) &Policy::Score<HostTeam>,
#define KVPOOL_BLOCKS(Policy) kBlocksOf<Policy>,
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
