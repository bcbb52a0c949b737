// What the kernel says of the process at the other end of a socket.
#include "server/access/peer.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "proto/support/unique_fd.h"
#include "server/base/peer_process.h"

namespace kvpool {
namespace {

struct Pair {
  Pair() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    near.Reset(ends[0]);
    far.Reset(ends[1]);
  }
  UniqueFd near, far;
};

std::vector<uint32_t> OwnGroups() {
  std::vector<gid_t> groups(static_cast<size_t>(getgroups(0, nullptr)));
  EXPECT_EQ(getgroups(static_cast<int>(groups.size()), groups.data()), static_cast<int>(groups.size()));
  std::sort(groups.begin(), groups.end());
  return {groups.begin(), groups.end()};
}

TEST(PeerTest, CredentialsHaveTheSupplementaryGroups) {
  const Pair pair;
  const auto credentials = CredentialsOf(pair.near.get());
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  EXPECT_EQ(credentials->uid, geteuid());
  EXPECT_EQ(credentials->gid, getegid());
  EXPECT_EQ(credentials->pid, getpid());
  EXPECT_EQ(credentials->groups, OwnGroups());
  EXPECT_EQ(credentials->cgroup, "") << "asked for where there is time";
}

TEST(PeerTest, ManyGroupsAreAllThere) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can have many groups";
  const std::vector<uint32_t> before = OwnGroups();
  std::vector<gid_t> many;
  for (gid_t group = 3000; group > 1000; --group) many.push_back(group);
  ASSERT_EQ(setgroups(many.size(), many.data()), 0);
  const Pair pair;
  const auto credentials = CredentialsOf(pair.near.get());
  ASSERT_EQ(setgroups(before.size(), before.data()), 0);
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  ASSERT_EQ(credentials->groups.size(), 2000u);
  EXPECT_TRUE(std::is_sorted(credentials->groups.begin(), credentials->groups.end()));
  EXPECT_EQ(credentials->groups.front(), 1001u);
}

TEST(PeerTest, TheCgroupIsThatOfALivingProcess) {
  std::string unified;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::")) unified = line.substr(3);
  }
  if (unified.empty()) GTEST_SKIP() << "this kernel has no cgroup v2";
  const UniqueFd self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  ASSERT_TRUE(self.valid());
  EXPECT_EQ(CgroupOf(getpid(), self.get()), unified);
  EXPECT_EQ(CgroupOf(0, self.get()), "") << "of another pid namespace";

  // The pid of a process that has ended may be another's: here it is made to be ours.
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const UniqueFd ended(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(CgroupOf(getpid(), ended.get()), "");
  EXPECT_EQ(CgroupOf(child, ended.get()), "");
}

TEST(PeerTest, TheDaemonsUserIsRootOrItselfOnTheUnixSocketAlone) {
  const auto local = [](uint32_t uid) {
    return Peer{.process = std::make_shared<const PeerCredentials>(PeerCredentials{.pid = 1, .uid = uid})};
  };
  EXPECT_TRUE(CheckIsDaemonsUser(local(0), "do it").ok());
  EXPECT_TRUE(CheckIsDaemonsUser(local(geteuid()), "do it").ok());
  EXPECT_EQ(CheckIsDaemonsUser(local(geteuid() + 1), "do it").code(), absl::StatusCode::kPermissionDenied);
  const absl::Status remote =
      CheckIsDaemonsUser({.address = "ipv4:10.0.0.1:7", .names = {"ops.example"}}, "do it");
  EXPECT_EQ(remote.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(remote.message()),
              testing::HasSubstr("may do it, on the Unix socket; the caller is "));
  EXPECT_THAT(std::string(remote.message()), testing::HasSubstr("ops.example"));
}

}  // namespace
}  // namespace kvpool
