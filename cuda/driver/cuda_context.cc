#include "cuda/driver/cuda_context.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "cuda/device.h"
#include "cuda/sticky.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

constexpr size_t kUuidBytes = 16;

// "GPU-8-4-4-4-12" as nvidia-smi prints it.
std::string FormatUuid(const std::string& bytes) {
  const std::string hex = absl::BytesToHexString(bytes);
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

absl::StatusOr<std::string> UuidOf(const Driver& driver, CUdevice device) {
  CUuuid uuid;
  RETURN_IF_ERROR(CudaStatus(driver, driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid"));
  return std::string(uuid.bytes, sizeof uuid.bytes);
}

absl::StatusOr<std::vector<CUdevice>> Devices(const Driver& driver) {
  int count = 0;
  RETURN_IF_ERROR(CudaStatus(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  std::vector<CUdevice> devices(count);
  for (int i = 0; i < count; ++i) {
    RETURN_IF_ERROR(
        CudaStatus(driver, driver.cuDeviceGet(&devices[i], i), absl::StrCat("cuDeviceGet of GPU ", i)));
  }
  return devices;
}

}  // namespace

CurrentContext::~CurrentContext() {
  if (driver_ == nullptr) return;
  driver_->cuThreadExchangeStreamCaptureMode(&capture_mode_);
  CUcontext popped;
  // CUDA_ERROR_DEINITIALIZED: the process's driver has shut down, and there is nothing to restore.
  const CUresult result = driver_->cuCtxPopCurrent(&popped);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) {
    std::fprintf(stderr, "kvpool: %s\n", CudaStatus(*driver_, result, "cuCtxPopCurrent").ToString().c_str());
  }
}

CudaContext::CudaContext(const Driver& driver, CUdevice device, CUcontext context, std::string uuid_bytes)
    : driver_(driver),
      device_(device),
      context_(context),
      uuid_bytes_(std::move(uuid_bytes)),
      uuid_(FormatUuid(uuid_bytes_)) {}

CudaContext::~CudaContext() {
  ReportLost("cuDevicePrimaryCtxRelease",
             Check(driver_.cuDevicePrimaryCtxRelease(device_), "cuDevicePrimaryCtxRelease"));
}

absl::StatusOr<std::shared_ptr<const CudaContext>> CudaContext::Retain(const Driver& driver,
                                                                       CUdevice device) {
  ASSIGN_OR_RETURN(std::string uuid_bytes, UuidOf(driver, device));
  CUcontext context;
  RETURN_IF_ERROR(
      CudaStatus(driver, driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
  return std::shared_ptr<const CudaContext>(new CudaContext(driver, device, context, std::move(uuid_bytes)));
}

absl::StatusOr<std::shared_ptr<const CudaContext>> CudaContext::OpenUuid(const std::string& uuid_bytes) {
  if (uuid_bytes.size() != kUuidBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("device_uuid: ", uuid_bytes.size(), " bytes, ", kUuidBytes, " wanted"));
  }
  ASSIGN_OR_RETURN(const Driver* driver, LoadDriver());
  ASSIGN_OR_RETURN(const std::vector<CUdevice> devices, Devices(*driver));
  std::vector<std::string> present;
  for (const CUdevice device : devices) {
    ASSIGN_OR_RETURN(const std::string other, UuidOf(*driver, device));
    if (other == uuid_bytes) return Retain(*driver, device);
    present.push_back(FormatUuid(other));
  }
  return absl::NotFoundError(absl::StrCat("no ", FormatUuid(uuid_bytes), " among the ", present.size(),
                                          " GPUs this process sees: ", absl::StrJoin(present, ", ")));
}

absl::StatusOr<std::shared_ptr<const CudaContext>> CudaContext::Open(const std::string& ordinal_or_uuid) {
  if (absl::StartsWithIgnoreCase(ordinal_or_uuid, "GPU-") ||
      absl::StartsWithIgnoreCase(ordinal_or_uuid, "MIG-")) {
    const std::string hex = absl::StrReplaceAll(ordinal_or_uuid.substr(4), {{"-", ""}});
    bool all_hex = hex.size() == 2 * kUuidBytes;
    for (const char c : hex) all_hex = all_hex && absl::ascii_isxdigit(c);
    if (!all_hex) {
      return absl::InvalidArgumentError(absl::StrCat(
          "device: ", ordinal_or_uuid, " is not GPU- and 32 hexadecimal digits in groups of 8-4-4-4-12"));
    }
    return OpenUuid(absl::HexStringToBytes(hex));
  }
  int ordinal = -1;
  if (!absl::SimpleAtoi(ordinal_or_uuid, &ordinal) || ordinal < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: ", ordinal_or_uuid, " is neither a number nor GPU-…"));
  }
  ASSIGN_OR_RETURN(const Driver* driver, LoadDriver());
  ASSIGN_OR_RETURN(const std::vector<CUdevice> devices, Devices(*driver));
  if (static_cast<size_t>(ordinal) >= devices.size()) {
    return absl::NotFoundError(absl::StrCat("device: GPU ", ordinal, " asked, this process sees ",
                                            devices.size(), " GPUs, counted from 0"));
  }
  return Retain(*driver, devices[ordinal]);
}

absl::StatusOr<CurrentContext> CudaContext::MakeCurrent() const {
  RETURN_IF_ERROR(Check(driver_.cuCtxPushCurrent(context_), "cuCtxPushCurrent"));
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  const CUresult exchanged = driver_.cuThreadExchangeStreamCaptureMode(&mode);
  if (exchanged != CUDA_SUCCESS)
    mode = CU_STREAM_CAPTURE_MODE_GLOBAL;  // a thread's mode unless it has set another
  CurrentContext current(&driver_, mode);
  RETURN_IF_ERROR(Check(exchanged, "cuThreadExchangeStreamCaptureMode"));
  return current;
}

absl::Status CudaContext::Finish(CUstream stream, absl::string_view doing) const {
  absl::Status finished =
      Check(driver_.cuStreamSynchronize(stream), absl::StrCat(doing, ": cuStreamSynchronize"));
  if (!finished.ok()) MarkSticky(&finished);
  return finished;
}

absl::Status CudaContext::FinishAll(absl::string_view doing) const {
  const CUresult result = driver_.cuCtxSynchronize();
  if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) {
    return absl::FailedPreconditionError(absl::StrCat(
        doing, ": a stream of this process captures a graph, so that nobody can wait for its work"));
  }
  absl::Status finished = Check(result, absl::StrCat(doing, ": cuCtxSynchronize"));
  if (!finished.ok()) MarkSticky(&finished);
  return finished;
}

void CudaContext::ReportLost(const char* what, const absl::Status& status) {
  // The call that met a sticky error has reported it, and the memory is gone with the context.
  if (status.ok() || IsSticky(status)) return;
  std::fprintf(stderr, "kvpool: %s: %s\n", what, status.ToString().c_str());
}

absl::StatusOr<CudaStream> MakeStream(const std::shared_ptr<const CudaContext>& context) {
  CUstream stream;
  RETURN_IF_ERROR(
      context->Check(context->driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
  return CudaStream(context, stream);
}

absl::StatusOr<CudaStream> MakeLowPriorityStream(const std::shared_ptr<const CudaContext>& context) {
  const Driver& driver = context->driver();
  int least = 0;
  int greatest = 0;
  RETURN_IF_ERROR(
      context->Check(driver.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  CUstream stream;
  RETURN_IF_ERROR(context->Check(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, least),
                                 "cuStreamCreateWithPriority"));
  return CudaStream(context, stream);
}

CUmemAllocationProp ShareableMemory(const CudaContext& context) {
  return {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
          .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context.device()}};
}

absl::StatusOr<size_t> MemoryGranularity(const CudaContext& context) {
  size_t bytes = 0;
  const CUmemAllocationProp memory = ShareableMemory(context);
  RETURN_IF_ERROR(context.Check(
      context.driver().cuMemGetAllocationGranularity(&bytes, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "cuMemGetAllocationGranularity"));
  return bytes;
}

absl::StatusOr<CudaAllocation> CreateMemory(const std::shared_ptr<const CudaContext>& context, size_t bytes) {
  CUmemGenericAllocationHandle handle;
  const CUmemAllocationProp memory = ShareableMemory(*context);
  const absl::Status status =
      context->Check(context->driver().cuMemCreate(&handle, bytes, &memory, 0), "cuMemCreate");
  if (!status.ok()) return WithFreeBytes(*context, status, bytes);
  return CudaAllocation(context, handle);
}

absl::StatusOr<CudaAllocation> ImportMemory(const std::shared_ptr<const CudaContext>& context,
                                            const UniqueFd& fd) {
  CUmemGenericAllocationHandle handle;
  void* const by_value = reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get()));
  RETURN_IF_ERROR(context->Check(context->driver().cuMemImportFromShareableHandle(
                                     &handle, by_value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                                 absl::StrCat("slab fd ", fd.get(), ": cuMemImportFromShareableHandle")));
  return CudaAllocation(context, handle);
}

absl::StatusOr<CudaAddresses> ReserveAddresses(const std::shared_ptr<const CudaContext>& context,
                                               size_t bytes) {
  CUdeviceptr address;
  RETURN_IF_ERROR(context->Check(context->driver().cuMemAddressReserve(&address, bytes, 0, 0, 0),
                                 absl::StrCat("reserve_bytes: cuMemAddressReserve of ", bytes, " bytes")));
  return CudaAddresses(context, address, bytes);
}

absl::StatusOr<CudaMapping> MapMemory(const std::shared_ptr<const CudaContext>& context,
                                      const CudaAllocation& memory, CUdeviceptr address, size_t bytes) {
  const Driver& driver = context->driver();
  RETURN_IF_ERROR(context->Check(driver.cuMemMap(address, bytes, 0, memory.get(), 0),
                                 absl::StrCat("cuMemMap of ", bytes, " bytes")));
  CudaMapping mapping(context, address, bytes);
  const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context->device()},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  RETURN_IF_ERROR(context->Check(driver.cuMemSetAccess(address, bytes, &access, 1),
                                 absl::StrCat("cuMemSetAccess on ", bytes, " bytes")));
  return mapping;
}

absl::Status WithFreeBytes(const CudaContext& context, const absl::Status& status, size_t bytes) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  RETURN_IF_ERROR(context.Check(context.driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo"));
  absl::Status with_numbers(status.code(),
                            absl::StrCat(context.uuid(), ": ", bytes, " bytes asked, ", free_bytes, " of ",
                                         total_bytes, " free: ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { with_numbers.SetPayload(url, payload); });
  return with_numbers;
}

absl::StatusOr<int> CudaOrdinal(const std::string& uuid_bytes) {
  ASSIGN_OR_RETURN(const Driver* driver, LoadDriver());
  ASSIGN_OR_RETURN(const std::vector<CUdevice> devices, Devices(*driver));
  for (size_t i = 0; i < devices.size(); ++i) {
    ASSIGN_OR_RETURN(const std::string other, UuidOf(*driver, devices[i]));
    if (other == uuid_bytes) return static_cast<int>(i);
  }
  return absl::NotFoundError(absl::StrCat("no ", FormatUuid(uuid_bytes), " among the ", devices.size(),
                                          " GPUs that this process sees"));
}

absl::Status CudaContext::CheckEndsWithProcess() const {
  // Of drivers from 12.4 on; one that does not know it says that the value is invalid.
  constexpr auto kMpsEnabled = static_cast<CUdevice_attribute>(133);
  ASSIGN_OR_RETURN(const CurrentContext current, MakeCurrent());
  int mps = 0;
  if (driver_.cuDeviceGetAttribute(&mps, kMpsEnabled, device_) != CUDA_SUCCESS || mps == 0)
    return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      uuid_, ": its processes share a server (MPS), which goes on with the work of one that was killed"));
}

}  // namespace kvpool
