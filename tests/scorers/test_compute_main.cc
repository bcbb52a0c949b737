#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "proto/support/status_macros.h"
#include "tests/device/test_device.h"
#include "tests/scorers/test_compute.h"

namespace kvpool {
namespace {

constexpr size_t kCapacityBytes = size_t{64} << 20;

struct TheDevice {
  std::unique_ptr<TestDevice> device;
  std::unique_ptr<KvCompute> compute;  // null on the host
};
TheDevice& Opened() {
  static TheDevice opened;
  return opened;
}

absl::Status OpenCompute() {
  ASSIGN_OR_RETURN(Opened().device, OpenTestDevice(kCapacityBytes));
  Device& device = Opened().device->device();
  if (device.id() == "host") return absl::OkStatus();
  ASSIGN_OR_RETURN(Opened().compute, device.MakeKvCompute({}));
  return absl::OkStatus();
}

}  // namespace

KvCompute* TestCompute() { return Opened().compute.get(); }

KvCompute* TestOrHostCompute(std::unique_ptr<KvCompute>* host, uint32_t threads) {
  if (TestCompute() != nullptr) return TestCompute();
  *host = MakeHostKvCompute({.host_threads = threads});
  return host->get();
}

uint64_t ReadWord(uint64_t address) {
  const absl::StatusOr<uint64_t> word = Opened().device->Read(address);
  EXPECT_TRUE(word.ok()) << word.status();
  return word.value_or(0);
}

}  // namespace kvpool

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const absl::Status opened = kvpool::OpenCompute();
  if (absl::IsUnavailable(opened) || absl::IsUnimplemented(opened)) {
    std::printf("no such device here: %s\n", opened.ToString().c_str());
    return 0;
  }
  if (!opened.ok()) {
    std::printf("%s\n", opened.ToString().c_str());
    return 1;
  }
  const int status = RUN_ALL_TESTS();
  // Destroyed here, since a static object may outlive the driver.
  kvpool::Opened() = {};
  return status;
}
