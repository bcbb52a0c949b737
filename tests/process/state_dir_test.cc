// A state directory that can't be written is no reason not to serve. A path that is taken by a directory can't be written,
// whoever tries: it imitates a full or read-only disk.
#include "server/state_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StateDirTest, ServesWhereNothingCanBeWritten) {
  const TemporaryDirectory directory;
  const std::string& path = directory.path();
  std::ofstream(path + "/epoch") << "1234567\n";
  for (const char* name : {"/epoch.new", "/kvpoold.json.new"}) std::filesystem::create_directory(path + name);
  std::filesystem::create_symlink(path + "/missing/lock", path + "/kvpoold.lock");
  uint64_t last = 1234567;
  for (int start = 0; start < 3; ++start) {
    Place place(nullptr);
    const absl::StatusOr<StateDir> state_dir = StateDir::Open(path, &place);
    ASSERT_TRUE(state_dir.ok()) << state_dir.status();
    EXPECT_GT(state_dir->epoch(), last);
    last = state_dir->epoch();
    state_dir->Announce({});
    // Two starts of a process are never within one millisecond.
    while (static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())) <= last) {
    }
  }
}

TEST(StateDirTest, AnEpochBeyondTheClockGrowsToo) {
  const TemporaryDirectory directory;
  const uint64_t ahead = uint64_t{1} << 60;
  std::ofstream(directory.path() + "/epoch") << ahead << "\n";
  for (const uint64_t epoch : {ahead + 1, ahead + 2}) {
    Place place(nullptr);
    EXPECT_EQ(StateDir::Open(directory.path(), &place)->epoch(), epoch);
  }
}

TEST(StateDirTest, ALockThatCanOnlyBeReadIsALock) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/kvpoold.lock";
  // Opened to be written it fails, even for root.
  std::filesystem::create_directory(path);
  Place place(nullptr), other(nullptr);
  const absl::StatusOr<StateDir> first = StateDir::Open(directory.path(), &place);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(absl::IsAlreadyExists(StateDir::Open(directory.path(), &other).status()));
}

// As an operator sees it: the daemon warns, serves, and the next one has a larger epoch.
TEST(StateDirTest, TheDaemonStartsAndSaysSo) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory.path() + "/epoch.new");
  auto daemon = DaemonProcess::Start({.directory = directory.path()});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  EXPECT_THAT((*daemon)->AwaitInLog("epoch not kept"),
              AllOf(HasSubstr("W epoch not kept"), HasSubstr("epoch.new")));
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/epoch"));
}

}  // namespace
}  // namespace kvpool
