#include "server/sim/train_cold_rl.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "proto/support/status_macros.h"
#include "server/replacement/policies/async_policy.h"
#include "server/replacement/policies/cold_rl.h"
#include "server/replacement/policy.h"
#include "server/sim/q_trainer.h"

namespace kvpool::sim {
namespace {

constexpr uint32_t kColdEpochs = 6;
constexpr double kColdRate = 1e-3;
// A hit one turnover from now is worth half of one now, as the block takes its room meanwhile.
constexpr double kDiscount = 0.5;
constexpr double kRandomDecisions = 0.1;
// So many candidates of a decision are watched. More would teach little, as those of one decision
// are much alike.
constexpr uint32_t kWatched = 8;
constexpr size_t kMostExperience = 400'000;
constexpr uint32_t kBatch = 64, kBatchesToTarget = 500, kLeastBatches = 1500, kMostBatches = 6000;

// A candidate, and when it was asked for again.
struct Experience {
  QFeatures features;
  // The turnovers until it was asked for again; above 1: it was not, within one.
  float turnovers = 0;
};

// The features of the same block a turnover later, if nothing happens.
QFeatures Aged(const QFeatures& features) {
  QFeatures aged = features;
  for (const size_t time : {0u, 4u}) {  // age and idle
    aged[time] = static_cast<float>(std::log2(std::exp2(8.0 * features[time]) + 1) / 8);
  }
  return aged;
}

// Watches candidates until a turnover after their decision.
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
  // Keeps the candidates that were not asked for again, unless they were watched for less than a turnover.
  void End(uint64_t now_ms) {
    // Sorted by hash: the order of the table differs from run to run.
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

  // Keeps a sample of fixed size of all candidates (reservoir sampling).
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

Ranker SometimesRandom(std::shared_ptr<const Ranker> ranker, std::mt19937_64* random) {
  return [ranker = std::move(ranker), random](const Candidates& candidates,
                                              absl::FunctionRef<bool()> late) -> std::optional<Ranking> {
    if (static_cast<double>((*random)() >> 11) * 0x1p-53 >= kRandomDecisions) {
      return (*ranker)(candidates, late);
    }
    std::vector<uint32_t> order(candidates.blocks.size());
    std::iota(order.begin(), order.end(), 0u);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[(*random)() % i]);
    return Ranking{.order = std::move(order), .spared = 0};
  };
}

// cold_rl with its candidates watched and some of its decisions random.
class WatchedColdRl final : public ColdRlPolicy {
 public:
  WatchedColdRl(const PolicyOptions& options, Watch* watch, std::mt19937_64* random)
      : ColdRlPolicy(options),
        watch_(*watch),
        random_(*random),
        hashes_(options.max_blocks),
        ranker_(std::make_shared<const Ranker>(SometimesRandom(ColdRlPolicy::ranker(), random))) {}

  void OnInsert(BlockId block, const Content& content) override {
    hashes_[Index(block)] = content.hash;
    watch_.OnAccess(content.hash, content.now_ms);
    ColdRlPolicy::OnInsert(block, content);
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    watch_.OnAccess(hashes_[Index(block)], now_ms);
    ColdRlPolicy::OnHit(block, now_ms);
  }
  std::shared_ptr<const Ranker> ranker() const override { return ranker_; }
  void Show(uint64_t now_ms, Candidates* out) override {
    ColdRlPolicy::Show(now_ms, out);
    const size_t count = out->blocks.size();
    for (uint32_t n = 0; n < kWatched; ++n) {
      const size_t i = random_() % count;
      QFeatures features;
      std::copy_n(&out->features[i * features.size()], features.size(), features.begin());
      watch_.Begin(hashes_[Index(out->blocks[i])], features, now_ms, turnover_ms());
    }
  }

 private:
  Watch& watch_;
  std::mt19937_64& random_;
  std::vector<uint64_t> hashes_;
  const std::shared_ptr<const Ranker> ranker_;
};

void Learn(const std::vector<Experience>& experience, QTrainer* trainer, Weights* weights,
           std::mt19937_64* random) {
  QNetwork target(*weights);
  // On a trace of middling length each experience is used about once.
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
  QTrainer trainer(options.seed, kColdRate);
  Weights weights(ColdRlPolicy::Shape(), options.trained);
  trainer.CopyTo(&weights);
  const uint32_t epochs = options.epochs == 0 ? kColdEpochs : options.epochs;
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
