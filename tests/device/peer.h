// Another process with a device of its own, told what to do over a socket: the far end of the contract tests.
//
// It is started by fork and exec, so that it never shares a driver's state with the test. What it is asked to
// do it does through the public interface of cuda/device.h, as an owner (it makes slabs) or as a member (it
// maps them).
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
  uint64_t offset_bytes;  // From the member's base, or from the owner's slab.
  uint64_t bytes;
  IpcHandle handle;
  uint64_t word;  // What kWrite writes.
};
struct PeerAnswer {
  int code;  // absl::StatusCode
  char message[480];
  uint64_t word;  // What kRead read; fds open after kOpenFds.
  IpcHandle handle;
};

class Peer {
 public:
  // Starts the `device_peer` that lies beside this test's binary, with the end of a socket pair as its fd 3.
  static absl::StatusOr<std::unique_ptr<Peer>> Start();
  ~Peer();

  absl::Status Reserve(const MemberMemoryOptions& options);
  absl::Status Map(UniqueFd fd, size_t offset_bytes, size_t bytes);
  absl::Status MapIpc(const IpcHandle& handle, size_t bytes);
  absl::Status FinishWarmup();
  // The 8 bytes at an offset from base() (or from the start of the slab it owns).
  absl::StatusOr<uint64_t> Read(size_t offset_bytes);
  absl::Status Write(size_t offset_bytes, uint64_t word);
  // It makes a slab and keeps it, and sends what a member needs.
  absl::StatusOr<UniqueFd> MakeSlab(size_t bytes);
  absl::StatusOr<IpcHandle> MakeIpcSlab(size_t bytes);
  absl::StatusOr<uint64_t> OpenFds();
  // SIGKILL, and its end awaited.
  void Kill();

 private:
  Peer(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}
  absl::StatusOr<PeerAnswer> Ask(const PeerRequest& request, int fd = -1, UniqueFd* answer_fd = nullptr);

  pid_t pid_;
  UniqueFd socket_;
};

// One packet with at most one fd. An end of file is UNAVAILABLE.
absl::Status SendPacket(int socket, const void* data, size_t bytes, int fd);
absl::Status ReceivePacket(int socket, void* data, size_t bytes, UniqueFd* fd);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_PEER_H_
