// Verbs that name many blocks: they are applied in parts, between which others get in.
#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "server/space/turn.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

// More than four parts, and the last is not whole.
constexpr uint32_t kMany = 4 * Turn::kNames + 100;

class LargeBatchTest : public ServiceTest {
 protected:
  // One slab with so many blocks, its null block among them.
  void StartWith(uint32_t blocks) {
    options_.slab_bytes = uint64_t{blocks} * kBlockBytes;
    StartDaemon(blocks / kSlabBlocks);
  }
  static std::vector<uint64_t> Tail(const std::vector<uint64_t>& blocks, size_t first) {
    return {blocks.begin() + static_cast<ptrdiff_t>(first), blocks.end()};
  }
};

TEST_F(LargeBatchTest, ALeaseInPartsIsOneLease) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const uint32_t free = Blocks().free();
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  EXPECT_EQ(std::set<uint64_t>(blocks.begin(), blocks.end()).size(), kMany);
  EXPECT_EQ(Blocks().free(), free - kMany);
  const v1::LeaseResult rest = engine->LeaseAsked(kMany, 1);
  EXPECT_EQ(static_cast<uint32_t>(rest.blocks_size()), free - kMany);
  EXPECT_EQ(rest.shortfall(), v1::SHORTFALL_PRESSURE);
}

TEST_F(LargeBatchTest, ALeaseThatCanNotHaveItsLeastTakesNone) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const uint32_t free = Blocks().free();
  const v1::LeaseResult none = engine->LeaseAsked(60000, free + 1);
  EXPECT_EQ(none.blocks_size(), 0);
  EXPECT_EQ(none.shortfall(), v1::SHORTFALL_PRESSURE);
  EXPECT_EQ(Blocks().free(), free);
}

// Two want more than half of all, or nothing, at the same time: parts of both are leased in turns, and what does not
// do is given back.
TEST_F(LargeBatchTest, LeasesThatMeetHalfWayLeaveNothingBehind) {
  StartWith(8192);
  const auto a = OpenEngine(OpenRequest()), b = OpenEngine(OpenRequest(), "other");
  for (int round = 0; round < 50; ++round) {
    const uint32_t free = Blocks().free();
    const uint32_t wanted = free / 2 + 1 + round;
    v1::LeaseResult of_a, of_b;
    std::thread other([&] { of_b = b->LeaseAsked(wanted, wanted); });
    of_a = a->LeaseAsked(wanted, wanted);
    other.join();
    std::set<uint64_t> owned;
    for (const v1::LeaseResult* lease : {&of_a, &of_b}) {
      EXPECT_TRUE(lease->blocks().empty() || static_cast<uint32_t>(lease->blocks_size()) == wanted);
      for (const uint64_t block : lease->blocks()) EXPECT_TRUE(owned.insert(block).second) << "two owners";
    }
    EXPECT_EQ(Blocks().free(), free - owned.size());
    if (!of_a.blocks().empty()) a->Release({of_a.blocks().begin(), of_a.blocks().end()});
    if (!of_b.blocks().empty()) b->Release({of_b.blocks().begin(), of_b.blocks().end()});
  }
}

TEST_F(LargeBatchTest, AChainThatIsSealedInPartsIsOneChain) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  const std::vector<std::string> keys = Keys("chain", kMany);
  const v1::SealResult sealed = engine->Seal(blocks, keys);
  EXPECT_EQ(std::vector<uint64_t>(sealed.canonical().begin(), sealed.canonical().end()), blocks);
  EXPECT_EQ(sealed.refused_size(), 0);
  // Its last block holds all those in front.
  engine->Release({blocks.begin(), blocks.end() - 1});
  EXPECT_EQ(Blocks().sealed(), kMany);
  engine->Release({blocks.back()});
  while (daemon_->HousekeepOnce(), Blocks().sealed() > 0) {
  }
  const v1::MatchResult match = engine->Match(keys);
  EXPECT_EQ(match.tokens(), kMany * 16);
  EXPECT_EQ(Blocks().sealed(), kMany);
}

TEST_F(LargeBatchTest, AMatchInPartsIsOneMatch) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest()), other = OpenEngine(OpenRequest(), "other");
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  std::vector<std::string> keys = Keys("chain", kMany);
  engine->Seal(blocks, keys);
  EXPECT_EQ(other->Match(keys).tokens(), kMany * 16);
  const size_t end = 2 * Turn::kNames + 5;
  keys[end] = Key("another");
  const v1::MatchResult part = other->Match(keys);
  EXPECT_EQ(part.tokens(), end * 16);
  EXPECT_EQ(part.miss(), v1::MISS_REASON_NEVER_SEEN);
  ASSERT_EQ(part.groups_size(), 1);
  const auto& found = part.groups(0).blocks();
  EXPECT_EQ(std::vector<uint64_t>(found.begin(), found.end()),
            std::vector<uint64_t>(blocks.begin(), blocks.begin() + static_cast<ptrdiff_t>(end)));
  EXPECT_EQ(other->Release({found.begin(), found.end()}).refused_size(), 0);
  EXPECT_EQ(other->Release(blocks).refused_size(), 0) << "the holds of the first match";
  EXPECT_EQ(other->Release({blocks[0]}).refused_size(), 1);
}

TEST_F(LargeBatchTest, RefusalsNameTheirPlaces) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  const std::vector<uint32_t> gone = {0, 7, Turn::kNames - 1, Turn::kNames, 3 * Turn::kNames + 5, kMany - 1};
  for (const uint32_t index : gone) engine->Release({blocks[index]});
  const auto places = [](const auto& refused) {
    std::vector<uint32_t> indices;
    for (const v1::Refusal& refusal : refused) indices.push_back(refusal.index());
    return indices;
  };
  EXPECT_EQ(places(engine->Do(RefOp(blocks)).ref().refused()), gone);
  EXPECT_EQ(places(engine->Release(blocks).refused()), gone);
  EXPECT_EQ(engine->Release(blocks).refused_size(), static_cast<int>(gone.size())) << "the holds of the Ref";
  EXPECT_EQ(engine->Release(blocks).refused_size(), static_cast<int>(kMany));
  EXPECT_EQ(Blocks().leased(), 1) << "the sink";
}

TEST_F(LargeBatchTest, ARepetitionWaitsForTheFirstApplication) {
  StartWith(1024);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t block = engine->Lease(1)[0];
  constexpr int kRounds = 8, kHolds = 8000;
  for (int round = 0; round < kRounds; ++round) {
    v1::StepRequest request;
    request.set_sequence(++engine->sequence);
    *request.add_operations() = RefOp(std::vector<uint64_t>(kHolds, block));
    v1::StepResponse first, again;
    std::thread other([&] { daemon_->Apply(engine->member, request, &again, nullptr); });
    daemon_->Apply(engine->member, request, &first, nullptr);
    other.join();
    for (const v1::StepResponse* response : {&first, &again}) {
      ASSERT_EQ(response->results_size(), 1);
      EXPECT_EQ(response->results(0).ref().refused_size(), 0);
    }
  }
  const v1::ReleaseResult released = engine->Release(std::vector<uint64_t>(kRounds * kHolds + 2, block));
  EXPECT_EQ(released.refused_size(), 1) << "each Ref was applied once";
}

// The rest of a batch whose session ends is not applied to whoever has its place in the pool by then.
TEST_F(LargeBatchTest, ASessionEndsInTheMiddle) {
  StartWith(4096);
  for (int round = 0; round < 30; ++round) {
    const auto engine = OpenEngine(OpenRequest());
    const std::vector<uint64_t> blocks = engine->Lease(2000);
    ASSERT_EQ(blocks.size(), 2000u);
    std::vector<v1::Operation> operations;
    for (int i = 0; i < 4; ++i) operations.push_back(RefOp(blocks));
    for (int i = 0; i < 4; ++i) operations.push_back(ReleaseOp(blocks));
    operations.push_back(ReleaseOp(blocks));
    std::thread other([&] {
      for (int i = 0; i < round; ++i) std::this_thread::yield();
      engine->Die();
    });
    const v1::StepResponse response = engine->Step(std::move(operations));
    other.join();
    for (const v1::OperationResult& result : response.results()) {
      EXPECT_TRUE(result.code() == 0 || result.code() == static_cast<int>(absl::StatusCode::kAborted));
    }
    for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
    EXPECT_EQ(Blocks().leased(), 0);
    EXPECT_EQ(Blocks().quarantined(), 0);
    // Whoever comes next holds what it leases.
    const auto next = OpenEngine(OpenRequest(), "next");
    const std::vector<uint64_t> of_next = next->Lease(2000);
    EXPECT_EQ(next->Release(of_next).refused_size(), 0);
    next->Die();
    for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
  }
}

// Much that is parked is answered after the turn in which its session ends, in parts.
TEST_F(LargeBatchTest, ASessionThatEndsAnswersAllThatIsParked) {
  StartWith(1024);
  for (const bool hangs_up : {false, true}) {
    const auto engine = OpenEngine(OpenRequest());
    const std::vector<uint64_t> blocks = engine->Lease(20);
    constexpr int kBatches = 40, kReleases = 50;
    for (int i = 0; i < kBatches; ++i) {
      const v1::StepResponse parked =
          engine->Step(std::vector<v1::Operation>(kReleases, ReleaseOp(blocks, /*after=*/7)));
      for (const v1::OperationResult& result : parked.results()) ASSERT_TRUE(result.parked());
    }
    std::optional<v1::OperationResult> waits;
    engine->Send(ReleaseOp(blocks, /*after=*/7), &waits);
    ASSERT_FALSE(waits.has_value());
    if (hangs_up) {
      daemon_->OnHangup(engine->id);
    } else {
      daemon_->OnUndelivered(engine->token);
    }
    ASSERT_TRUE(waits.has_value());
    EXPECT_EQ(waits->code(), static_cast<int>(absl::StatusCode::kAborted));
    std::set<std::pair<uint64_t, uint32_t>> answered;
    for (v1::StepResponse part; (part = engine->Pending()).completions_size() > 0;) {
      for (const v1::Completion& completion : part.completions()) {
        EXPECT_EQ(completion.result().code(), static_cast<int>(absl::StatusCode::kAborted));
        EXPECT_TRUE(answered.emplace(completion.sequence(), completion.index()).second) << "answered twice";
      }
    }
    EXPECT_EQ(answered.size(), size_t{kBatches} * kReleases);
    engine->Die();
    for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
    EXPECT_EQ(Blocks().leased() + Blocks().quarantined(), 0u);
  }
}

TEST_F(LargeBatchTest, AFenceAppliesWhatIsParkedInParts) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  ASSERT_TRUE(engine->Step({SealOp(blocks, Keys("parked", kMany), "", 1)}).results(0).parked());
  ASSERT_TRUE(engine->Step({ReleaseOp(blocks, 2)}).results(0).parked());
  const v1::StepResponse passed = engine->Step({FenceOp(2), MatchOp(Keys("parked", 3))});
  ASSERT_EQ(passed.completions_size(), 2);
  for (const v1::Completion& completion : passed.completions()) {
    EXPECT_EQ(completion.result().code(), 0) << completion.result().message();
  }
  EXPECT_EQ(passed.results(1).match().tokens(), 3 * 16);
  for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().sealed(), 3);
  EXPECT_EQ(Blocks().cached(), kMany - 3);
}

}  // namespace
}  // namespace kvpool
