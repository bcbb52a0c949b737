// The CUDA device on drivers that are absent, old, short of memory or broken: the fake driver, which fails as
// its environment says. Each case runs in a process of its own, since a process has one driver for life.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cuda/block_copier.h"
#include "cuda/block_stamper.h"
#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/support/status_macros.h"
#include "tests/device/driver_function.h"
#include "tests/device/gate.h"
#include "tests/device/in_child.h"
#include "tests/device/test_device.h"

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kMiB = size_t{1} << 20;
absl::Status OpenFirst() { return OpenCudaDevice("0").status(); }

TEST(CudaDriver, NoLibraryIsUnavailableWithTheLoadersWords) {
  EXPECT_THAT(InChild({{"KVPOOL_LIBCUDA", "/nonexistent/libcuda.so.1"}}, OpenFirst),
              AllOf(StartsWith("UNAVAILABLE: no CUDA driver"), HasSubstr("cannot open shared object file")));
}

TEST(CudaDriver, ALibraryWithoutTheFunctionsIsTooOld) {
  EXPECT_THAT(InChild({{"KVPOOL_LIBCUDA", "libm.so.6"}}, OpenFirst),
              AllOf(StartsWith("UNAVAILABLE"), HasSubstr("libm.so.6 is too old: it has no cuInit")));
}

TEST(CudaDriver, NoGpuIsUnavailable) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_DEVICES", "0"}}, OpenFirst),
              AllOf(StartsWith("UNAVAILABLE: cuInit"), HasSubstr("CUDA_ERROR_NO_DEVICE")));
}

TEST(CudaDriver, AGpuThatCannotShareMemorySaysWhatItLacks) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_WITHOUT", "vmm"}}, OpenFirst),
              AllOf(StartsWith("UNIMPLEMENTED: GPU-"), HasSubstr("virtual memory management")));
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_WITHOUT", "fd"}}, OpenFirst),
              AllOf(StartsWith("UNIMPLEMENTED: GPU-"), HasSubstr("file descriptors")));
}

TEST(CudaDriver, AGpuForOneProcessIsRefused) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_WITHOUT", "other-processes"}}, OpenFirst),
              AllOf(StartsWith("FAILED_PRECONDITION: GPU-"), HasSubstr("compute mode EXCLUSIVE_PROCESS"),
                    HasSubstr("--compute-mode=DEFAULT")));
  // With an MPS server, for which this mode is meant, the server is the one process.
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_WITHOUT", "other-processes,own-context"}}, OpenFirst), "OK");
}

TEST(CudaDriver, AWaitThatFailsLosesTheGpuWhateverTheError) {
  const auto is_lost = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
    absl::Status status = device->MakeSlab(2 * kMiB).status();
    return IsSticky(status) ? absl::OkStatus() : status;
  };
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuStreamSynchronize#1=CUDA_ERROR_UNKNOWN"}}, is_lost), "OK");
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemCreate#1=CUDA_ERROR_UNKNOWN"}}, is_lost),
              AllOf(StartsWith("INTERNAL"), HasSubstr("CUDA_ERROR_UNKNOWN")));
}

TEST(CudaDriver, AForkedChildIsToldSoInsteadOfHanging) {
  const std::string answer = InChild({}, [] {
    const absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice("0");
    if (!device.ok()) return device.status();
    const std::string inner = InChild({}, [&] { return (*device)->MakeSlab(2 * kMiB).status(); });
    return absl::UnknownError(inner);
  });
  EXPECT_THAT(answer, HasSubstr("CUDA_ERROR_NOT_INITIALIZED"));
}

TEST(CudaDevices, AreFoundByOrdinalAndByUuid) {
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_DEVICES", "3"}},
                    [] {
                      ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> second, OpenCudaDevice("1"));
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> third, OpenCudaDevice("2"));
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> again, OpenCudaDevice(second->id()));
                      const bool good = count == 3 && again->id() == second->id() &&
                                        third->id() != second->id() && again->name() == second->name();
                      return good ? absl::OkStatus() : absl::InternalError("mixed up");
                    }),
            "OK");
}

TEST(CudaDevices, WrongNamesAreRefusedWithWhatThereIs) {
  const Environment two = {{"KVPOOL_FAKE_CUDA_DEVICES", "2"}};
  EXPECT_THAT(InChild(two, [] { return OpenCudaDevice("2").status(); }),
              AllOf(StartsWith("NOT_FOUND"), HasSubstr("GPU 2 asked, this process sees 2 GPUs")));
  EXPECT_THAT(
      InChild(two, [] { return OpenCudaDevice("GPU-00000000-0000-0000-0000-000000000000").status(); }),
      AllOf(StartsWith("NOT_FOUND: no GPU-00000000"), HasSubstr("among the 2 GPUs this process sees: GPU-")));
  for (const std::string name :
       {"", "-1", "gpu0", "GPU-123", "GPU-0000000g-0000-0000-0000-000000000000", "0x0"}) {
    EXPECT_THAT(InChild(two, [&] { return OpenCudaDevice(name).status(); }),
                StartsWith("INVALID_ARGUMENT: device: "))
        << name;
  }
  EXPECT_THAT(InChild(two, [] { return ReserveCudaMemory("short", {.reserve_bytes = 2 * kMiB}).status(); }),
              AllOf(StartsWith("INVALID_ARGUMENT: device_uuid"), HasSubstr("5 bytes, 16 wanted")));
}

TEST(CudaDevices, OutOfMemoryHasNumbers) {
  EXPECT_THAT(
      InChild({{"KVPOOL_FAKE_CUDA_DEVICE_BYTES", std::to_string(8 * kMiB)}},
              [] {
                ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeSlab(6 * kMiB));
                return device->MakeSlab(4 * kMiB).status();
              }),
      AllOf(
          StartsWith("RESOURCE_EXHAUSTED: GPU-"),
          HasSubstr("4194304 bytes asked, 2097152 of 8388608 free: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")));
}

// This process's reservations and mappings of device memory. Threads that start meanwhile have small mappings
// of their own.
size_t CountDeviceRanges() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0;
    unsigned long end = 0;
    std::sscanf(line.c_str(), "%lx-%lx", &first, &end);
    const bool reserved = absl::StrContains(line, " ---p ") && (end - first) % (2 * kMiB) == 0;
    count += reserved || absl::StrContains(line, "fake-cuda-memory");
  }
  return count;
}

// One driver call fails once. The operation reports it, leaks nothing, and succeeds when it is repeated.
absl::Status FailsOnceThenWorks(const std::string& call,
                                const std::function<absl::Status(Device&)>& operation) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
  ASSIGN_OR_RETURN(const size_t free_before, device->free_bytes());
  const size_t fds_before = CountOpenFds();
  const size_t ranges_before = CountDeviceRanges();
  const absl::Status first = operation(*device);
  if (first.ok()) return absl::InternalError(absl::StrCat("the failure of ", call, " was overlooked"));
  if (IsSticky(first)) return absl::InternalError(absl::StrCat("not sticky: ", first.ToString()));
  const absl::Status second = operation(*device);
  if (!second.ok()) return absl::InternalError(absl::StrCat("second try: ", second.ToString()));
  ASSIGN_OR_RETURN(const size_t free_after, device->free_bytes());
  if (free_after != free_before)
    return absl::InternalError(absl::StrCat(free_before - free_after, " bytes lost"));
  if (CountOpenFds() != fds_before) return absl::InternalError("an fd was left open");
  if (CountDeviceRanges() != ranges_before) return absl::InternalError("a mapping was left");
  return absl::OkStatus();
}

std::string FailOnce(const std::string& call, const std::string& nth,
                     const std::function<absl::Status(Device&)>& operation) {
  return InChild({{"KVPOOL_FAKE_CUDA_FAIL", absl::StrCat(call, "#", nth, "=CUDA_ERROR_OUT_OF_MEMORY")}},
                 [&] { return FailsOnceThenWorks(call, operation); });
}

TEST(CudaDevices, EveryStepOfMakingASlabMayFail) {
  for (const std::string call : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
                                 "cuMemsetD8Async", "cuMemExportToShareableHandle"}) {
    EXPECT_EQ(FailOnce(call, "1",
                       [](Device& device) {
                         ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device.MakeSlab(4 * kMiB));
                         return slab->Export().status();
                       }),
              "OK")
        << call;
  }
  for (const std::string call : {"cuMemAlloc", "cuMemsetD8Async", "cuIpcGetMemHandle"}) {
    EXPECT_EQ(FailOnce(call, "1", [](Device& device) { return device.MakeIpcSlab(4 * kMiB).status(); }), "OK")
        << call;
  }
}

TEST(CudaDevices, EveryStepOfMappingASlabMayFail) {
  // The slab's own reservation and mapping are the first of their kind in the process, the member's
  // come after.
  for (const auto& [call, nth] :
       std::vector<std::pair<std::string, std::string>>{{"cuMemImportFromShareableHandle", "1"},
                                                        {"cuMemMap", "2"},
                                                        {"cuMemSetAccess", "2"},
                                                        {"cuMemAddressReserve", "2"}}) {
    EXPECT_EQ(FailOnce(call, nth,
                       [](Device& device) {
                         ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device.MakeSlab(4 * kMiB));
                         ASSIGN_OR_RETURN(
                             const std::unique_ptr<MemberMemory> member,
                             ReserveCudaMemory(device.uuid_bytes(), {.reserve_bytes = 8 * kMiB}));
                         ASSIGN_OR_RETURN(UniqueFd fd, slab->Export());
                         return member->MapSlab(std::move(fd), 4 * kMiB, 4 * kMiB);
                       }),
              "OK")
        << call;
  }
}

TEST(CudaDevices, ASlabThatTheDriverDoesNotUnmapIsMappedStill) {
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemUnmap#1=CUDA_ERROR_INVALID_VALUE"}},
                    [] {
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                      ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeSlab(2 * kMiB));
                      ASSIGN_OR_RETURN(const std::unique_ptr<MemberMemory> member,
                                       ReserveCudaMemory(device->uuid_bytes(), {.reserve_bytes = 4 * kMiB}));
                      ASSIGN_OR_RETURN(UniqueFd fd, slab->Export());
                      RETURN_IF_ERROR(member->MapSlab(std::move(fd), 2 * kMiB, 2 * kMiB));
                      if (member->UnmapSlab(2 * kMiB, 2 * kMiB).ok())
                        return absl::InternalError("the failure was overlooked");
                      ASSIGN_OR_RETURN(fd, slab->Export());
                      if (member->MapSlab(std::move(fd), 2 * kMiB, 2 * kMiB).ok())
                        return absl::InternalError("there was room for another");
                      return member->UnmapSlab(2 * kMiB, 2 * kMiB);
                    }),
            "OK");
}

TEST(CudaDevices, EveryStepOfWarmupMayFail) {
  // Reserving maps scratch twice, once in full and once for the rest; the slab is mapped last.
  for (const auto& [call, nth] : std::vector<std::pair<std::string, std::string>>{{"cuMemCreate", "2"},
                                                                                  {"cuMemCreate", "3"},
                                                                                  {"cuMemMap", "2"},
                                                                                  {"cuMemMap", "3"},
                                                                                  {"cuMemMap", "4"},
                                                                                  {"cuMemSetAccess", "4"}}) {
    EXPECT_EQ(FailOnce(call, nth,
                       [](Device& device) {
                         ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device.MakeSlab(4 * kMiB));
                         ASSIGN_OR_RETURN(
                             const std::unique_ptr<MemberMemory> member,
                             ReserveCudaMemory(device.uuid_bytes(), {.reserve_bytes = 6 * kMiB,
                                                                     .warmup_scratch = true,
                                                                     .scratch_bytes = 4 * kMiB}));
                         ASSIGN_OR_RETURN(UniqueFd fd, slab->Export());
                         RETURN_IF_ERROR(member->MapSlab(std::move(fd), 0, 4 * kMiB));
                         return member->FinishWarmup();
                       }),
              "OK")
        << call << " " << nth;
  }
}

TEST(CudaDevices, WarmupAskedAgainGoesOnWhereItStopped) {
  // The slabs are mapped first and second, scratch third, the slabs in the member fourth and fifth.
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemMap#5=CUDA_ERROR_OUT_OF_MEMORY"}},
                    [] {
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                      ASSIGN_OR_RETURN(const std::unique_ptr<Slab> first, device->MakeSlab(2 * kMiB));
                      ASSIGN_OR_RETURN(const std::unique_ptr<Slab> second, device->MakeSlab(2 * kMiB));
                      ASSIGN_OR_RETURN(const std::unique_ptr<MemberMemory> member,
                                       ReserveCudaMemory(device->uuid_bytes(), {.reserve_bytes = 4 * kMiB,
                                                                                .warmup_scratch = true,
                                                                                .scratch_bytes = 4 * kMiB}));
                      ASSIGN_OR_RETURN(UniqueFd first_fd, first->Export());
                      RETURN_IF_ERROR(member->MapSlab(std::move(first_fd), 0, 2 * kMiB));
                      ASSIGN_OR_RETURN(UniqueFd second_fd, second->Export());
                      RETURN_IF_ERROR(member->MapSlab(std::move(second_fd), 2 * kMiB, 2 * kMiB));
                      if (!absl::IsResourceExhausted(member->FinishWarmup())) {
                        return absl::InternalError("the failure was overlooked");
                      }
                      return member->FinishWarmup();
                    }),
            "OK");
}

TEST(CudaDevices, AnUncorrectableErrorIsStickyAndStaysSo) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuStreamSynchronize#2=CUDA_ERROR_ECC_UNCORRECTABLE"}},
                      [] {
                        ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                        ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeSlab(2 * kMiB));
                        if (!IsSticky(device->MakeSlab(2 * kMiB).status()))
                          return absl::InternalError("not sticky");
                        return device->free_bytes().status();
                      }),
              AllOf(StartsWith("sticky DATA_LOSS"), HasSubstr("CUDA_ERROR_ECC_UNCORRECTABLE")));
}

TEST(CudaDevices, AKernelThatReachesOutsideTakesTheContextAlong) {
  EXPECT_THAT(InChild({},
                      [] {
                        ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                        ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeSlab(2 * kMiB));
                        ASSIGN_OR_RETURN(const std::unique_ptr<BlockStamper> stamper,
                                         OpenCudaStamper(device->uuid_bytes()));
                        return stamper->Write({{.address = slab->address() + 1 * kMiB}}, 2 * kMiB);
                      }),
              AllOf(StartsWith("sticky DATA_LOSS"), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS")));
}

// No driver waits for it: who unmaps has to.
TEST(CudaDevices, WorkThatIsQueuedMeetsWhatIsUnmapped) {
  EXPECT_THAT(
      InChild({},
              [] {
                ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeSlab(2 * kMiB));
                ASSIGN_OR_RETURN(const std::unique_ptr<MemberMemory> member,
                                 ReserveCudaMemory(device->uuid_bytes(), {.reserve_bytes = 2 * kMiB}));
                ASSIGN_OR_RETURN(UniqueFd fd, slab->Export());
                RETURN_IF_ERROR(member->MapSlab(std::move(fd), 0, 2 * kMiB));
                ASSIGN_OR_RETURN(const std::shared_ptr<const CudaContext> context, CudaContext::Open("0"));
                ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
                ASSIGN_OR_RETURN(const CudaStream stream, MakeStream(context));
                const auto launch =
                    reinterpret_cast<decltype(&cuLaunchHostFunc)>(FindDriverFunction("cuLaunchHostFunc"));
                Gate step;
                RETURN_IF_ERROR(context->Check(launch(stream.get(), Gate::Wait, &step), "a gate"));
                RETURN_IF_ERROR(context->Check(
                    context->driver().cuMemsetD8Async(member->base(), 1, kMiB, stream.get()), "a step"));
                RETURN_IF_ERROR(member->UnmapSlab(0, 2 * kMiB));
                step.Open();
                return context->Finish(stream.get(), "a step");
              }),
      AllOf(StartsWith("sticky DATA_LOSS: a step"), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS")));
}

TEST(CudaDevices, WorkFromAnyThreadAndLeaveItsContextAlone) {
  EXPECT_EQ(InChild({},
                    [] {
                      ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                      ASSIGN_OR_RETURN(const Driver* driver, LoadDriver());
                      absl::Status made;
                      std::thread([&] { made = device->MakeSlab(2 * kMiB).status(); }).join();
                      RETURN_IF_ERROR(made);
                      CUcontext context;
                      const CUresult popped = driver->cuCtxPopCurrent(&context);
                      return popped == CUDA_ERROR_INVALID_CONTEXT
                                 ? absl::OkStatus()
                                 : absl::InternalError("a context was left behind");
                    }),
            "OK");
}

TEST(CudaDevices, AnIpcHandleOfThisVeryProcessIsRefusedWithTheLikelyReason) {
  EXPECT_THAT(InChild({},
                      [] {
                        ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice("0"));
                        ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, device->MakeIpcSlab(2 * kMiB));
                        ASSIGN_OR_RETURN(const IpcHandle handle, slab->ipc_handle());
                        ASSIGN_OR_RETURN(
                            const std::unique_ptr<MemberMemory> member,
                            ReserveCudaMemory(device->uuid_bytes(), {.reserve_bytes = 2 * kMiB}));
                        return member->MapIpcSlab(handle, 2 * kMiB);
                      }),
              AllOf(StartsWith("FAILED_PRECONDITION: ipc_handle"), HasSubstr("process namespace")));
}

// A copier's memory and stream, and the engine's.
class Copies {
 public:
  absl::Status Open(const std::string& ordinal = "0") {
    ASSIGN_OR_RETURN(context_, CudaContext::Open(ordinal));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    CUdeviceptr address;
    RETURN_IF_ERROR(context_->Check(context_->driver().cuMemAlloc(&address, kMiB), "cuMemAlloc"));
    device_ = CudaArray(context_, address);
    ASSIGN_OR_RETURN(engine_, MakeStream(context_));
    stream_ = engine_.get();
    ASSIGN_OR_RETURN(copier_, OpenCudaBlockCopier(ordinal));
    return absl::OkStatus();
  }
  // Four ranges of 64 bytes, of which the second follows the first, and the fourth the third.
  absl::StatusOr<std::unique_ptr<FenceEvent>> Submit(CopyDirection direction,
                                                     const FenceEvent* after = nullptr) {
    std::vector<CopyRange> ranges;
    for (const size_t offset : {0, 64, 256, 320})
      ranges.push_back({device_.get() + offset, reinterpret_cast<uint64_t>(&(*host_)[offset]), 64});
    return copier_->Submit(direction, ranges, after);
  }
  absl::Status Copy(CopyDirection direction) {
    ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvent> ticket, Submit(direction));
    return ticket->Wait();
  }
  absl::Status Register() {
    return copier_->Register(reinterpret_cast<uint64_t>(host_->data()), host_->size());
  }
  // Copies to and from the other's memory from now on, which that one has registered.
  void ShareRegistered(const Copies& other) {
    host_ = other.host_;
    copier_->ShareRegistered(reinterpret_cast<uint64_t>(host_->data()), host_->size());
  }
  absl::Status Drain() { return copier_->Drain(); }
  // A point of the engine's stream that passes when the gate is open.
  absl::StatusOr<std::unique_ptr<FenceEvent>> RecordBehind(Gate* gate) {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const auto launch = reinterpret_cast<decltype(&cuLaunchHostFunc)>(FindDriverFunction("cuLaunchHostFunc"));
    RETURN_IF_ERROR(context_->Check(launch(stream_, Gate::Wait, gate), "cuLaunchHostFunc"));
    return Record();
  }
  absl::StatusOr<std::unique_ptr<FenceEvent>> Record() { return copier_->Record(stream_); }
  // Whoever has its stream's handle has it still.
  void EndEngine() { engine_ = CudaStream(); }

 private:
  std::shared_ptr<const CudaContext> context_;
  CudaArray device_;
  CudaStream engine_;
  CUstream stream_ = nullptr;
  std::shared_ptr<std::vector<unsigned char>> host_ = std::make_shared<std::vector<unsigned char>>(kMiB, 5);
  std::unique_ptr<BlockCopier> copier_;
};

// An older driver, "12_0" or "12_8", which fails as `faults` says.
Environment OlderDriver(const std::string& version, const std::string& faults) {
  return {{"KVPOOL_LIBCUDA", std::getenv(absl::StrCat("KVPOOL_FAKE_CUDA_", version).c_str())},
          {"KVPOOL_FAKE_CUDA_FAIL", faults}};
}

TEST(CudaCopies, RangesThatFollowEachOtherAreOneRunOfABatchOrACall) {
  const auto copy = [] {
    Copies copies;
    RETURN_IF_ERROR(copies.Open());
    RETURN_IF_ERROR(copies.Register());
    return copies.Copy(CopyDirection::kToDevice);
  };
  const std::string batch = "cuMemcpyBatchAsync#1=CUDA_ERROR_INVALID_VALUE";
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", batch}}, copy),
              StartsWith("INTERNAL: cuMemcpyBatchAsync of 2 runs"));
  EXPECT_THAT(InChild(OlderDriver("12_8", batch), copy),
              StartsWith("INTERNAL: cuMemcpyBatchAsync of 2 runs"));
  EXPECT_THAT(InChild(OlderDriver("12_0", "cuMemcpyHtoDAsync#2=CUDA_ERROR_INVALID_VALUE"), copy),
              StartsWith("INTERNAL: a copy of 128 bytes"));
  EXPECT_EQ(InChild(OlderDriver("12_0", "cuMemcpyHtoDAsync#3=CUDA_ERROR_INVALID_VALUE"), copy), "OK");
}

TEST(CudaCopies, ADriverThatDoesNotSupportBatchesIsToldEachRunAndTheLogOfItOnce) {
  const auto copy = []() -> absl::Status {
    testing::internal::CaptureStderr();
    Copies copies;
    RETURN_IF_ERROR(copies.Open());
    RETURN_IF_ERROR(copies.Register());
    RETURN_IF_ERROR(copies.Copy(CopyDirection::kToDevice));
    RETURN_IF_ERROR(copies.Copy(CopyDirection::kToHost));
    return absl::UnknownError(testing::internal::GetCapturedStderr());
  };
  const std::string batches = "cuMemcpyBatchAsync#1+=CUDA_ERROR_NOT_SUPPORTED";
  const std::string once =
      "UNKNOWN: kvpool: this driver does not support cuMemcpyBatchAsync: each run of a copy is a call\n";
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL", batches}}, copy), once);
  EXPECT_EQ(InChild(OlderDriver("12_8", batches), copy), once);
  // An error of such a call is one still.
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL",
                        absl::StrCat(batches, ",cuMemcpyHtoDAsync#2=CUDA_ERROR_INVALID_VALUE")}},
                      copy),
              StartsWith("INTERNAL: a copy of 128 bytes"));
}

TEST(CudaCopies, WhereRegisteredMemoryHasOtherAddressesThereAreNoBatches) {
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_WITHOUT", "host-addresses"}},
                    [] {
                      Copies copies;
                      RETURN_IF_ERROR(copies.Open());
                      RETURN_IF_ERROR(copies.Register());
                      RETURN_IF_ERROR(copies.Copy(CopyDirection::kToDevice));
                      return copies.Copy(CopyDirection::kToHost);
                    }),
            "OK");
}

TEST(CudaCopies, AStreamThatIsGoneHasNoPointsAndCostsNone) {
  EXPECT_EQ(InChild({},
                    [] {
                      Copies copies;
                      RETURN_IF_ERROR(copies.Open());
                      copies.EndEngine();
                      for (size_t i = 0; i <= kMaxCopyTickets; ++i) {
                        const absl::Status refused = copies.Record().status();
                        if (!absl::IsInternal(refused)) return refused;
                      }
                      return copies.Copy(CopyDirection::kToDevice);
                    }),
            "OK");
}

// The second copy, or the end of them all, which is where their ticket would be.
class FailedSubmit : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CudaCopies, FailedSubmit,
                         ::testing::Values("cuMemcpyDtoHAsync#2", "cuEventRecord#2"));

TEST_P(FailedSubmit, IsReportedWhenTheCopiesBeforeItAreOver) {
  EXPECT_EQ(InChild(OlderDriver("12_0", absl::StrCat(GetParam(), "=CUDA_ERROR_INVALID_VALUE")),
                    []() -> absl::Status {
                      Copies copies;
                      RETURN_IF_ERROR(copies.Open());
                      Gate step;
                      ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvent> point, copies.RecordBehind(&step));
                      std::promise<void> reported;
                      // The first copy waits for the step, which ends when the error is reported, or after a while.
                      std::future<bool> waited =
                          std::async(std::launch::async, [&, told = reported.get_future()] {
                            const bool waits =
                                told.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout;
                            step.Open();
                            return waits;
                          });
                      const absl::Status status = copies.Submit(CopyDirection::kToHost, point.get()).status();
                      reported.set_value();
                      if (!waited.get()) return absl::InternalError("a copy was under way still");
                      if (status.ok()) return absl::InternalError("the failure was overlooked");
                      return copies.Copy(CopyDirection::kToHost);
                    }),
            "OK");
}

TEST(CudaCopies, MemoryThatCannotBeRegisteredIsCopiedAllTheSame) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemHostRegister#1=CUDA_ERROR_NOT_SUPPORTED"}},
                      [] {
                        Copies copies;
                        RETURN_IF_ERROR(copies.Open());
                        const absl::Status refused = copies.Register();
                        RETURN_IF_ERROR(copies.Copy(CopyDirection::kToDevice));
                        RETURN_IF_ERROR(copies.Register());
                        RETURN_IF_ERROR(copies.Copy(CopyDirection::kToHost));
                        return refused;
                      }),
              StartsWith("UNIMPLEMENTED: cuMemHostRegister of 1048576 bytes: CUDA_ERROR_NOT_SUPPORTED"));
}

// A batch of memory that the GPU has not locked would lose its context.
TEST(CudaCopies, MemoryThatOneGpuHasRegisteredIsLockedForAll) {
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_DEVICES", "2"},
                     {"KVPOOL_FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync#1=CUDA_ERROR_INVALID_VALUE"}},
                    [] {
                      Copies first, second;
                      RETURN_IF_ERROR(first.Open("0"));
                      RETURN_IF_ERROR(second.Open("1"));
                      RETURN_IF_ERROR(first.Register());
                      second.ShareRegistered(first);
                      RETURN_IF_ERROR(first.Copy(CopyDirection::kToDevice));
                      return second.Copy(CopyDirection::kToDevice);
                    }),
            "OK");
}

TEST(CudaCopies, WhetherAGpuStillWritesIsKnownOrItIsLost) {
  const auto drain = [] {
    Copies copies;
    RETURN_IF_ERROR(copies.Open());
    ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvent> ticket, copies.Submit(CopyDirection::kToHost));
    const absl::Status waited = ticket->Wait();
    return waited.ok() ? absl::InternalError("overlooked") : copies.Drain();
  };
  const std::string wait = "cuEventSynchronize#1=CUDA_ERROR_UNKNOWN";
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL", wait}}, drain), "OK");
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", wait + ",cuStreamSynchronize#1=CUDA_ERROR_UNKNOWN"}}, drain),
              StartsWith("sticky INTERNAL: copying blocks: cuStreamSynchronize: CUDA_ERROR_UNKNOWN"));
  // So it is where a submit fails and what it began can't be waited for.
  EXPECT_THAT(InChild(OlderDriver("12_0",
                                  "cuMemcpyDtoHAsync#2=CUDA_ERROR_INVALID_VALUE,"
                                  "cuStreamSynchronize#1=CUDA_ERROR_UNKNOWN"),
                      [] {
                        Copies copies;
                        RETURN_IF_ERROR(copies.Open());
                        return copies.Copy(CopyDirection::kToHost);
                      }),
              StartsWith("sticky INTERNAL: copying blocks: cuStreamSynchronize: CUDA_ERROR_UNKNOWN"));
}

TEST(CudaCopies, AContextThatIsLostFailsTicketsAndAllThatComes) {
  EXPECT_THAT(
      InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuEventQuery#1=CUDA_ERROR_ECC_UNCORRECTABLE"}},
              []() -> absl::Status {
                Copies copies;
                RETURN_IF_ERROR(copies.Open());
                ASSIGN_OR_RETURN(const std::unique_ptr<FenceEvent> ticket,
                                 copies.Submit(CopyDirection::kToHost));
                RETURN_IF_ERROR(ticket->Wait());  // The fake's copies go on in a context that is lost.
                if (!IsSticky(ticket->Done().status())) return absl::InternalError("overlooked");
                if (!IsSticky(ticket->Wait())) return absl::InternalError("the ticket is done");
                return copies.Copy(CopyDirection::kToHost);
              }),
      StartsWith("sticky DATA_LOSS"));
}

}  // namespace
}  // namespace kvpool
