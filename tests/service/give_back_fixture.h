// Memory goes from one space to another while engines are in both: what one does and sees there.
#ifndef KVPOOL_TESTS_SERVICE_GIVE_BACK_FIXTURE_H_
#define KVPOOL_TESTS_SERVICE_GIVE_BACK_FIXTURE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/service/growth_fixture.h"

namespace kvpool {

class GiveBackTest : public GrowthTest {
 protected:
  GiveBackTest() {
    engines_give_back_ = true;
    options_.policy = "lru";
    options_.give_back_ms = 50;
  }
  // An engine of model "a" that has all slabs, and in them as many cached blocks as they hold.
  std::unique_ptr<Engine> Full(uint32_t slabs) {
    StartDaemon(slabs);
    auto engine = OpenEngine(OpenRequest("a"), "a");
    Fill(engine.get(), slabs);
    return engine;
  }
  // The same of one that is there.
  void Fill(Engine* engine, uint32_t slabs) {
    // The null block and the sink are no part of it.
    for (const uint64_t block : LeaseAll(engine, slabs * kSlabBlocks - 2)) {
      engine->Seal({block}, {NameOf(block)});
      clock_.Advance(1);
      engine->Release({block});
    }
  }
  // While slabs are to come a lease is answered in parts.
  std::vector<uint64_t> LeaseAll(Engine* engine, uint32_t count) {
    std::vector<uint64_t> blocks;
    for (int attempt = 0; attempt < 100 && blocks.size() < count; ++attempt) {
      const v1::LeaseResult lease = engine->LeaseAsked(count - static_cast<uint32_t>(blocks.size()), 1);
      blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
      Settle({engine});
    }
    EXPECT_EQ(blocks.size(), count);
    return blocks;
  }
  // Seals and releases a chain of five blocks in a space of three slabs, in which nothing else stays. It begins in the last
  // slab, goes on in the first, and ends in the last.
  std::vector<uint64_t> CacheChain(Engine* engine, const std::vector<std::string>& keys) {
    std::vector<uint64_t> all = engine->Lease(14);
    Settle({engine});
    std::vector<uint64_t> more = engine->Lease(16);
    Settle({engine});
    all.insert(all.end(), more.begin(), more.end());
    more = engine->Lease(16);
    const std::vector<uint64_t> chain = {more[3], more[4], all[0], all[1], more[5]};
    EXPECT_GT(IdOf(more[3]), 2 * kSlabBlocks);
    engine->Seal(chain, keys);
    engine->Release(chain);
    engine->Release(std::vector<uint64_t>(all.begin() + 2, all.end()));
    engine->Release({more.begin(), more.begin() + 3});
    engine->Release({more.begin() + 6, more.end()});
    return chain;
  }
  static std::string NameOf(uint64_t block) { return Key("block" + std::to_string(IdOf(block))); }
  static std::string NameOfId(uint32_t id) { return Key("block" + std::to_string(id)); }
  void Rules(const std::string& line) {
    RulesAre("[rule]\nuid = *\nrole = engine\ntenant = *\n" + line + "\n");
  }
  // The file is read again, if the daemon is there.
  void RulesAre(const std::string& rules) {
    access_->Replace(MakePolicy(rules));
    if (daemon_ != nullptr) daemon_->ApplyRules();
  }
  // The housekeeper goes on, for longer than slabs are asked for.
  void GoOn(const std::vector<Engine*>& engines) {
    for (int i = 0; i < 20; ++i) {
      clock_.Advance(200);
      Settle(engines);
    }
  }
  // The test's clock stands still: whoever waits must not wait for it.
  template <typename Work>
  void WhileTimePasses(Work work) {
    std::atomic<bool> done{false};
    std::thread time([&] {
      while (!done) {
        clock_.Advance(10);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    work();
    done = true;
    time.join();
  }
  // `work` has a thread of its own. Meanwhile engines map and unmap what they are asked to, and time passes.
  template <typename Work>
  void WhileEnginesGoOn(const std::vector<Engine*>& engines, Work work) {
    std::atomic<bool> done{false};
    std::thread thread([&] {
      work();
      done = true;
    });
    while (!done) {
      Settle(engines);
      clock_.Advance(10);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    thread.join();
  }
  template <typename Change>
  void SetShare(size_t space, Change change) {
    v1::SetShareRequest request;
    request.set_space(Space(space).space);
    request.set_keep_guaranteed(true);
    change(&request);
    v1::SetShareResponse response;
    EXPECT_TRUE(daemon_->SetShare(request, &response).ok());
  }
  void SetWeight(size_t space, uint32_t weight) {
    SetShare(space, [&](v1::SetShareRequest* request) { request->set_weight(weight); });
  }
  void SetPriority(size_t space, v1::PriorityClass priority) {
    SetShare(space, [&](v1::SetShareRequest* request) { request->set_priority_class(priority); });
  }
  // Opens model `name` without a wish, on a device with room for it.
  std::unique_ptr<Engine> OpenSmall(const std::string& name, uint32_t guaranteed = 1) {
    auto engine = Attach(name);
    v1::OpenSession request = OpenRequest(name);
    request.set_guaranteed_blocks(guaranteed);
    const absl::Status opened = engine->Open(request);
    EXPECT_TRUE(opened.ok()) << opened;
    engine->MapSlabs();
    return engine;
  }
  // Computes what nobody has, and lets it go: the space has more use for memory than there is.
  void Churn(Engine* engine, const std::string& name) {
    const v1::LeaseResult lease = engine->LeaseAsked(8, 1);
    const std::vector<uint64_t> blocks(lease.blocks().begin(), lease.blocks().end());
    for (size_t i = 0; i < blocks.size(); ++i)
      engine->Seal({blocks[i]}, {Key(name + "." + std::to_string(i))});
    if (!blocks.empty()) engine->Release(blocks);
    clock_.Advance(100);
  }
  uint64_t Evicted(size_t space) {
    const EvictedBlocks evicted = Space(space).pool.evicted;
    return std::accumulate(evicted.begin(), evicted.end(), uint64_t{0});
  }
  // Leases so many while the engines map what is made for it.
  std::vector<uint64_t> LeaseUpTo(size_t count, Engine* engine, const std::vector<Engine*>& all) {
    std::vector<uint64_t> blocks;
    while (blocks.size() < count) {
      const v1::LeaseResult lease = engine->LeaseAsked(static_cast<uint32_t>(count - blocks.size()), 1);
      blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
      Settle(all);
    }
    return blocks;
  }
  // Opens a session of two ranks, which has all of three slabs on each device, and lets go of it.
  void UseAll(Engine* rank0, Engine* rank1) {
    v1::OpenSession request = OpenRequest("a");
    request.set_ranks(2);
    ASSERT_TRUE(rank0->Open(request).ok());
    ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1, "a")).ok());
    Settle({rank0, rank1});
    rank0->Release(LeaseUpTo(46, rank0, {rank0, rank1}));
  }
  absl::Status OpenB(uint32_t guaranteed, std::unique_ptr<Engine>* b) {
    *b = Attach("b");
    v1::OpenSession request = OpenRequest("b");
    request.set_guaranteed_blocks(guaranteed);
    const absl::Status status = (*b)->Open(request);
    (*b)->MapSlabs();
    return status;
  }
  static std::string NameOfSession(const Engine& engine, const std::string& client) {
    return "session " + std::to_string(engine.opened.session()) + " (" + client + ")";
  }
  // What keeps memory from an opening of another model that wants so much.
  std::string Refusal(uint32_t guaranteed) {
    std::unique_ptr<Engine> b;
    const absl::Status refused = OpenB(guaranteed, &b);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    return std::string(refused.message());
  }
  // Each counts as a use.
  uint32_t Found(Engine* engine, uint32_t first, uint32_t end) {
    uint32_t found = 0;
    for (uint32_t id = first; id < end; ++id) {
      clock_.Advance(1);
      const v1::MatchResult match = engine->Match({NameOfId(id)});
      if (match.tokens() == 0) continue;
      ++found;
      const uint32_t slab = IdOf(match.groups(0).blocks(0)) / kSlabBlocks;
      EXPECT_TRUE(engine->holes || slab < Space(0).slabs) << slab;
      for (const v1::SlabLeave& leave : engine->peer->leaves()) EXPECT_NE(leave.slab(), slab);
      engine->Release({match.groups(0).blocks(0)});
    }
    return found;
  }
};

class HolesTest : public GiveBackTest {
 protected:
  HolesTest() { engines_take_holes_ = true; }
  static std::vector<uint32_t> Left(const Engine& engine) {
    std::vector<uint32_t> left;
    for (const v1::SlabLeave& leave : engine.peer->leaves()) left.push_back(leave.slab());
    return left;
  }
  // Holds one block of this slab.
  uint64_t Hold(Engine* engine, uint32_t slab) {
    for (uint32_t id = slab * kSlabBlocks + 2; id < (slab + 1) * kSlabBlocks; ++id) {
      const v1::MatchResult match = engine->Match({NameOfId(id)});
      if (match.tokens() > 0) return match.groups(0).blocks(0);
    }
    ADD_FAILURE() << "nothing is cached in slab " << slab;
    return 0;
  }
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_GIVE_BACK_FIXTURE_H_
