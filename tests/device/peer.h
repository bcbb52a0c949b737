// Another process with a device of its own, which serves requests over a socket: the peer of the
// contract tests.
//
// It is started by fork and exec, so that it never shares a driver's state with the test. It uses the public
// interface of cuda/device.h, as an owner (it makes slabs) or as a member (it maps them).
#ifndef KVPOOL_TESTS_DEVICE_PEER_H_
#define KVPOOL_TESTS_DEVICE_PEER_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device.h"

namespace kvpool {

// Requests and answers as they cross the socket: one packet each, both ends from one build.
struct PeerRequest {
  enum class Op : uint8_t {
    kReserve,
    kMap,
    kMapIpc,
    kFinishWarmup,
    kRead,
    kWrite,
    kMakeSlab,
    kMakeIpcSlab,
    kOpenFds
  };
  Op op;
  bool warmup_scratch;
  uint64_t offset_bytes;  // relative to the member's base, or to the owner's slab
  uint64_t bytes;
  IpcHandle handle;
  uint64_t word;  // the word that kWrite writes
};
struct PeerAnswer {
  int code;  // absl::StatusCode
  char message[480];
  uint64_t word;  // kRead: the word; kOpenFds: the number of open fds
  IpcHandle handle;
};

class DevicePeer {
 public:
  // Starts the `device_peer` that lies beside this test's binary, with the end of a socket pair as its fd 3.
  static absl::StatusOr<std::unique_ptr<DevicePeer>> Start();
  ~DevicePeer();

  absl::Status Reserve(const MemberMemoryOptions& options);
  absl::Status Map(UniqueFd fd, size_t offset_bytes, size_t bytes);
  absl::Status MapIpc(const IpcHandle& handle, size_t bytes);
  absl::Status FinishWarmup();
  // The 8 bytes at an offset from base(), or from the start of the slab that it owns.
  absl::StatusOr<uint64_t> Read(size_t offset_bytes);
  absl::Status Write(size_t offset_bytes, uint64_t word);
  // Makes a slab and keeps it; returns the fd or the handle that a member needs.
  absl::StatusOr<UniqueFd> MakeSlab(size_t bytes);
  absl::StatusOr<IpcHandle> MakeIpcSlab(size_t bytes);
  absl::StatusOr<uint64_t> OpenFds();
  // Sends SIGKILL and waits for the end.
  void Kill();

 private:
  DevicePeer(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}
  absl::StatusOr<PeerAnswer> Ask(const PeerRequest& request, int fd = -1, UniqueFd* answer_fd = nullptr);

  pid_t pid_;
  UniqueFd socket_;
};

// Sends or receives one packet with at most one fd. UNAVAILABLE: end of file.
absl::Status SendPacket(int socket, const void* data, size_t bytes, int fd);
absl::Status ReceivePacket(int socket, void* data, size_t bytes, UniqueFd* fd);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_PEER_H_
