// Events of sockets that carry Step frames, and of alarms: what gRPC's completion queue is for gRPC's calls.
//
// One thread waits, with an epoll set of its own. What a socket's owner finds out there comes back as a tag, in the order in which
// it was found out; sockets are looked at between two tags even while some always have more to say.
#ifndef KVPOOL_SERVER_RPC_SOCKET_EVENTS_H_
#define KVPOOL_SERVER_RPC_SOCKET_EVENTS_H_

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/rpc/rpc_events.h"

namespace kvpool {

// Owns a socket. Called on the thread that waits.
class SocketOwner {
 public:
  // What epoll says, once for each change. All that follows from it is tags that come back.
  virtual void OnSocket(uint32_t events) = 0;

 protected:
  ~SocketOwner() = default;
};

class SocketEvents final : public RpcEvents {
 public:
  static absl::StatusOr<std::unique_ptr<SocketEvents>> Make();
  // What was posted and not taken is over with !ok. REQUIRES: no thread waits.
  ~SocketEvents() override;

  bool Wait(Event* event) override;
  bool Look(Event* event) override;
  void Shut() override ABSL_LOCKS_EXCLUDED(mu_);
  std::unique_ptr<RpcAlarm> MakeAlarm() override;
  // The tag comes back. Any thread.
  void Post(RpcTag* tag) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- On the thread that waits
  // The owner hears of what there is to read, and of a hang-up, until Unwatch.
  absl::Status Watch(int fd, SocketOwner* owner);
  // Shall it hear of room to write, too?
  void AwaitRoom(int fd, SocketOwner* owner, bool await);
  void Unwatch(int fd);
  // The tag comes back, behind those that came before.
  void Return(RpcTag* tag, bool ok) { ready_.push_back({tag, ok}); }

 private:
  class Alarm;
  using Timers = std::set<std::pair<uint64_t, RpcTag*>>;  // The time is NowNs.

  SocketEvents(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  bool Take(Event* event);
  // Takes in what was posted, what is due, and what epoll says within so many milliseconds; -1: for as long as it takes.
  void TakeIn(int timeout_ms) ABSL_LOCKS_EXCLUDED(mu_);
  void TakePosted() ABSL_LOCKS_EXCLUDED(mu_);
  int FireTimers(int timeout_ms);

  const UniqueFd epoll_, wake_;
  Mutex mu_;
  std::deque<RpcTag*> posted_ ABSL_GUARDED_BY(mu_);
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<bool> any_posted_{false};  // Or it was shut.
  std::atomic<bool> asleep_{false};
  // ---- These belong to the thread.
  std::deque<Event> ready_;
  int taken_ = 0;  // So many tags came back since the sockets were looked at.
  bool over_ = false;
  Timers timers_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_SOCKET_EVENTS_H_
