// Accepts connections from a listening socket that an epoll set watches, also where no descriptor is left.
//
// A connection that waits keeps the socket readable until it is accepted. At the limit of open files that takes a descriptor which was
// kept for this: the connection is accepted and refused, and the descriptor is kept again. Another thread may take it in between. Then
// nothing can be accepted, and the epoll set stops watching for a while, or its thread would go in circles; who connects waits.
#ifndef KVPOOL_SERVER_BASE_ACCEPTOR_H_
#define KVPOOL_SERVER_BASE_ACCEPTOR_H_

#include <sys/socket.h>

#include <cstdint>

#include "absl/status/status.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// Not thread-safe.
class Acceptor {
 public:
  static constexpr uint64_t kPauseMs = 100;

  // From now on `epoll` says `key` where there is something to accept from `listener`, which does not block. Both are open for as long
  // as this object is used; `name` is whose connections they are, for the log. UNAVAILABLE: there are no descriptors.
  absl::Status Begin(int epoll, int listener, uint64_t key, const char* name);

  enum class Kind : uint8_t {
    kConnection,
    kWithoutFiles,  // Its descriptor is the one that is kept: whoever called refuses and closes it before the next call.
    kNone,  // The epoll set says when there may be another.
  };
  struct Arrival {
    Kind kind = Kind::kNone;
    UniqueFd socket;  // It does not block.
    sockaddr_storage address{};
  };
  Arrival Accept(uint64_t now_ms);

  // Watches again, once a pause is over.
  void Resume(uint64_t now_ms);
  // When that is; UINT64_MAX: there is no pause.
  uint64_t resume_ms() const { return resume_ms_; }

 private:
  UniqueFd Next(Arrival* arrival) const;
  void KeepSpare();
  void Watch(bool watches) const;
  void Pause(uint64_t now_ms, int error);

  int epoll_ = -1, listener_ = -1;
  uint64_t key_ = 0;
  const char* name_ = "";
  UniqueFd spare_;
  uint64_t resume_ms_ = UINT64_MAX;
  uint64_t log_ms_ = 0;  // Not before this time it logs the next pause.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_ACCEPTOR_H_
