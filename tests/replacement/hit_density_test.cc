// What hit_density learns, and that it learns it.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/replacement/reuse_model.h"
#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool {
namespace {

// Steps enough for a sweep over all that is watched and a lesson for each class, twice: what a group shows takes
// effect in the round after.
void LearnAll(ReuseModel* model, uint64_t now) {
  for (int i = 0; i < 3 * 5000; ++i) model->Step(now, now);
}

// Contents of class 0 come back after 1,000 blocks, of class 1 one in ten does, of class 2 none.
TEST(ReuseModel, LearnsWhatComesBackAndWhen) {
  ReuseModel model({0, 1, 2});
  std::vector<std::pair<uint64_t, int>> waits;
  std::mt19937_64 random(5);
  for (uint64_t now = 0; now < 50000; ++now) {
    const int cls = static_cast<int>(random() % 3);
    const uint64_t hash = random();
    model.BeginWait(hash, cls, now);
    waits.emplace_back(hash, cls);
    if (now < 1000) continue;
    const auto& [old_hash, old_class] = waits[now - 1000];
    if (old_class == 0 || (old_class == 1 && random() % 10 == 0)) model.EndWait(old_hash, now);
  }
  LearnAll(&model, 50000);
  // Held from the beginning a block of class 0 gives a hit for about 1,000 blocks of time.
  EXPECT_NEAR(model.Index(0, 0), 1e-3, 1.5e-4);
  EXPECT_GT(model.Index(0, 900), model.Index(0, 0)) << "the nearer the hit, the less is to be held for it";
  EXPECT_LT(model.Index(1, 0), model.Index(0, 0) / 5);
  EXPECT_LT(model.Index(2, 0), model.Index(1, 0));
  // What is still there long after its time will not come back.
  EXPECT_LT(model.Index(0, 4000), model.Index(0, 0) / 5);
}

TEST(ReuseModel, ASampleSaysTheSame) {
  ReuseModel all({0}), some({0});
  some.SetBlocks(ReuseModel::kWatched * 4);  // One content in 16.
  for (uint64_t now = 0; now < 60000; ++now) {
    for (ReuseModel* model : {&all, &some}) {
      model->BeginWait(now * 0x9e3779b97f4a7c15u, 0, now);
      if (now >= 2000 && now % 2 == 0) model->EndWait((now - 2000) * 0x9e3779b97f4a7c15u, now);
    }
  }
  LearnAll(&all, 60000);
  LearnAll(&some, 60000);
  EXPECT_NEAR(some.Index(0, 0), all.Index(0, 0), all.Index(0, 0) * 0.1);
}

// Two kinds of chains alternate: of eight blocks, asked for again 300 requests later, and of thirty, never.
TEST(HitDensity, KeepsTheKindThatComesBack) {
  sim::Workload w{.name = "two kinds", .tokens_per_block = 512};
  constexpr uint32_t kDocuments = 3000;
  const auto ask = [&](uint32_t document, uint32_t blocks) {
    w.requests.push_back(
        {.now_ms = w.requests.size(), .first = w.contents.size(), .blocks = blocks, .tokens = blocks});
    for (uint32_t i = 0; i < blocks; ++i) w.contents.push_back(document * 32 + i);
  };
  for (uint32_t d = 0; d < kDocuments; ++d) {
    if (d % 2 == 1) {
      ask(d, 30);
      continue;
    }
    ask(d, 8);
    if (d >= 300) ask(d - 300, 8);
  }
  w.distinct = kDocuments * 32;
  const sim::ReplayOptions options{.policy = "hit_density", .capacity_blocks = 2000};
  const sim::Result learned = *sim::Replay(w, options);
  const sim::Result lru = *sim::Replay(w, {.policy = "lru", .capacity_blocks = 2000});
  const sim::Result opt = sim::ReplayOptimal(w, 2000, {});
  EXPECT_EQ(lru.hit_blocks, 0u) << "5,700 blocks are in between";
  EXPECT_GT(static_cast<double>(learned.hit_blocks), 0.8 * static_cast<double>(opt.hit_blocks));
  EXPECT_EQ(sim::Replay(w, options)->hit_blocks, learned.hit_blocks) << "it is deterministic";
}

}  // namespace
}  // namespace kvpool
