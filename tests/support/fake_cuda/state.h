// A libcuda.so.1 without a GPU, for tests: the driver entry points that kvpool uses, over memfds, threads and
// the kernels' host bodies. It does what the driver documents, in one process and across several: the memory
// of a new allocation is dirty, calls without a current context fail, a child forked after cuInit is refused,
// streams run asynchronously, and a kernel that reaches outside its mappings loses the context.
//
// Point KVPOOL_LIBCUDA at it. What it imitates is set by the environment, read at cuInit:
//   KVPOOL_FAKE_CUDA_DEVICES=2          GPUs, each with a UUID that all processes agree on. Default 1.
//   KVPOOL_FAKE_CUDA_DEVICE_BYTES=n     Memory of each, counted per creating process. Default 4 GiB.
//   KVPOOL_FAKE_CUDA_WITHOUT=vmm,fd     Attributes denied: an old GPU (vmm), a driver that can't pass fds
//   (fd).
//   KVPOOL_FAKE_CUDA_FAIL=cuMemCreate#3=CUDA_ERROR_OUT_OF_MEMORY,cuStreamSynchronize#2+=CUDA_ERROR_ECC_UNCORRECTABLE
//                                       The 3rd call fails; the 2nd and all later ones do. A sticky error
//                                       also fails every other call after it, as it does on a GPU.
//   KVPOOL_FAKE_CUDA_LATENCY_US=cuMemCreate=200,cuMemsetD8Async=5000
//                                       What a call costs its caller, as on a busy GPU.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_

#include <cuda.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace kvpool::fake {

inline constexpr size_t kGranularityBytes = size_t{2} << 20;

struct Fault {
  std::string call;
  int from = 1;          // The first call to fail, counted from 1.
  bool onwards = false;  // All later calls fail as well.
  CUresult result = CUDA_ERROR_UNKNOWN;
};

struct Settings {
  int device_count = 1;
  size_t device_bytes = size_t{4} << 30;
  std::set<std::string> without;
  std::vector<Fault> faults;
  std::map<std::string, int> latency_us;
};

// Aborts with the variable's name if one can't be read: a test that sets it wrong must not pass.
Settings ReadSettings();

// One physical allocation.
class Memory {
 public:
  // Adopts `fd`. `used_bytes`, where given, is the account that its bytes leave when it goes.
  Memory(int fd, size_t bytes, int device, size_t* used_bytes)
      : fd(fd), bytes(bytes), device(device), used_bytes_(used_bytes) {}
  ~Memory();
  // Drops the fd: mappings hold the memory without it, so a member's fds are not used up by
  // what it has mapped.
  void CloseFd();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int fd;
  const size_t bytes;
  const int device;

 private:
  size_t* const used_bytes_;
};

struct Mapping {
  size_t bytes = 0;
  std::shared_ptr<Memory> memory;
  int protection = 0;  // mmap's PROT_ bits.
};
struct Import {
  Mapping mapping;
  std::string handle;  // The bytes of the IPC handle.
  int opened = 0;
};

struct DeviceState {
  size_t used_bytes = 0;
  int context_holders = 0;
};

// The state of a process. Memory is made and freed under `mu`. It is never destroyed, since streams may run
// until the very end.
struct State {
  Settings settings;
  pid_t pid = 0;  // The process that called cuInit; 0 before.
  std::mutex mu;
  std::map<std::string, int> calls;
  CUresult lost = CUDA_SUCCESS;  // The sticky error that took the context.
  std::vector<DeviceState> devices;
  uint64_t next_handle = 1;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Memory>> handles;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;  // VMM mappings and cuMemAlloc's.
  std::map<CUdeviceptr, Import> imports;
  std::map<void*, size_t> pinned;
};
State& TheState();

// Whether [address, address + bytes) is mapped with this protection. REQUIRES: state.mu is held.
bool IsAccessible(const State& state, CUdeviceptr address, size_t bytes, int protection);

bool IsSticky(CUresult result);
const char* NameOf(CUresult result);  // nullptr for numbers it does not know.

// The device of the thread's current context; -1 where there is none.
int CurrentDevice();

// Waits for all that is queued on any stream, as the driver does before it takes memory away. REQUIRES:
// state.mu is not held.
void DrainStreams();

enum class Needs { kNothing, kInit, kContext };
// Every call starts with this: the delay asked for, then the reasons to fail.
CUresult Begin(const char* call, Needs needs);

// Wraps the body of an entry point.
template <typename Body>
CUresult Call(const char* call, Needs needs, Body body) {
  const CUresult refused = Begin(call, needs);
  return refused != CUDA_SUCCESS ? refused : body(TheState());
}

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_
