#include <gtest/gtest.h>

#include "server/access/access_control.h"

namespace kvpool {
namespace {

constexpr uint64_t kMs = 1'000'000, kSecond = 1000 * kMs;

TEST(VerbPace, WithoutALimitNothingWaits) {
  VerbPace pace;
  for (int i = 0; i < 10; ++i) EXPECT_EQ(pace.Take(5, 1'000'000'000), 0);
}

TEST(VerbPace, ATenthOfASecondComesAtOnceAndTheRestInTime) {
  VerbPace pace;
  pace.set_rate(1000);
  const uint64_t now = 50 * kSecond;
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(pace.Take(now, 1), 0) << i;
  EXPECT_EQ(pace.Take(now, 1), 1 * kMs);
  EXPECT_EQ(pace.Take(now, 500), 1 * kMs) << "what waits takes nothing";
  EXPECT_EQ(pace.Take(now + 1 * kMs, 1), 0);
  EXPECT_EQ(pace.Take(now + 1 * kMs, 1), 1 * kMs);
  // What was not used is not saved beyond the burst.
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(pace.Take(now + 1000 * kSecond, 1), 0) << i;
  EXPECT_GT(pace.Take(now + 1000 * kSecond, 1), 0);
}

TEST(VerbPace, ALargeBatchIsPaidByTheNext) {
  VerbPace pace;
  pace.set_rate(10);
  EXPECT_EQ(pace.Take(kSecond, 1000), 0);
  EXPECT_EQ(pace.Take(kSecond, 1), 100 * kSecond - VerbPace::kBurstNs);
  pace.set_rate(10);
  EXPECT_GT(pace.Take(kSecond, 1), 0) << "the same rate changes nothing";
  pace.set_rate(20);
  EXPECT_EQ(pace.Take(kSecond, 1), 0);
}

}  // namespace
}  // namespace kvpool
