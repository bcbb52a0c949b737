// The races by name, with threads. Each test is right whatever the interleaving; sanitizers see the rest.
//
// A daemon of one slab has all that it can have: it evicts, and nothing waits for growth.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

constexpr int kRounds = 300;

class RaceTest : public ServiceTest {
 protected:
  // Runs both at once, from a common start.
  static void AtOnce(const std::function<void()>& a, const std::function<void()>& b) {
    std::atomic<int> ready{0};
    const auto start = [&](const std::function<void()>& work) {
      ++ready;
      while (ready < 2) std::this_thread::yield();
      work();
    };
    std::thread other([&] { start(b); });
    start(a);
    other.join();
  }
};

TEST_F(RaceTest, MatchAgainstEvict) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<std::string> keys = Keys("m" + std::to_string(round) + "_", 4);
    const std::vector<uint64_t> blocks = engine->Lease(4);
    engine->Seal(blocks, keys);
    engine->Release(blocks);
    v1::MatchResult match;
    AtOnce([&] { match = engine->Match(keys); },
           [&] {
             v1::EvictResponse response;
             ASSERT_TRUE(daemon_->Evict({}, &response).ok());
           });
    // Whatever was answered is held: evicting again takes none of it.
    const uint32_t held = static_cast<uint32_t>(match.tokens() / 16);
    EXPECT_EQ(Blocks().sealed(), held);
    v1::EvictResponse response;
    ASSERT_TRUE(daemon_->Evict({}, &response).ok());
    EXPECT_EQ(Blocks().sealed(), held);
    EXPECT_EQ(Blocks().cached(), 0);
    if (held > 0) {
      const auto& hit = match.groups(0).blocks();
      EXPECT_EQ(engine->Release({hit.begin(), hit.end()}).refused_size(), 0);
    }
    ASSERT_TRUE(daemon_->Evict({}, &response).ok());
  }
}

// Blocks are leased, sealed, matched, released and evicted while the policy changes under them.
TEST_F(RaceTest, SetPolicyAgainstUse) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest(), "other");
  v1::GetPoliciesResponse policies;
  ASSERT_TRUE(daemon_->GetPolicies({}, &policies).ok());
  std::atomic<bool> done{false};
  const auto work = [&](Engine* me, const std::string& name) {
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<std::string> keys = Keys(name + std::to_string(round % 5) + "_", 4);
      const v1::MatchResult match = me->Match(keys);
      std::vector<uint64_t> held;
      if (match.groups_size() > 0)
        held.assign(match.groups(0).blocks().begin(), match.groups(0).blocks().end());
      const auto missing = static_cast<uint32_t>(keys.size() - held.size());
      if (missing > 0) {
        const v1::LeaseResult lease = me->LeaseAsked(missing, missing);
        const std::vector<uint64_t> fresh(lease.blocks().begin(), lease.blocks().end());
        if (!fresh.empty()) {
          me->Seal(fresh, {keys.begin() + static_cast<int>(held.size()), keys.end()},
                   held.empty() ? "" : keys[held.size() - 1]);
        }
        held.insert(held.end(), fresh.begin(), fresh.end());
      }
      EXPECT_EQ(me->Release(held).refused_size(), 0);
    }
  };
  std::thread operator_thread([&] {
    for (int i = 0; !done; ++i) {
      v1::SetPolicyRequest request;
      request.set_policy(policies.available(i % policies.available_size()).name());
      v1::SetPolicyResponse response;
      ASSERT_TRUE(daemon_->SetPolicy(request, &response).ok());
      EXPECT_EQ(response.spaces(0).policy(), request.policy());
    }
  });
  AtOnce([&] { work(engine.get(), "a"); }, [&] { work(other.get(), "b"); });
  done = true;
  operator_thread.join();
  // Nobody holds anything: whichever policy it is now, it has all on offer or behind what is.
  EXPECT_EQ(Blocks().sealed(), 0);
  EXPECT_GT(Blocks().cached(), 0);
  v1::EvictResponse response;
  ASSERT_TRUE(daemon_->Evict({}, &response).ok());
  EXPECT_EQ(response.held_back(), 0);
  EXPECT_EQ(Blocks().cached(), 0);
}

TEST_F(RaceTest, SealOfABlockFreedMeanwhile) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const auto scheduler = Attach();
  v1::AddMember join = JoinRequest(*engine, 0);
  join.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Join(*engine, join).ok());
  const auto other = OpenEngine(OpenRequest(), "other");
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<uint64_t> block = engine->Lease(1);
    const std::string key = Key("s" + std::to_string(round));
    v1::SealResult sealed;
    std::vector<uint64_t> taken;
    AtOnce([&] { sealed = scheduler->Seal(block, {key}); },
           [&] {
             engine->Release(block);
             taken = other->Lease(1);
           });
    const uint64_t hit = other->Match({key}).tokens();
    // Either the seal came first and the key is there, or the block was gone and the ref stale; never a key on a
    // block that somebody else writes.
    EXPECT_EQ(hit, sealed.refused_size() == 0 ? 16u : 0u);
    if (hit != 0) {
      EXPECT_NE(uint32_t(taken[0]), uint32_t(block[0]));
      other->Release(block);
    }
    other->Release(taken);
  }
}

TEST_F(RaceTest, ReleaseRetriedWhileTheFirstIsApplied) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<uint64_t> block = engine->Lease(1);
    engine->Do(RefOp(block));
    v1::StepRequest request;
    request.set_sequence(++engine->sequence);
    *request.add_operations() = ReleaseOp(block);
    v1::StepResponse first, second;
    AtOnce([&] { first = engine->Step(request); }, [&] { second = engine->Step(request); });
    EXPECT_EQ(first.results(0).release().refused_size() + second.results(0).release().refused_size(), 0);
    EXPECT_EQ(Blocks().leased(), 2) << "one hold is left, and the sink";
    EXPECT_EQ(engine->Release(block).refused_size(), 0);
  }
}

TEST_F(RaceTest, FreeWhileAStepIsInFlight) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest(), "other");
  for (uint64_t step = 1; step <= kRounds; ++step) {
    const std::vector<uint64_t> blocks = engine->Lease(2);
    std::atomic<bool> passed{false};
    std::optional<v1::OperationResult> answer;
    engine->Send(ReleaseOp(blocks, step), &answer);
    std::vector<uint64_t> taken;
    AtOnce(
        [&] {
          passed = true;
          engine->Fence(step);
        },
        [&] {
          const v1::LeaseResult lease = other->LeaseAsked(12, 1);
          const bool fenced = passed;
          taken.assign(lease.blocks().begin(), lease.blocks().end());
          for (const uint64_t block : taken) {
            EXPECT_TRUE(fenced || uint32_t(block) != uint32_t(blocks[0]));
          }
        });
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->release().refused_size(), 0);
    other->Release(taken);
  }
}

TEST_F(RaceTest, RevokeAgainstUse) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, listener);
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<uint64_t> blocks = engine->Lease(2);
    v1::StepResponse response;
    AtOnce(
        [&] {
          response = engine->Step({SealOp(blocks, Keys("r" + std::to_string(round), 2)), ReleaseOp(blocks)});
        },
        [&] {
          v1::RevokeRequest request;
          request.set_blocks(2);
          v1::RevokeResponse asked;
          ASSERT_TRUE(daemon_->Revoke(request, &asked).ok());
          EXPECT_EQ(asked.sessions_asked(), 1);
        });
    // Revoke asks, it takes nothing.
    EXPECT_EQ(response.results(0).seal().refused_size() + response.results(1).release().refused_size(), 0);
    const int told = response.notices_size() + engine->Pending().notices_size();
    EXPECT_GE(told, 1);
  }
}

TEST_F(RaceTest, GrowthAgainstMatchAndLease) {
  for (int round = 0; round < 20; ++round) {
    scripts_.clear();
    StartDaemon(8);
    const auto engine = OpenEngine(OpenRequest());
    std::atomic<bool> done{false};
    std::thread mapper([&] {
      while (!done) {
        daemon_->HousekeepOnce();
        engine->MapSlabs();
      }
    });
    for (int i = 0; i < 60; ++i) {
      const v1::LeaseResult lease = engine->LeaseAsked(2, 1);
      // A block that was answered lies in a slab that this session has mapped.
      for (const uint64_t block : lease.blocks()) EXPECT_LT(uint32_t(block), engine->mapped * kSlabBlocks);
      if (lease.blocks_size() == 2) {
        const std::vector<uint64_t> blocks(lease.blocks().begin(), lease.blocks().end());
        engine->Seal(blocks, Keys("g" + std::to_string(i) + "_", 2));
        EXPECT_EQ(engine->Match(Keys("g" + std::to_string(i) + "_", 2)).tokens(), 32);
      }
    }
    done = true;
    mapper.join();
    engine->Die();
    EXPECT_EQ(Blocks().quarantined(), 0);
    daemon_.reset();
  }
}

TEST_F(RaceTest, DeathAgainstVerbs) {
  StartDaemon(4);
  for (int round = 0; round < kRounds; ++round) {
    const auto engine = OpenEngine(OpenRequest());
    const auto survivor = OpenEngine(OpenRequest(), "survivor");
    const std::vector<std::string> keys = Keys("d" + std::to_string(round) + "_", 3);
    AtOnce(
        [&] {
          for (int i = 0; i < 4; ++i) {
            const v1::StepResponse leased = engine->Step({LeaseOp(3)});
            if (leased.code() != 0) break;
            const auto& refs = leased.results(0).lease().blocks();
            const std::vector<uint64_t> blocks(refs.begin(), refs.end());
            if (blocks.size() < 3) break;
            engine->Step({SealOp(blocks, keys, "", 1), ReleaseOp(blocks), FenceOp(i + 1)});
          }
        },
        [&] { engine->Die(); });
    EXPECT_EQ(engine->Step({LeaseOp(1)}).code(), static_cast<int>(absl::StatusCode::kAborted));
    EXPECT_EQ(Blocks().quarantined(), 0);
    EXPECT_EQ(Blocks().leased(), 1) << "the survivor's sink";
    survivor->Die();
  }
}

TEST_F(RaceTest, OpenAgainstHangup) {
  StartDaemon(4);
  for (int round = 0; round < kRounds; ++round) {
    const auto engine = Attach();
    AtOnce([&] { engine->Open(OpenRequest()).IgnoreError(); }, [&] { engine->Die(); });
    EXPECT_EQ(Blocks().leased() + Blocks().quarantined(), 0);
    EXPECT_EQ(daemon_->Snapshot().sessions_open, 0);
    v1::ListSessionsResponse sessions;
    ASSERT_TRUE(daemon_->ListSessions({}, &sessions).ok());
    EXPECT_EQ(sessions.sessions_size(), 0);
  }
}

TEST_F(RaceTest, OpenAgainstOpenOfTheSameSpace) {
  for (int round = 0; round < 50; ++round) {
    scripts_.clear();
    StartDaemon(4);
    const auto a = Attach(), b = Attach();
    v1::OpenSession request = OpenRequest();
    request.set_guaranteed_blocks(20);
    AtOnce([&] { EXPECT_TRUE(a->Open(request).ok()); }, [&] { EXPECT_TRUE(b->Open(request).ok()); });
    EXPECT_EQ(a->opened.space(), b->opened.space());
    Settle({a.get(), b.get()});
    EXPECT_EQ(a->LeaseAsked(20, 20).blocks_size(), 20);
    EXPECT_EQ(b->LeaseAsked(20, 20).blocks_size(), 20);
    daemon_.reset();
  }
}

TEST_F(RaceTest, CloseOfAnIdleSpaceAgainstOpen) {
  options_.idle_space_ms = 0;
  StartDaemon(1);
  for (int round = 0; round < kRounds; ++round) {
    const auto engine = Attach();
    absl::Status opened;
    AtOnce([&] { opened = engine->Open(OpenRequest()); }, [&] { daemon_->HousekeepOnce(); });
    ASSERT_TRUE(opened.ok()) << opened;
    engine->MapSlabs();
    EXPECT_EQ(engine->LeaseAsked(1, 1).blocks_size(), 1);
    engine->Die();
    clock_.Advance(1);
  }
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 0);
  EXPECT_EQ(daemon_->Snapshot().devices[0].used_bytes(), 0);
}

TEST_F(RaceTest, AnOpeningWaitsForTheMemoryOfAClosingSpace) {
  options_.idle_space_ms = 0;
  StartDaemon(1);
  for (int round = 0; round < 20; ++round) {
    OpenEngine(OpenRequest("old"))->Die();
    clock_.Advance(1);
    const auto engine = Attach();
    absl::Status opened;
    std::atomic<bool> over{false};
    std::thread opening;
    scripts_[0]->on_destroy = [&] {
      opening = std::thread([&] {
        opened = engine->Open(OpenRequest("new"));
        over = true;
      });
      // Beside what became of the older spaces. It asks for memory next, which is not back yet.
      while (daemon_->Snapshot().spaces.empty() && !over) std::this_thread::yield();
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    };
    daemon_->HousekeepOnce();
    scripts_[0]->on_destroy = nullptr;
    opening.join();
    ASSERT_TRUE(opened.ok()) << opened;
    EXPECT_EQ(daemon_->Snapshot().devices[0].used_bytes(), kSlabBlocks * kBlockBytes);
    engine->Die();
    clock_.Advance(1);
    daemon_->HousekeepOnce();
    EXPECT_EQ(scripts_[0]->alive, 0);
  }
}

// Closed while the device made it a slab: that slab goes back, and its memory is for others.
TEST_F(RaceTest, ASlabForASpaceThatWasClosedMeanwhile) {
  StartDaemon(2);
  const auto old = OpenEngine(OpenRequest("old"));
  old->LeaseAsked(13, 0);
  const auto engine = Attach();
  absl::Status opened;
  std::thread opening;
  scripts_[0]->on_make = [&] {
    if (opening.joinable()) return;
    old->Die();
    // The device is full, so this closes the space that nobody uses any more, and waits for its memory.
    opening = std::thread([&] { opened = engine->Open(OpenRequest("new")); });
    const auto is_open = [&] {
      const std::vector<SpaceSnapshot> spaces = daemon_->Snapshot().spaces;
      return std::any_of(spaces.begin(), spaces.end(),
                         [&](const SpaceSnapshot& space) { return space.space == old->opened.space(); });
    };
    while (is_open()) std::this_thread::yield();
  };
  daemon_->HousekeepOnce();
  ASSERT_TRUE(opening.joinable()) << "the old space made no slab";
  opening.join();
  scripts_[0]->on_make = nullptr;
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(scripts_[0]->alive, 1);
  EXPECT_EQ(daemon_->Snapshot().devices[0].used_bytes(), kSlabBlocks * kBlockBytes);
}

class HousekeeperTest : public RaceTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(HousekeeperTest, TheThreadGrowsAndReclaims) {
  options_.policy = GetParam();
  options_.low_watermark = 0.1;
  options_.high_watermark = 0.3;
  options_.housekeeping_thread = true;
  options_.slab_bytes = kSlabBlocks * kBlockBytes;
  options_.device_capacity_bytes = {4 * kSlabBlocks * kBlockBytes};
  scripts_.push_back(std::make_unique<MemoryDevice::Script>());
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem0", kGranuleBytes, scripts_.back().get()));
  daemon_ = Daemon::Start(options_, std::move(devices), &clock_).value();
  const auto engine = OpenEngine(OpenRequest());
  // Twice as many blocks as there are, all left cached: verbs alone never have to evict for long.
  for (int i = 0; i < 128;) {
    engine->MapSlabs();
    const v1::LeaseResult lease = engine->LeaseAsked(1, 1);
    if (lease.blocks_size() == 0) {
      ASSERT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
      std::this_thread::yield();
      continue;
    }
    engine->Seal({lease.blocks(0)}, {Key("t" + std::to_string(i++))});
    engine->Release({lease.blocks(0)});
  }
  EXPECT_EQ(Blocks().capacity(), 63);
  uint64_t background = 0;
  while (background == 0) {
    background = daemon_->Snapshot().spaces.at(0).pool.evicted[static_cast<int>(EvictReason::kBackground)];
    std::this_thread::yield();
  }
  // A policy that decides outside the lock has decided on what left, or has been too late on a busy machine.
  const SpaceSnapshot space = daemon_->Snapshot().spaces.at(0);
  EXPECT_EQ(space.decided_in_time + space.decided_late > 0, options_.policy == "cold_rl");
}
INSTANTIATE_TEST_SUITE_P(Policies, HousekeeperTest, ::testing::Values("lru", "cold_rl"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kvpool
