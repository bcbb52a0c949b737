// Verbs of one session that wait or run: for a step that every rank member must pass, on the device, or
// behind such a verb on the same block.
//
//   waiting  for its step: due(verb) = max(its own `after`, due of the last waiting verb on each of its blocks)
//   running  on the device: a device operation that was started and is not over
//   behind   its step is passed, and an earlier verb on one of its blocks is running or behind itself; or it
//            lacks blocks, which the space is to grow by
//
// Verbs leave waiting in order of (due, arrival), and behind in the order they came to be. Two verbs on one
// block therefore keep their order, but for a touch, which is advice, and a Ref without a step of its own: the
// session holds the block now, and one hold more changes nothing for those that wait. A verb that waits or is
// behind has changed nothing; dropping it is as if it never came.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_PARKED_VERBS_H_
#define KVPOOL_SERVER_SPACE_PARKED_VERBS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/types/span.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "server/space/block_gates.h"
#include "server/space/counted_bytes.h"
#include "server/space/late_releases.h"
#include "server/wire/operation.h"

namespace kvpool {

class Member;

using Waiter = std::function<void(const v1::OperationResult&)>;

struct ParkedVerb {
  Member* member = nullptr;  // The caller.
  uint64_t sequence = 0;
  uint32_t index = 0;
  v1::Operation operation;
  bool on_stream = false;       // Its result is a Completion.
  std::vector<Waiter> waiters;  // Unary calls that wait for it.
  size_t bytes = 0;             // What it takes: ParkedVerbs::BytesOf.
  BlockGates::Id gate = 0;      // Who it is at the gates of its blocks; 0: it stands at none.
  uint64_t promotion = 0;       // A match waits for this one (below.h).
};

// Memory of one session's parked verbs, those on the device among them.
struct BoundsOnParked {
  static constexpr size_t kMaxBytes = 64 << 20;
  static constexpr size_t kMaxBytesOfAll = 1 << 30;
  static constexpr size_t kSmallBytes = 512 << 10;  // Some 900 verbs of one block.
};
using ParkedBytes = CountedBytes<BoundsOnParked>;

class ParkedVerbs {
 public:
  ParkedVerbs() = default;
  ParkedVerbs(ParkedVerbs&&) = default;
  ParkedVerbs& operator=(ParkedVerbs&&) = default;

  // The most blocks that a session's parked verbs may name, the verbs counted too: its members may report no
  // fence. Releases beyond it are late releases, which holds bound. Device operations have a bound of their own, so
  // that they leave room for what waits behind them: a few hundred sequences that fill a block in the same step.
  // What they carry besides counts by its size. Their memory is bounded too, and that of all sessions.
  static constexpr size_t kMaxNames = 65536;
  static constexpr size_t kMaxDeviceNames = 4 * kMaxNames;
  // What a verb takes while it is parked, on so many ranks if it runs on the device.
  static size_t BytesOf(const v1::Operation& operation, uint32_t ranks);
  // Those of all verbs that are here.
  const ParkedBytes& bytes() const { return bytes_; }

  size_t size() const { return by_due_.size() + behind_.size() + running_.size(); }
  bool any_waiting() const { return !by_due_.empty() || !late_.empty(); }
  struct Tally {
    size_t verbs = 0, blocks = 0;
    size_t names() const { return verbs + blocks; }
  };
  const Tally& on_host() const { return on_host_; }
  const Tally& on_device() const { return on_device_; }  // Those that run there, and those that are to.
  // What a fence may let go: the work of those that wait or are behind, and the late releases. A verb of block sets is as
  // much besides as a set of the session may be.
  struct Work {
    size_t names = 0, of_sets = 0;
  };
  Work to_be_let_go() const { return {.names = work_.names + late_.blocks(), .of_sets = work_.of_sets}; }

  // What an operation that names these blocks has to wait for.
  struct Wait {
    uint64_t due = 0;      // A step; 0: none.
    bool held_up = false;  // A verb on one of the blocks is running, or behind one.
  };
  Wait WaitOf(const v1::Operation& operation) const;
  // The same in parts, for one that names many: it begins with the operation's own step, and nothing else is asked
  // where AnyWaitFor is false.
  bool AnyWaitFor(const v1::Operation& operation) const;
  void Extend(absl::Span<const uint32_t> blocks, Wait* wait) const {
    for (const uint32_t block : blocks) Extend(block, wait);
  }
  // Is one of these blocks a source or a destination of a device operation that is not over?
  bool AnyOnDevice(absl::Span<const BlockRef> blocks) const;
  // A verb that waits for a step is parked part by part: all its blocks are named, once each time that it names them,
  // and then it is parked. Pop answers the next that is due once step `passed` is passed, which may be held up; then its
  // blocks are unnamed. nullopt: all wait.
  void Name(uint64_t due, absl::Span<const uint32_t> blocks);
  void Park(uint64_t due, ParkedVerb verb);
  std::optional<ParkedVerb> Pop(uint64_t passed);
  void Unname(absl::Span<const uint32_t> blocks);
  // A verb that waits behind others has entered, and stands behind them at the gates of its blocks, part by part. Then it
  // is parked: behind those or, if there are none, until there are blocks for it. One that was admitted is in front of the
  // others again, and one that names no block need not have entered.
  BlockGates::Id Enter() { return gates_.Enter(); }
  void StandLast(BlockGates::Id gate, absl::Span<const uint32_t> blocks) { gates_.StandLast(gate, blocks); }
  void ParkBehind(ParkedVerb verb);
  // At most so many of the verbs that wait or are behind, for a session that has ended; empty: there are none.
  std::vector<ParkedVerb> PopSome(size_t count);
  // The verb of this call, for a repetition that waits for it too; null: it is not parked.
  ParkedVerb* Find(const Member* member, uint64_t sequence, uint32_t index);

  // ---- Late releases
  const LateReleases& late() const { return late_; }
  // Gives the refs back when step `due` is passed and no device operation uses them.
  void ReleaseLate(uint64_t due, const v1::Release& release, absl::Span<const BlockRef> refs) {
    late_.Add(due, release, refs);
  }
  // The next part of what may be released by now: see LateReleases::Take.
  v1::Release TakeLate(uint64_t passed);

  // ---- Device operations
  // A verb that has entered, or was admitted, stands in front of all others at the gates of the blocks that it reads or
  // writes, part by part. Then it is started. No running one has this `id`, and `named` is its WeightOf; the verb's operation
  // is not looked at.
  void StandFirst(BlockGates::Id gate, absl::Span<const uint32_t> blocks) { gates_.StandFirst(gate, blocks); }
  void Start(uint64_t id, ParkedVerb verb, size_t named);
  // The operation is over, and is to leave its gate. REQUIRES: it is running.
  ParkedVerb Finish(uint64_t id);
  // All that run, of a session that has ended: its gates are of no use any more.
  std::vector<ParkedVerb> TakeRunning();
  // The next verb that nothing holds up any more, in order of arrival; nullopt: there is none. Until it is parked or
  // started again, or has left, it holds up those behind it.
  std::optional<ParkedVerb> Admit();
  // Those that lacked blocks may try again.
  void AdmitLacking();
  // An operation that is over, or a verb that was admitted and is applied or refused, leaves so many of its blocks, at most:
  // they hold nothing up any more. True: there are more.
  bool Leave(BlockGates::Id gate, size_t most);

 private:
  struct LastOnBlock {
    uint64_t due = 0;
    uint32_t verbs = 0;
  };
  struct Running {
    ParkedVerb verb;
    size_t named = 0;
  };
  // A call's verb is where its member, sequence and index say.
  using Call = std::tuple<const Member*, uint64_t, uint32_t>;
  static Call CallOf(const ParkedVerb& verb) { return {verb.member, verb.sequence, verb.index}; }
  std::optional<ParkedVerb> PopAny();
  void Extend(uint32_t block, Wait* wait) const;
  ParkedVerb Take(std::multimap<uint64_t, ParkedVerb>::iterator it);
  void Add(const ParkedVerb& verb);
  void Subtract(const ParkedVerb& verb);

  std::multimap<uint64_t, ParkedVerb> by_due_;
  absl::btree_map<Call, ParkedVerb*> by_call_;  // All that are here.
  std::map<uint64_t, Running> running_;
  // Keyed by block id: the last verb on it that waits for a step. A tree, since it has to grow part by part.
  absl::btree_map<uint32_t, LastOnBlock> last_;
  // Verbs that run or are behind.
  BlockGates gates_;
  std::map<BlockGates::Id, ParkedVerb> behind_;
  // Of those behind: they may go, or may go as soon as there are blocks for them. Who has got one in front of it since
  // stays in the set until it is looked at.
  std::set<BlockGates::Id> free_to_go_, lacking_;
  std::set<BlockGates::Id> on_device_gates_;  // Those that run.
  Tally on_host_, on_device_;
  Work work_;
  ParkedBytes bytes_;
  LateReleases late_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_PARKED_VERBS_H_
