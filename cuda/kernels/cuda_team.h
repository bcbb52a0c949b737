// A thread block as a team: its warps are the row teams. Included by .cu files alone.
#ifndef KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_
#define KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_

#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// REQUIRES: blockDim.x is a multiple of 32, at most 1024.
class CudaTeam {
 public:
  static constexpr uint32_t kColumns = 1;  // neighbouring lanes read neighbouring columns
  static constexpr uint32_t kWarp = 32;

  __device__ uint32_t id() const { return threadIdx.x; }
  __device__ uint32_t count() const { return blockDim.x; }
  __device__ uint32_t row() const { return threadIdx.x / kWarp; }
  __device__ uint32_t rows() const { return blockDim.x / kWarp; }
  __device__ uint32_t in_row() const { return threadIdx.x % kWarp; }
  __device__ uint32_t row_width() const { return kWarp; }
  __device__ void Sync() const { __syncthreads(); }
  __device__ double Sum(double x) const {
    return Reduce(x, [](double a, double b) { return a + b; });
  }
  __device__ float Max(float x) const {
    return Reduce(x, [](float a, float b) { return a < b ? b : a; });
  }
  __device__ float Min(float x) const {
    return Reduce(x, [](float a, float b) { return b < a ? b : a; });
  }
  __device__ uint32_t Count(uint32_t x) const {
    return Reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
  }
  template <typename T>
  __device__ T RowSum(T x) const {
    for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    return x;
  }
  __device__ float RowMax(float x) const {
    for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
  }

  template <typename T>
  __device__ T SumOfRows(T x) const {
    return OfRows(x, [](T a, T b) { return a + b; });
  }
  __device__ float GreatestOfRows(float x) const {
    return OfRows(x, [](float a, float b) { return GreaterOf(a, b); });
  }
  __device__ uint32_t RankOf(bool flag, uint32_t* all) const {
    __shared__ uint32_t of_warp[kWarp];
    const uint32_t flags = __ballot_sync(kAllLanes, flag);
    __syncthreads();
    if (in_row() == 0) of_warp[row()] = __popc(flags);
    __syncthreads();
    uint32_t before = 0, sum = 0;
    for (uint32_t warp = 0; warp < rows(); ++warp) {
      if (warp == row()) before = sum;
      sum += of_warp[warp];
    }
    *all = sum;
    return before + __popc(flags & ((1u << in_row()) - 1));
  }
  // Rows of whole sixteen bytes, as SumOverChunkedRows reads them.
  __device__ uint32_t HeadsToStage(const KvPlane& plane, const unsigned char* first, uint32_t element_bytes,
                                   uint32_t tokens) const {
    const uint64_t row_bytes = uint64_t{plane.head_dim} * element_bytes;
    const uint64_t aligned =
        reinterpret_cast<uint64_t>(first) | plane.token_stride_bytes | plane.head_stride_bytes | row_bytes;
    if (plane.dim_stride_bytes != element_bytes || aligned % sizeof(uint4) != 0) return 0;
    return static_cast<uint32_t>(kStageBytes / (tokens * row_bytes));
  }
  __device__ unsigned char* stage() const {
    __shared__ uint4 memory[kStageBytes / sizeof(uint4)];
    return reinterpret_cast<unsigned char*>(memory);
  }
  // A float for each row that may be in `stage`.
  __device__ float* staged_norms() const {
    __shared__ float memory[kStageBytes / sizeof(uint4)];
    return memory;
  }
  __device__ void AddTo(uint32_t* counter, uint32_t x) const { atomicAdd(counter, x); }

  // A lane loads sixteen bytes at once where the row is aligned to that.
  template <KvDtype dtype, RowOp op>
  __device__ __forceinline__ float SumOfRow(const unsigned char* row, uint32_t dim, const float* x) const {
    using Storage = typename Element<dtype>::Storage;
    constexpr uint32_t kElements = sizeof(uint4) / sizeof(Storage);
    float sum = 0;
    uint32_t whole = 0;
    if (reinterpret_cast<uint64_t>(row) % sizeof(uint4) == 0) {
      whole = dim / kElements * kElements;
      for (uint32_t d = in_row() * kElements; d < whole; d += kWarp * kElements) {
        sum += SumOfChunk<dtype, op>(LoadOnce(row + d * sizeof(Storage)), x == nullptr ? nullptr : x + d);
      }
    }
    for (uint32_t d = whole + in_row(); d < dim; d += kWarp) {
      sum += Term<op>(Element<dtype>::Load(reinterpret_cast<const Storage*>(row)[d]),
                      op == RowOp::kSquare ? 0 : x[d]);
    }
    sum = RowSum(sum);
    return op == RowOp::kSquare ? sqrtf(sum) : sum;
  }

  // x: `count` rows of `dim` floats, at most a warp's lanes. Each lane takes four elements of the row, multiplies them
  // with those of every x, and in the end the lanes exchange their parts, so that each has the sum for one x: five
  // rounds of 16, 8, 4, 2 and 1 exchanges, where 32 sums one after the other would take 160.
  template <KvDtype dtype>
  __device__ __forceinline__ float ProductWithOwn(const unsigned char* row, uint64_t stride_bytes,
                                                  uint32_t dim, const float* x, uint32_t count) const {
    using Storage = typename Element<dtype>::Storage;
    constexpr uint32_t kTake = 4;
    const bool whole = stride_bytes == sizeof(Storage) && dim % kTake == 0 &&
                       reinterpret_cast<uint64_t>(row) % (kTake * sizeof(Storage)) == 0;
    float parts[kWarp] = {};
    for (uint32_t first = in_row() * kTake; first < dim; first += kWarp * kTake) {
      float elements[kTake];
      if (whole) {
        struct alignas(kTake * sizeof(Storage)) Four {
          Storage of[kTake];
        };
        const Four four = *reinterpret_cast<const Four*>(row + first * sizeof(Storage));
#pragma unroll
        for (uint32_t j = 0; j < kTake; ++j) elements[j] = Element<dtype>::Load(four.of[j]);
      } else {
#pragma unroll
        for (uint32_t j = 0; j < kTake; ++j) {
          const uint32_t d = first + j < dim ? first + j : dim - 1;
          elements[j] = first + j < dim
                            ? Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + d * stride_bytes))
                            : 0;
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kWarp; ++i) {
        if (i >= count) continue;  // It is the same for all lanes.
        const float* const other = x + i * dim + first;
        if (whole) {
          const float4 four = *reinterpret_cast<const float4*>(other);
          parts[i] +=
              elements[0] * four.x + elements[1] * four.y + elements[2] * four.z + elements[3] * four.w;
        } else {
#pragma unroll
          for (uint32_t j = 0; j < kTake; ++j) parts[i] += first + j < dim ? elements[j] * other[j] : 0;
        }
      }
    }
    ExchangeParts<kWarp / 2>(parts);
    return parts[0];
  }

  // Rows of whole sixteen bytes are spread over as few lanes as can load one at once (16 lanes for 128
  // two-byte elements), and each lane issues the loads of four rows before it uses the first. Warps wait for
  // memory here: an H200 needs 4.8 TB/s x 0.7 us / 132 SMs = 25 KiB in flight for each SM, a B200 37, and 768 lanes
  // with 64 bytes each are 48.
  template <KvDtype dtype>
  __device__ __forceinline__ void NormsOfRows(const RowGrid& rows_of) const {
    using Storage = typename Element<dtype>::Storage;
    const uint32_t row_bytes = rows_of.dim * sizeof(Storage);
    const uint64_t aligned = reinterpret_cast<uint64_t>(rows_of.first) | rows_of.outer_stride_bytes |
                             rows_of.inner_stride_bytes | row_bytes;
    const uint32_t all = rows_of.outer_count * rows_of.inner_count;
    if (aligned % sizeof(uint4) != 0) {
      for (uint32_t i = row(); i < all; i += rows()) {
        const uint32_t outer = i / rows_of.inner_count, inner = i % rows_of.inner_count;
        const float norm = SumOfRow<dtype, RowOp::kSquare>(
            rows_of.first + outer * rows_of.outer_stride_bytes + inner * rows_of.inner_stride_bytes,
            rows_of.dim, nullptr);
        if (in_row() == 0) rows_of.norms[outer * rows_of.outer_step + inner * rows_of.inner_step] = norm;
      }
      return;
    }
    SumOverChunkedRows<dtype, RowOp::kSquare>(
        row_bytes / sizeof(uint4), rows_of.inner_count, all, nullptr,
        [&](uint32_t outer, uint32_t inner) {
          return rows_of.first + outer * rows_of.outer_stride_bytes + inner * rows_of.inner_stride_bytes;
        },
        [&](uint32_t outer, uint32_t inner, float norm) {
          rows_of.norms[outer * rows_of.outer_step + inner * rows_of.inner_step] = norm;
        },
        [&](uint32_t outer, uint32_t inner, uint32_t chunk, const uint4& loaded) {
          if (rows_of.stage == nullptr) return;
          const uint32_t at = (outer * rows_of.inner_count + inner) * (row_bytes / sizeof(uint4)) + chunk;
          reinterpret_cast<uint4*>(rows_of.stage)[at] = loaded;
        });
  }

  // As NormsOfRows reads them, where they begin at whole sixteen bytes. `x` is read once. All lanes of the team call it.
  template <KvDtype dtype, typename RowAt>
  __device__ __forceinline__ void ProductsOfRows(const RowAt& row_at, bool aligned, uint32_t inner_count,
                                                 uint32_t all, uint32_t dim, const float* x,
                                                 float* products) const {
    using Storage = typename Element<dtype>::Storage;
    const uint32_t row_bytes = dim * sizeof(Storage);
    if (!aligned || row_bytes % sizeof(uint4) != 0 || dim > kStagedFloats) {
      for (uint32_t i = row(); i < all; i += rows()) {
        const float product =
            SumOfRow<dtype, RowOp::kProduct>(row_at(i / inner_count, i % inner_count), dim, x);
        if (in_row() == 0) products[i] = product;
      }
      return;
    }
    float4* const staged = StagedVector();
    __syncthreads();
    for (uint32_t d = id(); d < dim; d += count()) reinterpret_cast<float*>(staged)[d] = x[d];
    __syncthreads();
    SumOverChunkedRows<dtype, RowOp::kProduct>(
        row_bytes / sizeof(uint4), inner_count, all, staged, row_at,
        [&](uint32_t outer, uint32_t inner, float product) {
          products[outer * inner_count + inner] = product;
        },
        [](uint32_t, uint32_t, uint32_t, const uint4&) {});
  }

 private:
  static constexpr uint32_t kAllLanes = 0xffffffffu;
  // Four heads of 16 tokens of 128 two-byte elements, which are four loads of each of 256 lanes, and little enough that
  // an SM of any GPU holds three teams.
  static constexpr uint32_t kStageBytes = 16 << 10;
  static constexpr uint32_t kStagedFloats =
      1024;  // The vector that rows are multiplied with has at most so many.

  __device__ static float4* StagedVector() {
    __shared__ float4 memory[kStagedFloats / 4];
    return memory;
  }
  // Lanes that differ in `half` of their number exchange the parts that are the other's: each keeps `half` sums.
  template <uint32_t half>
  __device__ __forceinline__ void ExchangeParts(float (&parts)[kWarp]) const {
    const bool upper = (in_row() & half) != 0;
#pragma unroll
    for (uint32_t i = 0; i < half; ++i) {
      const float given = __shfl_xor_sync(kAllLanes, upper ? parts[i] : parts[i + half], half);
      parts[i] = (upper ? parts[i + half] : parts[i]) + given;
    }
    if constexpr (half > 1) ExchangeParts<half / 2>(parts);
  }

  template <RowOp op>
  __device__ static float Term(float element, float other) {
    return op == RowOp::kSquare    ? element * element
           : op == RowOp::kProduct ? element * other
                                   : (element - other) * (element - other);
  }

  // K and V are read once in a pass, and should not evict data that is read again from the L1 cache.
  __device__ static uint4 LoadOnce(const unsigned char* at) {
    return __ldcs(reinterpret_cast<const uint4*>(at));
  }

  // The elements of a word, those of e4m3 divided by kE4m3Scale and NaN as any number: a conversion for each, two
  // at a time before it.
  template <KvDtype dtype, uint32_t kInWord>
  __device__ __forceinline__ static void UnpackWord(uint32_t word, float (&to)[kInWord]) {
    if constexpr (dtype == KvDtype::kF32) {
      to[0] = __uint_as_float(word);
    } else if constexpr (kInWord == 2) {
      to[0] = Element<dtype>::Load(static_cast<uint16_t>(word));
      to[1] = Element<dtype>::Load(static_cast<uint16_t>(word >> 16));
    } else {
#pragma unroll
      for (uint32_t pair = 0; pair < 2; ++pair) {
        uint32_t halves = __byte_perm(word, 0, pair == 0 ? 0x1404 : 0x3424);  // the bytes are the upper ones
        if constexpr (dtype == KvDtype::kFp8E4m3) halves = F16OfE4m3(halves);
        to[2 * pair] = FloatOfF16(static_cast<uint16_t>(halves));
        to[2 * pair + 1] = FloatOfF16(static_cast<uint16_t>(halves >> 16));
      }
    }
  }

  template <KvDtype dtype, RowOp op>
  __device__ __forceinline__ static float SumOfChunk(const uint4& chunk, const float* x) {
    constexpr uint32_t kInWord = sizeof(uint32_t) / sizeof(typename Element<dtype>::Storage);
    constexpr bool kIsE4m3 = dtype == KvDtype::kFp8E4m3;
    constexpr float kScale = kIsE4m3 ? kE4m3Scale : 1;
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    float sum = 0;
    uint32_t none = 0;
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      float elements[kInWord];
      UnpackWord<dtype>(words[w], elements);
      // The sign bit of each byte that is NaN, all ones below its own sign.
      if constexpr (kIsE4m3) none |= (words[w] & 0x7f7f7f7fu) + 0x01010101u;
#pragma unroll
      for (uint32_t j = 0; j < kInWord; ++j) {
        sum += Term<op>(op == RowOp::kDistance ? elements[j] * kScale : elements[j],
                        op == RowOp::kSquare ? 0 : x[w * kInWord + j]);
      }
    }
    if constexpr (op == RowOp::kSquare) sum *= kScale * kScale;
    if constexpr (op == RowOp::kProduct) sum *= kScale;
    return (none & 0x80808080u) == 0 ? sum : __uint_as_float(0x7fc00000u);
  }

  // Calls store(outer, inner, op of the row at row_at(outer, inner)) for the first `all` rows of a grid, each of
  // `chunks` aligned chunks, and keep(outer, inner, chunk, loaded) for each of these. `x` lies in shared memory.
  template <KvDtype dtype, RowOp op, typename RowAt, typename Store, typename Keep>
  __device__ __forceinline__ void SumOverChunkedRows(uint32_t chunks, uint32_t inner_count, uint32_t all,
                                                     const float4* x, const RowAt& row_at, const Store& store,
                                                     const Keep& keep) const {
    constexpr uint32_t kAtOnce = 4;
    constexpr uint32_t kInChunk = sizeof(uint4) / sizeof(typename Element<dtype>::Storage);
    // The lanes of a row are a power of two, so that a warp consists of whole groups.
    uint32_t width = 1;
    while (width < chunks && width < kWarp) width *= 2;
    const uint32_t group = threadIdx.x / width, groups = blockDim.x / width, lane = threadIdx.x % width;
    const uint32_t outer_per_step = groups / inner_count, inner_per_step = groups % inner_count;
    uint32_t outer = group / inner_count, inner = group % inner_count;
    // All lanes go around equally often, since whole warps make the sums below.
    for (uint32_t base = group; base - group < all; base += groups * kAtOnce) {
      const unsigned char* at[kAtOnce];
      uint32_t outers[kAtOnce], inners[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        // Past the last row the first is loaded again: an unconditional load does not wait for a comparison.
        const bool there = base + i * groups < all;
        at[i] = row_at(there ? outer : 0, there ? inner : 0);
        outers[i] = outer;
        inners[i] = inner;
        outer += outer_per_step;
        inner += inner_per_step;
        if (inner >= inner_count) inner -= inner_count, ++outer;
      }
      float sums[kAtOnce] = {};
      for (uint32_t chunk = lane; chunk < chunks; chunk += width) {
        uint4 loaded[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          loaded[i] = LoadOnce(at[i] + chunk * sizeof(uint4));
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          if (base + i * groups < all) keep(outers[i], inners[i], chunk, loaded[i]);
        }
        float of_chunk[kInChunk];
        if constexpr (op != RowOp::kSquare) {
#pragma unroll
          for (uint32_t j = 0; j < kInChunk; j += 4) {
            const float4 four = x[(chunk * kInChunk + j) / 4];
            of_chunk[j] = four.x, of_chunk[j + 1] = four.y, of_chunk[j + 2] = four.z,
            of_chunk[j + 3] = four.w;
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) sums[i] += SumOfChunk<dtype, op>(loaded[i], of_chunk);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        for (uint32_t distance = width / 2; distance > 0; distance /= 2) {
          sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
        }
        if (lane != 0 || base + i * groups >= all) continue;
        store(outers[i], inners[i], op == RowOp::kSquare ? sqrtf(sums[i]) : sums[i]);
      }
    }
  }

  template <typename T, typename Op>
  __device__ T OfRows(T x, Op op) const {
    __shared__ T of_lane[kWarp][kWarp];
    __syncthreads();
    of_lane[row()][in_row()] = x;
    __syncthreads();
    x = of_lane[0][in_row()];
    for (uint32_t warp = 1; warp < rows(); ++warp) x = op(x, of_lane[warp][in_row()]);
    return x;
  }

  template <typename T, typename Op>
  __device__ T Reduce(T x, Op op) const {
    __shared__ T of_warp[kWarp];
    for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
      x = op(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    // All lanes have read the values of an earlier call before they are overwritten.
    __syncthreads();
    if (in_row() == 0) of_warp[row()] = x;
    __syncthreads();
    x = of_warp[0];
    for (uint32_t warp = 1; warp < rows(); ++warp) x = op(x, of_warp[warp]);
    return x;
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_
