// The memory that the processes of a replay share, with processes that are killed.
#include "client/replay/board.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <set>
#include <vector>

namespace kvpool::replay {
namespace {

TEST(Durations, QuantilesAreAtMostAnEighthOff) {
  // Lives in zeroed shared memory everywhere else.
  const auto durations = std::make_unique<Durations>();
  EXPECT_EQ(durations->QuantileNs(0.5), 0u);
  for (uint64_t ns = 0; ns <= 10000; ++ns) durations->Add(ns);
  EXPECT_EQ(durations->count(), 10001u);
  EXPECT_EQ(durations->max_ns(), 10000u);
  EXPECT_EQ(durations->QuantileNs(1), 10000u);
  EXPECT_NEAR(static_cast<double>(durations->QuantileNs(0.5)), 5000, 5000 / 8.0);
  EXPECT_NEAR(static_cast<double>(durations->QuantileNs(0.99)), 9900, 9900 / 8.0);
  const auto more = std::make_unique<Durations>();
  more->Add(uint64_t{1} << 60);
  durations->Merge(*more);
  EXPECT_EQ(durations->count(), 10002u);
  EXPECT_EQ(durations->max_ns(), uint64_t{1} << 60);
}

TEST(Board, HandsOutInOrderAndReopens) {
  auto board = Board::Create({.requests = 5, .engines = 2});
  ASSERT_TRUE(board.ok()) << board.status();
  EXPECT_EQ(board->Claim(0), 0u);
  EXPECT_EQ(board->Claim(1), 1u);
  EXPECT_EQ(board->Claim(0), 2u);
  board->Done(0);
  EXPECT_EQ(board->Reopen(0), 1u);
  EXPECT_EQ(board->Claim(1), 2u);
  EXPECT_EQ(board->Claim(1), 3u);
  EXPECT_EQ(board->Claim(0), 4u);
  EXPECT_EQ(board->Claim(0), std::nullopt);
  EXPECT_TRUE(board->busy(1));
  EXPECT_EQ(board->Reopen(1), 3u);
  EXPECT_FALSE(board->busy(1));
  board->HoldFrom(2);
  EXPECT_EQ(board->Claim(1), 1u);
  EXPECT_EQ(board->Claim(1), std::nullopt);
  board->HoldFrom(100);
  EXPECT_EQ(board->Claim(1), 2u);
  EXPECT_EQ(board->done(), 1u);
  EXPECT_FALSE(board->stopped());
  board->Stop();
  EXPECT_TRUE(board->stopped());
}

// Each request is served to its end once, whenever other engines are killed.
TEST(Board, KillsLoseNothing) {
  constexpr uint32_t kRequests = 20000;
  constexpr uint32_t kEngines = 3;
  auto board = Board::Create({.requests = kRequests, .engines = kEngines});
  ASSERT_TRUE(board.ok()) << board.status();
  const auto start = [&](uint32_t engine) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    while (board->done() != kRequests) {
      const std::optional<uint32_t> request = board->Claim(engine);
      if (!request.has_value()) continue;
      board->record(*request).hit_blocks += 1;
      board->Done(*request);
    }
    _exit(0);
  };
  std::vector<pid_t> engines;
  for (uint32_t i = 0; i < kEngines; ++i) engines.push_back(start(i));
  std::mt19937 dice(7);
  int kills = 0;
  while (board->done() < kRequests) {
    const uint32_t i = dice() % kEngines;
    kill(engines[i], SIGKILL);
    int status;
    waitpid(engines[i], &status, 0);
    kills += WIFSIGNALED(status);
    board->Reopen(i);
    engines[i] = start(i);
  }
  for (const pid_t pid : engines) {
    int status;
    waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
  }
  uint32_t twice = 0;
  for (uint32_t i = 0; i < kRequests; ++i) {
    ASSERT_GE(board->record(i).hit_blocks, 1u) << i;
    twice += board->record(i).hit_blocks > 1;
  }
  // Only what a killed engine had in hand may have been begun twice.
  EXPECT_LE(twice, static_cast<uint32_t>(kills));
}

}  // namespace
}  // namespace kvpool::replay
