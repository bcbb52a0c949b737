#include "server/replacement/parts/q_network.h"

#include <algorithm>

namespace kvpool {
namespace {

template <size_t kIn, size_t kOut>
void Transpose(absl::Span<const float> weight, std::array<std::array<float, kOut>, kIn>* out) {
  for (size_t o = 0; o < kOut; ++o) {
    for (size_t i = 0; i < kIn; ++i) (*out)[i][o] = weight[o * kIn + i];
  }
}

// out = relu(bias + W in).
template <size_t kIn, size_t kOut>
void Layer(const float* in, const std::array<std::array<float, kOut>, kIn>& weight,
           const std::array<float, kOut>& bias, std::array<float, kOut>* out) {
  *out = bias;
  for (size_t i = 0; i < kIn; ++i) {
    const float x = in[i];
    // Half of the outputs of a relu are zero.
    if (x == 0) continue;
    for (size_t o = 0; o < kOut; ++o) (*out)[o] += x * weight[i][o];
  }
  for (float& y : *out) y = std::max(y, 0.0f);
}

template <size_t kSize>
float Dot(const std::array<float, kSize>& a, const std::array<float, kSize>& b) {
  float sum = 0;
  for (size_t i = 0; i < kSize; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

QNetwork::QNetwork(const Weights& weights) {
  const auto copy = [&weights](const char* name, auto* to) {
    const absl::Span<const float> from = weights.Get(name);
    std::copy(from.begin(), from.end(), to->begin());
  };
  Transpose(weights.Get("hidden1.weight"), &hidden1_);
  Transpose(weights.Get("hidden2.weight"), &hidden2_);
  copy("hidden1.bias", &hidden1_bias_);
  copy("hidden2.bias", &hidden2_bias_);
  copy("value.weight", &value_);
  copy("advantage.bias", &advantage_bias_);
  value_bias_ = weights.Get("value.bias")[0];
  const absl::Span<const float> advantage = weights.Get("advantage.weight");
  for (size_t a = 0; a < kActions; ++a) {
    std::copy_n(advantage.begin() + a * kHidden, kHidden, advantage_[a].begin());
  }
}

QNetwork::Q QNetwork::Evaluate(const float* features) const {
  Row h1, h2;
  Layer(features, hidden1_, hidden1_bias_, &h1);
  Layer(h1.data(), hidden2_, hidden2_bias_, &h2);
  const float value = Dot(value_, h2) + value_bias_;
  const float keep = Dot(advantage_[0], h2) + advantage_bias_[0];
  const float evict = Dot(advantage_[1], h2) + advantage_bias_[1];
  const float half = (keep - evict) / 2;
  return {.keep = value + half, .evict = value - half};
}

}  // namespace kvpool
