// Features of full blocks (cuda/scorers/parts/records.h), kept from one device operation to the next: a prune
// in decoding reads only the block that has just filled.
//
// A record describes one rank's part of a block of one generation, in one group and with one set of sections.
// It stays right as long as K and V of a full block don't change within a generation, which is the contract
// of Score. Memory on the computing side comes in chunks of slots of one size, up to a limit; beyond it the
// least recently used records leave. Records that the present call has found or made stay where they are
// until the next BeginCall.
//
// Not thread-safe: it belongs to the thread that runs the device's operations. stats() may be
// called on any thread.
#ifndef KVPOOL_SERVER_SCORING_FEATURE_CACHE_H_
#define KVPOOL_SERVER_SCORING_FEATURE_CACHE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cuda/kv_compute.h"
#include "server/scoring/operations_snapshot.h"

namespace kvpool {

struct FeatureKey {
  uint64_t space = 0;
  uint64_t ref = 0;       // Block id and generation.
  uint32_t group = 0;     // Layer group.
  uint32_t rank = 0;      // Whose part of the block it is: ranks may share a device.
  uint32_t sections = 0;  // Which features: see SectionsOf.

  friend bool operator==(const FeatureKey&, const FeatureKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const FeatureKey& key) {
    return H::combine(std::move(h), key.space, key.ref, key.group, key.rank, key.sections);
  }
};

// The sections of a record that are there, as bits.
uint32_t SectionsOf(const scorers::RecordLayout& layout);

class FeatureCache {
 public:
  // `compute` outlives the cache.
  FeatureCache(KvCompute* compute, size_t limit_bytes) : compute_(*compute), limit_bytes_(limit_bytes) {}

  void BeginCall();
  // The record, or null; counted as a hit or a miss.
  float* Find(const FeatureKey& key);
  // Room for a record that is not there, which the caller fills within this call. Null: this call's own
  // records take up all that there is.
  float* Make(const FeatureKey& key, uint32_t floats);
  // The call failed: forgets the records it made, which were not filled.
  void AbandonCall();

  FeatureStats stats() const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr size_t kChunkBytes = 1 << 20;
  struct Chunk {
    std::unique_ptr<KvBuffer> memory;
    size_t slot_bytes = 0;  // 0: no slots are cut.
    std::vector<uint32_t> free_slots;
    uint32_t used = 0;
  };
  struct Entry {
    FeatureKey key;
    uint32_t chunk = 0, slot = 0;
    uint64_t call = 0;                      // The last call that used it.
    uint32_t newer = kNone, older = kNone;  // Neighbours in the list ordered by last use.
  };

  // A chunk with a free slot of this size; kNone: there is none.
  uint32_t ChunkFor(size_t slot_bytes);
  uint32_t CutChunk(size_t slot_bytes);
  // Gives up the memory of chunks without slots, which are too small for what is wanted.
  void DropUncut();
  void Forget(uint32_t entry);
  void Link(uint32_t entry);
  void Unlink(uint32_t entry);
  float* At(const Entry& entry) const;

  KvCompute& compute_;
  const size_t limit_bytes_;
  std::vector<Chunk> chunks_;
  absl::flat_hash_map<size_t, std::vector<uint32_t>> roomy_;  // Slot size -> chunks with a free slot.
  std::vector<uint32_t> uncut_;                               // Chunks without slots.
  std::vector<Entry> entries_;
  std::vector<uint32_t> unused_entries_;
  absl::flat_hash_map<FeatureKey, uint32_t> by_key_;
  uint32_t newest_ = kNone, oldest_ = kNone;
  uint64_t call_ = 0;
  std::vector<uint32_t> made_;  // Entries made in this call.

  std::atomic<uint64_t> hits_{0}, misses_{0}, evicted_{0}, bytes_{0};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_FEATURE_CACHE_H_
