// Tokens that leave a sequence are added to a state of constant size (LESS, arXiv 2402.09398). In each plane, with
// trained W1, W2 and W3 as kvpool.v1.DISPOSITION_LESS has them:
//
//   psi(k) = |gelu(gelu(k W1) W2) W3|                           [features]
//   state  = before + sum over e that leave of psi(k_e)^T [v_e, 1]   [features][v_head_dim + 1]
//
//   Fold   the sum over each share of a plane's tokens that leave, in tiles
//   Sum    the state: that before, and the shares' sums, in the order of the sequence
//
// A token takes no part where psi or v is not finite. Sums are in f32, and in the same order on every device.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_FOLD_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_FOLD_ROWS_H_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/gelu.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// What the lanes of a team share while they work at a tile.
struct FoldTile {
  static constexpr uint32_t kTokens = 8;
  static constexpr uint32_t kMostKeyDim = 256;
  static constexpr uint32_t kMostHidden = 512;
  static constexpr uint32_t kMostFeatures = 64;
  alignas(16) float keys[kMostKeyDim *
                         kTokens];  // [k_head_dim][kTokens]; once they are used, two layers' features
  alignas(16) float hidden[kMostHidden * kTokens];  // [hidden][kTokens]
  const unsigned char* values[kTokens];             // rows of V
  uint32_t counts[kTokens];                         // 1: the token takes part

  KVPOOL_HOST_DEVICE float* inner() { return keys; }                          // [features][kTokens]
  KVPOOL_HOST_DEVICE float* psi() { return keys + kMostFeatures * kTokens; }  // [features][kTokens]
};
static_assert(2 * FoldTile::kMostFeatures <= FoldTile::kMostKeyDim);

// The arguments of a fold.
struct FoldRequest {
  KvView from;
  // Ascending indices of the tokens that leave: evicted[layer * layer_stride + head * head_stride + i]. A stride of 0 says
  // that the same tokens leave all layers or heads.
  const uint32_t* evicted = nullptr;
  uint64_t evicted_layer_stride = 0;
  uint64_t evicted_head_stride = 0;
  uint32_t evicted_tokens = 0;
  uint32_t features = 0;
  uint32_t hidden = 0;
  const float* weights =
      nullptr;  // a plane's begin at layer * layer_stride + head * head_stride, which count floats
  uint64_t weights_layer_stride = 0;
  uint64_t weights_head_stride = 0;
  const float* before = nullptr;  // [planes][features][v_head_dim + 1]; null: zeros
  float* state = nullptr;         // the same shape; not the same memory

  // Floats of a plane.
  KVPOOL_HOST_DEVICE uint64_t StateFloats() const { return uint64_t{features} * (from.shape.v_head_dim + 1); }
  KVPOOL_HOST_DEVICE uint64_t WeightFloats() const {
    return uint64_t{hidden} * (from.shape.k_head_dim + features) + uint64_t{features} * features;
  }
};

// What the passes hand on to each other.
struct FoldContext {
  static constexpr uint32_t kShareTokens = 1024;
  FoldRequest request;
  float* sums = nullptr;         // [planes][shares][features][v_head_dim + 1]
  uint32_t* of_share = nullptr;  // [planes][shares] tokens that took part
  uint32_t* folded = nullptr;    // [planes] the same

  KVPOOL_HOST_DEVICE uint32_t shares() const {
    return (request.evicted_tokens + kShareTokens - 1) / kShareTokens;
  }
};

// Sets the pointers of `context` to arrays behind `address`, and returns their bytes.
inline uint64_t ArrangeFold(uint64_t address, FoldContext* context) {
  const uint64_t planes = context->request.from.shape.planes(), shares = planes * context->shares();
  uint64_t at = address;
  const auto take = [&at](auto** array, uint64_t count) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(at);
    at += count * sizeof(**array);
  };
  take(&context->sums, shares * context->request.StateFloats());
  take(&context->of_share, shares);
  take(&context->folded, planes);
  return at - address;
}

// Sets tile->counts and tile->values of the tokens from `first` on, and their keys.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void LoadFoldTile(const Team& team, const FoldRequest& request, uint32_t layer,
                                     uint32_t head, uint32_t first, uint32_t tokens, FoldTile* tile) {
  using Storage = typename Element<dtype>::Storage;
  const KvView& kv = request.from;
  const uint32_t dim = kv.k.head_dim;
  const uint32_t* const evicted =
      request.evicted + layer * request.evicted_layer_stride + head * request.evicted_head_stride + first;
  for (uint32_t i = team.id(); i < FoldTile::kTokens * dim; i += team.count()) {
    const uint32_t token = i / dim, d = i % dim;
    float element = 0;
    if (token < tokens) {
      const unsigned char* const at = kv.KeyRow(layer, head, evicted[token]) + d * kv.k.dim_stride_bytes;
      element = Element<dtype>::Load(*reinterpret_cast<const Storage*>(at));
    }
    tile->keys[d * FoldTile::kTokens + token] = element;
  }
  for (uint32_t token = team.row(); token < FoldTile::kTokens; token += team.rows()) {
    float norm = NAN;
    const unsigned char* value = nullptr;
    if (token < tokens) {
      value = kv.ValueRow(layer, head, evicted[token]);
      norm = kv.v.dim_stride_bytes == sizeof(Storage)
                 ? SumOverRow<dtype, true, RowOp::kSquare>(team, value, kv.v.dim_stride_bytes, kv.v.head_dim,
                                                           nullptr)
                 : SumOverRow<dtype, false, RowOp::kSquare>(team, value, kv.v.dim_stride_bytes, kv.v.head_dim,
                                                            nullptr);
    }
    if (team.in_row() != 0) continue;
    tile->values[token] = value;
    tile->counts[token] = IsFinite(norm) ? 1 : 0;
  }
}

// Computes tile->psi() from the keys, and takes tokens out of tile->counts where it is not finite.
template <typename Team>
KVPOOL_HOST_DEVICE void ComputePsi(const Team& team, const FoldRequest& request, const float* w1,
                                   FoldTile* tile) {
  constexpr uint32_t kTokens = FoldTile::kTokens;
  const uint32_t dim = request.from.shape.k_head_dim, hidden = request.hidden, features = request.features;
  const float* const w2 = w1 + dim * hidden;
  const float* const w3 = w2 + hidden * features;
  for (uint32_t h = team.id(); h < hidden; h += team.count()) {
    float sums[kTokens] = {};
    for (uint32_t d = 0; d < dim; ++d) {
      const float weight = w1[d * hidden + h];
      for (uint32_t token = 0; token < kTokens; ++token) {
        sums[token] += weight * tile->keys[d * kTokens + token];
      }
    }
    for (uint32_t token = 0; token < kTokens; ++token) tile->hidden[h * kTokens + token] = Gelu(sums[token]);
  }
  team.Sync();
  for (uint32_t i = team.id(); i < features * kTokens; i += team.count()) {
    const uint32_t j = i / kTokens, token = i % kTokens;
    float sum = 0;
    for (uint32_t h = 0; h < hidden; ++h) sum += w2[h * features + j] * tile->hidden[h * kTokens + token];
    tile->inner()[i] = Gelu(sum);
  }
  team.Sync();
  for (uint32_t i = team.id(); i < features * kTokens; i += team.count()) {
    const uint32_t j = i / kTokens, token = i % kTokens;
    float sum = 0;
    for (uint32_t l = 0; l < features; ++l) sum += w3[l * features + j] * tile->inner()[l * kTokens + token];
    tile->psi()[i] = fabsf(sum);
  }
  team.Sync();
  for (uint32_t token = team.id(); token < kTokens; token += team.count()) {
    for (uint32_t j = 0; j < features; ++j) {
      if (!IsFinite(tile->psi()[j * kTokens + token])) tile->counts[token] = 0;
    }
  }
  team.Sync();
}

// One share of a plane.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE void FoldShare(const Team& team, const FoldContext& c, uint32_t plane, uint32_t share,
                                  FoldTile* tile) {
  using Storage = typename Element<dtype>::Storage;
  constexpr uint32_t kTokens = FoldTile::kTokens;
  const FoldRequest& request = c.request;
  const KvView& kv = request.from;
  const uint32_t layer = plane / kv.shape.kv_heads, head = plane % kv.shape.kv_heads;
  const uint32_t width = kv.v.head_dim + 1, floats = static_cast<uint32_t>(request.StateFloats());
  const float* const weights =
      request.weights + layer * request.weights_layer_stride + head * request.weights_head_stride;
  const uint64_t of_all = uint64_t{plane} * c.shares() + share;
  float* const sums = c.sums + of_all * floats;
  // Each sum has one lane from here to the end.
  for (uint32_t i = team.id(); i < floats; i += team.count()) sums[i] = 0;
  const uint32_t first = share * FoldContext::kShareTokens;
  const uint32_t left = request.evicted_tokens - first;
  const uint32_t all = left < FoldContext::kShareTokens ? left : FoldContext::kShareTokens;
  uint32_t folded = 0;
  for (uint32_t begin = 0; begin < all; begin += kTokens) {
    const uint32_t tokens = all - begin < kTokens ? all - begin : kTokens;
    LoadFoldTile<dtype>(team, request, layer, head, first + begin, tokens, tile);
    team.Sync();
    ComputePsi(team, request, weights, tile);
    for (uint32_t i = team.id(); i < floats; i += team.count()) {
      const uint32_t j = i / width, d = i % width;
      float sum = 0;
      for (uint32_t token = 0; token < kTokens; ++token) {
        if (tile->counts[token] == 0) continue;
        float value = 1;
        if (d < kv.v.head_dim) {
          const unsigned char* const at = tile->values[token] + d * kv.v.dim_stride_bytes;
          value = Element<dtype>::Load(*reinterpret_cast<const Storage*>(at));
        }
        sum += tile->psi()[j * kTokens + token] * value;
      }
      sums[i] += sum;
    }
    for (uint32_t token = 0; token < kTokens; ++token) folded += tile->counts[token];
    team.Sync();
  }
  if (team.id() == 0) c.of_share[of_all] = folded;
}

// One plane.
template <typename Team>
KVPOOL_HOST_DEVICE void SumFolds(const Team& team, const FoldContext& c, uint32_t plane) {
  const FoldRequest& request = c.request;
  const uint64_t floats = request.StateFloats(), shares = c.shares();
  for (uint64_t i = team.id(); i < floats; i += team.count()) {
    float sum = request.before == nullptr ? 0 : request.before[plane * floats + i];
    for (uint64_t share = 0; share < shares; ++share) sum += c.sums[(plane * shares + share) * floats + i];
    request.state[plane * floats + i] = sum;
  }
  if (team.id() != 0) return;
  uint32_t folded = 0;
  for (uint64_t share = 0; share < shares; ++share) folded += c.of_share[plane * shares + share];
  c.folded[plane] = folded;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_FOLD_ROWS_H_
