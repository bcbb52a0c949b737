#include "cuda/scorers/host/host_window.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cuda/scorers/host/host_vectors.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/window.h"

namespace kvpool::scorers {
namespace {

// Keys that are converted to floats at one time: a multiple of every kernel's kTokens, few enough for the
// first cache.
constexpr uint32_t kTile = 24;
constexpr uint32_t kMaxChunkRows = 32;
// The tokens whose terms are summed in f32 before they are added to a double.
constexpr uint32_t kTokensPerSum = 256;
constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

constexpr uint64_t Aligned(uint64_t floats) { return (floats + 15) / 16 * 16; }

template <int kLanes>
struct Vector {
  typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
  typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
};
template <int kLanes>
using Floats = typename Vector<kLanes>::Floats;
template <int kLanes>
using Ints = typename Vector<kLanes>::Ints;

template <int kLanes>
KVPOOL_INLINE Floats<kLanes> All(float x) {
  return Floats<kLanes>{} + x;
}
template <int kLanes>
KVPOOL_INLINE Floats<kLanes>& At(float* address) {
  return *reinterpret_cast<Floats<kLanes>*>(address);
}

template <int kLanes>
KVPOOL_INLINE float SumOfLanes(const Floats<kLanes>& x) {
  if constexpr (kLanes == 16) {
    return SumOfLanes<8>(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (kLanes == 8) {
    return SumOfLanes<4>(__builtin_shufflevector(x, x, 0, 1, 2, 3) +
                         __builtin_shufflevector(x, x, 4, 5, 6, 7));
  } else {
    const Floats<4> two = x + __builtin_shufflevector(x, x, 2, 3, 0, 1);
    return two[0] + two[1];
  }
}

template <typename V>
KVPOOL_INLINE V Greater(const V& a, const V& b) {
  return a > b ? a : b;
}
template <int kLanes>
KVPOOL_INLINE float MostOfLanes(const Floats<kLanes>& x) {
  if constexpr (kLanes == 16) {
    return MostOfLanes<8>(Greater<Floats<8>>(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                                             __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)));
  } else if constexpr (kLanes == 8) {
    return MostOfLanes<4>(Greater<Floats<4>>(__builtin_shufflevector(x, x, 0, 1, 2, 3),
                                             __builtin_shufflevector(x, x, 4, 5, 6, 7)));
  } else {
    const Floats<4> two = Greater<Floats<4>>(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
    return two[0] > two[1] ? two[0] : two[1];
  }
}

// e^x for x <= 0 to 2 units in the last place, by 2^n times a polynomial on ±ln(2)/2 (Cephes' expf); NaN
// stays NaN.
template <int kLanes>
KVPOOL_INLINE Floats<kLanes> Exp(const Floats<kLanes>& x) {
  constexpr float kLeast = -87.3f,
                  kRound = 0x1.8p23f;  // Adding kRound leaves the nearest integer in the low bits.
  const Floats<kLanes> in_range = x < kLeast ? All<kLanes>(kLeast) : x;
  const Floats<kLanes> shifted = in_range * 1.44269504088896341f + kRound;
  const Floats<kLanes> n = shifted - kRound;
  const Floats<kLanes> r = in_range - n * 0.693359375f - n * -2.12194440e-4f;
  Floats<kLanes> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints<kLanes> power = (Ints<kLanes>)shifted << 23;
  y = (Floats<kLanes>)((Ints<kLanes>)y + power);
  // x is NaN: y is not, since bits were added to it.
  return x < kLeast ? All<kLanes>(0) : x == x ? y : x;
}

// ln(x) for normal x > 0 (Cephes' logf).
template <int kLanes>
KVPOOL_INLINE Floats<kLanes> Log(const Floats<kLanes>& x) {
  constexpr int32_t kRootHalf = 0x3f3504f3;
  const Ints<kLanes> moved = (Ints<kLanes>)x - kRootHalf;
  const Ints<kLanes> exponent = moved >> 23;
  const Floats<kLanes> f = (Floats<kLanes>)((moved & 0x7fffff) + kRootHalf) - 1.0f;
  const Floats<kLanes> e = __builtin_convertvector(exponent, Floats<kLanes>);
  Floats<kLanes> y = f * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  const Floats<kLanes> square = f * f;
  y = y * f * square + e * -2.12194440e-4f - square * 0.5f;
  return f + y + e * 0.693359375f;
}

// The layout of a thread's scratch, as offsets in floats.
struct ScratchLayout {
  explicit ScratchLayout(const KvShape& shape)
      : keys(Aligned(uint64_t{kMaxChunkRows} * shape.k_head_dim)),
        weights(keys + Aligned(uint64_t{kTile} * shape.k_head_dim)),
        mean(weights + (uint64_t{shape.tokens} + kTile) * kMaxChunkRows),
        squares(mean + Aligned(shape.tokens)),
        peak(squares + Aligned(shape.tokens)),
        end(peak + Aligned(shape.tokens)) {}
  uint64_t keys, weights, mean, squares, peak, end;
};

struct Scratch {
  Scratch(float* start, const ScratchLayout& at)
      : queries(start),
        keys(start + at.keys),
        weights(start + at.weights),
        mean(start + at.mean),
        squares(start + at.squares),
        peak(start + at.peak) {}
  float* queries;  // [k_head_dim][chunk rows]
  float* keys;     // [kTile][k_head_dim]
  float* weights;  // [tokens, rounded up to kTile][chunk rows]: logits, then their exponentials
  // [tokens] each, for the query head that is being computed: mean, sum of squared differences from
  // it, maximum.
  float* mean;
  float* squares;
  float* peak;
};

// Loads keys [first, first + kTile) of the plane as floats; 0 past the end.
void LoadKeys(const WindowPass& pass, uint32_t first, float* keys) {
  const ScoreContext& c = *pass.context;
  const KvShape& shape = c.shape();
  const uint32_t layer = pass.plane / shape.kv_heads, head = pass.plane % shape.kv_heads;
  const bool contiguous = c.kv.k.dim_stride_bytes == BytesOf(c.kv.dtype);
  const uint32_t row_bytes = shape.k_head_dim * BytesOf(c.kv.dtype);
  for (uint32_t i = 0; i < kTile; ++i) {
    float* const to = keys + uint64_t{i} * shape.k_head_dim;
    if (first + i >= shape.tokens) {
      std::fill_n(to, shape.k_head_dim, 0.0f);
      continue;
    }
    const unsigned char* const row = c.kv.KeyRow(layer, head, first + i);
    if (contiguous) {
      // Rows of one head lie apart, so the processor does not prefetch the next tile's by itself.
      if (first + i + kTile < shape.tokens) {
        const unsigned char* const ahead = c.kv.KeyRow(layer, head, first + i + kTile);
        for (uint32_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(ahead + at);
      }
      pass.widen(row, shape.k_head_dim, to);
      continue;
    }
    for (uint32_t d = 0; d < shape.k_head_dim; ++d) {
      to[d] = LoadElement(row + d * c.kv.k.dim_stride_bytes, c.kv.dtype);
    }
  }
}

// Rows [first, first + rows) of the plane's queries, at most kVectors vectors of them.
template <int kLanes, int kVectors, int kTokens>
class Chunk {
 public:
  static constexpr uint32_t kRows = kLanes * kVectors;
  using V = Floats<kLanes>;

  KVPOOL_INLINE Chunk(const WindowPass& pass, const Scratch& scratch, uint32_t first, uint32_t rows)
      : pass_(pass), c_(*pass.context), scratch_(scratch), first_(first), rows_(rows) {}

  KVPOOL_INLINE void Run() {
    LoadRows();
    Logits();
    Exponentials();
  }

  // The attention of row `i` of the plane to a token.
  KVPOOL_INLINE float Weight(uint32_t i, uint32_t token) const {
    return scratch_.weights[uint64_t{token} * kRows + (i - first_)] * inverse_[i - first_];
  }

  // -sum p ln(p + 1e-10) over all rows and the tokens before `end`, without NaN.
  KVPOOL_INLINE double Entropy(uint32_t end) const {
    double entropy = 0;
    for (uint32_t first = 0; first < end; first += kTokensPerSum) {
      V sum = {};
      for (uint32_t t = first; t < end && t < first + kTokensPerSum; ++t) {
        for (int v = 0; v < kVectors; ++v) {
          const V p = Weights(t, v);
          const V term = p * Log<kLanes>(p + 1e-10f);
          sum += p == p ? term : V{};
        }
      }
      entropy -= double{SumOfLanes<kLanes>(sum)};
    }
    return entropy;
  }

  // Adds rows [from, from + count) of the plane to the statistics of their query head, which have `before` of
  // its queries already.
  KVPOOL_INLINE void AddToHead(uint32_t from, uint32_t count, uint32_t before) {
    V mine[kVectors];
    for (uint32_t i = 0; i < kRows; ++i) {
      mine[i / kLanes][i % kLanes] = first_ + i >= from && first_ + i < from + count ? 1.0f : 0.0f;
    }
    const float n = static_cast<float>(count), share = n / static_cast<float>(before + count);
    for (uint32_t t = 0; t < c_.shape().tokens; ++t) {
      float mean = 0, own = 0, peak = 0;
      if (count == 1) {
        mean = peak = Weight(from, t);
      } else {
        Summarise(t, mine, n, &mean, &own, &peak);
      }
      if (before == 0) {
        scratch_.mean[t] = mean, scratch_.squares[t] = own, scratch_.peak[t] = peak;
        continue;
      }
      const float apart = mean - scratch_.mean[t];
      scratch_.mean[t] += apart * share;
      scratch_.squares[t] += own + apart * apart * static_cast<float>(before) * share;
      scratch_.peak[t] = GreaterOf(scratch_.peak[t], peak);
    }
  }

 private:
  // Mean of the weights of the `n` lanes that are `mine`, squares of their differences from it, and
  // the greatest.
  KVPOOL_INLINE void Summarise(uint32_t token, const V (&mine)[kVectors], float n, float* mean,
                               float* squares, float* peak) const {
    V p[kVectors], sum = {}, most = {}, apart = {};
    for (int v = 0; v < kVectors; ++v) {
      p[v] = mine[v] > 0.0f ? Weights(token, v) : V{};
      sum += p[v];
      most = Greater<V>(p[v], most);
    }
    *mean = SumOfLanes<kLanes>(sum) / n;
    for (int v = 0; v < kVectors; ++v) {
      const V difference = p[v] - *mean;
      apart += mine[v] > 0.0f ? difference * difference : V{};
    }
    *squares = SumOfLanes<kLanes>(apart);
    *peak = *mean == *mean ? MostOfLanes<kLanes>(most) : kNone;
  }

  KVPOOL_INLINE V Weights(uint32_t token, int vector) const {
    return At<kLanes>(scratch_.weights + uint64_t{token} * kRows + vector * kLanes) *
           At<kLanes>(const_cast<float*>(inverse_) + vector * kLanes);
  }

  KVPOOL_INLINE void LoadRows() {
    const uint32_t dim = c_.shape().k_head_dim;
    const float* const rows = c_.queries + c_.QueryFloats() * pass_.plane + uint64_t{first_} * dim;
    for (uint32_t i = 0; i < kRows; ++i) {
      for (uint32_t d = 0; d < dim; ++d) {
        scratch_.queries[d * kRows + i] = i < rows_ ? rows[uint64_t{i} * dim + d] : 0;
      }
      const uint32_t query = (first_ + i) % c_.signals.window.queries;
      seen_[i] = i < rows_ ? static_cast<int32_t>(KeysSeen(c_, query)) : 0;
    }
  }

  // The products of kTokens keys with all rows, whose sums stay in registers.
  KVPOOL_INLINE void Product(const float* keys, uint64_t dim, float* to) {
    V sums[kTokens][kVectors] = {};
    for (uint64_t d = 0; d < dim; ++d) {
      V query[kVectors];
      for (int v = 0; v < kVectors; ++v) query[v] = At<kLanes>(scratch_.queries + d * kRows + v * kLanes);
      for (int t = 0; t < kTokens; ++t) {
        for (int v = 0; v < kVectors; ++v) sums[t][v] += query[v] * keys[t * dim + d];
      }
    }
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kVectors; ++v) At<kLanes>(to + t * kRows + v * kLanes) = sums[t][v];
    }
  }

  // Computes the logits of all keys, -Inf where a query does not see the key and NaN where they are not
  // finite, and each row's greatest.
  KVPOOL_INLINE void Logits() {
    const KvShape& shape = c_.shape();
    V most[kVectors];
    for (int v = 0; v < kVectors; ++v) most[v] = All<kLanes>(-INFINITY);
    for (uint32_t first = 0; first < shape.tokens; first += kTile) {
      LoadKeys(pass_, first, scratch_.keys);
      float* const tile = scratch_.weights + uint64_t{first} * kRows;
      for (uint32_t t = 0; t < kTile; t += kTokens) {
        Product(scratch_.keys + uint64_t{t} * shape.k_head_dim, shape.k_head_dim, tile + uint64_t{t} * kRows);
      }
      const uint32_t count = std::min(kTile, shape.tokens - first);
      for (uint32_t t = 0; t < count; ++t) {
        for (int v = 0; v < kVectors; ++v) {
          V& logit = At<kLanes>(tile + t * kRows + v * kLanes);
          const Ints<kLanes>& seen = *reinterpret_cast<const Ints<kLanes>*>(seen_ + v * kLanes);
          const V finite = logit - logit == 0.0f ? logit : All<kLanes>(kNone);
          logit = seen > static_cast<int32_t>(first + t) ? finite : All<kLanes>(-INFINITY);
          most[v] = Greater<V>(logit, most[v]);
        }
      }
    }
    // 0 for a row that sees no key, so that its exponentials are 0.
    for (int v = 0; v < kVectors; ++v) {
      At<kLanes>(most_ + v * kLanes) = most[v] == -INFINITY ? V{} : most[v];
    }
  }

  // Replaces the logits by their exponentials relative to the greatest, and sums these.
  KVPOOL_INLINE void Exponentials() {
    const uint32_t tokens = c_.shape().tokens;
    double totals[kRows] = {};
    for (uint32_t first = 0; first < tokens; first += kTokensPerSum) {
      V sums[kVectors] = {};
      for (uint32_t t = first; t < tokens && t < first + kTokensPerSum; ++t) {
        for (int v = 0; v < kVectors; ++v) {
          V& weight = At<kLanes>(scratch_.weights + uint64_t{t} * kRows + v * kLanes);
          weight = Exp<kLanes>(weight - At<kLanes>(most_ + v * kLanes));
          sums[v] += weight == weight ? weight : V{};
        }
      }
      for (uint32_t i = 0; i < kRows; ++i) totals[i] += double{sums[i / kLanes][i % kLanes]};
    }
    float* const lse = c_.lse + uint64_t{pass_.plane} * c_.WindowRows() + first_;
    for (uint32_t i = 0; i < kRows; ++i) {
      inverse_[i] = totals[i] > 0 ? static_cast<float>(1 / totals[i]) : 0;
      if (i < rows_) lse[i] = totals[i] > 0 ? most_[i] + static_cast<float>(std::log(totals[i])) : -INFINITY;
    }
  }

  const WindowPass& pass_;
  const ScoreContext& c_;
  const Scratch& scratch_;
  const uint32_t first_, rows_;
  alignas(64) int32_t seen_[kRows];   // the number of keys that each row sees
  alignas(64) float most_[kRows];     // each row's greatest logit
  alignas(64) float inverse_[kRows];  // 1 / each row's sum of exponentials
};

// Adds the statistics of a query head, which have all of its queries, to those over heads: means, and the greatest peak.
template <typename OneChunk>
KVPOOL_INLINE void FinishHead(const ScoreContext& c, uint32_t plane, const Scratch& scratch,
                              const OneChunk& chunk, uint32_t last_row) {
  const uint32_t queries = c.signals.window.queries, tokens = c.shape().tokens;
  const uint64_t own = uint64_t{plane} * tokens;
  const float share = 1 / static_cast<float>(c.group());
  const float of_variance = share / static_cast<float>(queries - 1);
  for (uint32_t t = 0; t < tokens; ++t) {
    c.window_mean[own + t] += scratch.mean[t] * share;
    c.window_variance[own + t] += queries > 1 ? scratch.squares[t] * of_variance : 0;
    c.window_peak[own + t] = GreaterOf(c.window_peak[own + t], scratch.peak[t]);
    c.window_latest[own + t] += chunk.Weight(last_row, t) * share;
  }
}

// Chunks hold whole query heads, or parts of one.
template <int kLanes, int kVectors, int kTokens>
KVPOOL_INLINE void AttendRows(const WindowPass& pass, const Scratch& scratch, double* entropy) {
  using OneChunk = Chunk<kLanes, kVectors, kTokens>;
  const ScoreContext& c = *pass.context;
  const uint32_t queries = c.signals.window.queries, all = c.group() * queries;
  const uint32_t before_window = c.shape().tokens - c.signals.window.own_tokens();
  const uint32_t chunk_rows =
      queries < OneChunk::kRows ? OneChunk::kRows / queries * queries : OneChunk::kRows;
  for (uint32_t first = 0; first < all;) {
    const uint32_t left_of_head = queries - first % queries;
    const uint32_t rows =
        queries < OneChunk::kRows ? std::min(chunk_rows, all - first) : std::min(chunk_rows, left_of_head);
    OneChunk chunk(pass, scratch, first, rows);
    chunk.Run();
    *entropy += chunk.Entropy(before_window);
    for (uint32_t from = first; from < first + rows;) {
      const uint32_t before = from % queries;
      const uint32_t count = std::min(queries - before, first + rows - from);
      chunk.AddToHead(from, count, before);
      from += count;
      if (from % queries == 0) FinishHead(c, pass.plane, scratch, chunk, from - 1);
    }
    first += rows;
  }
}

template <int kLanes, int kVectors, int kTokens>
KVPOOL_INLINE void Attend(const WindowPass& pass) {
  const ScoreContext& c = *pass.context;
  const uint32_t tokens = c.shape().tokens, queries = c.signals.window.queries;
  const uint64_t own = uint64_t{pass.plane} * tokens;
  for (float* const array : {c.window_mean, c.window_variance, c.window_peak, c.window_latest}) {
    std::fill_n(array + own, tokens, 0.0f);
  }
  const Scratch scratch(pass.scratch, ScratchLayout(c.shape()));
  PlaneSpread spread;
  // One vector of rows where the second would stay empty.
  if (c.group() * queries <= kLanes) {
    AttendRows<kLanes, 1, 12>(pass, scratch, &spread.entropy);
  } else {
    AttendRows<kLanes, kVectors, kTokens>(pass, scratch, &spread.entropy);
  }
  for (uint32_t t = 0; t + c.signals.window.own_tokens() < tokens; ++t) {
    const float variance = c.window_variance[own + t];
    if (variance == variance) spread.variance += double{variance} * c.group();
  }
  double sum = 0, squares = 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    const double mean = double{c.window_mean[own + t]};
    if (mean != mean) continue;
    sum += mean;
    squares += mean * mean;
  }
  spread.density = VarianceOf(sum, squares, tokens);
  c.spreads[pass.plane] = spread;
}

}  // namespace

uint64_t WindowScratchFloats(const KvShape& shape) { return ScratchLayout(shape).end; }

void AttendWindowCompiler(const WindowPass& pass) { Attend<4, 2, 4>(pass); }
KVPOOL_AVX2 void AttendWindowAvx2(const WindowPass& pass) { Attend<8, 2, 6>(pass); }
KVPOOL_AVX512 void AttendWindowAvx512(const WindowPass& pass) { Attend<16, 2, 12>(pass); }

}  // namespace kvpool::scorers
