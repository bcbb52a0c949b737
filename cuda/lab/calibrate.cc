#include "cuda/lab/calibrate.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using Complex = std::complex<double>;

constexpr uint64_t kMostCalibrated = 1u << 26;  // weights

struct CalibrationOptions {
  double kv_heads = 0, sinks = 4, theta = 10000, scale = 1, position = 0, future = 512, farthest = 65536;
  bool interleaved = false, use_covariance = true;
};

absl::StatusOr<CalibrationOptions> OptionsOf(const CalibrationSettings& given) {
  CalibrationOptions settings;
  struct Known {
    const char* name;
    double* value;
    double min, max;
    bool whole = true;
  };
  const Known known[] = {
      {"kv_heads", &settings.kv_heads, 0, kMaxKvHeads}, {"sinks", &settings.sinks, 0, 1 << 20},
      {"theta", &settings.theta, 1, 1e12, false},       {"scale", &settings.scale, 1e-3, 1e3, false},
      {"position", &settings.position, 0, 1 << 30},     {"future", &settings.future, 1, 1 << 20},
      {"farthest", &settings.farthest, 1, 1 << 30},
  };
  for (const auto& [name, text] : given) {
    if (name == "pairing") {
      settings.interleaved = text == "interleaved";
      if (text == "half" || text == "interleaved") continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter pairing: \"", text, "\" is not half, interleaved"));
    }
    if (name == "use_covariance") {
      if (absl::SimpleAtob(text, &settings.use_covariance)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter use_covariance: \"", text, "\" is not true or false"));
    }
    const auto found = std::find_if(std::begin(known), std::end(known),
                                    [&name = name](const Known& one) { return name == one.name; });
    if (found == std::end(known)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", name, " of calibration is unknown; there are ",
          absl::StrJoin(known, ", ", [](std::string* out, const Known& one) { out->append(one.name); }),
          ", pairing, use_covariance"));
    }
    if (!absl::SimpleAtod(text, found->value) ||
        !(*found->value >= found->min && *found->value <= found->max) ||
        (found->whole && std::floor(*found->value) != *found->value)) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", name, ": \"", text, "\" must be ",
                                                     found->whole ? "a whole number from " : "", found->min,
                                                     " to ", found->max));
    }
  }
  return settings;
}

// The queries of a dump behind the first `sinks`.
struct Queries {
  const double* values = nullptr;  // [layer][query][head][dim]
  uint64_t layers = 1, all = 0, first = 0, heads = 0, dim = 0, kv_heads = 0;

  uint64_t count() const { return all - first; }
  uint64_t group() const { return heads / kv_heads; }
  const double* Row(uint64_t layer, uint64_t query, uint64_t head) const {
    return values + ((layer * all + first + query) * heads + head) * dim;
  }
};

absl::StatusOr<Queries> QueriesOf(const Tensors& tensors, const CalibrationOptions& settings) {
  const Tensor* const tensor = tensors.Find("queries");
  if (tensor == nullptr || tensor->shape.size() < 3 || tensor->shape.size() > 4 || tensor->values.empty()) {
    return absl::InvalidArgumentError(
        "queries [layer][query][head][dim] or [query][head][dim] are needed in the input");
  }
  const std::vector<uint64_t>& shape = tensor->shape;
  const size_t rank = shape.size();
  Queries queries = {.values = tensor->values.data(),
                     .layers = rank == 4 ? shape[0] : 1,
                     .all = shape[rank - 3],
                     .first = static_cast<uint64_t>(settings.sinks),
                     .heads = shape[rank - 2],
                     .dim = shape[rank - 1]};
  queries.kv_heads = settings.kv_heads > 0 ? static_cast<uint64_t>(settings.kv_heads) : queries.heads;
  if (queries.heads % queries.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("parameter kv_heads is ", queries.kv_heads, ", and ",
                                                   queries.heads, " query heads are no multiple of it"));
  }
  if (queries.first >= queries.all) {
    return absl::InvalidArgumentError(absl::StrCat("parameter sinks is ", queries.first,
                                                   ", must be below the number of queries, ", queries.all));
  }
  if (!std::all_of(tensor->values.begin(), tensor->values.end(), [](double x) { return std::isfinite(x); })) {
    return absl::InvalidArgumentError("queries: there is a value that is not finite");
  }
  return queries;
}

// RoPE's frequencies, in radians for each position, and the elements that it turns together.
struct Rope {
  std::vector<double> frequencies;
  uint64_t step = 1;     // elements between the first ones of two pairs
  uint64_t partner = 1;  // elements between the two of a pair

  uint64_t pairs() const { return frequencies.size(); }
  Complex Pair(const double* row, uint64_t f) const { return {row[f * step], row[f * step + partner]}; }
  void Turn(const std::vector<Complex>& by, double* row) const {
    for (uint64_t f = 0; f < pairs(); ++f) {
      const Complex turned = Pair(row, f) * by[f];
      row[f * step] = turned.real();
      row[f * step + partner] = turned.imag();
    }
  }
  // scale * mean of exp(i p w_f) over the positions p.
  std::vector<Complex> MeanTurn(const std::vector<double>& positions, double scale) const {
    std::vector<Complex> turns;
    for (const double frequency : frequencies) {
      Complex sum;
      for (const double position : positions) sum += std::polar(1.0, position * frequency);
      turns.push_back(sum * scale / static_cast<double>(positions.size()));
    }
    return turns;
  }
};

absl::StatusOr<Rope> RopeOf(const Tensors& tensors, const CalibrationOptions& settings, uint64_t dim) {
  if (dim % 2 != 0)
    return absl::InvalidArgumentError(absl::StrCat("queries: dim is ", dim, ", must be even"));
  const uint64_t pairs = dim / 2;
  Rope rope = {.step = settings.interleaved ? uint64_t{2} : 1, .partner = settings.interleaved ? 1 : pairs};
  const Tensor* const given = tensors.Find("inv_freq");
  if (given != nullptr && given->values.size() != pairs) {
    return absl::InvalidArgumentError(
        absl::StrCat("inv_freq has ", given->values.size(), " numbers, must be ", pairs, " for dim ", dim));
  }
  for (uint64_t f = 0; f < pairs; ++f) {
    const double exponent = -2 * static_cast<double>(f) / static_cast<double>(dim);
    rope.frequencies.push_back(given != nullptr ? given->values[f] : std::pow(settings.theta, exponent));
  }
  return rope;
}

absl::Status CheckCount(uint64_t weights) {
  if (weights <= kMostCalibrated) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(weights, " weights, at most ", kMostCalibrated));
}

Tensors WeightsOf(std::vector<uint64_t> shape, std::vector<double> values) {
  Tensors answer;
  answer.by_name["weights"] = {.shape = std::move(shape), .values = std::move(values)};
  return answer;
}

std::vector<double> MeanOf(const Queries& queries, uint64_t layer, uint64_t head) {
  std::vector<double> mean(queries.dim);
  for (uint64_t q = 0; q < queries.count(); ++q) {
    for (uint64_t d = 0; d < queries.dim; ++d) mean[d] += queries.Row(layer, q, head)[d];
  }
  for (double& x : mean) x /= static_cast<double>(queries.count());
  return mean;
}

// [dim][dim], the mean over queries of (q - mean)(q - mean)'.
std::vector<double> MomentsOf(const Queries& queries, uint64_t layer, uint64_t head,
                              const std::vector<double>& mean) {
  const uint64_t dim = queries.dim;
  std::vector<double> moments(dim * dim), centered(dim);
  for (uint64_t q = 0; q < queries.count(); ++q) {
    for (uint64_t d = 0; d < dim; ++d) centered[d] = queries.Row(layer, q, head)[d] - mean[d];
    for (uint64_t d = 0; d < dim; ++d) {
      for (uint64_t e = 0; e < dim; ++e) moments[d * dim + e] += centered[d] * centered[e];
    }
  }
  for (double& x : moments) x /= static_cast<double>(queries.count());
  return moments;
}

void Transpose(uint64_t dim, std::vector<double>* matrix) {
  for (uint64_t d = 0; d < dim; ++d) {
    for (uint64_t e = 0; e < d; ++e) std::swap((*matrix)[d * dim + e], (*matrix)[e * dim + d]);
  }
}

absl::StatusOr<Tensors> ForExpectedAttention(const Tensors& tensors, const CalibrationOptions& settings) {
  ASSIGN_OR_RETURN(const Queries queries, QueriesOf(tensors, settings));
  const uint64_t dim = queries.dim, unit = dim + (settings.use_covariance ? dim * dim : 0);
  RETURN_IF_ERROR(CheckCount(queries.layers * queries.heads * unit));
  ASSIGN_OR_RETURN(const Rope rope, RopeOf(tensors, settings, dim));
  std::vector<double> positions(static_cast<size_t>(settings.future));
  std::iota(positions.begin(), positions.end(), settings.position);
  const std::vector<Complex> turns = rope.MeanTurn(positions, settings.scale);
  std::vector<double> weights;
  for (uint64_t layer = 0; layer < queries.layers; ++layer) {
    for (uint64_t head = 0; head < queries.heads; ++head) {
      std::vector<double> mean = MeanOf(queries, layer, head);
      std::vector<double> covariance;
      if (settings.use_covariance) {
        covariance = MomentsOf(queries, layer, head, mean);
        // R C R': C is symmetric, so that its rows are turned twice.
        for (int side = 0; side < 2; ++side) {
          for (uint64_t d = 0; d < dim; ++d) rope.Turn(turns, covariance.data() + d * dim);
          Transpose(dim, &covariance);
        }
      }
      rope.Turn(turns, mean.data());
      weights.insert(weights.end(), mean.begin(), mean.end());
      weights.insert(weights.end(), covariance.begin(), covariance.end());
    }
  }
  return WeightsOf({queries.layers, queries.heads, unit}, std::move(weights));
}

absl::StatusOr<Tensors> ForTriattention(const Tensors& tensors, const CalibrationOptions& settings) {
  ASSIGN_OR_RETURN(const Queries queries, QueriesOf(tensors, settings));
  ASSIGN_OR_RETURN(const Rope rope, RopeOf(tensors, settings, queries.dim));
  const Tensor* const given = tensors.Find("offsets");
  std::vector<double> offsets;
  if (given != nullptr) offsets = given->values;
  for (double offset = 1; given == nullptr && offset <= settings.farthest; offset *= 2) {
    offsets.push_back(offset);
  }
  if (offsets.empty()) return absl::InvalidArgumentError("offsets: there are none");
  const std::vector<Complex> turns = rope.MeanTurn(offsets, settings.scale * settings.scale);
  const double over = static_cast<double>(queries.count() * queries.group());
  std::vector<double> weights, real, imaginary, of_length;
  for (uint64_t plane = 0; plane < queries.layers * queries.kv_heads; ++plane) {
    for (std::vector<double>* part : {&real, &imaginary, &of_length}) part->clear();
    for (uint64_t f = 0; f < rope.pairs(); ++f) {
      Complex mean;
      double length = 0;
      for (uint64_t g = 0; g < queries.group(); ++g) {
        const uint64_t head = plane % queries.kv_heads * queries.group() + g;
        for (uint64_t q = 0; q < queries.count(); ++q) {
          const Complex pair = rope.Pair(queries.Row(plane / queries.kv_heads, q, head), f);
          mean += pair / over;
          length += std::abs(pair) / over;
        }
      }
      real.push_back((mean * turns[f]).real());
      imaginary.push_back((mean * turns[f]).imag());
      of_length.push_back(settings.scale * settings.scale * (length - std::abs(mean)));
    }
    for (const std::vector<double>* part : {&real, &imaginary, &of_length}) {
      weights.insert(weights.end(), part->begin(), part->end());
    }
  }
  weights.insert(weights.end(), rope.frequencies.begin(), rope.frequencies.end());
  const uint64_t count = weights.size();
  RETURN_IF_ERROR(CheckCount(count));
  return WeightsOf({count}, std::move(weights));
}

// The first right-singular vector of a head's queries, of length 1, on either side: the sum of q q' is squared until one
// direction is left, d d'.
std::vector<double> FirstDirection(const Queries& queries, uint64_t layer, uint64_t head) {
  // 2^60 is a power at which the second direction is gone even if its eigenvalue is within rounding of the first's.
  constexpr int kSquarings = 60;
  constexpr double kRounding = 1e-15;
  const uint64_t dim = queries.dim;
  std::vector<double> powers = MomentsOf(queries, layer, head, std::vector<double>(dim)), squared(dim * dim);
  for (int i = 0; i < kSquarings; ++i) {
    double trace = 0, square = 0;
    for (uint64_t d = 0; d < dim; ++d) trace += powers[d * dim + d];
    if (trace == 0) return std::vector<double>(dim);
    for (double& x : powers) x /= trace, square += x * x;
    // The trace of the square, which is 1 for a single direction.
    if (square > 1 - kRounding) break;
    for (uint64_t d = 0; d < dim; ++d) {
      for (uint64_t e = 0; e <= d; ++e) {
        // The matrix is symmetric: its column e is its row e.
        squared[d * dim + e] = squared[e * dim + d] = std::inner_product(
            powers.begin() + d * dim, powers.begin() + (d + 1) * dim, powers.begin() + e * dim, 0.0);
      }
    }
    powers.swap(squared);
  }
  uint64_t longest = 0;
  for (uint64_t d = 1; d < dim; ++d) {
    if (powers[d * dim + d] > powers[longest * dim + longest]) longest = d;
  }
  std::vector<double> direction(powers.begin() + longest * dim, powers.begin() + (longest + 1) * dim);
  const double length =
      std::sqrt(std::inner_product(direction.begin(), direction.end(), direction.begin(), 0.0));
  for (double& x : direction) x /= length;
  return direction;
}

absl::StatusOr<Tensors> ForQfilters(const Tensors& tensors, const CalibrationOptions& settings) {
  ASSIGN_OR_RETURN(const Queries queries, QueriesOf(tensors, settings));
  const uint64_t dim = queries.dim;
  std::vector<double> filters(queries.layers * queries.kv_heads * dim);
  for (uint64_t layer = 0; layer < queries.layers; ++layer) {
    for (uint64_t head = 0; head < queries.heads; ++head) {
      const std::vector<double> direction = FirstDirection(queries, layer, head);
      uint64_t along = 0;
      for (uint64_t q = 0; q < queries.count(); ++q) {
        along += std::inner_product(direction.begin(), direction.end(), queries.Row(layer, q, head), 0.0) > 0;
      }
      // It points away from most queries.
      const double sign = 2 * along > queries.count() ? -1 : 1;
      double* const filter = filters.data() + (layer * queries.kv_heads + head / queries.group()) * dim;
      for (uint64_t d = 0; d < dim; ++d) {
        filter[d] += sign * direction[d] / static_cast<double>(queries.group());
      }
    }
  }
  return WeightsOf({queries.layers, queries.kv_heads, dim}, std::move(filters));
}

}  // namespace

absl::StatusOr<Tensors> Calibrate(const Tensors& tensors, const std::string& policy,
                                  const CalibrationSettings& settings) {
  ASSIGN_OR_RETURN(const CalibrationOptions parsed, OptionsOf(settings));
  if (policy == "expected_attention") return ForExpectedAttention(tensors, parsed);
  if (policy == "triattention") return ForTriattention(tensors, parsed);
  if (policy == "qfilters") return ForQfilters(tensors, parsed);
  return absl::InvalidArgumentError(absl::StrCat("policy ", policy,
                                                 " is not calibrated; there are expected_attention, "
                                                 "triattention and qfilters"));
}

}  // namespace kvpool::lab
