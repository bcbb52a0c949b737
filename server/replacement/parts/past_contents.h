// What is remembered of contents that left, in sets of four: a lookup touches one cache line.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_

#include <algorithm>
#include <cstdint>

#include "server/base/linear_hash.h"
#include "server/base/virtual_array.h"

namespace kvpool {

// A content has a number of its owner's and the time of its last use. Where all four places of a set are
// taken the one used longest ago is forgotten. Sets are added one at a time, each by splitting another, so that
// growing takes no long pause.
class PastContents {
 public:
  static constexpr int kNumberBits = 20;
  struct Past {
    uint64_t hash;  // 0: nothing is remembered here.
    uint64_t since_and_number;

    // Modulo 2^44.
    uint64_t since() const { return since_and_number >> kNumberBits; }
    uint64_t number() const { return since_and_number & ((1u << kNumberBits) - 1); }
    // REQUIRES: now >= since().
    uint64_t AgeAt(uint64_t now) const { return (now - since()) << kNumberBits >> kNumberBits; }
    // REQUIRES: number < 2^kNumberBits.
    void set_number(uint64_t number) { since_and_number = since() << kNumberBits | number; }
  };
  static constexpr double kBytesPerContent = sizeof(Past);

  // It has places for `at_first` contents, and at most for `most`, rounded up to whole sets. REQUIRES: 1 <= at_first <= most.
  explicit PastContents(uint32_t most, uint32_t at_first = 1)
      : sets_(SetsOf(most)), used_(SetsOf(at_first)) {}

  // Makes places for at least `slots` contents, as far as `most` allows, and adds at most so many sets. True: they are there.
  bool Reserve(uint32_t slots, uint32_t most_sets = UINT32_MAX) {
    const uint64_t sets = std::min<uint64_t>(SetsOf(slots), sets_.size());
    for (; used_.places() < sets && most_sets > 0; --most_sets) Split();
    return used_.places() >= sets;
  }
  // The memory of what Reserve will add comes now. Needs no lock.
  void Expect(uint32_t slots) { sets_.Populate(std::min<uint64_t>(SetsOf(slots), sets_.size())); }
  uint32_t slots() const { return static_cast<uint32_t>(used_.places() * kWays); }
  // The memory that it takes once there are as many as may be.
  size_t bytes() const { return sets_.bytes(); }
  // Null if the slot is empty.
  const Past* InSlot(uint32_t slot) const {
    const Past& past = sets_[slot / kWays].ways[slot % kWays];
    return past.hash == 0 ? nullptr : &past;
  }

  // Always inlined: GCC takes a function that does nothing but prefetch for one without effects, and drops calls of it.
  [[gnu::always_inline]] void PrefetchSlot(uint32_t slot) const { sets_.Prefetch(slot / kWays); }
  [[gnu::always_inline]] void Prefetch(uint64_t hash) const { sets_.Prefetch(SetOf(NameOf(hash))); }
  // Null if the content is not remembered.
  Past* Find(uint64_t hash) { return const_cast<Past*>(static_cast<const PastContents*>(this)->Find(hash)); }
  const Past* Find(uint64_t hash) const {
    for (const Past& past : sets_[SetOf(NameOf(hash))].ways) {
      if (past.hash == NameOf(hash)) return &past;
    }
    return nullptr;
  }
  // REQUIRES: Find answered it.
  void Forget(Past* past) { past->hash = 0; }
  // Answers the content that is forgotten for it, or hash 0 if there is none. REQUIRES:
  // number < 2^kNumberBits.
  Past Remember(uint64_t hash, uint64_t since, uint64_t number, uint64_t now) {
    const uint64_t name = NameOf(hash);
    Set& set = sets_[SetOf(name)];
    Past* place = &set.ways[0];
    uint64_t oldest = 0;
    for (Past& past : set.ways) {
      if (past.hash == name) {
        place = &past;
        break;
      }
      const uint64_t age = past.hash == 0 ? UINT64_MAX : past.AgeAt(now);
      // No branch: which is the oldest can't be predicted.
      const bool is_older = age > oldest;
      oldest = is_older ? age : oldest;
      place = is_older ? &past : place;
    }
    const Past forgotten = *place;
    *place = {.hash = name, .since_and_number = since << kNumberBits | number};
    return forgotten.hash == name ? Past{} : forgotten;
  }

 private:
  static constexpr uint32_t kWays = 4;
  struct alignas(64) Set {
    Past ways[kWays];
  };

  static uint64_t NameOf(uint64_t hash) { return hash == 0 ? 1 : hash; }
  static uint64_t SetsOf(uint32_t contents) { return (uint64_t{contents} + kWays - 1) / kWays; }
  uint64_t SetOf(uint64_t name) const { return used_.PlaceOf(name * 0x9e3779b97f4a7c15 >> 32); }
  void Split() {
    Set& added = sets_[used_.places()];
    Set& old = sets_[used_.Split()];
    for (uint32_t w = 0; w < kWays; ++w) {
      if (old.ways[w].hash == 0 || &sets_[SetOf(old.ways[w].hash)] == &old) continue;
      added.ways[w] = old.ways[w];
      old.ways[w] = {};
    }
  }

  VirtualArray<Set> sets_;
  LinearHash used_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_
