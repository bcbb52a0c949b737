// The stream's thread and the openings before it, whose daemon is the test: it accepts, reads and answers by hand.
#include "client/session/step_stream.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/step_frames.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;

std::string WordsOf(const absl::Status& status) { return std::string(status.message()); }

class StepStreamTest : public ::testing::Test {
 protected:
  using Opened = absl::StatusOr<v1::OpenSessionResult>;

  void SetUp() override {
    sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
    ASSERT_LT(path_.size(), sizeof(address.sun_path));
    std::memcpy(address.sun_path, path_.data(), path_.size());
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  void TearDown() override {
    state_.End(absl::AbortedError("the test is over"));
    stream_.Stop();
    unlink(path_.c_str());
  }

  static steady_clock::time_point Late() { return steady_clock::now() + std::chrono::seconds(60); }
  void Listen() { ASSERT_EQ(listen(listener_.get(), 4), 0); }
  // ---- The daemon's side
  void Accept() {
    daemon_.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::string preface(kStepPreface.size(), '\0');
    ASSERT_EQ(recv(daemon_.get(), preface.data(), preface.size(), MSG_WAITALL),
              static_cast<ssize_t>(preface.size()));
    EXPECT_EQ(preface, kStepPreface);
    reader_ = std::make_unique<StepFrameReader>(kMaxStepRequestBytes);
  }
  v1::StepRequest Receive() {
    v1::StepRequest request;
    StepFrameReader::Outcome outcome;
    while ((outcome = reader_->Next(daemon_.get())) == StepFrameReader::Outcome::kNoneYet) {
      pollfd polled = {.fd = daemon_.get(), .events = POLLIN};
      EXPECT_EQ(poll(&polled, 1, 60000), 1);
      reader_->OnReadable((polled.revents & POLLHUP) != 0);
    }
    EXPECT_EQ(outcome, StepFrameReader::Outcome::kFrame);
    if (outcome == StepFrameReader::Outcome::kFrame) {
      EXPECT_TRUE(request.ParseFromString(std::string(reader_->frame())));
    }
    return request;
  }
  void SendBytes(std::string_view bytes, bool is_end = false) {
    EXPECT_EQ(StepFrameWriter().Write(daemon_.get(), bytes, is_end), StepFrameWriter::Outcome::kSent);
  }
  void Answer(const v1::StepRequest& request) {
    v1::StepResponse response;
    response.set_sequence(request.sequence());
    for (int i = 0; i < request.operations_size(); ++i) response.add_results();
    SendBytes(response.SerializeAsString());
  }
  void End(absl::StatusCode code, const std::string& message) {
    v1::StepResponse end;
    end.set_code(static_cast<int>(code));
    end.set_message(message);
    SendBytes(end.SerializeAsString(), /*is_end=*/true);
    daemon_.Reset();
  }
  void AnswerOpening() {
    v1::StepResponse response;
    response.add_results()->mutable_open_session()->set_member_token("token");
    SendBytes(response.SerializeAsString());
  }

  // ---- The engine's side
  std::future<Opened> Opening(steady_clock::time_point deadline = Late()) {
    return std::async(std::launch::async, [this, deadline] {
      v1::OpenSession request;
      request.set_client_name("test");
      return stream_.OpenSession(request, deadline);
    });
  }
  // Opens, starts the thread and takes the batch that names the member.
  void Start() {
    Listen();
    auto opening = Opening();
    Accept();
    EXPECT_EQ(Receive().operations(0).open_session().client_name(), "test");
    AnswerOpening();
    const Opened opened = opening.get();
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->member_token(), "token");
    stream_.Start(&batches_, &state_);
    // On the same connection.
    TakeFirst();
  }
  void TakeFirst() {
    const v1::StepRequest first = Receive();
    EXPECT_EQ(first.member_token(), "token");
    Answer(first);
  }
  std::shared_ptr<AnswerState> Touch(size_t blocks = 1,
                                     StepStream::Urgency urgency = StepStream::Urgency::kNow) {
    Command* command = commands_.Vacant();
    EXPECT_NE(command, nullptr);
    command->verb = Command::Verb::kTouch;
    command->blocks.assign(blocks, BlockRef{BlockId{1}, 1});
    auto answer = std::make_shared<AnswerState>();
    command->answer = answer;
    commands_.Publish();
    stream_.Wake(urgency);
    return answer;
  }
  bool AwaitDriving(const AnswerState& answer) {
    return stream_.Await(Late(), [&] { return answer.ready(); });
  }
  void Await(const AnswerState& answer) {
    EXPECT_TRUE(state_.signal.Await(Late(), [&] { return answer.phase.load() == AnswerState::kReady; }));
  }
  void AwaitEnd() {
    EXPECT_TRUE(state_.signal.Await(Late(), [&] { return !state_.open.load(); }));
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "/step_stream.", getpid());
  const UniqueFd listener_{socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  UniqueFd daemon_;
  std::unique_ptr<StepFrameReader> reader_;
  std::thread::id told_;  // Where the last notice was told. Whoever has its answer may look.
  CommandRing commands_;
  Magazine magazine_{1000, 0};
  SessionState state_;
  StepBatches batches_{{.commands = &commands_,
                        .magazine = &magazine_,
                        .state = &state_,
                        .on_notice = [this](const v1::Notice&) { told_ = std::this_thread::get_id(); },
                        .member_token = "token"}};
  StepStream stream_{path_};
};

// ------------------------------------------------------------------------------------------------- openings

TEST_F(StepStreamTest, TheStreamGoesOnWhereItOpened) {
  Start();
  const auto answer = Touch();
  const v1::StepRequest batch = Receive();
  EXPECT_TRUE(batch.operations(0).has_touch());
  Answer(batch);
  Await(*answer);
  EXPECT_TRUE(answer->status.ok()) << answer->status;
  EXPECT_EQ(state_.reconnects.load(), 0u);
}

TEST_F(StepStreamTest, ADaemonThatDoesNotListenYetIsWaitedFor) {
  auto opening = Opening();
  Listen();
  Accept();
  Receive();
  AnswerOpening();
  EXPECT_TRUE(opening.get().ok());
}

TEST_F(StepStreamTest, ADaemonThatDoesNotListenInTimeIsSaidSo) {
  const Opened opened = Opening(steady_clock::now()).get();
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(WordsOf(opened.status()), HasSubstr("cannot connect to " + path_ + ": Connection refused"));
}

TEST_F(StepStreamTest, ADaemonThatDoesNotAnswerInTimeIsSaidSo) {
  Listen();
  const Opened opened = Opening(steady_clock::now()).get();
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(WordsOf(opened.status()), HasSubstr("did not answer the opening in time"));
}

// The daemon has too many connections, for example.
TEST_F(StepStreamTest, AnOpeningThatNobodyReadIsSentAgain) {
  Listen();
  auto opening = Opening();
  for (int i = 0; i < 3; ++i) {
    daemon_.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    char first;
    ASSERT_EQ(recv(daemon_.get(), &first, 1, MSG_PEEK), 1);
    daemon_.Reset();
  }
  Accept();
  Receive();
  AnswerOpening();
  EXPECT_TRUE(opening.get().ok());
}

TEST_F(StepStreamTest, ADaemonThatTurnsOpeningsAwayIsAskedLessAndLess) {
  Listen();
  auto opening = Opening(steady_clock::now() + std::chrono::seconds(1));
  int attempts = 0;
  while (opening.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    pollfd polled = {.fd = listener_.get(), .events = POLLIN};
    if (poll(&polled, 1, 1) <= 0) continue;
    daemon_.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ++attempts;
    daemon_.Reset();
  }
  EXPECT_EQ(opening.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(attempts, 2);
  EXPECT_LE(attempts, 12) << "5 ms, 10, 20 and so on";
}

TEST_F(StepStreamTest, AnOpeningThatWasReadIsNotSentAgain) {
  Listen();
  auto opening = Opening();
  Accept();
  Receive();
  daemon_.Reset();
  const absl::Status status = opening.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(WordsOf(status), "the daemon hung up");
}

TEST_F(StepStreamTest, ARefusalIsPassedOn) {
  Listen();
  auto opening = Opening();
  Accept();
  Receive();
  v1::StepResponse response;
  response.add_results()->set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  response.mutable_results(0)->set_message("64 blocks asked, 12 free");
  SendBytes(response.SerializeAsString());
  EXPECT_EQ(opening.get().status(), absl::ResourceExhaustedError("64 blocks asked, 12 free"));
}

TEST_F(StepStreamTest, TheEndOfAStreamThatOpensNothingIsPassedOn) {
  Listen();
  auto opening = Opening();
  Accept();
  Receive();
  End(absl::StatusCode::kUnavailable, "the daemon rests");
  EXPECT_EQ(opening.get().status(), absl::UnavailableError("the daemon rests"));
}

// ------------------------------------------------------------------------------------------- callers that drive

TEST_F(StepStreamTest, ACallerThatWaitsTakesItsAnswer) {
  Start();
  int taken = 0;
  // The stream's thread may be faster many times in turn, as the machine's scheduler has it.
  const auto deadline = Late();
  for (int i = 0; i < 200 || (taken == 0 && std::chrono::steady_clock::now() < deadline); ++i) {
    const auto answer = Touch(1, StepStream::Urgency::kAwaited);
    const bool too_late = answer->ready();
    Answer(Receive());
    const auto ready = [&] { return answer->ready(); };
    if (stream_.Look(ready) && !too_late) ++taken;
    Await(*answer);
  }
  EXPECT_GT(taken, 0) << "the stream's thread was faster each time, or nobody else takes answers";
  EXPECT_EQ(state_.reconnects.load(), 0u);
}

TEST_F(StepStreamTest, ACallerLeavesNoticesToTheThread) {
  Start();
  for (int i = 0; i < 100; ++i) {
    const auto answer = Touch(1, StepStream::Urgency::kAwaited);
    const v1::StepRequest batch = Receive();
    v1::StepResponse response;
    response.set_sequence(batch.sequence());
    response.add_results();
    response.add_notices()->set_kind(v1::NOTICE_KIND_CAPACITY);
    SendBytes(response.SerializeAsString());
    ASSERT_TRUE(AwaitDriving(*answer));
    ASSERT_NE(told_, std::thread::id());
    ASSERT_NE(told_, std::this_thread::get_id()) << "in round " << i;
  }
}

TEST_F(StepStreamTest, CallersThatDriveFindTheStreamsEnd) {
  Start();
  for (uint64_t i = 1; i <= 20; ++i) {
    const auto answer = Touch(1, StepStream::Urgency::kAwaited);
    const v1::StepRequest batch = Receive();
    auto waits = std::async(std::launch::async, [&] { return AwaitDriving(*answer); });
    // Both ends of a stream, before and after its last answer.
    if (i % 2 == 0) Answer(batch);
    if (i % 4 < 2) {
      End(absl::StatusCode::kUnavailable, "the daemon rests");
    } else {
      daemon_.Reset();
    }
    Accept();
    const v1::StepRequest next = Receive();
    EXPECT_EQ(next.member_token(), "token");
    if (i % 2 == 1) EXPECT_EQ(next.sequence(), batch.sequence());
    Answer(next);
    ASSERT_TRUE(waits.get());
    EXPECT_TRUE(answer->status.ok()) << answer->status;
    EXPECT_EQ(state_.reconnects.load(), i);
  }
}

TEST_F(StepStreamTest, ManyCallersDriveOneStream) {
  Start();
  for (int i = 0; i < 50; ++i) {
    std::vector<std::shared_ptr<AnswerState>> answers;
    for (int k = 0; k < 8; ++k) answers.push_back(Touch(1, StepStream::Urgency::kAwaited));
    std::vector<std::future<bool>> waits;
    for (const auto& answer : answers) {
      waits.push_back(std::async(std::launch::async, [&] { return AwaitDriving(*answer); }));
    }
    for (int operations = 0; operations < 8;) {
      const v1::StepRequest batch = Receive();
      operations += batch.operations_size();
      Answer(batch);
    }
    for (std::future<bool>& wait : waits) ASSERT_TRUE(wait.get());
  }
}

TEST_F(StepStreamTest, ADeadlineMayBeAnyTimeAgo) {
  Start();
  const auto answer = Touch(1, StepStream::Urgency::kAwaited);
  const v1::StepRequest batch = Receive();
  for (const auto deadline :
       {steady_clock::time_point::min(), steady_clock::time_point(), steady_clock::now()}) {
    EXPECT_FALSE(stream_.Await(deadline, [&] { return answer->ready(); }));
  }
  Answer(batch);
  EXPECT_TRUE(stream_.Await(steady_clock::time_point::max(), [&] { return answer->ready(); }));
}

// On one processor a caller that is awake reads before the stream's thread, which sleeps: what follows from the answer is the
// caller's to see to.
class StepStreamOnOneProcessorTest : public StepStreamTest {
 protected:
  void SetUp() override {
    StepStreamTest::SetUp();
    ASSERT_EQ(sched_getaffinity(0, sizeof(all_), &all_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    Start();
  }
  void TearDown() override {
    StepStreamTest::TearDown();
    sched_setaffinity(0, sizeof(all_), &all_);
  }
  // Until the stream's thread sleeps.
  static void Rest() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }
  cpu_set_t all_;
};

TEST_F(StepStreamOnOneProcessorTest, WhatAnAnswerGivesBackIsReleased) {
  for (uint32_t i = 1; i <= 5; ++i) {
    Rest();
    Command* match = commands_.Vacant();
    match->verb = Command::Verb::kMatch;
    match->blocks.clear();
    match->groups.assign(1, {.group = 0, .key_bytes = 4, .count = 1});
    match->keys = "key1";
    match->answer = std::make_shared<AnswerState>();
    match->answer->phase = AnswerState::kAbandoned;
    commands_.Publish();
    const auto answer = Touch(1, StepStream::Urgency::kAwaited);
    const v1::StepRequest batch = Receive();
    ASSERT_EQ(batch.operations_size(), 2);
    v1::StepResponse response;
    response.set_sequence(batch.sequence());
    const BlockRef found = {BlockId{i}, 1};
    response.add_results()->mutable_match()->add_groups()->add_blocks(found.Pack());
    response.add_results();
    SendBytes(response.SerializeAsString());
    ASSERT_TRUE(AwaitDriving(*answer));
    const v1::StepRequest release = Receive();
    ASSERT_EQ(release.operations_size(), 1);
    EXPECT_EQ(release.operations(0).release().blocks(0), found.Pack());
    Answer(release);
  }
}

TEST_F(StepStreamOnOneProcessorTest, AnEndThatACallerFindsIsToldToAll) {
  const auto parked = Touch();
  const v1::StepRequest first = Receive();
  v1::StepResponse later;
  later.set_sequence(first.sequence());
  later.add_results()->set_parked(true);
  SendBytes(later.SerializeAsString());
  Rest();
  Command* ref = commands_.Vacant();
  ref->verb = Command::Verb::kRef;
  ref->blocks.assign(1, BlockRef{BlockId{1}, 1});
  ref->answer.reset();
  commands_.Publish();
  const auto answer = Touch(1, StepStream::Urgency::kAwaited);
  const v1::StepRequest batch = Receive();
  ASSERT_EQ(batch.operations_size(), 2);
  v1::StepResponse response;
  response.set_sequence(batch.sequence());
  response.add_results()->set_code(static_cast<int>(absl::StatusCode::kFailedPrecondition));
  response.add_results();
  SendBytes(response.SerializeAsString());
  ASSERT_TRUE(AwaitDriving(*answer));
  Await(*parked);
  EXPECT_THAT(WordsOf(parked->status), HasSubstr("the daemon refused ref"));
}

TEST_F(StepStreamTest, NobodyDrivesASessionThatIsOver) {
  Start();
  const auto answer = Touch(1, StepStream::Urgency::kAwaited);
  Receive();
  state_.End(absl::AbortedError("ended by a test"));
  EXPECT_FALSE(stream_.Look([] { return false; }));
  stream_.Wake(StepStream::Urgency::kNow);
  Await(*answer);
  EXPECT_EQ(answer->status.message(), "ended by a test");
}

// ----------------------------------------------------------------------------------------------------- ends

TEST_F(StepStreamTest, AfterAHangupWhatHasNoAnswerIsSentAgain) {
  Start();
  const auto answer = Touch();
  const uint64_t sequence = Receive().sequence();
  daemon_.Reset();
  Accept();
  const v1::StepRequest again = Receive();
  EXPECT_EQ(again.member_token(), "token");
  EXPECT_EQ(again.sequence(), sequence);
  Answer(again);
  Await(*answer);
  EXPECT_EQ(state_.reconnects.load(), 1u);
}

TEST_F(StepStreamTest, NeitherTheEndsThatPassNorBytesThatAreNoAnswerEndTheSession) {
  Start();
  const auto answer = Touch();
  const std::vector<std::function<void()>> ends = {
      [this] { End(absl::StatusCode::kUnavailable, "the daemon rests"); },
      [this] { End(absl::StatusCode::kOk, ""); },
      [this] { SendBytes("\xff garbage"); },
      [this] {
        const std::string header = "\xff\xff\xff\x7f";
        EXPECT_EQ(send(daemon_.get(), header.data(), header.size(), MSG_NOSIGNAL), 4);
      },
  };
  for (const auto& end : ends) {
    EXPECT_EQ(Receive().operations_size(), 1);
    end();
    Accept();
  }
  Answer(Receive());
  Await(*answer);
  EXPECT_EQ(state_.reconnects.load(), ends.size());
  EXPECT_TRUE(state_.status().ok()) << state_.status();
}

TEST_F(StepStreamTest, SomeEndsOfAStreamEndTheSession) {
  Start();
  const auto answer = Touch();
  Receive();
  End(absl::StatusCode::kNotFound, "there is no such member");
  AwaitEnd();
  EXPECT_EQ(state_.status(), absl::AbortedError("there is no such member"));
  Await(*answer);
  EXPECT_EQ(answer->status, absl::AbortedError("there is no such member"));
}

TEST_F(StepStreamTest, ASessionThatDoesNotComeBackIsDetached) {
  Start();
  state_.away.store(true);
  stream_.OnDaemonChange();
  daemon_.Reset();
  Accept();
  Receive();
  End(absl::StatusCode::kUnauthenticated, "unknown token");
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(WordsOf(state_.status()), HasSubstr("did not come back: unknown token"));
}

// Neither waits for the other: a batch that the socket has no room for, and the answers before it.
TEST_F(StepStreamTest, AnswersAreReadWhileABatchWaitsForRoom) {
  Start();
  const auto small = Touch();
  const v1::StepRequest first = Receive();
  std::vector<std::shared_ptr<AnswerState>> large;
  for (int i = 0; i < 4; ++i) large.push_back(Touch(StepBatches::kBatchNames / 2));
  Answer(first);
  Await(*small);
  for (size_t answered = 0; answered < large.size();) {
    const v1::StepRequest batch = Receive();
    for (int i = 0; i < batch.operations_size(); ++i) {
      EXPECT_EQ(batch.operations(i).touch().blocks_size(), StepBatches::kBatchNames / 2);
    }
    answered += static_cast<size_t>(batch.operations_size());
    Answer(batch);
  }
  for (const auto& answer : large) Await(*answer);
  EXPECT_EQ(state_.reconnects.load(), 0u);
}

// The system may have no memory for a batch, for example.
TEST_F(StepStreamTest, AWriteThatFailsThoughNobodyHungUpIsMadeOnAnotherConnection) {
  Start();
  const UniqueFd stays(std::move(daemon_));
  ASSERT_EQ(shutdown(stays.get(), SHUT_RD), 0);
  const auto answer = Touch();
  Accept();
  const v1::StepRequest again = Receive();
  EXPECT_EQ(again.member_token(), "token");
  EXPECT_TRUE(again.operations(0).has_touch()) << again.ShortDebugString();
  Answer(again);
  Await(*answer);
  EXPECT_TRUE(answer->status.ok()) << answer->status;
}

TEST_F(StepStreamTest, AStoppedStreamHangsUpAndAnswersAll) {
  Start();
  // A forked child would have the descriptor, too.
  std::vector<UniqueFd> inherited;
  for (int fd = 3; fd < 256; ++fd) {
    sockaddr_un peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && path_ == peer.sun_path)
      inherited.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 256));
  }
  ASSERT_EQ(inherited.size(), 1u);
  const auto answer = Touch();
  Receive();
  state_.End(absl::AbortedError("closed"));
  stream_.Stop();
  Await(*answer);
  EXPECT_EQ(answer->status, absl::AbortedError("closed"));
  pollfd polled = {.fd = daemon_.get(), .events = 0};
  EXPECT_EQ(poll(&polled, 1, 60000), 1);
  EXPECT_NE(polled.revents & POLLHUP, 0);
}

}  // namespace
}  // namespace kvpool
