// Streams, events, copies and launches of the fake driver. A stream is a thread that runs a queue in order,
// while its caller goes on, so that a missing fence or synchronisation shows.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/kernels.h"
#include "tests/support/fake_cuda/state.h"

namespace kvpool::fake {
namespace {

// A point in a stream, which has passed once all work before it is done.
class Marker {
 public:
  void Pass() {
    const std::lock_guard lock(mu_);
    passed_ = true;
    when_ = std::chrono::steady_clock::now();
    cv_.notify_all();
  }
  bool passed() {
    const std::lock_guard lock(mu_);
    return passed_;
  }
  // When it was passed.
  std::chrono::steady_clock::time_point Wait() {
    std::unique_lock lock(mu_);
    cv_.wait(lock, [this] { return passed_; });
    return when_;
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point when_;
};

class Queue {
 public:
  void Push(Work work) {
    const std::lock_guard lock(mu_);
    work_.push_back(std::move(work));
    cv_.notify_one();
  }
  std::shared_ptr<Marker> Mark() {
    auto marker = std::make_shared<Marker>();
    const std::lock_guard lock(mu_);
    work_.push_back([marker] {
      marker->Pass();
      return CUDA_SUCCESS;
    });
    cv_.notify_one();
    return marker;
  }
  // Ends the thread once all that was queued is done.
  void Close() {
    const std::lock_guard lock(mu_);
    closed_ = true;
    cv_.notify_one();
  }
  // The body of the stream's thread.
  void Run() {
    while (true) {
      std::unique_lock lock(mu_);
      cv_.wait(lock, [this] { return !work_.empty() || closed_; });
      if (work_.empty()) return;
      const Work work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      const CUresult result = work();
      if (result == CUDA_SUCCESS) continue;
      State& state = TheState();
      const std::lock_guard state_lock(state.mu);
      // The first one is what a context is lost by.
      if (state.lost == CUDA_SUCCESS) state.lost = result;
    }
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  std::deque<Work> work_;
  bool closed_ = false;
};

struct Event {
  std::mutex mu;
  std::shared_ptr<Marker> marker;  // null before the first record: such an event counts as done
};

// The handles that are valid. Their objects are shared with the threads that use them.
template <typename Object, typename Handle>
class Handles {
 public:
  Handle Add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mu_);
    const auto handle = reinterpret_cast<Handle>(object.get());
    objects_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<Object> Find(Handle handle) {
    const std::lock_guard lock(mu_);
    const auto found = objects_.find(handle);
    return found != objects_.end() ? found->second : nullptr;
  }
  std::vector<std::shared_ptr<Object>> All() {
    const std::lock_guard lock(mu_);
    std::vector<std::shared_ptr<Object>> all;
    for (const auto& [handle, object] : objects_) all.push_back(object);
    return all;
  }
  std::shared_ptr<Object> Remove(Handle handle) {
    const std::lock_guard lock(mu_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mu_;
  std::map<Handle, std::shared_ptr<Object>> objects_;
};

// The default stream is not among them: kvpool must not use it, since it waits for all other streams' work
// and delays that.
Handles<Queue, CUstream>& Streams() {
  static auto& streams = *new Handles<Queue, CUstream>();
  return streams;
}
Handles<Event, CUevent>& Events() {
  static auto& events = *new Handles<Event, CUevent>();
  return events;
}

// The sticky error that the work before a point of synchronisation met.
CUresult Outcome(State& state) {
  const std::lock_guard lock(state.mu);
  return state.lost;
}

CUresult Enqueue(CUstream stream, Work work) {
  const std::shared_ptr<Queue> queue = Streams().Find(stream);
  if (queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  queue->Push(std::move(work));
  return CUDA_SUCCESS;
}

bool IsMapped(State& state, CUdeviceptr address, size_t bytes, int protection) {
  const std::lock_guard lock(state.mu);
  return IsAccessible(state, address, bytes, protection);
}

// A copy and a kernel that write the same memory at a time are a mistake of their own, which this does not look for.
void MarkWritten(State& state, CUdeviceptr address, size_t bytes) {
  const std::lock_guard lock(state.mu);
  NoteWritten(state, address, bytes);
}
bool MayRead(State& state, CUdeviceptr address, size_t bytes) {
  const std::lock_guard lock(state.mu);
  if (WasWritten(state, address, bytes)) return true;
  state.lost_words = "a copy of " + std::to_string(bytes) + " bytes reads what nobody has written";
  std::fprintf(stderr, "fake libcuda: %s\n", state.lost_words.c_str());
  return false;
}

// Where a copy's host memory is: it must be there still when the copy is done.
struct HostMemory {
  const void* memory;
  size_t bytes;
  uintptr_t registered = 0;

  bool Find(State& state) {
    const std::lock_guard lock(state.mu);
    return FindRegistered(state, memory, bytes, &registered);
  }
  bool IsThere(State& state) {
    HostMemory now = *this;
    return now.Find(state) && now.registered == registered;
  }
  // Whether the GPU of the calling thread's context has it page-locked.
  bool IsLocked(State& state) const {
    const std::lock_guard lock(state.mu);
    return IsLockedFor(state, registered, CurrentDevice());
  }
};

void BeforeCopy(State& state) {
  std::function<void()> before;
  {
    const std::lock_guard lock(state.mu);
    before = state.before_copy;
  }
  if (before) before();
}

// A piece of work on memory that may be unmapped while it waits for its turn, as a GPU's may, and not while it is done.
template <typename Body>
CUresult Reach(State& state, CUdeviceptr address, size_t bytes, int protection, Body body) {
  const std::shared_lock lock(MappingsInUse());
  if (!IsMapped(state, address, bytes, protection)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return body();
}

// A copy to or from the device as a stream does it; it has no function where the driver refuses it.
Work CopyIn(State& state, CUdeviceptr to, const void* from, size_t bytes) {
  HostMemory host = {from, bytes};
  if (!IsMapped(state, to, bytes, PROT_WRITE) || !host.Find(state)) return nullptr;
  return [=, &state]() mutable {
    BeforeCopy(state);
    return Reach(state, to, bytes, PROT_WRITE, [&] {
      if (!host.IsThere(state)) return CUDA_ERROR_ILLEGAL_ADDRESS;
      MarkWritten(state, to, bytes);
      std::memcpy(reinterpret_cast<void*>(to), from, bytes);
      return CUDA_SUCCESS;
    });
  };
}
Work CopyOut(State& state, void* to, CUdeviceptr from, size_t bytes) {
  HostMemory host = {to, bytes};
  if (!IsMapped(state, from, bytes, PROT_READ) || !host.Find(state)) return nullptr;
  return [=, &state]() mutable {
    BeforeCopy(state);
    return Reach(state, from, bytes, PROT_READ, [&] {
      if (!host.IsThere(state)) return CUDA_ERROR_ILLEGAL_ADDRESS;
      if (!MayRead(state, from, bytes)) return CUDA_ERROR_LAUNCH_FAILED;
      std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      return CUDA_SUCCESS;
    });
  };
}

struct Batch {
  const CUdeviceptr* to;
  const CUdeviceptr* from;
  const size_t* sizes;
  size_t count;
  const CUmemcpyAttributes* attributes;
  const size_t* attributes_from;
  size_t attributes_count;
};

// Nothing of it is done where it is refused.
CUresult EnqueueBatch(State& state, const Batch& batch, CUstream stream) {
  // kvpool's copies are alike, and what others do before them must be over when their sources are read.
  if (batch.count == 0 || batch.attributes_count != 1 || *batch.attributes_from != 0 ||
      batch.attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Work> copies;
  for (size_t i = 0; i < batch.count; ++i) {
    void* const to = reinterpret_cast<void*>(batch.to[i]);
    const void* const from = reinterpret_cast<const void*>(batch.from[i]);
    const bool in = IsMapped(state, batch.to[i], 1, PROT_READ);
    HostMemory host = {in ? from : to, batch.sizes[i]};
    Work copy = in ? CopyIn(state, batch.to[i], from, batch.sizes[i])
                   : CopyOut(state, to, batch.from[i], batch.sizes[i]);
    if (copy == nullptr || !host.Find(state)) return CUDA_ERROR_INVALID_VALUE;
    // The addresses of a batch are the GPU's. Other copies translate them.
    if (!host.IsLocked(state) || state.settings.without.contains("host-addresses"))
      copy = [] { return CUDA_ERROR_ILLEGAL_ADDRESS; };
    copies.push_back(std::move(copy));
  }
  return Enqueue(stream, [copies = std::move(copies)] {
    for (const Work& copy : copies) {
      const CUresult result = copy();
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

CUresult MakeStream(CUstream* stream, unsigned int flags) {
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto queue = std::make_shared<Queue>();
  std::thread([queue] { queue->Run(); }).detach();
  *stream = Streams().Add(std::move(queue));
  return CUDA_SUCCESS;
}

}  // namespace

std::shared_mutex& MappingsInUse() {
  static auto& mu = *new std::shared_mutex();
  return mu;
}

void DrainStreams() {
  for (const std::shared_ptr<Queue>& queue : Streams().All()) queue->Mark()->Wait();
}

}  // namespace kvpool::fake

using namespace kvpool::fake;  // NOLINT: entry points must be in the global namespace

// 0 is the lowest priority, and the default.
constexpr int kGreatestPriority = -5;

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return Call("cuCtxGetStreamPriorityRange", Needs::kContext, [&](State&) {
    *least = 0;
    *greatest = kGreatestPriority;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  return Call("cuStreamCreateWithPriority", Needs::kContext, [&](State&) {
    if (priority > 0 || priority < kGreatestPriority) return CUDA_ERROR_INVALID_VALUE;
    return MakeStream(stream, flags);
  });
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  return Call("cuStreamCreate", Needs::kContext, [&](State&) { return MakeStream(stream, flags); });
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  return Call("cuStreamDestroy", Needs::kContext, [&](State&) {
    const std::shared_ptr<Queue> queue = Streams().Remove(stream);
    if (queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    queue->Close();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  return Call("cuStreamSynchronize", Needs::kContext, [&](State& state) {
    const std::shared_ptr<Queue> queue = Streams().Find(stream);
    if (queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    queue->Mark()->Wait();
    return Outcome(state);
  });
}

CUresult CUDAAPI cuCtxSynchronize() {
  return Call("cuCtxSynchronize", Needs::kContext, [&](State& state) {
    {
      const std::lock_guard lock(state.mu);
      if (state.capturing != nullptr) {
        state.capture_is_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
      }
    }
    DrainStreams();
    return Outcome(state);
  });
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return Call("cuStreamBeginCapture", Needs::kContext, [&](State& state) {
    if (Streams().Find(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL) return CUDA_ERROR_NOT_SUPPORTED;
    const std::lock_guard lock(state.mu);
    if (state.capturing != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    state.capturing = stream;
    state.capture_is_broken = false;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return Call("cuStreamEndCapture", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    if (stream == nullptr || state.capturing != stream) return CUDA_ERROR_ILLEGAL_STATE;
    state.capturing = nullptr;
    *graph = nullptr;
    return state.capture_is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return Call("cuThreadExchangeStreamCaptureMode", Needs::kInit, [&](State&) {
    std::swap(*mode, ThreadCaptureMode());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return Call("cuStreamIsCapturing", Needs::kContext, [&](State& state) {
    const std::lock_guard lock(state.mu);
    *status = stream != nullptr && stream == state.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                             : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  return Call("cuStreamWaitEvent", Needs::kContext, [&](State&) {
    const std::shared_ptr<Event> found = Events().Find(event);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(found->mu);
    return Enqueue(stream, [marker = found->marker] {
      if (marker != nullptr) marker->Wait();
      return CUDA_SUCCESS;
    });
  });
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                      unsigned int flags) {
  return Call("cuStreamWriteValue64", Needs::kContext, [&](State& state) {
    if (flags != 0 || !IsMapped(state, address, sizeof value, PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    return Enqueue(stream, [address, value, &state] {
      return Reach(state, address, sizeof value, PROT_WRITE, [=] {
        std::atomic_ref(*reinterpret_cast<uint64_t*>(address)).store(value);
        return CUDA_SUCCESS;
      });
    });
  });
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                     unsigned int flags) {
  return Call("cuStreamWaitValue64", Needs::kContext, [&](State& state) {
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || !IsMapped(state, address, sizeof value, PROT_READ)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return Enqueue(stream, [address, value, &state] {
      // The writer may be another process, which can't wake this one, so it polls. The comparison is cyclic,
      // as documented.
      CUresult looked;
      while ((looked = Reach(state, address, sizeof value, PROT_READ, [=] {
                const uint64_t word = std::atomic_ref(*reinterpret_cast<uint64_t*>(address)).load();
                return static_cast<int64_t>(word - value) < 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
              })) == CUDA_ERROR_NOT_READY) {
        std::this_thread::yield();
      }
      return looked;
    });
  });
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return Call("cuLaunchHostFunc", Needs::kContext, [&](State&) {
    return Enqueue(stream, [function, argument] {
      function(argument);
      return CUDA_SUCCESS;
    });
  });
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int) {
  return Call("cuEventCreate", Needs::kContext, [&](State&) {
    *event = Events().Add(std::make_shared<Event>());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventDestroy(CUevent event) {
  return Call("cuEventDestroy", Needs::kContext, [&](State&) {
    return Events().Remove(event) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

// Events stay in their process here, as the device's attributes say.
CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle*, CUevent) {
  return Call("cuIpcGetEventHandle", Needs::kContext, [](State&) { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuIpcOpenEventHandle(CUevent*, CUipcEventHandle) {
  return Call("cuIpcOpenEventHandle", Needs::kContext, [](State&) { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  return Call("cuEventRecord", Needs::kContext, [&](State&) {
    const std::shared_ptr<Event> found = Events().Find(event);
    const std::shared_ptr<Queue> queue = Streams().Find(stream);
    if (found == nullptr || queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(found->mu);
    found->marker = queue->Mark();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
  return Call("cuEventQuery", Needs::kContext, [&](State& state) {
    const std::shared_ptr<Event> found = Events().Find(event);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(found->mu);
    if (found->marker != nullptr && !found->marker->passed()) return CUDA_ERROR_NOT_READY;
    return Outcome(state);
  });
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  return Call("cuEventSynchronize", Needs::kContext, [&](State& state) {
    const std::shared_ptr<Event> found = Events().Find(event);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Marker> marker;
    {
      const std::lock_guard lock(found->mu);
      marker = found->marker;
    }
    if (marker != nullptr) marker->Wait();
    return Outcome(state);
  });
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  return Call("cuEventElapsedTime", Needs::kContext, [&](State&) {
    std::chrono::steady_clock::time_point times[2];
    for (const bool second : {false, true}) {
      const std::shared_ptr<Event> found = Events().Find(second ? end : begin);
      if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      const std::lock_guard lock(found->mu);
      if (found->marker == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      if (!found->marker->passed()) return CUDA_ERROR_NOT_READY;
      times[second] = found->marker->Wait();
    }
    *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
  return Call("cuMemsetD8Async", Needs::kContext, [&](State& state) {
    if (!IsMapped(state, address, bytes, PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    return Enqueue(stream, [=, &state] {
      return Reach(state, address, bytes, PROT_WRITE, [=, &state] {
        MarkWritten(state, address, bytes);
        void* const start = reinterpret_cast<void*>(address);
        // Whole pages become holes, which read as zero and take no memory, so that large pools are cheap.
        if (value != 0 || ::madvise(start, bytes, MADV_REMOVE) != 0) std::memset(start, value, bytes);
        return CUDA_SUCCESS;
      });
    });
  });
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyHtoDAsync", Needs::kContext, [&](State& state) {
    Work copy = CopyIn(state, to, from, bytes);
    return copy != nullptr ? Enqueue(stream, std::move(copy)) : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyDtoHAsync", Needs::kContext, [&](State& state) {
    Work copy = CopyOut(state, to, from, bytes);
    return copy != nullptr ? Enqueue(stream, std::move(copy)) : CUDA_ERROR_INVALID_VALUE;
  });
}

// As CUDA 13 has it, and as 12.8 had it, whose name is a macro for the other now.
extern "C" CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes,
                                                  size_t count, CUmemcpyAttributes* attributes,
                                                  size_t* attributes_from, size_t attributes_count,
                                                  CUstream stream) {
  return Call("cuMemcpyBatchAsync", Needs::kContext, [&](State& state) {
    return EnqueueBatch(state, {to, from, sizes, count, attributes, attributes_from, attributes_count},
                        stream);
  });
}
extern "C" CUresult CUDAAPI BatchOf12_8(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                        CUmemcpyAttributes* attributes, size_t* attributes_from,
                                        size_t attributes_count, size_t* failed,
                                        CUstream stream) __asm__("cuMemcpyBatchAsync");
CUresult CUDAAPI BatchOf12_8(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                             CUmemcpyAttributes* attributes, size_t* attributes_from, size_t attributes_count,
                             size_t* failed, CUstream stream) {
  return Call("cuMemcpyBatchAsync", Needs::kContext, [&](State& state) {
    *failed = SIZE_MAX;  // The error is not of one copy.
    return EnqueueBatch(state, {to, from, sizes, count, attributes, attributes_from, attributes_count},
                        stream);
  });
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyDtoDAsync", Needs::kContext, [&](State& state) {
    if (!IsMapped(state, from, bytes, PROT_READ) || !IsMapped(state, to, bytes, PROT_WRITE)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return Enqueue(stream, [=, &state] {
      return Reach(state, to, bytes, PROT_WRITE, [=, &state] {
        if (!IsMapped(state, from, bytes, PROT_READ)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        MarkWritten(state, to, bytes);
        std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        return CUDA_SUCCESS;
      });
    });
  });
}

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  return Call("cuModuleLoadData", Needs::kContext, [&](State&) {
    // The first word is that of a fat binary.
    constexpr uint32_t kFatBinary = 0xba55ed50;
    uint32_t word;
    std::memcpy(&word, image, sizeof word);
    if (word != kFatBinary) return CUDA_ERROR_INVALID_IMAGE;
    *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuModuleUnload(CUmodule) {
  return Call("cuModuleUnload", Needs::kContext, [](State&) { return CUDA_SUCCESS; });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return Call("cuModuleGetFunction", Needs::kContext, [&](State&) {
    const FakeKernel* kernel = FindKernel(module, name);
    if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(const_cast<FakeKernel*>(kernel));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int, CUstream stream, void** arguments,
                                void**) {
  return Call("cuLaunchKernel", Needs::kContext, [&](State&) {
    const auto& kernel = *reinterpret_cast<const FakeKernel*>(function);
    constexpr unsigned int kMaxGridSide = 65535;  // the limit of y and z
    const uint64_t threads = uint64_t{block_x} * block_y * block_z;
    if (threads == 0 || threads > kernel.max_threads() || grid_x == 0 || grid_y == 0 ||
        grid_y > kMaxGridSide || grid_z == 0 || grid_z > kMaxGridSide) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    // kvpool's grids have two dimensions, and its thread blocks one.
    if (grid_z != 1 || threads != block_x) return CUDA_ERROR_NOT_SUPPORTED;
    const Grid grid = {grid_x, grid_y, block_x};
    // A kernel looks by itself at what it reaches.
    return Enqueue(stream, [work = kernel.Bind(grid, arguments)] {
      const std::shared_lock lock(MappingsInUse());
      return work();
    });
  });
}
