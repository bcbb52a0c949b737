// Programs of other people: the example in the README and an engine in C, with a real daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <sstream>
#include <string>

#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

struct Outcome {
  int status = -1;
  std::string output;
};

Outcome Shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  while (fgets(buffer, sizeof(buffer), pipe) != nullptr) outcome.output += buffer;
  outcome.status = WEXITSTATUS(pclose(pipe));
  return outcome;
}

class ProgramsTest : public SessionTest {};

TEST_F(ProgramsTest, TheReadmesExampleFindsItsPrefixTheSecondTime) {
  StartDaemon("64MiB");
  const std::string command = "KVPOOL_SOCKET=" + daemon_->socket() + " " KVPOOL_EXAMPLE;
  const Outcome first = Shell(command), second = Shell(command);
  EXPECT_EQ(first.output, "0 of 64 blocks were cached\n");
  EXPECT_EQ(first.status, 0);
  EXPECT_EQ(second.output, "64 of 64 blocks were cached\n");
  EXPECT_EQ(second.status, 0);
}

TEST_F(ProgramsTest, TheExampleInCFindsItsPrefixTheSecondTime) {
  StartDaemon("64MiB");
  const std::string command = "KVPOOL_SOCKET=" + daemon_->socket() + " " KVPOOL_EXAMPLE_IN_C;
  EXPECT_EQ(Shell(command).output, "0 of 1024 tokens were cached\n");
  EXPECT_EQ(Shell(command).output, "1024 of 1024 tokens were cached\n");
}

TEST_F(ProgramsTest, TheReadmesExampleHoldsItsBudget) {
  StartDaemon("64MiB");
  const Outcome outcome = Shell("KVPOOL_SOCKET=" + daemon_->socket() + " " KVPOOL_PRUNING_EXAMPLE);
  EXPECT_EQ(outcome.output, "264 of 1000 tokens are resident, in 17 blocks\n");
  EXPECT_EQ(outcome.status, 0);
}

TEST_F(ProgramsTest, AnEngineInC) {
  StartDaemon();
  const Outcome outcome = Shell(KVPOOL_C_TEST " " + daemon_->socket());
  EXPECT_EQ(outcome.output, "ok\n");
  EXPECT_EQ(outcome.status, 0);
}

TEST(CLibrary, ExportsItsOwnNamesOnlyAndWithTheirVersion) {
  const Outcome outcome = Shell("nm --dynamic --defined-only --format=posix " KVPOOL_C_LIBRARY);
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  std::istringstream lines(outcome.output);
  std::string line;
  int names = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("KVPOOL_0 A")) continue;  // The version's own symbol.
    EXPECT_THAT(line, ::testing::MatchesRegex("kvpool_[a-z_]+@@KVPOOL_0 .*"));
    ++names;
  }
  EXPECT_GT(names, 30);
}

}  // namespace
}  // namespace kvpool
