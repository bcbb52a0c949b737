#include "server/keeper/keeper_frames.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// The kernel bounds descriptors that were sent and not received, by user; the other end is about to take some.
constexpr timespec kInFlightPause{.tv_sec = 0, .tv_nsec = 1000000};
constexpr int kMostInFlightPauses = 5000;

absl::Status Gone(const char* doing) {
  return absl::UnavailableError(absl::StrCat(doing, ": ", strerror(errno)));
}

}  // namespace

void KeeperFrame::set_text(std::string_view text) {
  facts_bytes = static_cast<uint16_t>(std::min(text.size(), sizeof(facts)));
  memcpy(facts, text.data(), facts_bytes);
}

absl::Status SendKeeperFrame(int socket, const KeeperFrame& frame, int fd) {
  iovec bytes{.iov_base = const_cast<KeeperFrame*>(&frame), .iov_len = sizeof(frame)};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  for (int pauses = 0;;) {
    if (sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof(frame)) return absl::OkStatus();
    if (errno == EINTR) continue;
    if (errno != ETOOMANYREFS || ++pauses > kMostInFlightPauses)
      return Gone("sending to the other end of --keeper");
    nanosleep(&kInFlightPause, nullptr);
  }
}

absl::Status ReceiveKeeperFrame(int socket, KeeperFrame* frame, UniqueFd* fd) {
  fd->Reset();
  iovec bytes{.iov_base = frame, .iov_len = sizeof(*frame)};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t size = 0;
  do {
    size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0) return Gone("receiving from the other end of --keeper");
  if (size == 0) return absl::UnavailableError("the other end of --keeper is gone");
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd->Reset(received);
  }
  if (size != sizeof(*frame) || frame->magic != KeeperFrame::kMagic || frame->facts_bytes > kMaxKeptFacts) {
    return absl::InvalidArgumentError(absl::StrCat("a packet of ", size, " bytes is no frame of a keeper"));
  }
  if (frame->version != kKeeperVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the other end of --keeper speaks version ",
                                                      frame->version, "; this kvpoold speaks ",
                                                      kKeeperVersion));
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return absl::ResourceExhaustedError("no descriptor is left to receive another with");
  }
  return absl::OkStatus();
}

}  // namespace kvpool
