#include "cuda/scorers/host/host_rows.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cuda/scorers/host/host_norms.h"
#include "cuda/scorers/host/host_vectors.h"
#include "cuda/scorers/host/host_window.h"
#include "cuda/scorers/parts/element.h"

namespace kvpool::scorers {
namespace {

template <RowOp op>
KVPOOL_INLINE float Finished(float sum) {
  return op == RowOp::kSquare ? std::sqrt(sum) : sum;
}

template <KvDtype dtype>
KVPOOL_INLINE float ElementAt(const unsigned char* row, uint32_t d) {
  typename Element<dtype>::Storage stored;
  std::memcpy(&stored, row + d * sizeof(stored), sizeof(stored));
  return Element<dtype>::Load(stored);
}

template <KvDtype dtype, RowOp op>
KVPOOL_INLINE float Term(const unsigned char* row, uint32_t d, const float* x) {
  const float element = ElementAt<dtype>(row, d);
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

template <RowOp op>
KVPOOL_AVX2 inline __m256 Add8(__m256 sum, __m256 element, const float* x) {
  if constexpr (op == RowOp::kProduct) {
    return _mm256_fmadd_ps(element, _mm256_loadu_ps(x), sum);
  } else {
    const __m256 difference = _mm256_sub_ps(element, _mm256_loadu_ps(x));
    return _mm256_fmadd_ps(difference, difference, sum);
  }
}

template <RowOp op>
KVPOOL_AVX512 inline __m512 Add16(__m512 sum, __m512 element, const float* x) {
  if constexpr (op == RowOp::kProduct) {
    return _mm512_fmadd_ps(element, _mm512_loadu_ps(x), sum);
  } else {
    const __m512 difference = _mm512_sub_ps(element, _mm512_loadu_ps(x));
    return _mm512_fmadd_ps(difference, difference, sum);
  }
}

// Two sums at a time, since one alone would wait for each addition.
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
    rows.results[i * rows.result_step] = sum;
  }
}

template <KvDtype dtype, RowOp op>
KVPOOL_AVX512 void Avx512Rows(const RowsOfType& rows) {
  constexpr uint32_t kBytes = BytesOf(dtype);
  const uint32_t whole = rows.dim / kPack * kPack, pairs = rows.dim / (2 * kPack) * (2 * kPack);
  for (uint32_t i = 0; i < rows.rows; ++i) {
    const unsigned char* const row = rows.first + i * rows.stride_bytes;
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (uint32_t d = 0; d < pairs; d += 2 * kPack) {
      _mm_prefetch(reinterpret_cast<const char*>(row + d * kBytes + kPrefetchBytes), _MM_HINT_T0);
      low = Add16<op>(low, Load16<dtype>(row + d * kBytes), rows.x + d);
      high = Add16<op>(high, Load16<dtype>(row + (d + kPack) * kBytes), rows.x + d + kPack);
    }
    if (pairs < whole) low = Add16<op>(low, Load16<dtype>(row + pairs * kBytes), rows.x + pairs);
    float sum = SumOf(_mm512_add_ps(low, high));
    for (uint32_t d = whole; d < rows.dim; ++d) sum += Term<dtype, op>(row, d, rows.x);
    rows.results[i * rows.result_step] = sum;
  }
}

template <KvDtype dtype>
void CompilerNorms(const RowsOfType& rows) {
  CompilerRows<dtype, RowOp::kSquare>(rows);
}

template <KvDtype dtype>
KVPOOL_INLINE void SumColumnsFrom(const ColumnSums& sums, uint32_t first) {
  for (uint32_t d = first; d < sums.dim; ++d) {
    float unit = 0, raw = 0, least = INFINITY, greatest = -INFINITY;
    for (uint32_t i = 0; i < sums.rows; ++i) {
      const float x = ElementAt<dtype>(sums.first + i * sums.stride_bytes, d);
      least = LesserOf(least, x);
      greatest = GreaterOf(greatest, x);
      if (sums.norms == nullptr || !HasDirection(sums.norms[i])) continue;
      unit += x * (1 / sums.norms[i]);
      raw += x;
    }
    if (sums.unit != nullptr) sums.unit[d] = unit;
    if (sums.raw != nullptr) sums.raw[d] = raw;
    if (sums.least != nullptr) sums.least[d] = least;
    if (sums.greatest != nullptr) sums.greatest[d] = greatest;
  }
}
template <KvDtype dtype>
void CompilerSumColumns(const ColumnSums& sums) {
  SumColumnsFrom<dtype>(sums, 0);
}

template <KvDtype dtype>
KVPOOL_AVX2 void Avx2SumColumns(const ColumnSums& sums) {
  uint32_t d = 0;
  for (; d + 8 <= sums.dim; d += 8) {
    __m256 unit = _mm256_setzero_ps(), raw = _mm256_setzero_ps(), none = _mm256_setzero_ps();
    __m256 least = _mm256_set1_ps(INFINITY), greatest = _mm256_set1_ps(-INFINITY);
    for (uint32_t i = 0; i < sums.rows; ++i) {
      const __m256 x = Load8<dtype>(sums.first + i * sums.stride_bytes + d * BytesOf(dtype));
      none = _mm256_or_ps(none, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
      least = _mm256_min_ps(least, x);
      greatest = _mm256_max_ps(greatest, x);
      if (sums.norms == nullptr || !HasDirection(sums.norms[i])) continue;
      unit = _mm256_fmadd_ps(x, _mm256_set1_ps(1 / sums.norms[i]), unit);
      raw = _mm256_add_ps(raw, x);
    }
    // All bits set is a NaN.
    if (sums.unit != nullptr) _mm256_storeu_ps(sums.unit + d, unit);
    if (sums.raw != nullptr) _mm256_storeu_ps(sums.raw + d, raw);
    if (sums.least != nullptr) _mm256_storeu_ps(sums.least + d, _mm256_or_ps(least, none));
    if (sums.greatest != nullptr) _mm256_storeu_ps(sums.greatest + d, _mm256_or_ps(greatest, none));
  }
  SumColumnsFrom<dtype>(sums, d);
}

template <KvDtype dtype>
KVPOOL_AVX512 void Avx512SumColumns(const ColumnSums& sums) {
  uint32_t d = 0;
  for (; d + 16 <= sums.dim; d += 16) {
    __m512 unit = _mm512_setzero_ps(), raw = _mm512_setzero_ps();
    __m512 least = _mm512_set1_ps(INFINITY), greatest = _mm512_set1_ps(-INFINITY);
    __mmask16 none = 0;
    for (uint32_t i = 0; i < sums.rows; ++i) {
      const __m512 x = Load16<dtype>(sums.first + i * sums.stride_bytes + d * BytesOf(dtype));
      none |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      least = _mm512_min_ps(least, x);
      greatest = _mm512_max_ps(greatest, x);
      if (sums.norms == nullptr || !HasDirection(sums.norms[i])) continue;
      unit = _mm512_fmadd_ps(x, _mm512_set1_ps(1 / sums.norms[i]), unit);
      raw = _mm512_add_ps(raw, x);
    }
    const __m512 nan = _mm512_set1_ps(NAN);
    if (sums.unit != nullptr) _mm512_storeu_ps(sums.unit + d, unit);
    if (sums.raw != nullptr) _mm512_storeu_ps(sums.raw + d, raw);
    if (sums.least != nullptr) _mm512_storeu_ps(sums.least + d, _mm512_mask_mov_ps(least, none, nan));
    if (sums.greatest != nullptr) {
      _mm512_storeu_ps(sums.greatest + d, _mm512_mask_mov_ps(greatest, none, nan));
    }
  }
  SumColumnsFrom<dtype>(sums, d);
}

template <KvDtype dtype>
KVPOOL_INLINE void WidenFrom(const unsigned char* row, uint32_t first, uint32_t dim, float* to) {
  for (uint32_t d = first; d < dim; ++d) to[d] = ElementAt<dtype>(row, d);
}
template <KvDtype dtype>
void CompilerWiden(const unsigned char* row, uint32_t dim, float* to) {
  WidenFrom<dtype>(row, 0, dim, to);
}
template <KvDtype dtype>
KVPOOL_AVX2 void Avx2Widen(const unsigned char* row, uint32_t dim, float* to) {
  uint32_t d = 0;
  for (; d + 8 <= dim; d += 8) _mm256_storeu_ps(to + d, Load8<dtype>(row + d * BytesOf(dtype)));
  WidenFrom<dtype>(row, d, dim, to);
}
template <KvDtype dtype>
KVPOOL_AVX512 void Avx512Widen(const unsigned char* row, uint32_t dim, float* to) {
  uint32_t d = 0;
  for (; d + 16 <= dim; d += 16) _mm512_storeu_ps(to + d, Load16<dtype>(row + d * BytesOf(dtype)));
  WidenFrom<dtype>(row, d, dim, to);
}

#define KVPOOL_OPS(Isa, dtype) \
  { Isa##Norms<dtype>, Isa##Rows<dtype, RowOp::kProduct>, Isa##Rows<dtype, RowOp::kDistance> }
#define KVPOOL_TYPES(Template)                                                                               \
  {                                                                                                          \
    Template<KvDtype::kF32>, Template<KvDtype::kF16>, Template<KvDtype::kBf16>, Template<KvDtype::kFp8E4m3>, \
        Template<KvDtype::kFp8E5m2>                                                                          \
  }
#define KVPOOL_HOST_ROWS(Isa, name)                                                                       \
  {                                                                                                       \
    name,                                                                                                 \
        {KVPOOL_OPS(Isa, KvDtype::kF32), KVPOOL_OPS(Isa, KvDtype::kF16), KVPOOL_OPS(Isa, KvDtype::kBf16), \
         KVPOOL_OPS(Isa, KvDtype::kFp8E4m3), KVPOOL_OPS(Isa, KvDtype::kFp8E5m2)},                         \
        KVPOOL_TYPES(Isa##SumColumns), KVPOOL_TYPES(Isa##Widen), AttendWindow##Isa                        \
  }
constexpr HostRows kCompiler = KVPOOL_HOST_ROWS(Compiler, "compiler");
constexpr HostRows kAvx2 = KVPOOL_HOST_ROWS(Avx2, "avx2");
constexpr HostRows kAvx512 = KVPOOL_HOST_ROWS(Avx512, "avx512");

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
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")) {
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
