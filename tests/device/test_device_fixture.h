#ifndef KVPOOL_TESTS_DEVICE_TEST_DEVICE_FIXTURE_H_
#define KVPOOL_TESTS_DEVICE_TEST_DEVICE_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tests/device/test_device.h"

namespace kvpool {

// A test on the device that this run is about; skipped where the machine has none.
class TestDeviceTest : public ::testing::Test {
 protected:
  explicit TestDeviceTest(size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}
  // A derived SetUp calls this first, and goes on unless IsSkipped() or HasFatalFailure().
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<TestDevice>> opened = OpenTestDevice(capacity_bytes_);
    if (absl::IsUnavailable(opened.status()) || absl::IsUnimplemented(opened.status())) {
      GTEST_SKIP() << "no such device here: " << opened.status();
    }
    ASSERT_TRUE(opened.ok()) << opened.status();
    test_device_ = std::move(*opened);
  }
  Device& device() { return test_device_->device(); }

  std::unique_ptr<TestDevice> test_device_;

 private:
  const size_t capacity_bytes_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_TEST_DEVICE_FIXTURE_H_
