// Features -> token scores -> block scores, for one sequence of one layer group.
//
//   PlanScore        checks a request once, and says which features and how much workspace it takes
//   ComputeRecords   computes blocks' records, which depend on one block each. Those of full blocks stay
//                    valid: a caller keeps them, and a decode-time call reads one new block
//   RunScore         computes the rest, from records, K and V, and signals
//
// These are the host's functions; the CUDA device (cuda/driver/cuda_kv_compute.cc) launches the same bodies.
// Nothing here allocates: records and workspace are the caller's. Thread-safe: all state is in the arguments.
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
  kSequence,  // one row of scores: one block table for all layers
  kLayer,     // one row for each layer
  kHead,      // one row for each plane
};

// A policy with a block form of its own (caote) reduces tokens and the heads of a layer by that instead.
struct ScoreRequest {
  BoundPolicy policy;
  KvShape shape;
  Scope scope = Scope::kSequence;
  TokenReduction over_tokens = TokenReduction::kMean;
  PlaneReduction over_heads = PlaneReduction::kMean;
  PlaneReduction over_layers = PlaneReduction::kMean;
  uint32_t budget_tokens = 0;      // 0: none; roco then takes the number of tokens
  uint32_t first_model_layer = 0;  // the model's index of the group's first layer
  // For one rank among several: the kv heads of a layer on all ranks (0: as many as the shape has), and the
  // index of this rank's first among them.
  uint32_t model_heads = 0;
  uint32_t first_model_head = 0;
};

struct ScorePlan {
  ScoreRequest request;
  QueryWindow window;          // the window's shape; its data is not read from here
  RecordLayout record;         // the layout of a block's record; record.floats is 0 if none is needed
  uint32_t rows = 0;           // rows of scores: 1, layers, or planes
  size_t workspace_bytes = 0;  // the workspace of RunScore with `workers` threads
  Needs needs = 0;             // the needs of the policy and of its host
  bool reads_queries = false;  // the window's queries are given and needed
  bool reads_window = false;   // and so is their attention
  bool own_blocks = false;     // block scores are the policy's own, not reduced from token scores
  // The first layer that takes part in a row over all layers; policies may leave out the first ones.
  uint32_t first_reduced_layer = 0;
  // Multiplications that grow with more than K and V: with weights, with keys of others, and with a window's queries for their
  // attention.
  double products = 0;
  double window_products = 0;
};

// INVALID_ARGUMENT: shape or window out of range. FAILED_PRECONDITION: the policy needs a signal that is
// missing, which is named, or V, and the layout has none.
absl::StatusOr<ScorePlan> PlanScore(const ScoreRequest& request, const Signals& signals, uint32_t workers);

struct ScoreInput {
  KvView kv;
  Signals signals;
  const float* const* records = nullptr;  // a record for each block, of plan.record.floats floats
};

struct ScoreOutput {
  float* token_scores = nullptr;  // [rows][tokens]
  float* block_scores = nullptr;  // [rows][blocks]
  // Filled only if plan.reads_window.
  AttentionSpread* spreads = nullptr;  // [layers]; sums of PlaneSpread over heads
  double* densities = nullptr;         // [planes]; PlaneSpread::density
  bool any_spreads() const { return spreads != nullptr || densities != nullptr; }
};

// Computes the records of blocks [first, first + count) of the sequence, in one pass over their K and V.
void ComputeRecords(const ScorePlan& plan, const KvView& kv, uint32_t first, uint32_t count,
                    float* const* records, HostWorkers* workers);

// Places the arrays of RunScore in `workspace`, with `scratches` areas of scratch. The CUDA device calls it
// with a device address.
ScoreContext LayOut(const ScorePlan& plan, const ScoreInput& input, uint64_t workspace, uint32_t scratches);
size_t WorkspaceBytes(const ScorePlan& plan, uint32_t scratches);
// WorkspaceBytes plus the host's own scratch for a query window: plan.workspace_bytes.
size_t HostWorkspaceBytes(const ScorePlan& plan, uint32_t workers);

// The reduction of values[plane * items + i] to rows[row * items + i], with `heads` planes a layer. REQUIRES:
// scope is not kHead.
PlaneReductions ReductionsOf(const ScorePlan& plan, uint32_t heads, const float* values, uint64_t items,
                             uint32_t row, float* rows);
// Writes the planes' spreads to `output`, where it has arrays for them.
void TakeSpreads(const KvShape& shape, const PlaneSpread* planes, const ScoreOutput& output);

// Any array of `output` may be null. REQUIRES: `workspace` has plan.workspace_bytes and is aligned to 64.
void RunScore(const ScorePlan& plan, const ScoreInput& input, absl::Span<std::byte> workspace,
              const ScoreOutput& output, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_SCORE_H_
