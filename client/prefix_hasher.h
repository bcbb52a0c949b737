// Keys of blocks by content: a SHA-256 chain, so that equal keys mean equal tokens all the way back to the
// first one, in the same space and under the same salt.
//
//   root      = SHA256("kvpool.prefix.v1" || seed || u32 salt length || salt)
//   key of n  = SHA256(key of n-1 || u32 token count || u32 tokens...
//                      || for each extra key: u32 length || bytes)
//
//   behind a pruning = SHA256("kvpool.pruned.v1" || key of the last full block || u32 token count || u32 tokens...
//                             || u32 length || the pruning's digest)
//
// Integers are little-endian. The seed is the space's (Session::hash_seed), so that keys tell nothing across
// tenants; the salt separates requests of one tenant that must not share; extra keys name whatever K and V
// depend on besides tokens: an adapter's content, an image.
//
// A *soft salt* counts from the token at position salt_from > 0 on, so that what stands in front of it, such as
// a system prompt, is shared with everybody. The root is that of no salt, and so are the keys of blocks that lie
// wholly in front of salt_from. The block that holds the token at salt_from, and the first one behind a pruning,
// have in place of their parent
//
//   salted    = SHA256("kvpool.salted.v1" || parent || u32 salt length || salt)
//
//   salt_from = 40, blocks of 16:  | 0 … 15 | 16 … 31 | 32 … 47 | 48 … 63 |
//                                     everybody's     | of those with the salt
//
// Where the salted block begins decides, and not the token: salts of 33 and of 40 share there, and one of 48
// shares with neither behind the second block. Requests with a soft salt share nothing that is salted with
// those that have the same salt from the root on. An empty salt is no salt, whatever salt_from is.
#ifndef KVPOOL_CLIENT_PREFIX_HASHER_H_
#define KVPOOL_CLIENT_PREFIX_HASHER_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace kvpool {

using PrefixKey = std::array<uint8_t, 32>;

// Keys one after another, as Match and Seal take them.
std::string_view KeyBytes(absl::Span<const PrefixKey> keys);

// Immutable. Any thread may use it.
class PrefixHasher {
 public:
  // salt_from = 0: the salt is in every key.
  explicit PrefixHasher(std::string_view seed, std::string_view salt = {}, uint64_t salt_from = 0);

  const PrefixKey& root() const { return root_; }
  // The salt is soft: keys are made by NextAt and Chain.
  bool needs_positions() const { return !soft_salt_.empty(); }
  // Key of the block that holds `tokens` behind the block of `parent`. REQUIRES: !needs_positions(), since a key
  // without its salt would share what is private.
  PrefixKey Next(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                 absl::Span<const std::string_view> extra_keys = {}) const;
  // The same with any salt. `position` is that of the first of `tokens` in the sequence, where those that a
  // pruning dropped count, too. `parent` is the block's in front, salted or not: the salt is added here. A
  // partial block gets it if it holds the token at salt_from or is chained behind it.
  PrefixKey NextAt(const PrefixKey& parent, uint64_t position, absl::Span<const uint32_t> tokens,
                   absl::Span<const std::string_view> extra_keys = {}) const;
  // The parent of the first key behind a pruning: later K and V saw only what was kept of
  // the sequence. `parent` is the key of the last full block, `tokens` are those behind it,
  // and `digest` is PruneResult::kept_digest. A soft salt is in it wherever the pruning came,
  // also in front of salt_from.
  PrefixKey BehindPruning(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                          std::string_view digest) const;
  // Keys of the full blocks of `tokens`, from the root; a partial last block has none. The extra keys go into
  // every key. REQUIRES: tokens_per_block > 0.
  std::vector<PrefixKey> Chain(absl::Span<const uint32_t> tokens, uint32_t tokens_per_block,
                               absl::Span<const std::string_view> extra_keys = {}) const;

 private:
  // SHA-256 over the parent and the soft salt. REQUIRES: needs_positions().
  PrefixKey Salted(const PrefixKey& parent) const;

  PrefixKey root_;
  std::string soft_salt_;  // Empty: there is none.
  uint64_t salt_from_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_PREFIX_HASHER_H_
