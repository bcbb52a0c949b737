// The attach server's options, the events that it reports to the daemon, and its counters.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/sockets.h"
#include "server/daemon/daemon.h"

namespace kvpool {

// The daemon's methods that the attach server calls, on the attach thread; daemon.h documents them.
struct AttachEvents {
  std::function<absl::StatusOr<Daemon::Welcome>(std::shared_ptr<AttachPeer>, const PeerCredentials&,
                                                const v1::AttachHello& hello)>
      attached;
  std::function<void(AttachId, const v1::SlabAck&)> slab_ack;
  std::function<void(AttachId, const v1::SlabLeft&)> slab_left;
  std::function<bool(AttachId)> hangup;
  std::function<void(AttachId)> process_dead;
};

struct AttachServerOptions {
  std::string path;
  std::optional<uint32_t> group;
  Listen listen = ListenUnix;
  uint64_t hello_timeout_ms = 5000;
  uint64_t close_timeout_ms = 5000;
  uint32_t max_unbound = 256;         // Silent and greeted connections together.
  uint32_t max_unbound_per_uid = 64;  // Bounds a uid's silent connections, and its greeted ones, each.
  uint32_t max_connections = 4096;
  // Frames that wait for one peer, which gets a slab_ready for each slab while it maps the first.
  uint32_t max_queued_frames = 1024;
  // A connection whose descriptor is this number or a higher one is refused. Since a new descriptor gets the
  // lowest free number, the rest of the open-file limit is left to slabs and files.
  int fd_ceiling = 0;
};

struct AttachStats {
  uint64_t connections = 0;                 // Open now.
  std::map<std::string, uint64_t> refused;  // Reason, from a fixed list -> connections.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_
