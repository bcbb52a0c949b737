// Which of a growing number of places a hash has: linear hashing (Litwin 1980).
//
// Places are added one at a time, and each takes its hashes from one of those before it: all others keep theirs. So a table grows
// in steps as short as one likes, and can be used between any two.
#ifndef KVPOOL_SERVER_BASE_LINEAR_HASH_H_
#define KVPOOL_SERVER_BASE_LINEAR_HASH_H_

#include <algorithm>
#include <bit>
#include <cstdint>

namespace kvpool {

class LinearHash {
 public:
  // At least one place.
  explicit LinearHash(uint64_t places) : places_(places), mask_(std::bit_ceil(places) - 1) {}

  // The places of a table that has so many items: at least one each, and at most the next power of two of them. Between two powers
  // an item brings up to four places, so that all are there long before they are needed, and none of them brings very many.
  static constexpr uint64_t PlacesFor(uint64_t items) {
    const uint64_t floor = std::bit_floor(items);
    return std::min(std::bit_ceil(items), floor + 4 * (items - floor));
  }

  uint64_t places() const { return places_; }
  uint64_t PlaceOf(uint64_t hash) const {
    const uint64_t place = hash & mask_;
    return place < places_ ? place : place & mask_ >> 1;
  }
  // The place that is split next.
  uint64_t next() const { return places_ - std::bit_floor(places_); }
  // Adds a place, behind all others. Answers the one that its hashes had so far.
  uint64_t Split() {
    const uint64_t split = next();
    mask_ |= places_++;
    return split;
  }

 private:
  uint64_t places_;
  uint64_t mask_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_LINEAR_HASH_H_
