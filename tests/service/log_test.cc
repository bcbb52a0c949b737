// Lines of the log, as a collector reads them.
#include "server/base/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace kvpool {
namespace {

class LogTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(pipe(pipe_), 0); }
  void TearDown() override {
    SetLog({});
    close(pipe_[0]);
    close(pipe_[1]);
  }
  // What was written since; the time at its head cut off.
  std::string Line(size_t head) {
    char text[1024];
    const ssize_t got = read(pipe_[0], text, sizeof text);
    return got <= static_cast<ssize_t>(head) ? "" : std::string(text + head, got - head);
  }
  int pipe_[2];
};

TEST_F(LogTest, Text) {
  SetLog({.fd = pipe_[1]});
  LogWarning("slab refused",
             {{"session", uint64_t{7}}, {"client", "vllm \"0.30\"\n"}, {"pid", -1}, {"on", true}});
  EXPECT_EQ(Line(25), "W slab refused session=7 client=\"vllm \\\"0.30\\\"\\n\" pid=-1 on=true\n");
}

TEST_F(LogTest, Json) {
  SetLog({.format = LogFormat::kJson, .fd = pipe_[1]});
  LogError("odd", {{"bytes", "\x01\t\\"}, {"share", 0.5}, {"none", ""}});
  EXPECT_EQ(
      Line(34),
      ",\"level\":\"error\",\"event\":\"odd\",\"bytes\":\"\\u0001\\t\\\\\",\"share\":0.5,\"none\":\"\"}\n");
}

TEST_F(LogTest, LevelsBelowAreSilent) {
  SetLog({.level = LogLevel::kWarning, .fd = pipe_[1]});
  LogInfo("quiet");
  LogWarning("loud");
  EXPECT_EQ(Line(25), "W loud\n");
}

TEST_F(LogTest, NamesOfLevelsAndFormats) {
  EXPECT_EQ(*ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(*ParseLogFormat("json"), LogFormat::kJson);
  EXPECT_EQ(ParseLogLevel("loud").status().message(),
            "log level is \"loud\"; there are debug, info, warning and error");
  EXPECT_EQ(ParseLogFormat("xml").status().message(), "log format is \"xml\"; there are text and json");
}

}  // namespace
}  // namespace kvpool
