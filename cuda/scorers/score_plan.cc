#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/host/host_window.h"
#include "cuda/scorers/rank_rows.h"
#include "cuda/scorers/score.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool::scorers {
namespace {

constexpr uint64_t kAlignment = 64;

absl::Status CheckRange(const char* field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", must be ", min, " to ", max));
}

absl::Status CheckShape(const KvShape& shape) {
  RETURN_IF_ERROR(CheckRange("layers", shape.layers, 1, kMaxLayers));
  RETURN_IF_ERROR(CheckRange("kv_heads", shape.kv_heads, 1, kMaxKvHeads));
  RETURN_IF_ERROR(CheckRange("tokens_per_block", shape.tokens_per_block, 1, kMaxTokensPerBlock));
  RETURN_IF_ERROR(CheckRange("tokens", shape.tokens, 1, kMaxSequenceTokens));
  RETURN_IF_ERROR(CheckRange("k_head_dim", shape.k_head_dim, 1, kMaxHeadDim));
  return CheckRange("v_head_dim", shape.v_head_dim, 0, kMaxHeadDim);
}

absl::Status CheckWindow(const QueryWindow& window, const KvShape& shape) {
  RETURN_IF_ERROR(CheckRange("query window: queries", window.queries, 1, kMaxQueries));
  if (!window.behind) RETURN_IF_ERROR(CheckRange("query window: queries", window.queries, 1, shape.tokens));
  if (window.data == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRange("query window: q_heads", window.q_heads, 1, kMaxQueryHeads));
  if (window.q_heads % shape.kv_heads == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("query window: q_heads is ", window.q_heads,
                                                 ", no multiple of ", shape.kv_heads, " kv heads"));
}

// The needs that `signals` meets.
Needs Met(const Signals& signals) {
  Needs met = signals.window.data != nullptr ? kNeedsMetByQueries : 0;
  for (const SignalFacts& facts : kSignals) {
    if ((signals.*facts.array).values != nullptr) met |= facts.need();
  }
  if (signals.hidden_dim == 0) met &= ~kNeedHidden;
  if ((met & kNeedWindowLatest) != 0) met |= kNeedLatest;
  if ((met & kNeedWindowPeak) != 0) met |= kNeedPeak;
  return met;
}

uint32_t ModelHeads(const ScoreRequest& request) {
  return request.model_heads != 0 ? request.model_heads : request.shape.kv_heads;
}

absl::Status CheckWeights(const PolicyFacts& facts, const Params& params, const ScoreRequest& request,
                          const Signals& signals) {
  if (facts.weight_count == nullptr || signals.weights.values == nullptr) return absl::OkStatus();
  KvShape model = request.shape;
  model.kv_heads = ModelHeads(request);
  const uint64_t wanted = facts.weight_count(params, model, signals.hidden_dim, signals.weight_count);
  if (wanted == signals.weight_count) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("policy ", std::string(facts.name), ": ",
                                                    signals.weight_count, " weights given, this shape needs ",
                                                    wanted));
}

// A window's logits are computed twice: for their sums, and for what is made of them.
void CountProducts(const Signals& signals, ScorePlan* plan) {
  const ScoreRequest& request = plan->request;
  const BoundPolicy& policy = request.policy;
  KvShape model = request.shape;
  model.kv_heads = ModelHeads(request);
  const auto of_token = [&](const PolicyFacts& facts, const Params& params) {
    return facts.products == nullptr ? 0 : facts.products(params, model, signals.weight_count);
  };
  double products = of_token(policy.facts(), policy.params);
  if (policy.has_host()) products += of_token(FactsOf(policy.host), policy.host_params);
  const double tokens = 1.0 * request.shape.planes() * request.shape.tokens;
  if (plan->reads_queries) {
    const double rows = 1.0 * plan->window.queries * (plan->window.q_heads / request.shape.kv_heads);
    if (plan->reads_window) plan->window_products = 2 * rows * request.shape.k_head_dim * tokens;
    // A policy that reads queries itself multiplies them with keys, in three passes, or with each block's bounds.
    const Needs own = policy.needs();
    if ((own & kNeedQueries) != 0) {
      const double passes = (own & kNeedKeys) != 0 ? 3 : 2.0 / request.shape.tokens_per_block;
      products += passes * rows * request.shape.k_head_dim;
    }
  }
  plan->products = products * tokens;
}

// Whether the attention of the window's queries is to be computed.
bool ReadsWindow(Needs needs, const Signals& signals) {
  if (signals.window.data == nullptr) return false;
  Needs open = kNeedsMetByQueries & ~kNeedQueries;
  if (signals.latest.values != nullptr) open &= ~kNeedLatest;
  if (signals.peak.values != nullptr) open &= ~kNeedPeak;
  return (needs & open) != 0;
}

// The first layer that takes part in a row over all layers.
uint32_t FirstReducedLayer(const ScoreRequest& request) {
  const PolicyFacts& facts = request.policy.facts();
  if (facts.silent_layers == nullptr) return 0;
  const uint32_t silent = facts.silent_layers(request.policy.params);
  const uint32_t skipped = silent > request.first_model_layer ? silent - request.first_model_layer : 0;
  return skipped < request.shape.layers ? skipped : 0;
}

// What the policy and its host want of scratch, one after the other; a multiple of 64 bytes.
uint64_t OwnScratchFloats(const BoundPolicy& policy, const KvShape& shape) {
  const auto wanted = [&](const PolicyFacts& facts, const Params& params) {
    return facts.scratch_floats == nullptr ? 0 : facts.scratch_floats(params, shape);
  };
  const uint64_t own = wanted(policy.facts(), policy.params);
  const uint64_t host = policy.has_host() ? wanted(FactsOf(policy.host), policy.host_params) : 0;
  return (std::max(own, host) + 15) / 16 * 16;
}

// Hands out aligned pieces of the workspace, or only counts their bytes where the start is 0.
class Arranger {
 public:
  explicit Arranger(uint64_t start) : next_(start) {}
  template <typename T>
  T* Take(bool wanted, uint64_t count) {
    if (!wanted) return nullptr;
    T* const piece = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  uint64_t next() const { return next_; }

 private:
  uint64_t next_;
};

uint64_t Arrange(const ScorePlan& plan, const QueryWindow& window, uint64_t workspace, uint32_t scratches,
                 ScoreContext* c) {
  const KvShape& shape = plan.request.shape;
  const uint64_t planes = shape.planes();
  const uint64_t plane_tokens = planes * shape.tokens;
  const bool norms = plan.record.k_norms != RecordLayout::kNone;
  const bool anchors = (plan.needs & (kNeedUnitAnchor | kNeedMeanAnchor)) != 0;
  const bool queries = plan.reads_queries, window_read = plan.reads_window;
  const uint64_t group = window.q_heads / shape.kv_heads;
  Arranger from(workspace);
  c->k_norms = from.Take<float>(norms, plane_tokens);
  c->v_norms = from.Take<float>(plan.record.v_norms != RecordLayout::kNone, plane_tokens);
  c->anchors = from.Take<float>(anchors, planes * shape.k_head_dim);
  c->anchor_norms = from.Take<float>(anchors, planes);
  c->anchor_dots = from.Take<float>(anchors, plane_tokens);
  c->queries = from.Take<float>(queries, planes * group * window.queries * shape.k_head_dim);
  c->query_peaks = from.Take<float>(queries, planes * group * window.queries);
  c->lse = from.Take<float>(window_read, planes * group * window.queries);
  c->window_mean = from.Take<float>(window_read, plane_tokens);
  c->window_variance = from.Take<float>(window_read, plane_tokens);
  c->window_peak = from.Take<float>(window_read, plane_tokens);
  c->window_latest = from.Take<float>(window_read, plane_tokens);
  c->spreads = from.Take<PlaneSpread>(window_read, planes);
  c->host_scores = from.Take<float>(plan.request.policy.has_host(), plane_tokens);
  c->plane_scores = from.Take<float>(true, plane_tokens);
  c->row_scores = from.Take<float>(true, uint64_t{plan.rows} * shape.tokens);
  c->own_blocks = from.Take<float>(true, planes * shape.blocks());
  c->scratch_floats = ScratchFloats(shape) + OwnScratchFloats(plan.request.policy, shape);
  c->scratch = from.Take<float>(true, scratches * c->scratch_floats);
  return from.next() - workspace;
}

}  // namespace

size_t WorkspaceBytes(const ScorePlan& plan, uint32_t scratches) {
  ScoreContext context;
  return Arrange(plan, plan.window, 0, scratches, &context);
}

size_t HostWorkspaceBytes(const ScorePlan& plan, uint32_t workers) {
  const uint64_t window = plan.reads_window ? WindowScratchFloats(plan.request.shape) * sizeof(float) : 0;
  return WorkspaceBytes(plan, workers) + workers * window;
}

ScoreContext LayOut(const ScorePlan& plan, const ScoreInput& input, uint64_t workspace, uint32_t scratches) {
  ScoreContext context;
  Arrange(plan, plan.window, workspace, scratches, &context);
  context.kv = input.kv;
  context.signals = input.signals;
  context.record = plan.record;
  context.records = input.records;
  context.budget_tokens = plan.request.budget_tokens;
  context.model_heads = ModelHeads(plan.request);
  context.first_model_head = plan.request.first_model_head;
  return context;
}

PlaneReductions ReductionsOf(const ScorePlan& plan, uint32_t heads, const float* values, uint64_t items,
                             uint32_t row, float* rows) {
  const ScoreRequest& request = plan.request;
  const bool layer = request.scope == Scope::kLayer;
  return {.values = values,
          .items = items,
          .heads = heads,
          .first_layer = layer ? row : plan.first_reduced_layer,
          .end_layer = layer ? row + 1 : request.shape.layers,
          .over_heads = request.over_heads,
          .over_layers = request.over_layers,
          .row = rows + row * items};
}

void TakeSpreads(const KvShape& shape, const PlaneSpread* planes, const ScoreOutput& output) {
  for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
    if (output.densities != nullptr) output.densities[plane] = planes[plane].density;
    if (output.spreads == nullptr) continue;
    AttentionSpread& spread = output.spreads[plane / shape.kv_heads];
    if (plane % shape.kv_heads == 0) spread = {};
    spread.entropy += planes[plane].entropy;
    spread.variance += planes[plane].variance;
  }
}

absl::StatusOr<ScorePlan> PlanScore(const ScoreRequest& request, const Signals& signals, uint32_t workers) {
  const KvShape& shape = request.shape;
  RETURN_IF_ERROR(CheckShape(shape));
  ScorePlan plan = {.request = request, .window = signals.window, .needs = request.policy.needs()};
  const PolicyFacts& facts = request.policy.facts();
  if (shape.v_head_dim == 0 && (plan.needs & (kNeedValues | kNeedValueNorms)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("policy ", std::string(facts.name),
                                                      " needs V, and the layout has none (v_head_dim is 0)"));
  }
  if (const Needs missing = plan.needs & kNeedsGivenByEngine & ~Met(signals); missing != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("policy ", std::string(facts.name), " needs ", DescribeNeeds(missing), ", not given"));
  }
  if (signals.window.data != nullptr || signals.window_mean.values != nullptr) {
    RETURN_IF_ERROR(CheckWindow(signals.window, shape));
  }
  RETURN_IF_ERROR(CheckWeights(facts, request.policy.params, request, signals));
  if (request.policy.has_host()) {
    const PolicyFacts& host = FactsOf(request.policy.host);
    if ((facts.NeedsOf(request.policy.params) & host.NeedsOf(request.policy.host_params) & kNeedWeights) !=
        0) {
      return absl::InvalidArgumentError(
          absl::StrCat("policy ", std::string(facts.name), " over ", std::string(host.name),
                       ": both read weights, and a request has one array of them"));
    }
    RETURN_IF_ERROR(CheckWeights(host, request.policy.host_params, request, signals));
  }
  plan.record = LayOutRecord(shape, plan.needs);
  plan.rows = RowsOfRanks(request, /*ranks=*/1);
  plan.reads_window = ReadsWindow(plan.needs, signals);
  plan.reads_queries = plan.reads_window || (plan.needs & kNeedQueries) != 0;
  plan.own_blocks = facts.own_blocks != nullptr && facts.own_blocks(request.policy.params);
  plan.first_reduced_layer = FirstReducedLayer(request);
  plan.workspace_bytes = HostWorkspaceBytes(plan, workers);
  CountProducts(signals, &plan);
  return plan;
}

}  // namespace kvpool::scorers
