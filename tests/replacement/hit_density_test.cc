// What hit_density learns, and that it learns it.
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/replacement/parts/reuse_model.h"
#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool {
namespace {

// Keeps waits by class and beginning, and shows them to a model.
class Waits {
 public:
  explicit Waits(ReuseModel* model) : model_(*model) {}
  void Begin(int cls, uint64_t now) {
    model_.Begin(cls);
    open_.push_back({cls, now, true});
  }
  int cls(size_t i) const { return open_[i].cls; }
  void Hit(size_t i, uint64_t now) {
    model_.Hit(open_[i].cls, now - open_[i].since);
    open_[i].open = false;
  }
  // Two rounds, as what a group shows takes effect in the next one.
  void Learn(uint64_t now) {
    for (int round = 0; round < 2; ++round) {
      model_.BeginRound(now, now);
      for (const Wait& wait : open_) {
        if (wait.open) model_.Show(wait.cls, now - wait.since);
      }
      while (model_.LearnNext()) {
      }
    }
  }

 private:
  struct Wait {
    int cls;
    uint64_t since;
    bool open;
  };
  ReuseModel& model_;
  std::vector<Wait> open_;
};

// Contents of class 0 come back after 1,000 blocks; of class 1 one in ten does; of class 2 none.
TEST(ReuseModel, LearnsWhatComesBackAndWhen) {
  ReuseModel model({0, 1, 2});
  Waits waits(&model);
  std::mt19937_64 random(5);
  for (uint64_t now = 0; now < 50000; ++now) {
    waits.Begin(static_cast<int>(random() % 3), now);
    if (now < 1000) continue;
    const int cls = waits.cls(now - 1000);
    if (cls == 0 || (cls == 1 && random() % 10 == 0)) waits.Hit(now - 1000, now);
  }
  waits.Learn(50000);
  // Held from the beginning a block of class 0 gives a hit for about 1,000 blocks of time.
  EXPECT_NEAR(model.Index(0, 0), 1e-3, 1.5e-4);
  EXPECT_GT(model.Index(0, 900), model.Index(0, 0)) << "the nearer the hit, the less is to be held for it";
  EXPECT_LT(model.Index(1, 0), model.Index(0, 0) / 5);
  EXPECT_LT(model.Index(2, 0), model.Index(1, 0));
  // What is still there long after its time will not come back.
  EXPECT_LT(model.Index(0, 4000), model.Index(0, 0) / 5);
}

// Half of the contents come back after a while. In a large cache ages are counted in units of several blocks.
TEST(ReuseModel, AgesGrowWithTheCache) {
  ReuseModel model({0});
  Waits waits(&model);
  for (uint64_t i = 0; i < 20000; ++i) {
    waits.Begin(0, i);
    if (i >= 2000 && i % 2 == 0) waits.Hit(i - 2000, i);
  }
  waits.Learn(20000);
  // One in two gives a hit, for 2,000 blocks of time or as long as it takes to give it up.
  EXPECT_NEAR(model.Index(0, 0), 0.5 / 2000, 0.1e-3);

  ReuseModel large({0});
  Waits of_large(&large);
  large.SetBlocks(1u << 20);
  for (uint64_t i = 0; i < 20000; ++i) {
    of_large.Begin(0, i * 64);
    if (i >= 2000 && i % 2 == 0) of_large.Hit(i - 2000, i * 64);
  }
  of_large.Learn(20000 * 64);
  EXPECT_NEAR(large.Index(0, 0) * 64, model.Index(0, 0), model.Index(0, 0) * 0.1);

  // What was learned before the cache grew is not lost.
  const double before = model.Index(0, 0);
  model.SetBlocks(1u << 18);
  waits.Learn(20000);
  EXPECT_NEAR(model.Index(0, 0), before, before * 0.2);
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
