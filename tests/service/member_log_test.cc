// The log of a member, killed between its turns.
#include "server/space/member_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/base/shared_memory.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_table.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

// A pool in a table, for its turns, and the log of a member.
class MemberLogTest : public testing::Test {
 protected:
  MemberLogTest()
      : table_(PoolTable::Bytes(9, 4)),
        pool_({.max_blocks = 9, .windows = {0}, .table = table_.data(), .table_sessions = 4},
              *MakeReplacementPolicy("lru", 9)),
        log_(*MemberLog::Make()) {
    log_->Follow(&pool_);
    log_->OnEntered(0);
    pool_.Commit();
  }
  // The process is killed now, and another reads the log.
  void Next() {
    log_ = *MemberLog::Map(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)));
    log_->Follow(&pool_);
    log_->ForgetTorn();
    pool_.Commit();
  }
  std::vector<std::string> Answers() {
    std::vector<std::string> answers;
    for (const MemberLog::Item& item : log_->Items()) answers.push_back(item.bytes);
    return answers;
  }

  struct alignas(64) Line {
    char bytes[64];
  };
  struct Table {
    explicit Table(uint64_t bytes) : lines(bytes / 64 + 1) {}
    void* data() { return lines.data(); }
    std::vector<Line> lines;
  } table_;
  BlockPool pool_;
  std::unique_ptr<MemberLog> log_;
};

TEST_F(MemberLogTest, AnAnswerCountsOnceItsTurnIsOver) {
  log_->Add(1, "one");
  pool_.Commit();
  log_->Add(2, "two");
  Next();
  EXPECT_EQ(Answers(), std::vector<std::string>{"one"});
  EXPECT_EQ(log_->WhyOver().text, "");
}

TEST_F(MemberLogTest, WhatWasHeardMakesRoomForMoreThanThereIs) {
  for (uint64_t sequence = 1; sequence <= 100; ++sequence) {
    log_->Add(sequence, std::string(100000 + sequence, 'a'));
    if (sequence > 3) log_->RaiseFloor(sequence - 3);
    pool_.Commit();
  }
  Next();
  const std::vector<std::string> answers = Answers();
  ASSERT_EQ(answers.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(answers[i], std::string(100098 + i, 'a'));
  EXPECT_EQ(log_->floor(), 97u);
  EXPECT_EQ(log_->WhyOver().text, "");
}

TEST_F(MemberLogTest, AnAnswerWithoutRoomEndsTheSessionUntilItWasHeard) {
  log_->Add(1, std::string(8 << 20, 'a'));
  pool_.Commit();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("too large"));
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kNoRoom);
  log_->RaiseFloor(1);
  EXPECT_EQ(log_->WhyOver().text, "");
}

TEST_F(MemberLogTest, AVerbIsParkedUntilItsCompletionCounts) {
  v1::Operation operation;
  operation.set_after(7);
  v1::OperationResult result;
  log_->Park(3, 1, /*on_stream=*/true, operation);
  pool_.Commit();
  log_->Complete(3, 1, result);
  log_->RaiseFloor(3);
  Next();
  std::vector<MemberLog::Item> items = log_->Items();
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].kind, MemberLog::Kind::kParked);
  log_->Complete(3, 1, result);
  pool_.Commit();
  log_->RaiseFloor(4);
  Next();
  items = log_->Items();
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].kind, MemberLog::Kind::kCompletion);
  log_->Confirm(3, 1);
  Next();
  EXPECT_TRUE(log_->Items().empty());
}

TEST_F(MemberLogTest, ATornTurnDecidesNothing) {
  log_->SetUnsettled(true);
  pool_.Commit();
  log_->SetUnsettled(false);
  Next();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("late releases")) << "that it was settled does not count";
  log_->SetUnsettled(false);
  log_->SetUnsettled(true);
  Next();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("late releases")) << "nor that it was, and was not again";
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kNotKept);
  log_->SetUnsettled(false);
  pool_.Commit();
  log_->OnEnded();
  log_->BeginBatch();
  Next();
  EXPECT_EQ(log_->WhyOver().text, "");
  log_->BeginBatch();
  pool_.Commit();
  log_->EndBatch();
  Next();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("half done"));
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kTorn);
}

TEST_F(MemberLogTest, ATornCloseLeavesNoHalf) {
  log_->OnUnmaps();
  Next();
  EXPECT_FALSE(log_->unmaps()) << "its end was not written";
  log_->OnEnded();
  pool_.Commit();
  Next();
  EXPECT_FALSE(log_->unmaps()) << "another end, long after it";
}

TEST_F(MemberLogTest, AnEndThatWasKeptStays) {
  log_->OnUnmaps();
  log_->OnEnded();
  pool_.Commit();
  Next();
  // The daemon that finds it says so as well, and does not get far.
  log_->OnEnded();
  Next();
  EXPECT_TRUE(log_->unmaps());
  EXPECT_EQ(log_->WhyOver().text, "it had ended");
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kEnded);
}

TEST_F(MemberLogTest, ATornFenceWasNeverReported) {
  log_->SetFence(5);
  pool_.Commit();
  log_->SetFence(6);
  log_->SetFence(7);
  EXPECT_EQ(log_->fence(), 7u);
  Next();
  EXPECT_EQ(log_->fence(), 5u);
  log_->SetFence(8);
  pool_.Commit();
  Next();
  EXPECT_EQ(log_->fence(), 8u);
}

TEST_F(MemberLogTest, WhoseEnteringWasTornIsNoMember) {
  EXPECT_TRUE(log_->entered());
  log_ = *MemberLog::Make();
  log_->Follow(&pool_);
  log_->OnEntered(3);
  Next();
  EXPECT_FALSE(log_->entered());
  log_->OnEntered(2);
  pool_.Commit();
  Next();
  EXPECT_TRUE(log_->entered());
  EXPECT_EQ(log_->index(), 2u);
}

TEST_F(MemberLogTest, AVerbWithoutRoomEndsTheSessionUntilItsResultWasHeard) {
  v1::Operation large;
  large.mutable_seal()->set_parent_key(std::string(8 << 20, 'a'));
  v1::OperationResult result;
  log_->Park(3, 0, /*on_stream=*/true, large);
  log_->Park(3, 1, /*on_stream=*/true, large);
  log_->Park(4, 0, /*on_stream=*/false, large);
  pool_.Commit();
  const auto over = [this] { return log_->WhyOver().text; };
  EXPECT_THAT(over(), HasSubstr("room"));
  log_->Complete(3, 0, result);  // There is room for this.
  log_->Complete(4, 0, result);
  pool_.Commit();
  EXPECT_THAT(over(), HasSubstr("room")) << "a verb is left";
  v1::OperationResult much;
  much.set_message(std::string(8 << 20, 'a'));
  log_->Complete(3, 1, much);
  pool_.Commit();
  EXPECT_THAT(over(), HasSubstr("room")) << "its result is lost";
  log_->Confirm(3, 1);
  EXPECT_EQ(over(), "");
  pool_.Commit();
  Next();
  EXPECT_EQ(over(), "");
}

// The next daemon would have the verb wait again, for a step that is passed.
TEST_F(MemberLogTest, ACompletionWithoutRoomEndsTheSessionAsLongAsItsVerbIsThere) {
  v1::OperationResult much;
  much.set_message(std::string(8 << 20, 'a'));
  log_->Park(2, 0, /*on_stream=*/true, {});  // Nothing behind it goes before it does.
  log_->Park(3, 0, /*on_stream=*/true, {});
  log_->Park(4, 0, /*on_stream=*/false, {});
  pool_.Commit();
  log_->Complete(3, 0, much);
  log_->Complete(4, 0, much);
  pool_.Commit();
  log_->Confirm(3, 0);
  log_->RaiseFloor(4);
  pool_.Commit();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("room"));
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kNoRoom);
  log_->Complete(2, 0, {});
  pool_.Commit();
  log_->Confirm(2, 0);
  EXPECT_EQ(log_->WhyOver().text, "");
  pool_.Commit();
  Next();
  EXPECT_EQ(log_->WhyOver().text, "");
  EXPECT_TRUE(log_->Items().empty());
}

TEST_F(MemberLogTest, ATornTurnLosesNoVerbAgain) {
  v1::Operation large;
  large.mutable_seal()->set_parent_key(std::string(8 << 20, 'a'));
  log_->Park(3, 0, /*on_stream=*/true, large);
  pool_.Commit();
  log_->Complete(3, 0, {});
  EXPECT_EQ(log_->WhyOver().text, "");
  Next();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("room")) << "its result went with the turn";
}

// It may be what ends them.
TEST_F(MemberLogTest, ABatchThatEndedSeveralDaemonsIsNotSaidToAnother) {
  const auto die_in_a_batch = [this] {
    log_->BeginBatch();
    Next();
  };
  die_in_a_batch();
  die_in_a_batch();
  EXPECT_EQ(log_->WhyOver().text, "");
  log_->BeginBatch();
  log_->EndBatch();
  pool_.Commit();
  die_in_a_batch();
  die_in_a_batch();
  EXPECT_EQ(log_->WhyOver().text, "");
  die_in_a_batch();
  EXPECT_THAT(log_->WhyOver().text, HasSubstr("when 3 daemons ended"));
  EXPECT_EQ(log_->WhyOver().loss, SessionLoss::kTorn);
}

TEST_F(MemberLogTest, AHalfTurnEndsThoseThatAreAsOld) {
  EXPECT_EQ(log_->WhyOver(/*half_turn=*/0).text, "");
  EXPECT_THAT(log_->WhyOver(pool_.undo_log().turn()).text, HasSubstr("undone"));
  EXPECT_EQ(log_->WhyOver(pool_.undo_log().turn()).loss, SessionLoss::kTorn);
}

TEST_F(MemberLogTest, ADamagedOneIsRefused) {
  log_->Add(1, "one");
  auto memory = *SharedMemory::Map(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)));
  memory.data()[0] ^= 1;
  EXPECT_EQ(MemberLog::Map(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0))).status().code(),
            absl::StatusCode::kDataLoss);
  memory.data()[0] ^= 1;
  EXPECT_TRUE(MemberLog::Map(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0))).ok());
}

}  // namespace
}  // namespace kvpool
