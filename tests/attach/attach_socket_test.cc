// Frames on a socket pair: what was sent arrives, and no descriptor that was not asked for.
#include "proto/support/attach_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <array>
#include <string>
#include <vector>

#include "kvpool/v1/attach.pb.h"

namespace kvpool {
namespace {

class AttachSocketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    daemon_.Reset(ends[0]);
    client_.Reset(ends[1]);
  }

  static v1::AttachFrame Hello(const std::string& name) {
    v1::AttachFrame frame;
    frame.mutable_hello()->set_protocol(1);
    frame.mutable_hello()->set_client_name(name);
    return frame;
  }

  // Sends raw bytes with any number of descriptors, as a client that does not keep to the protocol may.
  void SendRaw(int socket, const std::string& bytes, const std::vector<int>& fds = {}) {
    iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(16 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    ASSERT_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  // The lowest free descriptor, which is the same again if nothing was left open.
  static int LowestFree() {
    UniqueFd probe(open("/dev/null", O_RDONLY | O_CLOEXEC));
    return probe.get();
  }

  UniqueFd daemon_, client_;
};

TEST_F(AttachSocketTest, CarriesAFrame) {
  const auto sent = SendFrame(client_.get(), Hello("engine"));
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(*sent, SendOutcome::kSent);
  v1::AttachFrame frame;
  const auto received = ReceiveFrame(daemon_.get(), &frame, nullptr);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(*received, ReceiveOutcome::kFrame);
  EXPECT_EQ(frame.hello().client_name(), "engine");
}

TEST_F(AttachSocketTest, CarriesADescriptorForTheSameMemory) {
  UniqueFd memory(memfd_create("slab", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memory.get(), 8192), 0);
  v1::AttachFrame slab;
  slab.mutable_slab()->set_bytes(8192);
  ASSERT_EQ(SendFrame(daemon_.get(), slab, memory.get()).value(), SendOutcome::kSent);

  v1::AttachFrame frame;
  UniqueFd fd;
  ASSERT_EQ(ReceiveFrame(client_.get(), &frame, &fd).value(), ReceiveOutcome::kFrame);
  ASSERT_TRUE(fd.valid());
  struct stat ours, theirs;
  ASSERT_EQ(fstat(memory.get(), &ours), 0);
  ASSERT_EQ(fstat(fd.get(), &theirs), 0);
  EXPECT_EQ(ours.st_ino, theirs.st_ino);
  EXPECT_NE(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(AttachSocketTest, SaysWhenItWouldBlock) {
  v1::AttachFrame frame;
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kWouldBlock);
  SendOutcome last = SendOutcome::kSent;
  for (int i = 0; i < 100000 && last == SendOutcome::kSent; ++i) {
    last = SendFrame(client_.get(), Hello("engine")).value();
  }
  EXPECT_EQ(last, SendOutcome::kWouldBlock);
}

TEST_F(AttachSocketTest, HangupAfterTheLastFrame) {
  ASSERT_EQ(SendFrame(client_.get(), Hello("engine")).value(), SendOutcome::kSent);
  client_.Reset();
  v1::AttachFrame frame;
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kFrame);
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kHangup);
  EXPECT_EQ(SendFrame(daemon_.get(), Hello("x")).value(), SendOutcome::kHangup);
}

TEST_F(AttachSocketTest, APacketOfNoBytesIsNotTheEnd) {
  SendRaw(client_.get(), "");
  SendRaw(client_.get(), "");
  v1::AttachFrame frame;
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kEmpty);
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kEmpty);
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kWouldBlock);
  SendRaw(client_.get(), "");
  ASSERT_EQ(SendFrame(client_.get(), Hello("alive")).value(), SendOutcome::kSent);
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kEmpty);
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).value(), ReceiveOutcome::kFrame);
  EXPECT_EQ(frame.hello().client_name(), "alive");
}

TEST_F(AttachSocketTest, RefusesWhatIsNoFrame) {
  v1::AttachFrame frame;
  SendRaw(client_.get(), std::string(100, '\xff'));
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  SendRaw(client_.get(), std::string("\xa2\x1f\x01x", 4));  // Field 500: unknown here.
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  SendRaw(client_.get(), std::string(kMaxAttachFrameBytes + 1, 'a'));
  const auto huge = ReceiveFrame(daemon_.get(), &frame, nullptr);
  EXPECT_EQ(huge.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(huge.status().message().find("4096"), std::string::npos) << huge.status();
}

TEST_F(AttachSocketTest, RefusesToSendMoreThanTheLimit) {
  const auto sent = SendFrame(client_.get(), Hello(std::string(kMaxAttachFrameBytes, 'n')));
  EXPECT_EQ(sent.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(sent.status().message().find("4096"), std::string::npos) << sent.status();
}

TEST_F(AttachSocketTest, DescriptorsNobodyAskedForStayOut) {
  UniqueFd extra(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::string hello = Hello("engine").SerializeAsString();
  const int lowest = LowestFree();
  v1::AttachFrame frame;
  UniqueFd fd;

  SendRaw(client_.get(), hello, {extra.get()});
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LowestFree(), lowest);

  SendRaw(client_.get(), hello, std::vector<int>(7, extra.get()));
  EXPECT_EQ(ReceiveFrame(daemon_.get(), &frame, &fd).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(fd.valid());
  EXPECT_EQ(LowestFree(), lowest);
}

TEST_F(AttachSocketTest, ConnectNamesThePath) {
  const auto missing = ConnectAttachSocket("/nonexistent/kvpoold.sock.attach");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(missing.status().message().find("/nonexistent/kvpoold.sock.attach"), std::string::npos);
  EXPECT_EQ(ConnectAttachSocket(std::string(200, 'p')).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvpool
