// All that is cached of a tenant goes: in memory, below, and what was on its way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/tiers/file_tier.h"
#include "server/tiers/host_tier.h"
#include "tests/service/service_fixture.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Contains;
using testing::HasSubstr;

class EraseTest : public ServiceTest {
 protected:
  static constexpr uint64_t kWaitMs = 60000;

  EraseTest() {
    access_->Replace(
        MakePolicy("[a]\nuid = 1000\nrole = engine\ntenant = a\n[b]\nuid = 1001\nrole = engine\ntenant = b\n"
                   "[others]\nuid = *\nrole = engine\ntenant = *\n"));
  }
  // A daemon on the folder, of a slab for each of two tenants.
  void Begin(TierWrite write = TierWrite::kSeal) {
    auto file = FileTier::Open({.path = folder_.path(), .capacity_bytes = 1 << 20});
    ASSERT_TRUE(file.ok()) << file.status();
    auto faulty = std::make_shared<FaultyTier>(*std::move(file));
    tier_ = faulty.get();
    options_.tiers = {{std::move(faulty), {.when = write}}};
    options_.tier_secret = std::string(32, 's');
    options_.low_watermark = options_.high_watermark = 0;
    StartDaemon(2);
  }
  void End() {
    daemon_.reset();
    options_.tiers.clear();
    scripts_.clear();
  }
  std::unique_ptr<Engine> Open(uint32_t uid) {
    std::unique_ptr<Engine> engine = Attach("engine of " + std::to_string(uid), uid);
    EXPECT_TRUE(engine->Open(OpenRequest()).ok());
    Settle({engine.get()});
    memory_[engine.get()] = scripts_.back()->memory;
    return engine;
  }
  // Seals blocks whose bytes are their keys, in one chain, and lets them go.
  void Compute(Engine* engine, const std::vector<std::string>& keys) {
    const std::vector<uint64_t> blocks = engine->Lease(static_cast<uint32_t>(keys.size()));
    ASSERT_EQ(blocks.size(), keys.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      char* const block = memory_[engine] + IdOf(blocks[i]) * kBlockBytes;
      for (uint64_t at = 0; at < kBlockBytes; at += keys[i].size())
        std::memcpy(block + at, keys[i].data(), keys[i].size());
    }
    engine->Seal(blocks, keys);
    engine->Release(blocks);
    Move();
  }
  void Move() {
    do {
      tier_->Drain();
    } while (daemon_->MoveTierOnce());
  }
  uint64_t Await(Engine* engine, const std::vector<std::string>& keys) {
    v1::Operation operation = MatchOp(keys);
    operation.mutable_match()->set_wait_ms(kWaitMs);
    std::optional<v1::OperationResult> answer;
    engine->Send(operation, &answer);
    Move();
    EXPECT_TRUE(answer.has_value());
    if (!answer.has_value()) return 0;
    const auto& found = answer->match().groups(0).blocks();
    if (!found.empty()) engine->Release({found.begin(), found.end()});
    return answer->match().tokens();
  }
  v1::EraseResponse Erase(const std::string& tenant) {
    v1::EraseRequest request;
    request.set_tenant(tenant);
    v1::EraseResponse receipt;
    const absl::Status erased = daemon_->Erase(request, &receipt);
    EXPECT_TRUE(erased.ok()) << erased;
    return receipt;
  }
  // An engine that holds `long_`, a chain whose leaf has the lowest id, on a daemon without a tier.
  std::unique_ptr<Engine> OpenWithLongChain() {
    constexpr uint32_t kChain = 2000, kBlocks = 4096;
    options_.slab_bytes = kBlocks * kBlockBytes;
    options_.pin_budget = 1;
    StartDaemon(kBlocks / kSlabBlocks);
    std::unique_ptr<Engine> engine = Attach("a", 1000);
    EXPECT_TRUE(engine->Open(OpenRequest()).ok());
    engine->MapSlabs();
    long_ = engine->Lease(kChain);
    EXPECT_EQ(long_.size(), kChain);
    std::sort(long_.begin(), long_.end(), [](uint64_t x, uint64_t y) { return IdOf(x) > IdOf(y); });
    engine->Seal(long_, Keys("long", kChain));
    return engine;
  }
  // The bytes of the folder's files have this text.
  bool OnDisk(const std::string& text) {
    for (const std::string& path : folder_.Segments()) {
      std::ifstream file(path, std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      if (bytes.find(text) != std::string::npos) return true;
    }
    return false;
  }

  TierFolder folder_;
  FaultyTier* tier_ = nullptr;
  std::vector<uint64_t> long_;
  std::map<Engine*, char*> memory_;  // The one slab of its space.
  const std::vector<std::string> as_ = Keys("alpha", 10), bs_ = Keys("beta", 10);
};

TEST_F(EraseTest, NothingOfTheTenantIsFoundAndAnothersStays) {
  Begin();
  const auto a = Open(1000), b = Open(1001);
  Compute(a.get(), as_);
  Compute(b.get(), bs_);
  ASSERT_TRUE(OnDisk("alpha3") && OnDisk("beta3"));
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.spaces(), 1);
  EXPECT_EQ(receipt.closed(), 0);
  EXPECT_EQ(receipt.blocks(), 10);
  EXPECT_EQ(receipt.bytes(), 10 * kBlockBytes);
  ASSERT_EQ(receipt.tiers_size(), 1);
  EXPECT_EQ(receipt.tiers(0).values(), 10);
  EXPECT_EQ(receipt.tiers(0).bytes(), 10 * kBlockBytes);
  EXPECT_EQ(receipt.tiers(0).found(), 0);
  EXPECT_EQ(receipt.found_blocks(), 0);
  EXPECT_FALSE(OnDisk("alpha"));
  EXPECT_TRUE(OnDisk("beta3"));
  EXPECT_EQ(a->Match(as_).below_tokens(), 0);
  EXPECT_EQ(Await(a.get(), as_), 0);
  EXPECT_EQ(Await(b.get(), bs_), 160);
  // It may be computed again.
  Compute(a.get(), as_);
  EXPECT_EQ(Await(a.get(), as_), 160);
  EXPECT_TRUE(OnDisk("alpha3"));
}

TEST_F(EraseTest, EveryTierLosesIt) {
  Begin();
  const auto host = std::make_shared<HostTier>(1 << 20);
  options_.tiers.push_back({host, {.when = TierWrite::kSeal}});
  StartDaemon(2);
  const auto a = Open(1000), b = Open(1001);
  Compute(a.get(), as_);
  Compute(b.get(), bs_);
  ASSERT_EQ(host->usage().values, 20u);
  const v1::EraseResponse receipt = Erase("a");
  ASSERT_EQ(receipt.tiers_size(), 2);
  EXPECT_EQ(receipt.tiers(0).tier(), "file");
  EXPECT_EQ(receipt.tiers(0).values(), 10u);
  EXPECT_EQ(receipt.tiers(1).tier(), "host");
  EXPECT_EQ(receipt.tiers(1).values(), 10u);
  EXPECT_EQ(receipt.tiers(1).found(), 0u);
  EXPECT_EQ(Await(a.get(), as_), 0);
  EXPECT_EQ(Await(b.get(), bs_), 160);
  EXPECT_EQ(host->usage().values, 10u);
}

TEST_F(EraseTest, ATenantWithoutASpaceIsKnownByWhatIsBelow) {
  Begin();
  {
    const auto a = Open(1000), b = Open(1001);
    Compute(a.get(), as_);
    Compute(b.get(), bs_);
  }
  End();
  Begin();
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.spaces(), 0);
  EXPECT_EQ(receipt.tiers(0).values(), 10);
  EXPECT_TRUE(receipt.remains().empty()) << receipt.ShortDebugString();
  EXPECT_FALSE(OnDisk("alpha"));
  const auto a = Open(1000), b = Open(1001);
  EXPECT_EQ(Await(a.get(), as_), 0);
  EXPECT_EQ(Await(b.get(), bs_), 160);
}

TEST_F(EraseTest, WhatIsHeldStaysAndItsHolderIsNamed) {
  Begin();
  const auto a = Open(1000), c = Open(1000);
  Compute(a.get(), as_);
  const v1::MatchResult held = c->Match({as_.begin(), as_.begin() + 4});
  ASSERT_EQ(held.groups(0).blocks_size(), 4);
  const std::vector<uint64_t> leased = c->Lease(2);
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.blocks(), 6);
  EXPECT_EQ(receipt.found_blocks(), 0);
  uint64_t shared = 0, written = 0;
  for (const v1::ErasureHolder& holder : receipt.holders()) {
    if (holder.session() != c->opened.session()) continue;
    EXPECT_EQ(holder.client_name(), "engine of 1000");
    shared = holder.shared_blocks();
    written = holder.leased_blocks();
  }
  EXPECT_EQ(shared, 4);
  EXPECT_GE(written, 2) << "its sink as well, if it has one";
  EXPECT_EQ(receipt.tiers(0).values(), 10) << "copies below are nobody's to hold";
  EXPECT_THAT(receipt.remains(), Contains(HasSubstr("are held")));
  c->Release({held.groups(0).blocks().begin(), held.groups(0).blocks().end()});
  c->Release(leased);
  EXPECT_EQ(Erase("a").blocks(), 4);
}

TEST_F(EraseTest, PinnedBlocksLeave) {
  Begin();
  const auto a = Open(1000);
  Compute(a.get(), as_);
  v1::PinPrefixRequest pin;
  pin.set_key(as_[2]);
  pin.set_ttl_ms(60000);
  v1::PinPrefixResponse pinned;
  ASSERT_TRUE(daemon_->PinPrefix(pin, &pinned).ok());
  ASSERT_EQ(pinned.pinned(), 3);
  EXPECT_EQ(Erase("a").blocks(), 10);
}

// Of such a chain the leaf has the lowest id.
TEST_F(EraseTest, OnePassUnpinsAChainOfAnyOrder) {
  Begin();
  const auto a = Open(1000);
  std::vector<uint64_t> blocks = a->Lease(7);
  ASSERT_EQ(blocks.size(), 7);
  std::sort(blocks.rbegin(), blocks.rend(), [](uint64_t x, uint64_t y) { return IdOf(x) < IdOf(y); });
  const std::vector<std::string> keys(as_.begin(), as_.begin() + 7);
  a->Seal(blocks, keys);
  // A second leaf, of the third block.
  const std::vector<uint64_t> branch = a->Lease(1);
  a->Seal(branch, {Key("branch")}, keys[2]);
  EXPECT_EQ(a->Do(PinOp({blocks.back(), branch[0]}, 60000)).code(), 0);
  a->Release(blocks);
  a->Release(branch);
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.blocks(), 8) << receipt.ShortDebugString();
  EXPECT_EQ(receipt.found_blocks(), 0);
}

TEST_F(EraseTest, WhatPinsTakeIsLinear) {
  const auto a = OpenWithLongChain();
  ASSERT_EQ(a->Do(PinOp({long_.back()}, 60000)).code(), 0);
  a->Release(long_);
  // Each slice is one hold of the mutex.
  const auto slices = [&] {
    const std::vector<uint64_t> holds = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(holds.begin(), holds.end(), uint64_t{0});
  };
  const uint64_t before = slices();
  EXPECT_EQ(Erase("a").blocks(), long_.size());
  EXPECT_LT(slices() - before, 100);
}

TEST_F(EraseTest, AnEngineThatPinsAgainDoesNotKeepItFromEnding) {
  const auto a = OpenWithLongChain();
  std::atomic<bool> over{false};
  std::atomic<int> pins{0};
  std::thread engine([&] {
    // It gives up, for an erasure that does not.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!over && std::chrono::steady_clock::now() < end) {
      a->Do(PinOp({long_.back()}, 60000));
      ++pins;
    }
    EXPECT_TRUE(over);
  });
  while (pins < 10) std::this_thread::yield();
  Erase("a");
  over = true;
  engine.join();
  a->Release(long_);
  // Nobody pins any more.
  EXPECT_EQ(Erase("a").blocks(), long_.size());
}

TEST_F(EraseTest, WhatIsCachedMeanwhileIsFoundAndHeldByNobody) {
  Begin();
  const auto a = Open(1000);
  const std::vector<std::string> later = Keys("later", 10);
  tier_->on_erase = [&] {
    const std::vector<uint64_t> blocks = a->Lease(10);
    a->Seal(blocks, later);
    a->Release(blocks);
  };
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.found_blocks(), 10);
  uint64_t held = 0;
  for (const v1::ErasureHolder& holder : receipt.holders())
    held += holder.shared_blocks() + holder.leased_blocks();
  EXPECT_EQ(receipt.held_blocks(), held);
  EXPECT_THAT(receipt.remains(), Contains(HasSubstr("10 blocks were sealed or released since")));
}

TEST_F(EraseTest, ASpaceThatIsOpenedMeanwhileGetsNothingFromBelow) {
  Begin();
  {
    const auto a = Open(1000);
    Compute(a.get(), as_);
  }
  End();
  Begin();
  std::unique_ptr<Engine> a;
  tier_->on_erase = [&] {
    a = Open(1000);
    EXPECT_EQ(a->Match(as_).below_tokens(), 0);
    EXPECT_EQ(Await(a.get(), as_), 0);
  };
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.tiers(0).values(), 10);
  EXPECT_EQ(receipt.tiers(0).found(), 0);
  EXPECT_EQ(receipt.found_blocks(), 0);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(Await(a.get(), as_), 0);
  EXPECT_FALSE(OnDisk("alpha"));
  // It goes on as any other from then on.
  Compute(a.get(), as_);
  EXPECT_TRUE(OnDisk("alpha3"));
  v1::EvictRequest evict;
  evict.set_tenant("a");
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict(evict, &evicted).ok());
  EXPECT_EQ(evicted.evicted(), 10);
  EXPECT_EQ(Await(a.get(), as_), 160);
}

TEST_F(EraseTest, WhatIsOnItsWayUpDoesNotArrive) {
  Begin();
  const auto a = Open(1000);
  Compute(a.get(), as_);
  v1::EvictRequest evict;
  evict.set_tenant("a");
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict(evict, &evicted).ok());
  ASSERT_EQ(evicted.evicted(), 10);
  tier_->hangs = true;
  v1::Operation operation = MatchOp(as_);
  operation.mutable_match()->set_wait_ms(kWaitMs);
  std::optional<v1::OperationResult> answer;
  a->Send(operation, &answer);
  daemon_->MoveTierOnce();
  EXPECT_FALSE(answer.has_value());
  EXPECT_EQ(Erase("a").tiers(0).found(), 0);
  ASSERT_TRUE(answer.has_value()) << "nothing is waited for any more";
  EXPECT_EQ(answer->match().tokens(), 0);
  // The bytes that were read before come now.
  a->Send(operation, &(answer = std::nullopt));
  Move();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->match().tokens(), 0);
  EXPECT_EQ(Blocks().cached(), 0);
}

TEST_F(EraseTest, ASpaceThatNobodyUsesIsClosed) {
  Begin();
  const auto b = Open(1001);
  {
    const auto a = Open(1000);
    Compute(a.get(), as_);
    a->Die();
  }
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.closed(), 1);
  EXPECT_EQ(receipt.blocks(), 10);
  EXPECT_TRUE(receipt.remains().empty()) << receipt.ShortDebugString();
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1);
  EXPECT_EQ(scripts_[0]->alive, 1) << "its memory is the device's again";
}

TEST_F(EraseTest, AnUnknownTenantIsAnError) {
  Begin();
  const auto a = Open(1000), other = Open(1234);
  const auto refused = [&](const std::string& tenant) {
    v1::EraseRequest request;
    request.set_tenant(tenant);
    v1::EraseResponse receipt;
    return daemon_->Erase(request, &receipt);
  };
  EXPECT_EQ(refused("nobody").code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(refused("nobody").message()), HasSubstr("tenant is \"nobody\""));
  // Each uid has a tenant of this name.
  EXPECT_THAT(std::string(refused("default").message()), HasSubstr("did you mean default@1234"));
  EXPECT_TRUE(refused("default@1234").ok());
  EXPECT_EQ(refused("").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(std::string(200, 'x')).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(EraseTest, AFileThatCouldNotBeReadMayHaveSomethingOfIt) {
  Begin();
  const auto a = Open(1000);
  Compute(a.get(), as_);
  End();
  const std::string path = folder_.Segments().at(0);
  std::filesystem::rename(path, folder_.path() + "/elsewhere");
  std::filesystem::create_symlink(folder_.path() + "/elsewhere", path);
  Begin();
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.tiers(0).values(), 0);
  EXPECT_THAT(receipt.remains(), Contains(HasSubstr(path)));
}

TEST_F(EraseTest, WithoutATier) {
  StartDaemon(2);
  const auto a = Attach("a", 1000);
  ASSERT_TRUE(a->Open(OpenRequest()).ok());
  a->MapSlabs();
  const std::vector<uint64_t> blocks = a->Lease(3);
  a->Seal(blocks, Keys("x", 3));
  a->Release(blocks);
  const v1::EraseResponse receipt = Erase("a");
  EXPECT_EQ(receipt.blocks(), 3);
  EXPECT_EQ(receipt.tiers_size(), 0);
  EXPECT_EQ(a->Match(Keys("x", 3)).tokens(), 0);
}

}  // namespace
}  // namespace kvpool
