#include "proto/support/attach_socket.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>

#include "absl/strings/str_cat.h"
#include "kvpool/v1/attach.pb.h"

namespace kvpool {
namespace {

std::string ErrnoText(int error) { return absl::StrCat(strerror(error), " (errno ", error, ")"); }

bool HungUp(int socket) {
  pollfd waiting{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return poll(&waiting, 1, 0) == 1 && (waiting.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

// Takes ownership of every descriptor in the control data; answers how many there were and leaves the first
// in `first`.
int TakeDescriptors(msghdr* message, UniqueFd* first) {
  int count = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t fds = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fds; ++i) {
      int raw;
      memcpy(&raw, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      UniqueFd fd(raw);
      if (count++ == 0) *first = std::move(fd);
    }
  }
  return count;
}

}  // namespace

absl::StatusOr<SendOutcome> SendFrame(int socket, const v1::AttachFrame& frame, int fd) {
  std::array<char, kMaxAttachFrameBytes> bytes;
  const size_t size = frame.ByteSizeLong();
  if (size > bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach frame has ", size, " bytes; the limit is ", kMaxAttachFrameBytes));
  }
  frame.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(bytes.data()));

  iovec part{.iov_base = bytes.data(), .iov_len = size};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return SendOutcome::kSent;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return SendOutcome::kWouldBlock;
  if (errno == ETOOMANYREFS) return SendOutcome::kTooManyInFlight;
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return SendOutcome::kHangup;
  return absl::UnavailableError(absl::StrCat("sending on the attach socket: ", ErrnoText(errno)));
}

absl::StatusOr<ReceiveOutcome> ReceiveFrame(int socket, v1::AttachFrame* frame, UniqueFd* fd) {
  std::array<char, kMaxAttachFrameBytes> bytes;
  // Room for exactly one descriptor. Without room the kernel keeps them out and sets MSG_CTRUNC.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control;
  for (;;) {
    iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd != nullptr) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
    }
    const ssize_t received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (received < 0) {
      // ECONNRESET comes once, ahead of frames that did arrive: the last of them may say why.
      if (errno == EINTR || errno == ECONNRESET) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return ReceiveOutcome::kWouldBlock;
      if (errno == ENOTCONN) return ReceiveOutcome::kHangup;
      return absl::UnavailableError(absl::StrCat("receiving on the attach socket: ", ErrnoText(errno)));
    }
    UniqueFd taken;
    const int descriptors = TakeDescriptors(&message, &taken);
    if ((message.msg_flags & MSG_CTRUNC) != 0 || descriptors > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("attach frame carries descriptors beyond the limit of ", fd == nullptr ? 0 : 1));
    }
    if ((message.msg_flags & MSG_TRUNC) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("attach frame is longer than the limit of ", kMaxAttachFrameBytes, " bytes"));
    }
    if (received == 0) return HungUp(socket) ? ReceiveOutcome::kHangup : ReceiveOutcome::kEmpty;
    if (!frame->ParseFromArray(bytes.data(), static_cast<int>(received))) {
      return absl::InvalidArgumentError(
          absl::StrCat("attach frame of ", received, " bytes is not an AttachFrame"));
    }
    if (frame->frame_case() == v1::AttachFrame::FRAME_NOT_SET) {
      return absl::InvalidArgumentError(
          absl::StrCat("attach frame of ", received, " bytes has no field that this version knows"));
    }
    if (fd != nullptr) *fd = std::move(taken);
    return ReceiveOutcome::kFrame;
  }
}

absl::StatusOr<UniqueFd> ConnectAttachSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("attach socket path \"", path, "\" has ", path.size(),
                                                   " bytes; the limits are 1 and ",
                                                   sizeof(address.sun_path) - 1));
  }
  memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) {
    return absl::UnavailableError(absl::StrCat("making an attach socket: ", ErrnoText(errno)));
  }
  int connected;
  do {
    connected = connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (connected < 0 && errno == EINTR);
  if (connected < 0) {
    return absl::UnavailableError(absl::StrCat("connecting to attach socket ", path, ": ", ErrnoText(errno)));
  }
  return socket_fd;
}

}  // namespace kvpool
