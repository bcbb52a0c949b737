// Small networks for learned policies, trained on a dump of a model: hidden states and what should have stayed.
#ifndef KVPOOL_CUDA_LAB_TRAIN_H_
#define KVPOOL_CUDA_LAB_TRAIN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/lab/tensor.h"

namespace kvpool::lab {

// Parameters of the training, NAME=VALUE:
//   steps=400   passes over all tokens
//   rate=0.05   of Adam (arXiv 1412.6980)
//   seed=1      of the first weights
//   units=0     learned_mlp: inner units; 0: half the input's size
//   keep=-1     attention_gate: share of tokens that shall stay, pulled towards beside the targets; -1: not pulled
//   pull=1      its weight in the loss
using TrainingSettings = std::vector<std::pair<std::string, std::string>>;

// Weights for `policy`, under the names that scoring reads:
//   learned_mlp      hidden [token][dim] (or [layer][token][dim]), target [token] (or [layer][token]) in 0 to 1: future
//                    attention mass brought to that range, or 1 for what a slower policy kept.
//                    Answers W1 [units][dim], b1 [units], w2 [units], b2 [1]; binary cross-entropy.
//   attention_gate   hidden likewise, target [layer][head][token] in 0 to 1.
//                    Answers weights [layer][head][2 * dim + 1]; binary cross-entropy, and pull * (mean gate - keep)^2.
absl::StatusOr<Tensors> Train(const Tensors& tensors, const std::string& policy,
                              const TrainingSettings& settings);

// As F32, tensors in the order of their names.
std::string SafetensorsOf(const Tensors& tensors);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_TRAIN_H_
