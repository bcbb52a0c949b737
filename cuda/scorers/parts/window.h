// The attention of a window of queries over the sequence's keys: a softmax that keeps its log-sum-exp.
//
// A key that is not finite takes no part in the softmax, and its token's statistics are NaN.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_
#define KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/base2.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// Loads the plane's queries as floats, times the scale: [query head of the group][query][k_head_dim].
template <typename Team>
KVPOOL_HOST_DEVICE void LoadQueries(const Team& team, const ScoreContext& c, uint32_t plane) {
  const QueryWindow& window = c.signals.window;
  const uint32_t dim = c.shape().k_head_dim;
  const uint32_t layer = plane / c.shape().kv_heads, head = plane % c.shape().kv_heads;
  const float scale = window.scale != 0 ? window.scale : 1 / sqrtf(static_cast<float>(dim));
  const uint64_t first = uint64_t{plane} * c.WindowRows();
  for (uint32_t row = team.row(); row < c.WindowRows(); row += team.rows()) {
    const uint32_t query = row % window.queries, in_group = row / window.queries;
    const unsigned char* const from = static_cast<const unsigned char*>(window.data) +
                                      layer * window.layer_stride_bytes + query * window.query_stride_bytes +
                                      uint64_t{head * c.group() + in_group} * window.head_stride_bytes;
    float* const to = c.queries + (first + row) * dim;
    float peak = 0;
    for (uint32_t d = team.in_row(); d < dim; d += team.row_width()) {
      to[d] = LoadElement(from + d * BytesOf(window.dtype), window.dtype) * scale;
      peak = fmaxf(peak, fabsf(to[d]));
    }
    peak = team.RowMax(peak);
    if (team.in_row() == 0) c.query_peaks[first + row] = peak;
  }
  team.Sync();
}

// The number of keys that query w sees: it is at token tokens - queries + w, or behind the sequence.
KVPOOL_HOST_DEVICE inline uint32_t KeysSeen(const ScoreContext& c, uint32_t query) {
  if (c.signals.window.behind) return c.shape().tokens;
  const uint32_t after = c.signals.window.queries - 1 - query;
  return c.shape().tokens > after ? c.shape().tokens - after : 0;
}

// A lane's share of the window's logits comes from a tile: so many tokens' keys times a strip of queries for each row team, or
// for several, kStripRows queries of one head, of which those behind its last are empty. Each lane of the row team has kRows x kColumns of
// them. A tile's keys are read once for all strips that the team holds at once.
//
//   Tile(team, c, plane)   for one plane
//   at_once()              strips that the team holds
//   strip()                which of them this row team works at, a great number if at none
//   has_logits()           whether it has its logits after Multiply: of several row teams that work at one, one has
//   Hold(rows)             takes the lane's rows of c.queries, kNoRow where they are empty
//   held(i)                the i-th of them
//   Keep(i, x), kept(i)    a number of the i-th, for after the next Multiply
//   row(i), column(j)      of a lane's logit in its strip and tile
//   Multiply(t)            computes the logits of tokens [t, t + kTokens); all lanes meet in it
//   logit(i, j)            to base 2: e^x is 2^logit. Anything where the token or the row is empty
//   RowSum, RowGreatest    over the lanes that have the same row; is_first_of_row() is true in one of them
//   PutColumns(t, p)       over the strip's rows: what of() has for each row team and token of a tile when the lanes
//   PutLatest(t, j, p)     have met again, until they do so twice more
struct ColumnStats {
  float mean, squares, peak;  // squares: the sum of squared distances from the mean
};

// How the queries of a plane are divided into strips; those of a head come one after the other.
template <typename Tile>
struct WindowStrips {
  KVPOOL_HOST_DEVICE explicit WindowStrips(const ScoreContext& c)
      : queries(c.signals.window.queries),
        of_head((queries + Tile::kStripRows - 1) / Tile::kStripRows),
        count(of_head * c.group()) {}
  // The queries in strip `strip` of its head.
  KVPOOL_HOST_DEVICE uint32_t RowsOf(uint32_t strip) const {
    const uint32_t rest = queries - strip % of_head * Tile::kStripRows;
    return rest < Tile::kStripRows ? rest : Tile::kStripRows;
  }
  uint32_t queries, of_head, count;
};

// A lane's rows of strip `strip`, as places among the plane's queries.
inline constexpr uint32_t kNoRow = UINT32_MAX;
template <typename Tile>
struct OwnRows {
  KVPOOL_HOST_DEVICE OwnRows(const ScoreContext& c, const Tile& tile, const WindowStrips<Tile>& strips,
                             uint32_t strip) {
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < Tile::kRows; ++i) {
      const uint32_t query = strip % strips.of_head * Tile::kStripRows + tile.row(i);
      const bool there = strip < strips.count && query < strips.queries;
      row[i] = there ? strip / strips.of_head * strips.queries + query : kNoRow;
      seen[i] = there ? KeysSeen(c, query) : 0;
      is_latest[i] = there && query == strips.queries - 1;
    }
  }
  uint32_t row[Tile::kRows];
  uint32_t seen[Tile::kRows];  // keys
  bool is_latest[Tile::kRows];
};

// Fills lse.
template <typename Tile, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowLse(const Team& team, const ScoreContext& c, uint32_t plane) {
  constexpr uint32_t kRows = Tile::kRows, kColumns = Tile::kColumns;
  const WindowStrips<Tile> strips(c);
  float* const lse = c.lse + uint64_t{plane} * c.WindowRows();
  Tile tile(team, c, plane);
  for (uint32_t first = 0; first < strips.count; first += tile.at_once()) {
    const OwnRows<Tile> own(c, tile, strips, first + tile.strip());
    tile.Hold(own.row);
    float most[kRows], sum[kRows];
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) most[i] = -INFINITY, sum[i] = 0;
    for (uint32_t t = 0; t < c.shape().tokens; t += Tile::kTokens) {
      tile.Multiply(t);
      if (!tile.has_logits()) continue;
      KVPOOL_UNROLL
      for (uint32_t i = 0; i < kRows; ++i) {
        float logits[kColumns], greatest = most[i];
        KVPOOL_UNROLL
        for (uint32_t j = 0; j < kColumns; ++j) {
          const float logit = tile.logit(i, j);
          logits[j] = t + tile.column(j) < own.seen[i] && IsFinite(logit) ? logit : -INFINITY;
          greatest = fmaxf(greatest, logits[j]);
        }
        const float base = greatest == -INFINITY ? 0 : greatest;
        sum[i] *= Exp2(most[i] - base);
        most[i] = greatest;
        KVPOOL_UNROLL
        for (uint32_t j = 0; j < kColumns; ++j) sum[i] += Exp2(logits[j] - base);
      }
    }
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      const float greatest = tile.RowGreatest(most[i]);
      const float all = tile.RowSum(greatest == -INFINITY ? 0 : sum[i] * Exp2(most[i] - greatest));
      if (tile.held(i) != kNoRow && tile.is_first_of_row())
        lse[tile.held(i)] = greatest == -INFINITY ? -INFINITY : (greatest + log2f(all)) * kLn2;
    }
    team.Sync();
  }
}

// Count, mean and sum of squared distances from it, of numbers that come in parts (Chan, Golub, LeVeque 1979).
struct Moments {
  float count = 0, mean = 0, squares = 0;

  KVPOOL_HOST_DEVICE void Add(float part_count, float part_mean, float part_squares) {
    const float sum = count + part_count, delta = part_mean - mean;
    mean += delta * part_count / sum;
    squares += part_squares + delta * delta * count * part_count / sum;
    count = sum;
  }
};

// The unbiased variance of `count` numbers, from their sum and the sum of their squares.
KVPOOL_HOST_DEVICE inline double VarianceOf(double sum, double squares, uint32_t count) {
  if (count < 2) return 0;
  const double apart = squares - sum * sum / count;
  return apart > 0 ? apart / (count - 1) : 0;
}

// Adds the strips [first, end) of a token to its statistics, which become whole with the last strip. Before that window_mean
// and the others have sums over the heads that are whole, and the plane's scratch the moments of the one that is not.
// `column`: the token's place in the tile.
template <typename Tile>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void AddStrips(const ScoreContext& c, uint32_t plane, const Tile& tile,
                                                const WindowStrips<Tile>& strips, uint32_t first,
                                                uint32_t end, uint32_t token, uint32_t column) {
  const uint32_t tokens = c.shape().tokens;
  const uint64_t own = uint64_t{plane} * tokens + token;
  float* const scratch = c.scratch + plane * c.scratch_floats + token;
  Moments of_head;
  float mean_sum = 0, variance_sum = 0, peak = 0, latest_sum = 0;
  if (first > 0) {
    mean_sum = c.window_mean[own], variance_sum = c.window_variance[own];
    peak = c.window_peak[own], latest_sum = c.window_latest[own];
    of_head = {static_cast<float>(first % strips.of_head * Tile::kStripRows), scratch[0], scratch[tokens]};
  }
  for (uint32_t strip = first; strip < end; ++strip) {
    const ColumnStats& of_strip = tile.of(token, strip - first, column);
    of_head.Add(static_cast<float>(strips.RowsOf(strip)), of_strip.mean, of_strip.squares);
    peak = fmaxf(peak, of_strip.peak);
    if ((strip + 1) % strips.of_head != 0) continue;
    mean_sum += of_head.mean;
    variance_sum += strips.queries > 1 ? of_head.squares / static_cast<float>(strips.queries - 1) : 0;
    latest_sum += tile.latest(token, strip - first, column);
    of_head = {};
  }
  if (end == strips.count) {
    const float share = 1 / static_cast<float>(c.group());
    mean_sum *= share, variance_sum *= share, latest_sum *= share;
    if (mean_sum != mean_sum) peak = mean_sum;  // The greatest of numbers passes over NaN.
  } else {
    scratch[0] = of_head.mean;
    scratch[tokens] = of_head.squares;
  }
  c.window_mean[own] = mean_sum;
  c.window_variance[own] = variance_sum;
  c.window_peak[own] = peak;
  c.window_latest[own] = latest_sum;
}

// Puts the attention of a lane's rows to the tile at `t`, whose logits have been computed and which keeps their log-sum-exp to
// base 2. Returns
// -sum p ln(p + 1e-10) over the keys before the window.
template <typename Tile>
KVPOOL_HOST_DEVICE KVPOOL_INLINE float PutStrip(const ScoreContext& c, uint32_t t, const OwnRows<Tile>& own,
                                                Tile* tile) {
  const uint32_t before = c.shape().tokens - c.signals.window.own_tokens();
  float p[Tile::kRows][Tile::kColumns], entropy = 0;
  KVPOOL_UNROLL
  for (uint32_t i = 0; i < Tile::kRows; ++i) {
    const float lse = tile->kept(i);
    KVPOOL_UNROLL
    for (uint32_t j = 0; j < Tile::kColumns; ++j) {
      const float logit = tile->logit(i, j);
      const uint32_t token = t + tile->column(j);
      const float attention = IsFinite(logit) ? Exp2(logit - lse) : NAN;
      p[i][j] = token < own.seen[i] ? attention : 0;
      if (token < before && p[i][j] == p[i][j]) entropy -= p[i][j] * Log2(p[i][j] + 1e-10f);
      if (own.is_latest[i]) tile->PutLatest(t, j, p[i][j]);
    }
  }
  tile->PutColumns(t, p);
  return entropy * kLn2;
}

// Fills window_mean, window_variance and window_latest, each the mean over the group, window_peak, the maximum over
// it, and the plane's spread.
template <typename Tile, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowStatistics(const Team& team, const ScoreContext& c,
                                                       uint32_t plane) {
  constexpr uint32_t kRows = Tile::kRows;
  const uint32_t tokens = c.shape().tokens;
  const WindowStrips<Tile> strips(c);
  const float* const of_row = c.lse + uint64_t{plane} * c.WindowRows();
  double entropy = 0;
  Tile tile(team, c, plane);
  for (uint32_t first = 0; first < strips.count; first += tile.at_once()) {
    const uint32_t end = strips.count - first < tile.at_once() ? strips.count : first + tile.at_once();
    const OwnRows<Tile> own(c, tile, strips, first + tile.strip());
    tile.Hold(own.row);
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < kRows; ++i)
      tile.Keep(i, own.row[i] != kNoRow ? of_row[own.row[i]] * kLog2E : INFINITY);
    // A tile's strips are there when the lanes have met in the next one. The row teams take turns at adding them.
    for (uint32_t t = 0; t < tokens + Tile::kTokens; t += Tile::kTokens) {
      if (t < tokens) {
        tile.Multiply(t);
      } else {
        team.Sync();
      }
      if (t < tokens && tile.has_logits()) {
        entropy += double{PutStrip(c, t, own, &tile)};
      }
      const uint32_t turn = t / Tile::kTokens - 1, done = t - Tile::kTokens + team.in_row();
      if (t > 0 && turn % team.rows() == team.row() && team.in_row() < Tile::kTokens && done < tokens) {
        AddStrips(c, plane, tile, strips, first, end, done, team.in_row());
      }
    }
    team.Sync();
  }
  double spread = 0, sum = 0, squares = 0;
  for (uint32_t t = team.id(); t < tokens; t += team.count()) {
    const float mean = c.window_mean[uint64_t{plane} * tokens + t];
    if (mean != mean) continue;
    sum += double{mean};
    squares += double{mean} * double{mean};
    if (t + c.signals.window.own_tokens() < tokens)
      spread += double{c.window_variance[uint64_t{plane} * tokens + t]} * c.group();
  }
  entropy = team.Sum(entropy);
  spread = team.Sum(spread);
  sum = team.Sum(sum);
  squares = team.Sum(squares);
  if (team.id() == 0) c.spreads[plane] = {entropy, spread, VarianceOf(sum, squares, tokens)};
  team.Sync();
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_
