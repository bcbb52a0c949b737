// A compaction in which tokens that leave are merged into those that stay (D2O, arXiv 2406.13035, section 3.3). In each plane, for
// tokens e that leave and c that stay:
//
//   Norms      ‖k‖ of every token. NaN where the token takes no part: k has no direction, or v is not finite.
//   Nearest    u_e = max over c of cos(k_e, k_c), and the oldest c where it is reached
//   Link       threshold = mean of u, or with a threshold given: smoothing * mean + (1 - smoothing) * given;
//              the lists of those e of each c whose u_e is at least the threshold
//   Merge      k_c = (exp(1) k_c + sum exp(u_e) k_e) / (exp(1) + sum exp(u_e)) over c's list, and v_c with the same weights
//
// The other tokens that leave are dropped. A token that stays and has no list keeps its bytes. Sums are in f32, in the order of
// the sequence. Nearest multiplies each pair's keys: evicted * kept * k_head_dim products in each plane.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_MERGE_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_MERGE_ROWS_H_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/gather_rows.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/store_element.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// The arguments of a compaction that merges.
struct MergeRequest {
  GatherRequest gather;
  // Ascending indices of the tokens that leave: evicted[layer * layer_stride + head * head_stride + i], with a stride of 0
  // where gather's is.
  const uint32_t* evicted = nullptr;
  uint64_t evicted_layer_stride = 0;
  uint64_t evicted_head_stride = 0;
  uint32_t evicted_tokens = 0;
  const float* thresholds = nullptr;  // [planes]; null: none are given
  float smoothing = 0;                // 0 to 1
};

// What the passes hand on to each other. Tokens that stay or leave are named by their places in their rows.
struct MergeContext {
  MergeRequest request;
  float* norms = nullptr;       // [planes][tokens]
  uint32_t* nearest = nullptr;  // [planes][evicted]; from Link on kNoToken where the token is dropped
  float* weights = nullptr;     // [planes][evicted] u_e; from Link on exp(u_e)
  uint32_t* next = nullptr;     // [planes][evicted] the next one of the list
  uint32_t* first = nullptr;    // [planes][kept] the first one of the list, or kNoToken
  float* thresholds = nullptr;  // [planes] what Link compared with
  uint32_t* merged = nullptr;   // [planes] tokens in all lists

  KVPOOL_HOST_DEVICE uint32_t Kept(uint32_t layer, uint32_t head, uint32_t i) const {
    const GatherRequest& gather = request.gather;
    return gather.kept[layer * gather.kept_layer_stride + head * gather.kept_head_stride + i];
  }
  KVPOOL_HOST_DEVICE uint32_t Evicted(uint32_t layer, uint32_t head, uint32_t i) const {
    return request.evicted[layer * request.evicted_layer_stride + head * request.evicted_head_stride + i];
  }
};

// Sets the pointers of `context` to arrays behind `address`, and returns their bytes.
inline uint64_t ArrangeMerge(uint64_t address, MergeContext* context) {
  const uint64_t planes = context->request.gather.from.shape.planes();
  const uint64_t tokens = context->request.gather.from.shape.tokens;
  const uint64_t kept = context->request.gather.kept_tokens, evicted = context->request.evicted_tokens;
  uint64_t at = address;
  const auto take = [&at](auto** array, uint64_t count) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(at);
    at += count * sizeof(**array);
  };
  take(&context->norms, planes * tokens);
  take(&context->nearest, planes * evicted);
  take(&context->weights, planes * evicted);
  take(&context->next, planes * evicted);
  take(&context->first, planes * kept);
  take(&context->thresholds, planes);
  take(&context->merged, planes);
  return at - address;
}

// One layer's part of one source block.
template <typename Team>
KVPOOL_HOST_DEVICE void MergeNorms(const Team& team, const MergeContext& c, uint32_t block, uint32_t layer) {
  const KvView& kv = c.request.gather.from;
  const uint32_t heads = kv.shape.kv_heads, first = block * kv.shape.tokens_per_block;
  for (uint32_t row = team.row(); row < kv.shape.TokensOf(block) * heads; row += team.rows()) {
    const uint32_t token = row / heads, head = row % heads;
    float norm =
        SumOverRow<RowOp::kSquare>(team, kv.Row(kv.k, block, layer, token, head), kv.k, kv.dtype, nullptr);
    if (!HasDirection(norm)) norm = NAN;
    if (kv.v.head_dim != 0) {
      const unsigned char* const value = kv.Row(kv.v, block, layer, token, head);
      if (!IsFinite(SumOverRow<RowOp::kSquare>(team, value, kv.v, kv.dtype, nullptr))) norm = NAN;
    }
    if (team.in_row() == 0)
      c.norms[(layer * heads + head) * uint64_t{kv.shape.tokens} + first + token] = norm;
  }
}

// What the lanes of a team share while they look for the nearest tokens of a tile.
struct NearestTile {
  static constexpr uint32_t kFloats = 8192;
  static constexpr uint32_t kMostTokens = 32;
  static constexpr uint32_t kMostLanes = 256;
  // So many tokens' keys fit. REQUIRES: dim is at most kFloats.
  KVPOOL_HOST_DEVICE static constexpr uint32_t TokensOf(uint32_t dim) {
    return kFloats / dim < kMostTokens ? kFloats / dim : kMostTokens;
  }
  alignas(16) float keys[kFloats];  // [token][k_head_dim], of norm 1
  float greatest[kMostLanes];
  uint32_t nearest[kMostLanes];
};

// A tile of `tile_tokens` tokens that leave. Row teams share the tokens that stay; the lanes of each have one token of the tile
// each. REQUIRES: tile_tokens is at most NearestTile::TokensOf(k_head_dim), and team.count() at most kMostLanes.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void FindNearest(const Team& team, const MergeContext& c, uint32_t plane, uint32_t tile,
                                    uint32_t tile_tokens, NearestTile* shared) {
  using Storage = typename Element<dtype>::Storage;
  const KvView& kv = c.request.gather.from;
  const uint32_t layer = plane / kv.shape.kv_heads, head = plane % kv.shape.kv_heads;
  const uint32_t dim = kv.k.head_dim, evicted = c.request.evicted_tokens, first = tile * tile_tokens;
  const uint32_t tokens = evicted - first < tile_tokens ? evicted - first : tile_tokens;
  const float* const norms = c.norms + uint64_t{plane} * kv.shape.tokens;
  for (uint32_t i = team.id(); i < tokens * dim; i += team.count()) {
    const uint32_t token = c.Evicted(layer, head, first + i / dim);
    const unsigned char* const at = kv.KeyRow(layer, head, token) + i % dim * kv.k.dim_stride_bytes;
    shared->keys[i] = Element<dtype>::Load(*reinterpret_cast<const Storage*>(at)) / norms[token];
  }
  team.Sync();
  const uint32_t width = team.row_width();
  for (uint32_t begin = 0; begin < tokens; begin += width) {
    const uint32_t count = tokens - begin < width ? tokens - begin : width;
    float greatest = -INFINITY;
    uint32_t nearest = kNoToken;
    for (uint32_t i = team.row(); i < c.request.gather.kept_tokens; i += team.rows()) {
      const uint32_t token = c.Kept(layer, head, i);
      const float cosine =
          team.template ProductWithOwn<dtype>(kv.KeyRow(layer, head, token), kv.k.dim_stride_bytes, dim,
                                              shared->keys + begin * dim, count) /
          norms[token];
      if (cosine > greatest) {  // It is not where either token takes no part.
        greatest = cosine;
        nearest = i;
      }
    }
    shared->greatest[team.id()] = greatest;
    shared->nearest[team.id()] = nearest;
    team.Sync();
    for (uint32_t i = team.id(); i < count; i += team.count()) {
      uint32_t best = i;
      for (uint32_t row = 1; row < team.rows(); ++row) {
        const uint32_t other = row * width + i;
        const float ahead = shared->greatest[other] - shared->greatest[best];
        const bool is_older = shared->nearest[other] < shared->nearest[best];
        if (shared->nearest[other] != kNoToken &&
            (shared->nearest[best] == kNoToken || ahead > 0 || (ahead == 0 && is_older))) {
          best = other;
        }
      }
      const uint64_t to = uint64_t{plane} * evicted + first + begin + i;
      c.nearest[to] = shared->nearest[best];
      c.weights[to] = shared->greatest[best];
    }
    team.Sync();
  }
}

// One plane. Where no token has a nearest one the threshold is the one given, or 1.
template <typename Team>
KVPOOL_HOST_DEVICE void LinkMerged(const Team& team, const MergeContext& c, uint32_t plane) {
  const uint32_t evicted = c.request.evicted_tokens, kept = c.request.gather.kept_tokens;
  uint32_t* const nearest = c.nearest + uint64_t{plane} * evicted;
  uint32_t* const next = c.next + uint64_t{plane} * evicted;
  uint32_t* const first = c.first + uint64_t{plane} * kept;
  float* const weights = c.weights + uint64_t{plane} * evicted;
  double sum = 0;
  uint32_t found = 0;
  for (uint32_t i = team.id(); i < evicted; i += team.count()) {
    if (nearest[i] == kNoToken) continue;
    sum += weights[i];
    ++found;
  }
  sum = team.Sum(sum);
  found = team.Count(found);
  float threshold = c.request.thresholds == nullptr ? 1 : c.request.thresholds[plane];
  if (found > 0) {
    const float share = c.request.thresholds == nullptr ? 1 : c.request.smoothing;
    const float kept_part = share < 1 ? (1 - share) * threshold : 0;
    threshold = (share > 0 ? share * static_cast<float>(sum / found) : 0) + kept_part;
  }
  uint32_t merged = 0;
  for (uint32_t i = team.id(); i < evicted; i += team.count()) {
    if (nearest[i] != kNoToken && weights[i] >= threshold) {
      weights[i] = expf(weights[i]);
      ++merged;
    } else {
      nearest[i] = kNoToken;
    }
  }
  for (uint32_t i = team.id(); i < kept; i += team.count()) first[i] = kNoToken;
  merged = team.Count(merged);
  team.Sync();
  if (team.id() != 0) return;
  for (uint32_t i = evicted; i-- > 0;) {  // The newest comes first, so that lists begin with the oldest.
    if (nearest[i] == kNoToken) continue;
    next[i] = first[nearest[i]];
    first[nearest[i]] = i;
  }
  c.thresholds[plane] = threshold;
  c.merged[plane] = merged;
}

// One row of a token that stays, with its list, by a row team.
template <typename Team>
KVPOOL_HOST_DEVICE void MergeRow(const Team& team, const MergeContext& c, const KvPlane& plane,
                                 uint32_t layer, uint32_t head, uint32_t kept, unsigned char* to) {
  constexpr float kOwnWeight = 2.71828182845904524f;  // exp(1), as its cosine with itself is 1.
  const KvView& kv = c.request.gather.from;
  const uint64_t of_plane = layer * kv.shape.kv_heads + head;
  const uint32_t per_block = kv.shape.tokens_per_block, own = c.Kept(layer, head, kept);
  const uint32_t* const next = c.next + of_plane * c.request.evicted_tokens;
  const float* const weights = c.weights + of_plane * c.request.evicted_tokens;
  const uint32_t first = c.first[of_plane * c.request.gather.kept_tokens + kept];
  const unsigned char* const from = kv.Row(plane, own / per_block, layer, own % per_block, head);
  if (first == kNoToken) return CopyRow(team, plane, kv.dtype, from, to);
  float all = kOwnWeight;
  for (uint32_t i = first; i != kNoToken; i = next[i]) all += weights[i];
  for (uint32_t d = team.in_row(); d < plane.head_dim; d += team.row_width()) {
    const uint64_t at = d * plane.dim_stride_bytes;
    float sum = kOwnWeight * LoadElement(from + at, kv.dtype);
    for (uint32_t i = first; i != kNoToken; i = next[i]) {
      const uint32_t token = c.Evicted(layer, head, i);
      sum += weights[i] *
             LoadElement(kv.Row(plane, token / per_block, layer, token % per_block, head) + at, kv.dtype);
    }
    StoreElement(to + at, kv.dtype, sum / all);
  }
}

// K or V of one layer's part of one destination block.
template <typename Team>
KVPOOL_HOST_DEVICE void MergePlane(const Team& team, const MergeContext& c, const KvPlane& plane,
                                   uint32_t block, uint32_t layer) {
  if (plane.head_dim == 0) return;
  const GatherRequest& gather = c.request.gather;
  const uint32_t heads = gather.from.shape.kv_heads, per_block = gather.from.shape.tokens_per_block;
  const uint32_t first = block * per_block;
  const uint32_t count = gather.kept_tokens - first < per_block ? gather.kept_tokens - first : per_block;
  for (uint32_t row = team.row(); row < count * heads; row += team.rows()) {
    const uint32_t token = row / heads, head = row % heads;
    const uint64_t within = plane.offset_bytes + layer * plane.layer_stride_bytes +
                            token * plane.token_stride_bytes + head * plane.head_stride_bytes;
    MergeRow(team, c, plane, layer, head, first + token,
             reinterpret_cast<unsigned char*>(gather.to_blocks[block] + within));
  }
}

// One layer's part of one destination block.
template <typename Team>
KVPOOL_HOST_DEVICE void MergeLayer(const Team& team, const MergeContext& c, uint32_t block, uint32_t layer) {
  MergePlane(team, c, c.request.gather.from.k, block, layer);
  MergePlane(team, c, c.request.gather.from.v, block, layer);
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_MERGE_ROWS_H_
