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
#ifndef KVPOOL_SERVER_ATTACH_SERVER_H_
#define KVPOOL_SERVER_ATTACH_SERVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/daemon.h"

namespace kvpool {

// What the attach server tells the daemon, as daemon.h words it. All on the attach thread.
struct AttachEvents {
  std::function<absl::StatusOr<Daemon::Welcome>(std::shared_ptr<AttachPeer>, const PeerCredentials&,
                                                const std::string& client_name)>
      attached;
  std::function<void(AttachId, const v1::SlabAck&)> slab_ack;
  std::function<bool(AttachId)> hangup;
  std::function<void(AttachId)> process_dead;
};
AttachEvents EventsOf(Daemon* daemon);

struct AttachServerOptions {
  std::string path;
  std::optional<uint32_t> group;
  uint64_t hello_timeout_ms = 5000;
  uint64_t close_timeout_ms = 5000;
  uint32_t max_unbound = 256;         // Silent and greeted.
  uint32_t max_unbound_per_uid = 64;  // Of those, each of silent and greeted.
  uint32_t max_connections = 4096;
  uint32_t max_queued_frames = 1024;  // To one peer: a slab_ready for each slab while it maps the first.
  // Descriptors are numbered from the lowest free one: a connection that gets this number or a higher one is
  // refused, which leaves the rest of the open-file limit to slabs and files.
  int fd_ceiling = 0;
};

struct AttachStats {
  uint64_t connections = 0;                 // Open now.
  std::map<std::string, uint64_t> refused;  // By reason, a fixed list.
};

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

#endif  // KVPOOL_SERVER_ATTACH_SERVER_H_
