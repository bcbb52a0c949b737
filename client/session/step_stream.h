// The gRPC end of a session: the calls that open it, and the thread that keeps its Step stream.
//
// The thread writes what the StepBatches has to say and feeds it what comes back. When the stream breaks it
// opens another, after 1 ms and then twice as long each time up to half a second, until the session is over.
// With nothing to do it sleeps; for a few milliseconds after work it only naps, so that commands that are not
// urgent need no waking, which costs the engine's thread a few microseconds:
//
//   awake   looks at the commands by itself before it rests     Wake does nothing
//   nap     looks again within a millisecond                    Wake wakes it if it is urgent
//   sleep   until something arrives                             Wake wakes it
#ifndef KVPOOL_CLIENT_SESSION_STEP_STREAM_H_
#define KVPOOL_CLIENT_SESSION_STEP_STREAM_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/session_state.h"
#include "client/session/step_batches.h"
#include "kvpool/v1/engine.pb.h"

namespace kvpool {

class StepStream {
 public:
  // A channel to the daemon's Unix socket; connects when it is used.
  explicit StepStream(const std::string& socket);
  // Stops the thread; what was not answered stays so.
  ~StepStream();
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  absl::StatusOr<v1::OpenSessionResult> OpenSession(const v1::OpenSession& request,
                                                    std::chrono::steady_clock::time_point deadline);
  absl::StatusOr<v1::AddMemberResult> AddMember(const v1::AddMember& request,
                                                std::chrono::steady_clock::time_point deadline);
  // Starts the thread. Both stay valid until this object is gone.
  void Start(StepBatches* batches, SessionState* state);

  enum class Urgency { kSoon, kNow };
  // There is something to say. Any thread.
  void Wake(Urgency urgency);
  // REQUIRES: the session is over. Ends the thread and the connection; those who wait for answers are told that there will
  // be none. From then on Wake does nothing.
  void Stop();

 private:
  class Rep;
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_STEP_STREAM_H_
