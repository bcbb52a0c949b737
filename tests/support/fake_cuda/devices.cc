// Devices, contexts and errors of the fake driver.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/support/fake_cuda/state.h"

// A context is its device, plus one; the driver's type for it is opaque.
namespace kvpool::fake {
namespace {

thread_local std::vector<CUcontext> context_stack;

CUcontext ContextOf(CUdevice device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
}

bool IsDevice(const State& state, CUdevice device) {
  return device >= 0 && static_cast<size_t>(device) < state.devices.size();
}

}  // namespace

int CurrentDevice() {
  return context_stack.empty() ? -1 : static_cast<int>(reinterpret_cast<uintptr_t>(context_stack.back())) - 1;
}

}  // namespace kvpool::fake

using kvpool::fake::Call;
using kvpool::fake::ContextOf;
using kvpool::fake::IsDevice;
using kvpool::fake::Needs;
using kvpool::fake::State;

CUresult CUDAAPI cuInit(unsigned int flags) {
  State& state = kvpool::fake::TheState();
  {
    const std::lock_guard lock(state.mu);
    if (state.pid == 0) {
      state.settings = kvpool::fake::ReadSettings();
      state.devices.resize(state.settings.device_count);
      state.pid = ::getpid();
    }
  }
  return Call("cuInit", Needs::kNothing, [&](State& state) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return state.devices.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  *name = kvpool::fake::NameOf(error);
  return *name != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** words) {
  State& state = kvpool::fake::TheState();
  const std::lock_guard lock(state.mu);
  *words = kvpool::fake::NameOf(error) == nullptr             ? nullptr
           : error == state.lost && !state.lost_words.empty() ? state.lost_words.c_str()
                                                              : "as the fake driver imitates it";
  return *words != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return Call("cuDeviceGetCount", Needs::kInit, [&](State& state) {
    *count = static_cast<int>(state.devices.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return Call("cuDeviceGet", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
  return Call("cuDeviceGetName", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, length, "Fake GPU %d", device);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return Call("cuDeviceGetUuid", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid->bytes, "fake-cuda-gpu-\0", sizeof uuid->bytes);
    uuid->bytes[sizeof uuid->bytes - 1] = static_cast<char>(device);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  return Call("cuDeviceTotalMem", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = state.settings.device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return Call("cuDeviceGetAttribute", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    // An attribute that it does not imitate is not supported.
    *value = 0;
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
      *value = !state.settings.without.contains("vmm");
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
      *value = !state.settings.without.contains("fd");
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
      *value = !state.settings.without.contains("host-addresses");
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) {
      *value = state.settings.without.contains("other-processes") ? CU_COMPUTEMODE_EXCLUSIVE_PROCESS
                                                                  : CU_COMPUTEMODE_DEFAULT;
    }
    // As cuda.h has it from 12.4 on: CU_DEVICE_ATTRIBUTE_MPS_ENABLED.
    if (static_cast<int>(attribute) == 133) *value = state.settings.without.contains("own-context");
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Call("cuDevicePrimaryCtxRetain", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    const std::lock_guard lock(state.mu);
    ++state.devices[device].context_holders;
    *context = ContextOf(device);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return Call("cuDevicePrimaryCtxRelease", Needs::kInit, [&](State& state) {
    if (!IsDevice(state, device)) return CUDA_ERROR_INVALID_DEVICE;
    const std::lock_guard lock(state.mu);
    if (state.devices[device].context_holders == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --state.devices[device].context_holders;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  return Call("cuCtxPushCurrent", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto device = static_cast<CUdevice>(reinterpret_cast<uintptr_t>(context)) - 1;
    if (!IsDevice(state, device) || state.devices[device].context_holders == 0)
      return CUDA_ERROR_INVALID_CONTEXT;
    kvpool::fake::context_stack.push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  return Call("cuCtxPopCurrent", Needs::kInit, [&](State&) {
    if (kvpool::fake::context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = kvpool::fake::context_stack.back();
    kvpool::fake::context_stack.pop_back();
    return CUDA_SUCCESS;
  });
}
