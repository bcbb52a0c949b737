// Sessions with a real daemon: broken streams, a dead or stopped daemon, dead peers, forks, revocation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/session.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"
#include "tests/client/stream_proxy.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

std::string Words(const absl::Status& status) { return std::string(status.message()); }

class SessionFailureTest : public SessionTest {
 protected:
  std::vector<PrefixKey> Keys(const Session& session, uint32_t seed, size_t blocks) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(seed, blocks), kTokensPerBlock);
  }
  absl::StatusOr<MatchHit> Match(Session* session, absl::Span<const PrefixKey> keys) const {
    const GroupKeys asked{.keys = KeyBytes(keys)};
    auto pending = session->Match({&asked, 1});
    if (!pending.ok()) return pending.status();
    return pending->Wait(Soon());
  }
  // Everything that the space can lease beside `held` blocks and this session's sink.
  absl::StatusOr<Blocks> LeaseAllBut(Session* session, uint32_t held) const {
    return session->LeaseWithin(session->max_blocks() - 2 - held, Soon());
  }
  tools::OperatorClient& Operator() {
    if (operator_ == nullptr) {
      auto opened = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
      EXPECT_TRUE(opened.ok()) << opened.status();
      operator_ = std::move(*opened);
    }
    return *operator_;
  }
  // Blocks of the only space, as the daemon counts them.
  v1::StateCounts Counts() {
    const auto spaces = Operator().ListSpaces({});
    EXPECT_TRUE(spaces.ok()) << spaces.status();
    return spaces->spaces(0).blocks();
  }
  // The only session once the daemon has ended it; empty if it is gone without a trace.
  v1::SessionInfo AwaitEnd() {
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      const auto listed = Operator().ListSessions({});
      if (!listed.ok() || listed->sessions().empty()) break;
      if (listed->sessions(0).ended()) return listed->sessions(0);
    }
    return {};
  }

  std::unique_ptr<tools::OperatorClient> operator_;
};

// ---------------------------------------------------------------------------------------------- streams

TEST_F(SessionFailureTest, ABrokenStreamLosesNothing) {
  StartDaemon();
  StreamProxy proxy(daemon_->socket());
  SessionOptions options = OptionsFor(proxy.socket());
  options.guaranteed_blocks = 32;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  for (uint32_t round = 0; round < 30; ++round) {
    const auto keys = Keys(*session, 100 + round, 8);
    auto blocks = session->LeaseWithin(8, Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    for (size_t i = 0; i < 8; ++i) Stamp(session->data((*blocks)[i]), keys[i]);
    // What was said before the cut may have arrived, and its answer not: each verb is to be applied once.
    proxy.HoldAnswers(round % 2 == 1);
    auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
    ASSERT_TRUE(seal.ok()) << seal.status();
    const GroupKeys asked{.keys = KeyBytes(keys)};
    auto pending = session->Match({&asked, 1});
    ASSERT_TRUE(pending.ok()) << pending.status();
    if (round % 2 == 1) {
      EXPECT_FALSE(pending->Wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(5)).ok());
    }
    proxy.Cut();
    proxy.HoldAnswers(false);
    const auto outcome = seal->Wait(Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->refused.empty());
    auto hit = pending->Wait(Soon());
    ASSERT_TRUE(hit.ok()) << hit.status();
    ASSERT_EQ(hit->groups[0].size(), 8u);
    for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i]));
  }
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(session->counters().refused, 0u);
  EXPECT_GT(session->counters().reconnects, 0u);
  EXPECT_EQ(session->status(), absl::OkStatus());
  // No hold was taken twice: all is cached, but for the magazine and the sink.
  EXPECT_EQ(Counts().sealed(), 0u);
  EXPECT_EQ(Counts().cached(), 30u * 8);
}

TEST_F(SessionFailureTest, AStoppedDaemonStopsNoCall) {
  StartDaemon();
  SessionOptions options = OptionsFor(daemon_->socket());
  options.guaranteed_blocks = 16;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  auto blocks = session->LeaseWithin(8, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  daemon_->Signal(SIGSTOP);
  absl::Status touched;
  int taken = 0;
  while (touched.ok() && taken < 1'000'000) {
    touched = session->Touch(blocks->refs());
    taken += touched.ok();
  }
  EXPECT_EQ(touched.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GE(taken, 1000);
  // Releases are never refused, whatever is queued: these go by the wire, one command each.
  auto more = session->Lease(4);
  ASSERT_TRUE(more.ok()) << more.status();
  session->BeginStep();
  for (const BlockRef ref : blocks->Detach()) session->Release({&ref, 1});
  more->Release();
  session->CompleteStep(session->current_step());
  daemon_->Signal(SIGCONT);
  const auto everything = LeaseAllBut(session.get(), 0);
  EXPECT_TRUE(everything.ok()) << everything.status();
  EXPECT_EQ(session->counters().refused, 0u);
}

// ---------------------------------------------------------------------------------------------- the daemon

TEST_F(SessionFailureTest, TheDaemonsDeathDetaches) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = Keys(*session, 1, 6);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  auto hit = Match(session.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  daemon_->Signal(SIGSTOP);
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto unanswered = session->Match({&asked, 1});
  ASSERT_TRUE(unanswered.ok());
  daemon_->End(SIGKILL);

  const auto ended = unanswered->Wait(Soon());
  EXPECT_EQ(ended.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Words(ended.status()), HasSubstr("the daemon is gone"));
  EXPECT_EQ(session->status().code(), absl::StatusCode::kUnavailable);
  // What it holds stays usable.
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i]));
  Stamp(session->data((*mine)[0]), keys[0]);
  EXPECT_TRUE(HasStamp(session->data((*mine)[0]), keys[0]));
  // Nothing new, and no call that waits or dies.
  EXPECT_EQ(session->Lease(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(session->LeaseWithin(1, Soon()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Match(session.get(), keys).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(session->Seal({.blocks = mine->refs(), .keys = KeyBytes({keys.data(), 4})}).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(session->free_blocks(), 0u);
  mine->Release();
  hit->groups.clear();
  session->CompleteStep(session->BeginStep());
  EXPECT_EQ(session->Close(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST_F(SessionFailureTest, ASessionThatEndsWhileItIsClosedIsClosed) {
  StartDaemon();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Flush(Soon()).ok());
  daemon_->Signal(SIGSTOP);
  std::thread daemon([this, &session, before = session->counters().operations] {
    // The close is on its way, and nobody answers it.
    while (session->counters().operations == before) std::this_thread::yield();
    daemon_->Kill();
  });
  EXPECT_TRUE(session->Close(Soon()).ok());
  daemon.join();
}

// The daemon frees everything when it hears of it: what a call got meanwhile would be another session's by then.
TEST_F(SessionFailureTest, ASessionWhoseCloseIsLateIsOfNoMoreUse) {
  StartDaemon();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  auto held = session->LeaseWithin(1, Soon());
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_TRUE(session->Flush(Soon()).ok());
  ASSERT_GT(session->free_blocks(), 0u);
  daemon_->Signal(SIGSTOP);
  const auto late = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(50); };
  for (int i = 0; i < 2; ++i) EXPECT_EQ(session->Close(late()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(session->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Words(session->status()), HasSubstr("is being closed"));
  EXPECT_EQ(session->Lease(1).status(), session->status());
  EXPECT_EQ(session->LeaseWithin(1, Soon()).status(), session->status());
  EXPECT_EQ(Match(session.get(), Keys(*session, 1, 1)).status(), session->status());
  EXPECT_EQ(session->Ref(held->refs()).status(), session->status());
  EXPECT_EQ(session->free_blocks(), 0u);
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(session->Close(Soon()).ok());
  EXPECT_THAT(Words(session->status()), HasSubstr("was closed"));
  EXPECT_TRUE(Operator().ListSessions({})->sessions().empty());
}

TEST_F(SessionFailureTest, ACleanShutdownSaysWhy) {
  StartDaemon("32MiB", {"--shutdown-grace=0s"});
  std::promise<void> draining;
  SessionOptions options = OptionsFor(daemon_->socket());
  options.on_notice = [&draining, told = false](const v1::Notice& notice) mutable {
    if (notice.kind() != v1::NOTICE_KIND_DRAIN || told) return;
    told = true;
    draining.set_value();
  };
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(daemon_->End(SIGTERM), 0);
  const GroupKeys asked{.keys = "key", .key_bytes = 3};
  auto pending = session->Match({&asked, 1});
  const absl::Status status = pending.ok() ? pending->Wait(Soon()).status() : pending.status();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(session->status().ok());
  EXPECT_FALSE(Session::Open(OptionsFor(daemon_->socket())).ok());
}

TEST_F(SessionFailureTest, NoDaemonIsSaidSo) {
  SessionOptions options = OptionsFor("/nonexistent/kvpoold.sock");
  const auto session = Session::Open(options);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Words(session.status()),
              HasSubstr("cannot reach kvpoold at /nonexistent/kvpoold.sock: there is no such socket"));
  EXPECT_THAT(Words(session.status()), HasSubstr("KVPOOL_SOCKET"));
}

// ---------------------------------------------------------------------------------------------- peers

TEST_F(SessionFailureTest, AKilledPeersBlocksComeBackAndItsCacheStays) {
  StartDaemon("16MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const auto keys = Keys(*session, 5, 10);
  {
    PeerProcess peer(daemon_->socket());
    ASSERT_EQ(peer.Ask("share 5 10"), "ok");
    ASSERT_EQ(peer.Ask("match 5 10"), "10 10");
    ASSERT_EQ(peer.Ask("lease 30"), "ok");
    peer.End(SIGKILL);
  }
  auto hit = Match(session.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  ASSERT_EQ(hit->groups[0].size(), 10u);
  auto everything = LeaseAllBut(session.get(), 10);
  ASSERT_TRUE(everything.ok()) << everything.status();
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i]));
}

TEST_F(SessionFailureTest, AForkedChildKeepsNoSessionAlive) {
  StartDaemon("16MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  pid_t child = 0;
  {
    PeerProcess peer(daemon_->socket());
    ASSERT_EQ(peer.Ask("lease 30"), "ok");
    child = static_cast<pid_t>(std::stol(peer.Ask("fork")));
    peer.End(SIGKILL);
  }
  EXPECT_EQ(kill(child, 0), 0) << "the child lives";
  EXPECT_TRUE(LeaseAllBut(session.get(), 0).ok());
  kill(child, SIGKILL);
}

TEST_F(SessionFailureTest, AStoppedPeerKeepsWhatItHolds) {
  StartDaemon("16MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  PeerProcess peer(daemon_->socket());
  ASSERT_EQ(peer.Ask("lease 30"), "ok");
  peer.Signal(SIGSTOP);
  const auto shortly = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  EXPECT_FALSE(session->LeaseWithin(session->max_blocks() - 2 - 30, shortly).ok());
  peer.End(SIGKILL);
  EXPECT_TRUE(LeaseAllBut(session.get(), 0).ok());
}

// ---------------------------------------------------------------------------------------------- closing

// All of it comes back at once: the only process said that nothing of it runs.
TEST_F(SessionFailureTest, ASoleMemberThatIsDoneClosesItsSession) {
  StartDaemon("16MiB");
  auto session = Open();
  ASSERT_NE(session, nullptr);
  std::vector<BlockRef> refs(4);
  ASSERT_TRUE(session->LeaseRefsWithin(absl::MakeSpan(refs), Soon()).ok());
  session.reset();
  EXPECT_TRUE(Operator().ListSessions({})->sessions().empty());
  EXPECT_EQ(Counts().leased() + Counts().quarantined(), 0u);
}

TEST_F(SessionFailureTest, ASoleMemberThatIsNotDoneOnlyHangsUp) {
  StartDaemon("16MiB");
  auto session = Open();
  ASSERT_NE(session, nullptr);
  std::vector<BlockRef> refs(4);
  ASSERT_TRUE(session->LeaseRefsWithin(absl::MakeSpan(refs), Soon()).ok());
  session->BeginStep();
  session.reset();
  EXPECT_THAT(AwaitEnd().end_reason(), HasSubstr("hung up"));
  EXPECT_GE(Counts().quarantined(), 4u) << "its process lives";
}

// One of several can't know what the others still do on the device, and so frees nothing.
TEST_F(SessionFailureTest, OneOfSeveralMembersOnlyHangsUp) {
  for (const bool opener_leaves : {false, true}) {
    StartDaemon("16MiB", {"--device=host,host"});
    SessionOptions options = OptionsFor(daemon_->socket());
    options.ranks = 2;
    auto first = Open(options);
    ASSERT_NE(first, nullptr);
    options.role.set_rank(1);
    auto second = Session::Join(options, first->Invitation());
    ASSERT_TRUE(second.ok()) << second.status();
    std::vector<BlockRef> refs(4);
    ASSERT_TRUE(first->LeaseRefsWithin(absl::MakeSpan(refs), Soon()).ok());
    (opener_leaves ? first : *second).reset();
    EXPECT_THAT(AwaitEnd().end_reason(), HasSubstr("hung up"));
    EXPECT_GE(Counts().quarantined(), 4u) << "the other member may be writing to them";
    (opener_leaves ? *second : first).reset();
    EXPECT_GE(Counts().quarantined(), 4u) << "the process of both lives";
    operator_.reset();
  }
}

TEST_F(SessionFailureTest, AForkedChildMayDropTheSession) {
  StartDaemon();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  auto blocks = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    wrong |= session->status().code() == absl::StatusCode::kFailedPrecondition ? 0 : 1;
    wrong |= session->Lease(1).ok() ? 2 : 0;
    wrong |= session->free_blocks() == 0 ? 0 : 4;
    blocks->Release();
    session.reset();
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  Stamp(session->data((*blocks)[0]), PrefixKey{});
  EXPECT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(session->counters().refused, 0u);
}

// ---------------------------------------------------------------------------------------------- notices

TEST_F(SessionFailureTest, ARevocationTakesUnusedBlocksOnly) {
  StartDaemon("16MiB");
  std::promise<void> revoked;
  SessionOptions options = OptionsFor(daemon_->socket());
  options.magazine_blocks = 64;
  options.on_notice = [&revoked, told = false](const v1::Notice& notice) mutable {
    if (notice.kind() != v1::NOTICE_KIND_REVOKE || !notice.on() || told) return;
    told = true;
    revoked.set_value();
  };
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  auto used = session->LeaseWithin(10, Soon());
  ASSERT_TRUE(used.ok()) << used.status();
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_GE(session->free_blocks(), 32u);
  v1::RevokeRequest request;
  request.set_blocks(1000);
  const auto asked = Operator().Revoke(request);
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked->sessions_asked(), 1u);
  revoked.get_future().wait();
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(session->free_blocks(), 0u);
  EXPECT_EQ(Counts().leased(), 11u) << "ten in use, and the sink";
  EXPECT_TRUE(session->LeaseWithin(1, Soon()).ok()) << "the magazine fills again when the engine asks";
}

TEST_F(SessionFailureTest, ARevocationReachesTheMemberThatKeepsBlocks) {
  StartDaemon("16MiB");
  SessionOptions options = OptionsFor(daemon_->socket());
  options.magazine_blocks = 64;
  const auto rank = Open(options);
  ASSERT_NE(rank, nullptr);
  ASSERT_TRUE(rank->LeaseWithin(10, Soon()).ok());  // They go into its magazine.
  options.role.set_scheduler(true);
  const auto scheduler = Session::Join(options, rank->Invitation());
  ASSERT_TRUE(scheduler.ok()) << scheduler.status();
  v1::RevokeRequest request;
  request.set_blocks(1000);
  // Members hear of it by and by.
  for (const Deadline deadline = Soon(); Counts().leased() > 1;) {  // The sink stays.
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << Counts().leased() << " blocks are leased";
    ASSERT_TRUE(Operator().Revoke(request).ok());
  }
}

TEST_F(SessionFailureTest, AMembersDeathEndsTheSession) {
  StartDaemon("32MiB", {"--device=host,host"});
  const auto first = Open(RankOptions(0));
  ASSERT_NE(first, nullptr);
  {
    auto second = Session::Join(RankOptions(1), first->Invitation());
    ASSERT_TRUE(second.ok()) << second.status();
    ASSERT_TRUE(first->LeaseWithin(1, Soon()).ok());
  }
  const auto keys = Keys(*first, 1, 1);
  absl::Status status = Match(first.get(), keys).status();
  while (status.ok()) status = Match(first.get(), keys).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(first->status().code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace kvpool
