// Models that share one daemon's memory, as engines see it: real slabs, mapped and unmapped while they work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kChain = 5;
// Each model has so many chains, which are 1,000 blocks, in a pool of some 1,500.
constexpr uint32_t kChains = 200;
constexpr uint32_t kHot = kChains / 10;
constexpr int kRounds = KVPOOL_SANITIZED ? 3 : 10;
// From its opening on a model is to have its guarantee within a second, which is asked of most rounds: a machine that has other
// things to do may hold up one of them.
constexpr auto kGuaranteeIsThere = std::chrono::seconds(KVPOOL_SANITIZED ? 5 : 1);
constexpr auto kGuaranteeIsLate = std::chrono::seconds(KVPOOL_SANITIZED ? 20 : 5);
// What an operator keeps for the idle model: eight slabs, of the nine that the busy one leaves.
constexpr uint32_t kShare = 500;
constexpr uint32_t kGuarantee = 1000;

SessionOptions ModelOptions(const std::string& socket, const std::string& model) {
  SessionOptions options = OptionsFor(socket);
  options.client_name = model;
  options.fingerprint.set_digest(model);
  options.give_back = GiveBack::kAnyTime;
  return options;
}

class ElasticTest : public SessionTest {
 protected:
  static std::vector<PrefixKey> ChainOf(Session* session, uint32_t chain) {
    return PrefixHasher(session->hash_seed()).Chain(TokensOf(chain + 1, kChain), kTokensPerBlock);
  }
  // How many blocks of these chains are found, each with its own bytes.
  static uint32_t Found(Session* session, uint32_t first, uint32_t end) {
    uint32_t found = 0;
    for (uint32_t chain = first; chain < end; ++chain) {
      const std::vector<PrefixKey> keys = ChainOf(session, chain);
      const GroupKeys asked{.keys = KeyBytes(keys)};
      auto hit = session->Match({&asked, 1})->Wait(Soon());
      EXPECT_TRUE(hit.ok()) << hit.status();
      if (!hit.ok()) return found;
      for (size_t i = 0; i < hit->groups[0].size(); ++i) {
        EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i]))
            << "chain " << chain << " block " << i;
        ++found;
      }
    }
    return found;
  }
  // Computes what is not there, until all of it is: memory comes back from the other model meanwhile.
  static void Work(Session* session) {
    uint32_t computed = kChains;
    for (const Deadline deadline = Soon(); computed > 0 && steady_clock::now() < deadline;) {
      computed = 0;
      for (uint32_t chain = kChains; chain-- > 0;) {
        if (Found(session, chain, chain + 1) == kChain) continue;
        ASSERT_NO_FATAL_FAILURE(Share(session, ChainOf(session, chain)));
        ++computed;
      }
    }
    EXPECT_EQ(computed, 0);
    EXPECT_EQ(Found(session, 0, kHot), kHot * kChain);
    ASSERT_TRUE(session->Flush(Soon()).ok());
  }

  tools::OperatorClient& Operator() {
    if (operator_ == nullptr) {
      auto opened = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
      EXPECT_TRUE(opened.ok()) << opened.status();
      operator_ = std::move(*opened);
    }
    return *operator_;
  }
  uint64_t Epoch() {
    const auto stats = Operator().GetStats({});
    EXPECT_TRUE(stats.ok()) << stats.status();
    return stats.ok() ? stats->daemon_epoch() : 0;
  }
  v1::SessionInfo InfoOf(const Session& session) {
    const auto listed = Operator().ListSessions({});
    EXPECT_TRUE(listed.ok()) << listed.status();
    if (!listed.ok()) return {};
    for (const v1::SessionInfo& info : listed->sessions()) {
      if (info.session() == session.id()) return info;
    }
    ADD_FAILURE() << "session " << session.id() << " is not listed";
    return {};
  }
  uint32_t SlabsOf(const Session& session) {
    const uint64_t id = InfoOf(session).space();
    const auto listed = Operator().ListSpaces({});
    EXPECT_TRUE(listed.ok()) << listed.status();
    if (!listed.ok()) return 0;
    for (const v1::SpaceInfo& space : listed->spaces()) {
      if (space.space() == id) return space.slabs();
    }
    return 0;
  }
  void KeepFor(const Session& session, uint32_t blocks) {
    v1::SetShareRequest request;
    request.set_space(InfoOf(session).space());
    request.set_guaranteed_blocks(blocks);
    const auto set = Operator().SetShare(request);
    ASSERT_TRUE(set.ok()) << set.status();
  }
  // An operator asks the session for what it does not use. From then on it holds its sink.
  void RevokeAll(const Session& session) {
    v1::RevokeRequest request;
    request.set_session(session.id());
    request.set_blocks(UINT32_MAX);
    v1::SessionInfo info;
    for (const Deadline deadline = Soon(); steady_clock::now() < deadline && !HoldsItsSink(info);) {
      // A lease from before may have filled its magazine since the last time.
      const auto revoked = Operator().Revoke(request);
      ASSERT_TRUE(revoked.ok()) << revoked.status();
      EXPECT_EQ(revoked->sessions_asked(), 1);
      for (int look = 0; look < 100 && !HoldsItsSink(info); ++look) info = InfoOf(session);
    }
    EXPECT_TRUE(HoldsItsSink(info)) << info.DebugString();
  }
  static bool HoldsItsSink(const v1::SessionInfo& info) {
    return info.leased() == 1 && info.referenced() == 0;
  }

 private:
  std::unique_ptr<tools::OperatorClient> operator_;
};

TEST_F(ElasticTest, TwoModelsInTurnOnMemoryForOneAndAHalf) {
  StartDaemon("100MiB", {"--policy=lru"});
  const auto a = Open(ModelOptions(daemon_->socket(), "a"));
  ASSERT_NE(a, nullptr);
  const uint64_t epoch = Epoch();
  ASSERT_NO_FATAL_FAILURE(KeepFor(*a, kShare));
  std::vector<steady_clock::duration> openings;
  uint32_t least = kHot * kChain, least_slabs = UINT32_MAX;
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_NO_FATAL_FAILURE(Work(a.get())) << round;
    ASSERT_NO_FATAL_FAILURE(RevokeAll(*a)) << round;
    SessionOptions options = ModelOptions(daemon_->socket(), "b");
    options.guaranteed_blocks = kGuarantee;
    options.magazine_blocks = 0;
    const auto began = steady_clock::now();
    const auto b = Open(options);
    const auto took = steady_clock::now() - began;
    ASSERT_NE(b, nullptr) << round;
    EXPECT_LT(took, kGuaranteeIsLate) << round;
    openings.push_back(took);
    auto all = b->LeaseWithin(kGuarantee, Soon());
    ASSERT_TRUE(all.ok()) << all.status();
    for (const BlockRef block : all->refs()) {
      PrefixKey key{};
      std::memcpy(key.data(), &block, sizeof(block));
      Stamp(b->data(block), key);
    }
    // A third model can't have what is kept for the idle one, and takes nothing of it by asking.
    options = ModelOptions(daemon_->socket(), "c");
    options.guaranteed_blocks = 2 * kSlabBlocks;
    const auto c = Session::Open(options);
    EXPECT_EQ(c.status().code(), absl::StatusCode::kResourceExhausted) << c.status();
    EXPECT_THAT(std::string(c.status().message()), HasSubstr("500 blocks are kept for it by an operator"));
    for (const BlockRef block : all->refs()) {
      PrefixKey key{};
      std::memcpy(key.data(), &block, sizeof(block));
      ASSERT_TRUE(HasStamp(b->data(block), key));
    }
    least_slabs = std::min(least_slabs, SlabsOf(*a));
    least = std::min(least, Found(a.get(), 0, kHot));
    all->Release();
  }
  std::ranges::sort(openings);
  const steady_clock::duration middle = openings[openings.size() / 2];
  std::printf(
      "an opening %.1f ms in the middle, %.1f ms at most; of %u hot blocks %u at least were there after it, "
      "in %u slabs or "
      "more\n",
      std::chrono::duration<double, std::milli>(middle).count(),
      std::chrono::duration<double, std::milli>(openings.back()).count(), kHot * kChain, least, least_slabs);
  EXPECT_LT(middle, kGuaranteeIsThere);
  EXPECT_GE(least, kHot * kChain * 9 / 10);
  EXPECT_GT(least_slabs * kSlabBlocks, kShare);
  EXPECT_EQ(Epoch(), epoch) << "the daemon was started again";
}

TEST_F(ElasticTest, AHeldBlockInEachSlabIsNamedInBoundedTime) {
  StartDaemon("32MiB");
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.magazine_blocks = 0;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  // The second one's blocks lie behind those of the first: in the upper four of eight slabs.
  auto lower = a->LeaseWithin(250, Soon());
  ASSERT_TRUE(lower.ok()) << lower.status();
  options.client_name = "second";
  const auto second = Open(options);
  ASSERT_NE(second, nullptr);
  auto upper = second->LeaseWithin(250, Soon());
  ASSERT_TRUE(upper.ok()) << upper.status();
  options = ModelOptions(daemon_->socket(), "b");
  options.guaranteed_blocks = 100;
  const auto refused = Session::Open(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  const std::string name_a = absl::StrCat("session ", a->id(), " (a) holds "),
                    name_second = absl::StrCat("session ", second->id(), " (second) holds ");
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr(name_a + "250 blocks"), HasSubstr(name_second + "250 blocks")));
  // One of each slab: what is held keeps the last one, and all in front.
  const auto keep_one_of_each = [](Session* session, const Blocks& blocks) {
    std::vector<BlockRef> rest;
    for (const BlockRef block : blocks.refs()) {
      if (Index(block.id) % kSlabBlocks != 5) rest.push_back(block);
    }
    session->Release(rest);
    ASSERT_TRUE(session->Flush(Soon()).ok());
  };
  ASSERT_NO_FATAL_FAILURE(keep_one_of_each(a.get(), *lower));
  ASSERT_NO_FATAL_FAILURE(keep_one_of_each(second.get(), *upper));
  const auto began = steady_clock::now();
  const auto again = Session::Open(options);
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(10));
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), absl::StatusCode::kResourceExhausted) << again.status();
  const auto names_both = AllOf(HasSubstr(name_a + "3 blocks in 3 of the 7 slabs that could go"),
                                HasSubstr(name_second + "4 blocks in 4 of the 7 slabs that could go"));
  EXPECT_THAT(std::string(again.status().message()), names_both);
  // It has waited, and an operator could see for what.
  EXPECT_THAT(daemon_->AwaitInLog("opening waits for memory"), names_both);
}

TEST_F(ElasticTest, ByCallAnEngineGivesBackAtItsStep) {
  StartDaemon("32MiB");
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.give_back = GiveBack::kByCall;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  for (uint32_t chain = 0; chain < 90; ++chain) {
    ASSERT_NO_FATAL_FAILURE(Share(a.get(), ChainOf(a.get(), chain)));
  }
  options = ModelOptions(daemon_->socket(), "b");
  options.guaranteed_blocks = 100;
  std::atomic<bool> done{false};
  absl::StatusOr<std::unique_ptr<Session>> b = absl::UnknownError("");
  std::thread opening([&] {
    b = Session::Open(options);
    done = true;
  });
  uint64_t bytes = 0;
  std::chrono::milliseconds longest{0};
  EXPECT_FALSE(a->asked_back_within().has_value());
  while (!done) {
    if (a->slabs_asked_back() > 0) {
      // The opening waits for 2 s at most.
      const auto within = a->asked_back_within();
      if (within.has_value()) longest = std::max(longest, *within);
      const absl::StatusOr<uint64_t> given = a->GiveBackSlabs();
      EXPECT_TRUE(given.ok()) << given.status();
      bytes += given.value_or(0);
    }
    EXPECT_LE(Found(a.get(), 0, 4), 4 * kChain);
  }
  opening.join();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_GE(bytes, 100 * kBlockBytes / 2);
  EXPECT_GT(longest.count(), 0);
  EXPECT_LE(longest.count(), 2000);
  EXPECT_FALSE(a->asked_back_within().has_value());
}

// ---- Holes

class HolesTest : public ElasticTest {
 protected:
  // Shares chains until the space has so many slabs.
  void Fill(Session* session, uint32_t slabs) {
    for (uint32_t chain = 0; session->mapped_blocks() < slabs * kSlabBlocks; ++chain) {
      ASSERT_LT(chain, 10 * kChains);
      ASSERT_NO_FATAL_FAILURE(Share(session, ChainOf(session, chain)));
    }
    ASSERT_TRUE(session->Flush(Soon()).ok());
  }
  // A block that is held in the last slab, and has its own bytes.
  static Blocks HoldLast(Session* session) {
    const uint32_t first = session->mapped_blocks() - kSlabBlocks;
    std::vector<BlockRef> others;
    while (true) {
      auto leased = session->LeaseWithin(1, Soon());
      EXPECT_TRUE(leased.ok()) << leased.status();
      if (!leased.ok() || Index((*leased)[0].id) >= first) {
        session->Release(others);
        EXPECT_TRUE(session->Flush(Soon()).ok());
        Stamp(session->data((*leased)[0]), StampOf((*leased)[0]));
        return *std::move(leased);
      }
      others.push_back((*leased)[0]);
      leased->Detach();
    }
  }
  static PrefixKey StampOf(BlockRef block) {
    PrefixKey key{};
    std::memcpy(key.data(), &block, sizeof(block));
    return key;
  }
  static bool HasHole(const Session& session) { return session.mapped_ranges().size() > 1; }
  // Another model has this guarantee within a second, and writes to all of it.
  std::unique_ptr<Session> OpenOther(uint32_t blocks) {
    SessionOptions options = ModelOptions(daemon_->socket(), "b");
    options.guaranteed_blocks = blocks;
    options.magazine_blocks = 0;
    auto b = Session::Open(options);
    // As long as a slab is on its way to the first model that one gives none.
    for (const Deadline deadline = Soon();
         absl::IsResourceExhausted(b.status()) && steady_clock::now() < deadline;)
      b = Session::Open(options);
    EXPECT_TRUE(b.ok()) << b.status();
    if (!b.ok()) return nullptr;
    auto all = (*b)->LeaseWithin(blocks, Soon());
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return nullptr;
    for (const BlockRef block : all->refs()) Stamp((*b)->data(block), StampOf(block));
    all->Release();
    EXPECT_TRUE((*b)->Flush(Soon()).ok());
    return *std::move(b);
  }
};

TEST_F(HolesTest, ABlockOfTheLastSlabKeepsThatAlone) {
  StartDaemon("32MiB", {"--policy=lru"});
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.magazine_blocks = 0;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 8));
  const Blocks held = HoldLast(a.get());
  const uint32_t end = a->mapped_blocks();
  const auto began = steady_clock::now();
  const auto b = OpenOther(4 * kSlabBlocks);
  EXPECT_LT(steady_clock::now() - began, kGuaranteeIsLate);
  ASSERT_NE(b, nullptr);
  EXPECT_LT(SlabsOf(*a), 5u);
  EXPECT_TRUE(HasHole(*a));
  EXPECT_EQ(a->mapped_blocks(), end);
  EXPECT_LT(a->capacity_blocks(), end);
  EXPECT_TRUE(HasStamp(a->data(held[0]), StampOf(held[0])));
  EXPECT_GT(Found(a.get(), 0, kChains), 0u);
  // One that comes now maps what is there, and finds the same.
  options.client_name = "late";
  const auto late = Open(options);
  ASSERT_NE(late, nullptr);
  EXPECT_TRUE(HasHole(*late));
  EXPECT_EQ(late->mapped_ranges(), a->mapped_ranges());
  EXPECT_EQ(Found(late.get(), 0, kChains), Found(a.get(), 0, kChains));
  // An engine that takes no holes can't be served as long as the other model has the memory.
  options.give_back = GiveBack::kByCall;
  options.client_name = "rigid";
  const auto rigid = Session::Open(options);
  EXPECT_EQ(rigid.status().code(), absl::StatusCode::kResourceExhausted) << rigid.status();
  EXPECT_THAT(std::string(rigid.status().message()), HasSubstr("takes no holes"));
  options.holes = true;
  const auto asks = Open(options);
  ASSERT_NE(asks, nullptr);
  EXPECT_EQ(asks->mapped_ranges(), a->mapped_ranges());
}

TEST_F(HolesTest, TwoModelsInTurnWhileABlockOfTheLastSlabIsHeld) {
  StartDaemon("32MiB", {"--policy=lru"});
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.magazine_blocks = 0;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  // The other model keeps its first slab, of eight.
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 7));
  const Blocks held = HoldLast(a.get());
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    auto b = OpenOther(5 * kSlabBlocks);
    ASSERT_NE(b, nullptr);
    EXPECT_TRUE(HasHole(*a));
    EXPECT_TRUE(HasStamp(a->data(held[0]), StampOf(held[0])));
    EXPECT_LE(Found(a.get(), 0, kChains), 3 * kSlabBlocks);
    ASSERT_TRUE(b->Close(Soon()).ok());
    b.reset();
    // It grows back, into its holes first, and what is computed there is its own.
    const uint32_t small = SlabsOf(*a);
    uint32_t computed = 1;
    for (const Deadline deadline = Soon(); computed > 0 && steady_clock::now() < deadline;) {
      computed = 0;
      for (uint32_t chain = 0; chain < 70; ++chain) {
        if (Found(a.get(), chain, chain + 1) == kChain) continue;
        ASSERT_NO_FATAL_FAILURE(Share(a.get(), ChainOf(a.get(), chain)));
        ++computed;
      }
    }
    EXPECT_EQ(computed, 0u);
    EXPECT_GT(SlabsOf(*a), small);
    EXPECT_TRUE(HasStamp(a->data(held[0]), StampOf(held[0])));
    Found(a.get(), 0, kChains);
  }
  EXPECT_TRUE(a->status().ok()) << a->status();
}

TEST_F(HolesTest, AnEngineThatAsksForSlabsWithoutHolesGetsThemOnceTheMemoryIsThere) {
  StartDaemon("32MiB", {"--policy=lru"});
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.magazine_blocks = 0;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  // The other model keeps its first slab, of eight.
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 6));
  const Blocks held = HoldLast(a.get());
  auto b = OpenOther(2 * kSlabBlocks);
  ASSERT_NE(b, nullptr);
  ASSERT_TRUE(HasHole(*a));
  ASSERT_TRUE(b->Close(Soon()).ok());
  b.reset();
  options.give_back = GiveBack::kNever;
  options.client_name = "rigid";
  const auto rigid = Open(options);
  ASSERT_NE(rigid, nullptr);
  EXPECT_EQ(rigid->mapped_ranges().size(), 1u);
  EXPECT_FALSE(HasHole(*a));
  EXPECT_EQ(Found(rigid.get(), 0, kChains), Found(a.get(), 0, kChains));
}

}  // namespace
}  // namespace kvpool
