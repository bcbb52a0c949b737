// An engine's hold on a space of KV blocks: attach, map, lease, share.
//
// What an engine process does between scheduling and kernels never waits for the daemon:
//
//   Lease            from the session's magazine: leased blocks kept here, refilled in the background
//   Release          a block that was never sealed, and whose step is done, goes back to the magazine;
//                    everything else is queued
//   Seal Ref Touch Pin Unpin SetRetention    queued, sent in order, in batches, on the Step stream
//   Match            sent at once; the answer is waited for when it is needed, with holds already taken
//
// A session is one of these, and moves only downwards:
//
//   open       all verbs work
//   ended      the daemon ended it (status(): ABORTED and why)          | Lease and Match answer status();
//   detached   the daemon is gone, or has lost an answer
//              (status(): UNAVAILABLE and why)                          | Release, Seal and the like do nothing;
//   forked     this process is a fork of the one that opened it         | mappings stay valid (but not in a fork)
//
// A broken stream is no state: it is opened again, and batches without an answer are sent again, applied
// once.
//
// Thread-compatible: one thread at a time uses a session, its Blocks and its pending answers; exceptions are
// marked. The session runs two threads of its own: one for the stream, one for the attach socket.
#ifndef KVPOOL_CLIENT_SESSION_H_
#define KVPOOL_CLIENT_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/blocks.h"
#include "client/release_hint.h"
#include "client/session_options.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/layout.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/limits.h"

namespace kvpool {

struct AnswerState;
class SessionRep;

// Holds that a match took. Those that are not moved out are given back.
struct MatchHit {
  uint64_t tokens = 0;         // Length of the common prefix.
  std::vector<Blocks> groups;  // Parallel to the groups asked for.
  v1::MissReason miss = v1::MISS_REASON_NONE;
};

// What became of sealed blocks.
struct SealOutcome {
  // Parallel to the blocks. Its own ref: sealed. Another ref: the key existed, and `duplicates` holds that
  // block; the caller's own stays leased and private. Null: refused, or a duplicate that was to be left.
  std::vector<BlockRef> canonical;
  Blocks duplicates;
  std::vector<v1::Refusal> refused;
};

// The block set that a question is answered from, and the caller's holds on it.
struct EpisodeTable {
  uint32_t group = 0;
  Blocks blocks;
  uint32_t last_block_tokens = 0;  // 0: it is full.
};
struct EpisodeHit {
  std::string name;
  float similarity = 0;
  std::vector<EpisodeTable> tables;
};

// An answer that is on its way. Move-only; may be dropped at any time, and then whatever holds come are given
// back.
template <typename Answer>
class Pending {
 public:
  explicit Pending(std::shared_ptr<AnswerState> state) : state_(std::move(state)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&& other) noexcept {
    Abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  ~Pending() { Abandon(); }

  bool Ready() const;
  // Takes the answer, once. DEADLINE_EXCEEDED: it may be asked for again; other errors are the daemon's, or
  // the session's end.
  absl::StatusOr<Answer> Wait(Deadline deadline);

 private:
  void Abandon();
  std::shared_ptr<AnswerState> state_;  // Null once taken.
};
using PendingMatch = Pending<MatchHit>;
using PendingSeal = Pending<SealOutcome>;

struct GroupKeys {
  uint32_t group = 0;
  std::string_view keys;  // One after another (KeyBytes, for a PrefixHasher's).
  uint32_t key_bytes = 32;
};

// Consecutive blocks of one sequence; see v1::Seal.
struct SealArguments {
  uint32_t group = 0;
  absl::Span<const BlockRef> blocks;
  std::string_view keys;  // blocks * keys_per_block * key_bytes bytes.
  uint32_t key_bytes = 32;
  uint32_t keys_per_block = 1;
  std::string_view parent_key;    // Empty at the root.
  bool leave_duplicates = false;  // Where a key exists, the block that has it is not held.
  uint64_t after = kCurrentStep;
};

struct SessionCounters {
  uint64_t batches = 0, operations = 0,
           blocks = 0;               // Sent on the stream: blocks and keys named, each once per verb.
  uint64_t leased = 0, refills = 0;  // Blocks leased by the daemon; answers that brought them.
  uint64_t refused = 0;              // Blocks that a verb could not be applied to.
  uint64_t reconnects = 0;
};

class Session {
 public:
  // Opens a session, or joins one as another of its members (`invitation` is from its Invitation()). Returns
  // when the memory is mapped and, without warm-up, the guaranteed blocks can be leased. UNAVAILABLE: no
  // daemon there, or draining; FAILED_PRECONDITION: layout or fingerprint mismatch, naming both sides;
  // RESOURCE_EXHAUSTED: the guarantee cannot be given, with the numbers.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const SessionOptions& options);
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options,
                                                       std::string_view invitation);
  // Closes the session if this is its sole member and every step begun is done. Otherwise kernels may still run: it
  // only hangs up, and its blocks come free when its processes are gone.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  // Sends what is queued, ends the session and gives back all that it holds, at once: the caller's word that no member has
  // work on the device any more. Outstanding Blocks turn void.
  absl::Status Close(Deadline deadline);
  // For one that is closed, or has ended, and is kept: its threads end and its memory is taken out of the process, as its
  // destructor does. What it was can still be asked; base() is 0. The caller uses no address in its memory any more.
  void Dismantle();

  // ---- What it is
  uint64_t id() const;
  // Bytes that let another process join; secret.
  std::string Invitation() const;
  const std::string& hash_seed() const;  // For PrefixHasher.
  const v1::Layout& layout() const;
  uint64_t block_stride_bytes() const;
  uint32_t max_blocks() const;  // Most the space can have, the null block included.
  // Where padding writes go: leased to this session, never sealed. Null before warm-up is over.
  BlockRef sink_block() const;
  // OK while open. Any thread, as are the five that follow.
  absl::Status status() const;
  uint32_t capacity_blocks() const;  // Usable, as last heard; the null block included.
  // Mapped here, the null block included: no answer names a block beyond. At least capacity_blocks(), which comes later.
  uint32_t mapped_blocks() const;
  bool under_pressure() const;
  bool draining() const;
  SessionCounters counters() const;

  // ---- Memory: block b is at base() + b * block_stride_bytes(), a host address or a device address.
  uint64_t base() const;
  uint64_t address(BlockId block) const { return base() + Index(block) * block_stride_bytes(); }
  // 16 bytes of the GPU that it is on; empty: host memory.
  std::string device_uuid() const;
  // Host memory only.
  std::byte* data(BlockRef block) const { return reinterpret_cast<std::byte*>(address(block.id)); }
  // Maps the pool over the scratch and tells the daemon. The caller's work on scratch must be done.
  absl::Status FinishWarmup();

  // ---- Steps: numbers that grow, the same on all members. Work launched after BeginStep belongs to that
  // step.
  uint64_t BeginStep();
  // For members that are told their number by the scheduler. Smaller numbers than the current are ignored.
  void BeginStep(uint64_t step);
  uint64_t current_step() const;
  uint64_t passed_step() const;  // All rank members are done with it, as far as is known here. Any thread.
  // This member is done with everything through `step`.
  void CompleteStep(uint64_t step);
  // The same, said by the device when the work that is on the stream now is done. `cuda_stream`: a CUstream
  // of the current context. Does not wait.
  absl::Status CompleteStepOnStream(uint64_t step, void* cuda_stream);

  // ---- Leases
  // Blocks that Lease and LeaseWithin will get for sure: the magazine, and what is left of the guarantee.
  uint32_t free_blocks() const;
  // From the magazine, all or none, without waiting. RESOURCE_EXHAUSTED: it holds fewer (a refill is under
  // way), with the numbers and the daemon's reason.
  absl::StatusOr<Blocks> Lease(uint32_t count);
  // The same, waiting for refills.
  absl::StatusOr<Blocks> LeaseWithin(uint32_t count, Deadline deadline);
  // For engines that keep tables of bare refs: fills `out`, or leaves it alone. Given back by Release.
  absl::Status LeaseRefs(absl::Span<BlockRef> out);
  absl::Status LeaseRefsWithin(absl::Span<BlockRef> out, Deadline deadline);
  // For those who wait while others use the session: any thread. Returns once the daemon has answered another refill than
  // the `refills` of counters(), or it is worth another try anyhow; false: the deadline.
  bool AwaitRefill(uint64_t refills, Deadline deadline);
  // Gives back one hold on each ref. Never fails and never waits; refs that are not held are counted in
  // `refused`.
  void Release(absl::Span<const BlockRef> blocks, uint64_t after = kCurrentStep);
  // The same, saying what is expected of them: a conversation is over, a beam was pruned. INVALID_ARGUMENT, and
  // nothing is given back: a hint that is none.
  absl::Status ReleaseWithHint(absl::Span<const BlockRef> blocks, const ReleaseHint& hint,
                               uint64_t after = kCurrentStep);

  // ---- Sharing. RESOURCE_EXHAUSTED: 1024 calls are queued already, and nothing was done.
  absl::StatusOr<PendingMatch> Match(absl::Span<const GroupKeys> groups);
  // Of group 0 alone, with keys of 32 bytes.
  absl::StatusOr<PendingMatch> Match(std::string_view keys);
  absl::StatusOr<PendingSeal> Seal(const SealArguments& arguments);
  // One more hold on blocks that this session holds.
  absl::StatusOr<Blocks> Ref(absl::Span<const BlockRef> blocks);
  absl::Status Touch(absl::Span<const BlockRef> blocks);
  // The longest time of Pin and SetRetention.
  static constexpr std::chrono::milliseconds kMaxTtl{kMaxTtlMs};
  // Of sealed blocks, held or not; see v1::Pin and v1::SetRetention. INVALID_ARGUMENT: a time or priority beyond its limit, and
  // nothing was done. Blocks that are refused, stale or beyond the tenant's budget, are counted in `refused`.
  absl::Status Pin(absl::Span<const BlockRef> blocks, std::chrono::milliseconds ttl);
  absl::Status Unpin(absl::Span<const BlockRef> blocks);
  absl::Status SetRetention(absl::Span<const BlockRef> blocks, uint32_t priority,
                            std::chrono::milliseconds ttl,
                            std::chrono::milliseconds half_life = std::chrono::milliseconds(0));

  // ---- On the device: see kvpool/v1/score.proto for what each field means. client/live_sequence.h keeps a sequence's
  // blocks and keys in step with what these do to it. RESOURCE_EXHAUSTED as above. Until its answer is here, an
  // operation keeps the blocks that it names: what is released meanwhile goes back when it is over.
  absl::StatusOr<Pending<v1::ScoreResult>> Score(const v1::Score& request, uint64_t after = kCurrentStep);
  // The victims are released: their holds are gone when the answer is here.
  absl::StatusOr<Pending<v1::PruneResult>> Prune(const v1::Prune& request, uint64_t after = kCurrentStep);
  // The same of the blocks that are not in the new table. Its new blocks are leased, and given back if nobody waits.
  absl::StatusOr<Pending<v1::CompactResult>> Compact(const v1::Compact& request,
                                                     uint64_t after = kCurrentStep);
  absl::StatusOr<Pending<v1::PlanBudgetsResult>> PlanBudgets(const v1::PlanBudgets& request,
                                                             uint64_t after = kCurrentStep);
  // ---- Block sets under names, found again by what they are about: see v1::PutEpisode. A set holds its blocks by itself.
  absl::StatusOr<Pending<v1::PutEpisodeResult>> PutEpisode(const v1::PutEpisode& request,
                                                           uint64_t after = kCurrentStep);
  absl::StatusOr<Pending<EpisodeHit>> ChooseEpisode(const v1::ChooseEpisode& request);
  // Waits until all that was queued before is answered (parked or applied).
  absl::Status Flush(Deadline deadline);

 private:
  using Rep = SessionRep;
  explicit Session(std::unique_ptr<Rep> rep);
  absl::StatusOr<std::shared_ptr<AnswerState>> SendOperation(std::unique_ptr<v1::Operation> operation,
                                                             std::vector<BlockRef> blocks, uint64_t after);
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_H_
