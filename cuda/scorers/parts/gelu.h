// The activation of small networks in kernels.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_GELU_H_
#define KVPOOL_CUDA_SCORERS_PARTS_GELU_H_

#include <cmath>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

// x times the normal distribution's integral up to x, without an approximation by tanh.
KVPOOL_HOST_DEVICE inline float Gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_GELU_H_
