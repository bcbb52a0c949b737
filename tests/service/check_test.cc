// What becomes of a process whose invariant broke.
#include "proto/support/check.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

class CheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    reader_.Reset(ends[0]);
    stderr_.Reset(ends[1]);
  }
  // How a process ends whose stderr is the pipe, and where a check fails: a signal; 0: it exits; -1: it does not end.
  int FailACheck(const std::string& word) const {
    const pid_t child = fork();
    if (child == 0) {
      const rlimit none{.rlim_cur = 0, .rlim_max = 0};
      setrlimit(RLIMIT_CORE, &none);
      dup2(stderr_.get(), STDERR_FILENO);
      KVPOOL_CHECK(word.empty(), "the word is %s", word.c_str());
      _exit(0);
    }
    const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
    pollfd ended{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
    const bool in_time = poll(&ended, 1, 30000) == 1;
    if (!in_time) kill(child, SIGKILL);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    if (!in_time) return -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }
  std::string Said() {
    stderr_.Reset();
    std::string said;
    char bytes[4096];
    for (ssize_t got = 0; (got = read(reader_.get(), bytes, sizeof(bytes))) > 0;) {
      said.append(bytes, static_cast<size_t>(got));
    }
    return said;
  }
  UniqueFd reader_, stderr_;
};

TEST_F(CheckTest, SaysWhatBrokeAndAborts) {
  EXPECT_EQ(FailACheck(""), 0);
  EXPECT_EQ(FailACheck("odd"), SIGABRT);
  const std::string said = Said();
  EXPECT_NE(said.find("check_test.cc:"), std::string::npos) << said;
  EXPECT_NE(said.find(": invariant broken: word.empty(): the word is odd\n"), std::string::npos) << said;
}

TEST_F(CheckTest, WordsThatAreTooLongAreCut) {
  EXPECT_EQ(FailACheck(std::string(1 << 20, 'x')), SIGABRT);
  const std::string said = Said();
  EXPECT_EQ(said.size(), 2048u);
  EXPECT_EQ(said.substr(2046), "x\n");
}

TEST_F(CheckTest, APipeThatNobodyReadsDoesNotStopIt) {
  ASSERT_EQ(fcntl(stderr_.get(), F_SETFL, O_NONBLOCK), 0);
  while (write(stderr_.get(), "x", 1) == 1) {
  }
  ASSERT_EQ(fcntl(stderr_.get(), F_SETFL, 0), 0);
  EXPECT_EQ(FailACheck("odd"), SIGABRT);
  EXPECT_EQ(Said().find("odd"), std::string::npos);
}

}  // namespace
}  // namespace kvpool
