// The attach socket: one thread, one epoll set.
//
// A connection is in one of these states:
//
//   state     meaning                            leaves by
//   silent    connected, no hello yet            hello -> greeted; timeout, displaced -> gone
//   greeted   has a token that nobody has named  AttachPeer::Bound -> bound; hang-up, displaced -> gone
//   bound     belongs to a member                hang-up, death, AttachPeer::Close -> gone
//   closing   its last frame is on the way       sent, or not read for close_timeout_ms -> gone
//
// Silent and greeted connections cost a client nothing to open, so their number is bounded, in all and for
// each uid. When a newcomer finds no room, the oldest silent connection goes; a greeted one goes only once it
// is older than hello_timeout_ms. Clients say hello at once and open their session right after it, so that a
// flood of connections drops its own.
//
// A process is watched through one pidfd, however often it connects, from its first greeted connection until
// it ends. Its death ends its connections even if a forked child holds their sockets. A connection that hangs
// up ends the watch only if the daemon says, then or later, that nothing waits for the process. The daemon is told that a
// process is dead when its pidfd fires, and never otherwise.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_

#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "server/attach/attach_options.h"
#include "server/daemon/daemon.h"

namespace kvpool {

// Connects the attach server to the daemon.
AttachEvents EventsOf(Daemon* daemon);

class AttachLoop;

class AttachServer {
 public:
  static absl::StatusOr<std::unique_ptr<AttachServer>> Start(const AttachServerOptions& options,
                                                             AttachEvents events);
  // Tells every peer that the daemon shuts down, and hangs up. No event comes after this.
  ~AttachServer();

  // Hangs up without a word: a daemon that comes goes on with the sessions. No event comes after this.
  void HangUp();
  AttachStats Stats() const;

 private:
  void EndThread();
  explicit AttachServer(std::unique_ptr<AttachLoop> loop);
  const std::unique_ptr<AttachLoop> loop_;
  std::thread thread_;  // It comes last, as it uses the loop.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_
