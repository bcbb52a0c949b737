// Under which name a block's bytes are found below the pool, on this node and on every other one.
//
// The space's part is derived from a secret and from all that must agree before bytes may be shared: format version,
// fingerprint and its facts, layout, ranks and tenant (daemon/space_terms). Two blocks with one tier key therefore have the same bytes, and a
// value of another layout, model or tenant can't be asked for.
#ifndef KVPOOL_SERVER_TIERS_TIER_KEY_H_
#define KVPOOL_SERVER_TIERS_TIER_KEY_H_

#include <array>
#include <cstdint>
#include <utility>

namespace kvpool {

using TierSpace = std::array<uint8_t, 32>;
// A tenant, by a digest of its name that needs the secret: what a tier has of one can be erased when no space of it is open,
// and a tier that is read by others names nobody. All zero: the value was written before tiers kept it.
using TierOwner = std::array<uint8_t, 16>;

struct TierKey {
  TierSpace space{};
  std::array<uint8_t, 32> block{};  // The pool's key of it (pool/pool_types.h), and what belongs to that.
  uint8_t group = 0;
  bool raw = true;
  TierOwner owner{};  // Follows from `space`, and is no part of the name.

  friend bool operator==(const TierKey& a, const TierKey& b) {
    return a.space == b.space && a.block == b.block && a.group == b.group && a.raw == b.raw;
  }
  template <typename H>
  friend H AbslHashValue(H h, const TierKey& key) {
    return H::combine(std::move(h), key.space, key.block, key.group, key.raw);
  }
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_KEY_H_
