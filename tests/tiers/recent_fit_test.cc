#include "server/base/recent_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace kvpool {
namespace {

using testing::Each;

TEST(RecentFitTest, FindsThePlaneUnderTheNoise) {
  RecentFit<3> fit(1000);
  std::mt19937 dice(1);
  std::uniform_real_distribution<double> tokens(1, 8192), before(0, 100000), noise(.95, 1.05);
  for (int i = 0; i < 2000; ++i) {
    const double n = tokens(dice), pairs = n * (before(dice) + n / 2);
    fit.Add({1, n, pairs}, (2e-3 + 3e-5 * n + 4e-10 * pairs) * noise(dice));
  }
  // What is small beside the noise of the others can't be known.
  for (const double n : {1000.0, 8000.0}) {
    for (const double d : {0.0, 50000.0}) {
      const double pairs = n * (d + n / 2), truth = 2e-3 + 3e-5 * n + 4e-10 * pairs;
      EXPECT_NEAR(fit.At({1, n, pairs}) / truth, 1, .15) << n << " behind " << d;
    }
  }
}

// A coefficient that the samples would have below zero is zero, and the others are the best without it.
TEST(RecentFitTest, NoPartIsNegative) {
  RecentFit<2> fit(100);
  for (int i = 1; i <= 50; ++i) fit.Add({1, static_cast<double>(i)}, 10 * i - 5);
  EXPECT_EQ(fit.coefficients()[0], 0);
  EXPECT_NEAR(fit.coefficients()[1], 9.85, .1);
  RecentFit<2> falling(100);
  for (int i = 1; i <= 50; ++i) falling.Add({1, static_cast<double>(i)}, 100 - i);
  EXPECT_EQ(falling.coefficients()[1], 0);
  EXPECT_NEAR(falling.coefficients()[0], 73, 4);
}

TEST(RecentFitTest, WhatWasLongAgoCountsLittle) {
  RecentFit<2> fit(10);
  for (int i = 0; i < 100; ++i) fit.Add({1, 2}, 5);
  for (int i = 0; i < 100; ++i) fit.Add({1, 2}, 9);
  EXPECT_NEAR(fit.At({1, 2}), 9, .01);
  EXPECT_EQ(fit.samples(), 200u);
}

// Prefills of one size, or nearly, don't tell what is fixed from what grows with the size.
TEST(RecentFitTest, SamplesThatAreAlikeSpeakOfTheirSize) {
  std::mt19937 dice(1);
  std::uniform_real_distribution<double> noise(.9, 1.1);
  for (const double spread : {0.0, 20.0}) {
    for (int trial = 0; trial < 20; ++trial) {
      RecentFit<3> fit(100);
      std::uniform_real_distribution<double> tokens(2048 - spread, 2048);
      for (int i = 0; i < 200; ++i) {
        const double n = tokens(dice);
        fit.Add({1, n, n * n / 2}, 2e-4 * n * noise(dice));
      }
      EXPECT_EQ(fit.coefficients()[0], 0) << spread;
      EXPECT_NEAR(fit.coefficients()[1], 2e-4, 2e-5) << spread;
      EXPECT_EQ(fit.coefficients()[2], 0) << spread;
    }
  }
}

TEST(RecentFitTest, WhatIsNoMeasurementIsLeftOut) {
  RecentFit<2> fit(100);
  EXPECT_THAT(fit.coefficients(), Each(0));
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  fit.Add({1, nan}, 1);
  fit.Add({1, 1}, nan);
  fit.Add({1, inf}, 1);
  fit.Add({1, -1}, 1);
  fit.Add({1, 1}, -1);
  EXPECT_EQ(fit.samples(), 0u);
  fit.Add({0, 0}, 1);
  EXPECT_THAT(fit.coefficients(), Each(0));
}

}  // namespace
}  // namespace kvpool
