// A process with a GPU, told what to do over a socket: the roles of the GPU check (exporter, importer, victim, witness).
// The process that tells them never touches CUDA itself; while it holds an fd it is the keeper without a context.
#ifndef KVPOOL_TESTS_GPU_GPU_PROCESS_H_
#define KVPOOL_TESTS_GPU_GPU_PROCESS_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

enum class GpuOp : uint8_t {
  kDescribe,       // text: what GPU and driver this is.
  kMakeSlab,       // bytes -> fd
  kMakeIpcSlab,    // bytes -> handle
  kMapSlab,        // fd, bytes
  kMapReadOnly,    // fd, bytes
  kOpenIpc,        // handle, bytes
  kWriteStamp,     // key: over all of the memory at hand.
  kVerifyStamp,    // key -> values[0]: wrong words
  kFreeBytes,      // -> values[0]
  kReexport,       // fd, bytes: imports, exports again and imports that; text: how it went.
  kStartCounting,  // rounds: starts the counting kernel over word 0 and does not wait.
  kSampleCounter,  // -> values[0]
  kWatchCounter,  // milliseconds -> values: at the start, at the end, last move after the start in microseconds
  kMeasureCalls,  // bytes -> values: median microseconds of each of kCallNames
  kMeasureStall,  // bytes -> values: microseconds of making and dropping a slab, idle and beside a running kernel, and of that
  // kernel, alone and beside them
  kMeasureStamps,   // bytes -> values: megabytes a second written, verified
  kMeasureFence,    // -> values: nanoseconds to record, to query; microseconds to be woken
  kMakeEvent,       // -> handle
  kOpenEvent,       // handle
  kServeSignals,    // fd: answers each number on that socket by signalling; ends when it closes. No answer.
  kMeasureSignals,  // fd, key 0: semaphore, 1: event -> values: p50 and p99 in tenths of microseconds
};

inline constexpr std::array kCallNames = {"create", "reserve", "map",   "setAccess", "zero",
                                          "export", "import",  "unmap", "release"};

struct GpuCommand {
  GpuOp op;
  uint64_t bytes;
  uint64_t key;
  IpcHandle handle;
};
struct GpuAnswer {
  int code;  // absl::StatusCode
  bool sticky;
  char text[400];
  std::array<uint64_t, kCallNames.size()> values;
  IpcHandle handle;
};

class GpuProcess {
 public:
  // This binary again, as a role.
  static absl::StatusOr<std::unique_ptr<GpuProcess>> Start();
  ~GpuProcess();

  // Errors are the role's own; IsSticky survives the way.
  absl::StatusOr<GpuAnswer> Do(const GpuCommand& command, int fd = -1, UniqueFd* answer_fd = nullptr);
  // Sends a command that has no answer.
  absl::Status Send(const GpuCommand& command, int fd);
  // SIGKILL. Returns when the pidfd has fired, which is what the daemon takes for death: the microseconds it took. On a kernel
  // without pidfds, when the process can be waited for.
  absl::StatusOr<uint64_t> Kill();

 private:
  GpuProcess(pid_t pid, UniqueFd pidfd, UniqueFd socket)
      : pid_(pid), pidfd_(std::move(pidfd)), socket_(std::move(socket)) {}

  pid_t pid_;
  UniqueFd pidfd_;
  UniqueFd socket_;
};

// The role's side: serves commands on fd 3 until it closes. Returns an exit status.
int ServeGpuProcess();

// Two connected sockets.
struct SocketPair {
  UniqueFd first;
  UniqueFd second;
};
absl::StatusOr<SocketPair> MakeSocketPair();

}  // namespace kvpool

#endif  // KVPOOL_TESTS_GPU_GPU_PROCESS_H_
