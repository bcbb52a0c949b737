// What the attach server is told, tells and counts.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/daemon/daemon.h"

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

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_OPTIONS_H_
