#include "server/sim/train_cold_rl.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "proto/support/status_macros.h"
#include "server/replacement/policies/cold_rl.h"
#include "server/replacement/policy.h"
#include "server/replacement/thinking_policy.h"
#include "server/sim/q_trainer.h"

namespace kvpool::sim {
namespace {

constexpr uint32_t kEpochs = 6;
constexpr double kRate = 1e-3;
// A hit in a turnover is worth half of one now: a block holds its room for so long.
constexpr double kDiscount = 0.5;
constexpr double kRandomDecisions = 0.1;
// Of the candidates of a decision, so many are watched: those of one decision are much alike.
constexpr uint32_t kWatched = 8;
constexpr size_t kMostExperience = 400'000;
constexpr uint32_t kBatch = 64, kBatchesToTarget = 500, kLeastBatches = 1500, kMostBatches = 6000;

// A candidate, and what came of it.
struct Experience {
  QFeatures features;
  float turnovers = 0;  // Until it was asked for again; above 1: it was not within one.
};

// The same block, and nothing happened for a turnover.
QFeatures Aged(const QFeatures& features) {
  QFeatures aged = features;
  for (const size_t time : {0u, 4u}) {  // age and idle
    aged[time] = static_cast<float>(std::log2(std::exp2(8.0 * features[time]) + 1) / 8);
  }
  return aged;
}

// Candidates that are watched until their turnover is over.
class Watch {
 public:
  Watch(std::vector<Experience>* experience, std::mt19937_64* random)
      : experience_(*experience), random_(*random) {}

  void Begin(uint64_t hash, const QFeatures& features, uint64_t now_ms, double turnover_ms) {
    open_[hash].push_back({features, now_ms, turnover_ms});
  }
  void OnAccess(uint64_t hash, uint64_t now_ms) {
    const auto found = open_.find(hash);
    if (found == open_.end()) return;
    for (const Open& open : found->second) {
      Keep(open.features, static_cast<double>(now_ms - open.begin_ms) / open.turnover_ms);
    }
    open_.erase(found);
  }
  // What was not asked for again. What was seen for less than a turnover says nothing.
  void End(uint64_t now_ms) {
    // In the order of the hashes: that of the table is not the same in each run.
    std::vector<std::pair<uint64_t, const std::vector<Open>*>> rest;
    for (const auto& [hash, open] : open_) rest.emplace_back(hash, &open);
    std::sort(rest.begin(), rest.end());
    for (const auto& [hash, all] : rest) {
      for (const Open& open : *all) {
        if (static_cast<double>(now_ms - open.begin_ms) >= open.turnover_ms) Keep(open.features, 2);
      }
    }
    open_.clear();
  }

 private:
  struct Open {
    QFeatures features;
    uint64_t begin_ms;
    double turnover_ms;
  };

  // A sample of fixed size of all that was met.
  void Keep(const QFeatures& features, double turnovers) {
    const Experience one{features, static_cast<float>(std::min(turnovers, 2.0))};
    ++met_;
    if (experience_.size() < kMostExperience) {
      experience_.push_back(one);
    } else if (const uint64_t at = random_() % met_; at < kMostExperience) {
      experience_[at] = one;
    }
  }

  std::vector<Experience>& experience_;
  std::mt19937_64& random_;
  absl::flat_hash_map<uint64_t, std::vector<Open>> open_;
  uint64_t met_ = 0;
};

// cold_rl that is watched, and decides at random now and then.
class WatchedColdRl final : public ThinkingPolicy {
 public:
  WatchedColdRl(const PolicyOptions& options, Watch* watch, std::mt19937_64* random)
      : policy_(options), watch_(*watch), random_(*random), hashes_(options.max_blocks) {
    judge_ = std::make_shared<const SometimesRandom>(policy_.judge(), random);
  }

  std::string_view name() const override { return policy_.name(); }
  void OnInsert(BlockId block, const Content& content) override {
    hashes_[Index(block)] = content.hash;
    watch_.OnAccess(content.hash, content.now_ms);
    policy_.OnInsert(block, content);
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    watch_.OnAccess(hashes_[Index(block)], now_ms);
    policy_.OnHit(block, now_ms);
  }
  void OnUsed(BlockId block, uint64_t now_ms) override { policy_.OnUsed(block, now_ms); }
  void OnOffer(BlockId block) override { policy_.OnOffer(block); }
  void OnWithdraw(BlockId block) override { policy_.OnWithdraw(block); }
  void OnEvict(BlockId block) override { policy_.OnEvict(block); }
  BlockId Victim(uint64_t now_ms) override { return policy_.Victim(now_ms); }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_.Prefetch(block, hash); }
  uint32_t offered() const override { return policy_.offered(); }
  double bytes_per_block() const override { return policy_.bytes_per_block(); }

  std::shared_ptr<const Judge> judge() const override { return judge_; }
  void Show(uint64_t now_ms, Candidates* out) override {
    policy_.Show(now_ms, out);
    const size_t count = out->blocks.size();
    for (uint32_t n = 0; n < kWatched; ++n) {
      const size_t i = random_() % count;
      QFeatures features;
      std::copy_n(&out->features[i * features.size()], features.size(), features.begin());
      watch_.Begin(hashes_[Index(out->blocks[i].id)], features, now_ms, policy_.turnover_ms());
    }
  }
  uint64_t last_use(BlockId block) const override { return policy_.last_use(block); }
  void OnSpared(BlockId block) override { policy_.OnSpared(block); }

 private:
  class SometimesRandom final : public Judge {
   public:
    SometimesRandom(std::shared_ptr<const Judge> judge, std::mt19937_64* random)
        : judge_(std::move(judge)), random_(*random) {}
    bool Rank(const Candidates& candidates, const Stopwatch& stopwatch, uint64_t budget_us,
              Ranking* ranking) const override {
      if (static_cast<double>(random_() >> 11) * 0x1p-53 >= kRandomDecisions) {
        return judge_->Rank(candidates, stopwatch, budget_us, ranking);
      }
      std::vector<uint32_t>& order = ranking->order;
      order.resize(candidates.blocks.size());
      std::iota(order.begin(), order.end(), 0u);
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
      ranking->spared = 0;
      return true;
    }

   private:
    const std::shared_ptr<const Judge> judge_;
    std::mt19937_64& random_;
  };

  ColdRlPolicy policy_;
  Watch& watch_;
  std::mt19937_64& random_;
  std::vector<uint64_t> hashes_;
  std::shared_ptr<const Judge> judge_;
};

void Learn(const std::vector<Experience>& experience, QTrainer* trainer, Weights* weights,
           std::mt19937_64* random) {
  QNetwork target(*weights);
  // Each once on average, of a trace of middling length.
  const uint64_t batches = std::clamp<uint64_t>(experience.size() / kBatch, kLeastBatches, kMostBatches);
  for (uint64_t batch = 0; batch < batches; ++batch) {
    if (batch % kBatchesToTarget == 0) {
      trainer->CopyTo(weights);
      target = QNetwork(*weights);
    }
    for (uint32_t i = 0; i < kBatch; ++i) {
      const Experience& e = experience[(*random)() % experience.size()];
      double keep;
      if (e.turnovers <= 1) {
        keep = std::pow(kDiscount, e.turnovers);
      } else {
        const QNetwork::Q later = target.Evaluate(Aged(e.features).data());
        keep = kDiscount * std::max(later.keep, later.evict);
      }
      trainer->Add(e.features, static_cast<float>(keep), 0);
    }
    trainer->Step();
  }
  trainer->CopyTo(weights);
}

}  // namespace

absl::StatusOr<Weights> TrainColdRl(const Workload& workload, const TrainOptions& options) {
  std::mt19937_64 random(options.seed);
  QTrainer trainer(options.seed, kRate);
  Weights weights(ColdRlPolicy::Shape(), options.trained);
  trainer.CopyTo(&weights);
  const uint32_t epochs = options.epochs == 0 ? kEpochs : options.epochs;
  const size_t steps = epochs * (options.capacities.size() + 1);
  size_t done = 0;
  const auto step = [&] {
    if (options.progress) options.progress(++done, steps);
  };
  for (uint32_t epoch = 0; epoch < epochs; ++epoch) {
    std::vector<Experience> experience;
    for (const uint32_t capacity : options.capacities) {
      Watch watch(&experience, &random);
      const ReplayOptions replay{
          .policy = "cold_rl", .capacity_blocks = capacity, .cost = options.cost, .weights = nullptr};
      const PolicyOptions policy{.max_blocks = capacity + 1,
                                 .cost_per_depth = replay.cost_per_depth(workload),
                                 .weights = std::make_shared<const Weights>(weights)};
      RETURN_IF_ERROR(CheckFits(workload, capacity));
      ReplayWith(workload, replay, std::make_unique<WatchedColdRl>(policy, &watch, &random));
      watch.End(workload.requests.back().now_ms);
      step();
    }
    if (experience.empty()) {
      return absl::InvalidArgumentError("nothing to learn from: no block had to leave at these capacities");
    }
    Learn(experience, &trainer, &weights, &random);
    step();
  }
  return weights;
}

}  // namespace kvpool::sim
