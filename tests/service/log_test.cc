// Lines of the log, as a collector reads them.
#include "server/base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <string>
#include <thread>

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

// Whoever opens and closes sessions while nobody reads the log hides nothing that was asked for meanwhile.
TEST_F(LogTest, LinesOfNoAuditTakeNoRoomOfIts) {
  ASSERT_EQ(fcntl(pipe_[1], F_SETPIPE_SZ, 4096), 4096);
  SetLog({.fd = pipe_[1]});
  const LogDropped before = LogLinesDropped();
  int audits = 0;
  {
    const LogWriter writer;
    // Of a line of two pages the first is in the pipe: its writer waits for a reader, and takes no other.
    LogInfo("first", {{"words", std::string(8000, 'w')}});
    for (int written = 0; written < 4096;) {
      std::this_thread::yield();
      ASSERT_EQ(ioctl(pipe_[0], FIONREAD, &written), 0);
    }
    const std::string words(1000, 'w');
    const auto audit = [&] {
      LogAudit("asked", {{{"words", words}}});
      ++audits;
    };
    while (LogLinesDropped().lines == before.lines) LogInfo("loud", {{"words", words}});
    for (size_t bytes = 0; bytes + 2 * words.size() < LogWriter::kAuditBytes; bytes += words.size() + 100)
      audit();
    EXPECT_GT(audits, 200);
    EXPECT_EQ(LogLinesDropped().audit, before.audit);
    LogInfo("loud");
    EXPECT_EQ(LogLinesDropped().lines, before.lines + 2) << "their room is full";
    while (LogLinesDropped().audit == before.audit) audit();
    EXPECT_EQ(LogLinesDropped().lines, before.lines + 3);

    // It is read again.
    std::string log;
    while (log.find("W audit lines dropped") == std::string::npos || log.back() != '\n') {
      char text[4096];
      const ssize_t got = read(pipe_[0], text, sizeof text);
      ASSERT_GT(got, 0);
      log.append(text, static_cast<size_t>(got));
    }
    int written = 0;
    for (size_t at = 0; (at = log.find("I asked category=audit", at)) != std::string::npos; ++at) ++written;
    EXPECT_EQ(written, audits - 1);
    EXPECT_NE(log.find("W log lines dropped count=3\n"), std::string::npos);
    EXPECT_NE(log.find("W audit lines dropped category=audit count=1\n"), std::string::npos);
  }
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
