// cold_rl: its network computes what numpy's does, and it learns.
#include "server/replacement/policies/cold_rl.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/formats/safetensors.h"
#include "server/sim/read_workload.h"
#include "server/sim/replay.h"
#include "server/sim/train.h"

namespace kvpool {
namespace {

std::vector<float> FloatsOf(const safetensors::Tensor& tensor) {
  std::vector<float> values(tensor.elements);
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

// make_q_vectors.py makes the vectors.
TEST(QNetworkTest, IsNumpys) {
  std::ifstream file(KVPOOL_SOURCE_DIR "/tests/replacement/q_vectors.safetensors", std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  const auto vectors = safetensors::Parse(bytes);
  ASSERT_TRUE(vectors.ok()) << vectors.status();
  Weights weights(ColdRlPolicy::Shape(), "vectors");
  std::vector<float> inputs, expected;
  for (const safetensors::Tensor& tensor : vectors->tensors) {
    if (tensor.name == "test.inputs") {
      inputs = FloatsOf(tensor);
    } else if (tensor.name == "test.q") {
      expected = FloatsOf(tensor);
    } else {
      weights.Set(tensor.name, tensor.shape, FloatsOf(tensor));
    }
  }
  ASSERT_TRUE(weights.Check(ColdRlPolicy::Shape()).ok());
  const QNetwork network(weights);
  ASSERT_EQ(inputs.size(), 32 * QNetwork::kInputs);
  for (size_t i = 0; i < 32; ++i) {
    const QNetwork::Q q = network.Evaluate(&inputs[i * QNetwork::kInputs]);
    EXPECT_NEAR(q.keep, expected[2 * i], 1e-5) << i;
    EXPECT_NEAR(q.evict, expected[2 * i + 1], 1e-5) << i;
  }
}

sim::Workload Synthetic(const std::string& name, uint64_t requests, uint64_t seed = 1) {
  return *sim::ReadWorkload("synthetic:" + name, {.max_requests = requests, .seed = seed});
}

double Hits(const sim::Workload& workload, const std::string& policy, uint32_t capacity,
            std::shared_ptr<const Weights> weights = nullptr) {
  return sim::Replay(workload, {.policy = policy, .capacity_blocks = capacity, .weights = std::move(weights)})
      ->block_ratio();
}

// Half of the requests are for contents that never come back, and a feature tells which: their size.
TEST(ColdRlTest, LearnsWhatIsFlagged) {
  constexpr uint32_t kCapacity = 1000;
  const auto weights =
      sim::Train("cold_rl", Synthetic("flagged", 20000), {.capacities = {kCapacity}, .epochs = 2});
  ASSERT_TRUE(weights.ok()) << weights.status();
  sim::Workload other = Synthetic("flagged", 20000, 2);
  other.warm_up = 2000;
  const double hits = Hits(other, "cold_rl", kCapacity, std::make_shared<const Weights>(*weights));
  const double best = Hits(other, "opt", kCapacity);
  EXPECT_GT(hits, 0.99 * best);
  EXPECT_LT(Hits(other, "lru", kCapacity), 0.8 * best) << "or there was nothing to learn";
}

TEST(ColdRlTest, TrainingIsOfItsSeed) {
  const sim::Workload workload = Synthetic("short_bursts", 3000);
  const auto train = [&](uint64_t seed) {
    return sim::Train("cold_rl", workload, {.capacities = {200, 500}, .seed = seed, .epochs = 1})
        ->Serialize();
  };
  const std::string one = train(1);
  EXPECT_EQ(one, train(1));
  EXPECT_NE(one, train(2));
}

TEST(ColdRlTest, NothingToLearnFromIsAnError) {
  const sim::Workload workload = Synthetic("short_bursts", 50);
  const absl::Status nothing = sim::Train("cold_rl", workload, {.capacities = {5000}}).status();
  EXPECT_EQ(nothing.message(), "nothing to learn from: no block had to leave at these capacities");
  EXPECT_EQ(sim::Train("lru", workload, {.capacities = {100}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sim::Train("cold_rl", workload, {.capacities = {1}}).status().message(),
            "the largest request has 4 blocks, the pool 1");
}

// The built-in weights were trained on something else altogether.
TEST(ColdRlTest, IsAboveLruOnWhatLruDoesBadlyOn) {
  for (const char* name : {"size_inversion", "short_bursts", "scans"}) {
    sim::Workload workload = Synthetic(name, 20000, 2);
    workload.warm_up = 4000;
    EXPECT_GT(Hits(workload, "cold_rl", 500), 1.05 * Hits(workload, "lru", 500)) << name;
  }
}

// Times are in turnovers, so a turnover adds one to each.
TEST(ColdRlTest, FeaturesGrowWithWhatTheyMean) {
  const auto a = ColdRlView{.age = 1, .size = 2, .hits = 3, .inter_arrival = 0.5, .idle = 0.25, .cost = 1.5};
  const auto b = ColdRlView{.age = 2, .size = 3, .hits = 4, .inter_arrival = 1.5, .idle = 1.25, .cost = 2.5};
  for (size_t i = 0; i < QNetwork::kInputs; ++i) EXPECT_LT(a.Features()[i], b.Features()[i]) << i;
  EXPECT_GT(ColdRlView{}.Features()[3], ColdRlView{.inter_arrival = 1000}.Features()[3])
      << "what was asked for once may come back later than all";
}

}  // namespace
}  // namespace kvpool
