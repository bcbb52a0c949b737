// A rough count of how often each hash was seen lately: a count-min sketch of 4-bit counters that are halved
// now and then.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "server/base/linear_hash.h"
#include "server/base/virtual_array.h"

namespace kvpool {

// Four rows with a counter per block take two bytes per block, and up to four when rounded to a power of two. They
// come with the blocks, some counters at a time. A new one takes half of the hashes of another, so either goes on with half of
// the count.
class FrequencySketch {
 public:
  static constexpr uint32_t kMost = 15;
  static constexpr uint32_t kRows = 4;

  // It may come to have counters for so many blocks.
  explicit FrequencySketch(uint32_t most_blocks)
      : words_(std::bit_ceil(std::max<uint64_t>(most_blocks, kPerWord)) / kPerWord) {}

  // There are so many blocks.
  void Reserve(uint32_t blocks) {
    const uint64_t words = std::min<uint64_t>(LinearHash::PlacesFor(blocks) / kPerWord, words_.size());
    while (used_.places() < words) {
      Words& added = words_[used_.places()];
      Words& old = words_[used_.Split()];
      for (uint64_t& word : old.of_row) word = Halves(word);
      added = old;
    }
  }
  void Add(uint64_t hash) {
    bool added = false;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint64_t at = Place(hash, row);
      const uint32_t shift = at % kPerWord * 4;
      uint64_t& word = words_[used_.PlaceOf(at / kPerWord)].of_row[row];
      if ((word >> shift & kMost) == kMost) continue;
      word += uint64_t{1} << shift;
      added = true;
    }
    if (added && ++additions_ >= kSample * kPerWord * used_.places()) Halve();
  }
  uint32_t Count(uint64_t hash) const {
    uint32_t least = kMost;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint64_t at = Place(hash, row);
      const uint64_t word = words_[used_.PlaceOf(at / kPerWord)].of_row[row];
      least = std::min(least, static_cast<uint32_t>(word >> at % kPerWord * 4 & kMost));
    }
    return least;
  }

 private:
  // Counters are halved after so many additions per counter of a row, as in Caffeine's TinyLFU.
  static constexpr uint64_t kSample = 10;
  static constexpr uint64_t kPerWord = 16;
  struct Words {
    uint64_t of_row[kRows];
  };

  static uint64_t Place(uint64_t hash, uint32_t row) {
    // Each row has an odd multiplier. The high bits of a product depend on all of the hash.
    constexpr uint64_t kOdd[kRows] = {0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
                                      0xd6e8feb86659fd93u};
    return (hash * kOdd[row]) >> 32;
  }
  // Each count is halved, rounded down.
  static uint64_t Halves(uint64_t word) { return word >> 1 & 0x7777777777777777u; }
  void Halve() {
    for (uint64_t at = 0; at < used_.places(); ++at) {
      for (uint64_t& word : words_[at].of_row) word = Halves(word);
    }
    additions_ /= 2;
  }

  VirtualArray<Words> words_;
  LinearHash used_{1};  // Those of them that are in use.
  uint64_t additions_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_
