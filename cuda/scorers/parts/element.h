// Elements of K and V as floats. The conversions have no branches, so that a compiler can vectorise a loop
// over them.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_ELEMENT_H_
#define KVPOOL_CUDA_SCORERS_PARTS_ELEMENT_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"

// Kernel bodies are inlined into the function that names the instruction set (host_kernels.cc), and into the
// GPU's kernel.
#define KVPOOL_INLINE inline __attribute__((always_inline))

namespace kvpool::scorers {

KVPOOL_HOST_DEVICE KVPOOL_INLINE float FloatOfBits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
KVPOOL_HOST_DEVICE KVPOOL_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}
// All exponent bits set: an infinity or not a number.
KVPOOL_HOST_DEVICE KVPOOL_INLINE bool IsFinite(float value) {
  return (BitsOf(value) & 0x7f800000u) != 0x7f800000u;
}

// Whether a vector of this norm can be divided by it.
KVPOOL_HOST_DEVICE inline bool HasDirection(float norm) { return IsFinite(norm) && norm > 0; }

// Load shifts a smaller float's exponent and fraction to a float's places and multiplies by 2^(127 - its
// bias). This is right for its denormals too: before the product they are denormals of a float. A GPU has an
// instruction for an f16, and an fp8 has at most an f16's exponent and fraction.
template <KvDtype dtype>
struct Element;

#ifdef __CUDA_ARCH__
__device__ KVPOOL_INLINE float FloatOfF16(uint16_t x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
  return value;
}
#endif

// The bits of an f16 that is 2^-8 of the e4m3 in each upper byte of a word, unless that is NaN. An e4m3's exponent has
// one bit less, and a bias of 7 instead of 15.
KVPOOL_HOST_DEVICE KVPOOL_INLINE uint32_t F16OfE4m3(uint32_t upper_bytes) {
  return (upper_bytes & 0x80008000u) | (upper_bytes >> 1 & 0x3f803f80u);
}
inline constexpr float kE4m3Scale = 0x1p8f;

template <>
struct Element<KvDtype::kF32> {
  using Storage = float;
  KVPOOL_HOST_DEVICE static KVPOOL_INLINE float Load(Storage x) { return x; }
};

template <>
struct Element<KvDtype::kBf16> {
  using Storage = uint16_t;
  KVPOOL_HOST_DEVICE static KVPOOL_INLINE float Load(Storage x) { return FloatOfBits(uint32_t{x} << 16); }
};

template <>
struct Element<KvDtype::kF16> {
  using Storage = uint16_t;
  KVPOOL_HOST_DEVICE static KVPOOL_INLINE float Load(Storage x) {
#ifdef __CUDA_ARCH__
    return FloatOfF16(x);
#else
    const uint32_t magnitude = (x & 0x7fffu) << 13;
    const uint32_t finite = BitsOf(FloatOfBits(magnitude) * 0x1p112f);
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return FloatOfBits(bits | (x & 0x8000u) << 16);
#endif
  }
};

// The format has no infinities; NaN is all ones below the sign.
template <>
struct Element<KvDtype::kFp8E4m3> {
  using Storage = uint8_t;
  KVPOOL_HOST_DEVICE static KVPOOL_INLINE float Load(Storage x) {
#ifdef __CUDA_ARCH__
    const float finite = FloatOfF16(static_cast<uint16_t>(F16OfE4m3(uint32_t{x} << 8))) * kE4m3Scale;
    return (x & 0x7fu) == 0x7fu ? FloatOfBits(0x7fc00000u) : finite;
#else
    const uint32_t magnitude = (x & 0x7fu) << 20;
    const uint32_t finite = BitsOf(FloatOfBits(magnitude) * 0x1p120f);
    const uint32_t bits = magnitude == 0x07f00000u ? 0x7fc00000u : finite;
    return FloatOfBits(bits | (x & 0x80u) << 24);
#endif
  }
};

template <>
struct Element<KvDtype::kFp8E5m2> {
  using Storage = uint8_t;
  KVPOOL_HOST_DEVICE static KVPOOL_INLINE float Load(Storage x) {
    return Element<KvDtype::kF16>::Load(static_cast<uint16_t>(x << 8));
  }
};

// Calls body.Run<dtype>().
template <typename Body>
KVPOOL_HOST_DEVICE inline void WithDtype(KvDtype dtype, const Body& body) {
  switch (dtype) {
    case KvDtype::kF32:
      return body.template Run<KvDtype::kF32>();
    case KvDtype::kF16:
      return body.template Run<KvDtype::kF16>();
    case KvDtype::kBf16:
      return body.template Run<KvDtype::kBf16>();
    case KvDtype::kFp8E4m3:
      return body.template Run<KvDtype::kFp8E4m3>();
    case KvDtype::kFp8E5m2:
      return body.template Run<KvDtype::kFp8E5m2>();
  }
}

// One element, of a type known at run time.
KVPOOL_HOST_DEVICE inline float LoadElement(const unsigned char* at, KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kF32:
      return *reinterpret_cast<const float*>(at);
    case KvDtype::kF16:
      return Element<KvDtype::kF16>::Load(*reinterpret_cast<const uint16_t*>(at));
    case KvDtype::kBf16:
      return Element<KvDtype::kBf16>::Load(*reinterpret_cast<const uint16_t*>(at));
    case KvDtype::kFp8E4m3:
      return Element<KvDtype::kFp8E4m3>::Load(*at);
    case KvDtype::kFp8E5m2:
      return Element<KvDtype::kFp8E5m2>::Load(*at);
  }
  return 0;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_ELEMENT_H_
