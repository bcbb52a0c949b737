// The attach socket: one thread, one epoll set.
//
// A connection is in one of these states:
//
//   silent    connected, no hello yet            -> greeted (hello) | gone (timeout, displaced)
//   greeted   has a token that nobody has named  -> bound (AttachPeer::Bound) | gone (hang-up, displaced)
//   bound     a member's                         -> gone (hang-up, death, AttachPeer::Close)
//   closing   its last frame is on the way       -> gone (sent, or the peer does not read for
//   close_timeout_ms)
//
// Silent and greeted connections cost nothing to open, so they are few, in all and of one uid. When a
// newcomer finds no room, the oldest silent connection goes; a greeted one only once it is older than
// hello_timeout_ms. Clients say hello at once and open their session right after it, so that a flood of
// connections drops its own.
//
// A process is watched through one pidfd, however often it connects, from its first greeted connection until
// it ends: its death ends its connections even if a forked child holds their sockets, and a connection that
// hangs up ends the watch only if the daemon says that nothing waits for the process. That a process is dead
// is said when its pidfd fires, and never otherwise.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/attach/attach_options.h"
#include "server/daemon/daemon.h"

namespace kvpool {

// The daemon as the attach server speaks to it.
AttachEvents EventsOf(Daemon* daemon);

class AttachLoop;

class AttachServer {
 public:
  static absl::StatusOr<std::unique_ptr<AttachServer>> Start(const AttachServerOptions& options,
                                                             AttachEvents events);
  // Tells every peer that the daemon shuts down, and hangs up. No events come any more.
  ~AttachServer();

  AttachStats Stats() const;

 private:
  explicit AttachServer(std::unique_ptr<AttachLoop> loop);
  std::unique_ptr<AttachLoop> loop_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_SERVER_H_
