// Verbs that name many blocks: they are applied in parts, between which others get in.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
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
  // So often the space's mutex was held.
  uint64_t Holds() {
    const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
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

// What is found, what is not, and what the event log has of either.
TEST_F(LargeBatchTest, KeysAreLookedUpCountedAndLoggedInParts) {
  const std::string path = testing::TempDir() + "large_match.events";
  const std::vector<std::string> keys = Keys("none", kMaxNames);
  uint64_t holds[2];
  for (const bool logs : {false, true}) {
    if (logs) options_.event_log = path;
    StartWith(1024);
    const auto engine = OpenEngine(OpenRequest());
    const uint64_t before = Holds();
    EXPECT_EQ(engine->Match(keys).tokens(), 0u);
    holds[logs] = Holds() - before;
  }
  EXPECT_GE(holds[0], 2 * kMaxNames / Turn::kNames) << "read, and counted as missed";
  EXPECT_GE(holds[1] - holds[0], kMaxNames / Turn::kNames - 1);
}

TEST_F(LargeBatchTest, AChainInFrontOfOneNameIsWork) {
  constexpr int kTimes = 16;
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest()), other = OpenEngine(OpenRequest(), "other");
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  const std::vector<std::string> keys = Keys("chain", kMany);
  engine->Seal(blocks, keys);
  engine->Release(blocks);
  while (daemon_->HousekeepOnce(), Blocks().sealed() > 0) {
  }
  std::vector<v1::Operation> operations;
  for (int i = 0; i < kTimes; ++i) {
    operations.push_back(MatchOp({keys.back()}));
    operations.push_back(ReleaseOp({blocks.back()}));
  }
  const uint64_t before = Holds();
  const v1::StepResponse response = other->Step(std::move(operations));
  EXPECT_GE(Holds() - before, 2u * kTimes) << "all of it is taken, and given back, each time";
  for (int i = 0; i < kTimes; ++i) {
    EXPECT_EQ(response.results(2 * i).match().tokens(), 16);
    EXPECT_EQ(response.results(2 * i + 1).release().refused_size(), 0);
  }
}

TEST_F(LargeBatchTest, WhatAnotherVerbVisitedIsNoWorkOfARef) {
  constexpr int kTimes = 64;
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest()), other = OpenEngine(OpenRequest(), "other");
  const uint64_t held = other->Lease(1)[0];
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  engine->Seal(blocks, Keys("chain", kMany));
  engine->Release(blocks);
  const uint64_t before = Holds();
  other->Step(std::vector<v1::Operation>(kTimes, RefOp({held})));
  EXPECT_LE(Holds() - before, 4u);
}

// Groups of 16, 16 and 32 tokens a block; the second has a window of 160 tokens.
class LargeMatchTest : public LargeBatchTest {
 protected:
  static constexpr uint32_t kWindow = 10;  // Blocks.
  v1::OpenSession HybridRequest() const {
    v1::OpenSession request = OpenRequest();
    for (const uint32_t group : {1, 2}) {
      v1::LayerGroup* added = request.mutable_layout()->add_groups();
      added->set_name(group == 1 ? "sliding" : "wide");
      added->add_layers(group);
      added->set_tokens_per_block(group == 1 ? 16 : 32);
      if (group == 1) added->set_window_tokens(16 * kWindow);
    }
    return request;
  }
  // Seals new blocks under the keys at these places, and lets go of them.
  void Cache(Engine* engine, uint32_t group, const std::vector<std::string>& keys,
             const std::vector<uint32_t>& places) {
    if (places.empty()) return;
    std::vector<std::string> named;
    for (const uint32_t place : places) named.push_back(keys[place]);
    const std::vector<uint64_t> blocks = engine->Lease(static_cast<uint32_t>(places.size()));
    v1::Operation seal = SealOp(blocks, named);
    seal.mutable_seal()->set_group(group);
    ASSERT_EQ(engine->Do(seal).seal().refused_size(), 0);
    ASSERT_EQ(engine->Release(blocks).refused_size(), 0);
  }
  v1::MatchResult MatchAll(Engine* engine) {
    v1::Operation match;
    for (uint32_t group = 0; group < 3; ++group) {
      v1::GroupKeys* asked = match.mutable_match()->add_groups();
      asked->set_group(group);
      asked->set_key_bytes(32);
      for (const std::string& key : keys_[group]) asked->mutable_keys()->append(key);
    }
    const v1::OperationResult result = engine->Do(match);
    EXPECT_EQ(result.code(), 0) << result.message();
    return result.match();
  }
  // Gives back all of it, once, and looks that it was one hold on each block.
  void ExpectOneHoldOnEach(Engine* engine, const v1::MatchResult& match) {
    std::vector<uint64_t> held;
    for (const v1::GroupHit& group : match.groups()) {
      for (const uint64_t block : group.blocks()) {
        if (block != 0) held.push_back(block);
      }
    }
    if (held.empty()) return;
    EXPECT_EQ(engine->Release(held).refused_size(), 0);
    EXPECT_EQ(engine->Release(held).refused_size(), static_cast<int>(held.size())) << "held twice";
  }
  static std::vector<uint32_t> Places(uint32_t begin, uint32_t end) {
    std::vector<uint32_t> places;
    for (uint32_t place = begin; place < end; ++place) places.push_back(place);
    return places;
  }

  const std::vector<std::string> keys_[3] = {Keys("full", kMany), Keys("sliding", kMany),
                                             Keys("wide", kMany / 2)};
};

TEST_F(LargeMatchTest, SeveralGroupsEndTogether) {
  std::mt19937 random(20261123);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 12; ++round) {
    StartWith(16384);
    const auto engine = OpenEngine(HybridRequest()), other = OpenEngine(HybridRequest(), "other");
    const uint32_t full = below(3) == 0 ? kMany : below(kMany),
                   wide = below(2) == 0 ? kMany / 2 : below(kMany / 2);
    // Of the second group some runs are there, which may be too short, or none.
    std::vector<bool> there(kMany, round % 4 == 0);
    for (uint32_t runs = below(6); runs > 0; --runs) {
      const uint32_t begin = below(kMany), length = below(3) == 0 ? below(kWindow) : kWindow + below(500);
      for (uint32_t i = begin; i < std::min(kMany, begin + length); ++i) there[i] = round % 4 != 0;
    }
    std::vector<uint32_t> sliding;
    for (uint32_t i = 0; i < kMany; ++i) {
      if (there[i]) sliding.push_back(i);
    }
    Cache(engine.get(), 0, keys_[0], Places(0, full));
    Cache(engine.get(), 2, keys_[2], Places(0, wide));
    Cache(engine.get(), 1, keys_[1], sliding);
    // By the definition, block by block.
    uint32_t steps = std::min(full / 2, wide);
    const auto whole = [&](uint32_t at) {
      for (uint32_t i = 2 * at; i > (2 * at > kWindow ? 2 * at - kWindow : 0); --i) {
        if (!there[i - 1]) return false;
      }
      return true;
    };
    while (!whole(steps)) --steps;

    const v1::MatchResult match = MatchAll(other.get());
    ASSERT_EQ(match.tokens(), steps * 32) << "round " << round;
    const std::vector<uint32_t> sizes = {2 * steps, 2 * steps, steps};
    for (int group = 0; group < 3; ++group) {
      const auto& blocks = match.groups(group).blocks();
      ASSERT_EQ(static_cast<uint32_t>(blocks.size()), sizes[group]);
      for (int i = 0; i < blocks.size(); ++i) {
        const bool before_window = group == 1 && i + static_cast<int>(kWindow) < blocks.size();
        EXPECT_EQ(blocks.Get(i) == 0, before_window) << group << " " << i;
      }
    }
    v1::MissReason miss = v1::MISS_REASON_NEVER_SEEN;
    if (steps < std::min(full / 2, wide)) miss = v1::MISS_REASON_WINDOW;
    if (steps == kMany / 2) miss = v1::MISS_REASON_NONE;
    EXPECT_EQ(match.miss(), miss);
    const DaemonSnapshot snapshot = daemon_->Snapshot();
    EXPECT_EQ(snapshot.totals.pool.lookups, 1u);
    EXPECT_EQ(snapshot.totals.pool.lookup_tokens, kMany * 16);
    EXPECT_EQ(snapshot.totals.pool.hit_tokens, steps * 32);
    EXPECT_EQ(snapshot.totals.pool.lookup_blocks, kMany + kMany + kMany / 2);
    EXPECT_EQ(snapshot.totals.pool.hit_blocks, 3 * steps + std::min(2 * steps, kWindow));
    ExpectOneHoldOnEach(other.get(), match);
    daemon_.reset();
  }
}

// The windows need room that the runs in front of them must leave.
TEST_F(LargeMatchTest, AllGroupsAreWithinTheCap) {
  StartWith(16384);
  const auto engine = OpenEngine(HybridRequest());
  for (const uint32_t group : {0, 1, 2}) {
    Cache(engine.get(), group, keys_[group], Places(0, static_cast<uint32_t>(keys_[group].size())));
  }
  v1::OpenSession request = HybridRequest();
  request.set_max_blocks(3000);
  const auto other = OpenEngine(request, "other");
  const v1::MatchResult match = MatchAll(other.get());
  EXPECT_EQ(match.miss(), v1::MISS_REASON_CAP);
  // A step is three blocks, and the window is ten.
  EXPECT_LE(match.tokens() / 32 * 3 + kWindow, 3000u);
  EXPECT_GT(match.tokens() / 32 * 3 + kWindow + 3, 3000u);
  ExpectOneHoldOnEach(other.get(), match);
}

// A window of several parts, in groups that all have one.
TEST_F(LargeMatchTest, LargeWindowsAreWholeOrShorter) {
  constexpr uint32_t kLargeWindow = 2 * Turn::kNames + 50;
  StartWith(16384);
  v1::OpenSession request = OpenRequest();
  v1::LayerGroup* first = request.mutable_layout()->mutable_groups(0);
  first->set_window_tokens(16 * kLargeWindow);
  v1::LayerGroup* second = request.mutable_layout()->add_groups();
  *second = *first;
  second->set_name("second");
  second->set_layers(0, 1);
  const auto engine = OpenEngine(request);
  for (const uint32_t group : {0, 1}) Cache(engine.get(), group, keys_[0], Places(0, kMany));
  v1::Operation match;
  for (const uint32_t group : {0, 1}) {
    v1::GroupKeys* asked = match.mutable_match()->add_groups();
    asked->set_group(group);
    asked->set_key_bytes(32);
    for (const std::string& key : keys_[0]) asked->mutable_keys()->append(key);
  }
  const v1::MatchResult all = engine->Do(match).match();
  EXPECT_EQ(all.tokens(), kMany * 16);
  EXPECT_EQ(std::count(all.groups(1).blocks().begin(), all.groups(1).blocks().end(), 0),
            kMany - kLargeWindow);
  ExpectOneHoldOnEach(engine.get(), all);
  // Both windows are beyond the cap: what is found is shorter than one.
  request.set_max_blocks(kLargeWindow);
  const auto other = OpenEngine(request, "other");
  const v1::MatchResult part = other->Do(match).match();
  EXPECT_EQ(part.miss(), v1::MISS_REASON_CAP);
  EXPECT_EQ(part.tokens() / 16 * 2, kLargeWindow) << "a sink is not counted";
  ExpectOneHoldOnEach(other.get(), part);
}

// Nothing is taken for a session that has ended, whose place another may have by then.
TEST_F(LargeMatchTest, ASessionEndsInTheMiddleOfAMatch) {
  StartWith(16384);
  const auto engine = OpenEngine(HybridRequest());
  for (const uint32_t group : {0, 1, 2}) {
    Cache(engine.get(), group, keys_[group], Places(0, static_cast<uint32_t>(keys_[group].size())));
  }
  for (int round = 0; round < 12; ++round) {
    const auto other = OpenEngine(HybridRequest(), "other");
    v1::Operation match = MatchOp(keys_[0]);
    *match.mutable_match()->add_groups() = match.match().groups(0);
    match.mutable_match()->mutable_groups(1)->set_group(1);
    std::atomic<bool> began = false;
    std::thread ends([&] {
      while (!began) std::this_thread::yield();
      for (int i = 0; i < round * 8; ++i) std::this_thread::yield();
      other->Die();
    });
    std::vector<v1::Operation> matches(3, match);
    began = true;
    const v1::StepResponse response = other->Step(std::move(matches));
    ends.join();
    for (const v1::OperationResult& result : response.results()) {
      EXPECT_TRUE(result.code() == 0 || result.code() == static_cast<int>(absl::StatusCode::kAborted));
    }
    for (int i = 0; i < 30; ++i) daemon_->HousekeepOnce();
    EXPECT_EQ(Blocks().sealed(), 0) << "round " << round;
    EXPECT_EQ(Blocks().leased(), 1) << "the sink";
  }
}

// What others evict meanwhile shortens what is found; it never leaves a hold behind, nor a hole.
TEST_F(LargeMatchTest, OthersEvictMeanwhile) {
  StartWith(16384);
  const auto engine = OpenEngine(HybridRequest()), other = OpenEngine(HybridRequest(), "other");
  std::atomic<bool> over = false;
  std::thread evicts([&] {
    uint32_t round = 0;
    while (!over) {
      v1::EvictRequest request;
      request.set_count(1 + round++ % 50);
      v1::EvictResponse response;
      EXPECT_TRUE(daemon_->Evict(request, &response).ok());
    }
  });
  for (int round = 0; round < 10; ++round) {
    for (const uint32_t group : {0, 2, 1}) {
      Cache(engine.get(), group, keys_[group], Places(0, static_cast<uint32_t>(keys_[group].size())));
    }
    const v1::MatchResult match = MatchAll(other.get());
    const auto steps = static_cast<int>(match.tokens() / 32);
    EXPECT_EQ(match.groups(0).blocks_size(), 2 * steps);
    EXPECT_EQ(match.groups(1).blocks_size(), 2 * steps);
    EXPECT_EQ(match.groups(2).blocks_size(), steps);
    for (int i = std::max(0, 2 * steps - static_cast<int>(kWindow)); i < 2 * steps; ++i) {
      EXPECT_NE(match.groups(1).blocks(i), 0u);
    }
    ExpectOneHoldOnEach(other.get(), match);
  }
  over = true;
  evicts.join();
  EXPECT_EQ(Blocks().leased(), 2) << "the sinks";
}

TEST_F(LargeBatchTest, RefusalsNameTheirPlaces) {
  StartWith(8192);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(kMany);
  const std::vector<uint32_t> gone = {
      0, 7, Turn::kNames - 1, Turn::kNames, 3 * Turn::kNames + 5, 3 * Turn::kNames + 6, kMany - 2, kMany - 1};
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

TEST_F(LargeBatchTest, AMemberThatHungUpBeforeItsSessionWasReadyLeavesNothing) {
  StartWith(1024);
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(OpenRequest()).ok());
  std::vector<uint64_t> guesses(60);
  for (size_t i = 0; i < guesses.size(); ++i) guesses[i] = i + 1;
  for (int i = 0; i < 10; ++i) engine->Step(std::vector<v1::Operation>(10, ReleaseOp(guesses, /*after=*/7)));
  daemon_->OnHangup(engine->id);
  EXPECT_EQ(engine->member->completions.size(), 0u);
}

TEST_F(LargeBatchTest, CompletionsThatArrivedAreDroppedInParts) {
  StartWith(1024);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t block = engine->Lease(1)[0];
  constexpr int kBatches = 8;
  for (int i = 0; i < kBatches; ++i) {
    const std::vector<v1::Operation> releases(Turn::kNames, ReleaseOp({block}, /*after=*/7));
    ASSERT_TRUE(engine->Step(releases).results(0).parked());
  }
  engine->Step({FenceOp(7)});
  size_t arrived = 0;
  for (v1::StepResponse part; (part = engine->Pending()).completions_size() > 0;) {
    arrived += static_cast<size_t>(part.completions_size());
  }
  EXPECT_EQ(engine->member->completions.size(), kBatches * Turn::kNames);
  EXPECT_GT(arrived, 0u) << "some came with the fence";
  engine->Step({TouchOp({block})});  // Its answer is behind them.
  v1::StepRequest request;
  request.set_acknowledged(engine->sequence);
  request.set_sequence(++engine->sequence);
  const uint64_t before = Holds();
  EXPECT_EQ(engine->Step(request).code(), 0);
  EXPECT_EQ(engine->member->completions.size(), 0u);
  EXPECT_GE(Holds() - before, kBatches - 1u);
}

TEST_F(LargeBatchTest, WhatABatchParksAndAppliesIsAllInPlace) {
  StartWith(1024);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t block = engine->Lease(1)[0];
  std::vector<v1::Operation> operations(3 * Completions::kMostFolded, ReleaseOp({block}, /*after=*/7));
  operations.push_back(FenceOp(7));
  const v1::StepResponse response = engine->Step(std::move(operations));
  EXPECT_EQ(response.completions_size(), 0);
  for (const v1::OperationResult& result : response.results()) EXPECT_FALSE(result.parked());
}

// All that repetitions keep may be forgotten by one acknowledgement. What they do not keep comes as completions.
TEST_F(LargeBatchTest, RepetitionsKeepABoundedNumberOfResults) {
  StartWith(1024);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t block = engine->Lease(1)[0];
  constexpr size_t kBatches = 8;
  std::vector<v1::StepRequest> batches(kBatches);
  for (v1::StepRequest& batch : batches) {
    batch.set_sequence(++engine->sequence);
    for (size_t i = 0; i < Turn::kNames; ++i) *batch.add_operations() = ReleaseOp({block}, /*after=*/7);
    ASSERT_TRUE(engine->Step(batch).results(0).parked());
  }
  std::set<std::pair<uint64_t, uint32_t>> heard;
  const auto hear = [&](const v1::StepResponse& response) {
    for (const v1::Completion& completion : response.completions()) {
      heard.emplace(completion.sequence(), completion.index());
    }
  };
  hear(engine->Step({FenceOp(7)}));
  for (const v1::StepRequest& batch : batches) {
    const v1::StepResponse again = engine->Step(batch);
    for (int i = 0; i < again.results_size(); ++i) {
      if (!again.results(i).parked()) heard.emplace(batch.sequence(), i);
    }
    hear(again);
  }
  for (v1::StepResponse part; (part = engine->Pending()).completions_size() > 0;) hear(part);
  EXPECT_EQ(heard.size(), kBatches * Turn::kNames);
  EXPECT_EQ(engine->member->answers.kept(), AnswerWindow::kMostKept);
  v1::StepRequest request;
  request.set_acknowledged(engine->sequence);
  request.set_sequence(++engine->sequence);
  EXPECT_EQ(engine->Step(request).code(), 0);
  EXPECT_EQ(engine->member->answers.kept(), 0u);
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
