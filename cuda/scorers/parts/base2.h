// Powers and logarithms to base 2, of which a GPU has instructions.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_BASE2_H_
#define KVPOOL_CUDA_SCORERS_PARTS_BASE2_H_

#include <cmath>

#include "cuda/scorers/parts/element.h"

namespace kvpool::scorers {

inline constexpr float kLog2E = 1.44269504088896341f;  // log2(e)
inline constexpr float kLn2 = 0.693147180559945309f;

// 2^x to two units in the last place. On a GPU what is subnormal is 0.
KVPOOL_HOST_DEVICE KVPOOL_INLINE float Exp2(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}

// log2(x) of a normal x > 0, with an error of at most 2^-22, relative where |log2(x)| > 1.
KVPOOL_HOST_DEVICE KVPOOL_INLINE float Log2(float x) {
#ifdef __CUDA_ARCH__
  float logarithm;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
  return logarithm;
#else
  return log2f(x);
#endif
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_BASE2_H_
