// What is remembered of contents that left, in sets of four: a lookup touches one cache line.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "server/base/virtual_array.h"

namespace kvpool {

// A content has a number of its owner's and the time of its last use. Where all four places of a set are
// taken the one used longest ago is forgotten. Sets are added one at a time, each by splitting another
// (linear hashing, Litwin 1980), so that growing takes no long pause.
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
  };
  static constexpr double kBytesPerContent = sizeof(Past);

  // It remembers at most `most` contents, rounded up to whole sets.
  explicit PastContents(uint32_t most) : sets_((uint64_t{most} + kWays - 1) / kWays) {}

  // Makes places for at least `slots` contents, as far as `most` allows.
  void Reserve(uint32_t slots) {
    while (used_ * kWays < slots && used_ < sets_.size()) Split();
  }
  uint32_t slots() const { return used_ * kWays; }
  // Null if the slot is empty.
  const Past* InSlot(uint32_t slot) const {
    const Past& past = sets_[slot / kWays].ways[slot % kWays];
    return past.hash == 0 ? nullptr : &past;
  }

  void PrefetchSlot(uint32_t slot) const { sets_.Prefetch(slot / kWays); }
  void Prefetch(uint64_t hash) const { sets_.Prefetch(SetOf(NameOf(hash))); }
  // Null if the content is not remembered.
  Past* Find(uint64_t hash) {
    for (Past& past : sets_[SetOf(NameOf(hash))].ways) {
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
    for (Past& past : set.ways) {
      if (past.hash == 0 || past.hash == name) {
        place = &past;
        break;
      }
      if (past.AgeAt(now) > place->AgeAt(now)) place = &past;
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
  uint64_t SetOf(uint64_t name) const {
    const uint64_t mixed = name * 0x9e3779b97f4a7c15 >> 32;
    const uint64_t half = std::bit_floor(used_);
    const uint64_t set = mixed & (2 * half - 1);
    return set < used_ ? set : set - half;
  }
  void Split() {
    Set& added = sets_[used_];
    Set& old = sets_[used_ - std::bit_floor(used_)];
    ++used_;
    for (uint32_t w = 0; w < kWays; ++w) {
      if (old.ways[w].hash == 0 || &sets_[SetOf(old.ways[w].hash)] == &old) continue;
      added.ways[w] = old.ways[w];
      old.ways[w] = {};
    }
  }

  VirtualArray<Set> sets_;
  uint32_t used_ = 1;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_PAST_CONTENTS_H_
