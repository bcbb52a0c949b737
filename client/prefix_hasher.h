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
#ifndef KVPOOL_CLIENT_PREFIX_HASHER_H_
#define KVPOOL_CLIENT_PREFIX_HASHER_H_

#include <array>
#include <cstdint>
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
  explicit PrefixHasher(std::string_view seed, std::string_view salt = {});

  const PrefixKey& root() const { return root_; }
  // Key of the block that holds `tokens` behind the block of `parent`.
  PrefixKey Next(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                 absl::Span<const std::string_view> extra_keys = {}) const;
  // The parent of the first key behind a pruning: later K and V saw only what was kept of
  // the sequence. `parent` is the key of the last full block, `tokens` are those behind it,
  // and `digest` is PruneResult::kept_digest.
  PrefixKey BehindPruning(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                          std::string_view digest) const;
  // Keys of the full blocks of `tokens`, from the root; a partial last block has none. The extra keys go into
  // every key. REQUIRES: tokens_per_block > 0.
  std::vector<PrefixKey> Chain(absl::Span<const uint32_t> tokens, uint32_t tokens_per_block,
                               absl::Span<const std::string_view> extra_keys = {}) const;

 private:
  PrefixKey root_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_PREFIX_HASHER_H_
