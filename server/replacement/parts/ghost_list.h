// Hashes of contents that left, each with a number, oldest first. The owner bounds how many there are.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_GHOST_LIST_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_GHOST_LIST_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"

namespace kvpool {

class GhostList {
 public:
  // A slot of 24 bytes, and its number in a hash table at its worst load of 7/16.
  static constexpr double kBytesPerGhost = 24 + 5 * 16.0 / 7;

  GhostList() = default;
  GhostList(const GhostList&) = delete;
  GhostList& operator=(const GhostList&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(slots_of_.size()); }

  // Adds the hash, or moves it, as the newest.
  void Add(uint64_t hash, uint64_t value) {
    const auto it = slots_of_.find(hash);
    uint32_t s;
    if (it != slots_of_.end()) {
      Unlink(s = *it);
      slots_[s].value = value;
    } else {
      s = unused_;
      if (s != kNone) {
        unused_ = slots_[s].newer;
      } else {
        s = static_cast<uint32_t>(slots_.size());
        slots_.emplace_back();
      }
      slots_[s] = {.hash = hash, .value = value};
      slots_of_.insert(s);
    }
    slots_[s].older = newest_;
    slots_[s].newer = kNone;
    (newest_ == kNone ? oldest_ : slots_[newest_].newer) = s;
    newest_ = s;
  }
  // Null if the hash is not there.
  const uint64_t* Find(uint64_t hash) const {
    const auto it = slots_of_.find(hash);
    return it == slots_of_.end() ? nullptr : &slots_[*it].value;
  }
  // Changes the number and leaves the order. REQUIRES: the hash is there.
  void Set(uint64_t hash, uint64_t value) { slots_[*slots_of_.find(hash)].value = value; }
  // False if the hash was not there.
  bool Remove(uint64_t hash) {
    const auto it = slots_of_.find(hash);
    if (it == slots_of_.end()) return false;
    const uint32_t s = *it;
    slots_of_.erase(it);
    Unlink(s);
    slots_[s].newer = unused_;
    slots_[s].older = kUnused;
    unused_ = s;
    return true;
  }
  // The number of the oldest. REQUIRES: the list is not empty.
  uint64_t oldest() const { return slots_[oldest_].value; }
  // All there are, in no order that means anything: for a walk in steps. Null: a slot without one.
  uint32_t slots() const { return static_cast<uint32_t>(slots_.size()); }
  const uint64_t* InSlot(uint32_t s) const { return slots_[s].older == kUnused ? nullptr : &slots_[s].value; }
  // Forgets the oldest until there are no more than `most`.
  void Trim(uint32_t most) {
    while (size() > most) Remove(slots_[oldest_].hash);
    if (oldest_ != kNone) Prefetch(slots_[oldest_].hash);
  }
  // The hash will be looked up soon.
  void Prefetch(uint64_t hash) const { slots_of_.prefetch(hash); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX, kUnused = UINT32_MAX - 1;
  struct Slot {
    uint64_t hash, value;
    uint32_t older, newer;  // Unused slots are linked by `newer`.
  };

  // The table holds slot numbers and finds a slot by its hash.
  struct SlotHash {
    using is_transparent = void;
    const std::vector<Slot>* slots;
    size_t operator()(uint64_t hash) const { return absl::HashOf(hash); }
    size_t operator()(uint32_t slot) const { return absl::HashOf((*slots)[slot].hash); }
  };
  struct SlotEqual {
    using is_transparent = void;
    const std::vector<Slot>* slots;
    bool operator()(uint32_t a, uint32_t b) const { return a == b; }
    bool operator()(uint32_t slot, uint64_t hash) const { return (*slots)[slot].hash == hash; }
    bool operator()(uint64_t hash, uint32_t slot) const { return (*slots)[slot].hash == hash; }
  };

  void Unlink(uint32_t s) {
    const Slot& slot = slots_[s];
    (slot.older == kNone ? oldest_ : slots_[slot.older].newer) = slot.newer;
    (slot.newer == kNone ? newest_ : slots_[slot.newer].older) = slot.older;
  }

  std::vector<Slot> slots_;
  absl::flat_hash_set<uint32_t, SlotHash, SlotEqual> slots_of_{0, SlotHash{&slots_}, SlotEqual{&slots_}};
  uint32_t oldest_ = kNone, newest_ = kNone, unused_ = kNone;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_GHOST_LIST_H_
