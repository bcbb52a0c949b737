// Which cached block leaves next. One class per policy, one line in the registry.
//
// A policy sees contents come, be found again and leave, and of the blocks it was offered names the next
// victim. The guards are the pool's, for all policies alike: a block is offered only while it is
//
//   cached     nobody holds or pins it,
//   childless  no resident block of its chain is behind it: leaves go before their parents, and
//   plain      its priority is the default one, and it was not released as never to be used again. Cheaper
//              blocks leave before, dearer ones after all that the policy was offered.
//
// So each block that a policy knows is in one state:
//
//   resident   OnInsert -> OnEvict. Between: OnHit each time its content is found again, OnUsed each time its
//              last holder let go (tail of a request first, so a parent is used later than its children).
//   offered    OnOffer -> OnWithdraw; only what is offered may be a victim. All else comes only while it is not.
//
// A policy that takes over from another is told of all that is resident, parents before children, then of the last
// use of each cached block and of what is on offer, both in the order in which its predecessor would have had them
// leave. The times are those of the past, as far as that order lets them rise.
//
// A policy is deterministic given its seed and what it is shown: no clock, no I/O, no dependence on pointer or
// hash order; ties end in the block id.
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

// What the pool tells a policy of a new content.
struct Content {
  // Of its key: the same content that comes back has the same. Two may share one, once in a very long while.
  uint64_t hash = 0;
  BlockId parent = kNullBlock;  // Resident block in front of it in its chain, if there is one.
  uint64_t now_ms = 0;
};

// What the engine that lets go of a content expects of it. Advice: it may be wrong, or meant to mislead.
enum class Reuse : uint8_t { kUnknown, kExpected, kUnlikely, kNever };
inline constexpr uint8_t kMaxCategory = 15;
struct UseHint {
  Reuse reuse = Reuse::kUnknown;
  uint8_t category =
      0;  // Of the request that used it, 1 to kMaxCategory as engines number them; 0: not said.
  bool says_something() const { return reuse != Reuse::kUnknown || category != 0; }
  friend bool operator==(const UseHint&, const UseHint&) = default;
};

// Numbers that order blocks: the least leaves first.
struct Rank {
  uint64_t major = 0;
  uint64_t minor = 0;
  friend auto operator<=>(const Rank&, const Rank&) = default;
};
class ThinkingPolicy;

// Called under the pool's lock, tens of nanoseconds each.
class ReplacementPolicy {
 public:
  virtual ~ReplacementPolicy() = default;
  virtual std::string_view name() const = 0;
  // The block has a content from now on: it was computed, as nothing of the kind was resident.
  virtual void OnInsert(BlockId block, const Content& content) = 0;
  // The content was asked for again: a match, a duplicate of it, or a touch.
  virtual void OnHit(BlockId block, uint64_t now_ms) = 0;
  // What was said of the use that is about to end, or of one beside it; not called when nothing was.
  virtual void OnHint(BlockId, const UseHint&) {}
  // Where a scorer put the block among those of a sequence it was asked about: 0 the least, 1 the most valuable.
  virtual void OnScore(BlockId, float) {}
  // A use ended, more recently than every one before it.
  virtual void OnUsed(BlockId block, uint64_t now_ms) = 0;
  virtual void OnOffer(BlockId block) = 0;
  virtual void OnWithdraw(BlockId block) = 0;
  virtual void OnEvict(BlockId block) = 0;
  // The next to leave, one of those offered; kNullBlock only if none is. What is answered leaves at once:
  // OnWithdraw and OnEvict follow.
  virtual BlockId Victim(uint64_t now_ms) = 0;
  // Fills `blocks` with those likely to be named next, in order, and answers how many it found at once: what
  // they need of memory is asked for together. Advice.
  virtual size_t Upcoming(absl::Span<BlockId> blocks) const { return 0; }
  // Where a resident block stands among the others, as far as that can be said in advance: what a successor takes
  // over. All alike: by last use, as the pool knows it.
  virtual Rank Standing(BlockId block) const { return {}; }
  // Soon the block is asked about, or the content with this hash given to it: memory for both may be asked for.
  virtual void Prefetch(BlockId block, uint64_t hash) const = 0;
  // Blocks it was offered.
  virtual uint32_t offered() const = 0;
  // Most bytes of bookkeeping per block of capacity.
  virtual double bytes_per_block() const = 0;
  // A policy too slow to be asked under the lock (thinking_policy.h), or null.
  virtual ThinkingPolicy* thinking() { return nullptr; }
};

class Weights;

struct PolicyOptions {
  uint32_t max_blocks = 0;  // Most the pool can grow to, the null block included.
  uint64_t seed = 1;
  uint32_t tokens_per_block = 16;
  // What computing a block anew costs, relative to the first of a chain: 1 + cost_per_depth * blocks in front.
  // The default is an 8B model (32 layers, 4096 wide): attention over 30,517 tokens costs as much as the weights
  // do, and blocks of 16 tokens.
  double cost_per_depth = 16.0 / 30517;
  // Of a policy that was trained; null: those built in.
  std::shared_ptr<const Weights> weights;
};

// The registry: every policy by name. INVALID_ARGUMENT names the policies there are, or says what is wrong with the
// weights.
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
