// A float as an element of K or V.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_STORE_ELEMENT_H_
#define KVPOOL_CUDA_SCORERS_PARTS_STORE_ELEMENT_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"

namespace kvpool::scorers {

// The bits of the number nearest to x, of two equally near ones the even one, in a format of a sign, an exponent with this
// bias and `fraction_bits`. REQUIRES: x rounds to a number that the format has.
KVPOOL_HOST_DEVICE inline uint32_t RoundedBits(float x, uint32_t bias, uint32_t fraction_bits,
                                               uint32_t sign_bit) {
  const uint32_t bits = BitsOf(x), sign = bits >> 31 << sign_bit;
  const uint32_t field = bits >> 23 & 0xffu;
  const uint32_t significand = (bits & 0x7fffffu) | (field == 0 ? 0 : 0x800000u);
  const uint32_t exponent = field == 0 ? 1 : field;
  const uint32_t least = 127 - bias + 1;  // A float's exponent field at the format's least normal number.
  const uint32_t below = exponent < least ? least - exponent : 0;
  const uint32_t shift = 23 - fraction_bits + below;
  if (shift > 24) return sign;  // It is less than half of the least number.
  const uint32_t rounded = (significand + (1u << (shift - 1)) - 1 + (significand >> shift & 1u)) >> shift;
  // The leading one of a normal number adds one to the exponent.
  return sign | ((below > 0 ? 0 : (exponent - least) << fraction_bits) + rounded);
}

// REQUIRES: x rounds to a number that the type has.
KVPOOL_HOST_DEVICE inline void StoreElement(unsigned char* at, KvDtype dtype, float x) {
  switch (dtype) {
    case KvDtype::kF32:
      *reinterpret_cast<float*>(at) = x;
      return;
    case KvDtype::kF16:
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(RoundedBits(x, 15, 10, 15));
      return;
    case KvDtype::kBf16:
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(RoundedBits(x, 127, 7, 15));
      return;
    case KvDtype::kFp8E4m3:
      *at = static_cast<unsigned char>(RoundedBits(x, 7, 3, 7));
      return;
    case KvDtype::kFp8E5m2:
      *at = static_cast<unsigned char>(RoundedBits(x, 15, 2, 7));
      return;
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_STORE_ELEMENT_H_
