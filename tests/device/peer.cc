#include "tests/device/peer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool {

absl::Status SendPacket(int socket, const void* data, size_t bytes, int fd) {
  iovec part = {.iov_base = const_cast<void*>(data), .iov_len = bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes)) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "sendmsg");
}

absl::Status ReceivePacket(int socket, void* data, size_t bytes, UniqueFd* fd) {
  iovec part = {.iov_base = data, .iov_len = bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return absl::ErrnoToStatus(errno, "recvmsg");
  if (got == 0) return absl::UnavailableError("the other end is gone");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof received);
    fd->Reset(received);
  }
  if (got == static_cast<ssize_t>(bytes)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a packet of ", got, " bytes, ", bytes, " expected"));
}

absl::StatusOr<std::unique_ptr<DevicePeer>> DevicePeer::Start() {
  const std::string binary = std::filesystem::read_symlink("/proc/self/exe").replace_filename("device_peer");
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  const pid_t pid = ::fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    // Only async-signal-safe calls between fork and exec.
    if (theirs.get() == 3) {
      ::fcntl(3, F_SETFD, 0);
    } else {
      ::dup2(theirs.get(), 3);
    }
    ::execl(binary.c_str(), binary.c_str(), nullptr);
    ::_exit(127);
  }
  return std::unique_ptr<DevicePeer>(new DevicePeer(pid, std::move(ours)));
}

DevicePeer::~DevicePeer() {
  if (pid_ > 0) Kill();
}

void DevicePeer::Kill() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

absl::StatusOr<PeerAnswer> DevicePeer::Ask(const PeerRequest& request, int fd, UniqueFd* answer_fd) {
  RETURN_IF_ERROR(SendPacket(socket_.get(), &request, sizeof request, fd));
  PeerAnswer answer;
  UniqueFd unwanted;
  RETURN_IF_ERROR(
      ReceivePacket(socket_.get(), &answer, sizeof answer, answer_fd != nullptr ? answer_fd : &unwanted));
  if (answer.code == 0) return answer;
  return absl::Status(static_cast<absl::StatusCode>(answer.code), answer.message);
}

absl::Status DevicePeer::Reserve(const MemberMemoryOptions& options) {
  return Ask({.op = PeerRequest::Op::kReserve,
              .warmup_scratch = options.warmup_scratch,
              .offset_bytes = options.scratch_bytes,
              .bytes = options.reserve_bytes})
      .status();
}

absl::Status DevicePeer::Map(UniqueFd fd, size_t offset_bytes, size_t bytes) {
  return Ask({.op = PeerRequest::Op::kMap, .offset_bytes = offset_bytes, .bytes = bytes}, fd.get()).status();
}

absl::Status DevicePeer::MapIpc(const IpcHandle& handle, size_t bytes) {
  return Ask({.op = PeerRequest::Op::kMapIpc, .bytes = bytes, .handle = handle}).status();
}

absl::Status DevicePeer::FinishWarmup() { return Ask({.op = PeerRequest::Op::kFinishWarmup}).status(); }

absl::StatusOr<uint64_t> DevicePeer::Read(size_t offset_bytes) {
  ASSIGN_OR_RETURN(const PeerAnswer answer,
                   Ask({.op = PeerRequest::Op::kRead, .offset_bytes = offset_bytes}));
  return answer.word;
}

absl::Status DevicePeer::Write(size_t offset_bytes, uint64_t word) {
  return Ask({.op = PeerRequest::Op::kWrite, .offset_bytes = offset_bytes, .word = word}).status();
}

absl::StatusOr<UniqueFd> DevicePeer::MakeSlab(size_t bytes) {
  UniqueFd fd;
  RETURN_IF_ERROR(Ask({.op = PeerRequest::Op::kMakeSlab, .bytes = bytes}, -1, &fd).status());
  return fd;
}

absl::StatusOr<IpcHandle> DevicePeer::MakeIpcSlab(size_t bytes) {
  ASSIGN_OR_RETURN(const PeerAnswer answer, Ask({.op = PeerRequest::Op::kMakeIpcSlab, .bytes = bytes}));
  return answer.handle;
}

absl::StatusOr<uint64_t> DevicePeer::OpenFds() {
  ASSIGN_OR_RETURN(const PeerAnswer answer, Ask({.op = PeerRequest::Op::kOpenFds}));
  return answer.word;
}

}  // namespace kvpool
