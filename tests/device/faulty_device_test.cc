#include "tests/support/faulty_device.h"

#include <memory>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace kvpool {
namespace {

constexpr size_t kSlabBytes = size_t{2} << 20;

class FaultyDeviceTest : public ::testing::Test {
 protected:
  FaultyDevice device_{MakeHostDevice({.capacity_bytes = 8 * kSlabBytes})};
};

TEST_F(FaultyDeviceTest, PassesOnWhatItDoesNotSpoil) {
  EXPECT_EQ(device_.id(), "host");
  EXPECT_EQ(device_.total_bytes(), 8 * kSlabBytes);
  EXPECT_TRUE(device_.MakeSlab(kSlabBytes).ok());
  EXPECT_EQ(device_.MakeIpcSlab(kSlabBytes).status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(FaultyDeviceTest, FullUntilGivenBack) {
  device_.FillUp();
  EXPECT_EQ(device_.free_bytes().value(), 0u);
  EXPECT_EQ(device_.MakeSlab(kSlabBytes).status().code(), absl::StatusCode::kResourceExhausted);
  device_.GiveBack();
  EXPECT_TRUE(device_.MakeSlab(kSlabBytes).ok());
}

TEST_F(FaultyDeviceTest, LostIsForEver) {
  device_.Lose();
  EXPECT_TRUE(IsSticky(device_.MakeSlab(kSlabBytes).status()));
  EXPECT_TRUE(IsSticky(device_.free_bytes().status()));
  EXPECT_FALSE(IsSticky(absl::DataLossError("of another kind")));
}

TEST_F(FaultyDeviceTest, StalledUntilResumed) {
  device_.Stall();
  absl::Status made = absl::UnknownError("not yet");
  std::thread maker([&] { made = device_.MakeSlab(kSlabBytes).status(); });
  device_.Resume();
  maker.join();
  EXPECT_TRUE(made.ok()) << made;
}

}  // namespace
}  // namespace kvpool
