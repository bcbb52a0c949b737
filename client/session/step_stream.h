// The stream's end of a session: what opens it, and the thread that keeps its Step stream, in frames of the daemon's
// Unix socket (proto/support/step_frames.h).
//
// The first batch of a stream opens the member, and its connection is the member's from then on. The thread writes the
// batches of StepBatches and hands it the responses. When the stream breaks, the thread
// opens another, after 1 ms and then after twice as long each time up to half a second, until the session is
// over. With nothing to do it sleeps. For a few milliseconds after work it only naps, so that commands that
// are not urgent need no waking, which would cost the engine's thread a few microseconds:
//
//   awake   looks at the commands by itself before it rests     Wake does nothing
//   doze    looks again within 4 ms; nothing is unanswered      Wake wakes it if it is urgent
//   nap     the same, and looks at what arrives                 Wake wakes it if it is urgent
//   sleep   waits until something arrives                       Wake wakes it
//
// A thread that waits for an answer does the work itself while the stream's rests: it writes its batch, and reads the answer. A Match then
// costs two wake-ups, of the daemon's thread and of the caller, where it would cost four.
#ifndef KVPOOL_CLIENT_SESSION_STEP_STREAM_H_
#define KVPOOL_CLIENT_SESSION_STEP_STREAM_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/session_state.h"
#include "client/session/step_batches.h"
#include "kvpool/v1/engine.pb.h"

namespace kvpool {

class StepStream {
 public:
  // `socket` is the daemon's Unix socket.
  explicit StepStream(const std::string& socket);
  // Stops the thread; unanswered batches stay unanswered.
  ~StepStream();
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Connects, and opens the member whose stream it is. While the daemon does not listen it is tried again until the deadline.
  absl::StatusOr<v1::OpenSessionResult> OpenSession(const v1::OpenSession& request,
                                                    std::chrono::steady_clock::time_point deadline);
  absl::StatusOr<v1::AddMemberResult> AddMember(const v1::AddMember& request,
                                                std::chrono::steady_clock::time_point deadline);
  // Starts the thread. REQUIRES: the member was opened, and both outlive this object.
  void Start(StepBatches* batches, SessionState* state);

  enum class Urgency {
    kSoon,
    kNow,
    kAwaited,  // The caller is to wait for the answer, and sends it itself if it can.
  };
  // Tells the thread that there is something to send. Any thread.
  void Wake(Urgency urgency);
  // Waits for a change that the stream brings: does the thread's work in its place for some milliseconds, and then sleeps. False: `done`
  // does not hold at the deadline. Any thread. REQUIRES: Start was called.
  bool Await(std::chrono::steady_clock::time_point deadline, absl::FunctionRef<bool()> done);
  // Whether `done` holds, after a look at what has come.
  bool Look(absl::FunctionRef<bool()> done);
  // The daemon is gone, or back, or the session is over: looks at once. Any thread.
  void OnDaemonChange();
  // Ends the thread and the connection; whoever waits for an answer is told that there will be none. From
  // then on Wake does nothing. REQUIRES: the session is over.
  void Stop();

 private:
  class Rep;
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_STEP_STREAM_H_
