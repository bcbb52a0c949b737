// The server of a member's Step stream, as the daemon sees it.
#ifndef KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_
#define KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_

namespace kvpool {

// It is told, on any thread, that something waits for the stream. Its methods are cheap and must not call
// into the daemon.
class StreamListener {
 public:
  virtual ~StreamListener() = default;
  virtual void OnPending() = 0;     // TakePending has something.
  virtual void OnSuperseded() = 0;  // A newer stream of the member took over: end with ABORTED.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_STREAM_LISTENER_H_
