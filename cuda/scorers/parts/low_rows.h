// A compaction in which tokens that leave go on in low precision (MiKV, arXiv 2402.18096): one record of proto/support/low_layout.h,
// which is 32 tokens of a plane in 2, 4 or 8 bits an element. As in KIVI (arXiv 2402.02750), K has a range for each channel and V one
// for each token. With x' the finite elements, as at most 65504 of either sign, and all numbers floats:
//
//   zero = f16(min x'), scale = f16((max x' - min x') / (2^bits - 1))
//   code = (x - zero) * (1 / scale), rounded to the nearest, of two to the even one, within 0 and 2^bits - 1; 0 where scale is 0
//
// A NaN's code is 0. Each element is read once.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_LOW_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_LOW_ROWS_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/store_element.h"
#include "proto/support/low_layout.h"

namespace kvpool::scorers {

struct LowRequest {
  KvView from;
  const uint64_t* to_blocks = nullptr;  // addresses, multiples of 4, of layout.Blocks(evicted_tokens) blocks
  // Ascending indices of the tokens that leave: evicted[layer * layer_stride + head * head_stride + i]. A stride of 0 says
  // that all layers or heads lose the same tokens.
  const uint32_t* evicted = nullptr;
  uint64_t evicted_layer_stride = 0;
  uint64_t evicted_head_stride = 0;
  uint32_t evicted_tokens = 0;
  LowLayout layout;

  KVPOOL_HOST_DEVICE uint32_t groups() const {
    return evicted_tokens / LowLayout::kGroupTokens + (evicted_tokens % LowLayout::kGroupTokens != 0);
  }
};

// What the lanes of a team share while they make a record.
struct LowTile {
  static constexpr uint32_t kTokens = LowLayout::kGroupTokens;
  static constexpr uint32_t kChunkBytes = 16;
  static constexpr uint32_t kStageBytes = 16 << 10;
  static constexpr uint32_t kMostRanges = kStageBytes / kTokens;
  alignas(kChunkBytes) unsigned char elements[kStageBytes];  // rows of parts of tokens, of whole chunks
  uint64_t keys[kTokens], values[kTokens];                   // addresses of the tokens' K and V
  alignas(kChunkBytes) float zeros[kMostRanges];
  alignas(kChunkBytes) float inverses[kMostRanges];  // 1 / scale, or 0
};

// A range as it is stored and as codes are computed with it.
struct LowRange {
  uint32_t stored = 0;  // the bits of scale, and above them those of zero
  float zero = 0;
  float inverse = 0;
};
// Of finite elements; without any, `least` is above `greatest`.
KVPOOL_HOST_DEVICE inline LowRange LowRangeOf(float least, float greatest, uint32_t bits) {
  if (!(least <= greatest)) return {};
  constexpr float kMost = 65504;  // an f16's
  const auto within = [](float x) { return x < -kMost ? -kMost : x > kMost ? kMost : x; };
  const auto levels = static_cast<float>((1u << bits) - 1);
  // A sum with 0 has one sign of zero, whichever element was the least or the greatest.
  const float first = within(least) + 0.0f, last = within(greatest) + 0.0f;
  const uint32_t zero = RoundedBits(first, 15, 10, 15);
  const uint32_t scale = RoundedBits((last - first) / levels, 15, 10, 15);
  const float step = Element<KvDtype::kF16>::Load(static_cast<uint16_t>(scale));
  return {.stored = scale | zero << 16,
          .zero = Element<KvDtype::kF16>::Load(static_cast<uint16_t>(zero)),
          .inverse = step > 0 ? 1 / step : 0};
}

KVPOOL_HOST_DEVICE inline void WidenLow(float x, float* least, float* greatest) {
  if (!IsFinite(x)) return;
  *least = x < *least ? x : *least;
  *greatest = x > *greatest ? x : *greatest;
}

KVPOOL_HOST_DEVICE inline uint32_t LowCodeOf(float x, float zero, float inverse, float levels) {
  const float place = (x - zero) * inverse;
  const float within = place > 0 ? (place < levels ? place : levels) : 0;
  return BitsOf(within + 0x1p23f) & 0xffu;  // Floats from 2^23 on are whole numbers.
}

// Copies `width` elements from `first` on of each of `count` rows to tile->elements, in rows of `pitch_bytes`.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void StageLow(const Team& team, const KvPlane& plane, const uint64_t* rows, uint32_t count,
                                 uint32_t first, uint32_t width, uint32_t pitch_bytes, LowTile* tile) {
  using Storage = typename Element<dtype>::Storage;
  struct alignas(LowTile::kChunkBytes) Chunk {
    uint64_t halves[2];
  };
  constexpr uint32_t kInChunk = LowTile::kChunkBytes / sizeof(Storage);
  const uint32_t chunks = pitch_bytes / LowTile::kChunkBytes;
  for (uint32_t i = team.id(); i < count * chunks; i += team.count()) {
    const uint32_t row = i / chunks, d = i % chunks * kInChunk;
    const uint64_t from = rows[row] + (first + d) * plane.dim_stride_bytes;
    unsigned char* const to = tile->elements + row * pitch_bytes + d * sizeof(Storage);
    if (plane.dim_stride_bytes == sizeof(Storage) && d + kInChunk <= width &&
        from % LowTile::kChunkBytes == 0) {
      *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
      continue;
    }
    for (uint32_t j = 0; j < kInChunk && d + j < width; ++j) {
      reinterpret_cast<Storage*>(to)[j] =
          *reinterpret_cast<const Storage*>(from + j * plane.dim_stride_bytes);
    }
  }
}

// The codes of elements [first, end) of a row of the tile, one word of them. Their ranges are the tile's, one for each element, or
// with kOneRange all that of number `range`.
template <KvDtype dtype, uint32_t kBits, bool kOneRange>
KVPOOL_HOST_DEVICE uint32_t LowWordOf(const LowTile& tile, uint32_t row_at, uint32_t first, uint32_t end,
                                      uint32_t range) {
  using Storage = typename Element<dtype>::Storage;
  constexpr uint32_t kInWord = 32 / kBits, kBytes = kInWord * sizeof(Storage);
  constexpr auto kLevels = static_cast<float>((1u << kBits) - 1);
  // Loads of sixteen bytes, where there are so many.
  struct alignas(kBytes < LowTile::kChunkBytes ? kBytes : LowTile::kChunkBytes) Elements {
    Storage of[kInWord];
  };
  struct alignas(LowTile::kChunkBytes) Floats {
    float of[kInWord];
  };
  const unsigned char* const at = tile.elements + row_at + first * sizeof(Storage);
  const uint32_t of_first = kOneRange ? range : first;
  uint32_t word = 0;
  if (first + kInWord <= end) {
    const Elements elements = *reinterpret_cast<const Elements*>(at);
    Floats zeros, inverses;
    if constexpr (!kOneRange) {
      zeros = *reinterpret_cast<const Floats*>(tile.zeros + first);
      inverses = *reinterpret_cast<const Floats*>(tile.inverses + first);
    }
    const float zero = tile.zeros[of_first], inverse = tile.inverses[of_first];
    KVPOOL_UNROLL
    for (uint32_t j = 0; j < kInWord; ++j) {
      const float x = Element<dtype>::Load(elements.of[j]);
      word |= LowCodeOf(x, kOneRange ? zero : zeros.of[j], kOneRange ? inverse : inverses.of[j], kLevels)
              << (j * kBits);
    }
    return word;
  }
  for (uint32_t j = 0; first + j < end; ++j) {
    const uint32_t of = kOneRange ? range : first + j;
    word |= LowCodeOf(Element<dtype>::Load(reinterpret_cast<const Storage*>(at)[j]), tile.zeros[of],
                      tile.inverses[of], kLevels)
            << (j * kBits);
  }
  return word;
}
template <KvDtype dtype, bool kOneRange>
KVPOOL_HOST_DEVICE uint32_t LowWordOf(const LowTile& tile, uint32_t row_at, uint32_t first, uint32_t end,
                                      uint32_t range, uint32_t bits) {
  return bits == 2   ? LowWordOf<dtype, 2, kOneRange>(tile, row_at, first, end, range)
         : bits == 4 ? LowWordOf<dtype, 4, kOneRange>(tile, row_at, first, end, range)
                     : LowWordOf<dtype, 8, kOneRange>(tile, row_at, first, end, range);
}

// K of a record, as many channels at a time as the tile has room for.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void LowKeys(const Team& team, const LowRequest& r, uint32_t tokens, LowTile* tile,
                                unsigned char* to) {
  using Storage = typename Element<dtype>::Storage;
  constexpr uint32_t kWidth = LowTile::kStageBytes / LowTile::kTokens / sizeof(Storage);
  const KvPlane& plane = r.from.k;
  const uint32_t bits = r.layout.bits, in_word = 32 / bits;
  for (uint32_t first = 0; first < plane.head_dim; first += kWidth) {
    const uint32_t width = plane.head_dim - first < kWidth ? plane.head_dim - first : kWidth;
    const uint32_t pitch =
        (width * sizeof(Storage) + LowTile::kChunkBytes - 1) / LowTile::kChunkBytes * LowTile::kChunkBytes;
    StageLow<dtype>(team, plane, tile->keys, tokens, first, width, pitch, tile);
    team.Sync();
    for (uint32_t d = team.id(); d < width; d += team.count()) {
      float least = INFINITY, greatest = -INFINITY;
      for (uint32_t t = 0; t < tokens; ++t) {
        const Storage x = reinterpret_cast<const Storage*>(tile->elements + t * pitch)[d];
        WidenLow(Element<dtype>::Load(x), &least, &greatest);
      }
      const LowRange range = LowRangeOf(least, greatest, bits);
      tile->zeros[d] = range.zero;
      tile->inverses[d] = range.inverse;
      reinterpret_cast<uint32_t*>(to)[first + d] = range.stored;
    }
    team.Sync();
    const uint32_t words = (width + in_word - 1) / in_word,
                   row_words = r.layout.k_row_bytes / sizeof(uint32_t);
    for (uint32_t i = team.id(); i < LowTile::kTokens * words; i += team.count()) {
      const uint32_t t = i / words, d = i % words * in_word;
      const uint32_t end = d + in_word < width ? d + in_word : width;
      reinterpret_cast<uint32_t*>(to + r.layout.k_codes_at)[t * row_words + first / in_word + i % words] =
          t < tokens ? LowWordOf<dtype, false>(*tile, t * pitch, d, end, 0, bits) : 0;
    }
    team.Sync();
  }
}

// V of a record, as many tokens at a time as the tile has room for.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void LowValues(const Team& team, const LowRequest& r, uint32_t tokens, LowTile* tile,
                                  unsigned char* to) {
  using Storage = typename Element<dtype>::Storage;
  const KvPlane& plane = r.from.v;
  const uint32_t bits = r.layout.bits, in_word = 32 / bits, words = r.layout.v_row_bytes / sizeof(uint32_t);
  const uint32_t pitch = (plane.head_dim * sizeof(Storage) + LowTile::kChunkBytes - 1) /
                         LowTile::kChunkBytes * LowTile::kChunkBytes;
  const uint32_t at_once =
      LowTile::kStageBytes / pitch < LowTile::kTokens ? LowTile::kStageBytes / pitch : LowTile::kTokens;
  auto* const ranges = reinterpret_cast<uint32_t*>(to + r.layout.v_ranges_at);
  auto* const codes = reinterpret_cast<uint32_t*>(to + r.layout.v_codes_at);
  for (uint32_t first = 0; first < tokens; first += at_once) {
    const uint32_t count = tokens - first < at_once ? tokens - first : at_once;
    StageLow<dtype>(team, plane, tile->values + first, count, 0, plane.head_dim, pitch, tile);
    team.Sync();
    for (uint32_t t = team.row(); t < count; t += team.rows()) {
      const auto* const row = reinterpret_cast<const Storage*>(tile->elements + t * pitch);
      float least = INFINITY, greatest = -INFINITY;
      for (uint32_t d = team.in_row(); d < plane.head_dim; d += team.row_width()) {
        WidenLow(Element<dtype>::Load(row[d]), &least, &greatest);
      }
      least = -team.RowMax(-least);
      greatest = team.RowMax(greatest);
      if (team.in_row() != 0) continue;
      tile->zeros[t] = least;
      tile->inverses[t] = greatest;
    }
    team.Sync();
    // Rounding takes a lane as long as all lanes of a row, so each has a token of its own.
    for (uint32_t t = team.id(); t < count; t += team.count()) {
      const LowRange range = LowRangeOf(tile->zeros[t], tile->inverses[t], bits);
      tile->zeros[t] = range.zero;
      tile->inverses[t] = range.inverse;
      ranges[first + t] = range.stored;
    }
    team.Sync();
    for (uint32_t i = team.id(); i < count * words; i += team.count()) {
      const uint32_t t = i / words, d = i % words * in_word;
      const uint32_t end = d + in_word < plane.head_dim ? d + in_word : plane.head_dim;
      codes[first * words + i] = LowWordOf<dtype, true>(*tile, t * pitch, d, end, t, bits);
    }
    team.Sync();
  }
  for (uint32_t t = tokens + team.id(); t < LowTile::kTokens; t += team.count()) ranges[t] = 0;
  for (uint32_t i = tokens * words + team.id(); i < LowTile::kTokens * words; i += team.count()) codes[i] = 0;
}

// The record of tokens [32 group, 32 group + 32) of a plane's list. REQUIRES: there is one.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void LowRecord(const Team& team, const LowRequest& r, uint32_t group, uint32_t plane,
                                  LowTile* tile) {
  const KvShape& shape = r.from.shape;
  const uint32_t layer = plane / shape.kv_heads, head = plane % shape.kv_heads;
  const uint32_t first = group * LowTile::kTokens;
  const uint32_t tokens =
      r.evicted_tokens - first < LowTile::kTokens ? r.evicted_tokens - first : LowTile::kTokens;
  const uint32_t* const evicted =
      r.evicted + layer * r.evicted_layer_stride + head * r.evicted_head_stride + first;
  const uint64_t record = uint64_t{group} * shape.planes() + plane;
  auto* const to =
      reinterpret_cast<unsigned char*>(r.to_blocks[record / r.layout.records_per_block] +
                                       record % r.layout.records_per_block * r.layout.record_bytes);
  for (uint32_t t = team.id(); t < tokens; t += team.count()) {
    const uint32_t token = evicted[t];
    const auto key = reinterpret_cast<uint64_t>(r.from.KeyRow(layer, head, token));
    const auto value = reinterpret_cast<uint64_t>(r.from.ValueRow(layer, head, token));
    tile->keys[t] = key;
    tile->values[t] = value;
  }
  team.Sync();
  LowKeys<dtype>(team, r, tokens, tile, to);
  if (r.from.v.head_dim == 0) return;
  LowValues<dtype>(team, r, tokens, tile, to);
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_LOW_ROWS_H_
