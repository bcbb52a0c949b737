// A word for each key, which hash tables and policies go by.
//
// Engines choose keys, and one that knew how they are hashed could choose thousands with one hash: whatever looks one up would
// visit them all, under the mutex of the space. So a daemon mixes in words that nobody knows. Without them words are the same in
// every process, as simulations and tests want them, and as what is kept for the next daemon needs them.
#ifndef KVPOOL_SERVER_POOL_KEY_HASH_H_
#define KVPOOL_SERVER_POOL_KEY_HASH_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "server/base/random_bytes.h"
#include "server/pool/block_record.h"

namespace kvpool {

struct KeyHashWords {
  // Any odd constants would do that have as many ones as zeros and that no key is likely to equal.
  uint64_t words[6] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u,
                       0x589965cc75374cc3u, 0x1d8e4e27c47d124fu, 0xeb44accab455d165u};
};

inline constexpr KeyHashWords kPublicKeyHash;

// Those of this process.
inline KeyHashWords key_hash_words;

// REQUIRES: no key was hashed yet, and no other thread runs that hashes any.
inline void SetKeyHashWords(const KeyHashWords& words) { key_hash_words = words; }

// Engines may bring keys that are anything but uniform (counters, zero-padded digests): every bit of the key
// reaches every bit of the hash, by two rounds of the folded 64 x 64 -> 128 bit product (wyhash's mixer).
inline uint64_t HashKeyWith(const KeyHashWords& with, const BlockKey& key) {
  const auto fold = [](uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  uint64_t words[4];
  static_assert(sizeof(words) == sizeof(key.bytes));
  std::memcpy(words, key.bytes.data(), sizeof(words));
  const uint64_t space = uint64_t{key.group} << 1 | (key.raw ? 1 : 0);
  const uint64_t left = fold(words[0] ^ with.words[0], words[1] ^ with.words[1]);
  const uint64_t right = fold(words[2] ^ with.words[2], words[3] ^ with.words[3]);
  return fold(left ^ with.words[4] ^ space * 0x9e3779b97f4a7c15u, right ^ with.words[5]);
}

inline KeyHashWords RandomKeyHashWords() {
  KeyHashWords random;
  const std::string bytes = RandomBytes(sizeof(random.words));
  std::memcpy(random.words, bytes.data(), bytes.size());
  return random;
}

inline uint64_t HashKey(const BlockKey& key) { return HashKeyWith(key_hash_words, key); }

struct BlockKeyHash {
  size_t operator()(const BlockKey& key) const { return HashKey(key); }
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_KEY_HASH_H_
