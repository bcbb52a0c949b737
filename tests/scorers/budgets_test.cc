#include "cuda/scorers/budgets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

using testing::ElementsAre;

uint64_t Sum(const std::vector<uint64_t>& budgets) {
  return std::accumulate(budgets.begin(), budgets.end(), uint64_t{0});
}

TEST(BudgetsTest, PyramidFallsArithmetically) {
  std::vector<uint64_t> budgets(8);
  ASSERT_TRUE(
      PyramidBudgets({.capacity_tokens = 320, .sequence_tokens = 4096}, absl::MakeSpan(budgets)).ok());
  EXPECT_THAT(budgets, ElementsAre(500, 431, 362, 293, 224, 155, 86, 17));
  ASSERT_TRUE(PyramidBudgets({.capacity_tokens = 320, .sequence_tokens = 520}, absl::MakeSpan(budgets)).ok());
  EXPECT_EQ(budgets[0], 456u) << "no more than there is before the window";
  ASSERT_TRUE(PyramidBudgets({.capacity_tokens = 320, .sequence_tokens = 400}, absl::MakeSpan(budgets)).ok());
  EXPECT_THAT(budgets, testing::Each(256)) << "SnapKV's below twice the budget";
  EXPECT_FALSE(PyramidBudgets({.capacity_tokens = 64}, absl::MakeSpan(budgets)).ok());
}

TEST(BudgetsTest, CakeSumsToWhatIsThere) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> preferences(1 + random.Below(40));
    for (double& p : preferences) p = random.Below(8) == 0 ? 0 : std::exp(4 * random.Normal());
    std::vector<uint64_t> budgets(preferences.size());
    const uint64_t most = 1 + random.Below(200),
                   total = random.Below(static_cast<uint32_t>(most * budgets.size() + 1));
    ASSERT_TRUE(CakeBudgets(preferences, total, most, absl::MakeSpan(budgets)).ok());
    EXPECT_EQ(Sum(budgets), total);
    for (const uint64_t budget : budgets) EXPECT_LE(budget, most);
  }
  std::vector<uint64_t> budgets(6);
  ASSERT_TRUE(CakeBudgets(std::vector<double>(6, 0.1), 600, 1000, absl::MakeSpan(budgets)).ok());
  EXPECT_THAT(budgets, testing::Each(100)) << "identical layers get the same";
  EXPECT_FALSE(CakeBudgets(std::vector<double>(6, NAN), 600, 1000, absl::MakeSpan(budgets)).ok());
  EXPECT_FALSE(CakeBudgets(std::vector<double>(5, 1), 600, 1000, absl::MakeSpan(budgets)).ok());
}

TEST(BudgetsTest, CakeGivesUniformAttentionNothing) {
  AttentionSpread uniform, varied;
  const std::vector<double> rows(32, 0.125);
  AddAttentionSpread(rows, 4, 8, &uniform);
  std::vector<double> other = rows;
  other[3] = 0.2;
  AddAttentionSpread(other, 4, 8, &varied);
  EXPECT_EQ(uniform.variance, 0);
  EXPECT_NEAR(uniform.entropy, 4 * std::log(8), 1e-6);
  EXPECT_EQ(CakePreference(uniform, 1, 1), 0);
  EXPECT_GT(CakePreference(varied, 1.6, 0.4), 0);
}

TEST(BudgetsTest, EpicacheRenormalisesToThePool) {
  Random random(6);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> sensitivity(1 + random.Below(40));
    for (double& s : sensitivity) s = random.Uniform();
    std::vector<uint64_t> budgets(sensitivity.size());
    const double average = 4 + random.Below(3000);
    ASSERT_TRUE(EpicacheBudgets(sensitivity, {.average_tokens = average}, absl::MakeSpan(budgets)).ok());
    EXPECT_EQ(Sum(budgets), static_cast<uint64_t>(average) * budgets.size());
    for (const uint64_t budget : budgets) EXPECT_GE(budget, static_cast<uint64_t>(average / 4));
  }
  std::vector<uint64_t> budgets(4);
  const std::vector<double> scores = {0.95, 0.9, 0.8, 0.6};
  ASSERT_TRUE(
      EpicacheBudgets(scores, {.average_tokens = 1024, .renormalise = false}, absl::MakeSpan(budgets)).ok());
  EXPECT_THAT(budgets, ElementsAre(256, 256, 624, 3401)) << "the authors' code";
}

TEST(BudgetsTest, D2oIsASoftmaxWithinLimits) {
  std::vector<double> ratios(4);
  ASSERT_TRUE(D2oRatios({0.1, 0.2, 0.5, 0.9}, 0.2, absl::MakeSpan(ratios)).ok());
  EXPECT_NEAR(ratios[0], 0.2645077169280178, 1e-15);
  EXPECT_NEAR(std::accumulate(ratios.begin(), ratios.end(), 0.0), 0.8, 1e-15);
  ASSERT_TRUE(D2oRatios({0, 0, 0, 100}, 1, absl::MakeSpan(ratios)).ok());
  EXPECT_THAT(ratios, ElementsAre(1, 1, 1, 0.01));
  EXPECT_FALSE(D2oRatios({0, 0, 0, 1}, 0, absl::MakeSpan(ratios)).ok());
}

}  // namespace
}  // namespace kvpool::scorers
