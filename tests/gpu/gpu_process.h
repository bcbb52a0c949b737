// A process with a GPU that serves commands over a socket: the roles of the GPU check (exporter, importer,
// victim, witness). The process that commands them never calls CUDA itself; while it holds an fd, it is the
// holder without a context.
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
  kDescribe,       // -> text: the GPU and its driver
  kMakeSlab,       // bytes -> fd
  kMakeIpcSlab,    // bytes -> handle
  kMapSlab,        // fd, bytes
  kMapReadOnly,    // fd, bytes
  kOpenIpc,        // handle, bytes
  kWriteStamp,     // key; stamps all of the role's memory
  kVerifyStamp,    // key -> values[0]: wrong words
  kFreeBytes,      // -> values[0]
  kReexport,       // fd, bytes -> text: imports, exports again and imports that
  kStartCounting,  // rounds; starts the counting kernel on word 0 and does not wait
  kSampleCounter,  // -> values[0]
  kFork,           // -> values[0]: the pid of a child that has all files and mappings of the role, and sleeps
  kWatchCounter,   // milliseconds -> values: at the start, at the end, microseconds to the last change
  kMeasureCalls,   // bytes -> values: median microseconds of each of kCallNames
  // bytes -> values: microseconds of making and dropping a slab, idle and beside a running kernel, and of
  // that kernel, alone and beside them
  kMeasureStall,
  kMeasureStamps,   // bytes -> values: megabytes a second written, verified
  kMeasureFence,    // -> values: nanoseconds to record, to query; microseconds to be woken
  kMakeEvent,       // -> handle
  kOpenEvent,       // handle
  kServeSignals,    // fd; signals for each number on that socket until it closes; has no answer
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

  // Errors are the role's, and sticky if they were there.
  absl::StatusOr<GpuAnswer> Do(const GpuCommand& command, int fd = -1, UniqueFd* answer_fd = nullptr);
  // Sends a command that has no answer.
  absl::Status Send(const GpuCommand& command, int fd);
  // Sends SIGKILL, and returns the microseconds until the pidfd fired, which the daemon takes for the death;
  // on a kernel without pidfds, until the process could be waited for.
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
