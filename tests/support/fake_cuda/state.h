// A libcuda.so.1 without a GPU, for tests: the driver functions that kvpool uses, over memfds, threads and
// the kernels' host bodies or their PTX. It does what the driver documents, in one process and across several: the memory
// of a new allocation is dirty with what was freed before, calls without a current context fail, a child forked after cuInit is refused,
// streams run asynchronously, and work that reaches outside its mappings loses the context, also what waits for its turn while memory
// is unmapped.
//
// KVPOOL_LIBCUDA names it. The environment, read at cuInit, sets what it imitates:
//   KVPOOL_FAKE_CUDA_DEVICES=2          GPUs, each with a UUID that all processes agree on. Default 1.
//   KVPOOL_FAKE_CUDA_DEVICE_BYTES=n     Memory of each, counted per creating process. Default 4 GiB.
//   KVPOOL_FAKE_CUDA_WITHOUT=vmm,fd     Attributes denied: an old GPU (vmm), a driver that can't pass fds
//   (fd), a GPU whose processes share an MPS server (own-context), one that has registered host memory at
//   addresses of its own, as in WSL (host-addresses), one in compute mode EXCLUSIVE_PROCESS (other-processes).
//   KVPOOL_FAKE_CUDA_FAIL=cuMemCreate#3=CUDA_ERROR_OUT_OF_MEMORY,cuStreamSynchronize#2+=CUDA_ERROR_ECC_UNCORRECTABLE
//                                       The 3rd call fails; the 2nd and all later ones do. A sticky error
//                                       also fails every other call after it, as it does on a GPU.
//   KVPOOL_FAKE_CUDA_LATENCY_US=cuMemCreate=200,cuMemsetD8Async=5000
//                                       What a call costs its caller, as on a busy GPU.
//   KVPOOL_FAKE_KERNELS=ptx             Kernels are executed from the PTX of their fat binaries, and checked as
//                                       ptx/launch.h says. Default host: the same bodies, compiled for the host,
//                                       which is faster.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_

#include <cuda.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tests/support/fake_cuda/residue.h"
#include "tests/support/fake_cuda/shadow.h"

namespace kvpool::fake {

inline constexpr size_t kGranularityBytes = size_t{2} << 20;

struct Fault {
  std::string call;
  int from = 1;          // the first call that fails, counted from 1
  bool onwards = false;  // all later calls fail too
  CUresult result = CUDA_ERROR_UNKNOWN;
};

enum class Kernels { kHost, kPtx };

struct Settings {
  int device_count = 1;
  size_t device_bytes = size_t{4} << 30;
  std::set<std::string> without;
  std::vector<Fault> faults;
  std::map<std::string, int> latency_us;
  Kernels kernels = Kernels::kHost;
};

// Aborts with the variable's name where one can't be parsed: a test that sets it wrong must not pass.
Settings ReadSettings();
// What `text` says as KVPOOL_FAKE_CUDA_FAIL would. Aborts with `name` otherwise.
std::vector<Fault> ReadFaults(const char* name, const std::string& text);

struct DeviceState {
  size_t used_bytes = 0;
  int context_holders = 0;
  Residue residue;
};

// One physical allocation.
class Memory {
 public:
  // Adopts `fd`. `owner` is the device that it was made on; nullptr: another process has made it.
  Memory(int fd, size_t bytes, int device, DeviceState* owner)
      : fd(fd), bytes(bytes), device(device), owner_(owner) {}
  ~Memory();
  // Closes the fd: mappings hold the memory without it, so that mapped memory does not use up a member's fds.
  void CloseFd();
  bool is_own() const { return owner_ != nullptr; }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int fd;
  const size_t bytes;
  const int device;
  // Of memory that only this process writes, where kernels are checked.
  std::unique_ptr<Shadow> shadow;

 private:
  DeviceState* const owner_;
};

struct Mapping {
  size_t bytes = 0;
  std::shared_ptr<Memory> memory;
  int protection = 0;  // PROT_* of mmap
};
// Host memory of others that is page-locked.
struct Registration {
  size_t bytes = 0;
  int device = -1;  // Locked for this one's context alone; -1: for all.
};
struct Import {
  Mapping mapping;
  std::string handle;  // the bytes of the IPC handle
  int opened = 0;
};

// The driver's state in one process. Memory is made and freed under `mu`. It is never destroyed, since
// streams may run until the process ends.
struct State {
  Settings settings;
  pid_t pid = 0;  // the process that called cuInit; 0 before
  std::mutex mu;
  std::map<std::string, int> calls;
  CUresult lost = CUDA_SUCCESS;  // the sticky error that made the context unusable
  std::string lost_words;        // what a kernel that was checked did wrong
  std::vector<DeviceState> devices;
  uint64_t next_handle = 1;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Memory>> handles;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;  // VMM mappings and those of cuMemAlloc
  std::map<CUdeviceptr, Import> imports;
  std::map<void*, size_t> pinned;
  std::map<uintptr_t, Registration> registered;
  std::function<void()> before_copy;  // see controls.h
  // A stream that captures a graph in the global mode. Any call that needs a context, by a thread that has not relaxed its own
  // mode, fails and breaks the capture. What is queued on the stream meanwhile is not imitated.
  CUstream capturing = nullptr;
  bool capture_is_broken = false;
};
State& TheState();

// Whether [address, address + bytes) is mapped with this protection. REQUIRES: state.mu is held.
bool IsAccessible(const State& state, CUdeviceptr address, size_t bytes, int protection);

// Notes that a copy writes a range, or answers whether all of one was written before it is copied. REQUIRES: state.mu is held.
void NoteWritten(State& state, CUdeviceptr address, size_t bytes);
bool WasWritten(const State& state, CUdeviceptr address, size_t bytes);

bool IsSticky(CUresult result);
const char* NameOf(CUresult result);  // nullptr for an unknown number

// Which of `registered` a range of host memory is in: its first address, or 0 for one that is in none. False: it is partly in
// one, which no copy may be. REQUIRES: state.mu is held.
bool FindRegistered(const State& state, const void* memory, size_t bytes, uintptr_t* first);
// Whether what is registered at `first` is locked for this device's context. REQUIRES: state.mu is held.
bool IsLockedFor(const State& state, uintptr_t first, int device);

// The device of the thread's current context; -1 where there is none.
int CurrentDevice();

// Waits for all that is queued on any stream, as the driver does before it takes memory away. REQUIRES:
// state.mu is not held.
void DrainStreams();
// Shared by each piece of a stream's work that reaches device memory, while it does: memory is unmapped between two of them.
std::shared_mutex& MappingsInUse();
// The capture mode of the calling thread, as cuThreadExchangeStreamCaptureMode sets it.
CUstreamCaptureMode& ThreadCaptureMode();

enum class Needs { kNothing, kInit, kContext };
// The start of every call: the delay that is set, then the reasons to fail.
CUresult Begin(const char* call, Needs needs);

// Wraps the body of an entry point.
template <typename Body>
CUresult Call(const char* call, Needs needs, Body body) {
  const CUresult refused = Begin(call, needs);
  return refused != CUDA_SUCCESS ? refused : body(TheState());
}

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_STATE_H_
