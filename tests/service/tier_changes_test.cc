// Tiers that come and go while a daemon runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/file_tier.h"
#include "server/tiers/host_tier.h"
#include "tests/service/tier_test.h"

namespace kvpool {
namespace {

using testing::HasSubstr;

// An operator names "file", "other" (a second folder of that kind) or "host", with ",seal" or ",reuse" behind it.
class TierChangesTest : public TierTest {
 protected:
  static constexpr uint32_t kPatienceMs = 60000;

  void BeginWithout(const std::string& spec = "") {
    options_.tier_secret = std::string(32, 's');
    options_.low_watermark = options_.high_watermark = 0;
    options_.name_tier = [this](const std::string& text) { return Name(text); };
    options_.next_tiers = [spec]() -> absl::StatusOr<std::vector<std::string>> {
      return spec.empty() ? std::vector<std::string>() : std::vector<std::string>{spec};
    };
    StartDaemon(1);
    engine_ = OpenEngine(OpenRequest());
    Settle({engine_.get()});
  }
  void Move() override {
    do {
      for (const auto& [spec, tier] : tiers_) {
        if (const std::shared_ptr<FaultyTier> open = tier.lock()) open->Drain();
      }
    } while (daemon_->MoveTierOnce());
  }
  absl::Status Attach(const std::string& spec, uint32_t timeout_ms = 60000) {
    v1::AttachTierRequest request;
    request.set_spec(spec);
    request.set_timeout_ms(timeout_ms);
    return daemon_->AttachTier(request, &attached_);
  }
  uint64_t Drain(const std::string& tier, bool cancel = false) {
    v1::DrainTierRequest request;
    v1::DrainTierResponse response;
    request.set_tier(tier);
    request.set_cancel(cancel);
    const absl::Status status = daemon_->DrainTier(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response.writes();
  }
  v1::DetachTierResponse Detach(const std::string& tier, uint32_t timeout_ms = 0) {
    v1::DetachTierRequest request;
    v1::DetachTierResponse response;
    request.set_tier(tier);
    request.set_timeout_ms(timeout_ms);
    const absl::Status status = daemon_->DetachTier(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  std::vector<v1::TierInfo> List() {
    v1::ListTiersResponse response;
    EXPECT_TRUE(daemon_->ListTiers({}, &response).ok());
    return {response.tiers().begin(), response.tiers().end()};
  }
  // The one that was attached in these words. Not null.
  std::shared_ptr<FaultyTier> Open(const std::string& spec) { return tiers_.at(spec).lock(); }
  // As Fill. The mover may be copying what was in the block before it was leased, and throws that away: an engine is another
  // process, of which the sanitizer would see nothing.
  __attribute__((no_sanitize("thread"))) void FillAsEngine(uint64_t ref, const std::string& key) const {
    volatile char* const to = At(ref);
    const char* const from = key.data();
    const size_t key_bytes = key.size();
    for (uint64_t at = 0; at < kBlockBytes; ++at) to[at] = from[at % key_bytes];
  }
  // A disk answers on threads of its own.
  static void AwaitHeld(FaultyTier* tier, size_t held) {
    while (tier->held() < held) std::this_thread::yield();
  }

  const TierFolder other_folder_;
  v1::AttachTierResponse attached_;
  std::map<std::string, std::weak_ptr<FaultyTier>> tiers_;  // Keyed by what they were attached by.
  std::function<void()> on_open_;

 private:
  absl::StatusOr<NamedTier> Name(const std::string& spec) {
    const bool host = absl::StartsWith(spec, "host"), file = absl::StartsWith(spec, "file");
    if (!host && !file && !absl::StartsWith(spec, "other"))
      return absl::InvalidArgumentError(absl::StrCat("\"", spec, "\" is no tier"));
    TierRule rule;
    if (absl::EndsWith(spec, ",seal")) rule.when = TierWrite::kSeal;
    if (absl::EndsWith(spec, ",reuse")) rule.when = TierWrite::kReuse;
    const std::string folder = file ? folder_.path() : other_folder_.path();
    const auto open = [=, this, on_open = on_open_]() -> absl::StatusOr<TierMember> {
      if (on_open) on_open();
      std::unique_ptr<Tier> tier;
      if (host) {
        tier = std::make_unique<HostTier>(1 << 20);
      } else {
        auto opened = FileTier::Open({.path = folder, .capacity_bytes = 1 << 20});
        if (!opened.ok()) return opened.status();
        tier = *std::move(opened);
      }
      auto faulty = std::make_shared<FaultyTier>(std::move(tier));
      if (!on_open) tiers_[spec] = faulty;
      return TierMember{.tier = std::move(faulty), .rule = rule, .spec = spec};
    };
    return NamedTier{.name = host ? "host" : "file", .open = open};
  }
};

TEST_F(TierChangesTest, WhatComesIsWrittenAndLoadedFrom) {
  BeginWithout("file");
  Compute(keys_);
  Move();
  EXPECT_EQ(counters().demoted, 0u);
  ASSERT_TRUE(Attach("file").ok());
  EXPECT_EQ(attached_.tier(), "file");
  EXPECT_EQ(attached_.path(), folder_.path());
  Move();
  EXPECT_EQ(counters().demoted, 10u) << "what was sealed before as well, as it is next to leave";
  PushOut();
  EXPECT_EQ(Await(keys_).tokens(), 160u);
  const std::vector<v1::TierInfo> tiers = List();
  ASSERT_EQ(tiers.size(), 1u);
  EXPECT_EQ(tiers[0].state(), v1::TIER_STATE_ATTACHED);
  EXPECT_TRUE(tiers[0].by_operator());
  EXPECT_TRUE(tiers[0].next_has_it());
  EXPECT_THAT(daemon_->TierChanges(), testing::IsEmpty());
}

TEST_F(TierChangesTest, WhatTheNextDaemonHasIsSaid) {
  BeginWithout("file");
  ASSERT_TRUE(Attach("host").ok());
  v1::ListTiersResponse response;
  ASSERT_TRUE(daemon_->ListTiers({}, &response).ok());
  ASSERT_EQ(response.tiers_size(), 1);
  EXPECT_FALSE(response.tiers(0).next_has_it());
  EXPECT_THAT(response.only_next(), testing::ElementsAre("file"));
  EXPECT_THAT(daemon_->TierChanges(), testing::ElementsAre("it does not have host", "it has file"));
}

TEST_F(TierChangesTest, WhatIsWrongIsRefused) {
  BeginWithout();
  const auto refusal = [this](const std::string& spec) { return std::string(Attach(spec).message()); };
  EXPECT_EQ(refusal("redis"), "\"redis\" is no tier");
  EXPECT_EQ(refusal(""), "spec has 0 bytes; must have 1 to 4096");
  EXPECT_EQ(std::string(Attach("file", 0).message()), "timeout_ms is 0; must be 1 to 3600000");
  ASSERT_TRUE(Attach("file").ok());
  EXPECT_EQ(refusal("other"), "tier file: one is attached; at most one of each kind");
  v1::DetachTierRequest none;
  none.set_tier("host");
  v1::DetachTierResponse response;
  EXPECT_EQ(std::string(daemon_->DetachTier(none, &response).message()), "tier is \"host\"; there are file");
  EXPECT_EQ(List().size(), 1u);
}

TEST_F(TierChangesTest, WithoutASecretNoneCanCome) {
  StartDaemon(1);
  const absl::Status status = Attach("file");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("start it with --tier-key-file=FILE"));
  v1::DrainTierRequest drain;
  drain.set_tier("file");
  v1::DrainTierResponse response;
  EXPECT_EQ(daemon_->DrainTier(drain, &response).code(), absl::StatusCode::kNotFound);
}

TEST_F(TierChangesTest, OneThatDoesNotOpenIsNotWaitedFor) {
  BeginWithout();
  std::promise<void> disk_answers;
  on_open_ = [answers = disk_answers.get_future().share()] { answers.wait(); };
  EXPECT_EQ(Attach("file", 1).code(), absl::StatusCode::kDeadlineExceeded);
  on_open_ = nullptr;
  EXPECT_EQ(Attach("file").code(), absl::StatusCode::kFailedPrecondition) << "it is being opened still";
  EXPECT_TRUE(List().empty());
  Compute(keys_);
  disk_answers.set_value();
  absl::Status status;
  // It is closed again first.
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
       !(status = Attach("file")).ok() && std::chrono::steady_clock::now() < until;)
    ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  ASSERT_TRUE(status.ok()) << status;
  Move();
  EXPECT_EQ(counters().demoted, 10u);
}

TEST_F(TierChangesTest, WhatDrainsIsLoadedFromAndNotWritten) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  Compute(keys_);
  Move();
  const std::shared_ptr<FaultyTier> file = Open("file,seal");
  ASSERT_EQ(file->usage().counters.stored, 10u);
  EXPECT_EQ(Drain("file"), 0u);
  EXPECT_EQ(List().at(0).state(), v1::TIER_STATE_DRAINING);
  PushOut();
  Compute(Keys("m", 4));
  Move();
  EXPECT_EQ(file->usage().counters.stored, 10u);
  LetGo(Await(keys_));
  EXPECT_EQ(file->usage().counters.loaded, 10u);
  EXPECT_EQ(Drain("file", /*cancel=*/true), 0u);
  PushOut();
  Compute(Keys("n", 4));
  Move();
  EXPECT_EQ(file->usage().counters.stored, 14u);
}

TEST_F(TierChangesTest, WhatIsUnderWayToOneThatDrainsIsAnswered) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  const std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  Compute(keys_);
  daemon_->MoveTierOnce();
  AwaitHeld(file.get(), 10);
  EXPECT_EQ(Drain("file"), 10u);
  file->Answer();
  EXPECT_EQ(Drain("file"), 0u);
  EXPECT_EQ(counters().demoted, 10u);
}

TEST_F(TierChangesTest, WhatGoesAnswersThoseWhoWaitAndIsAskedForNothing) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  Compute(keys_);
  Move();
  PushOut();
  std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  std::optional<v1::OperationResult> waits;
  engine_->Send(WaitOp(keys_), &waits);
  daemon_->MoveTierOnce();
  AwaitHeld(file.get(), 10);
  const v1::DetachTierResponse not_yet = Detach("file");
  EXPECT_FALSE(not_yet.detached());
  EXPECT_EQ(not_yet.reads(), 10u);
  EXPECT_EQ(List().at(0).state(), v1::TIER_STATE_DETACHING);
  const v1::MatchResult at_once = engine_->Match(keys_);
  EXPECT_EQ(at_once.below_tokens(), 0u);
  EXPECT_EQ(at_once.tokens(), 0u);
  file->Answer();
  daemon_->MoveTierOnce();
  ASSERT_TRUE(waits.has_value());
  EXPECT_EQ(waits->code(), 0) << waits->message();
  file = nullptr;
  EXPECT_TRUE(Detach("file", kPatienceMs).detached());
  EXPECT_TRUE(tiers_.at("file,seal").expired()) << "it is destroyed";
  EXPECT_TRUE(List().empty());
  EXPECT_TRUE(daemon_->Snapshot().tiers.empty()) << "so that no metric has it";
  // The last one has gone: a match that would wait has nothing to wait for.
  PushOut();
  EXPECT_EQ(engine_->Do(WaitOp(keys_)).match().tokens(), 0u);
}

TEST_F(TierChangesTest, WhatOneThatGoesFailsAtComesFromTheNext) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  ASSERT_TRUE(Attach("host,seal").ok());
  Compute(keys_);
  Move();
  PushOut();
  std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  file->all_fail = true;
  file->loads_fail = TierResult::kFailed;
  std::optional<v1::OperationResult> waits;
  engine_->Send(WaitOp(keys_), &waits);
  daemon_->MoveTierOnce();
  ASSERT_EQ(file->held(), 10u);
  EXPECT_FALSE(Detach("file").detached());
  EXPECT_EQ(engine_->Match(keys_).below(), "host");
  file->Answer();
  file = nullptr;
  EXPECT_TRUE(Detach("file", kPatienceMs).detached());
  Move();
  ASSERT_TRUE(waits.has_value());
  EXPECT_EQ(waits->match().tokens(), 160u);
  EXPECT_EQ(counters().lost, 0u);
}

TEST_F(TierChangesTest, WhatLiesInAFolderIsFoundAgain) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  Compute(keys_);
  Move();
  PushOut();
  ASSERT_TRUE(Detach("file", kPatienceMs).detached());
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 0u);
  ASSERT_TRUE(Attach("file").ok());
  EXPECT_EQ(attached_.values(), 10u);
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 160u);
  EXPECT_EQ(Await(keys_).tokens(), 160u);
}

// What was owed to one tier is not given to the one that comes to its slot.
TEST_F(TierChangesTest, WhatIsOwedToOneThatGoesIsOwedToNobody) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  {
    const std::shared_ptr<FaultyTier> file = Open("file,seal");
    file->all_fail = true;
    file->stores_fail = TierResult::kFull;
    Compute(keys_);
    Move();
    EXPECT_EQ(counters().dropped, 10u);
  }
  ASSERT_TRUE(Detach("file", kPatienceMs).detached());
  ASSERT_TRUE(Attach("other,reuse").ok());
  clock_.Advance(5000);
  Move();
  EXPECT_EQ(Open("other,reuse")->usage().counters.stored, 0u);
}

// Nor is it left alone for what the one before has failed at.
TEST_F(TierChangesTest, OneThatComesIsNotBlamedForTheOneBefore) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  {
    const std::shared_ptr<FaultyTier> file = Open("file,seal");
    file->all_fail = true;
    file->stores_fail = TierResult::kFailed;
    Compute(keys_);
    Move();
  }
  ASSERT_TRUE(Detach("file", kPatienceMs).detached());
  ASSERT_TRUE(Attach("other,seal").ok());
  Compute(Keys("m", 3));
  Move();
  EXPECT_EQ(Open("other,seal")->usage().counters.stored, 3u) << "no time has passed";
}

// A disk that hangs is replaced, and is closed whenever it answers.
TEST_F(TierChangesTest, AnotherOfItsNameComesWhileOneHangs) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  Compute(keys_);
  daemon_->MoveTierOnce();
  AwaitHeld(file.get(), 10);
  EXPECT_EQ(Detach("file").writes(), 10u);
  ASSERT_TRUE(Attach("other").ok());
  EXPECT_EQ(List().size(), 2u);
  daemon_->MoveTierOnce();
  EXPECT_EQ(daemon_->Snapshot().tiers.size(), 2u);
  file->Answer();
  file = nullptr;
  Move();
  EXPECT_EQ(Open("other")->usage().counters.stored, 10u);
  // Nobody has to ask for it again.
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
       List().size() == 2 && std::chrono::steady_clock::now() < until;)
    daemon_->HousekeepOnce();
  ASSERT_EQ(List().size(), 1u);
  EXPECT_EQ(List()[0].path(), other_folder_.path());
}

TEST_F(TierChangesTest, ASlowTierOwesNothingForAnother) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  ASSERT_TRUE(Attach("host,seal").ok());
  const std::shared_ptr<FaultyTier> host = Open("host,seal");
  {
    const std::shared_ptr<FaultyTier> file = Open("file,seal");
    file->all_fail = true;
    file->stores_fail = TierResult::kFull;
    host->hangs = true;
    Compute(keys_);
    daemon_->MoveTierOnce();
    ASSERT_EQ(host->held(), 10u);
  }
  ASSERT_TRUE(Detach("file", kPatienceMs).detached()) << "it has answered";
  ASSERT_TRUE(Attach("other,reuse").ok());
  host->Answer();
  clock_.Advance(5000);
  Move();
  EXPECT_EQ(counters().demoted, 10u);
  EXPECT_EQ(Open("other,reuse")->usage().counters.stored, 0u);
}

// A tier that hangs has all the buffers that one which is alone may have.
TEST_F(TierChangesTest, OneThatComesHasItsPartOfTheBuffers) {
  options_.tier_buffer_bytes = 8 * kTierPageBytes;
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  const std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  Compute(keys_);
  daemon_->MoveTierOnce();
  AwaitHeld(file.get(), 7);
  ASSERT_TRUE(Attach("host").ok());
  for (int i = 0; i < 20; ++i) daemon_->MoveTierOnce();
  EXPECT_EQ(file->held(), 7u);
  EXPECT_EQ(Open("host")->usage().counters.stored, 10u);
}

TEST_F(TierChangesTest, ATierThatAsksForUsesFindsThemCounted) {
  BeginWithout();
  Compute(keys_);
  ASSERT_TRUE(Attach("file,reuse").ok());
  LetGo(engine_->Match({keys_.begin(), keys_.begin() + 4}));
  Move();
  EXPECT_EQ(Open("file,reuse")->usage().counters.stored, 4u) << "they were sealed before it came";
}

TEST_F(TierChangesTest, WhatNoSessionUsesGoesToOneThatComes) {
  BeginWithout();
  ASSERT_TRUE(Attach("host").ok());
  Compute(keys_);
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(Open("host")->usage().counters.stored, 10u);
  ASSERT_TRUE(Attach("file").ok());
  Move();
  EXPECT_EQ(Open("file")->usage().counters.stored, 10u);
}

TEST_F(TierChangesTest, ErasureReachesThoseThatDrainAndGo) {
  BeginWithout();
  ASSERT_TRUE(Attach("file,seal").ok());
  Compute(keys_);
  Move();
  Drain("file");
  v1::EraseRequest request;
  request.set_tenant(engine_->member->session->space->facts.tenant);
  v1::EraseResponse receipt;
  ASSERT_TRUE(daemon_->Erase(request, &receipt).ok());
  ASSERT_EQ(receipt.tiers_size(), 1);
  EXPECT_EQ(receipt.tiers(0).values(), 10u);
  const std::shared_ptr<FaultyTier> file = Open("file,seal");
  file->hangs = true;
  Drain("file", /*cancel=*/true);
  Compute(Keys("m", 1));
  daemon_->MoveTierOnce();
  AwaitHeld(file.get(), 1);
  EXPECT_FALSE(Detach("file").detached());
  receipt.Clear();
  ASSERT_TRUE(daemon_->Erase(request, &receipt).ok());
  EXPECT_EQ(receipt.tiers_size(), 1) << "it has values still";
}

// Engines seal, match and wait while tiers come and go, each on a thread of its own; what they get is what they sealed.
TEST_F(TierChangesTest, EnginesGoOnWhileTiersComeAndGo) {
  constexpr int kChanges = 12, kEngines = 2;
  options_.tier_secret = std::string(32, 's');
  options_.low_watermark = options_.high_watermark = 0;
  options_.name_tier = [](const std::string& spec) -> absl::StatusOr<NamedTier> {
    const bool host = absl::StartsWith(spec, "host");
    return NamedTier{.name = host ? "host" : "file", .open = [=]() -> absl::StatusOr<TierMember> {
                       const TierRule rule{.when = TierWrite::kSeal};
                       if (host) return TierMember{.tier = std::make_shared<HostTier>(1 << 20), .rule = rule};
                       auto file = FileTier::Open({.path = spec, .capacity_bytes = 1 << 20});
                       if (!file.ok()) return file.status();
                       return TierMember{.tier = *std::move(file), .rule = rule};
                     }};
  };
  options_.housekeeping_thread = true;
  options_.slab_bytes = kSlabBlocks * kBlockBytes;
  options_.device_capacity_bytes = {kSlabBlocks * kBlockBytes};
  options_.version = "test";
  scripts_.push_back(std::make_unique<MemoryDevice::Script>());
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem0", kGranuleBytes, scripts_.back().get()));
  daemon_ = Daemon::Start(options_, std::move(devices), &clock_).value();
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < kEngines; ++i) engines.push_back(OpenEngine(OpenRequest(), absl::StrCat("engine", i)));
  std::atomic<bool> done{false}, writes{false};
  std::atomic<uint64_t> rounds{0}, hits{0}, wrong{0}, failed{0};
  std::vector<std::thread> users;
  for (const auto& engine : engines) {
    users.emplace_back([&, me = engine.get()] {
      const auto ask = [me, this](v1::Operation operation) {
        v1::Call call;
        call.set_member_token(me->token);
        call.set_sequence(++me->sequence);
        std::promise<v1::OperationResult> answer;
        daemon_->ApplyUnary(call, std::move(operation),
                            [&](const v1::OperationResult& result) { answer.set_value(result); });
        return answer.get_future().get();
      };
      for (int round = 0; !done; ++round, ++rounds) {
        const std::vector<std::string> keys =
            Keys(absl::StrCat(me->opened.session(), "r", round % 6, "_"), 4);
        const v1::OperationResult found = ask(WaitOp(keys));
        failed += found.code() != 0;
        std::vector<uint64_t> held;
        if (found.match().groups_size() > 0)
          held.assign(found.match().groups(0).blocks().begin(), found.match().groups(0).blocks().end());
        for (size_t i = 0; i < held.size(); ++i) wrong += !Has(held[i], keys[i]);
        hits += held.size();
        if (!held.empty()) failed += ask(ReleaseOp(held)).code() != 0;
        if (held.size() == keys.size()) continue;
        const v1::OperationResult lease = ask(LeaseOp(4, 4));
        const std::vector<uint64_t> blocks(lease.lease().blocks().begin(), lease.lease().blocks().end());
        if (blocks.empty()) continue;
        for (size_t i = 0; i < blocks.size(); ++i) FillAsEngine(blocks[i], keys[i]);
        failed += ask(SealOp(blocks, keys)).code() != 0;
        // Blocks that leave at once are in no tier: they are held until the mover has come by, unless a tier has them already.
        const uint64_t before = counters().demoted;
        const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
        while (writes && counters().demoted == before && std::chrono::steady_clock::now() < until)
          std::this_thread::yield();
        failed += ask(ReleaseOp(blocks)).code() != 0;
      }
    });
  }
  const auto change = [&](const std::string& spec) {
    ASSERT_TRUE(Attach(spec).ok());
    writes = true;
    const uint64_t before = counters().promoted;
    for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
         counters().promoted < before + 20 && std::chrono::steady_clock::now() < until;)
      std::this_thread::yield();
    const std::string name = attached_.tier();
    writes = false;
    Drain(name);
    for (const uint64_t drains_at = rounds; rounds < drains_at + 20;) std::this_thread::yield();
    EXPECT_TRUE(Detach(name, kPatienceMs).detached());
  };
  for (int i = 0; i < kChanges; ++i) change(i % 3 == 2 ? "host" : folder_.path());
  done = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(failed, 0u);
  EXPECT_GT(hits, 0u);
  EXPECT_GT(counters().promoted, 0u);
  EXPECT_TRUE(List().empty());
  engines.clear();
}

}  // namespace
}  // namespace kvpool
