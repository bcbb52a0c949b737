// The network of cold_rl: a dueling Q-network (Wang et al. 2016) over one candidate, the same for each.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_Q_NETWORK_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_Q_NETWORK_H_

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/replacement/parts/weights.h"

namespace kvpool {

// h1 = relu(W1 x + b1), h2 = relu(W2 h1 + b2), V = v h2 + bv, A = Wa h2 + ba: of keeping it, and of its leaving.
// Q(a) = V + A(a) - mean A. Candidates do not see each other, so their order changes nothing.
class QNetwork {
 public:
  static constexpr size_t kInputs = 6, kHidden = 64, kActions = 2;
  struct Q {
    float keep, evict;
  };

  // The tensors, as a linear layer has them: [outputs, inputs], and [outputs] of biases.
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

  // REQUIRES: they have those tensors.
  explicit QNetwork(const Weights& weights);
  Q Evaluate(const float* features) const;

 private:
  using Row = std::array<float, kHidden>;
  // By input, so that a loop over the outputs is one over neighbours.
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
