// Norms of rows of K and V, four rows at a time: the square roots of four sums are taken as one vector.
// Elements are squared in the order in which their bytes unpack, so no instruction is spent on reordering
// them. Only host_rows.cc includes this.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_NORMS_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_NORMS_H_

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cuda/scorers/host/host_vectors.h"
#include "cuda/scorers/host/row_sums.h"
#include "cuda/scorers/parts/kv_view.h"

namespace kvpool::scorers {

// How far ahead rows are prefetched: the processor's own prefetching stops at each row's sum. A prefetch
// past the end, of an unmapped address, does nothing. Shorter and longer distances reach less of the
// memory's bandwidth.
inline constexpr uint32_t kPrefetchBytes = 8192;
inline constexpr uint32_t kNormRows = 4;

// The magnitudes of all codes of an fp8 type as bf16, which holds them exactly. Low and high bytes have a
// table each, for a permutation of bytes, which reads the lower seven bits of a code.
struct MagnitudeTables {
  alignas(64) std::array<uint8_t, 128> low{};
  alignas(64) std::array<uint8_t, 128> high{};
};
constexpr MagnitudeTables MagnitudesOf(KvDtype dtype) {
  const bool e4m3 = dtype == KvDtype::kFp8E4m3;
  const uint32_t fraction_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  MagnitudeTables tables;
  for (uint32_t code = 0; code < 128; ++code) {
    const uint32_t exponent = code >> fraction_bits, ones = 1u << fraction_bits;
    float value = static_cast<float>(code % ones + (exponent == 0 ? 0 : ones)) / static_cast<float>(ones);
    for (uint32_t e = exponent == 0 ? 1 : exponent; e < bias; ++e) value /= 2;
    for (uint32_t e = bias; e < exponent; ++e) value *= 2;
    uint32_t bf16 = std::bit_cast<uint32_t>(value) >> 16;
    if (e4m3 && code == 127) bf16 = 0x7fc0;
    if (!e4m3 && exponent == 31) bf16 = code % ones == 0 ? 0x7f80 : 0x7fc0;
    tables.low[code] = static_cast<uint8_t>(bf16);
    tables.high[code] = static_cast<uint8_t>(bf16 >> 8);
  }
  return tables;
}
template <KvDtype dtype>
inline constexpr MagnitudeTables kMagnitudes = MagnitudesOf(dtype);

// Adds the squares of the elements in 64 bytes.
template <KvDtype dtype>
KVPOOL_AVX512 inline __m512 AddSquares(__m512 sum, __m512i bytes) {
  if constexpr (dtype == KvDtype::kF32) {
    const __m512 x = _mm512_castsi512_ps(bytes);
    return _mm512_fmadd_ps(x, x, sum);
  } else if constexpr (dtype == KvDtype::kF16) {
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(bytes));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bytes, 1));
    return _mm512_fmadd_ps(high, high, _mm512_fmadd_ps(low, low, sum));
  } else if constexpr (dtype == KvDtype::kBf16) {
    // A bf16 is the upper half of a float.
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(~0xffff)));
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(bytes, 16));
    return _mm512_fmadd_ps(odd, odd, _mm512_fmadd_ps(even, even, sum));
  } else {
    const MagnitudeTables& tables = kMagnitudes<dtype>;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(tables.low.data()), bytes,
                                                 _mm512_load_si512(tables.low.data() + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(tables.high.data()), bytes,
                                                  _mm512_load_si512(tables.high.data() + 64));
    const __m512bh first = (__m512bh)_mm512_unpacklo_epi8(low, high);
    const __m512bh second = (__m512bh)_mm512_unpackhi_epi8(low, high);
    // The instruction takes denormals for 0; neither these elements as bf16 nor their squares are denormals.
    return _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, first, first), second, second);
  }
}

KVPOOL_AVX2 inline __m256 AddSquaresOfF16(__m256 sum, __m256i halves) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return _mm256_fmadd_ps(high, high, _mm256_fmadd_ps(low, low, sum));
}

// Adds the squares of the elements in 32 bytes; those of e4m3 times 2^-16 (see kSquareScale).
template <KvDtype dtype>
KVPOOL_AVX2 inline __m256 AddSquares(__m256 sum, __m256i bytes) {
  if constexpr (dtype == KvDtype::kF32) {
    const __m256 x = _mm256_castsi256_ps(bytes);
    return _mm256_fmadd_ps(x, x, sum);
  } else if constexpr (dtype == KvDtype::kF16) {
    return AddSquaresOfF16(sum, bytes);
  } else if constexpr (dtype == KvDtype::kBf16) {
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(~0xffff)));
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 16));
    return _mm256_fmadd_ps(odd, odd, _mm256_fmadd_ps(even, even, sum));
  } else if constexpr (dtype == KvDtype::kFp8E5m2) {
    // An e5m2 is the upper byte of an f16.
    sum = AddSquaresOfF16(sum, _mm256_slli_epi16(bytes, 8));
    return AddSquaresOfF16(sum, _mm256_and_si256(bytes, _mm256_set1_epi16(~0xff)));
  } else {
    // An e4m3 is one bit lower than that: an f16 whose exponent is 8 too low. All ones is NaN.
    const __m256i magnitudes = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    const __m256i none = _mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(0x7f));
    const __m256i even =
        _mm256_or_si256(_mm256_srli_epi16(_mm256_slli_epi16(magnitudes, 8), 1), _mm256_slli_epi16(none, 8));
    const __m256i odd =
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(magnitudes, 1), _mm256_set1_epi16(~0x7f)),
                        _mm256_and_si256(none, _mm256_set1_epi16(~0xff)));
    return AddSquaresOfF16(AddSquaresOfF16(sum, even), odd);
  }
}

// Stores the square roots of the first `count` of four sums.
KVPOOL_AVX2 inline void StoreRoots(const __m256 (&sums)[kNormRows], float scale, uint32_t count, float* to,
                                   uint32_t step) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
  const __m128 squares = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
  alignas(16) float roots[kNormRows];
  _mm_store_ps(roots, _mm_sqrt_ps(_mm_mul_ps(squares, _mm_set1_ps(scale))));
  for (uint32_t i = 0; i < count; ++i) to[i * step] = roots[i];
}

// Rows first, first + 1, … of `rows` (past the end the last one again), and the addresses to prefetch ahead
// of them. Rows without gaps are prefetched line by line in memory order, which is faster than lines of four
// rows in turn.
struct FourRows {
  FourRows(const RowsOfType& rows, uint32_t first, uint32_t row_bytes) {
    const bool packed = rows.stride_bytes == row_bytes;
    ahead_step = packed ? kNormRows : 1;
    for (uint32_t r = 0; r < kNormRows; ++r) {
      const uint32_t i = first + r < rows.rows ? first + r : rows.rows - 1;
      row[r] = rows.first + i * rows.stride_bytes;
      ahead[r] = (packed ? row[0] + r * kLineBytes : row[r]) + kPrefetchBytes;
    }
  }
  void Prefetch(uint32_t r, uint32_t at) const {
    _mm_prefetch(reinterpret_cast<const char*>(ahead[r] + at * ahead_step), _MM_HINT_T0);
  }
  const unsigned char* row[kNormRows];
  const unsigned char* ahead[kNormRows];
  uint32_t ahead_step;
};

template <KvDtype dtype>
KVPOOL_AVX2 void Avx2Norms(const RowsOfType& rows) {
  constexpr float kSquareScale = dtype == KvDtype::kFp8E4m3 ? 65536.0f : 1.0f;
  const uint32_t bytes = rows.dim * BytesOf(dtype), whole = bytes / 32 * 32;
  for (uint32_t i = 0; i < rows.rows; i += kNormRows) {
    const FourRows four(rows, i, bytes);
    __m256 sums[kNormRows] = {};
    for (uint32_t at = 0; at < whole; at += 32) {
      for (uint32_t r = 0; r < kNormRows; ++r) {
        if (at % kLineBytes == 0) four.Prefetch(r, at);
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(four.row[r] + at));
        sums[r] = AddSquares<dtype>(sums[r], part);
      }
    }
    for (uint32_t r = 0; r < kNormRows && whole < bytes; ++r) {
      alignas(32) unsigned char rest[32] = {};
      std::memcpy(rest, four.row[r] + whole, bytes - whole);
      sums[r] = AddSquares<dtype>(sums[r], _mm256_load_si256(reinterpret_cast<const __m256i*>(rest)));
    }
    StoreRoots(sums, kSquareScale, rows.rows - i < kNormRows ? rows.rows - i : kNormRows,
               rows.results + uint64_t{i} * rows.result_step, rows.result_step);
  }
}

template <KvDtype dtype>
KVPOOL_AVX512 void Avx512Norms(const RowsOfType& rows) {
  const uint32_t bytes = rows.dim * BytesOf(dtype), whole = bytes / 64 * 64;
  const __mmask64 rest = (uint64_t{1} << (bytes - whole)) - 1;
  for (uint32_t i = 0; i < rows.rows; i += kNormRows) {
    const FourRows four(rows, i, bytes);
    __m512 sums[kNormRows] = {};
    for (uint32_t at = 0; at < whole; at += 64) {
      for (uint32_t r = 0; r < kNormRows; ++r) {
        four.Prefetch(r, at);
        sums[r] = AddSquares<dtype>(sums[r], _mm512_loadu_si512(four.row[r] + at));
      }
    }
    __m256 halves[kNormRows];
    for (uint32_t r = 0; r < kNormRows; ++r) {
      if (rest != 0) {
        sums[r] = AddSquares<dtype>(sums[r], _mm512_maskz_loadu_epi8(rest, four.row[r] + whole));
      }
      halves[r] = _mm256_add_ps(_mm512_castps512_ps256(sums[r]), _mm512_extractf32x8_ps(sums[r], 1));
    }
    StoreRoots(halves, 1, rows.rows - i < kNormRows ? rows.rows - i : kNormRows,
               rows.results + uint64_t{i} * rows.result_step, rows.result_step);
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_NORMS_H_
