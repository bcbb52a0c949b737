#include "cuda/lab/train.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/formats/safetensors.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

constexpr uint64_t kMaxWeights = 1u << 26;

struct Settings {
  double steps = 400, rate = 0.05, seed = 1, units = 0, keep = -1, pull = 1;
};

absl::StatusOr<Settings> SettingsOf(const TrainingSettings& given) {
  Settings settings;
  struct Known {
    const char* name;
    double* value;
    double min, max;
  };
  const Known known[] = {{"steps", &settings.steps, 1, 1e6},    {"rate", &settings.rate, 1e-9, 10},
                         {"seed", &settings.seed, 0, 1u << 30}, {"units", &settings.units, 0, 65536},
                         {"keep", &settings.keep, -1, 1},       {"pull", &settings.pull, 0, 1e6}};
  for (const auto& [name, text] : given) {
    const auto found = std::find_if(std::begin(known), std::end(known),
                                    [&name = name](const Known& one) { return name == one.name; });
    if (found == std::end(known)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", name, " of training is unknown; there are steps, rate, seed, units, keep, pull"));
    }
    if (!absl::SimpleAtod(text, found->value) ||
        !(*found->value >= found->min && *found->value <= found->max)) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", name, ": \"", text, "\" must be ", found->min, " to ", found->max));
    }
  }
  return settings;
}

// Adam (arXiv 1412.6980), with its authors' constants.
class Adam {
 public:
  Adam(size_t weights, double rate) : rate_(rate), mean_(weights), square_(weights) {}
  void Step(const std::vector<double>& gradient, std::vector<double>* weights) {
    constexpr double kMean = 0.9, kSquare = 0.999, kLeast = 1e-8;
    ++steps_;
    const double of_mean = 1 - std::pow(kMean, steps_), of_square = 1 - std::pow(kSquare, steps_);
    for (size_t i = 0; i < gradient.size(); ++i) {
      mean_[i] = kMean * mean_[i] + (1 - kMean) * gradient[i];
      square_[i] = kSquare * square_[i] + (1 - kSquare) * gradient[i] * gradient[i];
      (*weights)[i] -= rate_ * (mean_[i] / of_mean) / (std::sqrt(square_[i] / of_square) + kLeast);
    }
  }

 private:
  double rate_;
  int steps_ = 0;
  std::vector<double> mean_, square_;
};

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Uniform in (-1, 1), the same numbers on every platform.
double Random(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(*state >> 11) / 4503599627370496.0 - 1;
}

struct Hidden {
  const double* rows = nullptr;  // [layer][token][dim]
  uint64_t layers = 1, tokens = 0, dim = 0;
  const double* Row(uint64_t layer, uint64_t token) const { return rows + (layer * tokens + token) * dim; }
};

absl::StatusOr<Hidden> HiddenOf(const Tensors& tensors) {
  const Tensor* const hidden = tensors.Find("hidden");
  if (hidden == nullptr || hidden->shape.size() < 2 || hidden->shape.size() > 3 || hidden->values.empty()) {
    return absl::InvalidArgumentError("hidden [token][dim] or [layer][token][dim] is needed in the input");
  }
  const std::vector<uint64_t>& shape = hidden->shape;
  return Hidden{.rows = hidden->values.data(),
                .layers = shape.size() == 3 ? shape[0] : 1,
                .tokens = shape[shape.size() - 2],
                .dim = shape.back()};
}

absl::StatusOr<const Tensor*> TargetOf(const Tensors& tensors, uint64_t values, const std::string& wanted) {
  const Tensor* const target = tensors.Find("target");
  const auto in_range = [](double x) { return x >= 0 && x <= 1; };
  if (target != nullptr && target->values.size() == values &&
      std::all_of(target->values.begin(), target->values.end(), in_range)) {
    return target;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("target ", wanted, " is needed in the input: ", values, " numbers from 0 to 1"));
}

absl::StatusOr<Tensors> TrainMlp(const Tensors& tensors, const Settings& settings) {
  ASSIGN_OR_RETURN(const Hidden hidden, HiddenOf(tensors));
  const uint64_t rows = hidden.layers * hidden.tokens, dim = hidden.dim;
  ASSIGN_OR_RETURN(const Tensor* target, TargetOf(tensors, rows, "[token] or [layer][token]"));
  const uint64_t units =
      settings.units > 0 ? static_cast<uint64_t>(settings.units) : std::max<uint64_t>(1, dim / 2);
  const uint64_t count = units * (dim + 2) + 1;
  if (count > kMaxWeights)
    return absl::InvalidArgumentError(absl::StrCat(count, " weights, at most ", kMaxWeights));
  // W1, b1, w2, b2, in the order in which the policy reads them.
  std::vector<double> weights(count), gradient(count), inner(units);
  uint64_t state = static_cast<uint64_t>(settings.seed);
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  for (uint64_t i = 0; i + 1 < count; ++i) weights[i] = Random(&state) * scale;
  const uint64_t b1 = units * dim, w2 = b1 + units, b2 = w2 + units;
  Adam adam(count, settings.rate);
  for (int step = 0; step < static_cast<int>(settings.steps); ++step) {
    std::fill(gradient.begin(), gradient.end(), 0.0);
    for (uint64_t row = 0; row < rows; ++row) {
      const double* const x = hidden.rows + row * dim;
      double logit = weights[b2];
      for (uint64_t u = 0; u < units; ++u) {
        double sum = weights[b1 + u];
        for (uint64_t d = 0; d < dim; ++d) sum += weights[u * dim + d] * x[d];
        inner[u] = std::max(sum, 0.0);
        logit += weights[w2 + u] * inner[u];
      }
      // The derivative of the cross-entropy by the logit.
      const double slope = (Sigmoid(logit) - target->values[row]) / static_cast<double>(rows);
      gradient[b2] += slope;
      for (uint64_t u = 0; u < units; ++u) {
        gradient[w2 + u] += slope * inner[u];
        if (inner[u] <= 0) continue;
        const double back = slope * weights[w2 + u];
        gradient[b1 + u] += back;
        for (uint64_t d = 0; d < dim; ++d) gradient[u * dim + d] += back * x[d];
      }
    }
    adam.Step(gradient, &weights);
  }
  Tensors answer;
  const auto part = [&](const char* name, std::vector<uint64_t> shape, uint64_t first, uint64_t size) {
    answer.by_name[name] = {.shape = std::move(shape),
                            .values = {weights.begin() + static_cast<ptrdiff_t>(first),
                                       weights.begin() + static_cast<ptrdiff_t>(first + size)}};
  };
  part("W1", {units, dim}, 0, b1);
  part("b1", {units}, b1, units);
  part("w2", {units}, w2, units);
  part("b2", {1}, b2, 1);
  return answer;
}

// Trains [w | u | b] of one layer's head: logit = w.x + u.mean(x) + b.
std::vector<double> TrainGate(const Hidden& hidden, uint64_t layer, const double* target,
                              const Settings& settings) {
  const uint64_t dim = hidden.dim;
  const double tokens = static_cast<double>(hidden.tokens);
  std::vector<double> weights(2 * dim + 1), gradient(2 * dim + 1), mean(dim), gates(hidden.tokens);
  for (uint64_t t = 0; t < hidden.tokens; ++t) {
    for (uint64_t d = 0; d < dim; ++d) mean[d] += hidden.Row(layer, t)[d] / tokens;
  }
  Adam adam(weights.size(), settings.rate);
  for (int step = 0; step < static_cast<int>(settings.steps); ++step) {
    double context = weights[2 * dim], sum = 0;
    for (uint64_t d = 0; d < dim; ++d) context += weights[dim + d] * mean[d];
    for (uint64_t t = 0; t < hidden.tokens; ++t) {
      double logit = context;
      for (uint64_t d = 0; d < dim; ++d) logit += weights[d] * hidden.Row(layer, t)[d];
      gates[t] = Sigmoid(logit);
      sum += gates[t];
    }
    const double above = settings.keep < 0 ? 0 : 2 * settings.pull * (sum / tokens - settings.keep);
    std::fill(gradient.begin(), gradient.end(), 0.0);
    for (uint64_t t = 0; t < hidden.tokens; ++t) {
      const double slope = (gates[t] - target[t] + above * gates[t] * (1 - gates[t])) / tokens;
      for (uint64_t d = 0; d < dim; ++d) gradient[d] += slope * hidden.Row(layer, t)[d];
      gradient[2 * dim] += slope;
    }
    for (uint64_t d = 0; d < dim; ++d) gradient[dim + d] = gradient[2 * dim] * mean[d];
    adam.Step(gradient, &weights);
  }
  return weights;
}

absl::StatusOr<Tensors> TrainGates(const Tensors& tensors, const Settings& settings) {
  ASSIGN_OR_RETURN(const Hidden hidden, HiddenOf(tensors));
  const Tensor* const shaped = tensors.Find("target");
  const uint64_t heads = shaped != nullptr && shaped->shape.size() == 3 ? shaped->shape[1] : 1;
  if (hidden.layers * heads * (2 * hidden.dim + 1) > kMaxWeights) {
    return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxWeights, " weights"));
  }
  ASSIGN_OR_RETURN(const Tensor* target,
                   TargetOf(tensors, hidden.layers * heads * hidden.tokens, "[layer][head][token]"));
  Tensors answer;
  Tensor& weights = answer.by_name["weights"];
  weights.shape = {hidden.layers, heads, 2 * hidden.dim + 1};
  for (uint64_t plane = 0; plane < hidden.layers * heads; ++plane) {
    const std::vector<double> own =
        TrainGate(hidden, plane / heads, target->values.data() + plane * hidden.tokens, settings);
    weights.values.insert(weights.values.end(), own.begin(), own.end());
  }
  return answer;
}

}  // namespace

absl::StatusOr<Tensors> Train(const Tensors& tensors, const std::string& policy,
                              const TrainingSettings& settings) {
  ASSIGN_OR_RETURN(const Settings parsed, SettingsOf(settings));
  if (policy == "learned_mlp") return TrainMlp(tensors, parsed);
  if (policy == "attention_gate") return TrainGates(tensors, parsed);
  return absl::InvalidArgumentError(
      absl::StrCat("policy ", policy, " is not trained; there are learned_mlp and attention_gate"));
}

std::string SafetensorsOf(const Tensors& tensors) {
  safetensors::File file;
  std::vector<std::vector<float>> rounded;
  rounded.reserve(tensors.by_name.size());
  for (const auto& [name, tensor] : tensors.by_name) {
    const std::vector<float>& values = rounded.emplace_back(tensor.values.begin(), tensor.values.end());
    file.tensors.push_back(
        {.name = name,
         .dtype = "F32",
         .shape = tensor.shape,
         .elements = values.size(),
         .bytes = {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}});
  }
  return safetensors::Write(file);
}

}  // namespace kvpool::lab
