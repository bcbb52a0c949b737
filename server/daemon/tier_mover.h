// Moves blocks between the pools of all spaces and the tiers below them: one thread, which no verb waits for.
//
//   down   What is next to leave is copied while it is still cached. A sealed block's bytes do not change until its generation
//          moves, so: read ref and key under the mutex, copy without it, and look at the generation again under it. A copy that
//          failed, whose block has moved, or that is not what was sealed (ContentChecks), is thrown away. The block itself is not
//          touched: it leaves as it would have left. Of a space that no session uses all is copied, as the space may be closed
//          for the sake of another.
//   up     Values are loaded into buffers, each checked by the tier. Those that are there are given blocks in the order of
//          their chain: leased, filled without the mutex on all ranks, sealed. What comes too late goes to nobody, and where a
//          copy has failed the chain ends.
//
// Both are done in slices of kSlice blocks. Loads of one value are shared by all that wait for it.
//
// Tiers come and go (TierSet). A round goes by one view of them: what it notes of a tier by its slot is in the spaces or has
// been given to the tier when AwaitRound is over, and what was given to it is noted until the tier has answered.
#ifndef KVPOOL_SERVER_DAEMON_TIER_MOVER_H_
#define KVPOOL_SERVER_DAEMON_TIER_MOVER_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/support/mutex.h"
#include "server/daemon/slab_copier.h"
#include "server/daemon/snapshot.h"
#include "server/space/space.h"
#include "server/tiers/tier_set.h"

namespace kvpool {

class TierMover {
 public:
  using Spaces = std::function<std::vector<std::shared_ptr<Space>>()>;
  struct Options {
    TierSet* tiers = nullptr;            // Outlives it.
    std::unique_ptr<SlabCopier> copier;  // It has the devices of all spaces.
    uint64_t buffer_bytes = 0;           // Each way.
    bool thread = true;                  // False: tests call RunOnce.
  };
  TierMover(Options options, Spaces spaces);
  ~TierMover();

  // Its thread is gone, and what was on its way down is written. Promotions that come later are never begun.
  void Stop();
  // Tiers have come or gone.
  void Wake();
  // Copies down what is resident and not below: what was used last goes first, behind its parents. What is on its way when
  // the time is over is still written. REQUIRES: Stop was called.
  TierFlush Flush(std::chrono::milliseconds limit);
  void Promote(std::shared_ptr<Space> space, std::shared_ptr<Promotion> promotion);
  // What it does from now on has seen what changed before: nothing of an earlier round is under way.
  void AwaitRound();
  // One round. False: there is nothing to do before a load has come, or a space has changed.
  bool RunOnce();

 private:
  // Blocks placed under one hold of a space's mutex.
  static constexpr size_t kSlice = 64;
  // So many blocks next to leave have a copy below, or one on its way: at least kAhead, and twice what reclaiming takes at
  // once, as far as their space's share of each tier goes (TierSet::Wanted). They are looked for under one hold of the mutex, a millisecond
  // for kMostAhead.
  static constexpr uint32_t kAhead = 1024, kMostAhead = 16384;
  // Blocks of a space without sessions that are looked at under one hold of its mutex: 0.2 ms.
  static constexpr uint32_t kLookedAt = 1024;

  // A value on its way up. The mutex is around `over` and `result`; the buffer is whole once it is over.
  struct Fetch {
    std::shared_ptr<TierBuffer> buffer;
    uint64_t until_ms = 0;  // The tier gives up then.
    TierResult result = TierResult::kMiss;
    bool over = false;
  };
  struct Job {
    std::shared_ptr<Space> space;
    std::shared_ptr<Promotion> promotion;
    std::vector<std::shared_ptr<Fetch>> fetches;  // One for each block that was asked for.
    size_t next = 0;                              // The first block that has not come.
    bool begun = false;
    std::vector<BlockRef> held;
  };
  // What the callbacks of a tier write to, which may come when nobody waits any more.
  struct Mailbox {
    Mutex mu;
    CondVar changed, round_over;
    uint64_t rounds_begun ABSL_GUARDED_BY(mu) = 0, rounds_over ABSL_GUARDED_BY(mu) = 0;
    bool news ABSL_GUARDED_BY(mu) = false;
    bool stopping ABSL_GUARDED_BY(mu) = false;
    std::vector<Job> jobs ABSL_GUARDED_BY(mu);  // Those that have come in.
    // Values that these have been given and have not answered.
    absl::flat_hash_map<TierKey, TierSet::Members> going_down ABSL_GUARDED_BY(mu);
    std::array<uint64_t, TierSet::kMost> bytes_down ABSL_GUARDED_BY(mu){};  // Indexed by slot.
    // Keyed by space and the tier's id: it took nothing of the space's, and is asked again then.
    absl::flat_hash_map<std::pair<uint64_t, uint64_t>, uint64_t> give_up_ms ABSL_GUARDED_BY(mu);
  };
  // What becomes of copies that were given to tiers at once. The mailbox's mutex is around it.
  struct Batch {
    struct Value {
      TierSet::Members left = 0;  // These have not answered.
      bool stored = false;        // Some have it.
    };
    struct OfTier {
      uint64_t id = 0;
      size_t left = 0;
      // It took some; had no room for some; failed at some.
      bool stored = false, refused = false, failed = false;
    };
    std::vector<Value> values;
    std::array<OfTier, TierSet::kMost> tiers;  // Indexed by slot.
  };
  // A block under way: where its bytes are on each rank, in memory that stays mapped.
  struct Placed {
    BlockRef ref;
    BlockKey key;
    std::optional<uint32_t> sum;  // BlockPool::SumOf.
    std::vector<std::shared_ptr<Slab>> slabs;
    std::vector<uint64_t> at;
  };

  void Run();
  bool RunRound();
  bool Advance(Job* job);
  // Holds what is in front of its blocks: leases for them would take that first. False: the space is closed.
  bool Begin(Job* job);
  // The daemon holds the block under this key until the job is over; kNullRef: it is not resident, or can't be held. To find it
  // may take as long as its chain is: others are let in before.
  static BlockRef Hold(SpaceTurn& turn, Space* space, Holder holder, const BlockKey& key, Job* job)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(space->mu);
  // The tier gave up on it, as the one who asked had less time than until `until_ms`.
  bool GaveUp(const Fetch& fetch, uint64_t until_ms);
  // True: some were asked for.
  bool AskFor(Job* job);
  // Brings up what has come, as far as it is the next of its chain. False: nothing more comes of this job.
  bool BringUp(Job* job, bool* moved);
  void Finish(Job* job);
  bool MoveDown(const std::shared_ptr<Space>& space);
  // Appends the next blocks of a space that no session uses. True: there are more.
  bool NextUnused(const Space& space, std::vector<Below::Going>* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space.mu);
  static uint32_t Ahead(const Space& space) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space.mu);
  bool GivenUp(const Space& space, uint64_t tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mail_->mu);
  // So much of the buffers each tier may have. One that is alone leaves some to one that comes.
  uint64_t PartOfEach(const Space& space) const;
  // All but the tiers that took nothing of it a moment ago, or that have as much of the buffers as each may have.
  // `room` gets how many bytes more each of these may have of the buffers.
  TierSet::Members Taking(const Space& space, std::array<uint64_t, TierSet::kMost>* room);
  // Some tier whose values outlive the daemon takes something of it.
  bool TakesSome(const Space& space);
  // A block and the tiers that are to have it.
  struct Copy {
    Below::Going going;
    TierSet::Members to = 0;
  };
  // What one is to have of those, and is not on its way there.
  std::vector<Copy> Wanted(const Space& space, absl::Span<const Below::Going> blocks);
  bool JobsWait();
  // What is resident and not below, in the order in which Flush writes.
  std::vector<Copy> Unwritten(Space* space);
  static uint64_t Demoted(const std::vector<std::shared_ptr<Space>>& spaces);
  // Answers how many of the blocks are done with: fewer where no buffer is left.
  size_t CopyDown(const std::shared_ptr<Space>& space, absl::Span<const Copy> blocks);
  static void Place(const Space& space, Placed* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space.mu);
  // Appends where the value of a block is on each rank, and in the buffer.
  static void AddRanges(const Space& space, const Placed& block, char* value,
                        std::vector<SlabCopier::Range>* ranges);
  // Copies of the first of these blocks, as far as there are buffers. None: the block has moved before, its copy has failed, or it
  // is not what was sealed, which is what `compared` is for.
  std::vector<std::shared_ptr<TierBuffer>> Read(const Space& space, absl::Span<const Placed> blocks,
                                                ContentChecks::Part* compared, bool* failed);
  // Their copies have failed: they are looked at again after a while.
  void Drop(Space* space, absl::Span<const Placed> placed, absl::Span<const Copy> blocks);
  // Once a second at most.
  void TellOfFailure(const Space& space, const absl::Status& why);
  static uint64_t ValueBytes(const Space& space);

  TierSet& tiers_;
  const Spaces spaces_;
  const uint64_t buffer_bytes_;
  const std::unique_ptr<SlabCopier> copier_;
  BufferStock down_, up_;
  const std::shared_ptr<Mailbox> mail_ = std::make_shared<Mailbox>();
  // Only the mover's thread uses these, and Flush.
  std::shared_ptr<const TierView> now_;  // The tiers of the round under way; null: none is.
  std::vector<Job> jobs_;
  absl::flat_hash_map<TierKey, std::weak_ptr<Fetch>> fetching_;
  // Loads that come ask for no look at what is next to leave: it has a pace of its own.
  std::chrono::steady_clock::time_point down_at_;
  uint64_t rounds_ = 0;     // Spaces take turns at being the first.
  size_t spaces_seen_ = 1;  // So many share the tiers.
  absl::flat_hash_map<uint64_t, uint32_t>
      looked_at_;  // Keyed by space, of those that no session uses: blocks up to this one were looked at.
  std::vector<uint64_t> writers_;                  // Ids of the tiers for which they were.
  bool no_buffers_ = false;                        // The round under way found none left.
  std::chrono::steady_clock::time_point tell_at_;  // No failed copy is told of before.
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_TIER_MOVER_H_
