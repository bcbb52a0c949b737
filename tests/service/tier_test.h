// A daemon with a file tier that may misbehave, and an engine whose blocks have their key as their bytes.
#ifndef KVPOOL_TESTS_SERVICE_TIER_TEST_H_
#define KVPOOL_TESTS_SERVICE_TIER_TEST_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/space/space.h"
#include "server/tiers/file_tier.h"
#include "tests/service/service_fixture.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {

class TierTest : public ServiceTest {
 protected:
  // The tier counts by the real clock, and a busy machine may stall for seconds.
  static constexpr uint64_t kWaitMs = 60000;

  // A daemon on the folder, of one slab: 15 blocks, one of which is the engine's sink.
  void Begin(TierWrite write = TierWrite::kEvict, uint32_t slabs = 1) { Begin(OpenRequest(), write, slabs); }
  void Begin(const v1::OpenSession& request, TierWrite write, uint32_t slabs) {
    auto file = FileTier::Open({.path = folder_.path(), .capacity_bytes = 1 << 20});
    ASSERT_TRUE(file.ok()) << file.status();
    auto faulty = std::make_shared<FaultyTier>(*std::move(file));
    tier_ = faulty.get();
    options_.tiers.insert(options_.tiers.begin(), {std::move(faulty), {.when = write}});
    options_.tier_secret = std::string(32, 's');
    options_.low_watermark = options_.high_watermark = 0;
    StartDaemon(slabs);
    engine_ = OpenEngine(request);
    Settle({engine_.get()});
  }
  void End() {
    engine_.reset();
    daemon_.reset();
    options_.tiers.clear();
    scripts_.clear();
  }
  char* At(uint64_t ref) const {
    return scripts_.back()->memory + Index(BlockRef::Unpack(ref).id) * kBlockBytes;
  }
  // Seals a chain whose blocks have their key as their bytes, and lets it go.
  void Compute(const std::vector<std::string>& keys) {
    const std::vector<uint64_t> blocks = engine_->Lease(static_cast<uint32_t>(keys.size()));
    ASSERT_EQ(blocks.size(), keys.size());
    for (size_t i = 0; i < blocks.size(); ++i) Fill(blocks[i], keys[i]);
    engine_->Seal(blocks, keys);
    engine_->Release(blocks);
  }
  void Fill(uint64_t ref, const std::string& key) const {
    for (uint64_t at = 0; at < kBlockBytes; at += key.size())
      std::memcpy(At(ref) + at, key.data(), key.size());
  }
  bool Has(uint64_t ref, const std::string& key) const {
    for (uint64_t at = 0; at < kBlockBytes; at += key.size()) {
      if (std::memcmp(At(ref) + at, key.data(), key.size()) != 0) return false;
    }
    return true;
  }
  // What is to be moved is.
  virtual void Move() {
    do {
      tier_->Drain();
    } while (daemon_->MoveTierOnce());
  }
  // Others push out all that is cached.
  void PushOut() {
    const std::vector<uint64_t> blocks = engine_->Lease(14);
    ASSERT_EQ(blocks.size(), 14);
    engine_->Release(blocks);
  }
  v1::Operation WaitOp(const std::vector<std::string>& keys) const {
    v1::Operation operation = MatchOp(keys);
    operation.mutable_match()->set_wait_ms(kWaitMs);
    return operation;
  }
  // Matches, waits as long as there is something to wait for, and checks the bytes.
  v1::MatchResult Await(const std::vector<std::string>& keys) {
    std::optional<v1::OperationResult> answer;
    engine_->Send(WaitOp(keys), &answer);
    Move();
    EXPECT_TRUE(answer.has_value());
    if (!answer.has_value()) return {};
    EXPECT_EQ(answer->code(), 0) << answer->message();
    for (int i = 0; i < answer->match().groups(0).blocks_size(); ++i) {
      EXPECT_TRUE(Has(answer->match().groups(0).blocks(i), keys[static_cast<size_t>(i)])) << i;
    }
    return answer->match();
  }
  // The same where each value comes a millisecond after the one before.
  v1::MatchResult AwaitSlowly(const std::vector<std::string>& keys) {
    tier_->delay = std::chrono::milliseconds(1);
    v1::MatchResult match = Await(keys);
    tier_->delay = std::chrono::milliseconds(0);
    return match;
  }
  // So many prefills took so long.
  void Report(uint64_t tokens, uint64_t before, std::chrono::microseconds time, int times) {
    while (times > 0) {
      v1::StepRequest batch;
      batch.set_sequence(++engine_->sequence);
      for (int i = 0; i < 64 && times > 0; ++i, --times) {
        v1::PrefillSample& sample = *batch.add_prefills();
        sample.set_tokens(tokens);
        sample.set_tokens_before(before);
        sample.set_microseconds(static_cast<uint64_t>(time.count()));
      }
      EXPECT_EQ(engine_->Step(batch).code(), 0);
    }
  }
  void LetGo(const v1::MatchResult& match) {
    const auto& blocks = match.groups(0).blocks();
    if (!blocks.empty()) engine_->Release({blocks.begin(), blocks.end()});
  }
  // Two engines ask for what was pushed out, the second a millisecond later, before anything comes. Every second of these loads
  // ends so.
  std::pair<v1::OperationResult, v1::OperationResult> BothAsk(TierResult fault = TierResult::kDone) {
    Begin();
    Compute(keys_);
    Move();
    PushOut();
    const auto other = OpenEngine(OpenRequest(), "other");
    Settle({engine_.get(), other.get()});
    tier_->hangs = true;
    tier_->loads_fail = fault;
    std::optional<v1::OperationResult> first, second;
    engine_->Send(WaitOp(keys_), &first);
    clock_.Advance(1);
    other->Send(WaitOp(keys_), &second);
    daemon_->MoveTierOnce();
    tier_->loads_fail = TierResult::kDone;
    Move();
    EXPECT_TRUE(first.has_value() && second.has_value());
    return {first.value_or(v1::OperationResult()), second.value_or(v1::OperationResult())};
  }
  uint64_t Unwritten() {
    daemon_->HousekeepOnce();
    return counters().unwritten;
  }
  BelowCounters counters() { return daemon_->Snapshot().spaces.at(0).below; }

  TierFolder folder_;
  FaultyTier* tier_ = nullptr;
  std::unique_ptr<Engine> engine_;
  const std::vector<std::string> keys_ = Keys("k", 10);
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_TIER_TEST_H_
