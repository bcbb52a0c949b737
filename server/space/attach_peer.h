// The process at the other end of an attach connection, as the daemon sees it.
#ifndef KVPOOL_SERVER_SPACE_ATTACH_PEER_H_
#define KVPOOL_SERVER_SPACE_ATTACH_PEER_H_

#include <cstdint>
#include <string>

#include "kvpool/v1/attach.pb.h"
#include "proto/support/unique_fd.h"
#include "server/base/peer_process.h"

namespace kvpool {

// Names an attach connection inside the daemon.
enum class AttachId : uint64_t {};

// Calls queue and return at once; they come from any thread, under no lock of the daemon.
class AttachPeer {
 public:
  virtual ~AttachPeer() = default;
  // `fd` travels with the frame if it is valid.
  virtual void Send(const v1::AttachFrame& frame, UniqueFd fd) = 0;
  // Sends `closed` and hangs up. OnHangup follows; the pidfd stays watched until OnProcessDead.
  virtual void Close(const std::string& reason) = 0;
  // OpenSession or AddMember has taken its token: from now on it is a member's, and no longer one of the
  // connections that may be dropped to make room for others.
  virtual void Bound() = 0;
  // OnHangup said that the end of the process is awaited for `id`, which is this connection's. It is no longer.
  virtual void NotAwaited(AttachId id) = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_ATTACH_PEER_H_
