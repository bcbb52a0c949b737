// A daemon with a keeper, killed under its engines: what was sealed is found again, and no block has two owners.
#include "server/keeper/keeper.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "client/tools/operator_client.h"
#include "kvpool/v1/attach.pb.h"
#include "proto/support/attach_socket.h"
#include "proto/support/unique_fd.h"
#include "server/keeper/keeper_frames.h"
#include "tests/client/session_fixture.h"
#include "tests/support/send_signal.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The daemon's pid, as kvpoold.json has it; 0: none serves.
pid_t PidIn(const std::string& directory) {
  std::ifstream file(directory + "/kvpoold.json");
  std::stringstream text;
  text << file.rdbuf();
  const size_t at = text.str().find("\"pid\":");
  return at == std::string::npos ? 0 : atoi(text.str().c_str() + at + 6);
}

// Returns when the daemon that comes after that one serves; 0: none came.
pid_t AwaitNext(const DaemonProcess& daemon, pid_t killed) {
  for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
    const pid_t next = PidIn(daemon.directory());
    if (next != 0 && next != killed) return next;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 0;
}

// Kills the daemon, not its keeper, and waits for the next one.
pid_t KillDaemon(const DaemonProcess& daemon) {
  const pid_t killed = PidIn(daemon.directory());
  if (killed <= 0 || kill(killed, SIGKILL) != 0) return 0;
  return AwaitNext(daemon, killed);
}

UniqueFd ConnectStream(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const bool connected = connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  return connected ? std::move(socket) : UniqueFd();
}

class KeeperTest : public SessionTest {
 protected:
  void MakeGap();
  // Kills daemons under engines that write; with each of so many, if any, its keeper first, in whose place another one comes.
  void KillUnderWriters(int keeper_after);
  // A daemon goes on without its keeper, and would outlive the test.
  void TearDown() override {
    if (daemon_ == nullptr) return;
    // Nor is one left that the keeper has just started, and that has not said so yet.
    if (daemon_->pid() > 0) daemon_->Signal(SIGSTOP);
    std::ifstream children(absl::StrCat("/proc/", daemon_->pid(), "/task/", daemon_->pid(), "/children"));
    for (pid_t child; children >> child;) kill(child, SIGKILL);
    daemon_->Kill();
    if (const pid_t daemon = PidIn(daemon_->directory()); daemon > 0) kill(daemon, SIGKILL);
  }
  void StartWithKeeper(const std::string& capacity = "32MiB", std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"--keeper=on", "--keeper-deaths=1000000"});
    StartDaemon(capacity, std::move(flags));
    ASSERT_NE(PidIn(daemon_->directory()), daemon_->pid()) << "the daemon is its own keeper";
  }
  std::vector<PrefixKey> KeysOf(const Session& session, uint32_t seed, size_t blocks) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(seed, blocks), kTokensPerBlock);
  }
  absl::StatusOr<MatchHit> Match(Session* session, absl::Span<const PrefixKey> keys) const {
    auto pending = session->Match(KeyBytes(keys));
    if (!pending.ok()) return pending.status();
    return pending->Wait(Soon());
  }
  v1::StateCounts Counts() const {
    auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
    if (!client.ok()) return {};
    const auto spaces = (*client)->ListSpaces({});
    return spaces.ok() && spaces->spaces_size() == 1 ? spaces->spaces(0).blocks() : v1::StateCounts();
  }
  // Waits until nothing is held; answers the counts then.
  v1::StateCounts AwaitAllBack() const {
    v1::StateCounts counts;
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      counts = Counts();
      if (counts.capacity() > 0 && counts.leased() + counts.sealed() + counts.quarantined() == 0) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return counts;
  }
};

TEST_F(KeeperTest, WhatWasSealedIsFoundAgainAndWhatWasHeldStaysItsHolders) {
  StartWithKeeper();
  auto first = Open();
  ASSERT_NE(first, nullptr);
  const std::string seed = first->hash_seed();
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, 8);
  Share(first.get(), keys);
  auto mine = first->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  const std::vector<PrefixKey> marks = KeysOf(*first, 2, 4);
  for (size_t i = 0; i < 4; ++i) Stamp(first->data((*mine)[i]), marks[i]);

  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  EXPECT_EQ(second->hash_seed(), seed);
  const auto hit = Match(second.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  ASSERT_EQ(hit->groups[0].size(), 8u) << daemon_->Log();
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(HasStamp(second->data(hit->groups[0][i]), keys[i])) << i;

  // All that can be had is nobody's: the first session's process, which is this one, still writes to its blocks.
  std::set<uint32_t> firsts;
  for (const BlockRef block : mine->refs()) firsts.insert(Index(block.id));
  std::vector<Blocks> all;
  while (true) {
    const Deadline shortly = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    auto more = second->LeaseWithin(1, all.empty() ? Soon() : shortly);
    if (!more.ok()) break;
    EXPECT_FALSE(firsts.contains(Index((*more)[0].id)))
        << "block " << Index((*more)[0].id) << " has two owners";
    std::memset(second->data((*more)[0]), 0xff, kBlockBytes);
    all.push_back(*std::move(more));
  }
  EXPECT_FALSE(all.empty());
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(first->data((*mine)[i]), marks[i])) << i;
  EXPECT_TRUE(first->status().ok()) << first->status();
}

TEST_F(KeeperTest, ThePolicyTakesOverOnceTheNextDaemonServes) {
  // The stand-in has the same name.
  StartWithKeeper("32MiB", {"--policy=lru"});
  auto session = Open();
  ASSERT_NE(session, nullptr);
  Share(session.get(), KeysOf(*session, 1, 8));
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  EXPECT_THAT(daemon_->AwaitInLog("replacement policy changed"), HasSubstr("from=lru to=lru"));
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  ASSERT_TRUE(client.ok()) << client.status();
  v1::SetPolicyRequest request;
  request.set_policy("sieve");
  const auto set = (*client)->SetPolicy(request);
  ASSERT_TRUE(set.ok()) << set.status();
  ASSERT_EQ(set->spaces_size(), 1);
  EXPECT_EQ(set->spaces(0).policy(), "sieve");
  daemon_->AwaitInLog("to=sieve");
  const auto policies = (*client)->GetPolicies({});
  ASSERT_TRUE(policies.ok()) << policies.status();
  ASSERT_EQ(policies->spaces_size(), 1);
  EXPECT_EQ(policies->spaces(0).policy(), "sieve") << daemon_->Log();
}

TEST_F(KeeperTest, ASessionLivesThroughTheDaemon) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8), marks = KeysOf(*session, 2, 4);
  Share(session.get(), keys);
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  for (size_t i = 0; i < 4; ++i) Stamp(session->data((*mine)[i]), marks[i]);
  for (int round = 0; round < 5; ++round) {
    ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
    // It is back when a lease that the magazine can't serve is answered.
    auto more = session->LeaseWithin(40, Soon());
    ASSERT_TRUE(more.ok()) << more.status() << daemon_->Log();
    for (const BlockRef block : more->refs()) {
      for (const BlockRef other : mine->refs()) EXPECT_NE(Index(block.id), Index(other.id));
    }
    // Right after a death a match may find nothing yet.
    size_t found = 0;
    for (const Deadline deadline = Soon(); found != 8 && std::chrono::steady_clock::now() < deadline;) {
      const auto hit = Match(session.get(), keys);
      ASSERT_TRUE(hit.ok()) << hit.status();
      found = hit->groups[0].size();
      for (size_t i = 0; i < found; ++i) {
        EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
      }
    }
    EXPECT_EQ(found, 8u);
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(session->data((*mine)[i]), marks[i])) << i;
  auto seal = session->Seal({.blocks = mine->refs(), .keys = KeyBytes(marks)});
  ASSERT_TRUE(seal.ok());
  const auto outcome = seal->Wait(Soon());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->refused.empty());
  mine->Release();
  EXPECT_TRUE(session->Close(Soon()).ok());
  const v1::StateCounts counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
  EXPECT_EQ(counts.cached(), 12u);
}

// Takes a TCP port on 127.0.0.1, any if it is 0, as soon as nobody else has it.
UniqueFd TakePort(int* port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(*port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const of = reinterpret_cast<sockaddr*>(&address);
  const Deadline deadline = Soon();
  while (bind(socket.get(), of, size) != 0 || listen(socket.get(), 1) != 0) {
    if (std::chrono::steady_clock::now() >= deadline) return UniqueFd();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(getsockname(socket.get(), of, &size), 0);
  *port = ntohs(address.sin_port);
  return socket;
}

// The attach socket is the first that opens, the port of metrics the last: somebody else has that meanwhile.
TEST_F(KeeperTest, AStartThatFailsOnceEnginesAreBackEndsNoSession) {
  int port = 0;
  TakePort(&port).Reset();
  StartWithKeeper("32MiB", {absl::StrCat("--metrics-listen=127.0.0.1:", port)});
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  daemon_->Signal(SIGSTOP);  // The keeper starts the next one when the port is taken.
  ASSERT_EQ(kill(PidIn(daemon_->directory()), SIGKILL), 0);
  UniqueFd taken = TakePort(&port);
  ASSERT_TRUE(taken.valid());
  daemon_->Signal(SIGCONT);
  EXPECT_THAT(daemon_->AwaitInLog("session came back"), HasSubstr("session came back"));
  EXPECT_THAT(daemon_->AwaitInLog("failed_starts=1"), HasSubstr("failed_starts=1"));
  taken.Reset();
  size_t found = 0;
  for (const Deadline deadline = Soon(); found != 8 && std::chrono::steady_clock::now() < deadline;) {
    const auto hit = Match(session.get(), keys);
    ASSERT_TRUE(hit.ok()) << hit.status() << daemon_->Log();
    found = hit->groups[0].size();
  }
  EXPECT_EQ(found, 8u) << daemon_->Log();
}

// As vLLM has it: a scheduler, which maps nothing, and a rank for each device.
TEST_F(KeeperTest, ASessionOfASchedulerAndTwoRanksLivesThroughTheDaemon) {
  StartWithKeeper("32MiB", {"--device=host,host"});
  SessionOptions options = RankOptions(0);
  options.role.set_scheduler(true);
  auto scheduler = Open(options);
  ASSERT_NE(scheduler, nullptr);
  std::vector<std::unique_ptr<Session>> ranks;
  for (const uint32_t rank : {0, 1}) {
    auto joined = Session::Join(RankOptions(rank), scheduler->Invitation());
    ASSERT_TRUE(joined.ok()) << joined.status();
    ranks.push_back(*std::move(joined));
  }
  for (uint64_t round = 1; round <= 5; ++round) {
    auto blocks = scheduler->LeaseWithin(4, Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status() << daemon_->Log();
    const auto marks = KeysOf(*scheduler, 100 + static_cast<uint32_t>(round), 4);
    for (const auto& rank : ranks) {
      rank->BeginStep(round);
      for (size_t i = 0; i < 4; ++i) Stamp(rank->data((*blocks)[i]), marks[i]);
    }
    scheduler->BeginStep(round);
    auto seal = scheduler->Seal({.blocks = blocks->refs(), .keys = KeyBytes(marks)});
    ASSERT_TRUE(seal.ok()) << seal.status();
    ranks[0]->CompleteStep(round);
    ASSERT_TRUE(scheduler->Flush(Soon()).ok());
    ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
    EXPECT_FALSE(seal->Ready()) << "rank 1 is not done with the step";
    ranks[1]->CompleteStep(round);
    const auto outcome = seal->Wait(Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status() << daemon_->Log();
    EXPECT_TRUE(outcome->refused.empty());
    blocks->Release();
    for (uint64_t sealed = 1; sealed <= round; ++sealed) {
      const auto sought = KeysOf(*scheduler, 100 + static_cast<uint32_t>(sealed), 4);
      auto hit = Match(scheduler.get(), sought);
      // Its attach socket may come back after its stream: until then nothing is found.
      for (const Deadline deadline = Soon();
           hit.ok() && hit->groups[0].empty() && std::chrono::steady_clock::now() < deadline;) {
        hit = Match(scheduler.get(), sought);
      }
      ASSERT_TRUE(hit.ok()) << hit.status();
      ASSERT_EQ(hit->groups[0].size(), 4u) << daemon_->Log();
      for (const auto& rank : ranks) {
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(HasStamp(rank->data(hit->groups[0][i]), sought[i])) << i;
        }
      }
    }
  }
  for (const auto& rank : ranks) EXPECT_TRUE(rank->status().ok()) << rank->status();
  EXPECT_TRUE(scheduler->Close(Soon()).ok());
  const v1::StateCounts counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(KeeperTest, AReleaseThatWaitsForAStepLivesThroughTheDaemon) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 4);
  auto seal = session->Seal({.blocks = mine->refs(), .keys = KeyBytes(keys)});
  ASSERT_TRUE(seal.ok() && seal->Wait(Soon()).ok());
  const uint64_t step = session->BeginStep();
  mine->Release();  // Once the step is done.
  ASSERT_TRUE(session->Flush(Soon()).ok());
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  EXPECT_EQ(Counts().sealed(), 4u);
  session->CompleteStep(step);
  v1::StateCounts counts;
  for (const Deadline deadline = Soon();
       counts.cached() != 4 && std::chrono::steady_clock::now() < deadline;) {
    counts = Counts();
  }
  EXPECT_EQ(counts.cached(), 4u) << session->status() << daemon_->Log();
  EXPECT_TRUE(session->status().ok()) << session->status();
}

TEST_F(KeeperTest, ADaemonThatStaysAwayForTooLongEndsTheSession) {
  StartWithKeeper("32MiB", {"--reattach-timeout=200ms"});
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  kill(daemon, SIGKILL);
  const auto none = session->LeaseWithin(session->most_leased_blocks(), Soon());
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable) << none.status();
  EXPECT_THAT(std::string(session->status().message()), HasSubstr("did not come back"));
}

TEST_F(KeeperTest, MatchesThatWaitForOthersFindNothingOnceTheDaemonIsGone) {
  StartWithKeeper();
  auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();  // Nobody comes back.
  StopProcess(daemon);
  std::vector<PendingMatch> pending;
  // Each has time to become a batch of its own: as many as may be unanswered, and others wait behind them.
  for (int i = 0; i < 32; ++i) {
    auto asked = session->Match(KeyBytes(keys));
    ASSERT_TRUE(asked.ok()) << asked.status();
    pending.push_back(*std::move(asked));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  kill(daemon, SIGKILL);
  for (PendingMatch& each : pending) {
    const auto hit = each.Wait(Soon());
    ASSERT_TRUE(hit.ok()) << hit.status();
    ASSERT_EQ(hit->groups.size(), 1u);
    EXPECT_EQ(hit->groups[0].size(), 0u);
  }
}

// More than the daemon lets in at once.
TEST_F(KeeperTest, ManySessionsComeBackTogether) {
  StartWithKeeper("64MiB");
  constexpr size_t kSessions = 150;
  std::vector<std::unique_ptr<Session>> sessions;
  for (size_t i = 0; i < kSessions; ++i) {
    sessions.push_back(OpenWithoutMagazine());
    ASSERT_NE(sessions.back(), nullptr) << i;
  }
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  const std::string log = daemon_->AwaitInLog("session came back", kSessions);
  size_t back = 0;
  for (size_t at = 0; (at = log.find("session came back", at)) != std::string::npos; ++at) ++back;
  EXPECT_EQ(back, kSessions);
  for (const auto& session : sessions) ASSERT_TRUE(session->status().ok()) << session->status();
}

// Answers hellos as the daemon that comes next might.
class NextDaemon {
 public:
  explicit NextDaemon(const std::string& socket) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = socket + kAttachSuffix;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    unlink(path.c_str());
    listener_.Reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_.get(), 8), 0);
  }
  // The hello of the next that connects, which is given the answer.
  v1::AttachHello Answer(const v1::AttachFrame& answer) {
    v1::AttachFrame frame;
    pollfd waiting{listener_.get(), POLLIN, 0};
    EXPECT_EQ(poll(&waiting, 1, 20000), 1) << "nobody says hello";
    if ((waiting.revents & POLLIN) == 0) return {};
    connection_.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_TRUE(ReceiveFrame(connection_.get(), &frame, nullptr).ok());
    EXPECT_TRUE(SendFrame(connection_.get(), answer).ok());
    return frame.hello();
  }

 private:
  UniqueFd listener_, connection_;
};

v1::AttachFrame Closed(const std::string& reason, bool final) {
  v1::AttachFrame frame;
  frame.mutable_closed()->set_reason(reason);
  frame.mutable_closed()->set_final(final);
  return frame;
}

TEST_F(KeeperTest, ASessionThatIsTurnedAwayComesAgainUnlessForGood) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  NextDaemon next(daemon_->socket());
  kill(daemon, SIGKILL);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(next.Answer(Closed("displaced by a newer connection", false)).member_token().size(), 16u);
  }
  EXPECT_TRUE(session->status().ok()) << session->status();
  EXPECT_EQ(next.Answer(Closed("nobody knows it", true)).member_token().size(), 16u);
  EXPECT_EQ(session->LeaseWithin(session->most_leased_blocks(), Soon()).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(session->status().message()), HasSubstr("did not come back: nobody knows it"));
}

// An older one does not look at member tokens.
TEST_F(KeeperTest, ADaemonThatTakesASessionForANewcomerEndsIt) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  NextDaemon next(daemon_->socket());
  kill(daemon, SIGKILL);
  v1::AttachFrame welcome;
  welcome.mutable_welcome()->set_attach_token(std::string(32, 't'));
  next.Answer(welcome);
  EXPECT_EQ(session->LeaseWithin(session->most_leased_blocks(), Soon()).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(session->status().message()), HasSubstr("did not come back"));
}

TEST_F(KeeperTest, AMemberThatTheDaemonDoesNotKnowIsRefusedForGood) {
  StartWithKeeper();
  const auto answer = [this](const v1::AttachFrame& hello) {
    v1::AttachFrame frame;
    const auto socket = ConnectAttachSocket(daemon_->socket() + kAttachSuffix);
    EXPECT_TRUE(socket.ok() && SendFrame(socket->get(), hello).ok() &&
                ReceiveFrame(socket->get(), &frame, nullptr).ok());
    return frame;
  };
  v1::AttachFrame hello;
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_member_token(std::string(16, 'm'));
  EXPECT_TRUE(answer(hello).closed().final());
  hello.mutable_hello()->set_protocol(2);
  EXPECT_THAT(answer(hello).closed().reason(), HasSubstr("speaks 1"));
  EXPECT_FALSE(answer(hello).closed().final());
}

TEST_F(KeeperTest, BlocksOfAnOldSessionComeBackWhenItsProcessEnds) {
  StartWithKeeper();
  PeerProcess peer(daemon_->socket());
  ASSERT_EQ(peer.Ask("lease 5"), "ok");
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  v1::StateCounts counts = Counts();
  EXPECT_GE(counts.leased(), 5u) << counts.ShortDebugString();
  // A second daemon in a row knows of it, too.
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  counts = Counts();
  EXPECT_GE(counts.leased(), 5u) << counts.ShortDebugString();
  peer.End(SIGKILL);
  counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(KeeperTest, WhoJoinsBeforeAnotherMemberIsBackIsLetIn) {
  StartWithKeeper();
  PeerProcess peer(daemon_->socket());
  const std::string invitation = absl::HexStringToBytes(peer.Ask("invite"));
  peer.Signal(SIGSTOP);
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  SessionOptions options = OptionsFor(daemon_->socket());
  options.role.set_scheduler(true);
  const auto joined = Session::Join(options, invitation);
  EXPECT_TRUE(joined.ok()) << joined.status();
  peer.Signal(SIGCONT);
  EXPECT_EQ(peer.Ask("lease 1"), "ok") << daemon_->Log();
}

TEST_F(KeeperTest, BlocksOfAStoppedMemberStayIntactWhileOthersEvictAllThatIsCached) {
  StartWithKeeper();
  PeerProcess peer(daemon_->socket());
  ASSERT_EQ(peer.Ask("share 1 8"), "ok");
  ASSERT_EQ(peer.Ask("match 1 8"), "8 8");
  auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> cached = KeysOf(*session, 2, 40);
  Share(session.get(), cached);
  peer.Signal(SIGSTOP);
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  // As many as there are, though the space may have to grow first, for which it waits for the stopped one.
  std::vector<Blocks> all;
  bool short_of = false;
  for (const Deadline deadline = Soon(); !short_of || Counts().cached() > 0;) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << Counts().ShortDebugString();
    const Deadline shortly = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    auto more = session->LeaseWithin(1, all.empty() ? deadline : shortly);
    short_of = !more.ok();
    if (short_of) continue;
    std::memset(session->data((*more)[0]), 0xff, kBlockBytes);
    all.push_back(*std::move(more));
  }
  EXPECT_GT(all.size(), cached.size());
  // Until it is back it finds nothing; then it finds what it has held all the time.
  peer.Signal(SIGCONT);
  std::string found;
  for (const Deadline deadline = Soon(); (found = peer.Ask("match 1 8")) == "0 0";)
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << daemon_->Log();
  EXPECT_EQ(found, "8 8") << daemon_->Log();
  EXPECT_TRUE(session->status().ok()) << session->status();
}

TEST_F(KeeperTest, ASessionOfAProgramInCLivesThroughTheDaemon) {
  StartWithKeeper();
  // The next daemon has the session back before its file is there.
  const std::string kill = absl::StrCat(
      "for i in $(seq 6000); do kill -9 $(sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p' ", daemon_->directory(),
      "/kvpoold.json 2>/dev/null) 2>/dev/null && exit 0; sleep 0.01; done; exit 1");
  const ProgramEnd end = RunProgram({KVPOOL_C_TEST, daemon_->socket(), kill});
  EXPECT_EQ(end.exit_code, 0) << end.output << daemon_->Log();
  EXPECT_EQ(end.output, "ok\n");
}

TEST_F(KeeperTest, EndsWithTheDaemonThatIsToldToEnd) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
  EXPECT_NE(kill(daemon, 0), 0);
}

TEST_F(KeeperTest, SighupIsForTheDaemon) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  ASSERT_EQ(kill(daemon_->pid(), SIGHUP), 0);
  EXPECT_THAT(daemon_->AwaitInLog("SIGHUP"), HasSubstr("SIGHUP, and no --access to read again"));
  EXPECT_NE(Open(), nullptr) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), daemon);
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
}

TEST_F(KeeperTest, ADaemonGoesOnWithoutItsKeeper) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 40);
  Share(session.get(), keys);
  const auto hit = Match(session.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->groups[0].size(), keys.size());
  // An opening gives the keeper something, or tries.
  auto other = Open();
  EXPECT_NE(other, nullptr);
  EXPECT_THAT(daemon_->AwaitInLog("keeper lost"), HasSubstr("keeper lost"));
  kill(daemon, SIGKILL);
}

// ------------------------------------------------------------------------------- between two daemons

// The daemon is gone, and its keeper, which is stopped, has not started the next one.
void KeeperTest::MakeGap() {
  daemon_->Signal(SIGSTOP);
  const pid_t daemon = PidIn(daemon_->directory());
  const UniqueFd death(static_cast<int>(syscall(SYS_pidfd_open, daemon, 0)));
  ASSERT_EQ(kill(daemon, SIGKILL), 0);
  pollfd waiting{death.get(), POLLIN, 0};
  ASSERT_EQ(poll(&waiting, 1, 60'000), 1);
}

uint64_t InodeOf(const std::string& path) {
  struct stat facts;
  return lstat(path.c_str(), &facts) == 0 ? facts.st_ino : 0;
}

TEST_F(KeeperTest, BetweenTwoDaemonsNobodyTakesTheirPlace) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  MakeGap();
  const TemporaryDirectory elsewhere;
  const auto start = [&](const std::string& socket, const std::string& state_dir) {
    return RunProgram({DaemonProcess::Program(), "--device=host", "--capacity=32MiB", "--socket=" + socket,
                       "--state-dir=" + state_dir, "--metrics-listen="});
  };
  const ProgramEnd same_socket = start(daemon_->socket(), elsewhere.path());
  EXPECT_EQ(same_socket.exit_code, 1);
  EXPECT_THAT(same_socket.output, HasSubstr(daemon_->socket() + ".lock is locked by another kvpoold"));
  const ProgramEnd same_state = start(elsewhere.path() + "/kvpoold.sock", daemon_->directory());
  EXPECT_EQ(same_state.exit_code, 1);
  EXPECT_THAT(same_state.output,
              HasSubstr(daemon_->directory() + "/kvpoold.lock is locked by another kvpoold"));
  daemon_->Signal(SIGCONT);
  auto second = Open();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  const auto hit = Match(second.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->groups[0].size(), 8u) << daemon_->Log();
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
  for (const std::string& path : {daemon_->socket(), daemon_->attach_socket(), daemon_->socket() + ".lock",
                                  daemon_->directory() + "/kvpoold.lock"}) {
    EXPECT_EQ(InodeOf(path), 0u) << path << " is left by an end in good order";
  }
}

TEST_F(KeeperTest, WhoConnectsBetweenTwoDaemonsIsServedByTheNext) {
  StartWithKeeper();
  const uint64_t socket = InodeOf(daemon_->socket()), attach_socket = InodeOf(daemon_->attach_socket());
  MakeGap();
  auto attached = ConnectAttachSocket(daemon_->attach_socket());
  ASSERT_TRUE(attached.ok()) << attached.status();
  v1::AttachFrame frame;
  frame.mutable_hello()->set_protocol(1);
  frame.mutable_hello()->set_client_name("early");
  ASSERT_TRUE(SendFrame(attached->get(), frame).ok());
  const UniqueFd stream = ConnectStream(daemon_->socket());
  ASSERT_TRUE(stream.valid());
  // The preface of HTTP/2, and settings that have nothing in them.
  const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";
  ASSERT_EQ(send(stream.get(), preface, sizeof(preface), MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(preface)));
  daemon_->Signal(SIGCONT);
  const auto outcome = ReceiveFrame(attached->get(), &frame, nullptr);
  ASSERT_TRUE(outcome.ok()) << outcome.status() << daemon_->Log();
  EXPECT_TRUE(frame.has_welcome()) << frame.ShortDebugString();
  char answer[9];
  EXPECT_EQ(recv(stream.get(), answer, sizeof(answer), MSG_WAITALL), 9) << daemon_->Log();
  EXPECT_EQ(answer[3], 4) << "these are no settings";
  EXPECT_EQ(InodeOf(daemon_->socket()), socket);
  EXPECT_EQ(InodeOf(daemon_->attach_socket()), attach_socket);
}

TEST_F(KeeperTest, ASocketThatSomebodyRemovedIsBoundAnew) {
  StartWithKeeper();
  const pid_t killed = PidIn(daemon_->directory());
  MakeGap();
  const auto lost = ConnectAttachSocket(daemon_->attach_socket());
  ASSERT_TRUE(lost.ok()) << lost.status();
  unlink(daemon_->socket().c_str());
  unlink(daemon_->attach_socket().c_str());
  daemon_->Signal(SIGCONT);
  // Who waits at the old one does not wait for ever.
  v1::AttachFrame frame;
  const auto outcome = ReceiveFrame(lost->get(), &frame, nullptr);
  EXPECT_TRUE(!outcome.ok() || *outcome == ReceiveOutcome::kHangup);
  ASSERT_NE(AwaitNext(*daemon_, killed), 0) << daemon_->Log();
  EXPECT_NE(Open(), nullptr) << daemon_->Log();
}

// Where the state directory can't be written and the clock is behind.
TEST_F(KeeperTest, TheEpochGrowsByWhatTheKeeperKnows) {
  const TemporaryDirectory directory;
  const uint64_t ahead = uint64_t{1} << 60;
  std::ofstream(directory.path() + "/epoch") << ahead << "\n";
  auto daemon = DaemonProcess::Start(
      {.directory = directory.path(), .flags = {"--keeper=on", "--keeper-deaths=1000000"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
  unlink((directory.path() + "/epoch").c_str());
  ASSERT_EQ(mkdir((directory.path() + "/epoch.new").c_str(), 0700), 0);
  for (uint64_t start = 2; start < 5; ++start) {
    ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
    const std::string epoch = absl::StrCat("epoch=", ahead + start, " ");
    EXPECT_THAT(daemon_->AwaitInLog(epoch), HasSubstr(epoch));
  }
  TearDown();
  daemon_ = nullptr;
}

TEST_F(KeeperTest, GivesUpOnADaemonThatCanNotStart) {
  StartWithKeeper();
  const std::string away = daemon_->directory() + ".away";
  const std::string log = daemon_->directory() + "/log";
  MakeGap();
  const auto waits = ConnectAttachSocket(daemon_->attach_socket());
  ASSERT_TRUE(waits.ok()) << waits.status();
  ASSERT_EQ(rename(daemon_->directory().c_str(), away.c_str()), 0);
  daemon_->Signal(SIGCONT);
  const int status = daemon_->End(0);  // It ends by itself.
  v1::AttachFrame frame;
  const auto outcome = ReceiveFrame(waits->get(), &frame, nullptr);
  EXPECT_TRUE(!outcome.ok() || *outcome == ReceiveOutcome::kHangup) << "who connected in between waits still";
  ASSERT_EQ(rename(away.c_str(), daemon_->directory().c_str()), 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_THAT(daemon_->Log(), HasSubstr("keeper gives up"));
  EXPECT_THAT(daemon_->Log(), HasSubstr("failed_starts=5"));
}

TEST_F(KeeperTest, GivesUpOnADaemonThatDiesTooOftenHoweverFarItGot) {
  StartWithKeeper("32MiB", {"--keeper-deaths=3"});
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  kill(PidIn(daemon_->directory()), SIGKILL);
  const int status = daemon_->End(0);  // It ends by itself.
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_THAT(daemon_->Log(), HasSubstr("keeper gives up"));
}

// A keeper that is no child of DaemonProcess: its stderr and its process group are the test's to choose.
class BareKeeper {
 public:
  // `log` is its stderr.
  explicit BareKeeper(int log, const std::string& grace = "200ms") {
    const std::string socket = "--socket=" + directory_.path() + "/kvpoold.sock";
    const std::string state = "--state-dir=" + directory_.path();
    const std::string ended = "--shutdown-grace=" + grace;
    const std::string program = DaemonProcess::Program();
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      dup2(log, STDERR_FILENO);
      execl(program.c_str(), program.c_str(), "--keeper=on", "--device=host", "--capacity=32MiB",
            "--slab-bytes=4MiB", "--metrics-listen=", socket.c_str(), state.c_str(), ended.c_str(), nullptr);
      _exit(127);
    }
  }
  ~BareKeeper() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    const pid_t daemon = Daemon(0);
    if (daemon > 0) kill(daemon, SIGKILL);
  }
  const std::string& directory() const { return directory_.path(); }
  pid_t pid() const { return pid_; }
  // Waits for a daemon that is not `before`; 0: none came.
  pid_t AwaitDaemon(pid_t before) const {
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      const pid_t daemon = Daemon(before);
      if (daemon > 0) return daemon;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
  }

 private:
  pid_t Daemon(pid_t before) const {
    const pid_t daemon = PidIn(directory_.path());
    return daemon == before ? 0 : daemon;
  }
  TemporaryDirectory directory_;
  pid_t pid_ = 0;
};

TEST_F(KeeperTest, ALogThatNobodyReadsDoesNotStopIt) {
  int log[2];
  ASSERT_EQ(pipe(log), 0);
  const int flags = fcntl(log[1], F_GETFL);
  ASSERT_EQ(fcntl(log[1], F_SETFL, flags | O_NONBLOCK), 0);
  while (write(log[1], "filler\n", 7) > 0) {
  }
  while (write(log[1], "\n", 1) > 0) {
  }
  ASSERT_EQ(fcntl(log[1], F_SETFL, flags), 0);
  const BareKeeper keeper(log[1]);
  const pid_t first = keeper.AwaitDaemon(0);
  ASSERT_NE(first, 0);
  ASSERT_EQ(kill(first, SIGKILL), 0);
  EXPECT_NE(keeper.AwaitDaemon(first), 0);
  close(log[0]);
  close(log[1]);
}

TEST_F(KeeperTest, ASignalToItsGroupComesToTheDaemonOnce) {
  int log[2];
  ASSERT_EQ(pipe(log), 0);
  const BareKeeper keeper(log[1], "1h");
  const pid_t daemon = keeper.AwaitDaemon(0);
  ASSERT_NE(daemon, 0);
  const auto session = Open(OptionsFor(keeper.directory() + "/kvpoold.sock"));
  ASSERT_NE(session, nullptr);
  // A second signal would end the grace, and the session with it.
  ASSERT_EQ(kill(-keeper.pid(), SIGINT), 0);
  for (const Deadline deadline = Soon(); !session->draining();) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_NE(getpgid(daemon), keeper.pid());
  Share(session.get(), KeysOf(*session, 1, 4));
  EXPECT_TRUE(session->status().ok()) << session->status();
  close(log[0]);
  close(log[1]);
}

TEST_F(KeeperTest, ADaemonThatCanNotStartAtAllIsSaidAtOnce) {
  const ProgramEnd end = RunProgram({DaemonProcess::Program(), "--keeper=on", "--device=host", "--capacity=1",
                                     "--socket=/tmp/kvpool-no-such-directory/kvpoold.sock"});
  EXPECT_EQ(end.exit_code, 2) << end.output;
  EXPECT_THAT(end.output, Not(HasSubstr("gives up")));
}

// ------------------------------------------------------------------------------- a keeper that is killed

// A keeper in the place of one that started `daemon`, or beside it; its log is the daemon's.
class AnotherKeeper {
 public:
  explicit AnotherKeeper(const std::string& directory, std::vector<std::string> flags = {"--keeper=on"}) {
    flags.insert(flags.begin(),
                 {DaemonProcess::Program(), "--device=host", "--capacity=32MiB", "--slab-bytes=4MiB",
                  "--socket=" + directory + "/kvpoold.sock", "--state-dir=" + directory,
                  "--metrics-listen=", "--shutdown-grace=200ms", "--keeper-deaths=1000000"});
    const std::string log = directory + "/log";
    std::vector<char*> pointers;
    for (std::string& flag : flags) pointers.push_back(flag.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
      execv(pointers[0], pointers.data());
      _exit(127);
    }
  }
  ~AnotherKeeper() {
    if (pid_ <= 0) return;
    StopProcess(pid_);
    std::ifstream children(absl::StrCat("/proc/", pid_, "/task/", pid_, "/children"));
    for (pid_t child; children >> child;) kill(child, SIGKILL);
    End(SIGKILL);
  }
  pid_t pid() const { return pid_; }
  // Sends a signal, 0 for none, and answers the exit status; -1: a signal ended it.
  int End(int signal) {
    int status = 0;
    kill(pid_, signal);
    waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = 0;
};

TEST_F(KeeperTest, AKeeperThatIsKilledCostsNothing) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> before = KeysOf(*session, 1, 8), alone = KeysOf(*session, 2, 8),
                               marks = KeysOf(*session, 3, 4);
  Share(session.get(), before);
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  for (size_t i = 0; i < 4; ++i) Stamp(session->data((*mine)[i]), marks[i]);
  EXPECT_EQ(daemon_->Metric("kvpool_keeper_up"), 1);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  Share(session.get(), alone);
  auto other = Open();
  ASSERT_NE(other, nullptr);
  EXPECT_THAT(daemon_->AwaitInLog("keeper lost"), HasSubstr("keeper lost"));
  EXPECT_EQ(daemon_->Metric("kvpool_keeper_up"), 0);
  AnotherKeeper keeper(daemon_->directory());
  EXPECT_THAT(daemon_->AwaitInLog("keeper found"), HasSubstr("keeper found"));
  EXPECT_EQ(daemon_->Metric("kvpool_keeper_up"), 1);
  EXPECT_EQ(PidIn(daemon_->directory()), daemon);
  for (int kills = 0; kills < 3; ++kills) {
    ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
    for (Session* each : {session.get(), other.get()}) {
      for (const auto& keys : {before, alone}) {
        size_t found = 0;
        for (const Deadline deadline = Soon(); found != 8 && std::chrono::steady_clock::now() < deadline;) {
          const auto hit = Match(each, keys);
          ASSERT_TRUE(hit.ok()) << hit.status() << daemon_->Log();
          found = hit->groups[0].size();
          for (size_t i = 0; i < found; ++i)
            EXPECT_TRUE(HasStamp(each->data(hit->groups[0][i]), keys[i])) << i;
        }
        EXPECT_EQ(found, 8u) << daemon_->Log();
      }
    }
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(session->data((*mine)[i]), marks[i])) << i;
  EXPECT_TRUE(session->status().ok()) << session->status();
  EXPECT_TRUE(other->status().ok()) << other->status();
  EXPECT_EQ(keeper.End(SIGTERM), 0) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), 0) << "the daemon serves still";
}

TEST_F(KeeperTest, AKeeperTellsADaemonThatItHasNotStartedToEnd) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  AnotherKeeper keeper(daemon_->directory());
  daemon_->AwaitInLog("keeper found");
  ASSERT_EQ(kill(keeper.pid(), SIGHUP), 0);
  EXPECT_THAT(daemon_->AwaitInLog("SIGHUP"), HasSubstr("SIGHUP, and no --access to read again"));
  EXPECT_EQ(PidIn(daemon_->directory()), daemon);
  EXPECT_EQ(keeper.End(SIGTERM), 0) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), 0) << "the daemon serves still";
}

TEST_F(KeeperTest, AKeeperThatIsToldToEndWhileItWaitsEndsTheDaemonThatComes) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  StopProcess(daemon);
  daemon_->Kill();
  AnotherKeeper keeper(daemon_->directory());
  daemon_->AwaitInLog("waiting for the daemon that serves");
  ASSERT_EQ(kill(keeper.pid(), SIGTERM), 0);
  ASSERT_EQ(kill(daemon, SIGCONT), 0);
  EXPECT_EQ(keeper.End(0), 0) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), 0) << "the daemon serves still";
}

TEST_F(KeeperTest, ADaemonWhoseSocketWasRemovedIsWaitedForByItsLocks) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  ASSERT_EQ(unlink(daemon_->socket().c_str()), 0);
  ASSERT_EQ(unlink((daemon_->socket() + ".lock").c_str()), 0);
  AnotherKeeper keeper(daemon_->directory());
  EXPECT_THAT(daemon_->AwaitInLog("keeper found"), HasSubstr("keeper found"));
  EXPECT_EQ(PidIn(daemon_->directory()), daemon);
}

TEST_F(KeeperTest, ADaemonThatHangsInItsEndIsKilled) {
  StartWithKeeper("32MiB", {"--tier-flush=0s"});
  const pid_t daemon = PidIn(daemon_->directory());
  StopProcess(daemon);
  EXPECT_EQ(daemon_->Stop(), 128 + SIGKILL);
  EXPECT_THAT(daemon_->Log(), HasSubstr("daemon killed"));
  EXPECT_NE(kill(daemon, 0), 0);
}

// How many sockets have this path: who listens there, and those who wait to be heard.
size_t SocketsAt(const std::string& path) {
  std::ifstream table("/proc/net/unix");
  size_t sockets = 0;
  for (std::string line; std::getline(table, line);) sockets += line.ends_with(" " + path) ? 1 : 0;
  return sockets;
}

TEST_F(KeeperTest, ADaemonThatComesBackToItsKeeperHasServed) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Signal(SIGSTOP);
  // The keeper does not answer for as long as a daemon waits.
  ASSERT_NE(Open(), nullptr) << daemon_->Log();
  EXPECT_THAT(daemon_->AwaitInLog("keeper lost"), HasSubstr("keeper lost"));
  for (const Deadline deadline = Soon(); SocketsAt(daemon_->directory() + "/keeper.sock") < 2;)
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  StopProcess(daemon);
  daemon_->Signal(SIGCONT);
  EXPECT_THAT(daemon_->AwaitInLog("daemon came"), HasSubstr("daemon came"));
  ASSERT_EQ(kill(daemon, SIGKILL), 0);
  EXPECT_NE(AwaitNext(*daemon_, daemon), 0) << daemon_->Log();
}

TEST_F(KeeperTest, AFileThatIsNoSocketIsNotReplacedByOne) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/keeper.sock";
  std::ofstream(path) << "mine";
  // Its daemon has no directory to serve in, so that the keeper ends in any case.
  AnotherKeeper keeper(directory.path(),
                       {"--keeper=on", "--socket=" + directory.path() + "/none/kvpoold.sock"});
  EXPECT_EQ(keeper.End(0), 1);
  struct stat facts;
  ASSERT_EQ(stat(path.c_str(), &facts), 0);
  EXPECT_TRUE(S_ISREG(facts.st_mode));
}

TEST_F(KeeperTest, AKeeperEndsWithADaemonThatItHasNotStarted) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  AnotherKeeper keeper(daemon_->directory());
  daemon_->AwaitInLog("keeper found");
  ASSERT_EQ(kill(daemon, SIGTERM), 0);
  EXPECT_EQ(keeper.End(0), 0) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), 0);
}

TEST_F(KeeperTest, OneKeeperAtATimeHasThePlace) {
  StartWithKeeper();
  AnotherKeeper beside(daemon_->directory());
  EXPECT_EQ(beside.End(0), 1);
  EXPECT_THAT(daemon_->AwaitInLog("keeper not started"),
              HasSubstr("keeper.sock.lock is locked by another kvpoold"));
  daemon_->Kill();
  AnotherKeeper one(daemon_->directory()), two(daemon_->directory());
  daemon_->AwaitInLog("keeper found");
  daemon_->AwaitInLog("keeper not started", 2);
  EXPECT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
}

UniqueFd CallKeeper(const std::string& directory) {
  auto socket = ConnectAttachSocket(directory + "/keeper.sock");
  EXPECT_TRUE(socket.ok()) << socket.status();
  return socket.ok() ? *std::move(socket) : UniqueFd();
}

TEST_F(KeeperTest, StrangersAtItsSocketHurtNobody) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  std::vector<UniqueFd> silent;
  for (size_t i = 0; i < 3 * kMostCallers; ++i) silent.push_back(CallKeeper(daemon_->directory()));
  // Only so many are heard.
  char byte;
  for (size_t i = 0; i < 2 * kMostCallers; ++i) EXPECT_EQ(recv(silent[i].get(), &byte, 1, 0), 0) << i;
  const UniqueFd garbage = CallKeeper(daemon_->directory());
  ASSERT_EQ(send(garbage.get(), "hello", 5, MSG_NOSIGNAL), 5);
  EXPECT_LE(recv(garbage.get(), &byte, 1, 0), 0);
  const UniqueFd newer = CallKeeper(daemon_->directory());
  KeeperFrame frame;
  frame.version = kKeeperVersion + 1;
  ASSERT_TRUE(SendKeeperFrame(newer.get(), frame).ok());
  UniqueFd fd;
  ASSERT_TRUE(ReceiveKeeperFrame(newer.get(), &frame, &fd).ok());
  EXPECT_EQ(frame.verb, KeeperVerb::kRefused);
  const std::string versions = absl::StrCat("its frames have version ", kKeeperVersion + 1);
  EXPECT_THAT(std::string(frame.text()), HasSubstr(versions));
  EXPECT_THAT(daemon_->AwaitInLog(versions), HasSubstr(versions));
  // What it has is shown to nobody while its daemon lives.
  const UniqueFd rival = CallKeeper(daemon_->directory());
  ASSERT_TRUE(SendKeeperFrame(rival.get(), KeeperFrame()).ok());
  ASSERT_TRUE(ReceiveKeeperFrame(rival.get(), &frame, &fd).ok());
  EXPECT_EQ(frame.verb, KeeperVerb::kRefused);
  EXPECT_THAT(std::string(frame.text()), HasSubstr("it serves another daemon"));
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  auto second = Open();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  const auto hit = Match(second.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->groups[0].size(), 8u) << daemon_->Log();
}

TEST_F(KeeperTest, OtherUsersAreNotHeardByIt) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  StartWithKeeper();
  const std::string path = daemon_->directory() + "/keeper.sock";
  struct stat facts;
  ASSERT_EQ(stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  // As if the mode did not hold.
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(chmod(daemon_->directory().c_str(), 0755), 0);
  const pid_t other = fork();
  if (other == 0) {
    if (setuid(54321) != 0) _exit(1);
    const auto socket = ConnectAttachSocket(path);
    if (!socket.ok()) _exit(2);
    SendKeeperFrame(socket->get(), KeeperFrame()).IgnoreError();
    char byte;
    _exit(recv(socket->get(), &byte, 1, 0) > 0 ? 3 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(daemon_->AwaitInLog("caller refused"), HasSubstr("uid=54321"));
}

// -------------------------------------------------------------------------------- a keeper that only keeps

class KeeperOnlyTest : public KeeperTest {
 protected:
  std::vector<std::string> KeeperFlags() const {
    return {"--keeper-only", "--keeper-socket=" + directory_.path() + "/keeper.sock"};
  }
  void AwaitKeeper() const {
    for (const Deadline deadline = Soon(); !ConnectAttachSocket(directory_.path() + "/keeper.sock").ok();) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    }
  }
  // The next daemon, which somebody starts.
  void StartNext() {
    daemon_ = nullptr;
    auto daemon = DaemonProcess::Start(
        {.directory = directory_.path(), .flags = {"--keeper=socket:" + directory_.path() + "/keeper.sock"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  size_t Find(Session* session, const std::vector<PrefixKey>& keys) {
    size_t found = 0;
    for (const Deadline deadline = Soon(); found == 0 && std::chrono::steady_clock::now() < deadline;) {
      const auto hit = Match(session, keys);
      if (!hit.ok()) return 0;
      found = hit->groups[0].size();
      for (size_t i = 0; i < found; ++i)
        EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
    }
    return found;
  }
  // Of the daemon's process, which is the test's child.
  void TearDown() override { daemon_ = nullptr; }

  const TemporaryDirectory directory_;
};

TEST_F(KeeperOnlyTest, WhoeverComesNextGoesOn) {
  AnotherKeeper keeper(directory_.path(), KeeperFlags());
  AwaitKeeper();
  StartNext();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  for (int kills = 0; kills < 3; ++kills) {
    daemon_->Kill();
    StartNext();
    EXPECT_EQ(Find(session.get(), keys), 8u) << daemon_->Log();
    EXPECT_TRUE(session->status().ok()) << session->status();
  }
  // One that is told to end is followed, too: nobody is told, and what is held stays its holder's.
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  const std::vector<PrefixKey> marks = KeysOf(*session, 2, 4);
  for (size_t i = 0; i < 4; ++i) Stamp(session->data((*mine)[i]), marks[i]);
  for (int ends = 0; ends < 3; ++ends) {
    EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
    StartNext();
    EXPECT_EQ(Find(session.get(), keys), 8u) << daemon_->Log();
    ASSERT_TRUE(session->status().ok()) << session->status();
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(session->data((*mine)[i]), marks[i])) << i;
  auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_THAT(std::string((*client)->Upgrade({}).status().message()), HasSubstr("keeper starts none"));
}

TEST_F(KeeperOnlyTest, MayComeLateAndBeKilled) {
  StartNext();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  {
    AnotherKeeper keeper(directory_.path(), KeeperFlags());
    daemon_->AwaitInLog("keeper found");
  }
  AnotherKeeper keeper(directory_.path(), KeeperFlags());
  daemon_->AwaitInLog("keeper found", 2);
  daemon_->Kill();
  StartNext();
  EXPECT_EQ(Find(session.get(), keys), 8u) << daemon_->Log();
  EXPECT_TRUE(session->status().ok()) << session->status();
  EXPECT_EQ(keeper.End(SIGTERM), 0);
  EXPECT_EQ(Find(session.get(), keys), 8u) << "the daemon ended with its keeper";
}

TEST_F(KeeperOnlyTest, SaysNoSignalThatNobodySaw) {
  AnotherKeeper keeper(directory_.path(), KeeperFlags());
  AwaitKeeper();
  StartNext();
  daemon_->End(SIGABRT);
  const std::string log = daemon_->AwaitInLog("daemon ended");
  EXPECT_THAT(log, HasSubstr("seen=false"));
  EXPECT_THAT(log, Not(HasSubstr("signal=9")));
}

TEST_F(KeeperOnlyTest, ServesOneDaemonAtATime) {
  AnotherKeeper keeper(directory_.path(), KeeperFlags());
  AwaitKeeper();
  StartNext();
  const TemporaryDirectory elsewhere;
  const ProgramEnd other =
      RunProgram({DaemonProcess::Program(), "--device=host", "--capacity=32MiB",
                  "--socket=" + elsewhere.path() + "/kvpoold.sock",
                  "--metrics-listen=", "--keeper=socket:" + directory_.path() + "/keeper.sock"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.output, HasSubstr("it serves another daemon, pid "));
}

// ------------------------------------------------------------------------------------------------- holes

// Slabs go to another model and come back while daemons are killed: at any step of that what is held and what is cached is where
// it was, and no block has two owners.
TEST_F(KeeperTest, KillsWhileSlabsGoAndComeBackLeaveEachBlockItsOwner) {
  const char* const asked = std::getenv("KVPOOL_KILLS");
  const int kills = asked == nullptr ? 12 : atoi(asked);
  StartWithKeeper("32MiB", {"--policy=lru"});
  SessionOptions options = OptionsFor(daemon_->socket());
  options.give_back = GiveBack::kAnyTime;
  options.magazine_blocks = 0;
  options.fingerprint.set_digest("a");
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  constexpr uint32_t kChains = 90, kBlocks = 5;
  const auto share = [&](uint32_t chain) { Share(a.get(), KeysOf(*a, chain + 1, kBlocks)); };
  const auto found = [&](uint32_t chain) {
    const std::vector<PrefixKey> keys = KeysOf(*a, chain + 1, kBlocks);
    const auto hit = Match(a.get(), keys);
    EXPECT_TRUE(hit.ok()) << hit.status();
    if (!hit.ok()) return size_t{0};
    for (size_t i = 0; i < hit->groups[0].size(); ++i) {
      const BlockRef block = hit->groups[0][i];
      EXPECT_TRUE(a->is_mapped(block.id)) << Index(block.id);
      EXPECT_TRUE(HasStamp(a->data(block), keys[i])) << "chain " << chain << " block " << i;
    }
    return hit->groups[0].size();
  };
  for (uint32_t chain = 0; chain < kChains; ++chain) share(chain);
  // The highest of all that can be leased now.
  auto all = a->LeaseWithin(7 * kSlabBlocks, Soon());
  ASSERT_TRUE(all.ok()) << all.status();
  std::vector<BlockRef> others(all->refs().begin(), all->refs().end());
  std::sort(others.begin(), others.end(), [](BlockRef x, BlockRef y) { return Index(x.id) < Index(y.id); });
  const BlockRef held = others.back();
  others.pop_back();
  all->Detach();
  a->Release(others);
  const std::vector<PrefixKey> mark = KeysOf(*a, 7777, 1);
  Stamp(a->data(held), mark[0]);

  std::mt19937_64 random(7);
  int opened = 0, holes = 0;
  for (int i = 0; i < kills; ++i) {
    SCOPED_TRACE(i);
    std::thread other([&] {
      SessionOptions of_b = options;
      of_b.client_name = "b";
      of_b.fingerprint.set_digest("b");
      of_b.guaranteed_blocks = 4 * kSlabBlocks;
      const auto b = Session::Open(of_b);
      if (!b.ok()) return;  // The daemon is gone, or will be.
      ++opened;
      auto blocks =
          (*b)->LeaseWithin(4 * kSlabBlocks, std::chrono::steady_clock::now() + std::chrono::seconds(1));
      if (!blocks.ok()) return;
      const std::vector<PrefixKey> keys = KeysOf(**b, 5555, blocks->size());
      for (size_t k = 0; k < keys.size(); ++k) Stamp((*b)->data((*blocks)[k]), keys[k]);
      for (size_t k = 0; k < keys.size(); ++k) EXPECT_TRUE(HasStamp((*b)->data((*blocks)[k]), keys[k])) << k;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000));
    const pid_t next = KillDaemon(*daemon_);
    other.join();
    ASSERT_NE(next, 0) << daemon_->Log();
    holes += a->mapped_ranges().size() > 1;
    ASSERT_TRUE(a->status().ok()) << a->status();
    EXPECT_TRUE(a->is_mapped(held.id));
    EXPECT_TRUE(HasStamp(a->data(held), mark[0]));
    auto more = a->LeaseWithin(8, Soon());
    ASSERT_TRUE(more.ok()) << more.status() << daemon_->Log();
    for (const BlockRef block : more->refs()) {
      EXPECT_NE(Index(block.id), Index(held.id));
      EXPECT_TRUE(a->is_mapped(block.id));
    }
    more->Release();
    for (uint32_t chain = 0; chain < kChains; ++chain) {
      if (found(chain) < kBlocks && chain % 2 == 0) share(chain);
    }
    EXPECT_TRUE(HasStamp(a->data(held), mark[0]));
  }
  a->Release({&held, 1});
  EXPECT_TRUE(a->Close(Soon()).ok());
  std::printf("%d kills, %d openings of the other model, %d times a hole\n", kills, opened, holes);
  EXPECT_GT(opened, 0);
  EXPECT_GT(holes, 0);
}

// ------------------------------------------------------------------------------------------ seeded kills

constexpr uint64_t kSmallBlock = 4096;
constexpr uint32_t kMostBlocks = 1 << 16;
constexpr uint32_t kWriters = 3;
constexpr uint32_t kBlocksPerChain = 4;
constexpr uint32_t kMostChains = 1500;

// What all writers and the test see. A block is its owner's from the moment in which a lease brings it to that in which it is
// given back; for ever, if the daemon is killed in between, as nobody knows what it has heard.
struct Oracle {
  std::atomic<pid_t> owners[kMostBlocks];
  std::atomic<uint32_t> double_owners, wrong_stamps, missing;
  std::atomic<uint32_t> sessions;  // Those that were opened.
  // Chains that were sealed, and of which the writer was told so: the seed of their tokens.
  std::atomic<uint32_t> chains[kWriters];
  std::atomic<uint32_t> rounds;  // Writers have finished so many, together.
  std::atomic<bool> stop;
};

SessionOptions WriterOptions(const std::string& socket) {
  SessionOptions options = OptionsFor(socket);
  options.layout = OpaqueLayout({.block_bytes = kSmallBlock, .tokens_per_block = kTokensPerBlock});
  options.fingerprint.set_digest("keeper_test");
  options.magazine_blocks = 8;
  return options;
}

void Fill(std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kSmallBlock; at += key.size()) std::memcpy(block + at, key.data(), key.size());
}
bool Filled(const std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kSmallBlock; at += key.size()) {
    if (std::memcmp(block + at, key.data(), key.size()) != 0) return false;
  }
  return true;
}

class Writer {
 public:
  Writer(std::string socket, uint32_t index, Oracle* oracle)
      : socket_(std::move(socket)), index_(index), oracle_(*oracle), random_(index + 1) {}

  void Run() {
    while (!oracle_.stop) {
      auto session = Session::Open(WriterOptions(socket_));
      if (!session.ok()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      ++oracle_.sessions;
      while (!oracle_.stop && Round(session->get())) {
      }
    }
  }

 private:
  uint32_t SeedOf(uint32_t chain) const { return 1 + index_ + kWriters * chain; }
  std::vector<PrefixKey> KeysOf(const Session& session, uint32_t chain) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(SeedOf(chain), kBlocksPerChain), kTokensPerBlock);
  }
  // False: the daemon is gone.
  bool Round(Session* session) {
    const uint32_t sealed = oracle_.chains[index_];
    const auto keys = KeysOf(*session, sealed);
    auto blocks = session->LeaseWithin(kBlocksPerChain, Soon());
    if (!blocks.ok()) return false;
    for (const BlockRef block : blocks->refs()) Claim(block);
    for (size_t i = 0; i < kBlocksPerChain; ++i) Fill(session->data((*blocks)[i]), keys[i]);
    bool told = false;
    if (sealed < kMostChains && random_() % 4 != 0) {
      auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
      if (!seal.ok()) return Keep(&*blocks);
      const auto outcome = seal->Wait(Soon());
      if (!outcome.ok()) return Keep(&*blocks);
      told = outcome->refused.empty();
    }
    for (size_t i = 0; i < kBlocksPerChain; ++i) {
      if (!Filled(session->data((*blocks)[i]), keys[i])) ++oracle_.wrong_stamps;
    }
    if (told) oracle_.chains[index_] = sealed + 1;
    for (const BlockRef block : blocks->refs()) oracle_.owners[Index(block.id)] = 0;
    blocks->Release();
    ++oracle_.rounds;
    return sealed == 0 || LookUp(session, static_cast<uint32_t>(random_() % sealed));
  }
  // The daemon may have sealed them before it was killed: the same keys can't be sealed again by whoever wants to be told so.
  bool Keep(Blocks* blocks) {
    blocks->Detach();
    return false;
  }
  bool LookUp(Session* session, uint32_t chain) {
    const auto keys = KeysOf(*session, chain);
    auto pending = session->Match(KeyBytes(keys));
    if (!pending.ok()) return false;
    const auto hit = pending->Wait(Soon());
    if (!hit.ok()) return false;
    // While the daemon is gone, and until the session is back, nothing is found.
    if (hit->groups[0].size() != kBlocksPerChain && hit->miss != v1::MISS_REASON_GROWING) ++oracle_.missing;
    for (size_t i = 0; i < hit->groups[0].size(); ++i) {
      if (!Filled(session->data(hit->groups[0][i]), keys[i])) ++oracle_.wrong_stamps;
    }
    return true;
  }
  void Claim(BlockRef block) {
    pid_t nobody = 0;
    if (!oracle_.owners[Index(block.id)].compare_exchange_strong(nobody, getpid())) ++oracle_.double_owners;
  }

  const std::string socket_;
  const uint32_t index_;
  Oracle& oracle_;
  std::mt19937_64 random_;
};

// KVPOOL_KILLS says how many, for a longer run by hand.
// Its writers are forked, so nothing in its process may have used gRPC before: it runs alone, as ctest runs each test.
void KeeperTest::KillUnderWriters(int keeper_after) {
  const char* const asked = std::getenv("KVPOOL_KILLS");
  const int kills = asked == nullptr ? 20 : atoi(asked);
  StartWithKeeper("192MiB", {"--low-watermark=0", "--high-watermark=0"});
  std::unique_ptr<AnotherKeeper> keeper;
  auto* const oracle = static_cast<Oracle*>(
      mmap(nullptr, sizeof(Oracle), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> writers;
  // An assertion that fails leaves none behind.
  const absl::Cleanup kill_writers = [&writers] {
    for (const pid_t writer : writers) {
      kill(writer, SIGKILL);
      waitpid(writer, nullptr, 0);
    }
  };
  for (uint32_t i = 0; i < kWriters; ++i) {
    const pid_t writer = fork();
    if (writer == 0) {
      Writer(daemon_->socket(), i, oracle).Run();
      _exit(0);
    }
    writers.push_back(writer);
  }
  // An opening may fail where a daemon is killed after some milliseconds, again and again.
  for (const Deadline deadline = Soon(); oracle->sessions < kWriters;) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << daemon_->Log();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::mt19937_64 random(42);
  for (int i = 0; i < kills; ++i) {
    // Each daemon is let do something, more or less of it.
    const uint32_t enough = oracle->rounds + 1 + random() % 60;
    for (const Deadline deadline = Soon(); oracle->rounds < enough;) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "kill " << i << "\n" << daemon_->Log();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (keeper_after > 0 && i % keeper_after == keeper_after - 1) {
      keeper == nullptr ? daemon_->Kill() : static_cast<void>(keeper->End(SIGKILL));
      keeper = std::make_unique<AnotherKeeper>(
          daemon_->directory(), std::vector<std::string>{"--keeper=on", "--capacity=192MiB",
                                                         "--low-watermark=0", "--high-watermark=0"});
      daemon_->AwaitInLog("keeper found", i / keeper_after + 1);
    }
    ASSERT_NE(KillDaemon(*daemon_), 0) << "kill " << i << "\n" << daemon_->Log();
  }
  oracle->stop = true;
  for (const pid_t writer : writers) {
    int status = 0;
    waitpid(writer, &status, 0);
    EXPECT_EQ(status, 0);
  }
  writers.clear();
  EXPECT_EQ(oracle->double_owners, 0u);
  EXPECT_EQ(oracle->wrong_stamps, 0u);
  EXPECT_EQ(oracle->missing, 0u);
  EXPECT_EQ(oracle->sessions, kWriters) << "a session did not live through the daemon";

  auto session = Open(WriterOptions(daemon_->socket()));
  ASSERT_NE(session, nullptr);
  uint32_t chains = 0;
  for (uint32_t writer = 0; writer < kWriters; ++writer) {
    for (uint32_t chain = 0; chain < oracle->chains[writer]; ++chain, ++chains) {
      const auto keys = PrefixHasher(session->hash_seed())
                            .Chain(TokensOf(1 + writer + kWriters * chain, kBlocksPerChain), kTokensPerBlock);
      const auto hit = Match(session.get(), keys);
      ASSERT_TRUE(hit.ok()) << hit.status();
      ASSERT_EQ(hit->groups[0].size(), kBlocksPerChain) << "writer " << writer << " chain " << chain;
      for (size_t i = 0; i < kBlocksPerChain; ++i) {
        ASSERT_TRUE(Filled(session->data(hit->groups[0][i]), keys[i]))
            << "writer " << writer << " chain " << chain;
      }
    }
  }
  EXPECT_GE(chains, static_cast<uint32_t>(kills));
  EXPECT_EQ(daemon_->Metric("kvpool_evicted_blocks_total"), 0);
  ASSERT_TRUE(session->Close(Soon()).ok());
  const v1::StateCounts counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
  std::printf("%d kills, %u chains of %u blocks sealed and found\n", kills, chains, kBlocksPerChain);
  munmap(oracle, sizeof(Oracle));
}

TEST_F(KeeperTest, KillsOfTheDaemonLoseNoSealAndGiveNoBlockTwice) { KillUnderWriters(/*keeper_after=*/0); }

TEST_F(KeeperTest, KillsOfDaemonsAndTheirKeepersLoseNoSealAndGiveNoBlockTwice) {
  KillUnderWriters(/*keeper_after=*/4);
}

}  // namespace
}  // namespace kvpool
