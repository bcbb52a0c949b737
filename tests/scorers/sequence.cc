#include "tests/scorers/sequence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "cuda/base/stamp.h"
#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/parts/element.h"
#include "proto/support/status_macros.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers {
namespace {

// The nearest representable number, found by trial: slow, but it depends on only one of the conversions
// under test.
template <KvDtype dtype, typename Storage>
Storage Nearest(double x) {
  static const std::vector<std::pair<float, Storage>> sorted = [] {
    std::vector<std::pair<float, Storage>> all;
    for (uint32_t code = 0; code < (sizeof(Storage) == 1 ? 256u : 65536u); ++code) {
      const float value = Element<dtype>::Load(static_cast<Storage>(code));
      if (std::isfinite(value)) all.emplace_back(value, static_cast<Storage>(code));
    }
    std::sort(all.begin(), all.end());
    return all;
  }();
  auto above = std::lower_bound(sorted.begin(), sorted.end(), static_cast<float>(x),
                                [](const auto& entry, float wanted) { return entry.first < wanted; });
  if (above == sorted.end()) return sorted.back().second;
  if (above == sorted.begin()) return above->second;
  return x - std::prev(above)->first < above->first - x ? std::prev(above)->second : above->second;
}

struct Strides {
  uint64_t layer, token, head, dim;  // strides in elements
};

Strides StridesOf(const SequenceOptions& o, uint32_t dim, bool keys) {
  const uint64_t b = o.tokens_per_block, h = o.heads;
  switch (o.arrangement) {
    case Arrangement::kTokenHeadDim:
      return {b * h * dim, h * dim, dim, 1};
    case Arrangement::kHeadTokenDim:
      return {b * h * dim, dim, b * dim, 1};
    case Arrangement::kColumnMajorKeys:
      return keys ? Strides{b * h * dim, 1, b * dim, b} : Strides{b * h * dim, dim, b * dim, 1};
    case Arrangement::kScattered:
      return {1, o.layers * dim * h * 3, o.layers * dim * 3, o.layers * 3};
  }
  return {};
}

}  // namespace

uint64_t Random::Next() { return MixBits(x_ += 0x9e3779b97f4a7c15u); }

double Random::Normal() {
  const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
  return radius * std::cos(6.283185307179586 * Uniform());
}

Sequence::Sequence(const SequenceOptions& o, const Maker& maker) {
  kv_.dtype = o.dtype;
  kv_.shape = {.layers = o.layers,
               .kv_heads = o.heads,
               .tokens_per_block = o.tokens_per_block,
               .tokens = o.tokens,
               .k_head_dim = o.k_dim,
               .v_head_dim = o.v_dim};
  const uint64_t element = BytesOf(o.dtype);
  uint64_t bytes = 0;
  for (const bool keys : {true, false}) {
    KvPlane& plane = keys ? kv_.k : kv_.v;
    plane.head_dim = keys ? o.k_dim : o.v_dim;
    if (plane.head_dim == 0) continue;
    const Strides s = StridesOf(o, plane.head_dim, keys);
    plane.offset_bytes = bytes;
    plane.layer_stride_bytes = s.layer * element;
    plane.token_stride_bytes = s.token * element;
    plane.head_stride_bytes = s.head * element;
    plane.dim_stride_bytes = s.dim * element;
    bytes += ((o.layers - 1) * s.layer + (o.tokens_per_block - 1) * s.token + (o.heads - 1) * s.head +
              (plane.head_dim - 1) * s.dim + 1) *
             element;
    bytes = (bytes + 3) / 4 * 4;
  }
  for (uint32_t block = 0; block < kv_.shape.blocks(); ++block) {
    // Memory that is not written holds NaN or large numbers.
    memory_.emplace_back(bytes, 0x7f);
    addresses_.push_back(reinterpret_cast<uint64_t>(memory_.back().data()));
  }
  kv_.blocks = addresses_.data();
  Random random(o.seed);
  for (const bool value : {false, true}) {
    const KvPlane& plane = value ? kv_.v : kv_.k;
    for (uint32_t l = 0; l < o.layers; ++l)
      for (uint32_t t = 0; t < o.tokens; ++t)
        for (uint32_t h = 0; h < o.heads; ++h)
          for (uint32_t d = 0; d < plane.head_dim; ++d)
            Put(plane, l, t, h, d, maker ? maker(value, l, t, h, d) : random.Normal());
  }
}

double Sequence::Get(const KvPlane& plane, uint32_t layer, uint32_t token, uint32_t head,
                     uint32_t dim) const {
  const uint32_t b = kv_.shape.tokens_per_block;
  return LoadElement(kv_.Row(plane, token / b, layer, token % b, head) + dim * plane.dim_stride_bytes,
                     kv_.dtype);
}

void Sequence::Put(const KvPlane& plane, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim,
                   double x) {
  const uint32_t b = kv_.shape.tokens_per_block;
  unsigned char* const to = const_cast<unsigned char*>(kv_.Row(plane, token / b, layer, token % b, head)) +
                            dim * plane.dim_stride_bytes;
  const auto store = [to](auto element) { std::memcpy(to, &element, sizeof(element)); };
  switch (kv_.dtype) {
    case KvDtype::kF32:
      return store(static_cast<float>(x));
    case KvDtype::kF16:
      return store(Nearest<KvDtype::kF16, uint16_t>(x));
    case KvDtype::kBf16:
      return store(Nearest<KvDtype::kBf16, uint16_t>(x));
    case KvDtype::kFp8E4m3:
      return store(Nearest<KvDtype::kFp8E4m3, uint8_t>(x));
    case KvDtype::kFp8E5m2:
      return store(Nearest<KvDtype::kFp8E5m2, uint8_t>(x));
  }
}

double Sequence::Norm(bool value, uint32_t layer, uint32_t token, uint32_t head) const {
  const KvPlane& plane = value ? kv_.v : kv_.k;
  double square = 0;
  for (uint32_t d = 0; d < plane.head_dim; ++d) square += std::pow(Get(plane, layer, token, head, d), 2);
  return std::sqrt(square);
}

Rows RandomRows(const KvShape& shape, uint32_t rows, uint32_t tokens, uint64_t seed) {
  Random random(seed);
  Rows all(rows);
  for (std::vector<uint32_t>& row : all) {
    for (uint32_t t = 0; t < shape.tokens; ++t) row.push_back(t);
    while (row.size() > tokens) row.erase(row.begin() + random.Below(row.size()));
  }
  return all;
}

absl::StatusOr<TestScores> ScoreSequence(const KvView& kv, const Signals& signals, const std::string& policy,
                                         const TestSettings& settings, ScoreRequest request,
                                         uint32_t threads) {
  ASSIGN_OR_RETURN(request.policy, BindPolicy(policy, settings));
  request.shape = kv.shape;
  std::unique_ptr<KvCompute> host;
  KvCompute* const compute = TestOrHostCompute(&host, threads);
  ASSIGN_OR_RETURN(const lab::StagedSequence staged, lab::StagedSequence::Make(compute, kv, signals));
  ASSIGN_OR_RETURN(lab::ScoredSequence scored, lab::ScoreStaged(compute, staged, request));
  return TestScores{.tokens = std::move(scored.tokens),
                    .blocks = std::move(scored.blocks),
                    .spreads = std::move(scored.spreads)};
}

}  // namespace kvpool::scorers
