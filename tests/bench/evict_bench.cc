// What a victim costs at a million cached blocks, all upkeep of the policy included.
//
// Every block is a chain of its own, the worst case for a policy: all of them are on offer. Contents are
// asked for at random: one in three of half the capacity, the others from four times the capacity, so that
// most are new and take the place of a victim. The cost is the time of all calls of the policy over the
// victims; the pool's own work is left out. A decision outside the lock is timed on a whole pool: candidates
// are shown, ranked and applied, and the victims evicted.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/hand_over.h"
#include "server/replacement/policies/async_policy.h"
#include "server/replacement/policy.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

constexpr uint32_t kBlocks = 1u << 20;
constexpr uint32_t kEvictions = 1'000'000;
constexpr uint32_t kDecisions = 5000;
constexpr double kMostVictimNs = 1000;
constexpr double kMostHoldMs = 5;
constexpr std::string_view kClassics[] = {"lru", "fifo",    "random", "lru_k",     "lfu",  "slru",
                                          "arc", "s3_fifo", "sieve",  "w_tinylfu", "gdsf", "length_aware"};

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

uint64_t Mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// A full cache that serves one content after the other.
class Cache {
 public:
  explicit Cache(std::string_view policy)
      : policy_(*MakeReplacementPolicy(policy, kBlocks + 1)),
        content_of_(kBlocks + 1),
        block_of_(5 * kBlocks) {
    for (uint32_t b = 1; b <= kBlocks; ++b) Insert(BlockId{b}, Draw());
  }

  void Turn(uint32_t evictions) {
    for (const uint64_t end = evictions_ + evictions; evictions_ < end;) {
      // Contents ahead are known, as the keys of a request are: what they need is asked for.
      const uint32_t content = std::exchange(ahead_[next_ % kAhead], Draw());
      const uint32_t soon = ahead_[(next_ + kAhead / 2) % kAhead];
      ++next_;
      policy_->Prefetch(BlockId{block_of_[soon]}, Mixed(soon + 1));
      const BlockId block{block_of_[content]};
      if (block != kNullBlock) {
        policy_->OnWithdraw(block);
        policy_->OnHit(block, ++now_);
        policy_->OnUsed(block, now_);
        policy_->OnOffer(block);
      } else {
        const BlockId victim = policy_->Victim(++now_);
        policy_->OnWithdraw(victim);
        policy_->OnEvict(victim);
        block_of_[content_of_[Index(victim)]] = 0;
        ++evictions_;
        Insert(victim, content);
      }
    }
  }

 private:
  static constexpr uint32_t kAhead = 32;

  void Insert(BlockId block, uint32_t content) {
    content_of_[Index(block)] = content;
    block_of_[content] = Index(block);
    policy_->OnInsert(block, {.hash = Mixed(content + 1), .now_ms = ++now_});
    policy_->OnUsed(block, now_);
    policy_->OnOffer(block);
  }
  uint32_t Draw() {
    const uint64_t r = random_();
    return static_cast<uint32_t>(r % 3 == 0 ? (r >> 8) % (kBlocks / 2)
                                            : kBlocks / 2 + (r >> 8) % (4 * kBlocks));
  }

  const std::unique_ptr<ReplacementPolicy> policy_;
  std::vector<uint32_t> content_of_, block_of_;
  std::mt19937_64 random_{20250812};
  std::vector<uint32_t> ahead_ = std::vector<uint32_t>(kAhead, 0);
  uint32_t next_ = 0;
  uint64_t now_ = 0, evictions_ = 0;
};

// A pool full of chains of one block.
class FullPool {
 public:
  explicit FullPool(std::string_view policy)
      : pool({.max_blocks = kBlocks + 1, .windows = {0}}, *MakeReplacementPolicy(policy, kBlocks + 1)) {
    KVPOOL_CHECK(pool.Grow(kBlocks).ok(), "%u blocks", kBlocks);
    session_ = *pool.AddSession({});
    for (uint32_t i = 0; i < kBlocks / 1024; ++i) Fill(1024);
  }
  void Fill(uint32_t count) {
    std::vector<BlockRef> blocks;
    pool.Lease(session_, ++now, count, count, &blocks);
    for (const BlockRef& block : blocks) {
      BlockKey key{.bytes = {}};
      const uint64_t content = Mixed(++contents_);
      std::memcpy(key.bytes.data(), &content, sizeof(content));
      const SealEntry entry{.block = block, .keys = {&key, 1}};
      SealVerdict outcome;
      pool.Seal(session_, now, nullptr, {&entry, 1}, {&outcome, 1});
      Verdict verdict;
      pool.Release(session_, now, {&block, 1}, {&verdict, 1});
    }
  }

  BlockPool pool;
  TimeMs now = 0;

 private:
  Holder session_ = kNobody;
  uint64_t contents_ = 0;
};

// From one policy to another as the daemon does it, with a lease of 64 blocks and their release between any
// two holds of the lock; and in one hold.
void BenchSwitch(std::string_view successor, Figures* figures) {
  constexpr uint32_t kSlice = 4096, kVerb = 64;
  FullPool full("lru");
  const auto make = [](std::string_view policy) { return *MakeReplacementPolicy(policy, kBlocks + 1); };
  double longest = 0;
  const auto hold = [&](const auto& step) {
    const Clock::time_point begin = Clock::now();
    const auto answer = step();
    longest = std::max(longest, SecondsSince(begin));
    full.Fill(kVerb);
    return answer;
  };
  const Clock::time_point begin = Clock::now();
  BlockPool::HandOver hand_over({.max_blocks = kBlocks + 1}, make(successor));
  while (!hold([&] { return hand_over.Copy(&full.pool, full.now, kSlice); })) {
  }
  hand_over.Build();
  std::unique_ptr<ReplacementPolicy> old;
  while (hold([&] { return (old = hand_over.Finish(&full.pool, kSlice)) == nullptr; })) hand_over.CatchUp();
  const std::string name = absl::StrCat("switch from lru to ", std::string(successor));
  figures->Add(absl::StrCat(name, ", longest hold"), longest * 1e3, "ms", AtMost(kMostHoldMs));
  figures->Add(absl::StrCat(name, ", in all"), SecondsSince(begin) * 1e3, "ms");
  full.pool.SetPolicy(full.now, make("lru"));
  std::unique_ptr<ReplacementPolicy> policy = make(successor);
  const Clock::time_point at_once = Clock::now();
  policy = full.pool.SetPolicy(full.now, std::move(policy));
  figures->Add(absl::StrCat(name, ", in one hold"), SecondsSince(at_once) * 1e3, "ms");
}

void BenchDecisions(Figures* figures) {
  FullPool full("cold_rl");
  BlockPool& pool = full.pool;
  const TimeMs& now = full.now;
  AsyncPolicy* const policy = pool.async_policy();
  Breaker breaker;
  std::vector<double> locked_us, all_us;
  for (uint32_t i = 0; i < kDecisions; ++i) {
    Decision decision;
    const Clock::time_point begin = Clock::now();
    if (!decision.Prepare(policy, &breaker, now)) break;
    const double prepared = SecondsSince(begin);
    decision.Rank([&] { return static_cast<uint64_t>(SecondsSince(begin) * 1e6); });
    const Clock::time_point apply = Clock::now();
    decision.Apply(policy, &breaker, now);
    const uint32_t freed = pool.Reclaim(now, decision.victims(), EvictReason::kBackground, nullptr);
    locked_us.push_back((prepared + SecondsSince(apply)) * 1e6);
    all_us.push_back(SecondsSince(begin) * 1e6);
    full.Fill(freed);
  }
  KVPOOL_CHECK(all_us.size() > kDecisions / 2, "%zu decisions", all_us.size());
  const auto quantile = [](std::vector<double>* values, double q) {
    std::sort(values->begin(), values->end());
    return (*values)[static_cast<size_t>(q * static_cast<double>(values->size() - 1))];
  };
  figures->Add("cold_rl decision p50", quantile(&all_us, 0.5), "us");
  figures->Add("cold_rl decision p99", quantile(&all_us, 0.99), "us", AtMost(Decision::kBudgetUs));
  figures->Add("cold_rl decision under the lock p99", quantile(&locked_us, 0.99), "us");
  figures->Add("cold_rl decisions too late", static_cast<double>(breaker.counts().late), "");
}

}  // namespace

void BenchEvict(Figures* figures) {
  figures->Note(absl::StrCat(kBlocks, " cached blocks, each a chain of its own, ", kEvictions, " evictions; ",
                             kDecisions, " decisions"));
  const auto victim_ns = [](std::string_view policy) {
    Cache cache(policy);
    cache.Turn(kEvictions);
    const Clock::time_point begin = Clock::now();
    cache.Turn(kEvictions);
    return SecondsSince(begin) * 1e9 / kEvictions;
  };
  for (const std::string_view policy : kClassics) {
    figures->Add(absl::StrCat(std::string(policy), " victim"), victim_ns(policy), "ns",
                 AtMost(kMostVictimNs));
  }
  figures->Add("learned victim", victim_ns("learned"), "ns");
  BenchDecisions(figures);
  for (const std::string_view policy : {"lru", "gdsf", "learned"}) BenchSwitch(policy, figures);
}

}  // namespace kvpool::bench
