// Who serves a member's Step stream.
#ifndef KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_
#define KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_

namespace kvpool {

// Told that something waits for a member's stream. Cheap, any thread, must not call into the daemon.
class StreamListener {
 public:
  virtual ~StreamListener() = default;
  virtual void OnPending() = 0;     // Call TakePending.
  virtual void OnSuperseded() = 0;  // A newer stream of the member took over: end with ABORTED.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_
