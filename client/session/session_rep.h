// The parts of a session, sorted by the thread that uses them.
#ifndef KVPOOL_CLIENT_SESSION_SESSION_REP_H_
#define KVPOOL_CLIENT_SESSION_SESSION_REP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/pending.h"
#include "client/release_hint.h"
#include "client/session/attachment.h"
#include "client/session/command.h"
#include "client/session/device_fences.h"
#include "client/session/magazine.h"
#include "client/session/session_state.h"
#include "client/session/step_batches.h"
#include "client/session/step_stream.h"
#include "client/session_options.h"

namespace kvpool {

// How many forks lie between this process and its first ancestor that used the library. A session works only
// in the process that opened it, and recognises it by this number.
uint64_t ForkCount();

class Session;

class SessionRep {
 public:
  static absl::StatusOr<std::unique_ptr<SessionRep>> Open(const SessionOptions& options,
                                                          std::string_view invitation);

  bool forked() const { return ForkCount() != opened_at_fork_; }
  bool usable() const {
    return state.open.load(std::memory_order_relaxed) && !state.closing.load(std::memory_order_relaxed) &&
           !forked();
  }
  absl::Status status() const;

  uint32_t most_leased_blocks() const;
  // RESOURCE_EXHAUSTED: more than that are asked.
  absl::Status CheckLease(size_t count) const;

  // The step that `after` stands for; 0 if it is done already.
  uint64_t FenceOf(uint64_t after) const;

  // A slot for a command whose fields are empty, or why there is none. Send hands it over.
  absl::StatusOr<Command*> NewCommand(Command::Verb verb);
  void Send(StepStream::Urgency urgency);
  // Queues a release, now or as soon as there is room for it.
  void Queue(Command::Verb verb, absl::Span<const BlockRef> refs, uint64_t after, const ReleaseHint& hint);
  void Release(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint);
  // Queues what Queue kept back; false: there is still no room for all.
  bool DrainOverflow();
  std::shared_ptr<AnswerState> NewAnswer(Session* session);
  // Waits for a change that the stream brings. False: `done` does not hold at the deadline.
  bool Await(Deadline deadline, absl::FunctionRef<bool()> done);
  // Whether `done` holds, after a look at what has come.
  bool Look(absl::FunctionRef<bool()> done) { return forked() ? done() : stream->Look(done); }
  // Waits for an answer of which only the status matters.
  absl::Status Await(const AnswerState& answer, Deadline deadline);
  // Waits for a refill after the first `refills_before`; false: the deadline passed.
  bool AwaitRefill(uint64_t refills_before, Deadline deadline);
  // Waits until the session may lease and match, and has its guaranteed blocks as far as
  // a magazine holds them.
  absl::Status AwaitReady(Deadline deadline);
  absl::Status Shortage(uint32_t count, uint32_t stock) const;

  // ---- Set by Open, and constant from then on; any thread reads them. FinishWarmup clears options.warmup.
  SessionOptions options;
  bool joined = false;
  bool sole_member = false;  // This member's fences are the session's.
  uint64_t session_id = 0;
  std::string member_token;
  std::string hash_seed;
  uint64_t block_stride_bytes = 0;
  uint32_t max_blocks = 0;

  // ---- Used by the engine's thread alone
  uint64_t current_step = 0;
  std::shared_ptr<AnswerState> close;  // The answer to a close that has none yet; null: none is under way.
  // Releases and Refs that found the ring full, in order. While there are any, nothing else is queued, so that no
  // verb overtakes them.
  struct Overflow {
    Command::Verb verb = Command::Verb::kRelease;
    uint64_t after = 0;
    ReleaseHint hint;
    std::vector<BlockRef> refs;
  };
  std::vector<Overflow> overflow;
  std::vector<BlockRef> scratch;  // Refs that Release and Ref sort; kept for its capacity.

  // ---- Shared by threads, each by its own rules
  SessionState state;
  CommandRing commands;                // The engine's thread fills it, the stream's empties it.
  std::unique_ptr<Magazine> magazine;  // The engine's thread takes and puts, the stream's refills.

  // ---- The session's own threads. Destroyed from the last one up: no thread outlives what it uses.
  std::unique_ptr<StepBatches> batches;    // Used by the stream's thread alone.
  std::unique_ptr<StepStream> stream;      // The stream's thread.
  std::unique_ptr<Attachment> attachment;  // The attach socket's thread.
  std::unique_ptr<DeviceFences>
      fences;  // The fences' thread, made by the first step that ends on a CUDA stream.

 private:
  absl::Status OpenOn(std::string_view invitation, Deadline deadline);
  absl::Status AwaitMemory(Deadline deadline);

  const uint64_t opened_at_fork_ = ForkCount();
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_SESSION_REP_H_
