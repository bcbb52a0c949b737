#include "cuda/scorers/host_rows.h"

#include <immintrin.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cuda/scorers/element.h"

namespace kvpool::scorers {
namespace {

#define KVPOOL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define KVPOOL_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

// The processor's own prefetching stops at each row's sum; what is asked for ahead of it does not. Harmless past the
// end: a prefetch of an unmapped address does nothing.
constexpr uint32_t kPrefetchBytes = 2048;

template <RowOp op>
KVPOOL_INLINE float Finished(float sum) {
  return op == RowOp::kSquare ? std::sqrt(sum) : sum;
}

template <KvDtype dtype, RowOp op>
KVPOOL_INLINE float Term(const unsigned char* row, uint32_t d, const float* x) {
  typename Element<dtype>::Storage stored;
  std::memcpy(&stored, row + d * sizeof(stored), sizeof(stored));
  const float element = Element<dtype>::Load(stored);
  if constexpr (op == RowOp::kSquare) return element * element;
  if constexpr (op == RowOp::kProduct) return element * x[d];
  return (element - x[d]) * (element - x[d]);
}

template <KvDtype dtype, RowOp op>
void CompilerRows(const RowsOfType& rows) {
  for (uint32_t i = 0; i < rows.rows; ++i) {
    const unsigned char* const row = rows.first + i * rows.stride_bytes;
    float partial[kPack] = {};
    const uint32_t whole = rows.dim / kPack * kPack;
    for (uint32_t d = 0; d < whole; d += kPack) {
      for (uint32_t j = 0; j < kPack; ++j) partial[j] += Term<dtype, op>(row, d + j, rows.x);
    }
    float sum = 0;
    for (uint32_t d = whole; d < rows.dim; ++d) sum += Term<dtype, op>(row, d, rows.x);
    for (const float part : partial) sum += part;
    rows.results[i * rows.result_step] = Finished<op>(sum);
  }
}

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
      // Sign, then the rest one down: f16 with the exponent 8 too low. All ones of it is not a number.
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

template <RowOp op>
KVPOOL_AVX2 inline __m256 Add8(__m256 sum, __m256 element, const float* x) {
  if constexpr (op == RowOp::kSquare) {
    return _mm256_fmadd_ps(element, element, sum);
  } else if constexpr (op == RowOp::kProduct) {
    return _mm256_fmadd_ps(element, _mm256_loadu_ps(x), sum);
  } else {
    const __m256 difference = _mm256_sub_ps(element, _mm256_loadu_ps(x));
    return _mm256_fmadd_ps(difference, difference, sum);
  }
}

template <RowOp op>
KVPOOL_AVX512 inline __m512 Add16(__m512 sum, __m512 element, const float* x) {
  if constexpr (op == RowOp::kSquare) {
    return _mm512_fmadd_ps(element, element, sum);
  } else if constexpr (op == RowOp::kProduct) {
    return _mm512_fmadd_ps(element, _mm512_loadu_ps(x), sum);
  } else {
    const __m512 difference = _mm512_sub_ps(element, _mm512_loadu_ps(x));
    return _mm512_fmadd_ps(difference, difference, sum);
  }
}

KVPOOL_AVX2 inline float SumOf(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Squares of e4m3, 32 at once: as f16 without the sign, all 2^-8 too small; that and NaN are seen to at the end.
KVPOOL_AVX512 inline float SquaresOfE4m3(const unsigned char* row, uint32_t count) {
  const __m512i magnitude_bits = _mm512_set1_epi16(0x3f80);
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  __mmask32 none = 0;
  for (uint32_t d = 0; d < count; d += 2 * kPack) {
    _mm_prefetch(reinterpret_cast<const char*>(row + d + kPrefetchBytes), _MM_HINT_T0);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d));
    const __m512i halves =
        _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 7), magnitude_bits);
    none |= _mm512_cmpeq_epi16_mask(halves, magnitude_bits);
    const __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    low = _mm512_fmadd_ps(first, first, low);
    high = _mm512_fmadd_ps(second, second, high);
  }
  const __m512 both = _mm512_add_ps(low, high);
  const float sum = SumOf(_mm256_add_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1)));
  return none != 0 ? NAN : sum * 65536;
}

// Two sums at a time: one alone would wait for each addition.
template <KvDtype dtype, RowOp op>
KVPOOL_AVX2 void Avx2Rows(const RowsOfType& rows) {
  constexpr uint32_t kBytes = BytesOf(dtype);
  const uint32_t whole = rows.dim / kPack * kPack;
  for (uint32_t i = 0; i < rows.rows; ++i) {
    const unsigned char* const row = rows.first + i * rows.stride_bytes;
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (uint32_t d = 0; d < whole; d += kPack) {
      _mm_prefetch(reinterpret_cast<const char*>(row + d * kBytes + kPrefetchBytes), _MM_HINT_T0);
      low = Add8<op>(low, Load8<dtype>(row + d * kBytes), rows.x + d);
      high = Add8<op>(high, Load8<dtype>(row + (d + 8) * kBytes), rows.x + d + 8);
    }
    float sum = SumOf(_mm256_add_ps(low, high));
    for (uint32_t d = whole; d < rows.dim; ++d) sum += Term<dtype, op>(row, d, rows.x);
    rows.results[i * rows.result_step] = Finished<op>(sum);
  }
}

template <KvDtype dtype, RowOp op>
KVPOOL_AVX512 void Avx512Rows(const RowsOfType& rows) {
  constexpr uint32_t kBytes = BytesOf(dtype);
  const uint32_t whole = rows.dim / kPack * kPack, pairs = rows.dim / (2 * kPack) * (2 * kPack);
  for (uint32_t i = 0; i < rows.rows; ++i) {
    const unsigned char* const row = rows.first + i * rows.stride_bytes;
    if constexpr (op == RowOp::kSquare && dtype == KvDtype::kFp8E4m3) {
      float sum = SquaresOfE4m3(row, pairs);
      for (uint32_t d = pairs; d < rows.dim; ++d) sum += Term<dtype, op>(row, d, rows.x);
      rows.results[i * rows.result_step] = Finished<op>(sum);
      continue;
    }
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (uint32_t d = 0; d < pairs; d += 2 * kPack) {
      _mm_prefetch(reinterpret_cast<const char*>(row + d * kBytes + kPrefetchBytes), _MM_HINT_T0);
      low = Add16<op>(low, Load16<dtype>(row + d * kBytes), rows.x + d);
      high = Add16<op>(high, Load16<dtype>(row + (d + kPack) * kBytes), rows.x + d + kPack);
    }
    if (pairs < whole) low = Add16<op>(low, Load16<dtype>(row + pairs * kBytes), rows.x + pairs);
    const __m512 both = _mm512_add_ps(low, high);
    float sum = SumOf(_mm256_add_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1)));
    for (uint32_t d = whole; d < rows.dim; ++d) sum += Term<dtype, op>(row, d, rows.x);
    rows.results[i * rows.result_step] = Finished<op>(sum);
  }
}

#define KVPOOL_OPS(Rows, dtype) \
  { Rows<dtype, RowOp::kSquare>, Rows<dtype, RowOp::kProduct>, Rows<dtype, RowOp::kDistance> }
#define KVPOOL_TABLE(Rows)                                                                              \
  {                                                                                                     \
    KVPOOL_OPS(Rows, KvDtype::kF32), KVPOOL_OPS(Rows, KvDtype::kF16), KVPOOL_OPS(Rows, KvDtype::kBf16), \
        KVPOOL_OPS(Rows, KvDtype::kFp8E4m3), KVPOOL_OPS(Rows, KvDtype::kFp8E5m2)                        \
  }
constexpr HostRows kCompiler = {"compiler", KVPOOL_TABLE(CompilerRows)};
constexpr HostRows kAvx2 = {"avx2", KVPOOL_TABLE(Avx2Rows)};
constexpr HostRows kAvx512 = {"avx512", KVPOOL_TABLE(Avx512Rows)};

struct Runnable {
  std::array<const HostRows*, 3> rows{};
  size_t count = 0;
};

Runnable FindRunnable() {
  Runnable found;
  const auto add = [&found](const HostRows& rows) { found.rows[found.count++] = &rows; };
  add(kCompiler);
  __builtin_cpu_init();
  // Every processor with AVX2 has F16C.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) add(kAvx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    add(kAvx512);
  }
  return found;
}

const Runnable& TheRunnable() {
  static const Runnable runnable = FindRunnable();
  return runnable;
}

}  // namespace

const HostRows& BestHostRows() { return *TheRunnable().rows[TheRunnable().count - 1]; }

absl::Span<const HostRows* const> RunnableHostRows() {
  return absl::MakeConstSpan(TheRunnable().rows.data(), TheRunnable().count);
}

}  // namespace kvpool::scorers
