// The attach loop turn by turn: time stands still, and processes end and hand on their pids as a test says.
#include "server/attach/attach_loop.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/attach_socket.h"
#include "tests/support/fake_clock.h"

namespace kvpool {
namespace {

constexpr int64_t kPid = 4711;

class AttachLoopTest : public ::testing::Test {
 protected:
  void SetUp() override {
    UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.sun_family = AF_UNIX;
    // The system chooses a name that no other socket has.
    ASSERT_EQ(bind(listener.get(), Address(), sizeof(sa_family_t)), 0);
    ASSERT_EQ(getsockname(listener.get(), Address(), &address_bytes_), 0);
    ASSERT_EQ(listen(listener.get(), 16), 0);
    options_.fd_ceiling = 4000;
    AttachEvents events{
        .attached = [this](std::shared_ptr<AttachPeer> peer, const PeerCredentials&,
                           const v1::AttachHello&) -> absl::StatusOr<Daemon::Welcome> {
          peers_.push_back(std::move(peer));
          log_.push_back(absl::StrCat("attached ", ++attached_));
          Daemon::Welcome welcome{.id = AttachId{attached_}, .frame = {}};
          welcome.frame.mutable_welcome()->set_daemon_epoch(1);
          return welcome;
        },
        .slab_ack = [this](AttachId id, const v1::SlabAck&) { Note("ack", id); },
        .slab_left = [this](AttachId id, const v1::SlabLeft&) { Note("left", id); },
        .hangup =
            [this](AttachId id) {
              Note("hangup", id);
              if (not_awaited_at_hangup_) peers_[static_cast<uint64_t>(id) - 1]->NotAwaited(id);
              return true;
            },
        .process_dead = [this](AttachId id) { Note("dead", id); },
    };
    AttachSenses senses{
        .clock = &clock_,
        .credentials = [](int) { return PeerCredentials{.pid = kPid, .uid = 1000, .gid = 1000}; },
        // Each connection is of the process that lives when it says hello.
        .pidfd = [this](int, const PeerCredentials&) { return UniqueFd(dup(process_.get())); },
        .send = [this](int socket, const v1::AttachFrame& frame, int fd) -> absl::StatusOr<SendOutcome> {
          if (!outcomes_.empty()) {
            const SendOutcome outcome = outcomes_.front();
            outcomes_.pop_front();
            return outcome;
          }
          if (fd >= 0 && ++descriptors_sent_ <= too_many_until_) return SendOutcome::kTooManyInFlight;
          return SendFrame(socket, frame, fd);
        }};
    auto mailbox = AttachMailbox::Make();
    ASSERT_TRUE(mailbox.ok()) << mailbox.status();
    auto loop = AttachLoop::Open(options_, std::move(events), std::move(listener), *std::move(mailbox),
                                 std::move(senses));
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }

  sockaddr* Address() { return reinterpret_cast<sockaddr*>(&address_); }
  // A process without a past, which from now on is the one that connects.
  static UniqueFd NewProcess() { return UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }
  static void End(const UniqueFd& process) { ASSERT_EQ(eventfd_write(process.get(), 1), 0); }

  UniqueFd Connect() {
    UniqueFd client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    EXPECT_EQ(connect(client.get(), Address(), address_bytes_), 0);
    return client;
  }
  static void SayHello(const UniqueFd& client) {
    v1::AttachFrame hello;
    hello.mutable_hello()->set_protocol(1);
    ASSERT_EQ(SendFrame(client.get(), hello).value(), SendOutcome::kSent);
  }
  // All that there is to do at this moment.
  void RunIdle() {
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(loop_->RunOnce(0));
  }
  static v1::AttachFrame Receive(const UniqueFd& client) {
    v1::AttachFrame frame;
    const auto received = ReceiveFrame(client.get(), &frame, nullptr);
    EXPECT_TRUE(received.ok()) << received.status();
    if (!received.ok() || *received != ReceiveOutcome::kFrame) frame.Clear();
    return frame;
  }
  void Note(const char* what, AttachId id) {
    log_.push_back(absl::StrCat(what, " ", static_cast<uint64_t>(id)));
  }

  sockaddr_un address_{};
  socklen_t address_bytes_ = sizeof(address_);
  AttachServerOptions options_;
  FakeClock clock_;
  UniqueFd process_ = NewProcess();
  uint64_t attached_ = 0;
  bool not_awaited_at_hangup_ = false;
  std::vector<std::shared_ptr<AttachPeer>> peers_;
  // Descriptors that were to travel, and how many of them the system does not let: too many are in flight.
  int descriptors_sent_ = 0, too_many_until_ = 0;
  std::deque<SendOutcome> outcomes_;  // Those of the next frames, which are not sent.
  std::vector<std::string> log_;
  std::unique_ptr<AttachLoop> loop_;
};

TEST_F(AttachLoopTest, APidThatIsGivenToAnotherProcessIsAnotherProcess) {
  const UniqueFd first = Connect();
  SayHello(first);
  RunIdle();
  EXPECT_TRUE(Receive(first).has_welcome());

  // It ends, and before the loop has looked, a process with its pid says hello.
  const UniqueFd second = Connect();
  ASSERT_TRUE(loop_->RunOnce(0));
  SayHello(second);
  End(process_);
  process_ = NewProcess();
  RunIdle();
  EXPECT_TRUE(Receive(second).has_welcome());
  EXPECT_EQ(log_, (std::vector<std::string>{"attached 1", "attached 2", "dead 1", "hangup 1"}));
  EXPECT_TRUE(absl::StrContains(Receive(first).closed().reason(), "has ended"));

  // The newcomer is watched under the pid that both had.
  log_.clear();
  const UniqueFd third = Connect();
  SayHello(third);
  RunIdle();
  End(process_);
  RunIdle();
  EXPECT_EQ(log_, (std::vector<std::string>{"attached 3", "dead 2", "dead 3", "hangup 2", "hangup 3"}));
}

// A session that was never ready is gone while the daemon hears of its hang-up: another stands for it, or nothing does.
TEST_F(AttachLoopTest, AProcessThatHangsUpOverAndOverBeforeItIsReadyLeavesNothing) {
  not_awaited_at_hangup_ = true;
  for (const bool watched : {true, false}) {
    const UniqueFd stands = watched ? Connect() : UniqueFd();
    if (watched) SayHello(stands);
    RunIdle();
    const uint64_t first = attached_;
    for (int i = 0; i < 200; ++i) {
      const UniqueFd client = Connect();
      SayHello(client);
      RunIdle();
      EXPECT_TRUE(Receive(client).has_welcome());
    }
    RunIdle();
    EXPECT_EQ(log_.back(), absl::StrCat("hangup ", attached_));
    EXPECT_EQ(attached_, first + 200);
    log_.clear();
    End(process_);
    process_ = NewProcess();
    RunIdle();
    if (watched) {
      EXPECT_EQ(log_, (std::vector<std::string>{"dead 1", "hangup 1"})) << "one is told of, not 201";
    } else {
      EXPECT_TRUE(log_.empty()) << "it is not watched any more";
    }
  }
}

TEST_F(AttachLoopTest, AProcessThatHasEndedIsNotLetIn) {
  const UniqueFd client = Connect();
  SayHello(client);
  End(process_);
  RunIdle();
  EXPECT_TRUE(absl::StrContains(Receive(client).closed().reason(), "has already ended"));
  EXPECT_TRUE(log_.empty());
}

TEST_F(AttachLoopTest, TimeIsTheClocks) {
  const UniqueFd silent = Connect();
  RunIdle();
  EXPECT_EQ(loop_->TimeoutMs(), 5000);
  clock_.Advance(4999);
  RunIdle();
  EXPECT_EQ(loop_->Stats().refused["hello_timeout"], 0u);
  clock_.Advance(1);
  RunIdle();
  EXPECT_EQ(Receive(silent).closed().reason(), "no hello within 5000 ms");
  EXPECT_EQ(loop_->Stats().connections, 0u);
  EXPECT_EQ(loop_->TimeoutMs(), -1);
}

// A peer that sends them without a pause must not be all that the loop hears.
TEST_F(AttachLoopTest, PacketsOfNoBytesCountForTheTurn) {
  const UniqueFd client = Connect();
  ASSERT_TRUE(loop_->RunOnce(0));
  for (int i = 0; i < 100; ++i) ASSERT_EQ(send(client.get(), "", 0, 0), 0);
  SayHello(client);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(loop_->RunOnce(0));
  EXPECT_TRUE(log_.empty()) << "6 turns read 96 packets";
  ASSERT_TRUE(loop_->RunOnce(0));
  EXPECT_EQ(log_, std::vector<std::string>{"attached 1"});
}

// No event tells when fewer descriptors are in flight: a socket that has room is always writable, and to wait for that is to spin.
TEST_F(AttachLoopTest, ADescriptorThatCanNotTravelYetIsTriedAgainLater) {
  const UniqueFd first = Connect(), second = Connect();
  SayHello(first);
  SayHello(second);
  RunIdle();
  EXPECT_TRUE(Receive(first).has_welcome());
  EXPECT_TRUE(Receive(second).has_welcome());
  ASSERT_EQ(peers_.size(), 2u);
  const auto send_slab = [&](size_t peer, uint32_t slab) {
    v1::AttachFrame frame;
    frame.mutable_slab()->set_slab(slab);
    peers_[peer]->Send(frame, UniqueFd(dup(process_.get())));
  };
  const auto receive_slab = [&](const UniqueFd& client) {
    v1::AttachFrame frame;
    UniqueFd fd;
    EXPECT_EQ(ReceiveFrame(client.get(), &frame, &fd).value(), ReceiveOutcome::kFrame);
    EXPECT_TRUE(fd.valid());
    return frame.slab().slab();
  };
  too_many_until_ = 3;
  send_slab(0, 1);
  send_slab(0, 2);
  send_slab(1, 3);
  RunIdle();
  EXPECT_EQ(descriptors_sent_, 2) << "once for each connection";
  EXPECT_EQ(loop_->TimeoutMs(), 10);
  clock_.Advance(10);
  RunIdle();
  EXPECT_EQ(descriptors_sent_, 3) << "as long as one can't, none can";
  EXPECT_EQ(loop_->TimeoutMs(), 10);
  clock_.Advance(10);
  RunIdle();
  EXPECT_EQ(descriptors_sent_, 6);
  EXPECT_EQ(loop_->TimeoutMs(), -1);
  EXPECT_EQ(receive_slab(first), 1u);
  EXPECT_EQ(receive_slab(first), 2u);
  EXPECT_EQ(receive_slab(second), 3u);

  // Who hangs up meanwhile is waited for no longer.
  too_many_until_ = descriptors_sent_ + 1;
  send_slab(0, 4);
  RunIdle();
  EXPECT_EQ(loop_->TimeoutMs(), 10);
  peers_[0]->Close("for the test");
  clock_.Advance(10);
  RunIdle();
  EXPECT_EQ(receive_slab(first), 4u);
  EXPECT_EQ(Receive(first).closed().reason(), "for the test");
  EXPECT_EQ(loop_->TimeoutMs(), -1);
}

// A peer may be gone before an event has said so. What it had sent is not read then: there is no connection to read it from.
TEST_F(AttachLoopTest, AFrameThatFindsNobodyEndsTheConnection) {
  const UniqueFd client = Connect();
  SayHello(client);
  RunIdle();
  outcomes_ = {SendOutcome::kWouldBlock, SendOutcome::kHangup};
  peers_[0]->Send({}, UniqueFd());
  ASSERT_TRUE(loop_->RunOnce(0));
  EXPECT_EQ(outcomes_.size(), 1u);
  v1::AttachFrame ack;
  ack.mutable_slab_ack()->set_slab(1);
  ASSERT_EQ(SendFrame(client.get(), ack).value(), SendOutcome::kSent);
  RunIdle();
  EXPECT_EQ(log_, (std::vector<std::string>{"attached 1", "hangup 1"}));
  EXPECT_EQ(loop_->Stats().connections, 0u);
}

// Both ends of a connection.
class PeerProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    ours_.Reset(ends[0]);
    theirs_.Reset(ends[1]);
  }
  UniqueFd ours_, theirs_;
};

TEST_F(PeerProcessTest, APidfdIsOpenedByPidWhereTheSocketHasNone) {
  const auto pidfd = PidfdByPid(ours_.get(), {.pid = getpid(), .uid = 0, .gid = 0});
  ASSERT_TRUE(pidfd.ok()) << pidfd.status();
  EXPECT_FALSE(ProcessEnded(pidfd->get()));
}

TEST_F(PeerProcessTest, APidOfWhichThePeerIsGoneMayBeAnothers) {
  // The peer hung up, and this pid is alive: it may have been given to somebody else before it was opened.
  theirs_.Reset();
  const auto pidfd = PidfdByPid(ours_.get(), {.pid = getpid(), .uid = 0, .gid = 0});
  EXPECT_EQ(pidfd.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(pidfd.status().message(), "already ended")) << pidfd.status();
}

TEST_F(PeerProcessTest, APidThatIsNotVisibleIsRefusedWithTheRemedy) {
  const auto pidfd = PidfdByPid(ours_.get(), {.pid = 0, .uid = 0, .gid = 0});
  EXPECT_EQ(pidfd.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(pidfd.status().message(), "shareProcessNamespace")) << pidfd.status();
}

}  // namespace
}  // namespace kvpool
