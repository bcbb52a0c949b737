// A rough count of how often each hash was seen lately: a count-min sketch of 4-bit counters that are halved
// now and then.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace kvpool {

// Four rows with a counter per block take two bytes per block, and up to four when rounded to a power of two.
class FrequencySketch {
 public:
  static constexpr uint32_t kMost = 15;
  static constexpr uint32_t kRows = 4;

  // Counters are halved after ten additions per counter of a row, as in Caffeine's TinyLFU.
  explicit FrequencySketch(uint32_t blocks)
      : mask_(std::bit_ceil(std::max<uint64_t>(blocks, 16)) - 1),
        sample_(10 * (mask_ + 1)),
        words_(kRows * ((mask_ + 1) / kPerWord)) {}

  void Add(uint64_t hash) {
    bool added = false;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint64_t at = Place(hash, row);
      const uint32_t shift = at % kPerWord * 4;
      uint64_t& word = words_[row * ((mask_ + 1) / kPerWord) + at / kPerWord];
      if ((word >> shift & kMost) == kMost) continue;
      word += uint64_t{1} << shift;
      added = true;
    }
    if (added && ++additions_ == sample_) Halve();
  }
  uint32_t Count(uint64_t hash) const {
    uint32_t least = kMost;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint64_t at = Place(hash, row);
      const uint64_t word = words_[row * ((mask_ + 1) / kPerWord) + at / kPerWord];
      least = std::min(least, static_cast<uint32_t>(word >> at % kPerWord * 4 & kMost));
    }
    return least;
  }

 private:
  static constexpr uint64_t kPerWord = 16;

  uint64_t Place(uint64_t hash, uint32_t row) const {
    // Each row has an odd multiplier. The high bits of a product depend on all of the hash.
    constexpr uint64_t kOdd[kRows] = {0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
                                      0xd6e8feb86659fd93u};
    return (hash * kOdd[row]) >> 32 & mask_;
  }
  void Halve() {
    for (uint64_t& word : words_) word = word >> 1 & 0x7777777777777777u;
    additions_ /= 2;
  }

  const uint64_t mask_;
  const uint64_t sample_;
  uint64_t additions_ = 0;
  std::vector<uint64_t> words_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_FREQUENCY_SKETCH_H_
