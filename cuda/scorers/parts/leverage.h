// Leverage of keys by a sketch: how far a key lies from the mean, on the scale of how all of them vary in its direction.
//
// With x_t the keys of some tokens, RoPE's rotation undone and the mean taken off, and a matrix S of d x k normally
// distributed numbers over sqrt(k):
//
//   G = sum_t S'x_t x_t'S + 0.01 I = L L'
//   leverage(t) = x_t'S G^-1 S'x_t = |W x_t|^2,   W = L^-1 S'
//
// S is the same for all planes and all calls: element (d, j) is sqrt(-2 ln u) cos(2 pi v), with u - 2^-24 and v the upper
// and the next 24 bits of MixBits(j * 2^32 + d + 1), over 2^24. Keys are read three times, for the mean, G and the
// leverage, 32 tokens at once. (arXiv 2507.08143, section 3; kvpress's LeverageScorePress, which draws another S each
// time.)
#ifndef KVPOOL_CUDA_SCORERS_PARTS_LEVERAGE_H_
#define KVPOOL_CUDA_SCORERS_PARTS_LEVERAGE_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/stamp.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/rotation.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

inline constexpr uint32_t kMaxSketch = 64;

struct LeverageTerms {
  uint32_t sketch = 0;  // k, at most kMaxSketch
  // RoPE's frequencies in radians for each position, k_head_dim / 2 of them; where null, theta^(-2 f / d). A theta of 0
  // leaves the keys as they are cached.
  const float* frequencies = nullptr;
  float theta = 0;
  bool interleaved = false;  // RoPE turns 2f and 2f + 1 together, not f and f + d / 2.
  // Tokens [first, end) are those that count. Token t is at position t.
  uint32_t first = 0;
  uint32_t end = 0;
};

// The arrays that LeverageOf works in, one behind the other in a policy's own scratch, each at a multiple of 64 bytes.
// Their addresses are computed where they are needed, since a GPU has no registers to hold them all.
struct LeverageScratch {
  static constexpr uint32_t kTile = 32;  // tokens at once
  struct Turn {
    float cos;
    float sin;
  };

  float* start;
  uint32_t dim;
  uint32_t sketch;

  KVPOOL_HOST_DEVICE uint64_t row() const { return (dim + 15) / 16 * 16; }
  // Columns of the whitener and the projected keys; those from `sketch` on are 0.
  KVPOOL_HOST_DEVICE uint32_t columns() const { return (sketch + 15) / 16 * 16; }
  KVPOOL_HOST_DEVICE uint64_t floats() const {
    return 80 + (70 + columns()) * row() + 32 * columns() + 2 * sketch * columns();
  }

  KVPOOL_HOST_DEVICE float* valid() const { return start; }  // [kTile]: 1 for a key of finite norm, else 0
  KVPOOL_HOST_DEVICE float* squares() const { return start + 32; }      // [kTile]: of the projected keys
  KVPOOL_HOST_DEVICE float* counted() const { return start + 64; }      // valid keys
  KVPOOL_HOST_DEVICE float* frequencies() const { return start + 80; }  // [dim / 2]
  // [dim / 2]: RoPE's turn of the tile's first token
  KVPOOL_HOST_DEVICE Turn* tile_turns() const { return reinterpret_cast<Turn*>(start + 80 + row()); }
  KVPOOL_HOST_DEVICE double* sums() const {
    return reinterpret_cast<double*>(start + 80 + 2 * row());
  }  // [dim]
  // [dim]: 0 until it is known
  KVPOOL_HOST_DEVICE double* mean() const { return reinterpret_cast<double*>(start + 80 + 4 * row()); }
  KVPOOL_HOST_DEVICE float* tile() const { return start + 80 + 6 * row(); }  // [kTile][dim]
  // [kTile][dim / 2]: RoPE's turn of a token against the tile's first
  KVPOOL_HOST_DEVICE Turn* turns() const { return reinterpret_cast<Turn*>(start + 80 + 38 * row()); }
  // [dim][columns]: S, then W'
  KVPOOL_HOST_DEVICE float* whitener() const { return start + 80 + 70 * row(); }
  // [kTile][columns]
  KVPOOL_HOST_DEVICE float* projected() const { return start + 80 + (70 + columns()) * row(); }
  // [sketch][sketch]: G, then L, and L^-1 transposed above the diagonal
  KVPOOL_HOST_DEVICE double* gram() const { return reinterpret_cast<double*>(projected() + 32 * columns()); }
};

// For PolicyFacts::scratch_floats.
// Multiplications of a token: its key twice with the sketch and once with the triangle, and its part of what a plane takes
// whatever its tokens, the sketch's functions and the triangle's inverse.
inline double LeverageProducts(const KvShape& shape, uint32_t sketch) {
  constexpr double kFunctions = 32;  // A log, a root and a cosine take about as long.
  const double k = sketch, dim = shape.k_head_dim;
  return 2 * dim * k + k * k / 2 + (dim * k * (k / 2 + kFunctions) + k * k * k / 6) / shape.tokens;
}

inline uint64_t LeverageScratchFloats(const KvShape& shape, uint32_t sketch) {
  return LeverageScratch{nullptr, shape.k_head_dim, sketch}.floats();
}

// The element of S' in row `j`, before the division by sqrt(k).
KVPOOL_HOST_DEVICE inline float SketchElement(uint32_t j, uint32_t d) {
  const uint64_t bits = MixBits((uint64_t{j} << 32) + d + 1);
  const double u = (static_cast<double>(bits >> 40) + 1) * 0x1p-24;
  const double v = static_cast<double>(bits >> 16 & 0xffffff) * 0x1p-24;
  return static_cast<float>(sqrt(-2 * log(u)) * RotationOf(v * 6.28318530717958647693).cos);
}

// The steps of LeverageOf. All lanes of the team make each call.
template <typename Team>
class LeverageSteps {
 public:
  using Scratch = LeverageScratch;
  static constexpr uint32_t kTile = Scratch::kTile;

  KVPOOL_HOST_DEVICE LeverageSteps(const Team& team, const Plane& plane, const LeverageTerms& terms)
      : team_(team),
        plane_(plane),
        terms_(terms),
        dim_(plane.kv->shape.k_head_dim),
        at_{plane.own_scratch(), dim_, terms.sketch} {}

  // One loop for all passes: a GPU has the registers of one product, not of one for each pass.
  KVPOOL_HOST_DEVICE void Run(float* leverages) {
    Prepare();
    for (uint32_t pass = kMean; pass <= kLeverage; ++pass) {
      for (uint32_t from = terms_.first; from < terms_.end; from += kTile) {
        const uint32_t left = terms_.end - from, count = left < kTile ? left : kTile;
        Load(from, count);
        if (pass == kMean) {
          AddToMean(count);
          continue;
        }
        Project(count);
        if (pass == kGram) {
          AddToGram(count);
          continue;
        }
        for (uint32_t t = team_.id(); t < count; t += team_.count()) {
          leverages[from + t] = at_.valid()[t] != 0 ? at_.squares()[t] : NAN;
        }
      }
      team_.Sync();
      if (pass == kMean) FinishMean();
      if (pass == kGram) {
        Factorise();
        Invert();
      }
    }
  }

 private:
  enum Pass : uint32_t { kMean, kGram, kLeverage };

  KVPOOL_HOST_DEVICE bool turned() const { return terms_.theta > 0 || terms_.frequencies != nullptr; }
  KVPOOL_HOST_DEVICE uint32_t pairs() const { return turned() ? dim_ / 2 : 0; }

  KVPOOL_HOST_DEVICE void Prepare() {
    const uint32_t sketch = terms_.sketch;
    const double root = sqrt(static_cast<double>(sketch));
    for (uint32_t i = team_.id(); i < dim_ * at_.columns(); i += team_.count()) {
      const uint32_t d = i / at_.columns(), column = i % at_.columns();
      at_.whitener()[i] = column < sketch ? static_cast<float>(double{SketchElement(column, d)} / root) : 0;
    }
    for (uint32_t i = team_.id(); i < sketch * sketch; i += team_.count()) at_.gram()[i] = 0;
    for (uint32_t d = team_.id(); d < dim_; d += team_.count()) at_.sums()[d] = at_.mean()[d] = 0;
    if (team_.id() == 0) *at_.counted() = 0;
    for (uint32_t f = team_.id(); f < pairs(); f += team_.count()) {
      const double exponent = -2.0 * f / dim_;
      at_.frequencies()[f] = terms_.frequencies != nullptr
                                 ? terms_.frequencies[f]
                                 : static_cast<float>(exp(exponent * log(double{terms_.theta})));
      for (uint32_t t = 0; t < kTile; ++t) {
        const Rotation turn = RotationOf(double{at_.frequencies()[f]} * t);
        at_.turns()[t * pairs() + f] = {static_cast<float>(turn.cos), static_cast<float>(turn.sin)};
      }
    }
    team_.Sync();
  }

  // Loads the keys of tokens [from, from + count) as the tile.
  KVPOOL_HOST_DEVICE void Load(uint32_t from, uint32_t count) {
    team_.Sync();
    for (uint32_t f = team_.id(); f < pairs(); f += team_.count()) {
      const Rotation turn = RotationOf(double{at_.frequencies()[f]} * from);
      at_.tile_turns()[f] = {static_cast<float>(turn.cos), static_cast<float>(turn.sin)};
    }
    team_.Sync();
    WithDtype(plane_.kv->dtype, LoadTile{*this, from, count});
    team_.Sync();
  }

  struct LoadTile {
    const LeverageSteps& steps;
    uint32_t from;
    uint32_t count;

    template <KvDtype dtype>
    KVPOOL_HOST_DEVICE void Run() const {
      using Storage = typename Element<dtype>::Storage;
      const Team& team = steps.team_;
      const Scratch& at = steps.at_;
      const KvView& kv = *steps.plane_.kv;
      const uint32_t dim = steps.dim_, pairs = steps.pairs(), step = steps.terms_.interleaved ? 2 : 1;
      const uint32_t partner = steps.terms_.interleaved ? 1 : dim / 2;
      const uint64_t stride = kv.k.dim_stride_bytes;
      for (uint32_t t = team.row(); t < count; t += team.rows()) {
        const unsigned char* const row = kv.KeyRow(steps.plane_.layer, steps.plane_.head, from + t);
        const auto key = [&](uint32_t d) {
          return Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + d * stride));
        };
        float* const out = at.tile() + t * dim;
        float square = 0;
        for (uint32_t f = team.in_row(); f < pairs; f += team.row_width()) {
          const uint32_t d = f * step;
          const float a = key(d), b = key(d + partner);
          const auto far = at.tile_turns()[f], near = at.turns()[t * pairs + f];
          const float cos = far.cos * near.cos - far.sin * near.sin;
          const float sin = far.cos * near.sin + far.sin * near.cos;
          square += a * a + b * b;
          out[d] = static_cast<float>(double{a * cos + b * sin} - at.mean()[d]);
          out[d + partner] = static_cast<float>(double{b * cos - a * sin} - at.mean()[d + partner]);
        }
        for (uint32_t d = 2 * pairs + team.in_row(); d < dim; d += team.row_width()) {
          const float x = key(d);
          square += x * x;
          out[d] = static_cast<float>(double{x} - at.mean()[d]);
        }
        square = team.RowSum(square);
        if (team.in_row() == 0) at.valid()[t] = IsFinite(square) ? 1 : 0;
      }
    }
  };

  KVPOOL_HOST_DEVICE void AddToMean(uint32_t count) {
    if (team_.id() == 0) {
      for (uint32_t t = 0; t < count; ++t) *at_.counted() += at_.valid()[t];
    }
    for (uint32_t d = team_.id(); d < dim_; d += team_.count()) {
      for (uint32_t t = 0; t < count; ++t) {
        if (at_.valid()[t] != 0) at_.sums()[d] += double{at_.tile()[t * dim_ + d]};
      }
    }
  }
  // Tiles that are loaded later have the mean taken off.
  KVPOOL_HOST_DEVICE void FinishMean() {
    const double counted = *at_.counted() > 0 ? double{*at_.counted()} : 1;
    for (uint32_t d = team_.id(); d < dim_; d += team_.count()) at_.mean()[d] = at_.sums()[d] / counted;
  }

  // Multiplies the tile's keys with the whitener, and sums the squares of what comes. A lane has kRows tokens and
  // kColumns columns at once.
  KVPOOL_HOST_DEVICE void Project(uint32_t count) {
    constexpr uint32_t kRows = 4, kColumns = Team::kColumns;
    const uint32_t columns = at_.columns(), packs = (terms_.sketch + kColumns - 1) / kColumns;
    for (uint32_t i = team_.id(); i < (count + kRows - 1) / kRows * packs; i += team_.count()) {
      const uint32_t first = i / packs * kRows, column = i % packs * kColumns;
      const float* x[kRows];
      KVPOOL_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        x[r] = at_.tile() + (first + r < count ? first + r : count - 1) * dim_;
      }
      const float* w = at_.whitener() + column;
      float sums[kRows][kColumns] = {};
      for (uint32_t d = 0; d < dim_; ++d, w += columns) {
        KVPOOL_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          KVPOOL_UNROLL
          for (uint32_t c = 0; c < kColumns; ++c) sums[r][c] += x[r][d] * w[c];
        }
      }
      KVPOOL_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        if (first + r >= count) continue;
        KVPOOL_UNROLL
        for (uint32_t c = 0; c < kColumns; ++c)
          at_.projected()[(first + r) * columns + column + c] = sums[r][c];
      }
    }
    team_.Sync();
    for (uint32_t t = team_.row(); t < count; t += team_.rows()) {
      float square = 0;
      for (uint32_t j = team_.in_row(); j < terms_.sketch; j += team_.row_width()) {
        const float x = at_.projected()[t * columns + j];
        square += x * x;
      }
      square = team_.RowSum(square);
      if (team_.in_row() == 0) at_.squares()[t] = square;
    }
    team_.Sync();
  }

  KVPOOL_HOST_DEVICE void AddToGram(uint32_t count) {
    const uint32_t sketch = terms_.sketch;
    for (uint32_t i = team_.id(); i < sketch * sketch; i += team_.count()) {
      const uint32_t row = i / sketch, column = i % sketch;
      if (column > row) continue;
      double sum = 0;
      for (uint32_t t = 0; t < count; ++t) {
        const float* const x = at_.projected() + t * at_.columns();
        if (at_.valid()[t] != 0) sum += double{x[row]} * double{x[column]};
      }
      at_.gram()[i] += sum;
    }
  }

  // Cholesky's factor in place. G's least eigenvalue is the ridge, and so no pivot is below that but by rounding.
  KVPOOL_HOST_DEVICE void Factorise() {
    constexpr double kRidge = 0.01;
    const uint32_t n = terms_.sketch;
    double* const g = at_.gram();
    for (uint32_t i = team_.id(); i < n; i += team_.count()) g[i * n + i] += kRidge;
    for (uint32_t j = 0; j < n; ++j) {
      team_.Sync();
      if (team_.id() == 0) g[j * n + j] = sqrt(g[j * n + j] > kRidge ? g[j * n + j] : kRidge);
      team_.Sync();
      for (uint32_t i = j + 1 + team_.id(); i < n; i += team_.count()) g[i * n + j] /= g[j * n + j];
      team_.Sync();
      const uint32_t rest = n - j - 1;
      for (uint32_t i = team_.id(); i < rest * rest; i += team_.count()) {
        const uint32_t row = j + 1 + i / rest, column = j + 1 + i % rest;
        if (column <= row) g[row * n + column] -= g[row * n + j] * g[column * n + j];
      }
    }
    team_.Sync();
  }

  // W = L^-1 S'. A lane has a column of L^-1, and then one of W, whose rows it makes from the last to the first.
  KVPOOL_HOST_DEVICE void Invert() {
    const uint32_t n = terms_.sketch;
    double* const g = at_.gram();
    for (uint32_t c = team_.id(); c < n; c += team_.count()) {
      for (uint32_t i = c + 1; i < n; ++i) {
        double sum = g[i * n + c] / g[c * n + c];
        for (uint32_t j = c + 1; j < i; ++j) sum += g[i * n + j] * g[c * n + j];
        g[c * n + i] = -sum / g[i * n + i];
      }
    }
    team_.Sync();
    for (uint32_t d = team_.id(); d < dim_; d += team_.count()) {
      float* const w = at_.whitener() + d * at_.columns();
      for (uint32_t i = n; i-- > 0;) {
        double sum = double{w[i]} / g[i * n + i];
        for (uint32_t j = 0; j < i; ++j) sum += g[j * n + i] * double{w[j]};
        w[i] = static_cast<float>(sum);
      }
    }
    team_.Sync();
  }

  const Team& team_;
  const Plane& plane_;
  const LeverageTerms& terms_;
  const uint32_t dim_;
  Scratch at_;
};

// Fills leverages[first, end): NaN for a key whose norm is not finite, which has no part in the others'. REQUIRES: the
// policy's scratch_floats are LeverageScratchFloats of the sketch, or more.
template <typename Team>
KVPOOL_HOST_DEVICE void LeverageOf(const Team& team, const Plane& plane, const LeverageTerms& terms,
                                   float* leverages) {
  LeverageSteps<Team>(team, plane, terms).Run(leverages);
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_LEVERAGE_H_
