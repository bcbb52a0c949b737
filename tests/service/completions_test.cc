// Completions, against a model that looks at all of them each time.
#include "server/space/completions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

constexpr size_t kAll = SIZE_MAX;
using Names = std::vector<std::pair<uint64_t, uint32_t>>;  // Sequence and index.

class NaiveCompletions {
 public:
  void Add(uint64_t sequence, uint32_t index) { waiting_.push_back({sequence, index}); }
  Names Take(size_t count) {
    Names taken;
    for (; taken.size() < count && !waiting_.empty(); waiting_.pop_front()) {
      taken.emplace_back(waiting_.front().sequence, waiting_.front().index);
      sent_.push_back(waiting_.front());
    }
    return taken;
  }
  std::vector<uint32_t> Fold(uint64_t sequence) {
    std::vector<uint32_t> folded;
    for (std::deque<Entry>* entries : {&sent_, &waiting_}) {
      std::erase_if(*entries, [&](const Entry& entry) {
        if (entry.sequence == sequence) folded.push_back(entry.index);
        return entry.sequence == sequence;
      });
    }
    return folded;
  }
  void ConfirmBy(uint64_t sequence) {
    for (Entry& entry : sent_) {
      if (entry.confirmed_by == 0) entry.confirmed_by = sequence;
    }
  }
  void Acknowledge(uint64_t through) {
    std::erase_if(sent_, [through](const Entry& entry) {
      return entry.confirmed_by != 0 && entry.confirmed_by <= through;
    });
  }
  void Resend() {
    for (Entry& entry : sent_) entry.confirmed_by = 0;
    waiting_.insert(waiting_.begin(), sent_.begin(), sent_.end());
    sent_.clear();
  }
  void Clear() {
    waiting_.clear();
    sent_.clear();
  }
  bool any_waiting() const { return !waiting_.empty(); }
  size_t size() const { return waiting_.size() + sent_.size(); }

 private:
  struct Entry {
    uint64_t sequence = 0;
    uint32_t index = 0;
    uint64_t confirmed_by = 0;
  };
  std::deque<Entry> waiting_, sent_;
};

v1::OperationResult ResultOf(uint64_t sequence, uint32_t index) {
  v1::OperationResult result;
  result.set_code(static_cast<int32_t>(100 * sequence + index));
  return result;
}

TEST(CompletionsTest, AgreesWithTheModel) {
  std::mt19937 random(11);
  const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  Completions completions;
  OwedReleases owed;
  NaiveCompletions model;
  uint32_t index = 0;
  uint64_t sequence = 1, confirmed = 0;
  for (int i = 0; i < 30000; ++i) {
    switch (below(12)) {
      case 0:
        if (below(20) > 0) break;
        completions.Clear();
        model.Clear();
        break;
      case 1:
        if (below(6) > 0) break;
        completions.Resend();
        model.Resend();
        break;
      case 2: {
        confirmed = below(2) == 0 ? sequence : 1 + below(static_cast<uint32_t>(sequence));
        completions.ConfirmBy(confirmed);
        model.ConfirmBy(confirmed);
        break;
      }
      case 3: {
        const uint64_t through = below(3) == 0 ? confirmed : below(static_cast<uint32_t>(sequence));
        const size_t most = 1 + below(5);
        while (completions.Acknowledge(through, most, &owed)) {
        }
        model.Acknowledge(through);
        break;
      }
      case 4: {
        v1::StepResponse answer;
        answer.set_sequence(1 + below(static_cast<uint32_t>(sequence)));
        for (uint32_t j = 0; j < 64; ++j) answer.add_results()->set_parked(true);
        size_t room = kAll;
        const std::vector<uint32_t> folded = completions.Fold(&room, kAll, &answer);
        ASSERT_EQ(folded, model.Fold(answer.sequence())) << "step " << i;
        for (const uint32_t at : folded) {
          EXPECT_EQ(answer.results(static_cast<int>(at)).code(), ResultOf(answer.sequence(), at).code());
        }
        break;
      }
      case 5:
      case 6: {
        v1::StepResponse response;
        // One is taken whatever its size.
        completions.Take(below(3) == 0 ? kAll : 1, &response);
        Names taken;
        for (const v1::Completion& completion : response.completions()) {
          taken.emplace_back(completion.sequence(), completion.index());
          EXPECT_EQ(completion.result().code(), ResultOf(completion.sequence(), completion.index()).code());
        }
        ASSERT_EQ(taken, model.Take(taken.size())) << "step " << i;
        break;
      }
      default:
        if (index == 64 || below(5) == 0) {
          ++sequence;
          index = 0;
        }
        completions.Add(sequence, index, ResultOf(sequence, index));
        model.Add(sequence, index++);
    }
    ASSERT_EQ(completions.size(), model.size()) << "step " << i;
    ASSERT_EQ(completions.any_waiting(), model.any_waiting()) << "step " << i;
    ASSERT_EQ(completions.bytes().bytes() == 0, model.size() == 0);
  }
}

TEST(CompletionsTest, WhatDoesNotFitIsNotFolded) {
  Completions completions;
  for (uint32_t i = 0; i < 3; ++i) completions.Add(5, i, ResultOf(5, i));
  v1::StepResponse answer;
  answer.set_sequence(5);
  for (int i = 0; i < 3; ++i) answer.add_results();
  size_t room = completions.bytes().bytes() - 1;
  EXPECT_THAT(completions.Fold(&room, kAll, &answer), testing::ElementsAre(0, 1));
  EXPECT_EQ(room, completions.bytes().bytes() - 1);
  EXPECT_EQ(completions.size(), 1u);
}

TEST(CompletionsTest, AnAnswerHasABoundedNumberInPlace) {
  constexpr uint32_t kMany = Completions::kMostFolded + 5;
  Completions completions;
  v1::StepResponse answer;
  answer.set_sequence(1);
  for (uint32_t i = 0; i < kMany; ++i) {
    completions.Add(1, i, {});
    answer.add_results();
  }
  size_t room = kAll;
  EXPECT_EQ(completions.Fold(&room, kAll, &answer).size(), Completions::kMostFolded);
  EXPECT_EQ(completions.Fold(&room, 3, &answer).size(), 3u);
  EXPECT_EQ(completions.size(), 2u);
}

TEST(CompletionsTest, AResponseHasABoundedNumber) {
  Completions completions;
  OwedReleases owed;
  for (uint32_t i = 0; i < Completions::kMostTaken + 5; ++i) completions.Add(1, i, {});
  v1::StepResponse first, second;
  completions.Take(kAll, &first);
  EXPECT_EQ(first.completions_size(), static_cast<int>(Completions::kMostTaken));
  completions.Take(kAll, &second);
  EXPECT_EQ(second.completions_size(), 5);
  completions.ConfirmBy(2);
  // All that arrived is dropped, a part at a time.
  EXPECT_TRUE(completions.Acknowledge(2, 4000, &owed));
  EXPECT_EQ(completions.size(), Completions::kMostTaken + 5 - 4000);
  EXPECT_FALSE(completions.Acknowledge(2, 4000, &owed));
  EXPECT_EQ(completions.size(), 0u);
}

}  // namespace
}  // namespace kvpool
