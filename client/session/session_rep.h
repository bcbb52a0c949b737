// The parts of a session, in the order in which they are taken down from the end.
#ifndef KVPOOL_CLIENT_SESSION_SESSION_REP_H_
#define KVPOOL_CLIENT_SESSION_SESSION_REP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
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

// How often this process is a fork of a fork: a session works in the process that opened it.
uint64_t ForkCount();

class Session;

class SessionRep {
 public:
  static absl::StatusOr<std::unique_ptr<SessionRep>> Open(const SessionOptions& options,
                                                          std::string_view invitation);

  bool forked() const { return ForkCount() != born_; }
  bool usable() const { return state.open.load(std::memory_order_relaxed) && !forked(); }
  absl::Status status() const;

  // What `after` means as a step: 0 when it is done already.
  uint64_t FenceOf(uint64_t after) const;

  // A slot for a command whose fields are empty, or why there is none. Send hands it over.
  absl::StatusOr<Command*> NewCommand(Command::Verb verb);
  void Send(StepStream::Urgency urgency);
  // Queues a release, now or as soon as there is room for it.
  void QueueRelease(absl::Span<const BlockRef> refs, uint64_t after, const ReleaseHint& hint);
  void Release(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint);
  // Queues what QueueRelease kept back; false: there is still no room for all.
  bool DrainOverflow();
  std::shared_ptr<AnswerState> NewAnswer(Session* session);
  // Waits for an answer and for nothing else of it than its status.
  absl::Status Await(const AnswerState& answer, Deadline deadline);
  // Blocks for a magazine that has fewer than it should; false: it was the deadline.
  bool AwaitRefill(uint64_t refills_before, Deadline deadline);
  // Waits until the session may lease and match, and has what it was guaranteed, as far as a magazine holds it.
  absl::Status AwaitReady(Deadline deadline);
  absl::Status Shortage(uint32_t count, uint32_t stock) const;

  const uint64_t born_ = ForkCount();
  SessionOptions options;
  bool joined = false;
  uint64_t session_id = 0;
  std::string member_token;
  std::string hash_seed;
  uint64_t block_stride_bytes = 0;
  uint32_t max_blocks = 0;
  bool sole_member = false;  // Fences of this process are the session's.

  // ---- The engine thread's own
  uint64_t current_step = 0;
  // Releases that found the ring full, in order; bounded by what the session holds. While there are any,
  // nothing else is queued, so that no verb overtakes them.
  struct Overflow {
    uint64_t after = 0;
    ReleaseHint hint;
    std::vector<BlockRef> refs;
  };
  std::vector<Overflow> overflow;
  std::vector<BlockRef> scratch;  // Of Release, kept for its capacity.

  SessionState state;
  CommandRing commands;
  std::unique_ptr<Magazine> magazine;
  std::unique_ptr<StepBatches> batches;
  std::unique_ptr<StepStream> stream;
  std::unique_ptr<Attachment> attachment;
  std::unique_ptr<DeviceFences> fences;  // Made by the first step that ends on a stream.

 private:
  absl::Status OpenOn(std::string_view invitation, Deadline deadline);
  absl::Status AwaitMemory(Deadline deadline);
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_SESSION_REP_H_
