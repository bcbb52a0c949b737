#include "cuda/host/host_memory.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace kvpool {
namespace {

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() : root_(::testing::TempDir() + "kvpool-host-memory-XXXXXX") {
    EXPECT_NE(::mkdtemp(root_.data()), nullptr);
    Put("/proc/meminfo", "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n");
  }
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }

  void Put(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  std::string root_;
};

TEST_F(HostMemoryTest, WithoutGroupsTheMachineIsTheLimit) {
  const absl::StatusOr<HostMemory> memory = ReadHostMemory(root_);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->total_bytes, 1000u << 10);
  EXPECT_EQ(memory->available_bytes, 800u << 10);
}

TEST_F(HostMemoryTest, TheTightestGroupOnTheWayUpCounts) {
  Put("/proc/self/cgroup", "0::/pod/daemon\n");
  Put("/sys/fs/cgroup/pod/daemon/memory.max", "max\n");
  Put("/sys/fs/cgroup/pod/daemon/memory.current", "1000\n");
  Put("/sys/fs/cgroup/pod/memory.max", "500000\n");
  Put("/sys/fs/cgroup/pod/memory.current", "300000\n");
  Put("/sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 100000\n");
  const absl::StatusOr<HostMemory> memory = ReadHostMemory(root_);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->total_bytes, 500000u);
  EXPECT_EQ(memory->available_bytes, 300000u);  // 100000 bytes of cache can be dropped
}

TEST_F(HostMemoryTest, AGroupOverItsLimitHasNothingLeft) {
  Put("/proc/self/cgroup", "0::/\n");
  Put("/sys/fs/cgroup/memory.max", "4096\n");
  Put("/sys/fs/cgroup/memory.current", "8192\n");
  EXPECT_EQ(ReadHostMemory(root_)->available_bytes, 0u);
}

TEST_F(HostMemoryTest, VersionOneGroupsCountToo) {
  Put("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n");
  Put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400000\n");
  Put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "150000\n");
  EXPECT_EQ(ReadHostMemory(root_)->available_bytes, 250000u);
}

TEST_F(HostMemoryTest, HugePagesAreCountedApart) {
  const std::string pages = "MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugePages_Free: 3\nHugepagesize: ";
  Put("/proc/meminfo", pages + "2048 kB\n");
  EXPECT_EQ(ReadHostMemory(root_)->huge_free_bytes, size_t{6} << 20);
  EXPECT_EQ(ReadHostMemory(root_)->available_bytes, 800u << 10);
  // Slabs don't use huge pages of another size.
  Put("/proc/meminfo", pages + "1048576 kB\n");
  EXPECT_EQ(ReadHostMemory(root_)->huge_free_bytes, 0u);
}

TEST_F(HostMemoryTest, NoMeminfoIsAnErrorWithThePath) {
  std::filesystem::remove(root_ + "/proc/meminfo");
  const absl::Status status = ReadHostMemory(root_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find(root_ + "/proc/meminfo"), std::string::npos);
}

}  // namespace
}  // namespace kvpool
