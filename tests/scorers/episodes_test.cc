#include "cuda/scorers/episodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "cuda/scorers/budgets.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kTopicDims = 8;

// Segments that are about the topics in turn: each lies near its topic's axis.
std::vector<double> Conversation(uint32_t segments, uint32_t topics, uint64_t seed) {
  Random random(seed);
  std::vector<double> values;
  for (uint32_t segment = 0; segment < segments; ++segment) {
    for (uint64_t d = 0; d < kTopicDims; ++d)
      values.push_back((d == segment % topics ? 1 : 0) + random.Normal() / 20);
  }
  return values;
}

std::vector<double> QuestionAbout(uint32_t topic) {
  std::vector<double> question(kTopicDims, 0.1);
  question[topic] = 1;
  return question;
}

TEST(EpisodesTest, TopicsAreEpisodesAndAQuestionFindsItsOwn) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const std::vector<double> values = Conversation(24, 3, seed);
    const auto episodes = FindEpisodes({values, kTopicDims}, {.episodes = 3, .seed = seed});
    ASSERT_TRUE(episodes.ok()) << episodes.status();
    for (uint32_t segment = 0; segment < 24; ++segment) EXPECT_EQ(episodes->of_segment[segment], segment % 3);
    for (uint32_t topic = 0; topic < 3; ++topic) {
      const auto nearest = NearestEpisode({episodes->centroids, kTopicDims}, QuestionAbout(topic));
      ASSERT_TRUE(nearest.ok()) << nearest.status();
      EXPECT_EQ(nearest->episode, topic);
      EXPECT_GT(nearest->cosine, 0.9);
      const std::vector<uint32_t>& prompt = episodes->prompts[topic];
      EXPECT_EQ(prompt.size(), 4u);
      EXPECT_TRUE(std::is_sorted(prompt.begin(), prompt.end()));
      for (const uint32_t segment : prompt) EXPECT_EQ(segment % 3, topic);
    }
  }
}

TEST(EpisodesTest, PromptsAreTheSegmentsNearestToTheCentroid) {
  const std::vector<double> values = {0, 1, 2, 3, 10};
  const auto one = FindEpisodes({values, 1}, {.episodes = 1, .prompt_segments = 2});
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_THAT(one->centroids, ElementsAre(3.2));
  EXPECT_THAT(one->prompts, ElementsAre(ElementsAre(2, 3)));
}

TEST(EpisodesTest, TheSameFromTheSameSeedAndAlikeSegmentsAreOneEpisode) {
  const std::vector<double> values = Conversation(50, 5, 3);
  const auto first = FindEpisodes({values, kTopicDims}, {}), second = FindEpisodes({values, kTopicDims}, {});
  EXPECT_EQ(first->of_segment, second->of_segment);
  EXPECT_EQ(first->centroids, second->centroids);
  const std::vector<double> alike(5 * kTopicDims, 1.5);
  const auto one = FindEpisodes({alike, kTopicDims}, {.episodes = 3});
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_THAT(one->of_segment, ElementsAre(0, 0, 0, 0, 0));
  EXPECT_EQ(one->prompts.size(), 1u);
}

TEST(EpisodesTest, WhatIsWrongIsRefused) {
  const std::vector<double> values = {1, 2, 3, 4}, none = {1, NAN};
  const auto error = [](const auto& answer) { return std::string(answer.status().message()); };
  EXPECT_THAT(error(FindEpisodes({values, 2}, {.episodes = 3})), HasSubstr("must be 1 to 2"));
  EXPECT_THAT(error(FindEpisodes({values, 3}, {.episodes = 1})), HasSubstr("no rows"));
  EXPECT_THAT(error(FindEpisodes({none, 2}, {.episodes = 1})), HasSubstr("not finite"));
  EXPECT_THAT(error(NearestEpisode({values, 2}, {1.0})), HasSubstr("dimension 1"));
  EXPECT_EQ(NearestEpisode({values, 2}, {0.0, 0.0})->episode, 0u);
}

// Layers whose tokens are attended alike have the least variance, and get the most.
TEST(D2oDensityTest, EvenAttentionGetsTheLargerShare) {
  const std::vector<double> sums = {1, 1, 1, 1, 1, 1, 1, 1,   // layer 0: both heads even
                                    4, 0, 0, 0, 1, 1, 1, 1,   // layer 1: one head on one token
                                    4, 0, 0, 0, 0, 0, 0, 4};  // layer 2: both heads on one token
  std::vector<double> density(3), ratios(3);
  ASSERT_TRUE(D2oDensity(sums, 3, 2, absl::MakeSpan(density)).ok());
  EXPECT_THAT(density, ElementsAre(0, 0.5, 1));
  ASSERT_TRUE(D2oRatios(density, 0.2, absl::MakeSpan(ratios)).ok());
  EXPECT_GT(ratios[0], ratios[1]);
  EXPECT_GT(ratios[1], ratios[2]);
  EXPECT_FALSE(D2oDensity(sums, 3, 5, absl::MakeSpan(density)).ok());
}

}  // namespace
}  // namespace kvpool::scorers
