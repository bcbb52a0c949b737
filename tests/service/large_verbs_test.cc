// Verbs that name very many blocks, and what becomes of them: granted, refused, parked until a step, or behind a device
// operation. In each way they go part by part, and others get in between: each part is a hold of the space's mutex.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "server/space/turn.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

constexpr uint64_t kParts = 16;
constexpr uint32_t kMany = kParts * Turn::kNames;
constexpr uint32_t kBlockSize = 512;  // What the fixture's K and V fill.

v1::Operation PutEpisodeOp(const Refs& blocks) {
  v1::Operation put;
  put.mutable_put_episode()->set_name("set");
  put.mutable_put_episode()->add_centroid(1);
  put.mutable_put_episode()->add_sequences()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return put;
}
v1::Operation ScoreBlocksOp(const Refs& blocks) {
  v1::Operation score = ScoreOp(blocks);
  score.mutable_score()->set_token_scores(false);
  score.mutable_score()->set_block_scores(true);
  return score;
}

bool IsOfNobody(const v1::OperationResult& result) {
  return result.code() == static_cast<int>(absl::StatusCode::kUnauthenticated);
}

uint32_t HalfOf(const Refs& blocks) { return static_cast<uint32_t>(blocks.size()) * kTokens / 2; }

struct Row {
  std::string name;
  std::function<v1::Operation(const Refs&)> make;
  uint64_t passes = 1;  // So often are all of its blocks visited while it is applied.
  bool on_device = false;
  bool waits_behind = true;
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }
const std::vector<Row> kRows = {
    {.name = "release", .make = [](const Refs& blocks) { return ReleaseOp(blocks); }},
    {.name = "seal",
     .make =
         [](const Refs& blocks) { return SealOp(blocks, Keys("chain", static_cast<int>(blocks.size()))); }},
    {.name = "ref", .make = RefOp, .waits_behind = false},
    {.name = "pin", .make = [](const Refs& blocks) { return PinOp(blocks, 1000); }},
    {.name = "unpin", .make = UnpinOp},
    {.name = "set_retention", .make = [](const Refs& blocks) { return RetainOp(blocks, 60, 1000); }},
    // They are looked at, and held.
    {.name = "put_episode", .make = PutEpisodeOp, .passes = 2},
    // They are looked at, and the policy is told of their scores.
    {.name = "score", .make = ScoreBlocksOp, .passes = 2, .on_device = true},
    {.name = "prune",
     .make = [](const Refs& blocks) { return PruneOp(blocks, HalfOf(blocks)); },
     .on_device = true},
    // They are looked at, and the sources are given back.
    {.name = "compact",
     .make = [](const Refs& blocks) { return CompactOp(blocks, HalfOf(blocks)); },
     .passes = 2,
     .on_device = true},
};

class LargeVerbTest : public ScoreTest, public testing::WithParamInterface<Row> {
 protected:
  ~LargeVerbTest() override { hold_.Release(); }
  void SetUp() override {
    slab_blocks_ = 384;
    StartScoring(1);
    engine_ = OpenEngine(Request(), "engine");
    blocks_ = engine_->Lease(kMany);
    ASSERT_EQ(blocks_.size(), kMany);
  }
  static v1::OpenSession Request() {
    v1::OpenSession request = ScoredRequest();
    request.mutable_layout()->set_block_bytes(kBlockSize);
    return request;
  }
  uint64_t Holds() {
    const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  }
  // A pass ends with a part, not with a pause.
  static uint64_t HoldsOf(uint64_t passes) { return passes * (kParts - 1); }
  v1::Operation Make() const { return GetParam().make(blocks_); }
  // A device operation stands at the gates of its blocks, and leaves them.
  uint64_t Passes() const { return GetParam().passes + (GetParam().on_device ? 2 : 0); }

  std::unique_ptr<Engine> engine_;
  Refs blocks_;
};

TEST_P(LargeVerbTest, IsAppliedInParts) {
  const uint64_t before = Holds();
  const v1::OperationResult result = Run(engine_.get(), Make());
  EXPECT_EQ(result.code(), 0) << result.message();
  EXPECT_GE(Holds() - before, HoldsOf(Passes()));
}

TEST_P(LargeVerbTest, IsRefusedInParts) {
  blocks_.back() = BlockRef{BlockId{1}, 77}.Pack();
  const uint64_t before = Holds();
  Run(engine_.get(), Make());
  EXPECT_GE(Holds() - before, HoldsOf(1));
  if (!GetParam().on_device && GetParam().name != "put_episode") return;
  // That it names one twice is found with the mutex free.
  blocks_.back() = blocks_.front();
  const uint64_t then = Holds();
  EXPECT_EQ(Run(engine_.get(), Make()).code(), kInvalidArgument);
  EXPECT_GE(Holds() - then, 3u) << "one of the question, and two of the verb";
}

TEST_P(LargeVerbTest, IsParkedForAStepInParts) {
  v1::Operation operation = Make();
  operation.set_after(7);
  uint64_t before = Holds();
  const auto answer = Begin(engine_.get(), operation);
  EXPECT_GE(Holds() - before, HoldsOf(1)) << "its blocks are named";
  ASSERT_FALSE(answer->there());
  before = Holds();
  engine_->Fence(7);
  const v1::OperationResult result = answer->Await();
  EXPECT_EQ(result.code(), 0) << result.message();
  EXPECT_GE(Holds() - before, HoldsOf(1 + Passes())) << "they are named no more, and it is applied";
}

TEST_P(LargeVerbTest, WaitsBehindAnotherInParts) {
  if (!GetParam().waits_behind) return;
  hold_.Hold();
  const auto first = Begin(engine_.get(), ScoreBlocksOp({blocks_[kMany / 2]}));
  hold_.AwaitCalls(1);
  uint64_t before = Holds();
  const auto answer = Begin(engine_.get(), Make());
  EXPECT_GE(Holds() - before, HoldsOf(2)) << "it is looked what it waits for, and it waits";
  ASSERT_FALSE(answer->there());
  before = Holds();
  hold_.Release();
  EXPECT_EQ(first->Await().code(), 0);
  const v1::OperationResult result = answer->Await();
  EXPECT_EQ(result.code(), 0) << result.message();
  EXPECT_GE(Holds() - before, HoldsOf(GetParam().passes + 1)) << "it is applied, and leaves";
}

// A session may end in any of these pauses: what it held is given back once, and its callers have their answers.
TEST_P(LargeVerbTest, ItsSessionEndsMeanwhile) {
  for (int round = 0; round < 12; ++round) {
    const auto engine = OpenEngine(Request(), "another");
    const Refs blocks = engine->Lease(8 * Turn::kNames);
    ASSERT_EQ(blocks.size(), 8 * Turn::kNames);
    std::atomic<bool> begun = false;
    std::thread ends([&] {
      while (!begun) std::this_thread::yield();
      for (int i = 0; i < 4 * round; ++i) std::this_thread::yield();
      engine->Die();
    });
    const v1::Operation operation = GetParam().make(blocks);
    begun = true;
    const v1::OperationResult result = Run(engine.get(), operation);
    // It may also have come when the session was forgotten.
    EXPECT_TRUE(result.code() == 0 || result.code() == kAborted || IsOfNobody(result)) << result.message();
    ends.join();
    // A device operation keeps its blocks until it is over.
    while (Blocks().leased() + Blocks().quarantined() + Blocks().sealed() > kMany + 1) {
      daemon_->HousekeepOnce();
      std::this_thread::yield();
    }
  }
  EXPECT_EQ(Blocks().leased(), kMany + 1) << "those of the other session, and its sink";
}

INSTANTIATE_TEST_SUITE_P(Verbs, LargeVerbTest, testing::ValuesIn(kRows),
                         [](const testing::TestParamInfo<Row>& info) { return info.param.name; });

}  // namespace
}  // namespace kvpool
