#include "tests/support/fake_cuda/state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

namespace kvpool::fake {
namespace {

struct ErrorName {
  CUresult result;
  const char* name;
  bool sticky;
};
constexpr ErrorName kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", false},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", false},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", false},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", false},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", false},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", false},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", false},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", false},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", false},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", true},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", false},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", false},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", false},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", true},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", true},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", true},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", false},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", false},
    {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", false},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", false},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", false},
};

[[noreturn]] void Unreadable(const char* variable, const std::string& value) {
  std::fprintf(stderr, "fake libcuda: can't read %s=%s\n", variable, value.c_str());
  std::abort();
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) words.push_back(word);
  return words;
}

std::vector<std::string> Words(const char* variable) {
  const char* text = std::getenv(variable);
  return Split(text != nullptr ? text : "");
}

long long Number(const char* variable, const std::string& text) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0) Unreadable(variable, text);
  return value;
}

// "call#n=NAME" or "call#n+=NAME".
Fault ReadFault(const char* variable, const std::string& word) {
  const size_t hash = word.find('#');
  const size_t equals = word.find('=');
  if (hash == std::string::npos || equals == std::string::npos || hash > equals) Unreadable(variable, word);
  Fault fault;
  fault.call = word.substr(0, hash);
  std::string count = word.substr(hash + 1, equals - hash - 1);
  fault.onwards = count.ends_with('+');
  if (fault.onwards) count.pop_back();
  fault.from = static_cast<int>(Number(variable, count));
  const std::string name = word.substr(equals + 1);
  const auto* error = std::ranges::find(kErrors, name, &ErrorName::name);
  if (error == std::end(kErrors)) Unreadable(variable, word);
  fault.result = error->result;
  return fault;
}

}  // namespace

std::vector<Fault> ReadFaults(const char* name, const std::string& text) {
  std::vector<Fault> faults;
  for (const std::string& word : Split(text)) faults.push_back(ReadFault(name, word));
  return faults;
}

Settings ReadSettings() {
  Settings settings;
  constexpr char kDevices[] = "KVPOOL_FAKE_CUDA_DEVICES";
  constexpr char kDeviceBytes[] = "KVPOOL_FAKE_CUDA_DEVICE_BYTES";
  constexpr char kWithout[] = "KVPOOL_FAKE_CUDA_WITHOUT";
  constexpr char kFail[] = "KVPOOL_FAKE_CUDA_FAIL";
  constexpr char kLatency[] = "KVPOOL_FAKE_CUDA_LATENCY_US";
  for (const std::string& word : Words(kDevices))
    settings.device_count = static_cast<int>(Number(kDevices, word));
  for (const std::string& word : Words(kDeviceBytes)) settings.device_bytes = Number(kDeviceBytes, word);
  for (const std::string& word : Words(kWithout)) {
    if (word != "vmm" && word != "fd" && word != "own-context" && word != "host-addresses" &&
        word != "other-processes")
      Unreadable(kWithout, word);
    settings.without.insert(word);
  }
  const char* const faults = std::getenv(kFail);
  settings.faults = ReadFaults(kFail, faults != nullptr ? faults : "");
  for (const std::string& word : Words(kLatency)) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) Unreadable(kLatency, word);
    settings.latency_us[word.substr(0, equals)] = static_cast<int>(Number(kLatency, word.substr(equals + 1)));
  }
  constexpr char kKernels[] = "KVPOOL_FAKE_KERNELS";
  for (const std::string& word : Words(kKernels)) {
    if (word != "host" && word != "ptx") Unreadable(kKernels, word);
    settings.kernels = word == "ptx" ? Kernels::kPtx : Kernels::kHost;
  }
  return settings;
}

void Memory::CloseFd() {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

Memory::~Memory() {
  if (owner_ != nullptr) {
    owner_->residue.Keep(fd, bytes);
    owner_->used_bytes -= bytes;
  }
  CloseFd();
}

State& TheState() {
  static State& state = *new State();
  return state;
}

bool IsAccessible(const State& state, CUdeviceptr address, size_t bytes, int protection) {
  const CUdeviceptr end = address + bytes;
  if (end < address) return false;
  // An import is one mapping; VMM mappings may be adjacent.
  const auto import = state.imports.upper_bound(address);
  if (import != state.imports.begin()) {
    const auto& [start, found] = *std::prev(import);
    if (end <= start + found.mapping.bytes) return true;
  }
  while (address < end) {
    auto mapping = state.mappings.upper_bound(address);
    if (mapping == state.mappings.begin()) return false;
    --mapping;
    const CUdeviceptr mapping_end = mapping->first + mapping->second.bytes;
    if (address >= mapping_end || (mapping->second.protection & protection) != protection) return false;
    address = mapping_end;
  }
  return true;
}

namespace {

// The shadow that has the address, and the address's offset in it; nullptr where there is none.
std::pair<Shadow*, size_t> ShadowAt(const State& state, CUdeviceptr address) {
  const auto after = state.mappings.upper_bound(address);
  if (after == state.mappings.begin()) return {nullptr, 0};
  const auto& [start, mapping] = *std::prev(after);
  if (address >= start + mapping.bytes) return {nullptr, 0};
  return {mapping.memory->shadow.get(), address - start};
}

}  // namespace

void NoteWritten(State& state, CUdeviceptr address, size_t bytes) {
  const auto [shadow, offset] = ShadowAt(state, address);
  if (shadow != nullptr) shadow->Wrote(offset, bytes);
}

bool WasWritten(const State& state, CUdeviceptr address, size_t bytes) {
  const auto [shadow, offset] = ShadowAt(state, address);
  return shadow == nullptr || shadow->WasWritten(offset, bytes);
}

bool FindRegistered(const State& state, const void* memory, size_t bytes, uintptr_t* first) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  *first = 0;
  auto found = state.registered.lower_bound(address + bytes);
  if (found == state.registered.begin()) return true;
  --found;
  if (found->first + found->second.bytes <= address) return true;
  *first = found->first;
  return found->first <= address && address + bytes <= found->first + found->second.bytes;
}

bool IsLockedFor(const State& state, uintptr_t first, int device) {
  const auto found = state.registered.find(first);
  return found != state.registered.end() && (found->second.device < 0 || found->second.device == device);
}

bool IsSticky(CUresult result) {
  const auto* error = std::ranges::find(kErrors, result, &ErrorName::result);
  return error != std::end(kErrors) && error->sticky;
}

const char* NameOf(CUresult result) {
  const auto* error = std::ranges::find(kErrors, result, &ErrorName::result);
  return error != std::end(kErrors) ? error->name : nullptr;
}

CUstreamCaptureMode& ThreadCaptureMode() {
  thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return mode;
}

CUresult Begin(const char* call, Needs needs) {
  State& state = TheState();
  if (needs != Needs::kNothing && state.pid == 0) return CUDA_ERROR_NOT_INITIALIZED;
  // A driver does not survive fork: the child must exec before it may use a GPU.
  if (state.pid != 0 && state.pid != ::getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  const auto latency = state.settings.latency_us.find(call);
  if (latency != state.settings.latency_us.end()) {
    std::this_thread::sleep_for(std::chrono::microseconds(latency->second));
  }
  const std::lock_guard lock(state.mu);
  const int count = ++state.calls[call];
  for (const Fault& fault : state.settings.faults) {
    if (fault.call != call || (fault.onwards ? count < fault.from : count != fault.from)) continue;
    if (IsSticky(fault.result)) state.lost = fault.result;
    return fault.result;
  }
  if (needs != Needs::kContext) return CUDA_SUCCESS;
  if (state.lost != CUDA_SUCCESS) return state.lost;
  if (state.capturing != nullptr && ThreadCaptureMode() == CU_STREAM_CAPTURE_MODE_GLOBAL) {
    state.capture_is_broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CurrentDevice() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

}  // namespace kvpool::fake
