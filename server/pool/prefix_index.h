// The map from keys to resident blocks.
//
// A chained hash table threaded through the block records, with as many buckets as blocks (rounded up to a
// power of two). Buckets come with the blocks, one by one (linear_hash.h): no rehash, no tombstone, no stall at any
// size. Each resident block is in exactly one bucket, under its chain's key; further keys of a block (aliases) are in a
// side map that is empty as long as nobody uses any. A key names at most one block.
//
// Buckets and records hold *links*. A link has the id of the next block in its low bits and, in the bits that
// no block id needs, a filter with one bit for each key from there on. So for most keys that are not resident
// the bucket alone shows it, without a cache miss for each record of its chain.
#ifndef KVPOOL_SERVER_POOL_PREFIX_INDEX_H_
#define KVPOOL_SERVER_POOL_PREFIX_INDEX_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/support/check.h"
#include "server/base/linear_hash.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_record.h"
#include "server/pool/key_hash.h"

namespace kvpool {

class PrefixIndex {
 public:
  PrefixIndex(uint32_t max_blocks, VirtualArray<BlockRecord>* records)
      : records_(*records),
        // 2^32 of them need 64 bits.
        buckets_(std::bit_ceil(uint64_t{max_blocks})),
        id_bits_(static_cast<uint32_t>(std::bit_width(max_blocks))) {}

  // The memory of the buckets of so many blocks comes now, while nobody waits. Needs no lock.
  void Expect(uint32_t blocks) { buckets_.Populate(BucketsFor(blocks)); }
  // Adds buckets, at most `most`, until there are those of so many blocks. True: they are there.
  bool Grow(uint32_t blocks, uint32_t most) {
    const uint64_t buckets = BucketsFor(blocks);
    if (keys_ == 0 && used_.places() < buckets) used_ = LinearHash(buckets);
    for (; used_.places() < buckets && most > 0; --most) {
      // Those that are split soon.
      const uint32_t link = buckets_[std::min(used_.next() + kPrefetchSplits, used_.places() - 1)];
      if (link != 0) records_.Prefetch(BlockOf(link));
      Split();
    }
    return used_.places() >= buckets;
  }
  uint64_t buckets() const { return used_.places(); }

  // Always inlined: GCC takes a function that does nothing but prefetch for one without effects, and drops calls of it.
  [[gnu::always_inline]] void PrefetchBucket(uint64_t hash) const { buckets_.Prefetch(used_.PlaceOf(hash)); }
  // Call it once the bucket had time to arrive.
  [[gnu::always_inline]] void PrefetchRecord(uint64_t hash) const {
    const uint32_t link = buckets_[used_.PlaceOf(hash)];
    if (MayLeadTo(link, hash)) records_.Prefetch(BlockOf(link));
  }

  // The block that the key names, or 0. REQUIRES: hash == HashKey(key), here and below.
  uint32_t Find(uint64_t hash, const BlockKey& key) const {
    for (uint32_t link = buckets_[used_.PlaceOf(hash)]; MayLeadTo(link, hash);) {
      const BlockRecord& record = records_[BlockOf(link)];
      if (record.has_key(key)) return BlockOf(link);
      link = record.next_in_bucket;
    }
    if (aliases_.empty()) return 0;
    const auto it = aliases_.find(key);
    return it == aliases_.end() ? 0 : it->second;
  }

  // REQUIRES: the record has its key, and no block has that key in the index.
  void Insert(uint64_t hash, uint32_t block) {
    Link(hash, block);
    ++keys_;
  }

  // Takes the block's aliases out as well, and appends them to `aliases`. Its kAliased stays as it is.
  void Remove(uint64_t hash, uint32_t block, std::vector<BlockKey>* aliases) {
    uint32_t* link = &buckets_[used_.PlaceOf(hash)];
    while (BlockOf(*link) != block) {
      KVPOOL_CHECK(*link != 0, "block %u is not in the index under its key", block);
      link = &records_[BlockOf(*link)].next_in_bucket;
    }
    // The filters in front may keep a bit that no key behind them needs; it costs a look at a record.
    *link = records_[block].next_in_bucket;
    --keys_;
    if (!records_[block].has(BlockRecord::kAliased)) return;
    const auto it = keys_of_.find(block);
    for (const BlockKey& key : it->second) aliases_.erase(key);
    aliases->insert(aliases->end(), it->second.begin(), it->second.end());
    keys_of_.erase(it);
  }

  // REQUIRES: no block has that key in the index, and this one has kAliased.
  void AddAlias(const BlockKey& key, uint32_t block) {
    aliases_.emplace(key, block);
    keys_of_[block].push_back(key);
  }
  bool has_aliases(uint32_t block) const { return keys_of_.contains(block); }

  // The memory that buckets take once all blocks have come.
  size_t bytes() const { return buckets_.bytes(); }

  // Aborts unless exactly the resident blocks of 1..extent are found, each once. So many are there: `capacity`.
  void CheckInvariants(uint32_t extent, uint32_t capacity) const;

 private:
  static constexpr uint64_t kPrefetchSplits = 8;

  uint64_t BucketsFor(uint32_t blocks) const {
    return std::min<uint64_t>(LinearHash::PlacesFor(blocks), buckets_.size());
  }
  void Link(uint64_t hash, uint32_t block) {
    uint32_t& head = buckets_[used_.PlaceOf(hash)];
    records_[block].next_in_bucket = head;
    head = block | FilterOf(head) | FilterBit(hash);
  }
  // Links are of no use to a process that takes over, so this may be torn anywhere.
  void Split() {
    uint32_t& old = buckets_[used_.Split()];
    uint32_t link = old;
    old = 0;
    while (link != 0) {
      const uint32_t block = BlockOf(link);
      link = records_[block].next_in_bucket;
      Link(HashKey(records_[block].block_key()), block);
    }
  }
  uint32_t BlockOf(uint32_t link) const {
    return static_cast<uint32_t>(link & ((uint64_t{1} << id_bits_) - 1));
  }
  uint32_t FilterOf(uint32_t link) const { return link ^ BlockOf(link); }
  // Chosen by bits that do not choose the bucket. 0 if block ids leave no bits.
  uint32_t FilterBit(uint64_t hash) const {
    const uint32_t width = 32 - id_bits_;
    return static_cast<uint32_t>(uint64_t{1} << id_bits_ << ((hash >> 48) * width >> 16));
  }
  bool MayLeadTo(uint32_t link, uint64_t hash) const {
    const uint32_t bit = FilterBit(hash);
    return link != 0 && (link & bit) == bit;
  }

  VirtualArray<BlockRecord>& records_;
  VirtualArray<uint32_t> buckets_;  // links
  LinearHash used_{1};              // Those of the buckets that are in use.
  uint64_t keys_ = 0;               // Aliases are not counted.
  const uint32_t id_bits_;
  absl::flat_hash_map<BlockKey, uint32_t, BlockKeyHash> aliases_;
  absl::flat_hash_map<uint32_t, std::vector<BlockKey>> keys_of_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_PREFIX_INDEX_H_
