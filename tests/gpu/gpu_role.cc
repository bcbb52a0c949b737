// The commands of a role of the GPU check.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/block_stamper.h"
#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/fence_events.h"
#include "proto/support/status_macros.h"
#include "tests/device/peer.h"
#include "tests/gpu/gpu_process.h"
#include "tests/gpu/probe_driver.h"
#include "tests/gpu/probe_kernels.h"

extern "C" const unsigned char kvpool_probe_kernels_image[];

namespace kvpool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSocket = 3;
constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr unsigned kForkedSeconds = 60;  // A child that nobody kills ends by itself.

uint64_t MicrosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}
uint64_t Median(std::vector<uint64_t> values) {
  std::ranges::nth_element(values, values.begin() + values.size() / 2);
  return values[values.size() / 2];
}

class GpuRole {
 public:
  static absl::StatusOr<std::unique_ptr<GpuRole>> Open() {
    auto role = std::make_unique<GpuRole>();
    ASSIGN_OR_RETURN(role->device_, OpenCudaDevice("0"));
    ASSIGN_OR_RETURN(role->context_, CudaContext::OpenUuid(role->device_->uuid_bytes()));
    ASSIGN_OR_RETURN(role->probe_, LoadProbeDriver());
    ASSIGN_OR_RETURN(const CurrentContext current, role->context_->MakeCurrent());
    ASSIGN_OR_RETURN(role->stream_, MakeStream(role->context_));
    ASSIGN_OR_RETURN(role->kernel_stream_, MakeStream(role->context_));
    CUmodule module;
    const Driver& driver = role->context_->driver();
    RETURN_IF_ERROR(
        role->context_->Check(driver.cuModuleLoadData(&module, kvpool_probe_kernels_image), "probe kernels"));
    role->module_ = CudaModule(role->context_, module);
    RETURN_IF_ERROR(role->context_->Check(
        driver.cuModuleGetFunction(&role->count_, module, "kvpool_probe_count"), "probe kernels"));
    ASSIGN_OR_RETURN(role->stamper_, OpenCudaStamper(role->device_->uuid_bytes()));
    return role;
  }

  absl::Status Do(const GpuCommand& command, UniqueFd fd, GpuAnswer* answer, UniqueFd* answer_fd) {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    switch (command.op) {
      case GpuOp::kDescribe:
        return Describe(answer);
      case GpuOp::kMakeSlab: {
        ASSIGN_OR_RETURN(slab_, device_->MakeSlab(command.bytes));
        Use(slab_->address(), command.bytes);
        ASSIGN_OR_RETURN(*answer_fd, slab_->Export());
        return absl::OkStatus();
      }
      case GpuOp::kMakeIpcSlab: {
        ASSIGN_OR_RETURN(slab_, device_->MakeIpcSlab(command.bytes));
        Use(slab_->address(), command.bytes);
        ASSIGN_OR_RETURN(answer->handle, slab_->ipc_handle());
        return absl::OkStatus();
      }
      case GpuOp::kMapSlab: {
        ASSIGN_OR_RETURN(member_, ReserveCudaMemory(device_->uuid_bytes(), {.reserve_bytes = command.bytes}));
        RETURN_IF_ERROR(member_->MapSlab(std::move(fd), 0, command.bytes));
        Use(member_->base(), command.bytes);
        return absl::OkStatus();
      }
      case GpuOp::kOpenIpc: {
        ASSIGN_OR_RETURN(member_, ReserveCudaMemory(device_->uuid_bytes(), {.reserve_bytes = command.bytes}));
        RETURN_IF_ERROR(member_->MapIpcSlab(command.handle, command.bytes));
        Use(member_->base(), command.bytes);
        return absl::OkStatus();
      }
      case GpuOp::kMapReadOnly:
        return MapReadOnly(std::move(fd), command.bytes);
      case GpuOp::kWriteStamp:
        return stamper_->Write(Blocks(command.key), kBlockBytes);
      case GpuOp::kVerifyStamp: {
        ASSIGN_OR_RETURN(const std::vector<uint64_t> wrong,
                         stamper_->Verify(Blocks(command.key), kBlockBytes));
        for (const uint64_t words : wrong) answer->values[0] += words;
        return absl::OkStatus();
      }
      case GpuOp::kFreeBytes: {
        ASSIGN_OR_RETURN(answer->values[0], device_->free_bytes());
        return absl::OkStatus();
      }
      case GpuOp::kReexport:
        return Reexport(std::move(fd), answer);
      case GpuOp::kStartCounting:
        return StartCounting(address_, command.key);
      case GpuOp::kSampleCounter: {
        ASSIGN_OR_RETURN(answer->values[0], ReadWord(address_));
        return absl::OkStatus();
      }
      case GpuOp::kFork: {
        const pid_t child = ::fork();
        if (child < 0) return absl::ErrnoToStatus(errno, "fork");
        if (child == 0) {
          ::close(kSocket);
          ::alarm(kForkedSeconds);
          ::pause();
          ::_exit(0);
        }
        answer->values[0] = child;
        return absl::OkStatus();
      }
      case GpuOp::kWatchCounter:
        return WatchCounter(std::chrono::milliseconds(command.key), answer);
      case GpuOp::kMeasureCalls:
        return MeasureCalls(command.bytes, answer);
      case GpuOp::kMeasureStall:
        return MeasureStall(command.bytes, answer);
      case GpuOp::kMeasureStamps:
        return MeasureStamps(command.bytes, answer);
      case GpuOp::kMeasureFence:
        return MeasureFence(answer);
      case GpuOp::kMakeEvent:
        return MakeEvent(answer);
      case GpuOp::kOpenEvent: {
        CUevent event;
        CUipcEventHandle handle;
        std::memcpy(handle.reserved, command.handle.data(), sizeof handle.reserved);
        RETURN_IF_ERROR(context_->Check(probe_.cuIpcOpenEventHandle(&event, handle), "cuIpcOpenEventHandle"));
        event_ = CudaEvent(context_, event);
        return absl::OkStatus();
      }
      case GpuOp::kServeSignals:
        return ServeSignals(fd.get());
      case GpuOp::kMeasureSignals:
        return MeasureSignals(fd.get(), command.key != 0, answer);
    }
    return absl::InternalError(absl::StrCat("unknown op ", static_cast<int>(command.op)));
  }

 private:
  const Driver& driver() const { return context_->driver(); }

  void Use(CUdeviceptr address, size_t bytes) {
    address_ = address;
    bytes_ = bytes;
  }

  std::vector<StampedBlock> Blocks(uint64_t key) const {
    std::vector<StampedBlock> blocks;
    for (size_t i = 0; i < bytes_ / kBlockBytes; ++i) {
      blocks.push_back({.address = address_ + i * kBlockBytes, .key_digest = key, .block_ref = i});
    }
    return blocks;
  }

  absl::Status Describe(GpuAnswer* answer) {
    int version = 0;
    RETURN_IF_ERROR(context_->Check(probe_.cuDriverGetVersion(&version), "cuDriverGetVersion"));
    const CUmemAllocationProp memory = ShareableMemory(*context_);
    size_t minimum = 0;
    size_t recommended = 0;
    RETURN_IF_ERROR(context_->Check(
        driver().cuMemGetAllocationGranularity(&minimum, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "granularity"));
    RETURN_IF_ERROR(context_->Check(
        driver().cuMemGetAllocationGranularity(&recommended, &memory, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "granularity"));
    int fabric = 0;
    int ipc_events = 0;
    RETURN_IF_ERROR(
        context_->Check(driver().cuDeviceGetAttribute(
                            &fabric, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, context_->device()),
                        "attribute"));
    RETURN_IF_ERROR(
        context_->Check(driver().cuDeviceGetAttribute(&ipc_events, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
                                                      context_->device()),
                        "attribute"));
    std::snprintf(answer->text, sizeof answer->text,
                  "%s (%s), driver API %d.%d; granularity %zu KiB, recommended %zu KiB; fabric handles %s, "
                  "IPC events %s",
                  device_->name().c_str(), device_->id().c_str(), version / 1000, version % 1000 / 10,
                  minimum >> 10, recommended >> 10, fabric != 0 ? "yes" : "no",
                  ipc_events != 0 ? "yes" : "no");
    return absl::OkStatus();
  }

  absl::StatusOr<CudaAllocation> Import(int fd) {
    CUmemGenericAllocationHandle handle;
    RETURN_IF_ERROR(context_->Check(
        driver().cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "import"));
    return CudaAllocation(context_, handle);
  }

  absl::Status MapReadOnly(UniqueFd fd, size_t bytes) {
    ASSIGN_OR_RETURN(const CudaAllocation memory, Import(fd.get()));
    ASSIGN_OR_RETURN(addresses_, ReserveAddresses(context_, bytes));
    RETURN_IF_ERROR(
        context_->Check(driver().cuMemMap(addresses_.get(), bytes, 0, memory.get(), 0), "cuMemMap"));
    mapping_ = CudaMapping(context_, addresses_.get(), bytes);
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context_->device()},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    RETURN_IF_ERROR(
        context_->Check(driver().cuMemSetAccess(addresses_.get(), bytes, &access, 1), "cuMemSetAccess"));
    Use(addresses_.get(), bytes);
    return absl::OkStatus();
  }

  absl::Status Reexport(UniqueFd fd, GpuAnswer* answer) {
    ASSIGN_OR_RETURN(const CudaAllocation memory, Import(fd.get()));
    int again = -1;
    const absl::Status status =
        context_->Check(driver().cuMemExportToShareableHandle(&again, memory.get(),
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                        "export of an import");
    const UniqueFd second(again);
    const absl::Status imported = status.ok() ? Import(second.get()).status() : status;
    std::snprintf(answer->text, sizeof answer->text, "%s",
                  imported.ok() ? "yes" : absl::StrCat("no: ", imported.message()).c_str());
    return absl::OkStatus();
  }

  absl::Status StartCounting(CUdeviceptr counter, uint64_t rounds) {
    CountRequest request = {.counter = reinterpret_cast<uint64_t*>(counter), .rounds = rounds};
    void* arguments[] = {&request};
    return context_->Check(
        driver().cuLaunchKernel(count_, 1, 1, 1, 1, 1, 1, 0, kernel_stream_.get(), arguments, nullptr),
        "counting kernel");
  }

  absl::StatusOr<uint64_t> ReadWord(CUdeviceptr address) {
    uint64_t word = 0;
    RETURN_IF_ERROR(
        context_->Check(driver().cuMemcpyDtoHAsync(&word, address, sizeof word, stream_.get()), "read"));
    RETURN_IF_ERROR(context_->Check(driver().cuStreamSynchronize(stream_.get()), "read"));
    return word;
  }

  absl::Status WatchCounter(std::chrono::milliseconds duration, GpuAnswer* answer) {
    const Clock::time_point start = Clock::now();
    ASSIGN_OR_RETURN(const uint64_t first, ReadWord(address_));
    uint64_t last = first;
    uint64_t last_move_us = 0;
    while (Clock::now() - start < duration) {
      ASSIGN_OR_RETURN(const uint64_t now, ReadWord(address_));
      if (now != last) last_move_us = MicrosSince(start);
      last = now;
    }
    answer->values[0] = first;
    answer->values[1] = last;
    answer->values[2] = last_move_us;
    return absl::OkStatus();
  }

  absl::Status MeasureCalls(size_t bytes, GpuAnswer* answer) {
    constexpr int kRounds = 9;
    std::vector<uint64_t> times[kCallNames.size()];
    for (int round = 0; round < kRounds; ++round) {
      size_t call = 0;
      Clock::time_point start = Clock::now();
      const auto lap = [&] {
        times[call++].push_back(MicrosSince(start));
        start = Clock::now();
      };
      ASSIGN_OR_RETURN(CudaAllocation memory, CreateMemory(context_, bytes));
      lap();
      ASSIGN_OR_RETURN(const CudaAddresses addresses, ReserveAddresses(context_, bytes));
      lap();
      RETURN_IF_ERROR(
          context_->Check(driver().cuMemMap(addresses.get(), bytes, 0, memory.get(), 0), "cuMemMap"));
      CudaMapping mapping(context_, addresses.get(), bytes);
      lap();
      const CUmemAccessDesc access = {
          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context_->device()},
          .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      RETURN_IF_ERROR(
          context_->Check(driver().cuMemSetAccess(addresses.get(), bytes, &access, 1), "cuMemSetAccess"));
      lap();
      RETURN_IF_ERROR(
          context_->Check(driver().cuMemsetD8Async(addresses.get(), 0, bytes, stream_.get()), "zero"));
      RETURN_IF_ERROR(context_->Check(driver().cuStreamSynchronize(stream_.get()), "zero"));
      lap();
      int exported = -1;
      RETURN_IF_ERROR(
          context_->Check(driver().cuMemExportToShareableHandle(&exported, memory.get(),
                                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                          "export"));
      const UniqueFd fd(exported);
      lap();
      { ASSIGN_OR_RETURN(const CudaAllocation imported, Import(fd.get())); }
      lap();
      mapping = CudaMapping();
      lap();
      memory = CudaAllocation();
      lap();
    }
    for (size_t call = 0; call < kCallNames.size(); ++call) answer->values[call] = Median(times[call]);
    return absl::OkStatus();
  }

  // A kernel of a known length, alone and with slabs made beside it: does making memory wait for kernels, or
  // delay them?
  absl::Status MeasureStall(size_t bytes, GpuAnswer* answer) {
    constexpr uint64_t kRounds = uint64_t{1} << 24;
    ASSIGN_OR_RETURN(const std::unique_ptr<Slab> counters, device_->MakeSlab(device_->granularity_bytes()));
    const auto make_and_drop = [&]() -> absl::StatusOr<uint64_t> {
      const Clock::time_point start = Clock::now();
      RETURN_IF_ERROR(device_->MakeSlab(bytes).status());
      return MicrosSince(start);
    };
    ASSIGN_OR_RETURN(answer->values[0], make_and_drop());
    Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(StartCounting(counters->address(), kRounds));
    RETURN_IF_ERROR(context_->Check(driver().cuStreamSynchronize(kernel_stream_.get()), "kernel"));
    answer->values[2] = MicrosSince(start);
    start = Clock::now();
    RETURN_IF_ERROR(StartCounting(counters->address(), kRounds));
    ASSIGN_OR_RETURN(answer->values[1], make_and_drop());
    RETURN_IF_ERROR(context_->Check(driver().cuStreamSynchronize(kernel_stream_.get()), "kernel"));
    answer->values[3] = MicrosSince(start);
    return absl::OkStatus();
  }

  absl::Status MeasureStamps(size_t bytes, GpuAnswer* answer) {
    ASSIGN_OR_RETURN(slab_, device_->MakeSlab(bytes));
    Use(slab_->address(), bytes);
    const std::vector<StampedBlock> blocks = Blocks(1);
    RETURN_IF_ERROR(stamper_->Write(blocks, kBlockBytes));  // the first launch loads the code
    Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(stamper_->Write(blocks, kBlockBytes));
    answer->values[0] = bytes / std::max<uint64_t>(MicrosSince(start), 1);
    RETURN_IF_ERROR(stamper_->Verify(blocks, kBlockBytes).status());
    start = Clock::now();
    RETURN_IF_ERROR(stamper_->Verify(blocks, kBlockBytes).status());
    answer->values[1] = bytes / std::max<uint64_t>(MicrosSince(start), 1);
    return absl::OkStatus();
  }

  absl::Status MeasureFence(GpuAnswer* answer) {
    constexpr int kRounds = 1000;
    ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvents> fences, OpenCudaFenceEvents(device_->uuid_bytes()));
    std::vector<uint64_t> record_ns;
    std::vector<uint64_t> query_ns;
    std::vector<uint64_t> wait_us;
    const auto nanos_since = [](Clock::time_point start) {
      return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
    };
    for (int round = 0; round < kRounds; ++round) {
      Clock::time_point start = Clock::now();
      ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvent> fence, fences->Record(stream_.get()));
      record_ns.push_back(nanos_since(start));
      start = Clock::now();
      RETURN_IF_ERROR(fence->Done().status());
      query_ns.push_back(nanos_since(start));
      start = Clock::now();
      RETURN_IF_ERROR(fence->Wait());
      wait_us.push_back(MicrosSince(start));
    }
    answer->values[0] = Median(record_ns);
    answer->values[1] = Median(query_ns);
    answer->values[2] = Median(wait_us);
    return absl::OkStatus();
  }

  absl::Status MakeEvent(GpuAnswer* answer) {
    CUevent event;
    RETURN_IF_ERROR(context_->Check(
        driver().cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
    event_ = CudaEvent(context_, event);
    CUipcEventHandle handle;
    RETURN_IF_ERROR(context_->Check(probe_.cuIpcGetEventHandle(&handle, event), "cuIpcGetEventHandle"));
    std::memcpy(answer->handle.data(), handle.reserved, sizeof handle.reserved);
    return absl::OkStatus();
  }

  // Odd numbers are signalled by the event, even ones by the semaphore in word 0.
  absl::Status ServeSignals(int socket) {
    uint64_t number;
    UniqueFd unwanted;
    while (ReceivePacket(socket, &number, sizeof number, &unwanted).ok()) {
      const CUresult result = number % 2 == 1
                                  ? driver().cuEventRecord(event_.get(), stream_.get())
                                  : probe_.cuStreamWriteValue64(stream_.get(), address_, number, 0);
      RETURN_IF_ERROR(context_->Check(result, "signal"));
      RETURN_IF_ERROR(SendPacket(socket, &number, sizeof number, -1));
    }
    return absl::OkStatus();
  }

  absl::Status MeasureSignals(int socket, bool by_event, GpuAnswer* answer) {
    constexpr uint64_t kRounds = 2000;
    std::vector<uint64_t> tenths_us;
    for (uint64_t round = 1; round <= kRounds; ++round) {
      const uint64_t number = 2 * round + by_event;
      const Clock::time_point start = Clock::now();
      RETURN_IF_ERROR(SendPacket(socket, &number, sizeof number, -1));
      uint64_t echo;
      UniqueFd unwanted;
      RETURN_IF_ERROR(ReceivePacket(socket, &echo, sizeof echo, &unwanted));
      const CUresult result =
          by_event ? probe_.cuStreamWaitEvent(stream_.get(), event_.get(), 0)
                   : probe_.cuStreamWaitValue64(stream_.get(), address_, number, CU_STREAM_WAIT_VALUE_GEQ);
      RETURN_IF_ERROR(context_->Check(result, "wait"));
      RETURN_IF_ERROR(context_->Check(driver().cuStreamSynchronize(stream_.get()), "wait"));
      tenths_us.push_back(std::chrono::nanoseconds(Clock::now() - start).count() / 100);
    }
    std::ranges::sort(tenths_us);
    answer->values[0] = tenths_us[kRounds / 2];
    answer->values[1] = tenths_us[kRounds * 99 / 100];
    return absl::OkStatus();
  }

  std::unique_ptr<Device> device_;
  std::shared_ptr<const CudaContext> context_;
  ProbeDriver probe_;
  CudaStream stream_;
  CudaStream kernel_stream_;
  CudaModule module_;
  CUfunction count_ = nullptr;
  std::unique_ptr<BlockStamper> stamper_;
  std::unique_ptr<Slab> slab_;
  std::unique_ptr<MemberMemory> member_;
  CudaAddresses addresses_;
  CudaMapping mapping_;
  CudaEvent event_;
  CUdeviceptr address_ = 0;  // the role's memory, made or mapped
  size_t bytes_ = 0;
};

}  // namespace

int ServeGpuProcess() {
  absl::StatusOr<std::unique_ptr<GpuRole>> role = GpuRole::Open();
  while (true) {
    GpuCommand command;
    UniqueFd fd;
    if (!ReceivePacket(kSocket, &command, sizeof command, &fd).ok()) return 0;
    GpuAnswer answer = {};
    UniqueFd answer_fd;
    const absl::Status status =
        role.ok() ? (*role)->Do(command, std::move(fd), &answer, &answer_fd) : role.status();
    if (command.op == GpuOp::kServeSignals) continue;
    answer.code = static_cast<int>(status.code());
    answer.sticky = IsSticky(status);
    if (!status.ok())
      std::snprintf(answer.text, sizeof answer.text, "%s", std::string(status.message()).c_str());
    if (!SendPacket(kSocket, &answer, sizeof answer, answer_fd.get()).ok()) return 0;
  }
}

}  // namespace kvpool
