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

// Fits the parameters of a QNetwork by Adam (arXiv 1412.6980) on Huber losses.
class QTrainer {
 public:
  QTrainer(uint64_t seed, double rate);

  // Adds the gradient of one candidate, whose Q values should be `keep` and `evict`. Answers its loss.
  double Add(const QFeatures& features, float keep, float evict);
  // Follows the gradient that was summed since the last step.
  void Step();
  // Copies the parameters learned so far.
  void CopyTo(Weights* weights) const;

 private:
  static constexpr size_t kIn = QNetwork::kInputs, kHidden = QNetwork::kHidden;
  struct Parameter {
    std::string name;
    std::vector<uint64_t> shape;
    std::vector<float> value, gradient, mean, square;
  };

  // In the order of QNetwork::Tensors.
  std::vector<Parameter> parameters_;
  const double rate_;
  uint64_t steps_ = 0;
  uint32_t batch_ = 0;
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_Q_TRAINER_H_
