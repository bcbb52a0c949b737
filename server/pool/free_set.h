// The blocks that may be leased, as a set of which the lowest is at hand, from any block on.
//
// Leases take the lowest free block of a slab (lease_order.h). One bit for each block, and above 64 words of bits one bit that says whether any of them is set, and so
// on: six words are read at most, four for a million blocks. Memory comes as blocks do.
#ifndef KVPOOL_SERVER_POOL_FREE_SET_H_
#define KVPOOL_SERVER_POOL_FREE_SET_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "server/base/virtual_array.h"

namespace kvpool {

class FreeSet {
 public:
  // Of blocks below `end`.
  explicit FreeSet(uint32_t end) : words_(Lay(end, &begins_, &levels_)) {}

  void Insert(uint32_t block) {
    uint64_t at = block;
    for (size_t level = 0; level < levels_; ++level) {
      uint64_t& word = words_[begins_[level] + at / 64];
      const bool was_empty = word == 0;
      word |= Bit(at);
      if (!was_empty) return;
      at /= 64;
    }
  }
  void Erase(uint32_t block) {
    uint64_t at = block;
    for (size_t level = 0; level < levels_; ++level) {
      uint64_t& word = words_[begins_[level] + at / 64];
      word &= ~Bit(at);
      if (word != 0) return;
      at /= 64;
    }
  }
  bool empty() const { return words_[begins_[levels_ - 1]] == 0; }
  bool contains(uint32_t block) const { return (words_[block / 64] & Bit(block)) != 0; }
  // All of [first, end), in time for a 64th of them.
  void InsertRange(uint32_t first, uint32_t end) {
    for (uint64_t at = first; at < end;) {
      const uint64_t next = std::min<uint64_t>(end, (at / 64 + 1) * 64);
      Insert(static_cast<uint32_t>(at));  // The levels above.
      words_[at / 64] |= Ones(next - at) << at % 64;
      at = next;
    }
  }
  // How many of [first, end) are in it.
  uint32_t CountRange(uint32_t first, uint32_t end) const {
    uint32_t count = 0;
    for (uint64_t at = first; at < end;) {
      const uint64_t next = std::min<uint64_t>(end, (at / 64 + 1) * 64);
      count += static_cast<uint32_t>(std::popcount(words_[at / 64] >> at % 64 & Ones(next - at)));
      at = next;
    }
    return count;
  }
  // The lowest block from `first` on, or `end` where there is none below that.
  uint32_t LowestFrom(uint32_t first, uint32_t end) const {
    uint64_t at = first;
    for (size_t level = 0; level < levels_ && begins_[level] + at / 64 < begins_[level + 1]; ++level) {
      if (const uint64_t rest = words_[begins_[level] + at / 64] >> at % 64; rest != 0) {
        at += static_cast<uint64_t>(std::countr_zero(rest));
        for (; level > 0; --level) {
          at = at * 64 + static_cast<uint64_t>(std::countr_zero(words_[begins_[level - 1] + at]));
        }
        return static_cast<uint32_t>(std::min<uint64_t>(at, end));
      }
      at = at / 64 + 1;
    }
    return end;
  }
  // Takes out the lowest blocks of [first, end), at most `most`, which must be 1 at least. Answers how many; it may be fewer than there are,
  // and is none only where there is none.
  uint32_t Pop(uint32_t first, uint32_t end, uint32_t most, uint32_t* out) {
    const uint32_t lowest = LowestFrom(first, end);
    if (lowest >= end) return 0;
    uint64_t& word = words_[lowest / 64];
    const uint32_t base = lowest / 64 * 64;
    uint64_t rest = word & ~uint64_t{0} << lowest % 64;
    if (end - base < 64) rest &= Ones(end - base);
    uint32_t count = 0;
    for (; rest != 0 && count < most; rest &= rest - 1) {
      out[count++] = base + static_cast<uint32_t>(std::countr_zero(rest));
    }
    // The last one that leaves clears what is above.
    for (uint32_t i = 1; i < count; ++i) word &= ~Bit(out[i]);
    Erase(lowest);
    return count;
  }
  // REQUIRES: there is one.
  uint32_t Lowest() const {
    uint64_t at = 0;
    for (size_t level = levels_; level-- > 0;) {
      at = at * 64 + static_cast<uint64_t>(std::countr_zero(words_[begins_[level] + at]));
    }
    return static_cast<uint32_t>(at);
  }

 private:
  static uint64_t Bit(uint64_t at) { return uint64_t{1} << at % 64; }
  static uint64_t Ones(uint64_t count) { return count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

  static constexpr size_t kMostLevels = 6;  // 64^6 > 2^32.
  using Begins = std::array<uint64_t, kMostLevels + 1>;
  // Answers how many words there are.
  static uint64_t Lay(uint64_t bits, Begins* begins, size_t* levels) {
    uint64_t all = 0;
    do {
      (*begins)[(*levels)++] = all;
      bits = (bits + 63) / 64;
      all += bits;
    } while (bits > 1);
    (*begins)[*levels] = all;
    return all;
  }

  size_t levels_ = 0;
  // Where in words_ each level begins, from that of single blocks to the one word at the top.
  Begins begins_{};
  VirtualArray<uint64_t> words_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_FREE_SET_H_
