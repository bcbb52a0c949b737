// Which cached block leaves next. A policy is one class, one file pair in policies/ and one
// line in policies/registry.cc.
//
// A policy is told when contents are inserted, found again and evicted, and names the next victim among the
// blocks that it is offered. The pool guards all policies alike: it offers a block only while the block is
//
//   cached               nobody holds or pins it
//   childless            no resident block of its chain is behind it, so leaves go before their parents
//   of default priority  nobody set another one, nor released it with Reuse::kNever. Blocks of lower priority
//                        leave before, those of higher priority after all that the policy was offered
//
// So a block that a policy knows is
//
//   resident   from OnInsert to OnEvict. OnHit comes each time its content is found again, OnUsed each time
//              its last holder lets go (the tail of a request first: a parent is used after its children)
//   offered    from OnOffer to OnWithdraw. Only an offered block may be a victim, and no other call about
//              it comes meanwhile
//
// A policy that takes over from another is told of all resident blocks, parents before children, then of the
// last use of each cached block, then of the blocks on offer, both in the order in which its predecessor
// would have evicted them. The times are the true ones, raised where that order would make them fall.
//
// A policy is deterministic given its seed and what it is shown: no clock, no I/O, no dependence on pointer
// or hash order; ties end in the block id.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICY_H_

#include <compare>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/block_ref.h"
#include "proto/support/limits.h"

namespace kvpool {

inline constexpr uint8_t kDefaultPriority = 50;

// A new content, as the pool describes it to a policy.
struct Content {
  // The hash of its key, so a content that comes back has the same one. Two contents may, very
  // rarely, share one.
  uint64_t hash = 0;
  // The resident block in front of it in its chain, or kNullBlock.
  BlockId parent = kNullBlock;
  uint64_t now_ms = 0;
};

// What an engine that releases a content expects of it. Advice only: it may be wrong, or meant to mislead.
enum class Reuse : uint8_t { kUnknown, kExpected, kUnlikely, kNever };
inline constexpr uint8_t kMaxCategory = 15;
struct UseHint {
  Reuse reuse = Reuse::kUnknown;
  // The engine's number for the kind of request that used it, 1 to kMaxCategory; 0: not said.
  uint8_t category = 0;
  bool says_something() const { return reuse != Reuse::kUnknown || category != 0; }
  friend bool operator==(const UseHint&, const UseHint&) = default;
};

// Ranks order blocks: the least leaves first.
struct Rank {
  uint64_t major = 0;
  uint64_t minor = 0;
  friend auto operator<=>(const Rank&, const Rank&) = default;
};

class AsyncPolicy;

// Called under the pool's lock, tens of nanoseconds each.
class ReplacementPolicy {
 public:
  virtual ~ReplacementPolicy() = default;
  virtual std::string_view name() const = 0;
  // The block has a new content, which was computed because it was not resident.
  virtual void OnInsert(BlockId block, const Content& content) = 0;
  // The content was asked for again, by a match, a seal of a duplicate or a touch.
  virtual void OnHit(BlockId block, uint64_t now_ms) = 0;
  // A hint about the use that is about to end, or about another that goes on beside it. Not called
  // without a hint.
  virtual void OnHint(BlockId, const UseHint&) {}
  // How valuable a scorer found the block among those of a sequence: from 0, the least, to 1, the most.
  virtual void OnScore(BlockId, float) {}
  // A use ended, later than all uses before it.
  virtual void OnUsed(BlockId block, uint64_t now_ms) = 0;
  virtual void OnOffer(BlockId block) = 0;
  virtual void OnWithdraw(BlockId block) = 0;
  virtual void OnEvict(BlockId block) = 0;
  // The next to leave, one of those offered; kNullBlock only if none is offered. The block answered leaves at
  // once: OnWithdraw and OnEvict follow.
  virtual BlockId Victim(uint64_t now_ms) = 0;
  // Fills `blocks` with those that it is likely to name next, in order, and answers how many it found in
  // constant time each. The pool prefetches their records together; it is only advice.
  virtual size_t Upcoming(absl::Span<BlockId> blocks) const { return 0; }
  // The rank of a resident block among the others, as far as it can be said in advance: a successor takes it
  // over. Blocks of equal rank are ordered by the last use that the pool knows.
  virtual Rank Standing(BlockId block) const { return {}; }
  // The next calls are about this block, or give it the content with this hash: prefetch the memory of both.
  virtual void Prefetch(BlockId block, uint64_t hash) const = 0;
  // How many blocks are on offer.
  virtual uint32_t offered() const = 0;
  // The most bytes of bookkeeping per block of capacity.
  virtual double bytes_per_block() const = 0;
  // A policy too slow to be asked under the lock (policies/async_policy.h), or null.
  virtual AsyncPolicy* async() { return nullptr; }
};

class Weights;

struct PolicyOptions {
  // The most blocks that the pool can grow to, with the null block.
  uint32_t max_blocks = 0;
  uint64_t seed = 1;
  uint32_t tokens_per_block = 16;
  // Computing a block anew costs 1 + cost_per_depth * blocks in front, relative to the first of a chain. The
  // default is of blocks of 16 tokens and an 8B model (32 layers, 4096 wide), where attention over 30,517
  // tokens costs as much as the weights do.
  double cost_per_depth = 16.0 / 30517;
  // Weights of a policy that was trained; null: those built in.
  std::shared_ptr<const Weights> weights;
};

// The registry of policies, by name. INVALID_ARGUMENT: names the policies there are, or says what is wrong
// with the weights.
struct PolicyEntry {
  std::string_view name;
  std::string_view summary;  // One line for --help.
  absl::StatusOr<std::unique_ptr<ReplacementPolicy>> (*make)(const PolicyOptions& options);
};
absl::Span<const PolicyEntry> ReplacementPolicies();
absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         const PolicyOptions& options);
absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakeReplacementPolicy(std::string_view name,
                                                                         uint32_t max_blocks);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICY_H_
