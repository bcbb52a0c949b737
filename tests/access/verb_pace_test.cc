#include <gtest/gtest.h>

#include "server/access/access_control.h"

namespace kvpool {
namespace {

constexpr uint64_t kMs = 1'000'000, kSecond = 1000 * kMs;

TEST(VerbPace, WithoutALimitNothingWaits) {
  VerbPace pace;
  for (int i = 0; i < 10; ++i) EXPECT_EQ(pace.Take(5, 1'000'000'000), 0);
  EXPECT_TRUE(pace.TakeNow(5, 1));
}

TEST(VerbPace, ATenthOfASecondComesAtOnceAndTheRestInTime) {
  VerbPace pace;
  pace.set_rate(1000);
  const uint64_t now = 50 * kSecond;
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(pace.Take(now, 1), 0) << i;
  EXPECT_EQ(pace.Take(now, 1), 1 * kMs);
  EXPECT_EQ(pace.Take(now, 1), 2 * kMs);
  EXPECT_FALSE(pace.TakeNow(now, 1));
  EXPECT_EQ(pace.Take(now, 1), 3 * kMs) << "what was refused is not taken";
  EXPECT_EQ(pace.Take(now + 4 * kMs, 1), 0) << "as it would have come by then";
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
