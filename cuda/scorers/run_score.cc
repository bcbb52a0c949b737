#include <algorithm>
#include <cstring>

#include "cuda/scorers/host/host_kernels.h"
#include "cuda/scorers/host/host_team.h"
#include "cuda/scorers/host/host_window.h"
#include "cuda/scorers/parts/features.h"
#include "cuda/scorers/parts/window.h"
#include "cuda/scorers/policies/policy_kernels.h"
#include "cuda/scorers/score.h"
#include "proto/support/check.h"

namespace kvpool::scorers {
namespace {

// Items are small enough to spread over threads, and large enough that handing them out costs little.
constexpr uint32_t kPacksPerItem = 64;
constexpr uint32_t kBlocksPerWorker = 4;

// Computes everything about one plane up to its token scores, where these are asked for.
void ScoreOnePlane(const ScorePlan& plan, const ScoreContext& context, bool tokens, float* window_scratch,
                   uint32_t plane, uint32_t worker) {
  const HostTeam team;
  const BoundPolicy& policy = plan.request.policy;
  const uint64_t first = uint64_t{plane} * context.shape().tokens;
  if (context.k_norms != nullptr) UnpackRecords(team, context, plane, {0, context.shape().blocks()});
  if (context.anchors != nullptr) {
    MakeAnchor(team, context, plane);
    DotPlaneWithAnchor(team, context, plane);
  }
  if (plan.reads_queries) LoadQueries(team, context, plane);
  if (plan.reads_window) AttendPlane(team, context, plane, window_scratch);
  if (policy.has_host()) {
    ScorePlane(policy.host, context, plane, worker, policy.host_params, context.host_scores + first);
  }
  if (tokens) ScorePlane(policy.id, context, plane, worker, policy.params, context.plane_scores + first);
}

// Reduces values[plane * items + i], with `heads` planes a layer, to rows[row * items + i].
void ReduceRows(const ScorePlan& plan, uint32_t heads, const float* values, uint64_t items, float* rows,
                HostWorkers* workers) {
  const uint64_t packs = PacksOf(HostTeam(), items);
  const uint32_t chunks = static_cast<uint32_t>((packs + kPacksPerItem - 1) / kPacksPerItem);
  workers->Run(chunks * plan.rows, [&](uint32_t item, uint32_t) {
    const uint32_t row = item / chunks, chunk = item % chunks;
    ReducePlanes(HostTeam(), ReductionsOf(plan, heads, values, items, row, rows),
                 uint64_t{chunk} * kPacksPerItem,
                 std::min<uint64_t>(packs, uint64_t{chunk + 1} * kPacksPerItem));
  });
}

void ScoreBlockRows(const ScorePlan& plan, const ScoreContext& context, const float* token_rows,
                    float* block_scores, HostWorkers* workers) {
  const ScoreRequest& request = plan.request;
  const KvShape& shape = request.shape;
  if (!plan.own_blocks) {
    workers->Run(plan.rows, [&](uint32_t row, uint32_t) {
      ReduceTokens(HostTeam(), shape, request.over_tokens, token_rows + uint64_t{row} * shape.tokens,
                   block_scores + uint64_t{row} * shape.blocks());
    });
    return;
  }
  const bool heads = request.scope == Scope::kHead;
  const PlaneRange one = {.first = 0, .count = heads ? 1 : shape.kv_heads};
  float* const own = request.scope == Scope::kSequence ? context.own_blocks : block_scores;
  workers->Run(shape.planes() / one.count, [&](uint32_t item, uint32_t worker) {
    ScoreBlocks(request.policy.id, context, {.first = item * one.count, .count = one.count}, worker,
                request.policy.params, own + uint64_t{item} * shape.blocks());
  });
  if (request.scope == Scope::kSequence) {
    ReduceRows(plan, /*heads=*/1, own, shape.blocks(), block_scores, workers);
  }
}

}  // namespace

void ComputeRecords(const ScorePlan& plan, const KvView& kv, uint32_t first, uint32_t count,
                    float* const* records, HostWorkers* workers) {
  if (plan.record.floats == 0) return;
  const HostTeam team;
  // A block's layers lie one behind the other, and sequential reads are faster: a thread takes whole blocks
  // where there are enough of them for all threads, else single layers.
  const uint32_t layers = kv.shape.layers;
  const uint32_t parts = count >= kBlocksPerWorker * workers->count() ? 1 : layers;
  workers->Run(count * parts, [&](uint32_t item, uint32_t) {
    const uint32_t first_layer = parts == 1 ? 0 : item % layers;
    const uint32_t end_layer = parts == 1 ? layers : first_layer + 1;
    for (uint32_t layer = first_layer; layer < end_layer; ++layer) {
      RecordLayer(team, kv, plan.record, first + item / parts, layer, records[item / parts]);
    }
  });
}

void RunScore(const ScorePlan& plan, const ScoreInput& input, absl::Span<std::byte> workspace,
              const ScoreOutput& output, HostWorkers* workers) {
  const uint64_t start = reinterpret_cast<uint64_t>(workspace.data());
  const ScoreContext context = LayOut(plan, input, start, workers->count());
  KVPOOL_CHECK(HostWorkspaceBytes(plan, workers->count()) <= workspace.size(),
               "workspace of %zu bytes for %u threads", workspace.size(), workers->count());
  const KvShape& shape = plan.request.shape;
  float* const window_scratch = reinterpret_cast<float*>(start + WorkspaceBytes(plan, workers->count()));
  // A block form of a policy's own reads its host's scores, not those of its tokens.
  const bool tokens = output.token_scores != nullptr || (output.block_scores != nullptr && !plan.own_blocks);
  workers->Run(shape.planes(), [&](uint32_t plane, uint32_t worker) {
    ScoreOnePlane(plan, context, tokens, window_scratch + worker * WindowScratchFloats(shape), plane, worker);
  });
  float* const rows = output.token_scores != nullptr ? output.token_scores : context.row_scores;
  if (tokens && plan.request.scope == Scope::kHead) {
    std::memcpy(rows, context.plane_scores, uint64_t{shape.planes()} * shape.tokens * sizeof(float));
  } else if (tokens) {
    ReduceRows(plan, shape.kv_heads, context.plane_scores, shape.tokens, rows, workers);
  }
  if (output.block_scores != nullptr) ScoreBlockRows(plan, context, rows, output.block_scores, workers);
  if (output.any_spreads() && plan.reads_window) TakeSpreads(shape, context.spreads, output);
}

}  // namespace kvpool::scorers
