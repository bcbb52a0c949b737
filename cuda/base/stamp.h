// Stamps: test patterns that say whose block it is.
//
// Every 8-byte word of a stamped block depends on the key of its content, on the block's id and generation,
// and on the word's place. A block that was handed to two owners, mapped at a wrong offset or written by
// somebody who no longer holds it shows as wrong words. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_BASE_STAMP_H_
#define KVPOOL_CUDA_BASE_STAMP_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool {

struct StampedBlock {
  uint64_t address = 0;     // the block's first byte; a multiple of 8
  uint64_t key_digest = 0;  // 64 bits of the key under which the block is sealed
  uint64_t block_ref = 0;   // BlockRef::Pack(): generation << 32 | id
};

// The one argument of both kernels.
struct StampBatch {
  const StampedBlock* blocks;
  uint64_t* wrong_words;  // one count for each block, which VerifyStamp adds to; WriteStamp does not use it
  uint32_t block_count;
  uint64_t words_per_block;
};

// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
// 2014): a bijection that changes half of the bits for any bit changed.
KVPOOL_HOST_DEVICE inline uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Word i of the block is the i-th number that SplitMix64 yields from this seed.
KVPOOL_HOST_DEVICE inline uint64_t StampSeed(const StampedBlock& block) {
  return MixBits(block.key_digest + MixBits(block.block_ref + 1));
}
KVPOOL_HOST_DEVICE inline uint64_t StampWord(uint64_t seed, uint64_t i) {
  return MixBits(seed + (i + 1) * 0x9e3779b97f4a7c15u);
}

// The lanes share one block of the batch.
template <typename Lane>
KVPOOL_HOST_DEVICE void WriteStamp(const Lane& lane, const StampBatch& batch, uint32_t block) {
  const uint64_t seed = StampSeed(batch.blocks[block]);
  uint64_t* const words = reinterpret_cast<uint64_t*>(batch.blocks[block].address);
  for (uint64_t i = lane.id(); i < batch.words_per_block; i += lane.count()) words[i] = StampWord(seed, i);
}

template <typename Lane>
KVPOOL_HOST_DEVICE void VerifyStamp(const Lane& lane, const StampBatch& batch, uint32_t block) {
  const uint64_t seed = StampSeed(batch.blocks[block]);
  const uint64_t* const words = reinterpret_cast<const uint64_t*>(batch.blocks[block].address);
  uint64_t wrong = 0;
  for (uint64_t i = lane.id(); i < batch.words_per_block; i += lane.count())
    wrong += words[i] != StampWord(seed, i);
  lane.AddTo(&batch.wrong_words[block], wrong);
}

}  // namespace kvpool

#endif  // KVPOOL_CUDA_BASE_STAMP_H_
