// The pass over K and V: it computes blocks' records (records.h), and a sequence's features from its records.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_FEATURES_H_
#define KVPOOL_CUDA_SCORERS_PARTS_FEATURES_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// Norms of the rows of some heads of one layer in one block, K or V: norms[head * tokens_per_block + token]. Rows are
// visited in the order of their addresses, and copied in that order to `stage` if there is one.
template <KvDtype dtype, bool kContiguous, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void RowNorms(const Team& team, const KvPlane& plane,
                                               const unsigned char* layer, uint32_t tokens, uint32_t heads,
                                               uint32_t tokens_per_block, float* norms,
                                               unsigned char* stage = nullptr) {
  const bool heads_inside = plane.head_stride_bytes < plane.token_stride_bytes;
  const RowGrid rows = {
      .first = layer,
      .outer_count = heads_inside ? tokens : heads,
      .inner_count = heads_inside ? heads : tokens,
      .outer_stride_bytes = heads_inside ? plane.token_stride_bytes : plane.head_stride_bytes,
      .inner_stride_bytes = heads_inside ? plane.head_stride_bytes : plane.token_stride_bytes,
      .dim = plane.head_dim,
      .norms = norms,
      .outer_step = heads_inside ? 1 : tokens_per_block,
      .inner_step = heads_inside ? tokens_per_block : 1,
      .stage = stage,
  };
  if constexpr (kContiguous) {
    team.template NormsOfRows<dtype>(rows);
  } else {
    for (uint32_t outer = 0; outer < rows.outer_count; ++outer) {
      for (uint32_t inner = team.row(); inner < rows.inner_count; inner += team.rows()) {
        const float norm = SumOverRow<dtype, false, RowOp::kSquare>(
            team, layer + outer * rows.outer_stride_bytes + inner * rows.inner_stride_bytes,
            plane.dim_stride_bytes, plane.head_dim, nullptr);
        if (team.in_row() == 0) norms[outer * rows.outer_step + inner * rows.inner_step] = norm;
      }
    }
  }
}

// RowNorms where tokens lie side by side (column-major K): lanes take packs of tokens.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void ColumnNorms(const Team& team, const KvPlane& plane,
                                                  const unsigned char* layer, uint32_t tokens, uint32_t heads,
                                                  uint32_t tokens_per_block, float* norms) {
  using Storage = typename Element<dtype>::Storage;
  const uint32_t packs = (tokens + kPack - 1) / kPack;
  for (uint32_t i = team.id(); i < heads * packs; i += team.count()) {
    const uint32_t head = i / packs;
    const uint32_t first = i % packs * kPack;
    const unsigned char* column = layer + head * plane.head_stride_bytes + first * sizeof(Storage);
    float squares[kPack] = {};
    const uint32_t count = tokens - first < kPack ? tokens - first : kPack;
    for (uint32_t d = 0; d < plane.head_dim; ++d, column += plane.dim_stride_bytes) {
      const Storage* const elements = reinterpret_cast<const Storage*>(column);
      for (uint32_t j = 0; j < kPack; ++j) {
        const float x = j < count ? Element<dtype>::Load(elements[j]) : 0;
        squares[j] += x * x;
      }
    }
    for (uint32_t j = 0; j < kPack; ++j) {
      if (j < count) norms[head * tokens_per_block + first + j] = sqrtf(squares[j]);
    }
  }
}

template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void PlaneNorms(const Team& team, const KvView& kv, const KvPlane& plane,
                                                 uint32_t block, uint32_t layer, float* norms) {
  const unsigned char* const start = kv.Row(plane, block, layer, 0, 0);
  const uint32_t tokens = kv.shape.TokensOf(block);
  const uint32_t element_bytes = BytesOf(dtype);
  if (plane.dim_stride_bytes == element_bytes) {
    RowNorms<dtype, true>(team, plane, start, tokens, kv.shape.kv_heads, kv.shape.tokens_per_block, norms);
  } else if (plane.token_stride_bytes == element_bytes) {
    ColumnNorms<dtype>(team, plane, start, tokens, kv.shape.kv_heads, kv.shape.tokens_per_block, norms);
  } else {
    RowNorms<dtype, false>(team, plane, start, tokens, kv.shape.kv_heads, kv.shape.tokens_per_block, norms);
  }
}

// Keys of one layer in one block, of heads from `first_head` on.
struct KeyRows {
  const unsigned char* first = nullptr;
  uint64_t token_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint64_t dim_stride_bytes = 0;
  uint32_t first_head = 0;
  uint32_t heads = 0;
  uint32_t tokens = 0;
  // norms[head * norms_stride + token]; null: there are none.
  const float* norms = nullptr;
  uint32_t norms_stride = 0;
};

// The key sums and key bounds of the rows' planes: lanes take packs of columns, of all heads.
// REQUIRES: the norms are visible to all lanes.
template <KvDtype dtype, bool kContiguous, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void KeySums(const Team& team, const KvView& kv, const RecordLayout& at,
                                              uint32_t layer, const KeyRows& keys, float* record) {
  using Storage = typename Element<dtype>::Storage;
  constexpr uint32_t kColumns = Team::kColumns;
  const uint32_t dim = kv.shape.k_head_dim;
  const uint32_t packs = (dim + kColumns - 1) / kColumns;
  for (uint32_t pack = team.id(); pack < keys.heads * packs; pack += team.count()) {
    const uint32_t head = pack / packs, first = pack % packs * kColumns;
    const uint32_t plane = layer * kv.shape.kv_heads + keys.first_head + head;
    const uint64_t own = uint64_t{plane} * dim;
    const float* const norms = keys.norms == nullptr ? nullptr : keys.norms + head * keys.norms_stride;
    const uint32_t count = dim - first < kColumns ? dim - first : kColumns;
    float unit[kColumns] = {}, raw[kColumns] = {}, least[kColumns], greatest[kColumns];
    for (uint32_t j = 0; j < kColumns; ++j) least[j] = INFINITY, greatest[j] = -INFINITY;
    for (uint32_t t = 0; t < keys.tokens; ++t) {
      const unsigned char* const row = keys.first + t * keys.token_stride_bytes +
                                       head * keys.head_stride_bytes +
                                       first * (kContiguous ? sizeof(Storage) : keys.dim_stride_bytes);
      const bool counts = norms != nullptr && HasDirection(norms[t]);
      const float weight = counts ? 1 / norms[t] : 0;
      for (uint32_t j = 0; j < kColumns; ++j) {
        if (j >= count) break;
        const float x = Element<dtype>::Load(
            kContiguous ? reinterpret_cast<const Storage*>(row)[j]
                        : *reinterpret_cast<const Storage*>(row + j * keys.dim_stride_bytes));
        unit[j] += counts ? x * weight : 0;
        raw[j] += counts ? x : 0;
        least[j] = LesserOf(least[j], x);
        greatest[j] = GreaterOf(greatest[j], x);
      }
    }
    for (uint32_t j = 0; j < kColumns; ++j) {
      if (j >= count) break;
      if (at.unit_key_sums != RecordLayout::kNone) record[at.unit_key_sums + own + first + j] = unit[j];
      if (at.key_sums != RecordLayout::kNone) record[at.key_sums + own + first + j] = raw[j];
      if (at.key_min != RecordLayout::kNone) record[at.key_min + own + first + j] = least[j];
      if (at.key_max != RecordLayout::kNone) record[at.key_max + own + first + j] = greatest[j];
    }
  }
}

// Norms and sums of keys that the team copies to its own memory while it reads them, `at_once` heads at a time: memory
// is read once.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void StagedKeys(const Team& team, const KvView& kv, const RecordLayout& at,
                                                 uint32_t block, uint32_t layer, uint32_t at_once,
                                                 float* record) {
  const uint32_t tokens = kv.shape.TokensOf(block), per_block = kv.shape.tokens_per_block;
  const uint64_t row_bytes = uint64_t{kv.k.head_dim} * BytesOf(dtype);
  const bool heads_inside = kv.k.head_stride_bytes < kv.k.token_stride_bytes;
  for (uint32_t head = 0; head < kv.shape.kv_heads; head += at_once) {
    const uint32_t heads = kv.shape.kv_heads - head < at_once ? kv.shape.kv_heads - head : at_once;
    RowNorms<dtype, true>(team, kv.k, kv.Row(kv.k, block, layer, 0, head), tokens, heads, tokens,
                          team.staged_norms(), team.stage());
    team.Sync();
    float* const norms = record + at.k_norms + uint64_t{layer * kv.shape.kv_heads + head} * per_block;
    for (uint32_t i = team.id(); i < heads * tokens; i += team.count()) {
      norms[i / tokens * per_block + i % tokens] = team.staged_norms()[i];
    }
    KeySums<dtype, true>(team, kv, at, layer,
                         {.first = team.stage(),
                          .token_stride_bytes = heads_inside ? heads * row_bytes : row_bytes,
                          .head_stride_bytes = heads_inside ? row_bytes : tokens * row_bytes,
                          .dim_stride_bytes = BytesOf(dtype),
                          .first_head = head,
                          .heads = heads,
                          .tokens = tokens,
                          .norms = team.staged_norms(),
                          .norms_stride = tokens},
                         record);
    team.Sync();
  }
}

// The norms of one layer's part of a block's record.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void NormsOfLayer(const Team& team, const KvView& kv, const RecordLayout& at,
                                                   uint32_t block, uint32_t layer, float* record,
                                                   bool has_k = false) {
  const uint64_t plane = uint64_t{layer} * kv.shape.kv_heads * kv.shape.tokens_per_block;
  if (at.k_norms != RecordLayout::kNone && !has_k) {
    PlaneNorms<dtype>(team, kv, kv.k, block, layer, record + at.k_norms + plane);
  }
  if (at.v_norms != RecordLayout::kNone) {
    PlaneNorms<dtype>(team, kv, kv.v, block, layer, record + at.v_norms + plane);
  }
}

// One layer's part of a block's record.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void RecordOfLayer(const Team& team, const KvView& kv,
                                                    const RecordLayout& at, uint32_t block, uint32_t layer,
                                                    float* record) {
  const unsigned char* const keys = kv.Row(kv.k, block, layer, 0, 0);
  const uint32_t staged = at.sums_keys() && at.k_norms != RecordLayout::kNone
                              ? team.HeadsToStage(kv.k, keys, BytesOf(dtype), kv.shape.TokensOf(block))
                              : 0;
  if (staged > 0) StagedKeys<dtype>(team, kv, at, block, layer, staged, record);
  NormsOfLayer<dtype>(team, kv, at, block, layer, record, staged > 0);
  if (!at.sums_keys() || staged > 0) return;
  team.Sync();
  const KeyRows rows = {
      .first = keys,
      .token_stride_bytes = kv.k.token_stride_bytes,
      .head_stride_bytes = kv.k.head_stride_bytes,
      .dim_stride_bytes = kv.k.dim_stride_bytes,
      .heads = kv.shape.kv_heads,
      .tokens = kv.shape.TokensOf(block),
      .norms = at.k_norms == RecordLayout::kNone
                   ? nullptr
                   : record + at.k_norms + uint64_t{layer} * kv.shape.kv_heads * kv.shape.tokens_per_block,
      .norms_stride = kv.shape.tokens_per_block};
  if (kv.k.dim_stride_bytes == BytesOf(dtype)) {
    KeySums<dtype, true>(team, kv, at, layer, rows, record);
  } else {
    KeySums<dtype, false>(team, kv, at, layer, rows, record);
  }
}

// Blocks [begin, end) of a sequence.
struct BlockRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

// Unpacks the norms of one plane from the records, in token order: row teams take blocks. REQUIRES: records have norms.
template <typename Team>
KVPOOL_HOST_DEVICE void UnpackRecords(const Team& team, const ScoreContext& c, uint32_t plane,
                                      BlockRange blocks) {
  const KvShape& shape = c.shape();
  const uint32_t per_block = shape.tokens_per_block;
  const uint64_t first = uint64_t{plane} * shape.tokens;
  for (uint32_t block = blocks.begin + team.row(); block < blocks.end; block += team.rows()) {
    const float* const record = c.records[block];
    const uint32_t tokens = shape.TokensOf(block);
    const uint64_t to = first + uint64_t{block} * per_block;
    for (uint32_t t = team.in_row(); t < tokens; t += team.row_width()) {
      c.k_norms[to + t] = record[c.record.k_norms + plane * per_block + t];
      if (c.v_norms != nullptr) c.v_norms[to + t] = record[c.record.v_norms + plane * per_block + t];
    }
  }
  team.Sync();
}

// The anchor of one plane: the mean over its tokens of k/‖k‖, or of k. Lanes of a row take elements, row
// teams blocks. REQUIRES: the plane's norms are unpacked.
template <typename Team>
KVPOOL_HOST_DEVICE void MakeAnchor(const Team& team, const ScoreContext& c, uint32_t plane) {
  const KvShape& shape = c.shape();
  const uint64_t first = uint64_t{plane} * shape.tokens;
  double counted = 0;
  for (uint32_t t = team.id(); t < shape.tokens; t += team.count())
    counted += HasDirection(c.k_norms[first + t]);
  counted = team.Sum(counted);
  const uint32_t sums =
      c.record.unit_key_sums != RecordLayout::kNone ? c.record.unit_key_sums : c.record.key_sums;
  const uint64_t own = uint64_t{plane} * shape.k_head_dim;
  double square = 0;
  for (uint32_t base = 0; base < shape.k_head_dim; base += team.row_width()) {
    const uint32_t d = base + team.in_row();
    double sum = 0;
    for (uint32_t block = team.row(); block < shape.blocks() && d < shape.k_head_dim; block += team.rows()) {
      sum += double{c.records[block][sums + own + d]};
    }
    sum = team.SumOfRows(sum);
    if (team.row() != 0 || d >= shape.k_head_dim) continue;
    const double mean = counted == 0 ? 0 : sum / counted;
    c.anchors[own + d] = static_cast<float>(mean);
    square += mean * mean;
  }
  square = team.Sum(square);
  if (team.id() == 0) c.anchor_norms[plane] = static_cast<float>(sqrt(square));
  team.Sync();
}

// products[t] = key t of the plane times `vector`, for the tokens of `blocks`. REQUIRES: `vector` has k_head_dim floats.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void KeyProducts(const Team& team, const KvView& kv, uint32_t layer,
                                                  uint32_t head, BlockRange blocks, const float* vector,
                                                  float* products) {
  const KvShape& shape = kv.shape;
  const uint32_t first = blocks.begin * shape.tokens_per_block;
  const uint32_t end = blocks.end * shape.tokens_per_block;
  const uint32_t count = (end < shape.tokens ? end : shape.tokens) - first;
  const auto row_at = [&](uint32_t block, uint32_t token) {
    return kv.Row(kv.k, blocks.begin + block, layer, token, head);
  };
  if (kv.k.dim_stride_bytes == BytesOf(dtype)) {
    uint64_t bits =
        kv.k.offset_bytes | kv.k.layer_stride_bytes | kv.k.token_stride_bytes | kv.k.head_stride_bytes;
    for (uint32_t block = blocks.begin; block < blocks.end; ++block) bits |= kv.blocks[block];
    team.template ProductsOfRows<dtype>(row_at, bits % 16 == 0, shape.tokens_per_block, count,
                                        shape.k_head_dim, vector, products + first);
  } else {
    for (uint32_t i = team.row(); i < count; i += team.rows()) {
      const float product = SumOverRow<dtype, false, RowOp::kProduct>(
          team, row_at(i / shape.tokens_per_block, i % shape.tokens_per_block), kv.k.dim_stride_bytes,
          shape.k_head_dim, vector);
      if (team.in_row() == 0) products[first + i] = product;
    }
  }
}

// The second pass over K of policies with an anchor.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void AnchorDots(const Team& team, const ScoreContext& c, uint32_t plane,
                                                 BlockRange blocks) {
  const KvShape& shape = c.shape();
  KeyProducts<dtype>(team, c.kv, plane / shape.kv_heads, plane % shape.kv_heads, blocks,
                     c.anchors + uint64_t{plane} * shape.k_head_dim,
                     c.anchor_dots + uint64_t{plane} * shape.tokens);
  team.Sync();
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_FEATURES_H_
