// Device operations against everything else, with threads: right whatever the interleaving; sanitizers see the rest.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

class ScoreRaceTest : public ScoreTest {
 protected:
  // A device of one slab, so that nothing waits for growth.
  void StartRace() {
    slab_blocks_ = 4 * kScoredSlabBlocks;
    StartScoring(1);
  }
  // Opened and ready.
  std::vector<std::unique_ptr<Engine>> OpenAll(int count) {
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<Engine*> all;
    for (int i = 0; i < count; ++i) {
      engines.push_back(OpenEngine(ScoredRequest(), "engine" + std::to_string(i)));
      all.push_back(engines.back().get());
    }
    Settle(all);
    return engines;
  }
};

// Each engine prunes and compacts its own sequence, and releases behind its own operations.
TEST_F(ScoreRaceTest, EnginesPruneSideBySide) {
  StartRace();
  auto engines = OpenAll(3);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < engines.size(); ++i) {
    threads.emplace_back([this, engine = engines[i].get(), i] {
      std::minstd_rand random(static_cast<unsigned>(i) + 1);
      for (int round = 0; round < 60; ++round) {
        Refs table;
        for (int block = 0; block < 6; ++block)
          table.push_back(LeaseWith(engine, {static_cast<float>(random() % 9)})[0]);
        const auto score = Begin(engine, ScoreOp(table));
        const auto prune = Begin(engine, PruneOp(table, 4 * kTokens));
        const v1::PruneResult pruned = prune->Await().prune();
        EXPECT_EQ(pruned.released(), 2) << prune->Await().message();
        EXPECT_EQ(score->Await().code(), 0);
        const auto compact = Begin(engine, CompactOp(TableOf(pruned), 2 * kTokens));
        const v1::OperationResult compacted = compact->Await();
        ASSERT_EQ(compacted.code(), 0) << compacted.message();
        EXPECT_EQ(engine->Release(TableOf(compacted.compact())).refused_size(), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Blocks().leased(), engines.size()) << "the sinks";
}

// Sessions die and close while operations of theirs are anywhere: every block comes back.
TEST_F(ScoreRaceTest, EndsAgainstOperations) {
  StartRace();
  const auto last = OpenScored("last");
  const Refs own = LeaseWith(last.get(), {1});
  for (int round = 0; round < 60; ++round) {
    auto engines = OpenAll(2);
    std::vector<std::shared_ptr<LateAnswer>> answers;
    for (const auto& engine : engines) {
      for (int i = 0; i < 3; ++i) {
        const Refs blocks = LeaseWith(engine.get(), {1, 5, 2, 3});
        answers.push_back(
            Begin(engine.get(), i == 1 ? CompactOp(blocks, 2 * kTokens) : PruneOp(blocks, 2 * kTokens)));
        answers.push_back(Begin(engine.get(), ReleaseOp(blocks)));
      }
    }
    std::thread death([&] { engines[0]->Die(); });
    engines[1]->Do(CloseOp());
    death.join();
    engines[1]->Die();
    for (const auto& answer : answers) answer->Await();
    // Those that were running when their session ended are over when one behind them is.
    EXPECT_EQ(Run(last.get(), ScoreOp(own)).code(), 0);
    EXPECT_EQ(Blocks().quarantined(), 0);
    EXPECT_EQ(Blocks().leased(), 2) << "one block and a sink";
  }
}

// Compactions that lack blocks, each behind nothing but the slab that is to come; nothing is evicted for them.
TEST_F(ScoreRaceTest, CompactionsWaitForSlabsSideBySide) {
  StartScoring(12);
  auto engines = OpenAll(3);
  const Refs cached = engines[0]->Lease(5);
  for (size_t i = 0; i < cached.size(); ++i) engines[0]->Seal({cached[i]}, {Key("c" + std::to_string(i))});
  engines[0]->Release(cached);
  std::atomic<bool> stop{false};
  std::thread mapper([&] {
    while (!stop) {
      daemon_->HousekeepOnce();
      for (const auto& engine : engines) engine->MapSlabs();
    }
  });
  std::vector<std::thread> threads;
  for (const auto& engine : engines) {
    threads.emplace_back([this, engine = engine.get()] {
      for (int round = 0; round < 3; ++round) {
        v1::LeaseResult lease = engine->LeaseAsked(20, 20);
        for (; lease.blocks_size() == 0; lease = engine->LeaseAsked(20, 20)) {
          ASSERT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
          std::this_thread::yield();
        }
        const auto& leased = lease.blocks();
        const auto compact = Begin(engine, CompactOp(Refs(leased.begin(), leased.end()), 15 * kTokens));
        const auto behind = Begin(engine, ReleaseOp({leased[19]}));
        const v1::OperationResult compacted = compact->Await();
        EXPECT_EQ(compacted.code(), 0) << compacted.message();
        EXPECT_EQ(compacted.compact().table_size(), 15);
        behind->Await();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  mapper.join();
  EXPECT_EQ(Blocks().cached(), 5);
  EXPECT_EQ(Blocks().leased(), 3 * (1 + 3 * 15));
}

// A compaction waits behind another operation, which ends while a verb of the same session is half applied. The rest of
// that verb names by guess the blocks that the compaction is to be leased: the device writes to them, so they must stay
// its own.
TEST_F(ScoreRaceTest, WhatIsLetInBesideAHalfAppliedVerbLosesNoBlockToIt) {
  StartRace();
  const auto engine = OpenScored(), other = OpenScored("other");
  const uint64_t filler = engine->Lease(1)[0];
  constexpr uint32_t kFillers = 60000;
  uint32_t guessed = 0;
  for (int round = 0; round < 20; ++round) {
    const Refs sequence = LeaseWith(engine.get(), {1, 5, 2, 3});
    const Refs probe = engine->Lease(3);  // The last one shows that the verb has begun.
    // What was released last is leased next, one generation further.
    Refs guesses;
    for (const uint64_t ref : probe) {
      BlockRef next = BlockRef::Unpack(ref);
      ++next.generation;
      guesses.push_back(next.Pack());
    }
    engine->Release({probe[0], probe[1]});
    ASSERT_EQ(engine->Do(RefOp(Refs(kFillers, filler))).code(), 0);
    const uint32_t leased = Blocks().leased();
    const int calls = hold_.calls();
    hold_.Hold();
    const auto score = Begin(engine.get(), ScoreOp(sequence));
    hold_.AwaitCalls(calls + 1);
    const auto compact = Begin(engine.get(), CompactOp(sequence, 2 * kTokens));
    std::thread end([&] {
      while (Blocks().leased() == leased) std::this_thread::yield();
      hold_.Release();
    });
    // A release goes from the tail to the head.
    Refs named = guesses;
    named.insert(named.end(), kFillers, filler);
    named.push_back(probe[2]);
    const v1::ReleaseResult released = engine->Release(named);
    end.join();
    EXPECT_EQ(released.refused_size(), 3) << "they were not leased when the verb began";
    EXPECT_EQ(score->Await().code(), 0);
    const v1::OperationResult compacted = compact->Await();
    ASSERT_EQ(compacted.code(), 0) << compacted.message();
    const Refs table = TableOf(compacted.compact());
    const Refs of_other = other->Lease(3);
    for (const uint64_t block : table) {
      guessed += std::count(guesses.begin(), guesses.end(), block);
      EXPECT_EQ(std::count(of_other.begin(), of_other.end(), block), 0) << "two owners";
    }
    EXPECT_EQ(engine->Release(table).refused_size(), 0);
    other->Release(of_other);
  }
  EXPECT_GT(guessed, 0u) << "no guess was good";
}

// Snapshots, evictions and shared prefixes beside operations on the same blocks.
TEST_F(ScoreRaceTest, SharersAndOperatorsBesideOperations) {
  StartRace();
  auto engines = OpenAll(2);
  std::atomic<bool> stop{false};
  std::thread observer([&] {
    while (!stop) {
      daemon_->Snapshot();
      v1::EvictRequest request;
      request.set_count(1);
      v1::EvictResponse response;
      EXPECT_TRUE(daemon_->Evict(request, &response).ok());
      daemon_->HousekeepOnce();
    }
  });
  std::vector<std::thread> threads;
  for (const auto& engine : engines) {
    threads.emplace_back([this, engine = engine.get()] {
      for (int round = 0; round < 80; ++round) {
        Refs table = LeaseWith(engine, {5, 1, 2, 4});
        const std::vector<std::string> keys = Keys("r" + std::to_string(round), 4);
        const v1::SealResult sealed = engine->Seal(table, keys);
        for (int i = 0; i < 4; ++i) {
          if (sealed.canonical(i) == table[i]) continue;
          engine->Release({table[i]});
          table[i] = sealed.canonical(i);
        }
        const v1::PruneResult pruned = Prune(engine, PruneOp(table, 3 * kTokens));
        EXPECT_EQ(pruned.victims_size(), 1);
        EXPECT_EQ(engine->Release(TableOf(pruned)).refused_size(), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  observer.join();
  EXPECT_EQ(Blocks().leased(), engines.size());
  EXPECT_EQ(Blocks().sealed(), 0);
}

}  // namespace
}  // namespace kvpool
