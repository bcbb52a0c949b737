// Features -> token scores -> block scores, for one sequence of one layer group.
//
//   PlanScore   what is asked, checked once: which features, how much workspace
//   records     per block, what depends on that block alone (ComputeRecord); of full blocks that no longer
//               change they can be kept and given again, so that a decode-time call reads one new block
//   RunScore    the rest, from records, K and V, and signals
//
// Host functions; the CUDA device (cuda/driver/cuda_kv_compute.cc) launches the same bodies. Nothing here allocates: records
// and workspace are the caller's. Thread-safe: all state is in the arguments.
#ifndef KVPOOL_CUDA_SCORERS_SCORE_H_
#define KVPOOL_CUDA_SCORERS_SCORE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/scorers/budgets.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/records.h"
#include "cuda/scorers/parts/reduce.h"
#include "cuda/scorers/parts/signals.h"
#include "cuda/scorers/policies/registry.h"

namespace kvpool::scorers {

enum class Scope : uint8_t {
  kSequence,  // One row of scores: one block table for all layers.
  kLayer,     // One row a layer.
  kHead,      // One row a plane.
};

// Policies with a block form of their own (caote) reduce tokens and the heads of a layer by it.
struct ScoreRequest {
  BoundPolicy policy;
  KvShape shape;
  Scope scope = Scope::kSequence;
  TokenReduction over_tokens = TokenReduction::kMean;
  PlaneReduction over_heads = PlaneReduction::kMean;
  PlaneReduction over_layers = PlaneReduction::kMean;
  uint32_t budget_tokens = 0;      // Policies that rank against it (roco) refuse 0.
  uint32_t first_model_layer = 0;  // Model index of the group's first layer.
  // Where the heads are those of one rank among several: how many all ranks have, and the first of these among them.
  uint32_t model_heads = 0;  // 0: as many as the shape has.
  uint32_t first_model_head = 0;
};

struct ScorePlan {
  ScoreRequest request;
  QueryWindow window;                // As given; its data is not read from here.
  RecordLayout record;               // What a block's record holds; record.floats is 0 where none is needed.
  uint32_t rows = 0;                 // Of scores: 1, layers, or planes.
  size_t workspace_bytes = 0;        // For RunScore with `workers` threads.
  Needs needs = 0;                   // With the host policy's.
  bool reads_window = false;         // The window's queries are given, and asked for.
  bool own_blocks = false;           // Block scores are the policy's own, not reduced from token scores.
  uint32_t first_reduced_layer = 0;  // Of a row over all layers: policies may leave out the first ones.
};

// INVALID_ARGUMENT: shape or window out of range. FAILED_PRECONDITION: a signal that the policy needs is
// missing (by name), or it needs V and the layout has none.
absl::StatusOr<ScorePlan> PlanScore(const ScoreRequest& request, const Signals& signals, uint32_t workers);

struct ScoreInput {
  KvView kv;
  Signals signals;
  const float* const* records = nullptr;  // One a block, of plan.record.floats floats each.
};

struct ScoreOutput {
  float* token_scores = nullptr;  // [rows][tokens]
  float* block_scores = nullptr;  // [rows][blocks]
  // [layers]: of the query window, added up over heads; only where one is read.
  AttentionSpread* spreads = nullptr;
  double* densities = nullptr;  // [planes]: PlaneSpread::density, likewise.
  bool any_spreads() const { return spreads != nullptr || densities != nullptr; }
};

// The records of blocks [first, first + count) of the sequence: one pass over their K and V.
void ComputeRecords(const ScorePlan& plan, const KvView& kv, uint32_t first, uint32_t count,
                    float* const* records, HostWorkers* workers);

// The arrays of RunScore in `workspace`, with `scratches` places of scratch: the CUDA device lays out the same on its
// side, where `workspace` is a device address.
ScoreContext LayOut(const ScorePlan& plan, const ScoreInput& input, uint64_t workspace, uint32_t scratches);
size_t WorkspaceBytes(const ScorePlan& plan, uint32_t scratches);
// With what the host's threads need for a query window: plan.workspace_bytes.
size_t HostWorkspaceBytes(const ScorePlan& plan, uint32_t workers);

// How values of planes become those of row `row`: values[plane * items + i] to rows[row * items + i]. `heads` planes a
// layer. REQUIRES: scope is not kHead.
PlaneReductions ReductionsOf(const ScorePlan& plan, uint32_t heads, const float* values, uint64_t items,
                             uint32_t row, float* rows);
// What planes say to output.spreads, added up over the heads of each layer, and to output.densities.
void TakeSpreads(const KvShape& shape, const PlaneSpread* planes, const ScoreOutput& output);

// Any output may be null. REQUIRES: workspace of plan.workspace_bytes, aligned to 64.
void RunScore(const ScorePlan& plan, const ScoreInput& input, absl::Span<std::byte> workspace,
              const ScoreOutput& output, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_SCORE_H_
