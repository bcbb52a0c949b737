// Frames of a Step stream on a socket pair: however the bytes come, what was written is what is read.
#include "proto/support/step_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace {

int arrays_made = 0;

}  // namespace

void* operator new[](size_t size) {
  ++arrays_made;
  return malloc(size);
}
void operator delete[](void* array) noexcept { free(array); }
void operator delete[](void* array, size_t) noexcept { free(array); }

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using Read = StepFrameReader::Outcome;
using Written = StepFrameWriter::Outcome;

constexpr size_t kMostBytes = 1 << 20;

// A frame's bytes, as the header's comment has them.
std::string Encoded(std::string_view frame, bool is_end = false) {
  const uint32_t size = static_cast<uint32_t>(frame.size()) | (is_end ? 1u << 31 : 0);
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(size >> shift);
  return bytes.append(frame);
}

// No two places of it are alike for long.
std::string Text(size_t bytes) {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i) absl::StrAppend(&text, i, ",");
  text.resize(bytes);
  return text;
}

class StepFramesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    sender_.Reset(ends[0]);
    receiver_.Reset(ends[1]);
  }
  void Send(std::string_view bytes) {
    ASSERT_EQ(send(sender_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    reader_.OnReadable(/*hangup=*/false);
  }
  Read Next() { return reader_.Next(receiver_.get()); }
  void ExpectFrame(std::string_view frame, bool is_end = false) {
    ASSERT_EQ(Next(), Read::kFrame);
    EXPECT_TRUE(reader_.frame() == frame) << "of " << frame.size() << " bytes";
    EXPECT_EQ(reader_.is_end(), is_end);
  }
  void Poll(int socket, short events) {
    pollfd polled = {.fd = socket, .events = events};
    ASSERT_EQ(poll(&polled, 1, 60000), 1);
  }

  UniqueFd sender_, receiver_;
  StepFrameReader reader_{kMostBytes};
  StepFrameWriter writer_;
};

TEST_F(StepFramesTest, WhatIsWrittenHasTheBytesThatTheHeaderSays) {
  ASSERT_EQ(writer_.Write(sender_.get(), "batch"), Written::kSent);
  ASSERT_EQ(writer_.Write(sender_.get(), "over", /*is_end=*/true), Written::kSent);
  const std::string expected = Encoded("batch") + Encoded("over", true);
  std::string bytes(expected.size() + 1, '\0');
  ASSERT_EQ(recv(receiver_.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(expected.size()));
  bytes.pop_back();
  EXPECT_EQ(bytes, expected);
}

TEST_F(StepFramesTest, AFrameMayBeCutAnywhere) {
  const std::string first = Text(300), last = Text(40);
  const std::string bytes = Encoded(first) + Encoded("") + Encoded(last, true);
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    SCOPED_TRACE(cut);
    Send(std::string_view(bytes).substr(0, cut));
    std::vector<std::string> frames;
    while (Next() == Read::kFrame) frames.emplace_back(reader_.frame());
    EXPECT_EQ(Next(), Read::kNoneYet);
    Send(std::string_view(bytes).substr(cut));
    while (Next() == Read::kFrame) frames.emplace_back(reader_.frame());
    EXPECT_EQ(frames, (std::vector<std::string>{first, "", last}));
    EXPECT_TRUE(reader_.is_end());
  }
}

TEST_F(StepFramesTest, AFrameMayComeByteByByte) {
  const std::string frame = Text(100);
  const std::string bytes = Encoded(frame);
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(Next(), Read::kNoneYet) << i;
    Send(std::string_view(bytes).substr(i, 1));
  }
  ExpectFrame(frame);
  EXPECT_EQ(Next(), Read::kNoneYet);
}

TEST_F(StepFramesTest, ALargeFrameIsNotCopiedForEachByte) {
  const std::string bytes = Encoded(Text(kMostBytes));
  size_t sent = 0;
  while (sent < bytes.size() / 4) {
    Send(std::string_view(bytes).substr(sent, 4096));
    sent += 4096;
    ASSERT_EQ(Next(), Read::kNoneYet);
  }
  const int made = arrays_made;
  for (int i = 0; i < 1000; ++i) {
    Send(std::string_view(bytes).substr(sent++, 1));
    ASSERT_EQ(Next(), Read::kNoneYet);
  }
  EXPECT_LE(arrays_made, made + 1);
}

TEST_F(StepFramesTest, SeveralFramesComeInOneRead) {
  std::string bytes;
  for (size_t i = 0; i < 200; ++i) bytes += Encoded(Text(7 * i));
  Send(bytes);
  for (size_t i = 0; i < 200; ++i) ExpectFrame(Text(7 * i));
  EXPECT_EQ(Next(), Read::kNoneYet);
}

// Nobody looks twice, where poll() has said that there is something once.
TEST_F(StepFramesTest, ALookThatFoundAllIsNotRepeatedBeforePollSaysSo) {
  Send(Encoded("one"));
  ExpectFrame("one");
  ASSERT_EQ(writer_.Write(sender_.get(), "two"), Written::kSent);
  EXPECT_EQ(Next(), Read::kNoneYet);
  reader_.OnReadable(/*hangup=*/false);
  ExpectFrame("two");
}

TEST_F(StepFramesTest, AFrameMayBeLargerThanTheSocketHolds) {
  const std::string frame = Text(kMostBytes);
  std::thread writing([&] {
    auto outcome = writer_.Write(sender_.get(), frame);
    EXPECT_EQ(outcome, Written::kPending);
    while (outcome == Written::kPending) {
      EXPECT_TRUE(writer_.pending());
      Poll(sender_.get(), POLLOUT);
      outcome = writer_.Flush(sender_.get());
    }
    EXPECT_EQ(outcome, Written::kSent);
    EXPECT_FALSE(writer_.pending());
    EXPECT_EQ(writer_.Write(sender_.get(), "and one more"), Written::kSent);
  });
  for (const std::string_view expected : {std::string_view(frame), std::string_view("and one more")}) {
    Read outcome;
    while ((outcome = Next()) == Read::kNoneYet) {
      Poll(receiver_.get(), POLLIN);
      reader_.OnReadable(/*hangup=*/false);
    }
    ASSERT_EQ(outcome, Read::kFrame);
    EXPECT_TRUE(reader_.frame() == expected);
  }
  writing.join();
}

TEST_F(StepFramesTest, NothingIsPendingFromAFullSocketOn) {
  while (writer_.Write(sender_.get(), Text(4096)) == Written::kSent) {
  }
  EXPECT_TRUE(writer_.pending());
  EXPECT_EQ(writer_.Flush(sender_.get()), Written::kPending);
  receiver_.Reset();
  EXPECT_EQ(writer_.Flush(sender_.get()), Written::kBroken);
  EXPECT_FALSE(writer_.pending());
  EXPECT_EQ(writer_.Write(sender_.get(), "nobody"), Written::kBroken);
}

TEST_F(StepFramesTest, AFrameAboveTheLimitIsNotRead) {
  Send(Encoded(Text(10)));
  ExpectFrame(Text(10));
  Send(std::string("\x01\x00\x10\x00", 4));
  EXPECT_EQ(Next(), Read::kTooLarge);
  EXPECT_EQ(reader_.frame_bytes(), kMostBytes + 1);
}

TEST_F(StepFramesTest, TheEndOfAStreamHasTheSameLimit) {
  Send(std::string("\xff\xff\xff\xff", 4));
  EXPECT_EQ(Next(), Read::kTooLarge);
  EXPECT_EQ(reader_.frame_bytes(), (uint32_t{1} << 31) - 1);
}

TEST_F(StepFramesTest, WhatCameBeforeAHangupIsRead) {
  Send(Encoded("answer") + Encoded("over", true));
  sender_.Reset();
  reader_.OnReadable(/*hangup=*/true);
  ExpectFrame("answer");
  ExpectFrame("over", true);
  EXPECT_EQ(Next(), Read::kHangup);
}

TEST_F(StepFramesTest, AHangupMayComeAnywhereInAFrame) {
  const std::string bytes = Encoded("answer");
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    SCOPED_TRACE(cut);
    SetUp();
    StepFrameReader reader(kMostBytes);
    ASSERT_EQ(send(sender_.get(), bytes.data(), cut, MSG_NOSIGNAL), static_cast<ssize_t>(cut));
    sender_.Reset();
    reader.OnReadable(/*hangup=*/true);
    EXPECT_EQ(reader.Next(receiver_.get()), Read::kHangup);
  }
}

TEST_F(StepFramesTest, TheOtherEndMaySendNoMoreAndReadOn) {
  Send(Encoded("last batch"));
  ASSERT_EQ(shutdown(sender_.get(), SHUT_WR), 0);
  ExpectFrame("last batch");
  reader_.OnReadable(/*hangup=*/false);
  EXPECT_EQ(Next(), Read::kHangup);
  EXPECT_EQ(writer_.Write(receiver_.get(), "its answer"), Written::kSent);
}

// What is left of a large frame's memory does not change what comes after it.
TEST_F(StepFramesTest, SmallAndLargeFramesTakeTurns) {
  std::thread writing([&] {
    for (size_t i = 0; i < 60; ++i) {
      auto outcome = writer_.Write(sender_.get(), Text(i % 3 == 0 ? 100'000 + i : i));
      while (outcome == Written::kPending) {
        Poll(sender_.get(), POLLOUT);
        outcome = writer_.Flush(sender_.get());
      }
    }
  });
  for (size_t i = 0; i < 60; ++i) {
    Read outcome;
    while ((outcome = Next()) == Read::kNoneYet) {
      Poll(receiver_.get(), POLLIN);
      reader_.OnReadable(/*hangup=*/false);
    }
    ASSERT_EQ(outcome, Read::kFrame);
    EXPECT_TRUE(reader_.frame() == Text(i % 3 == 0 ? 100'000 + i : i)) << i;
  }
  writing.join();
}

// ------------------------------------------------------------------------------------------------ connecting

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

TEST(ConnectStepSocket, SaysThePreface) {
  const std::string path = ::testing::TempDir() + absl::StrCat("/step_frames_test.", getpid());
  const sockaddr_un address = AddressOf(path);
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const auto refused = ConnectStepSocket(path);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(path + ": Connection refused"));

  ASSERT_EQ(listen(listener.get(), 1), 0);
  const auto connected = ConnectStepSocket(path);
  ASSERT_TRUE(connected.ok()) << connected.status();
  const UniqueFd accepted(accept(listener.get(), nullptr, nullptr));
  std::string said(64, '\0');
  const ssize_t bytes = recv(accepted.get(), said.data(), said.size(), 0);
  unlink(path.c_str());
  EXPECT_EQ(said.substr(0, static_cast<size_t>(bytes)), "* kvpool.v1 STEP 1 *\r\n\r\n");
}

TEST(ConnectStepSocket, NamesThePathThatFails) {
  const auto none = ConnectStepSocket("/nonexistent/kvpoold.sock");
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(none.status().message()),
              HasSubstr("/nonexistent/kvpoold.sock: No such file or directory"));
  const auto too_long = ConnectStepSocket("/" + std::string(200, 'x'));
  EXPECT_EQ(too_long.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_long.status().message()), HasSubstr("has 201 bytes"));
}

}  // namespace
}  // namespace kvpool
