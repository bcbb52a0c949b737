#include "tests/device/test_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

class HostTestDevice : public TestDevice {
 public:
  explicit HostTestDevice(size_t capacity_bytes)
      : device_(MakeHostDevice({.capacity_bytes = capacity_bytes})) {}

  Device& device() override { return *device_; }
  bool makes_ipc_slabs() const override { return false; }
  absl::StatusOr<std::unique_ptr<MemberMemory>> Reserve(const MemberMemoryOptions& options) override {
    return ReserveHostMemory(options);
  }
  absl::StatusOr<uint64_t> Read(uint64_t address) override {
    uint64_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof word);
    return word;
  }
  absl::Status Write(uint64_t address, uint64_t word) override {
    std::memcpy(reinterpret_cast<void*>(address), &word, sizeof word);
    return absl::OkStatus();
  }
  absl::Status ReadAll(uint64_t address, absl::Span<uint64_t> words) override {
    std::memcpy(words.data(), reinterpret_cast<const void*>(address), words.size() * sizeof words[0]);
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Device> device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TestDevice>> OpenTestDevice(size_t capacity_bytes) {
  const char* kind = std::getenv("KVPOOL_TEST_DEVICE");
  if (kind == nullptr || std::string(kind) == "host") return std::make_unique<HostTestDevice>(capacity_bytes);
  if (std::string(kind) == "cuda") return OpenCudaTestDevice();
  return absl::InvalidArgumentError(absl::StrCat("KVPOOL_TEST_DEVICE: ", kind, " is neither host nor cuda"));
}

size_t CountOpenFds() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return std::distance(begin(fds), end(fds));
}

size_t CountMappings() {
  std::ifstream maps("/proc/self/maps");
  return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
}

}  // namespace kvpool
