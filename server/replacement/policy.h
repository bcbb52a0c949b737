// Which cached block leaves next. One class per policy, one line in the registry.
//
// A policy sees the blocks that are cached, in the order of their use, and answers with victims. It decides
// nothing else: holds, pins and leaf-before-parent are the pool's. A policy is deterministic given its seed
// and what it is shown: no clock, no I/O, no dependence on pointer or hash order; ties end in the block id.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICY_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/block_ref.h"

namespace kvpool {

inline constexpr uint8_t kDefaultPriority = 50;
inline constexpr uint8_t kMaxPriority = 100;

// What the pool tells a policy of a block.
struct BlockFacts {
  uint64_t now_ms = 0;
  uint8_t priority = kDefaultPriority;  // Retention: 0 leaves first, kMaxPriority last.
};

// Called under the pool's lock, tens of nanoseconds each.
class ReplacementPolicy {
 public:
  virtual ~ReplacementPolicy() = default;
  virtual std::string_view name() const = 0;
  // The block is cached from now on, used more recently than every block cached before it.
  virtual void OnCached(BlockId block, const BlockFacts& facts) = 0;
  // The block left the cache: a match took it, or it was reclaimed.
  virtual void OnUncached(BlockId block) = 0;
  // A cached block was used (Touch).
  virtual void OnTouched(BlockId block, const BlockFacts& facts) = 0;
  // The retention of a cached block changed or ran out.
  virtual void OnPriority(BlockId block, uint8_t priority) = 0;
  // The last resident child of a cached block left, whether or not Victims ever passed the block over.
  virtual void OnChildless(BlockId block) = 0;
  // Appends up to `count` victims in order, none only if no cached block is childless. `childless(b)` says
  // whether a cached block has no resident children; a block that has some must not be answered, and must not
  // be examined again before its OnChildless, OnTouched or OnPriority: a chain of a million blocks in front
  // of one dear leaf is looked at once, not at each call. The pool evicts what is answered at once; where the
  // next choice may hang on that (a parent whose last child just left), it asks for one at a time.
  class Chain {
   public:
    virtual ~Chain() = default;
    virtual bool childless(BlockId block) const = 0;
  };
  virtual void Victims(uint32_t count, const Chain& chain, std::vector<BlockId>* victims) = 0;
  // The block will be asked about soon: a policy with an array of its own may ask for its part of it.
  virtual void Prefetch(BlockId block) const = 0;
  // Blocks it believes to be cached.
  virtual uint32_t size() const = 0;
  // Bytes of bookkeeping per block of capacity.
  virtual double bytes_per_block() const = 0;
};

// The registry: every policy by name. INVALID_ARGUMENT names the policies there are.
struct PolicyEntry {
  std::string_view name;
  std::string_view summary;  // One line for --help.
  std::unique_ptr<ReplacementPolicy> (*make)(uint32_t max_blocks);
};
absl::Span<const PolicyEntry> ReplacementPolicies();
absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         uint32_t max_blocks);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICY_H_
