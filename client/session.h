// An engine's hold on a space of KV blocks: attach, map, lease, share.
//
// Between scheduling and kernels an engine never waits for the daemon:
//
//   Lease            takes blocks from the session's magazine, a stock of leased blocks in this process that is
//                    refilled in the background
//   Release          puts a block that was never sealed, and whose step is done, back into the magazine, and
//                    queues all others
//   Seal, Ref, Touch, Pin, Unpin, SetRetention    are queued, and sent in order, in batches, on the Step stream
//   Match            is sent at once; its answer is waited for when it is needed, and brings holds
//
// A session is in one of these states, and moves only downwards, unless the daemon refuses a close:
//
//   state      entered when                               status()              verbs
//   open       Open or Join returned                      OK                    all work
//   closing    Close ran out of time                      FAILED_PRECONDITION   as closed, but for Close
//   closed     Close returned                             FAILED_PRECONDITION   Lease and Match return status();
//   ended      the daemon ended it                        ABORTED and why       Release, Seal and the like do nothing
//   detached   the daemon is gone for good, or has lost   UNAVAILABLE and why
//              an answer
//   forked     this process is a fork of the opening one  FAILED_PRECONDITION
//
// The memory stays mapped in all of them, but not in a fork. A broken stream is no state: it is opened again,
// and batches without an answer are sent again; the daemon applies each once. Where the daemon has a keeper the session
// is open while it is gone, too: Match finds nothing then, Lease has what is in the magazine, all else waits for the next
// daemon, which goes on with the session. It is detached if none comes within the daemon's --reattach-timeout, or one
// without it.
//
// Thread-compatible: one thread at a time uses a session, its Blocks and its pending answers; exceptions are
// marked "Any thread". The session runs two threads of its own, for the stream and for the attach socket.
#ifndef KVPOOL_CLIENT_SESSION_H_
#define KVPOOL_CLIENT_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/blocks.h"
#include "client/pending.h"
#include "client/refusal.h"
#include "client/release_hint.h"
#include "client/session_options.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/layout.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/limits.h"

namespace kvpool {

class SessionRep;

struct GroupKeys {
  uint32_t group = 0;
  std::string_view keys;  // One after another; KeyBytes makes them of a PrefixHasher's.
  uint32_t key_bytes = 32;
};

// What of a match is below the pool: see v1::Match.
struct MatchOptions {
  uint32_t wait_ms = 0;   // How long the answer may wait for it. At most 60000.
  bool prefetch = false;  // Bring it up without waiting.
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
  // What was sent on the stream. `blocks` counts blocks and keys named, each once per verb.
  uint64_t batches = 0, operations = 0, blocks = 0;
  uint64_t leased = 0, refills = 0;  // Blocks leased by the daemon, and answers that brought them.
  // Blocks that a verb could not be applied to. A lease or fence that was refused counts as one; a call that was
  // refused as a whole, and waits for its answer, is not counted.
  uint64_t refused = 0;
  uint64_t reconnects = 0;
};

class Session {
 public:
  // Opens a session, or joins one as another of its members (`invitation` is from its Invitation()). Returns
  // when the memory is mapped and, without warm-up, the guaranteed blocks can be leased. UNAVAILABLE: there
  // is no daemon, or it is draining; FAILED_PRECONDITION: the layout or fingerprint differs from the space's,
  // naming both sides, or the daemon is too old for this library; RESOURCE_EXHAUSTED: the guarantee cannot be
  // given, with the numbers.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const SessionOptions& options);
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options,
                                                       std::string_view invitation);
  // Closes the session if this is its sole member and every step begun is done. Otherwise kernels may still
  // run, so it only hangs up, and the session's blocks come free when its processes are gone.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  // Sends what is queued, ends the session and gives back all that it holds, at once. REQUIRES: no member has
  // work on the device any more. Outstanding Blocks turn void. DEADLINE_EXCEEDED: the daemon has not answered, and closes the
  // session when it hears of it; Close may be repeated, and waits for the same answer.
  absl::Status Close(Deadline deadline);
  // Ends the threads and unmaps the memory, as the destructor does, of a session that is closed or has ended
  // and whose object is kept. Its properties can still be asked; base() is 0. REQUIRES: nobody uses an
  // address in its memory.
  void Dismantle();

  // ---- Properties
  uint64_t id() const;
  // Bytes that let another process join; secret.
  std::string Invitation() const;
  const std::string& hash_seed() const;  // PrefixHasher's argument.
  const v1::Layout& layout() const;
  uint64_t block_stride_bytes() const;
  uint32_t max_blocks() const;  // The most that the space can ever have, the null block included.
  // The most that this session can ever lease: all but the null block and its sink, within the cap that it was opened with. A
  // lease of more is refused at once.
  uint32_t most_leased_blocks() const;
  // Padding writes go there: it is leased to this session and never sealed. Null before warm-up is over.
  BlockRef sink_block() const;
  // OK while open. Any thread, as are the nine that follow.
  absl::Status status() const;
  // So many blocks are usable, as last heard; the null block included. It goes down when a slab is asked back. Ids are below it, but
  // where the space has holes (SessionOptions::holes).
  uint32_t capacity_blocks() const;
  // All blocks that are mapped here are below this one. No answer names a block beyond, so it
  // is at least capacity_blocks().
  uint32_t mapped_blocks() const;
  // Which they are, as pairs of the first one and the one behind the last, in order: one pair where there is no hole. What is asked
  // back is among them until it is unmapped.
  std::vector<std::pair<uint32_t, uint32_t>> mapped_ranges() const;
  bool is_mapped(BlockId block) const;
  uint32_t slabs_asked_back() const;  // Those that wait for GiveBackSlabs.
  // How long GiveBackSlabs still counts: after that the daemon takes its wish back, looks elsewhere or refuses whoever waits for the
  // memory, and counts the session as late. None: nothing is asked back, or the daemon does not say. v1::Notice has the same of leases.
  std::optional<std::chrono::milliseconds> asked_back_within() const;
  bool under_pressure() const;
  bool draining() const;
  SessionCounters counters() const;

  // ---- Memory: block b is at base() + b * block_stride_bytes(), a host address or a device address.
  uint64_t base() const;
  uint64_t address(BlockId block) const { return base() + Index(block) * block_stride_bytes(); }
  // 16 bytes, the UUID of the GPU that the memory is on; empty: it is host memory.
  std::string device_uuid() const;
  // REQUIRES: host memory.
  std::byte* data(BlockRef block) const { return reinterpret_cast<std::byte*>(address(block.id)); }
  // Maps the pool over the scratch and tells the daemon. REQUIRES: the caller's work on the scratch is done.
  absl::Status FinishWarmup();
  // Unmaps the slabs that are asked back, and answers their bytes; see GiveBack::kByCall. The daemon may take its wish back, and
  // then there are none. On a GPU it waits for all work of this process that is queued there, if there are any.
  // FAILED_PRECONDITION: a stream captures a graph, which is broken, and they stay. REQUIRES: no work that is queued later, and no thread of this
  // member, touches a block at or above capacity_blocks(), or with SessionOptions::holes one that it does not hold.
  absl::StatusOr<uint64_t> GiveBackSlabs();

  // ---- Steps: numbers that grow, the same on all members. Work launched after BeginStep belongs to that step.
  uint64_t BeginStep();
  // Begins the step that the scheduler named. A number smaller than the current one is ignored.
  void BeginStep(uint64_t step);
  uint64_t current_step() const;
  // The step that all rank members are done with, as far as is known here. Any thread.
  uint64_t passed_step() const;
  // This member is done with everything through `step`.
  void CompleteStep(uint64_t step);
  // The same, once the work that is on the stream now is done. `cuda_stream` is a CUstream of the current
  // context. Does not wait. Steps are recorded in their order: a later one that is done stands for those before it.
  absl::Status CompleteStepOnStream(uint64_t step, void* cuda_stream);

  // ---- Leases
  // Blocks that Lease and LeaseWithin can get for sure: the magazine, and what is left of the guarantee.
  uint32_t free_blocks() const;
  // Takes `count` blocks from the magazine, or none, without waiting. RESOURCE_EXHAUSTED: it holds fewer (a
  // refill is under way), with the numbers and the daemon's reason.
  absl::StatusOr<Blocks> Lease(uint32_t count);
  // The same, waiting for refills. More than most_leased_blocks() are not waited for.
  absl::StatusOr<Blocks> LeaseWithin(uint32_t count, Deadline deadline);
  // The same for engines that keep tables of bare refs: fills `out`, or leaves it alone.
  // Release gives them back.
  absl::Status LeaseRefs(absl::Span<BlockRef> out);
  absl::Status LeaseRefsWithin(absl::Span<BlockRef> out, Deadline deadline);
  // Waits until the daemon has answered a refill after the first `refills` (see counters()), or another Lease
  // is worth a try for another reason; false: the deadline passed. Any thread, so that a caller can wait
  // while others use the session.
  bool AwaitRefill(uint64_t refills, Deadline deadline);
  // Gives back one hold on each ref. Never fails and never waits; refs that are not held
  // are in TakeRefusals.
  void Release(absl::Span<const BlockRef> blocks, uint64_t after = kCurrentStep);
  // The same, with what the caller expects of the blocks: a conversation is over, a beam was pruned.
  // INVALID_ARGUMENT: the hint breaks a limit, and nothing was given back.
  absl::Status ReleaseWithHint(absl::Span<const BlockRef> blocks, const ReleaseHint& hint,
                               uint64_t after = kCurrentStep);

  // ---- Sharing. RESOURCE_EXHAUSTED: 1024 calls are queued already, and nothing was done.
  absl::StatusOr<PendingMatch> Match(absl::Span<const GroupKeys> groups, const MatchOptions& options = {});
  // The same for group 0 alone, with keys of 32 bytes.
  absl::StatusOr<PendingMatch> Match(std::string_view keys, const MatchOptions& options = {});
  absl::StatusOr<PendingSeal> Seal(const SealArguments& arguments);
  // One more hold on blocks that this session holds, any number of them: a pruning under way on them does not take
  // it. Null refs, which stand before a window, are skipped. Fails only if the session is over. Blocks that are not held, or
  // 65,535 times already, end the session, as the caller relies on these holds by then.
  absl::StatusOr<Blocks> Ref(absl::Span<const BlockRef> blocks);
  absl::Status Touch(absl::Span<const BlockRef> blocks);
  // The longest time of Pin and SetRetention.
  static constexpr std::chrono::milliseconds kMaxTtl{kMaxTtlMs};
  // These take sealed blocks, held or not; see v1::Pin and v1::SetRetention. INVALID_ARGUMENT: a time or
  // priority is beyond its limit, and nothing was done. Blocks that are stale or beyond the tenant's budget
  // are in TakeRefusals.
  absl::Status Pin(absl::Span<const BlockRef> blocks, std::chrono::milliseconds ttl);
  absl::Status Unpin(absl::Span<const BlockRef> blocks);
  absl::Status SetRetention(absl::Span<const BlockRef> blocks, uint32_t priority,
                            std::chrono::milliseconds ttl,
                            std::chrono::milliseconds half_life = std::chrono::milliseconds(0));

  // A prefill took so long: that many tokens were computed in one step of the engine behind so many others, and nothing else to
  // speak of beside them. The daemon learns from such reports whether to load what is below the pool or to have it computed again.
  // They travel with the next batch, at most the last 64; a daemon that knows nothing of them is told nothing. INVALID_ARGUMENT: a
  // number is beyond its limit (v1::PrefillSample).
  absl::Status ReportPrefill(uint64_t tokens, uint64_t tokens_before, std::chrono::microseconds time);

  // ---- On the device: kvpool/v1/score.proto says what each field means. client/live_sequence.h keeps a sequence's
  // blocks and keys in step with what these verbs do to it. RESOURCE_EXHAUSTED as above. Until its answer is here,
  // an operation keeps the blocks that it names: a block released meanwhile goes back when the operation is over.
  absl::StatusOr<Pending<v1::ScoreResult>> Score(const v1::Score& request, uint64_t after = kCurrentStep);
  // Which blocks a sparse attention kernel reads for these queries. Changes nothing.
  absl::StatusOr<Pending<v1::SelectResult>> Select(const v1::Select& request, uint64_t after = kCurrentStep);
  // The victims are released: their holds are gone when the answer is here.
  absl::StatusOr<Pending<v1::PruneResult>> Prune(const v1::Prune& request, uint64_t after = kCurrentStep);
  // Blocks that are not in the new table are released. Its new blocks are leased, and given
  // back if nobody waits.
  absl::StatusOr<Pending<v1::CompactResult>> Compact(const v1::Compact& request,
                                                     uint64_t after = kCurrentStep);
  absl::StatusOr<Pending<v1::PlanBudgetsResult>> PlanBudgets(const v1::PlanBudgets& request,
                                                             uint64_t after = kCurrentStep);

  // ---- Episodes: named block sets with holds of their own, found again by topic; see v1::PutEpisode.
  absl::StatusOr<Pending<v1::PutEpisodeResult>> PutEpisode(const v1::PutEpisode& request,
                                                           uint64_t after = kCurrentStep);
  absl::StatusOr<Pending<EpisodeHit>> ChooseEpisode(const v1::ChooseEpisode& request);

  // Waits until all that was queued before is answered (parked or applied).
  absl::Status Flush(Deadline deadline);
  // The same for a caller that waits later, or lets others use the session meanwhile.
  absl::StatusOr<PendingFlush> StartFlush();
  // What the daemon refused of verbs that answer nothing (Release, Pin, Unpin, SetRetention), and of leases and
  // fences that the session asked for by itself, since the last call. The newest 64 are kept; counters() counts
  // all. Any thread.
  std::vector<Refusal> TakeRefusals();

 private:
  using Rep = SessionRep;
  explicit Session(std::unique_ptr<Rep> rep);
  absl::StatusOr<std::shared_ptr<AnswerState>> SendOperation(std::unique_ptr<v1::Operation> operation,
                                                             std::vector<BlockRef> blocks, uint64_t after);
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_H_
