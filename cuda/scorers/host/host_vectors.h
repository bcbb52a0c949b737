// Loads K and V as vectors of floats, for each instruction set. Only the sources of HostRows' functions
// include it.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_VECTORS_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_VECTORS_H_

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"

#define KVPOOL_AVX2 __attribute__((target("avx2,fma,f16c")))
// Processors since Zen 4 and Sapphire Rapids have these; older ones run the code for AVX2.
#define KVPOOL_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,f16c")))

namespace kvpool::scorers {

inline constexpr uint32_t kLineBytes = 64;  // a cache line

template <KvDtype dtype>
KVPOOL_AVX2 inline __m256 Load8(const unsigned char* from) {
  if constexpr (dtype == KvDtype::kF32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  } else if constexpr (dtype == KvDtype::kF16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (dtype == KvDtype::kBf16) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  } else {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    if constexpr (dtype == KvDtype::kFp8E5m2) {
      return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
    } else {
      const __m256i words = _mm256_cvtepu8_epi32(bytes);
      const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(words, _mm256_set1_epi32(0x7f)), 20);
      const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(words, _mm256_set1_epi32(0x80)), 24);
      const __m256 finite = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p120f));
      const __m256i none = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x07f00000));
      return _mm256_or_ps(_mm256_or_ps(finite, _mm256_castsi256_ps(none)), _mm256_castsi256_ps(sign));
    }
  }
}

template <KvDtype dtype>
KVPOOL_AVX512 inline __m512 Load16(const unsigned char* from) {
  if constexpr (dtype == KvDtype::kF32) {
    return _mm512_loadu_ps(from);
  } else if constexpr (dtype == KvDtype::kF16) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  } else if constexpr (dtype == KvDtype::kBf16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  } else {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    if constexpr (dtype == KvDtype::kFp8E5m2) {
      return _mm512_cvtph_ps(halves);
    } else {
      // The sign stays and the other bits move down by one: an f16 whose exponent is 8 too low. All ones
      // is NaN.
      const __m256i moved =
          _mm256_or_si256(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0x8000))),
                          _mm256_srli_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(0x7f00)), 1));
      const __mmask16 none = _mm256_cmpeq_epi16_mask(_mm256_and_si256(halves, _mm256_set1_epi16(0x7f00)),
                                                     _mm256_set1_epi16(0x7f00));
      return _mm512_mask_mov_ps(_mm512_mul_ps(_mm512_cvtph_ps(moved), _mm512_set1_ps(256)), none,
                                _mm512_set1_ps(NAN));
    }
  }
}

KVPOOL_AVX2 inline float SumOf(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

KVPOOL_AVX512 inline float SumOf(__m512 x) {
  return SumOf(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_VECTORS_H_
