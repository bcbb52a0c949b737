// Frames of the attach socket (kvpool/v1/attach.proto), sent and received by both ends.
//
// One frame is one SOCK_SEQPACKET packet of at most kMaxAttachFrameBytes, with at most one descriptor, and
// only the daemon sends descriptors. A packet of no bytes says nothing, but reads like the end on these
// sockets; so the end is known only from poll(), by POLLHUP or POLLRDHUP.
#ifndef KVPOOL_PROTO_SUPPORT_ATTACH_SOCKET_H_
#define KVPOOL_PROTO_SUPPORT_ATTACH_SOCKET_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// The attach socket's path is that of the gRPC socket with this suffix.
inline constexpr char kAttachSuffix[] = ".attach";

namespace v1 {
class AttachFrame;
}

inline constexpr size_t kMaxAttachFrameBytes = 4096;

enum class SendOutcome {
  kSent,
  kWouldBlock,  // Non-blocking sockets: wait for POLLOUT.
  kTooManyInFlight,  // This user has too many descriptors in flight: poll() says nothing, try again a little later.
  kHangup,           // Nobody is at the other end.
};

enum class ReceiveOutcome {
  kFrame,
  kEmpty,       // A packet of no bytes. The caller counts it: its peer may send any number of them.
  kWouldBlock,  // Non-blocking sockets: wait for POLLIN.
  kHangup,      // The other end is gone, and with it whatever it had not sent.
};

// Sends one frame. `fd` travels with it if it is not -1, and stays the caller's. INVALID_ARGUMENT: the frame
// is longer than kMaxAttachFrameBytes.
absl::StatusOr<SendOutcome> SendFrame(int socket, const v1::AttachFrame& frame, int fd = -1);

// Receives one frame; waits on a blocking socket. `fd` takes the descriptor that came with it. If `fd` is
// null, none is expected, and one that is sent never enters this process. INVALID_ARGUMENT: the frame is too
// long or garbage, or has descriptors that nobody asked for; these are closed, and the connection should be.
absl::StatusOr<ReceiveOutcome> ReceiveFrame(int socket, v1::AttachFrame* frame, UniqueFd* fd);

// A blocking SOCK_SEQPACKET socket connected to `path`. INVALID_ARGUMENT: the path does not fit in an
// address; UNAVAILABLE: the system's words and the path.
absl::StatusOr<UniqueFd> ConnectAttachSocket(const std::string& path);

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_ATTACH_SOCKET_H_
