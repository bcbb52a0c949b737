// Training of the small networks of learned policies, on a dump of a model: hidden states, and targets that
// say which tokens should have stayed.
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
//   rate=0.05   Adam's learning rate (arXiv 1412.6980)
//   seed=1      seed of the initial weights
//   units=0     learned_mlp: inner units; 0: half the input's size
//   keep=-1     attention_gate: share of tokens that shall stay, a second term of the loss; -1: no such term
//   pull=1      attention_gate: weight of that term
using TrainingSettings = std::vector<std::pair<std::string, std::string>>;

// Returns weights for `policy`, under the names that scoring reads. Targets are in 0 to 1: future attention
// mass brought to that range, or 1 for tokens that a slower policy kept.
//
//   learned_mlp      reads hidden [token][dim] or [layer][token][dim], target [token] or [layer][token]
//                    returns W1 [units][dim], b1 [units], w2 [units], b2 [1]
//                    loss: binary cross-entropy
//   attention_gate   reads the same hidden, target [layer][head][token]
//                    returns weights [layer][head][2 * dim + 1]
//                    loss: binary cross-entropy + pull * (mean gate - keep)^2
absl::StatusOr<Tensors> Train(const Tensors& tensors, const std::string& policy,
                              const TrainingSettings& settings);

// The bytes of a safetensors file: F32, tensors in the order of their names.
std::string SafetensorsOf(const Tensors& tensors);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_TRAIN_H_
