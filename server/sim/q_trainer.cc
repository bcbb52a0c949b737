#include "server/sim/q_trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvpool::sim {
namespace {

enum : size_t { kW1, kB1, kW2, kB2, kV, kVBias, kA, kABias };

// Uniform in [-1, 1). Unlike std's distributions it is the same on every platform.
float Uniform(std::mt19937_64* random) { return static_cast<float>((*random)() >> 11) * 0x1p-52f - 1; }

float Dot(const float* a, const float* b, size_t size) {
  float sum = 0;
  for (size_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

void AddScaled(float scale, const float* from, size_t size, float* to) {
  for (size_t i = 0; i < size; ++i) to[i] += scale * from[i];
}

}  // namespace

QTrainer::QTrainer(uint64_t seed, double rate) : rate_(rate) {
  std::mt19937_64 random(seed);
  for (WeightsShape::Tensor& tensor : QNetwork::Tensors()) {
    size_t size = 1;
    for (const uint64_t extent : tensor.shape) size *= extent;
    Parameter p{.name = std::move(tensor.name),
                .shape = tensor.shape,
                .value = std::vector<float>(size),
                .gradient = std::vector<float>(size),
                .mean = std::vector<float>(size),
                .square = std::vector<float>(size)};
    // He et al. 2015; biases begin at zero.
    const bool bias = tensor.shape.size() == 1;
    const float scale = bias ? 0 : std::sqrt(6.0f / static_cast<float>(tensor.shape[1]));
    for (float& value : p.value) value = scale * Uniform(&random);
    parameters_.push_back(std::move(p));
  }
}

double QTrainer::Add(const QFeatures& x, float keep, float evict) {
  std::vector<Parameter>& p = parameters_;
  std::array<float, kHidden> h1, h2, d1{}, d2{};
  for (size_t o = 0; o < kHidden; ++o) {
    h1[o] = std::max(p[kB1].value[o] + Dot(&p[kW1].value[o * kIn], x.data(), kIn), 0.0f);
  }
  for (size_t o = 0; o < kHidden; ++o) {
    h2[o] = std::max(p[kB2].value[o] + Dot(&p[kW2].value[o * kHidden], h1.data(), kHidden), 0.0f);
  }
  const float value = p[kVBias].value[0] + Dot(p[kV].value.data(), h2.data(), kHidden);
  const float a0 = p[kABias].value[0] + Dot(&p[kA].value[0], h2.data(), kHidden);
  const float a1 = p[kABias].value[1] + Dot(&p[kA].value[kHidden], h2.data(), kHidden);
  const float keep_error = value + (a0 - a1) / 2 - keep;
  const float evict_error = value - (a0 - a1) / 2 - evict;
  // The gradient of the Huber loss: errors beyond 1 pull as if they were 1.
  const float g_keep = std::clamp(keep_error, -1.0f, 1.0f), g_evict = std::clamp(evict_error, -1.0f, 1.0f);
  const float g_value = g_keep + g_evict, g_a0 = (g_keep - g_evict) / 2;

  p[kVBias].gradient[0] += g_value;
  p[kABias].gradient[0] += g_a0;
  p[kABias].gradient[1] -= g_a0;
  AddScaled(g_value, h2.data(), kHidden, p[kV].gradient.data());
  AddScaled(g_a0, h2.data(), kHidden, &p[kA].gradient[0]);
  AddScaled(-g_a0, h2.data(), kHidden, &p[kA].gradient[kHidden]);
  for (size_t o = 0; o < kHidden; ++o) {
    if (h2[o] <= 0) continue;
    d2[o] = g_value * p[kV].value[o] + g_a0 * (p[kA].value[o] - p[kA].value[kHidden + o]);
    p[kB2].gradient[o] += d2[o];
    AddScaled(d2[o], h1.data(), kHidden, &p[kW2].gradient[o * kHidden]);
    AddScaled(d2[o], &p[kW2].value[o * kHidden], kHidden, d1.data());
  }
  for (size_t o = 0; o < kHidden; ++o) {
    if (h1[o] <= 0) continue;
    p[kB1].gradient[o] += d1[o];
    AddScaled(d1[o], x.data(), kIn, &p[kW1].gradient[o * kIn]);
  }
  ++batch_;
  const auto huber = [](float error) {
    const double e = std::abs(error);
    return e <= 1 ? e * e / 2 : e - 0.5;
  };
  return huber(keep_error) + huber(evict_error);
}

void QTrainer::Step() {
  constexpr float kMeanDecay = 0.9f, kSquareDecay = 0.999f;
  ++steps_;
  const double unbiased = std::sqrt(1 - std::pow(kSquareDecay, steps_)) / (1 - std::pow(kMeanDecay, steps_));
  const auto rate = static_cast<float>(rate_ * unbiased);
  const float share = 1 / static_cast<float>(std::max(batch_, 1u));
  for (Parameter& p : parameters_) {
    for (size_t i = 0; i < p.value.size(); ++i) {
      const float g = p.gradient[i] * share;
      p.mean[i] += (1 - kMeanDecay) * (g - p.mean[i]);
      p.square[i] += (1 - kSquareDecay) * (g * g - p.square[i]);
      p.value[i] -= rate * p.mean[i] / (std::sqrt(p.square[i]) + 1e-8f);
      p.gradient[i] = 0;
    }
  }
  batch_ = 0;
}

void QTrainer::CopyTo(Weights* weights) const {
  for (const Parameter& p : parameters_) weights->Set(p.name, p.shape, p.value);
}

}  // namespace kvpool::sim
