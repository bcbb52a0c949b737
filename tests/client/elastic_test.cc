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
#include <vector>

#include "client/session.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr uint32_t kChain = 5;
// Each model has so many chains, which are 1,000 blocks, in a pool of some 1,500.
constexpr uint32_t kChains = 200;
constexpr uint32_t kHot = kChains / 10;
// Each is some two seconds.
constexpr int kRounds = 4;

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
    for (int pass = 0; pass < 100 && computed > 0; ++pass) {
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
};

TEST_F(ElasticTest, TwoModelsInTurnOnMemoryForOneAndAHalf) {
  StartDaemon("100MiB", {"--policy=lru"});
  const auto a = Open(ModelOptions(daemon_->socket(), "a"));
  ASSERT_NE(a, nullptr);
  steady_clock::duration longest{0};
  uint32_t least = kHot * kChain;
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_NO_FATAL_FAILURE(Work(a.get())) << round;
    // A is idle: it holds its sink, and what its magazine has.
    SessionOptions options = ModelOptions(daemon_->socket(), "b");
    options.guaranteed_blocks = 1000;
    const auto began = steady_clock::now();
    const auto b = Open(options);
    longest = std::max(longest, steady_clock::now() - began);
    ASSERT_NE(b, nullptr) << round;
    auto all = b->LeaseWithin(960, Soon());
    ASSERT_TRUE(all.ok()) << all.status();
    for (const BlockRef block : all->refs()) {
      PrefixKey key{};
      std::memcpy(key.data(), &block, sizeof(block));
      Stamp(b->data(block), key);
    }
    for (const BlockRef block : all->refs()) {
      PrefixKey key{};
      std::memcpy(key.data(), &block, sizeof(block));
      ASSERT_TRUE(HasStamp(b->data(block), key));
    }
    least = std::min(least, Found(a.get(), 0, kHot));
    all->Release();
  }
  std::printf("longest opening %.1f ms; of %u hot blocks %u at least were there after it\n",
              std::chrono::duration<double, std::milli>(longest).count(), kHot * kChain, least);
  EXPECT_GE(least, kHot * kChain * 9 / 10);
}

TEST_F(ElasticTest, AHeldBlockInEachSlabIsNamedInBoundedTime) {
  StartDaemon("32MiB");
  SessionOptions options = ModelOptions(daemon_->socket(), "a");
  options.magazine_blocks = 0;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  auto all = a->LeaseWithin(500, Soon());
  ASSERT_TRUE(all.ok()) << all.status();
  options = ModelOptions(daemon_->socket(), "b");
  options.guaranteed_blocks = 100;
  const auto refused = Session::Open(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  // One of each slab: what is held keeps the last one, and all in front.
  std::vector<BlockRef> rest;
  for (const BlockRef block : all->refs()) {
    if (Index(block.id) % kSlabBlocks != 5) rest.push_back(block);
  }
  a->Release(rest);
  ASSERT_TRUE(a->Flush(Soon()).ok());
  const auto again = Session::Open(options);
  ASSERT_FALSE(again.ok());
  EXPECT_THAT(std::string(again.status().message()), ::testing::HasSubstr("holds 1 blocks of the slab"));
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
  while (!done) {
    if (a->slabs_asked_back() > 0) {
      const absl::StatusOr<uint64_t> given = a->GiveBackSlabs();
      EXPECT_TRUE(given.ok()) << given.status();
      bytes += given.value_or(0);
    }
    EXPECT_LE(Found(a.get(), 0, 4), 4 * kChain);
  }
  opening.join();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_GE(bytes, 100 * kBlockBytes / 2);
}

}  // namespace
}  // namespace kvpool
