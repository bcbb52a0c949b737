// Gradient descent on a QNetwork.
#ifndef KVPOOL_SERVER_SIM_Q_TRAINER_H_
#define KVPOOL_SERVER_SIM_Q_TRAINER_H_

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "server/replacement/parts/q_network.h"
#include "server/replacement/parts/weights.h"

namespace kvpool::sim {

using QFeatures = std::array<float, QNetwork::kInputs>;

// The parameters of a QNetwork, being learned by Adam (arXiv 1412.6980) from Huber losses.
class QTrainer {
 public:
  QTrainer(uint64_t seed, double rate);

  // One candidate and what its Q values should be. Sums the gradient, answers the loss.
  double Add(const QFeatures& features, float keep, float evict);
  // Follows the gradient summed since the last step.
  void Step();
  // What it learned by now.
  void CopyTo(Weights* weights) const;

 private:
  static constexpr size_t kIn = QNetwork::kInputs, kHidden = QNetwork::kHidden;
  struct Parameter {
    std::string name;
    std::vector<uint64_t> shape;
    std::vector<float> value, gradient, mean, square;
  };

  std::vector<Parameter> parameters_;  // As QNetwork::Tensors lists them.
  const double rate_;
  uint64_t steps_ = 0;
  uint32_t batch_ = 0;
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_Q_TRAINER_H_
