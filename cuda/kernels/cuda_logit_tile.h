// Tiles of a window's logits (cuda/scorers/parts/window.h) of a thread block of 16 warps: 16 tokens by 16 strips of 16 queries.
// Keys go through shared memory as numbers of four or two bytes, 256 bytes of each token at once: the next ones are loaded
// while these are multiplied.
//
// The tensor cores multiply. A query is the sum of two numbers of the keys' type, hi + lo, whose products with the keys are
// exact and summed in f32: of bf16 the sum has 17 bits of the query, of f16, of which a row is scaled by a power of two to the
// range of the type, 22. An fp8 is an f16, too. An f32, a key or a query, is such a sum of two tf32, which have 11 bits; lo * lo,
// 2^-20 of the product or less, is left out. On a GPU older than the instructions (sm_75), and for heads that 16 warps can't
// hold, all is multiplied in f32.
//
// A warp holds 128 elements of its strip's queries in registers. Where a head has more, neighbouring warps have a strip, and
// add what they have of its logits (parts()).
//
// The fragments of mma.m16n8k16 let a lane hold elements 2q, 2q + 1, 2q + 8 and 2q + 9 of a row, where q is its number among
// the four lanes of the row. Which of a row's elements are called so is the same to the sum, as long as queries and keys agree:
// in 32 elements, which two products take, lane q has elements 4q to 4q + 3 for the first product and 16 + 4q to 19 + 4q for
// the second. So the lanes of a row load its queries side by side, and find their keys of both products in one piece. Those of
// mma.m16n8k8, of tf32, have the elements q and q + 4: of 16 elements lane q has 4q to 4q + 3 for two products.
#ifndef KVPOOL_CUDA_KERNELS_CUDA_LOGIT_TILE_H_
#define KVPOOL_CUDA_KERNELS_CUDA_LOGIT_TILE_H_

#include <cstdint>

#include "cuda/kernels/cuda_team.h"
#include "cuda/kernels/launch.h"
#include "cuda/scorers/parts/base2.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/window.h"

namespace kvpool::scorers {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kHasMatrixProducts = false;
#else
inline constexpr bool kHasMatrixProducts = true;
#endif

// d += a * b, by a warp.
template <bool is_bf16>
__device__ __forceinline__ void MultiplyMatrices(float& d0, float& d1, float& d2, float& d3,
                                                 const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same of tf32. d has one of each of the products above.
__device__ __forceinline__ void MultiplyTf32(float& d0, float& d1, float& d2, float& d3,
                                             const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What the product does not look at of x: a tf32 has the upper 19 bits of an f32, and the others count as 0.
__device__ __forceinline__ uint32_t LowerPart(uint32_t x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000u));
}

// The nearest numbers of two bytes, the first in the lower half.
template <bool is_bf16>
__device__ __forceinline__ uint32_t PairOf(float first, float second) {
  uint32_t pair;
  if constexpr (is_bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// What all warps share; one for all kernels.
struct LogitTileMemory {
  static constexpr uint32_t kStrips = 16, kTokens = 16, kPieces = 16;
  uint4 keys[2][kTokens][kPieces];
  ColumnStats columns[2][kStrips][kTokens];
  float latest[2][kStrips][kTokens];
  // What a merge of two moments multiplies their distance with, for the mean, and its square, for the squares: for each strip,
  // merge and row of a lane.
  float2 merges[kStrips][4][8];
  // Of each warp: which of the strips it works at, and that one's rows, kNoRow where there is none.
  uint32_t slots[kStrips], rows[kStrips][2][8];
  float kept[kStrips][2][8];
  // Of warps that have a part of a strip's elements: each lane's logits.
  float4 parts[kStrips][2][32];
};
__device__ inline LogitTileMemory& TheLogitTileMemory() {
  __shared__ LogitTileMemory memory;
  return memory;
}

// REQUIRES: blockDim.x == kPolicyThreads; with by_matrices k_head_dim <= kMostDim.
template <KvDtype dtype, bool by_matrices>
class CudaLogitTile {
 public:
  static constexpr uint32_t kStripRows = 16, kTokens = LogitTileMemory::kTokens, kRows = 2, kColumns = 4;
  static constexpr uint32_t kHeld = 128;  // elements of a row that a warp has in 64 of a lane's 128 registers
  static constexpr uint32_t kMostDim = kHeld * LogitTileMemory::kStrips;

  __device__ __forceinline__ CudaLogitTile(const CudaTeam& team, const ScoreContext& c, uint32_t plane)
      : team_(team),
        c_(c),
        memory_(TheLogitTileMemory()),
        layer_(plane / c.shape().kv_heads),
        head_(plane % c.shape().kv_heads) {}

  __device__ uint32_t at_once() const { return LogitTileMemory::kStrips / parts(); }
  __device__ uint32_t strip() const {
    return team_.row() / parts() < at_once() ? team_.row() / parts() : kNoRow / 2;
  }
  __device__ bool has_logits() const { return held_part_ == 0; }
  __device__ uint32_t row(uint32_t i) const { return group() + kStripRows / 2 * i; }
  __device__ uint32_t column(uint32_t j) const {
    return by_matrices ? j / 2 * 8 + own() * 2 + j % 2 : j * 4 + own();
  }
  __device__ float logit(uint32_t i, uint32_t j) const { return logits_[i][j] * factors_[i]; }
  __device__ float RowSum(float x) const {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }
  __device__ float RowGreatest(float x) const {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  }
  __device__ bool is_first_of_row() const { return own() == 0 && has_logits(); }

  __device__ uint32_t held(uint32_t i) const { return memory_.rows[team_.row()][i][group()]; }
  __device__ void Keep(uint32_t i, float x) {
    if (own() == 0) memory_.kept[team_.row()][i][group()] = x;
  }
  __device__ float kept(uint32_t i) const { return memory_.kept[team_.row()][i][group()]; }
  __device__ __forceinline__ void Hold(const uint32_t (&rows)[kRows]) {
    if (threadIdx.x % kWarpLanes == 0) memory_.slots[team_.row()] = strip();
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      if (own() == 0) memory_.rows[team_.row()][i][group()] = rows[i];
      factors_[i] = kFactor;
      if constexpr (by_matrices && kInF16) ScaleToF16(i, rows[i]);
    }
    const uint32_t part = team_.row() % parts();
    held_part_ = __ballot_sync(kAllLanes, rows[0] != kNoRow) == 0 ? kNone : part;
    // The rows that the two sides of each merge of PutColumns have.
    float mine = rows[0] != kNoRow, theirs = rows[1] != kNoRow;
#pragma unroll
    for (uint32_t level = 0; level < kLevels; ++level) {
      if (level > 0) theirs = __shfl_xor_sync(kAllLanes, mine, kWarpLanes >> level);
      const float both = mine + theirs, share = both == 0 ? 0 : theirs / both;
      if (own() == 0) memory_.merges[team_.row()][level][group()] = {share, mine * share};
      mine = both;
    }
    if constexpr (by_matrices) {
#pragma unroll
      for (uint32_t i = 0; i < kHeldChunks; ++i) LoadQueries(rows, part * kHeldChunks + i, i);
    }
    step_ = 0;
    StorePiece(0, LoadPiece(0, 0));
  }

  __device__ __forceinline__ void Multiply(uint32_t t) {
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kColumns; ++j) logits_[i][j] = 0;
    }
    for (uint32_t first = 0; first < chunks(); first += kHeldChunks) {
      // A register has no index: each place among those held is code of its own.
#pragma unroll
      for (uint32_t place = 0; place < kHeldChunks; ++place) {
        const uint32_t chunk = first + place;
        if (chunk >= chunks()) break;
        __syncthreads();
        const uint4 next = chunk + 1 < chunks() ? LoadPiece(t, chunk + 1) : LoadPiece(t + kTokens, 0);
        if constexpr (by_matrices) {
          if (first / kHeldChunks == held_part_) MultiplyByMatrices(memory_.keys[step_ % 2], chunk, place);
        } else {
          if (held_part_ != kNone) MultiplyByElements(memory_.keys[step_ % 2], chunk);
        }
        // All lanes have multiplied what was there: they have met since.
        StorePiece(++step_, next);
      }
    }
    if (parts() > 1) AddParts();
  }

  __device__ __forceinline__ void PutColumns(uint32_t t, const float (&p)[kRows][kColumns]) {
    ColumnStats stats[kColumns / 2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) stats[j] = Exchanged<1>(OfOwnRows(p, j), OfOwnRows(p, j + 2));
    stats[0] = Exchanged<2>(stats[0], stats[1]);
    // Two lanes have the column that is left.
    stats[0] = Exchanged<3>(stats[0], stats[0]);
    if (group() % 2 == 0)
      memory_.columns[t / kTokens % 2][memory_.slots[team_.row()]][column(group() / 2)] = stats[0];
  }
  __device__ void PutLatest(uint32_t t, uint32_t j, float p) {
    memory_.latest[t / kTokens % 2][memory_.slots[team_.row()]][column(j)] = p;
  }
  __device__ const ColumnStats& of(uint32_t token, uint32_t strip, uint32_t column) const {
    return memory_.columns[token / kTokens % 2][strip][column];
  }
  __device__ float latest(uint32_t token, uint32_t strip, uint32_t column) const {
    return memory_.latest[token / kTokens % 2][strip][column];
  }

 private:
  using Storage = typename Element<dtype>::Storage;
  static constexpr bool kIsF32 = dtype == KvDtype::kF32, kIsBf16 = dtype == KvDtype::kBf16;
  static constexpr bool kInF16 = !kIsF32 && !kIsBf16;
  static constexpr uint32_t kAllLanes = 0xffffffffu, kWarpLanes = 32, kNone = UINT32_MAX;
  static constexpr float kFactor = kLog2E * (dtype == KvDtype::kFp8E4m3 ? kE4m3Scale : 1);
  static constexpr uint32_t kLevels = 4;  // merges of two rows or more until a lane has a column's 16
  static constexpr uint32_t kPieces = LogitTileMemory::kPieces;  // Each has 16 bytes of shared memory.
  static constexpr uint32_t kInPiece = kIsF32 ? 4 : 8;
  static constexpr uint32_t kChunk = kPieces * kInPiece;  // elements of a row
  static constexpr uint32_t kPair = kIsF32 ? 16 : 32;     // elements that two products of matrices take
  static constexpr uint32_t kPairs = kChunk / kPair;
  static constexpr uint32_t kHeldChunks = kHeld / kChunk;
  static_assert(kPolicyThreads == LogitTileMemory::kStrips * kWarpLanes);
  static_assert(kPolicyThreads >= kTokens * kPieces);

  // The row of a lane's first accumulators, and its number among the lanes of that row.
  __device__ static uint32_t group() { return threadIdx.x % kWarpLanes / 4; }
  __device__ static uint32_t own() { return threadIdx.x % 4; }
  __device__ uint32_t plane() const { return layer_ * c_.shape().kv_heads + head_; }
  __device__ uint32_t dim() const { return c_.shape().k_head_dim; }
  __device__ uint32_t chunks() const { return (dim() + kChunk - 1) / kChunk; }
  // Warps that have a strip together.
  __device__ uint32_t parts() const { return by_matrices ? (dim() + kHeld - 1) / kHeld : 1; }
  // The piece that this thread loads: half a warp loads the pieces of a token side by side.
  __device__ static uint32_t piece_token() { return threadIdx.x / kPieces; }
  __device__ static uint32_t piece_number() { return threadIdx.x % kPieces; }
  // Where a token's piece is: neighbouring tokens' same pieces lie in other banks, for both ways to multiply.
  __device__ static uint32_t Place(uint32_t token, uint32_t piece) {
    return piece ^ ((token & 1) << 2 | (token >> 1 & 1));
  }

  // ------------------------------------------------------------------------------------------------- keys

  // The elements of a word of two e4m3 or e5m2, which are its halves' upper bytes, as f16: an e4m3 by its scale smaller.
  __device__ static uint32_t F16OfFp8(uint32_t halves) {
    if constexpr (dtype == KvDtype::kFp8E5m2) return halves;
    const uint32_t none = ((halves & 0x7f007f00u) + 0x01000100u) & 0x80008000u;  // the sign bits of NaN
    return F16OfE4m3(halves) | (none - (none >> 6));
  }

  // This thread's piece of a tile, a chunk of its dims; 0 behind the last token and the last element.
  __device__ __forceinline__ uint4 LoadPiece(uint32_t t, uint32_t chunk) const {
    const uint32_t token = t + piece_token(), first = chunk * kChunk + piece_number() * kInPiece;
    if (threadIdx.x >= kTokens * kPieces || token >= c_.shape().tokens || first >= dim()) return {};
    constexpr uint32_t kWords = kInPiece * sizeof(Storage) / sizeof(uint32_t);
    constexpr uint32_t kInWord = sizeof(uint32_t) / sizeof(Storage);
    const uint64_t stride_bytes = c_.kv.k.dim_stride_bytes;
    const unsigned char* const from = c_.kv.KeyRow(layer_, head_, token) + first * stride_bytes;
    uint32_t words[kWords] = {};
    if (stride_bytes == sizeof(Storage) && first + kInPiece <= dim() &&
        reinterpret_cast<uint64_t>(from) % sizeof(words) == 0) {
      if constexpr (kWords == 4) {
        const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(from));
        words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
      } else {
        const uint2 loaded = __ldcs(reinterpret_cast<const uint2*>(from));
        words[0] = loaded.x, words[1] = loaded.y;
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kInPiece; ++i) {
        if (first + i >= dim()) continue;
        Storage element = *reinterpret_cast<const Storage*>(from + i * stride_bytes);
        uint32_t bits;
        if constexpr (dtype == KvDtype::kF32) {
          bits = __float_as_uint(element);
        } else {
          bits = element;
        }
        words[i / kInWord] |= bits << (i % kInWord * sizeof(Storage) * 8);
      }
    }
    if constexpr (kWords == 4) {
      return {words[0], words[1], words[2], words[3]};
    } else {
      return {F16OfFp8(__byte_perm(words[0], 0, 0x1404)), F16OfFp8(__byte_perm(words[0], 0, 0x3424)),
              F16OfFp8(__byte_perm(words[1], 0, 0x1404)), F16OfFp8(__byte_perm(words[1], 0, 0x3424))};
    }
  }

  __device__ __forceinline__ void StorePiece(uint32_t step, const uint4& piece) const {
    const uint32_t token = piece_token(), number = piece_number();
    if (threadIdx.x >= kTokens * kPieces) return;
    uint4(&keys)[kPieces] = memory_.keys[step % 2][token];
    if constexpr (by_matrices && !kIsF32) {
      // The halves of a piece are two neighbouring lanes', of the first product or the second.
      const uint32_t lane = number % 2 * 2, product = number % 4 / 2;
      reinterpret_cast<uint2*>(&keys[Place(token, number / 4 * 4 + lane)])[product] = {piece.x, piece.y};
      reinterpret_cast<uint2*>(&keys[Place(token, number / 4 * 4 + lane + 1)])[product] = {piece.z, piece.w};
    } else {
      keys[Place(token, number)] = piece;
    }
  }

  // ---------------------------------------------------------------------------------------------- queries

  // kCount elements of row `number` from `first` on, 0 where there are none.
  template <uint32_t kCount>
  __device__ __forceinline__ void LoadRow(uint32_t number, uint32_t first, float* to) const {
    const float* const row = c_.queries + c_.QueryFloats() * plane() + uint64_t{number} * dim();
    if (number == kNoRow) {
#pragma unroll
      for (uint32_t d = 0; d < kCount; ++d) to[d] = 0;
    } else if (dim() % 4 == 0) {
#pragma unroll
      for (uint32_t d = 0; d < kCount; d += 4) {
        const float4 four = first + d < dim() ? *reinterpret_cast<const float4*>(row + first + d) : float4{};
        to[d] = four.x, to[d + 1] = four.y, to[d + 2] = four.z, to[d + 3] = four.w;
      }
    } else {
#pragma unroll
      for (uint32_t d = 0; d < kCount; ++d) to[d] = first + d < dim() ? row[first + d] : 0;
    }
  }

  // A power of two brings the row's greatest element to [1, 2).
  __device__ __forceinline__ void ScaleToF16(uint32_t i, uint32_t row) {
    constexpr uint32_t kExponent = 0x7f800000u, kLargest = 0x7e000000u;
    if (row == kNoRow) return;
    const uint32_t power = BitsOf(c_.query_peaks[uint64_t{plane()} * c_.WindowRows() + row]) & kExponent;
    if (power == 0 || power >= kLargest) return;
    factors_[i] = kFactor * FloatOfBits(power);
  }

  // Holds a chunk's queries as the `place`-th of the chunks held.
  __device__ __forceinline__ void LoadQueries(const uint32_t (&rows)[kRows], uint32_t chunk, uint32_t place) {
    constexpr uint32_t kOwn = 16;  // elements of which a lane has four
#pragma unroll
    for (uint32_t four = 0; four < kChunk / kOwn; ++four) {
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        float x[4];
        LoadRow<4>(rows[i], chunk * kChunk + four * kOwn + own() * 4, x);
        uint32_t(&held)[kRows][4] = held_[place * (kChunk / kOwn) + four];
        if constexpr (kIsF32) {
#pragma unroll
          for (uint32_t d = 0; d < 4; ++d) held[i][d] = __float_as_uint(x[d]);
        } else {
          const float scale = kIsBf16 ? 1 : kFactor / factors_[i];  // a power of two
#pragma unroll
          for (uint32_t two = 0; two < 2; ++two) {
            const float first = x[2 * two] * scale, second = x[2 * two + 1] * scale;
            const uint32_t hi = PairOf<kIsBf16>(first, second);
            held[0][two * 2 + i] = hi;
            held[1][two * 2 + i] =
                PairOf<kIsBf16>(first - ElementOf(hi & 0xffff), second - ElementOf(hi >> 16));
          }
        }
      }
    }
  }

  // A number of two bytes in shared memory.
  __device__ static float ElementOf(uint32_t bits) {
    return kIsBf16 ? FloatOfBits(bits << 16) : FloatOfF16(static_cast<uint16_t>(bits));
  }

  // --------------------------------------------------------------------------------------------- products

  using Keys = uint4[kTokens][kPieces];

  __device__ __forceinline__ void MultiplyByMatrices(const Keys& keys, uint32_t chunk, uint32_t place) {
#pragma unroll
    for (uint32_t pair = 0; pair < kPairs; ++pair) {
      if (chunk * kChunk + pair * kPair >= dim()) continue;
      uint4 of_tokens[kColumns / 2];
#pragma unroll
      for (uint32_t j = 0; j < kColumns / 2; ++j) {
        const uint32_t token = j * 8 + group();
        of_tokens[j] = keys[token][Place(token, pair * 4 + own())];
      }
      if constexpr (kIsF32) {
        MultiplyF32(held_[place * kPairs + pair], of_tokens);
      } else {
        MultiplyPairs(held_[place * 2 * kPairs + 2 * pair], held_[place * 2 * kPairs + 2 * pair + 1],
                      of_tokens);
      }
    }
  }
  using OfTokens = uint4[kColumns / 2];
  __device__ __forceinline__ void MultiplyPairs(const uint32_t (&first)[kRows][4],
                                                const uint32_t (&second)[kRows][4], const OfTokens& keys) {
#pragma unroll
    for (uint32_t j = 0; j < kColumns; j += 2) {
      const uint4 key = keys[j / 2];
      float &d0 = logits_[0][j], &d1 = logits_[0][j + 1], &d2 = logits_[1][j], &d3 = logits_[1][j + 1];
      MultiplyMatrices<kIsBf16>(d0, d1, d2, d3, first[0], key.x, key.y);
      MultiplyMatrices<kIsBf16>(d0, d1, d2, d3, first[1], key.x, key.y);
      MultiplyMatrices<kIsBf16>(d0, d1, d2, d3, second[0], key.z, key.w);
      MultiplyMatrices<kIsBf16>(d0, d1, d2, d3, second[1], key.z, key.w);
    }
  }
  __device__ __forceinline__ void MultiplyF32(const uint32_t (&x)[kRows][4], const OfTokens& keys) {
#pragma unroll
    for (uint32_t two = 0; two < 4; two += 2) {
      const uint32_t hi[4] = {x[0][two], x[1][two], x[0][two + 1], x[1][two + 1]};
      uint32_t lo[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) lo[i] = LowerPart(hi[i]);
        // A half after the other, since there are no registers for the lower parts of both.
#pragma unroll
      for (uint32_t j = 0; j < kColumns; j += 2) {
        MultiplyTf32(logits_[0][j], logits_[0][j + 1], logits_[1][j], logits_[1][j + 1], lo,
                     two == 0 ? keys[j / 2].x : keys[j / 2].z, two == 0 ? keys[j / 2].y : keys[j / 2].w);
      }
#pragma unroll
      for (uint32_t j = 0; j < kColumns; j += 2) {
        const uint32_t first = two == 0 ? keys[j / 2].x : keys[j / 2].z;
        const uint32_t second = two == 0 ? keys[j / 2].y : keys[j / 2].w;
        float &d0 = logits_[0][j], &d1 = logits_[0][j + 1], &d2 = logits_[1][j], &d3 = logits_[1][j + 1];
        MultiplyTf32(d0, d1, d2, d3, hi, LowerPart(first), LowerPart(second));
        MultiplyTf32(d0, d1, d2, d3, hi, first, second);
      }
    }
  }

  // The first warp of a strip gets the others' logits. All lanes meet again before anybody writes here the next time.
  __device__ __forceinline__ void AddParts() {
    static_assert(kRows == 2 && kColumns == 4);
    const uint32_t lane = threadIdx.x % kWarpLanes;
    if (held_part_ != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i)
        memory_.parts[team_.row()][i][lane] = {logits_[i][0], logits_[i][1], logits_[i][2], logits_[i][3]};
    }
    __syncthreads();
    if (held_part_ != 0) return;
    const uint32_t end = min(team_.row() + parts(), LogitTileMemory::kStrips);
    for (uint32_t other = team_.row() + 1; other < end; ++other) {
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        const float4 theirs = memory_.parts[other][i][lane];
        logits_[i][0] += theirs.x, logits_[i][1] += theirs.y;
        logits_[i][2] += theirs.z, logits_[i][3] += theirs.w;
      }
    }
  }

  __device__ __forceinline__ void MultiplyByElements(const Keys& keys, uint32_t chunk) {
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      const uint32_t first = chunk * kChunk + piece * kInPiece;
      if (first >= dim()) break;
      float queries[kRows][kInPiece];
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) LoadRow<kInPiece>(held(i), first, queries[i]);
#pragma unroll
      for (uint32_t j = 0; j < kColumns; ++j) {
        const uint4 key = keys[column(j)][Place(column(j), piece)];
        const uint32_t words[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (uint32_t d = 0; d < kInPiece; ++d) {
          const float element = kInPiece == 4 ? __uint_as_float(words[d % 4])
                                              : ElementOf(words[d / 2] >> (d % 2 * 16) & 0xffff);
#pragma unroll
          for (uint32_t i = 0; i < kRows; ++i) logits_[i][j] += queries[i][d] * element;
        }
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- columns

  // Merges the rows of two (Chan, Golub, LeVeque 1979).
  __device__ __forceinline__ ColumnStats Merged(const ColumnStats& a, const ColumnStats& b,
                                                uint32_t level) const {
    const float2 by = memory_.merges[team_.row()][level][group()];
    const float apart = b.mean - a.mean;
    return {a.mean + apart * by.x, a.squares + b.squares + apart * apart * by.y, fmaxf(a.peak, b.peak)};
  }
  __device__ __forceinline__ ColumnStats OfOwnRows(const float (&p)[kRows][kColumns], uint32_t j) const {
    return Merged({p[0][j], 0, p[0][j]}, {p[1][j], 0, p[1][j]}, 0);
  }

  // Of two columns a lane keeps the first, and that whose row differs in a bit of its number the second: each gives the other
  // what it has of the other's.
  template <uint32_t level>
  __device__ __forceinline__ ColumnStats Exchanged(const ColumnStats& first,
                                                   const ColumnStats& second) const {
    constexpr uint32_t kDistance = kWarpLanes >> level;
    const bool upper = (threadIdx.x & kDistance) != 0;
    // Members are chosen one by one: of whole structs the compiler would choose the address.
    const auto chosen = [&](float if_upper, float if_lower) { return upper ? if_upper : if_lower; };
    const auto given = [&](float of_first, float of_second) {
      return __shfl_xor_sync(kAllLanes, chosen(of_first, of_second), kDistance);
    };
    return Merged({chosen(second.mean, first.mean), chosen(second.squares, first.squares),
                   chosen(second.peak, first.peak)},
                  {given(first.mean, second.mean), given(first.squares, second.squares),
                   given(first.peak, second.peak)},
                  level);
  }

  const CudaTeam& team_;
  const ScoreContext& c_;
  LogitTileMemory& memory_;
  const uint32_t layer_, head_;
  // Of the strip.
  uint32_t held_part_;    // this warp's number among those that have the strip; kNone: it has no row
  float factors_[kRows];  // Products are multiplied by them.
  // Of each 16 of its elements that the warp holds: the rows of f32; hi and lo of both rows otherwise.
  uint32_t held_[kHeld / 16][kRows][4];
  // Of the tile.
  uint32_t step_ = 0;
  float logits_[kRows][kColumns];
};

// WindowLse and WindowStatistics with the tile that goes with the device and the shape.
template <KvDtype dtype>
__device__ __forceinline__ bool TakesMatrices(const ScoreContext& c) {
  return kHasMatrixProducts && c.shape().k_head_dim <= CudaLogitTile<dtype, true>::kMostDim;
}
template <KvDtype dtype>
__device__ __forceinline__ void WindowLseByTiles(const ScoreContext& c, uint32_t plane) {
  if (TakesMatrices<dtype>(c)) {
    WindowLse<CudaLogitTile<dtype, kHasMatrixProducts>>(CudaTeam(), c, plane);
  } else {
    WindowLse<CudaLogitTile<dtype, false>>(CudaTeam(), c, plane);
  }
}
template <KvDtype dtype>
__device__ __forceinline__ void WindowStatisticsByTiles(const ScoreContext& c, uint32_t plane) {
  if (TakesMatrices<dtype>(c)) {
    WindowStatistics<CudaLogitTile<dtype, kHasMatrixProducts>>(CudaTeam(), c, plane);
  } else {
    WindowStatistics<CudaLogitTile<dtype, false>>(CudaTeam(), c, plane);
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_KERNELS_CUDA_LOGIT_TILE_H_
