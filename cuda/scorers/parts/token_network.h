// Small models over a token's inputs, for policies with learned weights: a product, and a network of one hidden layer,
// w2 . f(W1 x + b1) + b2.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_TOKEN_NETWORK_H_
#define KVPOOL_CUDA_SCORERS_PARTS_TOKEN_NETWORK_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

// One unit of output.
struct TokenNetwork {
  const float* w1 = nullptr;  // [units][dim]
  const float* b1 = nullptr;  // [units]
  const float* w2 = nullptr;  // [units]
  float b2 = 0;
  uint64_t units = 0;
  uint32_t dim = 0;
};

// The product of a row of weights with the inputs x(0) … x(dim - 1), by a row team, each lane of which gets it.
template <typename Team, typename Input>
KVPOOL_HOST_DEVICE float ProductOf(const Team& team, const float* weights, const Input& x, uint32_t dim) {
  float sum = 0;
  for (uint32_t d = team.in_row(); d < dim; d += team.row_width()) sum += weights[d] * x(d);
  return team.RowSum(sum);
}

// The output for the same inputs. `activation` is the f of a float.
template <typename Team, typename Input, typename Activation>
KVPOOL_HOST_DEVICE double OutputOf(const Team& team, const TokenNetwork& network, const Input& x,
                                   const Activation& activation) {
  double output = double{network.b2};
  for (uint64_t u = 0; u < network.units; ++u) {
    const float sum = ProductOf(team, network.w1 + u * network.dim, x, network.dim) + network.b1[u];
    output += double{network.w2[u]} * double{activation(sum)};
  }
  return output;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_TOKEN_NETWORK_H_
