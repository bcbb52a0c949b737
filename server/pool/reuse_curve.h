// What a cache of another size would find: what some blocks more would bring to a pool, and some less would cost it.
//
// Not thread-safe.
#ifndef KVPOOL_SERVER_POOL_REUSE_CURVE_H_
#define KVPOOL_SERVER_POOL_REUSE_CURVE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kvpool {

// The keys that were used last, resident or not, in the order of their use, sampled as in SHARDS (Waldspurger et al., FAST 2015):
// a key's hash decides whether it is in the sample. One that is asked for again would be found by an LRU cache with as many blocks
// as keys were used since (Mattson et al., 1970), so that a histogram of these numbers gives the hits of each size. It is of the
// last uses, and of the time that they took: where nothing is asked for any more hits become rare.
//
// What blocks more or less are worth is read from the upper hull of that curve (Beckmann and Sanchez, Talus, HPCA 2015): what
// comes round after more than there is room for is found by none of some blocks more, but by all once there is room for it.
class ReuseCurve {
 public:
  // `most_blocks`: the pool never has more. At least 1.
  explicit ReuseCurve(uint32_t most_blocks);

  // A key was asked for; `hash` is its HashKey.
  void Ask(uint64_t hash, uint64_t now_ms) {
    if (IsSampled(hash)) Use(hash, now_ms, /*asked=*/true);
  }
  // A key was written.
  void Write(uint64_t hash, uint64_t now_ms) {
    if (IsSampled(hash)) Use(hash, now_ms, /*asked=*/false);
  }

  // Hits in a millisecond that each of the last blocks of a cache brings, and that each of some more would bring.
  struct Slopes {
    double last = 0, next = 0;
  };
  // Of a cache of `blocks` that can have at most `most`, where `step` come or go together. REQUIRES: step > 0.
  Slopes At(uint32_t blocks, uint32_t step, uint32_t most, uint64_t now_ms) const;

  size_t bytes() const;

 private:
  // Their number sets the error (some percent), and what a pool costs (100 KB).
  static constexpr uint32_t kMostKeys = 2048;
  static constexpr uint32_t kBuckets = 128;
  // Half of what was seen is forgotten when there are so many uses, an eighth of the keys: some seconds of an engine that is
  // busy. Twice as many brought a fifth less of what moving saves on 12,000 blocks (bench_goodput --weight=0).
  static constexpr double kRecentUses = 256;
  // One in so many uses counts as a reuse after all there is room for: what was asked for once may come back. So who is busy
  // gets the memory of who has done nothing for long, even where neither was seen to ask for anything twice.
  static constexpr double kUsesPerUnseenReuse = 256;
  // A pause that is over counts for no more than so many times what the uses before it took. Else who comes back would be taken
  // for one who is idle until many windows have gone by.
  static constexpr double kLongestPause = 4;
  // Rates of less time are not known.
  static constexpr double kLeastMs = 1000;

  bool IsSampled(uint64_t hash) const { return (hash & (one_in_ - 1)) == 0; }
  void Use(uint64_t hash, uint64_t now_ms, bool asked);
  // How many keys were used since the one in this place.
  uint32_t UsedSince(uint32_t place) const;
  void Count(uint32_t place, int32_t n);
  // Closes the gaps, and makes room for more.
  void Compact();

  const uint64_t one_in_;  // A power of two.
  const uint32_t most_keys_;
  // Keys have places in the order of their last use, 0 where one has gone, and a Fenwick tree counts those that are there.
  absl::flat_hash_map<uint64_t, uint32_t> places_;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> counts_;  // The first one is not used.
  uint32_t oldest_ = 0, next_ = 0;
  // Those asked for again, by how many keys were used since, in kBuckets parts of most_keys_.
  std::array<double, kBuckets> reuses_{};
  double uses_ = 0;                      // So many are remembered,
  uint64_t since_ms_ = 0, last_ms_ = 0;  // and took this time.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_REUSE_CURVE_H_
