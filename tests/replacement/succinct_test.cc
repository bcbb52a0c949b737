// Policies with a bit of prediction: the reference vectors, perfect bits against Belady, wrong
// bits against LRU.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/pool/block_pool.h"
#include "server/replacement/policies/lru.h"
#include "server/replacement/policies/succinct_discard.h"
#include "server/replacement/policies/succinct_phase.h"
#include "server/sim/workload.h"
#include "tests/replacement/conversations.h"

namespace kvpool {
namespace {

using Bits = std::vector<bool>;
using Pages = std::vector<uint32_t>;
using Guard = PredictedPolicy::Guard;
constexpr uint64_t kNever = UINT64_MAX;

// A cache of k pages without chains, each request of which comes with a bit: will it return?
uint64_t Faults(ReplacementPolicy* policy, const Pages& pages, uint32_t k, const Bits& returns) {
  std::map<uint32_t, BlockId> resident;
  std::vector<uint32_t> held(k + 1), free;
  for (uint32_t b = k; b > 0; --b) free.push_back(b);
  uint64_t faults = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    auto it = resident.find(pages[i]);
    if (it != resident.end()) {
      policy->OnWithdraw(it->second);
      policy->OnHit(it->second, i);
    } else {
      ++faults;
      if (free.empty()) {
        const BlockId victim = policy->Victim(i);
        policy->OnWithdraw(victim);
        policy->OnEvict(victim);
        resident.erase(held[Index(victim)]);
        free.push_back(Index(victim));
      }
      const uint32_t b = free.back();
      free.pop_back();
      held[b] = pages[i];
      it = resident.emplace(pages[i], BlockId{b}).first;
      policy->OnInsert(it->second, {.hash = (pages[i] + 1) * 0x9e3779b97f4a7c15u, .now_ms = i});
    }
    policy->OnHint(it->second, {.reuse = returns[i] ? Reuse::kExpected : Reuse::kUnlikely});
    policy->OnUsed(it->second, i);
    policy->OnOffer(it->second);
  }
  return faults;
}

template <typename Policy>
uint64_t FaultsOf(const Pages& pages, uint32_t k, const Bits& returns, Guard guard) {
  Policy policy({.max_blocks = k + 1}, guard);
  return Faults(&policy, pages, k, returns);
}

uint64_t LruFaults(const Pages& pages, uint32_t k) {
  LruPolicy lru({.max_blocks = k + 1});
  return Faults(&lru, pages, k, Bits(pages.size()));
}

// Belady's faults, and for each request whether his cache still has the page when it is asked for again.
struct Optimum {
  uint64_t faults = 0;
  Bits returns;
};
Optimum Belady(const Pages& pages, uint32_t k) {
  std::vector<uint64_t> next(pages.size(), kNever);
  std::map<uint32_t, uint64_t> seen;
  for (size_t i = pages.size(); i-- > 0;) {
    if (const auto it = seen.find(pages[i]); it != seen.end()) next[i] = it->second;
    seen[pages[i]] = i;
  }
  Optimum optimum{.returns = Bits(pages.size())};
  // Ordered by next request.
  std::set<std::pair<uint64_t, uint32_t>> resident;
  std::map<uint32_t, uint64_t> last;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (resident.erase({i, pages[i]}) == 1) {
      optimum.returns[last[pages[i]]] = true;
    } else {
      ++optimum.faults;
      if (resident.size() == k) resident.erase(std::prev(resident.end()));
    }
    resident.emplace(next[i], pages[i]);
    last[pages[i]] = i;
  }
  return optimum;
}

// Whether the next phase asks for the page: phases are the longest stretches of k distinct pages.
Bits NextPhaseBits(const Pages& pages, uint32_t k) {
  std::vector<std::set<uint32_t>> phases(1);
  std::vector<size_t> phase_of;
  for (const uint32_t page : pages) {
    if (phases.back().size() == k && !phases.back().contains(page)) phases.emplace_back();
    phases.back().insert(page);
    phase_of.push_back(phases.size() - 1);
  }
  Bits bits;
  for (size_t i = 0; i < pages.size(); ++i) {
    const size_t next = phase_of[i] + 1;
    bits.push_back(next < phases.size() && phases[next].contains(pages[i]));
  }
  return bits;
}

Bits Flipped(Bits bits) {
  bits.flip();
  return bits;
}

// Pages of which some are asked for more than others, in places with loops that LRU can't hold.
Pages RandomPages(uint64_t seed, uint32_t k, size_t count) {
  std::mt19937_64 random(seed);
  Pages pages;
  while (pages.size() < count) {
    if (random() % 400 == 0) {
      for (uint32_t i = 0; i < 3 * (k + 1); ++i) pages.push_back(1'000'000 + i % (k + 1));
    }
    const auto range = static_cast<uint32_t>(1 + random() % (4 * k));
    pages.push_back(static_cast<uint32_t>(random() % range));
  }
  return pages;
}

class Vectors : public ::testing::Test {
 protected:
  Vectors() {
    std::ifstream file(KVPOOL_SOURCE_DIR "/tests/replacement/succinct.json");
    golden = nlohmann::json::parse(file);
    pages = golden["seq"].get<Pages>();
    k = golden["k"];
    for (const int discard : golden["perfect_bits"]) returns.push_back(discard == 0);
  }
  // Numbers that a reader of the vectors can draw again.
  double Draw() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) / 9007199254740992.0;
  }
  uint64_t FaultsWithFlips(double rate) {
    Bits bits = returns;
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = bits[i] != (Draw() < rate);
    return FaultsOf<SuccinctDiscardPolicy>(pages, k, bits, Guard::kNone);
  }
  void Seed(uint64_t seed) { state_ = seed; }

  nlohmann::json golden;
  Pages pages;
  uint32_t k = 0;
  Bits returns;

 private:
  uint64_t state_ = 0;
};

TEST_F(Vectors, LruBeladyAndTheBitsAreTheReferences) {
  EXPECT_EQ(LruFaults(pages, k), golden["lru_faults"]);
  const Optimum optimum = Belady(pages, k);
  EXPECT_EQ(optimum.faults, golden["opt_faults"]);
  EXPECT_EQ(optimum.returns, returns);
}

TEST_F(Vectors, PerfectAndFlippedBits) {
  const nlohmann::json& faults = golden["faults_vs_bit_flip_rate"];
  EXPECT_EQ(FaultsOf<SuccinctDiscardPolicy>(pages, k, returns, Guard::kNone), faults["0"]);
  EXPECT_EQ(FaultsOf<SuccinctDiscardPolicy>(pages, k, Flipped(returns), Guard::kNone), faults["1.0"]);
}

// Which bits the reference flipped is not recorded: this seed flips as many faults into both its figures, and
// they are what a draw gives.
TEST_F(Vectors, SomeFlippedBits) {
  const nlohmann::json& faults = golden["faults_vs_bit_flip_rate"];
  Seed(13);
  EXPECT_EQ(FaultsWithFlips(0.05), faults["0.05"]);
  EXPECT_EQ(FaultsWithFlips(0.2), faults["0.2"]);
  for (const auto& [rate, name] : {std::pair(0.05, "0.05"), std::pair(0.2, "0.2")}) {
    std::vector<uint64_t> drawn;
    for (uint64_t seed = 1; seed <= 200; ++seed) {
      Seed(seed);
      drawn.push_back(FaultsWithFlips(rate));
    }
    const auto [least, most] = std::minmax_element(drawn.begin(), drawn.end());
    EXPECT_LE(*least, faults[name]);
    EXPECT_GE(*most, faults[name]);
  }
}

TEST_F(Vectors, WithTheGuardPerfectBitsStayPerfectAndWrongOnesAreHarmless) {
  EXPECT_EQ(FaultsOf<SuccinctDiscardPolicy>(pages, k, returns, Guard::kLru), golden["opt_faults"]);
  const uint64_t wrong = FaultsOf<SuccinctDiscardPolicy>(pages, k, Flipped(returns), Guard::kLru);
  EXPECT_LT(wrong, golden["faults_vs_bit_flip_rate"]["1.0"]);
  EXPECT_LE(wrong, uint64_t{golden["lru_faults"]} * 17 / 16 + k + 1);
}

TEST(Succinct, PerfectDiscardBitsAreAsGoodAsBelady) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const auto k = static_cast<uint32_t>(1 + seed % 24);
    const Pages pages = RandomPages(seed, k, 3000);
    const Optimum optimum = Belady(pages, k);
    EXPECT_EQ(FaultsOf<SuccinctDiscardPolicy>(pages, k, optimum.returns, Guard::kNone), optimum.faults);
    EXPECT_EQ(FaultsOf<SuccinctDiscardPolicy>(pages, k, optimum.returns, Guard::kLru), optimum.faults)
        << "the guard gets in the way, seed " << seed;
  }
}

TEST(Succinct, PerfectPhaseBitsAreWithinTwiceBelady) {
  uint64_t phase = 0, lru = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const auto k = static_cast<uint32_t>(2 + seed % 24);
    const Pages pages = RandomPages(seed, k, 3000);
    const uint64_t faults = FaultsOf<SuccinctPhasePolicy>(pages, k, NextPhaseBits(pages, k), Guard::kNone);
    EXPECT_LE(faults, 2 * Belady(pages, k).faults + k) << "seed " << seed;
    phase += faults;
    lru += LruFaults(pages, k);
  }
  EXPECT_LT(phase * 10, lru * 9) << "no better than LRU by a tenth";
}

template <typename Policy>
void ExpectHarmless(const Pages& pages, uint32_t k, const Bits& wrong) {
  const auto lru = static_cast<double>(LruFaults(pages, k));
  const auto faults = static_cast<double>(FaultsOf<Policy>(pages, k, wrong, Guard::kLru));
  EXPECT_LE(faults, lru * 17 / 16 + k + 1);
  EXPECT_LE(faults, 2.1 * lru);
}

TEST(Succinct, WrongBitsAreHarmless) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const auto k = static_cast<uint32_t>(2 + seed % 24);
    const Pages pages = RandomPages(seed, k, 3000);
    ExpectHarmless<SuccinctDiscardPolicy>(pages, k, Flipped(Belady(pages, k).returns));
    ExpectHarmless<SuccinctPhasePolicy>(pages, k, Flipped(NextPhaseBits(pages, k)));
    std::mt19937_64 random(seed);
    Bits noise(pages.size());
    for (size_t i = 0; i < noise.size(); ++i) noise[i] = random() % 2 == 0;
    ExpectHarmless<SuccinctDiscardPolicy>(pages, k, noise);
    ExpectHarmless<SuccinctPhasePolicy>(pages, k, noise);
  }
}

// All that LRU has is found again and again; the bits say to discard it, and to keep the pages of a scan.
TEST(Succinct, WrongBitsAreHarmlessWhereTheyHurtMost) {
  constexpr uint32_t kPages = 64;
  Pages pages;
  Bits wrong;
  for (uint32_t i = 0; i < 20000; ++i) {
    const bool scan = i % 50 == 0;
    pages.push_back(scan ? 1000 + i : i % (kPages - 4));
    wrong.push_back(scan);
  }
  EXPECT_GT(FaultsOf<SuccinctDiscardPolicy>(pages, kPages, wrong, Guard::kNone), 5 * LruFaults(pages, kPages))
      << "and without the guard they do hurt";
  ExpectHarmless<SuccinctDiscardPolicy>(pages, kPages, wrong);
  ExpectHarmless<SuccinctPhasePolicy>(pages, kPages, wrong);
}

// The trace through the pool, block by block with a hint that is always wrong; answers how many were missing.
uint64_t MissingOnTrace(const sim::Workload& workload, uint32_t capacity,
                        std::unique_ptr<ReplacementPolicy> policy) {
  BlockPool pool({.max_blocks = capacity + 1, .windows = {0}}, std::move(policy));
  EXPECT_TRUE(pool.Grow(capacity).ok());
  const Holder session = *pool.AddSession({});
  std::vector<uint32_t> uses_left(workload.distinct);
  for (const uint32_t content : workload.contents) ++uses_left[content];
  uint64_t missing = 0;
  MatchOutcome match;
  for (const sim::Request& request : workload.requests) {
    std::vector<BlockKey> keys;
    for (const uint32_t content : workload.chain(request)) {
      keys.push_back(
          BlockKey::From(std::string(28, 'x') + std::string(reinterpret_cast<const char*>(&content), 4), 0));
    }
    const GroupQuery query = {.group = 0, .keys = keys};
    pool.Match(session, request.now_ms, {&query, 1}, &match);
    std::vector<BlockRef>& held = match.blocks[0];
    const size_t hits = held.size();
    const auto lacking = static_cast<uint32_t>(keys.size() - hits);
    missing += lacking;
    EXPECT_EQ(pool.Lease(session, request.now_ms, lacking, lacking, &held).leased, lacking);
    std::vector<SealEntry> entries;
    for (size_t i = hits; i < keys.size(); ++i) entries.push_back({held[i], {&keys[i], 1}});
    std::vector<SealVerdict> outcomes(entries.size());
    pool.Seal(session, request.now_ms, hits == 0 ? nullptr : &keys[hits - 1], entries,
              absl::MakeSpan(outcomes));
    for (size_t i = held.size(); i-- > 0;) {
      const bool returns = --uses_left[workload.chain(request)[i]] > 0;
      Verdict verdict = Verdict::kDone;
      pool.Release(session, request.now_ms, {.reuse = returns ? Reuse::kUnlikely : Reuse::kExpected},
                   {&held[i], 1}, {&verdict, 1});
    }
  }
  return missing;
}

TEST(Succinct, WrongHintsOnConversationsAreHarmless) {
  const sim::Workload workload = Conversations();
  for (const uint32_t capacity : {1000u, 10000u}) {
    const PolicyOptions options{.max_blocks = capacity + 1};
    const auto lru =
        static_cast<double>(MissingOnTrace(workload, capacity, std::make_unique<LruPolicy>(options)));
    const auto discard = static_cast<double>(
        MissingOnTrace(workload, capacity, std::make_unique<SuccinctDiscardPolicy>(options)));
    const auto phase = static_cast<double>(
        MissingOnTrace(workload, capacity, std::make_unique<SuccinctPhasePolicy>(options)));
    EXPECT_LE(discard, lru * 17 / 16 + capacity + 1);
    EXPECT_LE(phase, lru * 17 / 16 + capacity + 1);
    EXPECT_LE(std::max(discard, phase), 2.1 * lru);
  }
}

}  // namespace
}  // namespace kvpool
