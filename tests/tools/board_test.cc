// The memory that the processes of a replay share, with processes that are killed.
#include "client/replay/board.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
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

TEST(Board, ABlockHasOneOwnerOrManyThatShareIt) {
  auto board = Board::Create({.engines = 3, .blocks = 10});
  ASSERT_TRUE(board.ok()) << board.status();
  EXPECT_TRUE(board->HoldLeased(0, 9));
  EXPECT_TRUE(board->HoldLeased(1, 8)) << "another block";
  EXPECT_FALSE(board->HoldLeased(1, 9));
  EXPECT_FALSE(board->HoldSealed(2, 9));
  board->LetGo(1, 9);
  board->LetGo(2, 9);
  EXPECT_TRUE(board->HoldSealed(0, 9)) << "its owner sealed it";
  EXPECT_TRUE(board->HoldSealed(1, 9));
  EXPECT_FALSE(board->HoldLeased(2, 9));
  board->LetGo(0, 9);
  EXPECT_FALSE(board->HoldLeased(2, 9));
  board->LetGo(1, 9);
  EXPECT_TRUE(board->HoldLeased(2, 9));
  // What an engine held that is being killed may be another's at any time.
  EXPECT_FALSE(board->HoldLeased(0, 9));
  board->Doom(2);
  EXPECT_TRUE(board->HoldLeased(0, 9));
  board->LetGo(0, 9);
  board->Reopen(2);
  EXPECT_TRUE(board->HoldLeased(1, 9)) << "the process that comes after it has nothing";
  EXPECT_FALSE(board->HoldLeased(2, 9)) << "and is seen again";
}

TEST(Board, OfTwoOwnersAtOnceOneIsTold) {
  constexpr uint32_t kRounds = 1000;
  auto board = Board::Create({.engines = 2, .blocks = kRounds});
  ASSERT_TRUE(board.ok()) << board.status();
  std::atomic<uint32_t> ready[2] = {};
  std::vector<char> alone[2] = {std::vector<char>(kRounds), std::vector<char>(kRounds)};
  const auto engine = [&](uint32_t self) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      ready[self].store(round + 1, std::memory_order_release);
      for (int looks = 0; ready[1 - self].load(std::memory_order_acquire) <= round; ++looks) {
        if (looks > 100) std::this_thread::yield();
      }
      alone[self][round] =
          self == 0 || round % 2 == 0 ? board->HoldLeased(self, round) : board->HoldSealed(self, round);
    }
  };
  std::thread other(engine, 1);
  engine(0);
  other.join();
  for (uint32_t round = 0; round < kRounds; ++round)
    ASSERT_FALSE(alone[0][round] && alone[1][round]) << round;
}

TEST(Board, KeysThatWereSealedAreKnown) {
  constexpr uint32_t kKeys = 1000;
  auto board = Board::Create({.engines = 1, .keys = kKeys});
  ASSERT_TRUE(board.ok()) << board.status();
  std::mt19937_64 random(3);
  std::vector<uint64_t> digests = {0, ~uint64_t{0}};
  // Half of them begin their search at one place.
  while (digests.size() < kKeys) digests.push_back(digests.size() % 2 == 0 ? random() : random() << 12);
  for (const uint64_t digest : digests) {
    ASSERT_FALSE(board->sealed(digest)) << digest;
    board->Sealed(digest);
    board->Sealed(digest);
    ASSERT_TRUE(board->sealed(digest)) << digest;
  }
  for (const uint64_t digest : digests) EXPECT_TRUE(board->sealed(digest)) << digest;
}

}  // namespace
}  // namespace kvpool::replay
