// All of a space that changes, but for the verbs: pool, slabs, sessions, pressure.
//
// Slabs. made >= grown: a slab that was made is sent to every rank member of every session, at most 8 frames
// unacknowledged a session. Its blocks enter the pool ("grown") once every ready session has mapped it. A ready
// session that has not after kPatienceMs (a stopped process) stops being ready instead of stopping the others.
// A session is ready once its ranks are complete and have mapped all grown slabs, so:
//
//   every block that an answer names lies in a slab that all members of that session have mapped
//
// Growth comes before eviction. While the space's largest size, the device's budget and the tenant's share allow
// another slab, nothing cached is reclaimed but what an operator asks for: a verb that is short of blocks waits, or
// is told to ask again. Slabs are made as long as
//
//   spare + coming < max(ahead, wanted)
//
//   spare    free; less what is promised, once a session came short for what others were promised
//   coming   in slabs that were made and are not in the pool
//   ahead    the low watermark, or if more 1/32 of the capacity, or if more what was learned: twice as much each time that
//            a verb came short before a slab was there, half as much each time that most of it was left. The last two at
//            least a quarter of a slab, and at most the more of that and a quarter of the capacity, and four slabs: so
//            much, and the rest of a slab, is all that a space has unasked for
//   wanted   what a verb or a guarantee lacks, until the next slab is there
//
// Not thread-safe: the space's mutex is around it. Time comes in as an argument.
#ifndef KVPOOL_SERVER_SPACE_SPACE_STATE_H_
#define KVPOOL_SERVER_SPACE_SPACE_STATE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/layout.pb.h"
#include "server/base/histogram.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policies/async_policy.h"
#include "server/space/deferred.h"
#include "server/space/session.h"
#include "server/space/space_geometry.h"

namespace kvpool {

inline constexpr uint32_t kMaxSlabsInFlight = 8;
// How long a slab waits for a ready session to map it.
inline constexpr uint64_t kPatienceMs = 1000;
// Growth that made no step for so long is none: the device does not answer, as a member would be waited for no more.
inline constexpr uint64_t kGrowthStallMs = 2 * kPatienceMs;
// Device memory that ran out for other reasons than the budget is asked for again after this.
inline constexpr uint64_t kGrowthRetryMs = 10000;

// Blocks reclaimed under one hold of the space's mutex: some 20 us.
inline constexpr uint32_t kReclaimSlice = 256;

struct SpaceLease {
  LeaseOutcome outcome;
  bool growing = false;
};

// What a space is, for life.
struct SpaceFacts {
  uint64_t id = 0;
  std::string tenant;       // "default@1000", or a name shared by several uids.
  std::string tenant_name;  // "default".
  v1::Fingerprint fingerprint;
  v1::Layout layout;
  v1::SpaceKind kind = v1::SPACE_KIND_SLABS;
  std::vector<Device*> devices;      // By rank.
  std::vector<size_t> rank_devices;  // By rank: index into the budget.
  SpaceGeometry geometry;
  std::string hash_seed;  // 32 bytes.
  double low_watermark = 0;
  double high_watermark = 0;
};

// One slab on all ranks.
struct SlabRow {
  uint32_t first_block = 0;
  uint32_t block_count = 0;
  uint64_t bytes = 0;  // On each rank.
  uint64_t made_ms = 0;
  std::vector<std::shared_ptr<Slab>> by_rank;
};

// A frame for a member. The fd or handle of the slab is taken when it is sent, outside the mutex.
struct OutgoingFrame {
  std::shared_ptr<Session> session;
  std::shared_ptr<AttachPeer> peer;
  v1::AttachFrame frame;
  std::shared_ptr<Slab> slab;  // Null: the frame carries no memory.
};

// What was counted since the space was made, beside PoolCounters. Nothing but uint64_t and arrays of it, as there.
struct SpaceCounters {
  std::array<uint64_t, 24> operations{};  // Indexed by v1::Operation::VerbCase.
  std::array<uint64_t, 8> shortfalls{};   // Indexed by v1::Shortfall.
  uint64_t batches = 0;
  uint64_t growth_failures = 0;  // Slabs that a device refused although the budget had room.
};

class SpaceState {
 public:
  SpaceState(const SpaceFacts* facts, const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy,
             uint64_t now);

  // ---- Sessions
  // Enters a new session. RESOURCE_EXHAUSTED: its guarantee needs more slabs than there are.
  absl::Status Enter(Session* session, uint64_t now, Deferred* deferred);
  // A member has joined: slabs go out to it.
  void OnJoined(Member* member, uint64_t now, Deferred* deferred);
  void OnSlabAck(Member* member, const v1::SlabAck& ack, uint64_t now, Deferred* deferred);
  void OnProcessDead(Member* member, uint64_t now, Deferred* deferred);
  // `except`: a member whose connection is left alone (it asked, or is gone); may be null.
  void EndSession(Session* session, EndKind kind, const std::string& reason, const Member* except,
                  uint64_t now, Deferred* deferred);
  // Gives back what the ended session held; answers how many holds, the sink not counted. While device operations of it
  // are not over, it is given back when the last of them is.
  uint64_t Free(Session* session, uint64_t now, Deferred* deferred);

  // ---- Slabs
  void AddSlab(SlabRow row, uint64_t now, Deferred* deferred);
  // Puts slabs into the pool that all ready sessions have mapped.
  void Grow(uint64_t now, Deferred* deferred);
  uint32_t made_blocks() const;  // In all slabs, the null block included.
  // Ids below this one lie in slabs that every rank of the session has mapped.
  uint32_t blocks_mapped_by(const Session& session) const;
  bool complete() const;  // It has all the slabs it can ever have.
  // Is a slab to be made?
  bool NeedsSlab() const;
  // The same, or a slab is on its way to the members.
  bool WantsSlab() const { return grown < slabs.size() || NeedsSlab(); }
  bool short_of_blocks() const;
  bool may_grow() const { return may_grow_; }
  void set_may_grow(bool may_grow);
  std::vector<SlabRow> TakeSlabs();
  // BlockPool::Lease. While the space can grow it evicts nothing and answers what there is; `growing`: the rest comes
  // with a slab.
  SpaceLease Lease(Holder session, uint64_t now, uint32_t count, uint32_t min, std::vector<BlockRef>* out);
  // Some verb came short for what sessions are promised: from now on that is no spare.
  void CountPromises() { promises_count_ = true; }

  // ---- Notices
  void Post(Member* member, v1::NoticeKind kind, NoticeBoard::Text text);
  void PostAll(Session* session, v1::NoticeKind kind, const NoticeBoard::Text& text);
  // A member with something pending: see CollectWakes.
  void Touch(Member* member);
  // A parked verb has its result.
  void Complete(ParkedVerb verb, const v1::OperationResult& result, Deferred* deferred);
  // Moves the listeners of members with something pending into `deferred`.
  void CollectWakes(Deferred* deferred);

  // Of its session's list. False: it is not there.
  bool RemoveOperation(const DeviceOperation* operation);

  // After verbs: pressure, and whether the housekeeper has work.
  void AfterVerbs(uint64_t now, Deferred* deferred);
  void Observe(const std::vector<Eviction>& evictions);
  uint32_t stale_members(uint64_t now) const;
  // Both answer the policy before, to be destroyed outside the mutex; the latter also null, as hand_over.h has it.
  std::unique_ptr<ReplacementPolicy> SetPolicy(std::unique_ptr<ReplacementPolicy> policy, uint64_t now);
  std::unique_ptr<ReplacementPolicy> FinishHandOver(BlockPool::HandOver* hand_over, uint32_t events);
  // Evicted blocks, by the policy of the time.
  std::map<std::string, EvictedBlocks> evicted_by_policy() const;
  // No session, and no process that may still map its slabs.
  bool idle() const { return sessions.empty() && mapping_processes == 0; }
  uint32_t low_blocks() const { return low_blocks_; }
  uint32_t high_blocks() const { return high_blocks_; }
  uint32_t free_blocks() const { return pool.counts()[static_cast<int>(BlockState::kFree)]; }

  const SpaceFacts& facts;
  BlockPool pool;
  std::vector<Session*> sessions;  // Open, or ended and not gone; by id.
  std::vector<SlabRow> slabs;
  uint32_t grown = 0;  // Slabs in the pool.
  std::deque<OutgoingFrame> outbox;
  bool sending = false;          // Some thread empties the outbox: frames keep their order.
  std::vector<uint32_t> sealer;  // By block: session that sealed it, 32 bits of its id; 0: none.
  SpaceCounters counters;
  std::map<std::string, EvictedBlocks> evicted_before;  // Of policies that others have followed.
  EvictedBlocks evicted_at_switch{};                    // The pool's counters then.
  Histogram reclaim, lifetime, idle_before_evict, reuse_gap;
  Breaker decisions;
  Histogram decision_time;
  uint32_t mapping_processes = 0;  // That were sent a slab and have not died.
  bool lease_was_short = false;    // Since verbs were last looked after: others may hold more than they use.
  bool pressure = false;
  bool draining = false;
  bool closed = false;
  uint64_t last_used_ms = 0;
  uint64_t retry_growth_ms = 0;

 private:
  void SendSlabs(Session* session, Deferred* deferred);
  void EnterPending(uint64_t now, Deferred* deferred);
  void UpdateReady(Session* session, uint64_t now, Deferred* deferred);
  void UpdatePressure(uint64_t now);
  void AskForLeases(uint64_t now);
  // So many blocks are wanted beside those there are. False: growth will not bring them.
  bool GrowFor(uint32_t blocks, uint64_t now);
  uint32_t AheadBlocks() const;  // As it should be at this capacity, with what was learned.
  // Before a slab's blocks enter the pool: did those that were spare last until now?
  void LearnAhead();
  uint32_t spare_blocks() const;
  uint32_t coming_blocks() const { return made_blocks() - (grown == 0 ? 0 : pool.capacity() + 1); }

  std::vector<Session*> pending_;  // Guarantees that wait for slabs that were made and are not grown.
  std::vector<Member*> touched_;
  uint32_t low_blocks_ = 0;
  uint32_t high_blocks_ = 0;
  uint32_t ahead_blocks_ = 0;
  uint32_t learned_blocks_ = 0;  // Of ahead_blocks_.
  bool came_short_ = false;      // Some verb, since the last slab entered the pool.
  uint32_t wanted_blocks_ = 0;
  bool promises_count_ = false;
  uint64_t asked_ms_ = 0;         // When sessions were last asked for leases.
  bool may_grow_ = true;          // As far as is known: there is room in the space and in the budget.
  bool growing_ = false;          // A slab is wanted, or under way …
  uint64_t growth_moved_ms_ = 0;  // … and made its last step then.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_STATE_H_
