// Cosine and sine of an angle, without the library's reduction of large angles, which keeps an array in a GPU's local
// memory.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_ROTATION_H_
#define KVPOOL_CUDA_SCORERS_PARTS_ROTATION_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

struct Rotation {
  double cos = 1;
  double sin = 0;
};

// Right to 1e-9 for angles of up to 2^20 radians; NaN where no quarter of a turn can be told, beyond 1e15 of them. Taylor's series over the eighth of a turn on both sides of a quarter.
KVPOOL_HOST_DEVICE inline Rotation RotationOf(double radians) {
  constexpr double kQuarter = 1.57079632679489661923;
  const double quarters = radians / kQuarter;
  if (!(quarters > -1e15 && quarters < 1e15)) return {NAN, NAN};
  const auto nearest = static_cast<int64_t>(quarters + (quarters < 0 ? -0.5 : 0.5));
  const double x = (quarters - static_cast<double>(nearest)) * kQuarter, y = x * x;
  const double sin =
      x * (1 - y / 6 * (1 - y / 20 * (1 - y / 42 * (1 - y / 72 * (1 - y / 110 * (1 - y / 156))))));
  const double cos = 1 - y / 2 * (1 - y / 12 * (1 - y / 30 * (1 - y / 56 * (1 - y / 90 * (1 - y / 132)))));
  const auto quarter = static_cast<uint32_t>(nearest & 3);
  const Rotation odd = {-sin, cos}, even = {cos, sin};
  const Rotation first = quarter % 2 != 0 ? odd : even;
  return quarter < 2 ? first : Rotation{-first.cos, -first.sin};
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_ROTATION_H_
