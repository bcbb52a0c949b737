#include "cuda/lab/problem.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using scorers::KvPlane;
using scorers::KvShape;
using scorers::SignalArray;
using scorers::SignalFacts;
using scorers::SignalShape;

constexpr uint32_t kTokensPerBlock = 16;
constexpr uint32_t kCurveBudgets = 99;

const Tensor* FindAny(const Tensors& tensors, const std::vector<const char*>& names) {
  for (const char* name : names) {
    if (const Tensor* tensor = tensors.Find(name); tensor != nullptr) return tensor;
  }
  return nullptr;
}

absl::Status WrongShape(const char* name, const Tensor& tensor, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape [", absl::StrJoin(tensor.shape, ", "), "], must be ", wanted));
}

// Reads a whole number into *to if the file has one of these names.
absl::Status TakeNumber(const Tensors& tensors, const std::vector<const char*>& names, uint32_t max,
                        uint32_t* to) {
  const Tensor* const tensor = FindAny(tensors, names);
  if (tensor == nullptr) return absl::OkStatus();
  const double value = tensor->values.size() == 1 ? tensor->values[0] : -1;
  if (value >= 1 && value <= max && value == std::floor(value)) {
    *to = static_cast<uint32_t>(value);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(names.front(), " must be one whole number from 1 to ", max));
}

struct Extents {
  uint64_t layers = 1, rows = 0, heads = 1, dim = 1;
};

// [row][dim], [row][head][dim] or [layer][row][head][dim]; `one_row`: [dim] too.
bool ExtentsOf(const Tensor& tensor, bool one_row, Extents* extents) {
  const std::vector<uint64_t>& shape = tensor.shape;
  if (one_row && shape.size() == 1) return *extents = {.rows = 1, .dim = shape[0]}, true;
  if (shape.size() == 2) return *extents = {.rows = shape[0], .dim = shape[1]}, true;
  if (shape.size() == 3) return *extents = {.rows = shape[0], .heads = shape[1], .dim = shape[2]}, true;
  if (shape.size() != 4) return false;
  *extents = {.layers = shape[0], .rows = shape[1], .heads = shape[2], .dim = shape[3]};
  return true;
}

constexpr char kRowsWanted[] = "[token][dim], [token][head][dim] or [layer][token][head][dim]";

// `clusters`, [block][token][dim], as K.
Tensor ClustersAsKeys(const Tensor& clusters) {
  Tensor keys = clusters;
  keys.shape = {clusters.shape[0] * clusters.shape[1], clusters.shape[2]};
  return keys;
}

// Whether TakeSignals reads the signal; hidden states and weights have a reader of their own.
bool IsPerToken(const SignalFacts& facts) {
  return facts.shape == SignalShape::kToken || facts.shape == SignalShape::kWindow;
}

// A second name that files may have for the signal.
const char* AliasOf(const SignalFacts& facts) {
  return facts.array == &scorers::Signals::mass ? "alpha" : facts.name;
}

// The number of tokens where there is no K: the last dimension of any per-token input.
uint64_t TokensOfSignals(const Tensors& tensors) {
  std::vector<const char*> names = {"attention", "attn"};
  for (const SignalFacts& facts : scorers::kSignals) {
    if (IsPerToken(facts)) names.insert(names.end(), {facts.name, AliasOf(facts)});
  }
  const Tensor* const signal = FindAny(tensors, names);
  if (signal != nullptr && !signal->shape.empty()) return signal->shape.back();
  const Tensor* const hidden = tensors.Find("hidden");
  if (hidden != nullptr && hidden->shape.size() >= 2) return hidden->shape[hidden->shape.size() - 2];
  return tensors.FindRows("activations").size();
}

}  // namespace

std::vector<float>* Problem::NewBuffer(size_t floats) {
  buffers_.push_back(std::make_unique<std::vector<float>>(floats));
  return buffers_.back().get();
}

absl::StatusOr<std::unique_ptr<Problem>> Problem::Make(const Tensors& tensors, const Overrides& overrides) {
  std::unique_ptr<Problem> problem(new Problem());
  RETURN_IF_ERROR(problem->FindShape(tensors, overrides));
  RETURN_IF_ERROR(problem->TakeKv(tensors));
  RETURN_IF_ERROR(problem->TakeQueries(tensors));
  RETURN_IF_ERROR(problem->TakeAttention(tensors));
  RETURN_IF_ERROR(problem->TakeSignals(tensors));
  RETURN_IF_ERROR(problem->TakeActivations(tensors));
  RETURN_IF_ERROR(problem->TakeHiddenAndWeights(tensors));
  RETURN_IF_ERROR(problem->TakeBudgetCurve(tensors));
  return problem;
}

absl::Status Problem::TakeBudgetCurve(const Tensors& tensors) {
  const Tensor* const curve = tensors.Find("budget_curve");
  if (curve == nullptr) return absl::OkStatus();
  std::vector<uint64_t> wanted = {kv_.shape.layers, kv_.shape.kv_heads};
  if (curve->shape.size() == 3) wanted.insert(wanted.begin(), kCurveBudgets);
  if (curve->shape != wanted) {
    return WrongShape(
        "budget_curve", *curve,
        absl::StrCat("[", kv_.shape.layers, ", ", kv_.shape.kv_heads, "], or ", kCurveBudgets, " of these"));
  }
  for (const double share : curve->values) {
    if (share >= 0 && share <= 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("budget_curve has ", share, ", must be 0 to 1"));
  }
  budget_curve_.assign(curve->values.begin(), curve->values.end());
  return absl::OkStatus();
}

absl::Span<const float> Problem::BudgetCurveAt(double leaving) const {
  const size_t planes = kv_.shape.planes();
  if (budget_curve_.size() == planes) return budget_curve_;
  const double percent = std::clamp(std::nearbyint(leaving * 100), 1.0, double{kCurveBudgets});
  return absl::MakeConstSpan(budget_curve_).subspan((static_cast<size_t>(percent) - 1) * planes, planes);
}

absl::Status Problem::FindShape(const Tensors& tensors, const Overrides& overrides) {
  KvShape& shape = kv_.shape;
  shape = {.layers = 1, .kv_heads = 1, .tokens_per_block = kTokensPerBlock, .k_head_dim = 1};
  RETURN_IF_ERROR(TakeNumber(tensors, {"tokens_per_block", "B"}, 4096, &shape.tokens_per_block));
  RETURN_IF_ERROR(TakeNumber(tensors, {"budget", "C"}, 1u << 30, &budget_tokens_));
  const Tensor* const clusters = tensors.Find("clusters");
  if (clusters != nullptr && clusters->shape.size() != 3) {
    return WrongShape("clusters", *clusters, "[block][token][dim]");
  }
  if (clusters != nullptr) shape.tokens_per_block = static_cast<uint32_t>(clusters->shape[1]);
  if (overrides.tokens_per_block != 0) shape.tokens_per_block = overrides.tokens_per_block;
  Extents extents{.rows = TokensOfSignals(tensors)};
  const Tensor* const any = FindAny(tensors, {"K", "V"});
  if (clusters != nullptr) {
    (void)ExtentsOf(ClustersAsKeys(*clusters), false, &extents);
  } else if (any != nullptr && !ExtentsOf(*any, false, &extents)) {
    return WrongShape("K or V", *any, kRowsWanted);
  } else if (any == nullptr) {
    const Tensor* const attention = FindAny(tensors, {"attention", "attn"});
    if (attention != nullptr && attention->shape.size() >= 3) extents.layers = attention->shape[0];
    if (attention != nullptr && attention->shape.size() == 4) extents.heads = attention->shape[1];
  }
  if (extents.rows == 0 || extents.rows > 1u << 24 || extents.layers > 1024 || extents.heads > 1024 ||
      extents.dim > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("no tokens found, or too many: ", extents.layers, " layers, ", extents.rows, " tokens, ",
                     extents.heads, " heads of ", extents.dim, "; at most 1024, 2^24, 1024 and 4096"));
  }
  shape.layers = static_cast<uint32_t>(extents.layers);
  shape.tokens = static_cast<uint32_t>(extents.rows);
  shape.kv_heads = static_cast<uint32_t>(extents.heads);
  return absl::OkStatus();
}

absl::Status Problem::TakeKv(const Tensors& tensors) {
  KvShape& shape = kv_.shape;
  const Tensor* const clusters = tensors.Find("clusters");
  const Tensor clustered = clusters != nullptr ? ClustersAsKeys(*clusters) : Tensor{};
  const Tensor* const inputs[2] = {clusters != nullptr ? &clustered : tensors.Find("K"), tensors.Find("V")};
  KvPlane* const planes[2] = {&kv_.k, &kv_.v};
  uint64_t block_floats = 0;
  for (int i = 0; i < 2; ++i) {
    const char* const name = i == 0 ? "K" : "V";
    Extents extents{.layers = shape.layers, .rows = shape.tokens, .heads = shape.kv_heads};
    if (inputs[i] == nullptr && i == 1) continue;
    if (inputs[i] != nullptr && !ExtentsOf(*inputs[i], false, &extents)) {
      return WrongShape(name, *inputs[i], kRowsWanted);
    }
    if (extents.layers != shape.layers || extents.rows != shape.tokens || extents.heads != shape.kv_heads ||
        extents.dim == 0 || extents.dim > 4096) {
      return WrongShape(name, *inputs[i],
                        absl::StrCat("of ", shape.layers, " layers, ", shape.tokens, " tokens and ",
                                     shape.kv_heads, " heads of 1 to 4096"));
    }
    // A block is [layer][token][head][dim] of K, then of V.
    KvPlane& plane = *planes[i];
    plane.head_dim = static_cast<uint32_t>(extents.dim);
    plane.offset_bytes = block_floats * sizeof(float);
    plane.dim_stride_bytes = sizeof(float);
    plane.head_stride_bytes = plane.head_dim * sizeof(float);
    plane.token_stride_bytes = shape.kv_heads * plane.head_stride_bytes;
    plane.layer_stride_bytes = shape.tokens_per_block * plane.token_stride_bytes;
    block_floats += shape.layers * plane.layer_stride_bytes / sizeof(float);
  }
  has_keys_ = inputs[0] != nullptr;
  shape.k_head_dim = kv_.k.head_dim;
  shape.v_head_dim = kv_.v.head_dim;
  std::vector<float>* const memory = NewBuffer(block_floats * shape.blocks());
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    block_addresses_.push_back(reinterpret_cast<uint64_t>(memory->data() + block * block_floats));
  }
  kv_.blocks = block_addresses_.data();
  for (int i = 0; i < 2; ++i) {
    if (inputs[i] == nullptr) continue;
    size_t next = 0;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t token = 0; token < shape.tokens; ++token) {
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
          const uint64_t row = block_addresses_[token / shape.tokens_per_block] + planes[i]->offset_bytes +
                               layer * planes[i]->layer_stride_bytes +
                               token % shape.tokens_per_block * planes[i]->token_stride_bytes +
                               head * planes[i]->head_stride_bytes;
          float* const to = reinterpret_cast<float*>(row);
          for (uint32_t d = 0; d < planes[i]->head_dim; ++d)
            to[d] = static_cast<float>(inputs[i]->values[next++]);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Problem::TakeQueries(const Tensors& tensors) {
  const Tensor* const queries = FindAny(tensors, {"queries", "q"});
  if (queries == nullptr) return absl::OkStatus();
  Extents extents;
  if (!ExtentsOf(*queries, true, &extents) || extents.layers != kv_.shape.layers ||
      extents.dim != kv_.k.head_dim || extents.heads % kv_.shape.kv_heads != 0 ||
      extents.rows > kv_.shape.tokens) {
    return WrongShape("queries", *queries,
                      absl::StrCat("[query][head][dim] or [layer][query][head][dim] of ", kv_.shape.layers,
                                   " layers, at most ", kv_.shape.tokens, " queries, a multiple of ",
                                   kv_.shape.kv_heads, " heads of ", kv_.k.head_dim));
  }
  std::vector<float>* const values = NewBuffer(queries->values.size());
  std::transform(queries->values.begin(), queries->values.end(), values->begin(),
                 [](double x) { return static_cast<float>(x); });
  signals_.window = {.data = values->data(),
                     .queries = static_cast<uint32_t>(extents.rows),
                     .q_heads = static_cast<uint32_t>(extents.heads),
                     .layer_stride_bytes = extents.rows * extents.heads * extents.dim * sizeof(float),
                     .query_stride_bytes = extents.heads * extents.dim * sizeof(float),
                     .head_stride_bytes = extents.dim * sizeof(float)};
  const Tensor* const scale = tensors.Find("scale");
  if (scale != nullptr && scale->values.size() == 1) {
    signals_.window.scale = static_cast<float>(scale->values[0]);
  } else if (tensors.Find("clusters") != nullptr) {
    signals_.window.scale = 1;  // the expected bounds of clusters are those of unscaled products
  }
  return absl::OkStatus();
}

absl::Status Problem::TakeAttention(const Tensors& tensors) {
  const Tensor* const attention = FindAny(tensors, {"attention", "attn"});
  if (attention == nullptr) return absl::OkStatus();
  const std::vector<uint64_t>& shape = attention->shape;
  const uint64_t rank = shape.size();
  if (rank < 2 || rank > 4 || shape[rank - 1] != kv_.shape.tokens ||
      (rank >= 3 && shape[0] != kv_.shape.layers) || (rank < 3 && kv_.shape.layers != 1) ||
      (rank == 4 && shape[1] % kv_.shape.kv_heads != 0) || shape[rank - 2] > 65536) {
    return WrongShape("attention", *attention,
                      absl::StrCat("[query][token], [layer][query][token] or [layer][head][query][token] of ",
                                   kv_.shape.layers, " layers and ", kv_.shape.tokens, " tokens"));
  }
  const uint64_t tokens = kv_.shape.tokens, rows = shape[rank - 2];
  const uint64_t heads = rank == 4 ? shape[1] : 1;
  // If the rows have no heads, all kv heads share them.
  const uint64_t planes_per_layer = rank == 4 ? kv_.shape.kv_heads : 1;
  const uint64_t group = heads / planes_per_layer;
  const uint64_t size = kv_.shape.layers * planes_per_layer * tokens;
  std::vector<float>*mean = NewBuffer(size), *variance = NewBuffer(size), *peak = NewBuffer(size),
  *latest = NewBuffer(size), *sum = NewBuffer(size), *square = NewBuffer(size);
  for (uint64_t i = 0; i < size; ++i) {
    const uint64_t plane = i / tokens, token = i % tokens;
    double total = 0, squares = 0, spread = 0, greatest = 0, last = 0;
    for (uint64_t g = 0; g < group; ++g) {
      const double* const first = attention->values.data() + (plane * group + g) * rows * tokens + token;
      double running = 0, moment = 0;
      for (uint64_t row = 0; row < rows; ++row) {
        const double p = first[row * tokens];
        const double delta = p - running;
        running += delta / static_cast<double>(row + 1);
        moment += delta * (p - running);
        greatest = std::max(greatest, p);
        squares += p * p;
      }
      total += running * static_cast<double>(rows);
      spread += rows > 1 ? moment / static_cast<double>(rows - 1) : 0;
      last += first[(rows - 1) * tokens];
    }
    const double over = static_cast<double>(group);
    (*sum)[i] = static_cast<float>(total / over);
    (*mean)[i] = static_cast<float>(total / over / static_cast<double>(rows));
    (*square)[i] = static_cast<float>(squares / over);
    (*variance)[i] = static_cast<float>(spread / over);
    (*peak)[i] = static_cast<float>(greatest);
    (*latest)[i] = static_cast<float>(last / over);
  }
  const auto signal = [&](const std::vector<float>* values) {
    return SignalArray{.values = values->data(),
                       .layer_stride = planes_per_layer * tokens,
                       .head_stride = planes_per_layer == 1 ? 0 : tokens};
  };
  signals_.window_mean = signal(mean);
  signals_.window_variance = signal(variance);
  signals_.window_peak = signal(peak);
  signals_.window_latest = signal(latest);
  signals_.mass = signal(sum);
  signals_.mass_square = signal(square);
  if (signals_.window.data == nullptr) {
    signals_.window.queries = static_cast<uint32_t>(std::min<uint64_t>({rows, tokens, 1024}));
  }
  return absl::OkStatus();
}

absl::Status Problem::TakeSignals(const Tensors& tensors) {
  const uint64_t tokens = kv_.shape.tokens, heads = kv_.shape.kv_heads, layers = kv_.shape.layers;
  for (const SignalFacts& facts : scorers::kSignals) {
    const Tensor* const tensor = IsPerToken(facts) ? FindAny(tensors, {facts.name, AliasOf(facts)}) : nullptr;
    if (tensor == nullptr) continue;
    const std::vector<uint64_t>& shape = tensor->shape;
    const bool fits = (shape.size() == 1 && shape[0] == tokens) ||
                      (shape.size() == 2 && shape[0] == heads && shape[1] == tokens && layers == 1) ||
                      (shape.size() == 3 && shape[0] == layers && shape[1] == heads && shape[2] == tokens);
    if (!fits) {
      return WrongShape(facts.name, *tensor,
                        absl::StrCat("[token], [head][token] or [layer][head][token] of ", layers,
                                     " layers, ", heads, " heads and ", tokens, " tokens"));
    }
    std::vector<float>* const values = NewBuffer(tensor->values.size());
    std::transform(tensor->values.begin(), tensor->values.end(), values->begin(),
                   [](double x) { return static_cast<float>(x); });
    signals_.*facts.array = {.values = values->data(),
                             .layer_stride = shape.size() == 3 ? heads * tokens : 0,
                             .head_stride = shape.size() >= 2 ? tokens : 0};
  }
  const Tensor* const now = FindAny(tensors, {"now", "t"});
  if (now != nullptr && now->values.size() == 1) signals_.now = static_cast<float>(now->values[0]);
  return absl::OkStatus();
}

absl::Status Problem::TakeActivations(const Tensors& tensors) {
  const std::vector<std::vector<double>> activations = tensors.FindRows("activations");
  if (activations.empty()) return absl::OkStatus();
  if (activations.size() != kv_.shape.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("activations of ", activations.size(), " tokens, there are ", kv_.shape.tokens));
  }
  std::vector<float>*last = NewBuffer(kv_.shape.tokens), *interval = NewBuffer(kv_.shape.tokens),
  *hits = NewBuffer(kv_.shape.tokens);
  for (uint32_t token = 0; token < kv_.shape.tokens; ++token) {
    const std::vector<double>& steps = activations[token];
    // A token is appended at the step of its number, and active then.
    double before = token, longest = 0;
    for (const double step : steps) {
      if (!(step >= before)) {
        return absl::InvalidArgumentError(
            absl::StrCat("activations of token ", token, ": step ", step, " is before ", before));
      }
      longest = std::max(longest, step - before);
      before = step;
    }
    (*last)[token] = static_cast<float>(before);
    (*interval)[token] = static_cast<float>(longest);
    (*hits)[token] = static_cast<float>(steps.size());
  }
  signals_.last_attended = {.values = last->data()};
  signals_.interval = {.values = interval->data()};
  signals_.hits = {.values = hits->data()};
  return absl::OkStatus();
}

absl::Status Problem::TakeHiddenAndWeights(const Tensors& tensors) {
  const Tensor* const hidden = tensors.Find("hidden");
  if (hidden != nullptr) {
    const std::vector<uint64_t>& shape = hidden->shape;
    const size_t rank = shape.size();
    if (rank < 2 || rank > 3 || shape[rank - 2] != kv_.shape.tokens ||
        (rank == 3 && shape[0] != kv_.shape.layers)) {
      return WrongShape("hidden", *hidden,
                        absl::StrCat("[token][dim] or [layer][token][dim] of ", kv_.shape.layers,
                                     " layers and ", kv_.shape.tokens, " tokens"));
    }
    std::vector<float>* const values = NewBuffer(hidden->values.size());
    std::copy(hidden->values.begin(), hidden->values.end(), values->begin());
    signals_.hidden = {.values = values->data(), .layer_stride = rank == 3 ? shape[1] * shape[2] : 0};
    signals_.hidden_dim = static_cast<uint32_t>(shape[rank - 1]);
  }
  std::vector<const Tensor*> parts;
  for (const char* name : {"W1", "b1", "w2", "b2"}) {
    if (const Tensor* part = tensors.Find(name); part != nullptr) parts.push_back(part);
  }
  if (parts.size() != 4) parts = {tensors.Find("weights")};
  if (parts[0] == nullptr) return absl::OkStatus();
  std::vector<float>* const values = NewBuffer(0);
  for (const Tensor* part : parts) values->insert(values->end(), part->values.begin(), part->values.end());
  signals_.weights = {.values = values->data()};
  signals_.weight_count = values->size();
  return absl::OkStatus();
}

}  // namespace kvpool::lab
