// Selection among many candidates on the side that has their scores: the same victims as
// SelectVictims (select.h).
//
// A radix search finds the count-th lowest order (OrderOf) byte by byte, highest first:
//
//   CountDigits    pass 0 … 3: counts the next byte of the candidates that agree with the bytes found so far
//   CountTile      counts each tile's candidates below the order found, and equal to it
//   WriteVictims   writes those below it, and of the equal ones the oldest, in ascending order
//
// Nothing is sorted, and each pass reads scores and marks once.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_SELECT_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_SELECT_ROWS_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/order.h"

namespace kvpool::scorers {

inline constexpr uint32_t kDigitPasses = 4;
inline constexpr uint32_t kDigits = 256;
// The candidates of one team: a million make 245 tiles, more than an H200 has SMs.
inline constexpr uint32_t kTileItems = 4096;

// The state of one row's search before pass p.
struct DigitSearch {
  uint32_t prefix = 0;   // the highest p bytes of the order searched for
  uint32_t leaving = 0;  // the number of candidates with these bytes that leave
};

// A tile's candidates whose order is below the one found, and equal to it; not all of the equal ones
// need leave.
struct TileCount {
  uint32_t below = 0;
  uint32_t equal = 0;
};

struct SelectRequest {
  const float* scores = nullptr;   // [rows][items]
  const uint8_t* marks = nullptr;  // [items]; 1: never leaves
  uint32_t items = 0;
  uint32_t rows = 0;
  uint32_t count = 0;                // victims of each row; 1 to the number of items without a mark
  uint32_t* victims = nullptr;       // [rows][count]
  uint32_t* bins = nullptr;          // [rows][kDigitPasses][kDigits], 0 before the first pass
  DigitSearch* searches = nullptr;   // [rows][kDigitPasses + 1]
  TileCount* tile_counts = nullptr;  // [rows][tiles()]

  KVPOOL_HOST_DEVICE uint32_t tiles() const { return items / kTileItems + (items % kTileItems != 0); }
};

// The search before pass `pass`, from the search before the last pass and the bins of that pass. The team of
// tile 0 stores it for the next pass. `bins` is the team's own memory for kDigits counts.
template <typename Team>
KVPOOL_HOST_DEVICE DigitSearch SearchBefore(const Team& team, const SelectRequest& r, uint32_t pass,
                                            uint32_t row, uint32_t tile, uint32_t* bins) {
  if (pass == 0) return {.prefix = 0, .leaving = r.count};
  const uint64_t own = uint64_t{row} * (kDigitPasses + 1);
  DigitSearch search = pass == 1 ? DigitSearch{.prefix = 0, .leaving = r.count} : r.searches[own + pass - 1];
  const uint32_t* const counted = r.bins + (uint64_t{row} * kDigitPasses + pass - 1) * kDigits;
  for (uint32_t i = team.id(); i < kDigits; i += team.count()) bins[i] = counted[i];
  team.Sync();
  uint32_t digit = 0;
  while (digit + 1 < kDigits && search.leaving > bins[digit]) search.leaving -= bins[digit++];
  search.prefix = search.prefix << 8 | digit;
  if (tile == 0 && team.id() == 0) r.searches[own + pass] = search;
  team.Sync();
  return search;
}

KVPOOL_HOST_DEVICE inline uint32_t EndOfTile(const SelectRequest& r, uint32_t tile) {
  return r.items - tile * kTileItems < kTileItems ? r.items : (tile + 1) * kTileItems;
}

template <typename Team>
KVPOOL_HOST_DEVICE void CountDigits(const Team& team, const SelectRequest& r, uint32_t pass, uint32_t row,
                                    uint32_t tile, uint32_t* bins) {
  const DigitSearch search = SearchBefore(team, r, pass, row, tile, bins);
  for (uint32_t i = team.id(); i < kDigits; i += team.count()) bins[i] = 0;
  team.Sync();
  const float* const scores = r.scores + uint64_t{row} * r.items;
  const uint32_t shift = 8 * (kDigitPasses - 1 - pass);
  const uint32_t end = EndOfTile(r, tile);
  for (uint32_t i = tile * kTileItems + team.id(); i < end; i += team.count()) {
    if (r.marks[i] != 0) continue;
    const uint32_t order = OrderOf(scores[i]) >> shift;
    if (pass == 0 || order >> 8 == search.prefix) team.AddTo(&bins[order & (kDigits - 1)], 1);
  }
  team.Sync();
  uint32_t* const counted = r.bins + (uint64_t{row} * kDigitPasses + pass) * kDigits;
  for (uint32_t i = team.id(); i < kDigits; i += team.count()) {
    if (bins[i] != 0) team.AddTo(&counted[i], bins[i]);
  }
}

template <typename Team>
KVPOOL_HOST_DEVICE void CountTile(const Team& team, const SelectRequest& r, uint32_t row, uint32_t tile,
                                  uint32_t* bins) {
  const DigitSearch search = SearchBefore(team, r, kDigitPasses, row, tile, bins);
  const float* const scores = r.scores + uint64_t{row} * r.items;
  uint32_t below = 0, equal = 0;
  const uint32_t end = EndOfTile(r, tile);
  for (uint32_t i = tile * kTileItems + team.id(); i < end; i += team.count()) {
    const uint32_t order = OrderOf(scores[i]);
    below += r.marks[i] == 0 && order < search.prefix;
    equal += r.marks[i] == 0 && order == search.prefix;
  }
  below = team.Count(below);
  equal = team.Count(equal);
  if (team.id() == 0) r.tile_counts[uint64_t{row} * r.tiles() + tile] = {below, equal};
}

template <typename Team>
KVPOOL_HOST_DEVICE void WriteVictims(const Team& team, const SelectRequest& r, uint32_t row, uint32_t tile) {
  const DigitSearch search = r.searches[uint64_t{row} * (kDigitPasses + 1) + kDigitPasses];
  const float* const scores = r.scores + uint64_t{row} * r.items;
  uint32_t* const victims = r.victims + uint64_t{row} * r.count;
  TileCount before;
  for (uint32_t i = team.id(); i < tile; i += team.count()) {
    const TileCount& count = r.tile_counts[uint64_t{row} * r.tiles() + i];
    before.below += count.below;
    before.equal += count.equal;
  }
  before.below = team.Count(before.below);
  before.equal = team.Count(before.equal);
  const uint32_t begin = tile * kTileItems, end = EndOfTile(r, tile);
  // All lanes go around equally often, since all of them must call RankOf.
  for (uint32_t base = begin; base < end; base += team.count()) {
    const uint32_t i = base + team.id();
    const bool candidate = i < end && r.marks[i] == 0;
    const uint32_t order = candidate ? OrderOf(scores[i]) : 0;
    const bool is_below = candidate && order < search.prefix, is_equal = candidate && order == search.prefix;
    uint32_t all_below, all_equal;
    const uint32_t below = before.below + team.RankOf(is_below, &all_below);
    const uint32_t equal = before.equal + team.RankOf(is_equal, &all_equal);
    if (is_below || (is_equal && equal < search.leaving)) {
      victims[below + (equal < search.leaving ? equal : search.leaving)] = i;
    }
    before.below += all_below;
    before.equal += all_equal;
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_SELECT_ROWS_H_
