#include "tests/tools/run_tool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "google/protobuf/util/json_util.h"
#include "proto/support/check.h"
#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

struct Pipe {
  UniqueFd reader, writer;
  Pipe() {
    int ends[2];
    KVPOOL_CHECK(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    reader = UniqueFd(ends[0]);
    writer = UniqueFd(ends[1]);
  }
};

}  // namespace

ToolResult RunTool(const std::string& program, const std::vector<std::string>& arguments) {
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  Pipe out, err;
  const pid_t pid = fork();
  KVPOOL_CHECK(pid >= 0, "no process for %s", program.c_str());
  if (pid == 0) {
    dup2(out.writer.get(), STDOUT_FILENO);
    dup2(err.writer.get(), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  out.writer.Reset();
  err.writer.Reset();
  ToolResult result;
  std::array<pollfd, 2> ends{
      {{.fd = out.reader.get(), .events = POLLIN}, {.fd = err.reader.get(), .events = POLLIN}}};
  std::string* const texts[] = {&result.out, &result.err};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    poll(ends.data(), ends.size(), -1);
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t bytes = read(ends[i].fd, buffer, sizeof(buffer));
      if (bytes > 0) {
        texts[i]->append(buffer, static_cast<size_t>(bytes));
      } else {
        ends[i].fd = -1;
      }
    }
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status)) result.exit_status = WEXITSTATUS(status);
  return result;
}

google::protobuf::Struct ParseJson(const std::string& json) {
  google::protobuf::Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << ": " << json;
  return parsed;
}

double Number(const google::protobuf::Struct& json, const std::string& field) {
  const auto found = json.fields().find(field);
  EXPECT_NE(found, json.fields().end()) << "no " << field << " in " << json.ShortDebugString();
  return found == json.fields().end() ? 0 : found->second.number_value();
}

}  // namespace kvpool
