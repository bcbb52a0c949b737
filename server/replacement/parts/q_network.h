// The network of cold_rl: a dueling Q-network (Wang et al. 2016) that judges one candidate at a time.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_Q_NETWORK_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_Q_NETWORK_H_

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/replacement/parts/weights.h"

namespace kvpool {

// h1 = relu(W1 x + b1), h2 = relu(W2 h1 + b2), V = v h2 + bv, A = Wa h2 + ba, Q(a) = V + A(a) - mean A,
// where an action a is to keep the candidate or to evict it. Candidates are judged apart, so their
// order changes nothing.
class QNetwork {
 public:
  static constexpr size_t kInputs = 6, kHidden = 64, kActions = 2;
  struct Q {
    float keep, evict;
  };

  // The tensors in the layout of linear layers: weights are [outputs, inputs], biases [outputs].
  static std::vector<WeightsShape::Tensor> Tensors() {
    return {{"hidden1.weight", {kHidden, kInputs}},
            {"hidden1.bias", {kHidden}},
            {"hidden2.weight", {kHidden, kHidden}},
            {"hidden2.bias", {kHidden}},
            {"value.weight", {1, kHidden}},
            {"value.bias", {1}},
            {"advantage.weight", {kActions, kHidden}},
            {"advantage.bias", {kActions}}};
  }

  // REQUIRES: the weights have those tensors.
  explicit QNetwork(const Weights& weights);
  Q Evaluate(const float* features) const;

 private:
  using Row = std::array<float, kHidden>;
  // Stored by input, so that a loop over the outputs walks neighbours.
  std::array<Row, kInputs> hidden1_;
  std::array<Row, kHidden> hidden2_;
  Row hidden1_bias_, hidden2_bias_;
  Row value_;
  std::array<Row, kActions> advantage_;
  float value_bias_;
  std::array<float, kActions> advantage_bias_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_Q_NETWORK_H_
