// Each policy on a few accesses that can be followed by hand, and against its naive twin on recorded and
// random requests.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/replacement/policy.h"
#include "server/sim/replay.h"
#include "tests/replacement/conversations.h"
#include "tests/replacement/naive.h"

namespace kvpool {
namespace {

// A cache of letters without chains: room for `capacity`, in which every access ends at once.
class Letters {
 public:
  Letters(std::string_view policy, uint32_t capacity) : capacity_(capacity) {
    PolicyOptions options{.max_blocks = capacity + 1};
    policy_ = *MakeReplacementPolicy(policy, options);
    for (uint32_t b = capacity; b > 0; --b) free_.push_back(b);
  }
  // Answers the letters that left, in order.
  std::string Access(std::string_view letters) {
    std::string left;
    for (const char letter : letters) left += One(letter);
    return left;
  }

 private:
  std::string One(char letter) {
    std::string left;
    ++now_;
    auto it = blocks_.find(letter);
    if (it != blocks_.end()) {
      policy_->OnWithdraw(it->second);
      policy_->OnHit(it->second, now_);
    } else {
      if (blocks_.size() == capacity_) left = Evict();
      const BlockId block{free_.back()};
      free_.pop_back();
      it = blocks_.emplace(letter, block).first;
      policy_->OnInsert(block, {.hash = static_cast<uint64_t>(letter) * 0x9e3779b97f4a7c15u, .now_ms = now_});
    }
    policy_->OnUsed(it->second, now_);
    policy_->OnOffer(it->second);
    return left;
  }
  std::string Evict() {
    const BlockId victim = policy_->Victim(now_);
    policy_->OnWithdraw(victim);
    policy_->OnEvict(victim);
    free_.push_back(Index(victim));
    const auto it =
        std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& b) { return b.second == victim; });
    const std::string letter(1, it->first);
    blocks_.erase(it);
    return letter;
  }

  const size_t capacity_;
  std::unique_ptr<ReplacementPolicy> policy_;
  std::map<char, BlockId> blocks_;
  std::vector<uint32_t> free_;
  uint64_t now_ = 0;
};

TEST(ByHand, Lru) { EXPECT_EQ(Letters("lru", 3).Access("abcadbe"), "bca"); }
TEST(ByHand, Fifo) { EXPECT_EQ(Letters("fifo", 3).Access("abcadae"), "abc"); }
// d: b and c were asked for once, b longest ago. b comes back with a past: c is the last of one access.
TEST(ByHand, LruK) { EXPECT_EQ(Letters("lru_k", 3).Access("abcadbe"), "bcd"); }
// a is worth 3, then b leaves at 1; d and c compete at 2 and 1: c; then e comes at 2: d of the
// same worth leaves.
TEST(ByHand, Lfu) { EXPECT_EQ(Letters("lfu", 3).Access("abcaadefg"), "bcde"); }
TEST(ByHand, LfuAges) {
  // a was popular: five accesses. Each victim adds one to what newcomers are worth, and in the end a leaves.
  EXPECT_EQ(Letters("lfu", 2).Access("aaaaabcdefgh"), "bcdeaf");
}
// a and b are protected, c leaves, then d.
TEST(ByHand, Slru) { EXPECT_EQ(Letters("slru", 5).Access("abcabdefgh"), "cde"); }
// a is in T2. T1 gives b; b comes back from the ghosts: T1's target grows to one, and it is in T2.
TEST(ByHand, Arc) { EXPECT_EQ(Letters("arc", 3).Access("abcadbe"), "bca"); }
// Ten letters; a was asked for twice again: it goes to main, the others leave in order.
TEST(ByHand, S3Fifo) { EXPECT_EQ(Letters("s3_fifo", 5).Access("abcdeaafgh"), "bcd"); }
// The ghost brings a back into main, where it stays.
TEST(ByHand, S3FifoGhost) { EXPECT_EQ(Letters("s3_fifo", 3).Access("abcdaefgh"), "abcdef"); }
// The hand spares a, takes b, spares c and takes d, the newest, so that it begins anew with a.
TEST(ByHand, Sieve) { EXPECT_EQ(Letters("sieve", 3).Access("abcacdefg"), "bdac"); }
// a and b are in main; the window's newcomers, once each, displace neither.
TEST(ByHand, WTinyLfu) { EXPECT_EQ(Letters("w_tinylfu", 3).Access("aaabcdefa"), "cde"); }

// a has 100 after its second access. Four insertions later half is left, as much as e has, which
// was used later.
TEST(ByHand, Retention) { EXPECT_EQ(Letters("retention", 3).Access("aabcdefghi"), "bcdaef"); }

// Contents that were found once never were again, and newcomers may yet be found; nothing is known of how
// long blocks stay.
TEST(ByHand, WorkloadAwaresFirst) { EXPECT_EQ(Letters("workload_aware", 5).Access("aabbccdef"), "a"); }

TEST(Random, IsFairAndOfItsSeed) {
  PolicyOptions options{.max_blocks = 9, .seed = 3};
  const auto one = *MakeReplacementPolicy("random", options);
  const auto same = *MakeReplacementPolicy("random", options);
  for (uint32_t b = 1; b <= 8; ++b) {
    one->OnOffer(BlockId{b});
    same->OnOffer(BlockId{b});
  }
  std::map<uint32_t, int> chosen;
  for (int i = 0; i < 8000; ++i) {
    const BlockId victim = one->Victim(0);
    ASSERT_EQ(victim, same->Victim(0));
    ++chosen[Index(victim)];
  }
  EXPECT_EQ(chosen.size(), 8u);
  // Standard deviation 30: eight of them.
  for (const auto& [block, times] : chosen) EXPECT_NEAR(times, 1000, 240) << "block " << block;
}

// Requests that share prefixes: paths down a tree of 2^14 leaves, some of which are asked for
// more than others.
sim::Workload RandomWorkload(uint64_t seed, uint32_t requests) {
  std::mt19937_64 random(seed);
  sim::Workload w{.name = "random", .tokens_per_block = 16};
  for (uint32_t i = 0; i < requests; ++i) {
    const auto depth = static_cast<uint32_t>(1 + random() % 15);
    w.requests.push_back({.now_ms = i, .first = w.contents.size(), .blocks = depth, .tokens = depth * 16});
    uint32_t node = 1;
    for (uint32_t d = 0; d < depth; ++d) {
      w.contents.push_back(node - 1);
      node = node * 2 + (random() % 4 == 0 ? 1 : 0);
    }
  }
  w.distinct = 1 << 15;
  return w;
}

// Gives a hint about each use before it ends, and a score of some blocks.
class Advised final : public ReplacementPolicy {
 public:
  Advised(std::unique_ptr<ReplacementPolicy> policy, uint64_t seed)
      : policy_(std::move(policy)), random_(seed) {}

  std::string_view name() const override { return policy_->name(); }
  void OnInsert(BlockId block, const Content& content) override { policy_->OnInsert(block, content); }
  void OnHit(BlockId block, uint64_t now_ms) override { policy_->OnHit(block, now_ms); }
  void OnUsed(BlockId block, uint64_t now_ms) override {
    if (random_() % 2 == 0) {
      policy_->OnHint(block, {.reuse = static_cast<Reuse>(random_() % 4),
                              .category = static_cast<uint8_t>(random_() % (kMaxCategory + 1))});
    }
    if (random_() % 2 == 0) policy_->OnScore(block, static_cast<float>(random_() % 17) / 16);
    policy_->OnUsed(block, now_ms);
  }
  void OnOffer(BlockId block) override { policy_->OnOffer(block); }
  void OnWithdraw(BlockId block) override { policy_->OnWithdraw(block); }
  void OnEvict(BlockId block) override { policy_->OnEvict(block); }
  BlockId Victim(uint64_t now_ms) override { return policy_->Victim(now_ms); }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_->Prefetch(block, hash); }
  uint32_t offered() const override { return policy_->offered(); }
  double bytes_per_block() const override { return policy_->bytes_per_block(); }

 private:
  const std::unique_ptr<ReplacementPolicy> policy_;
  std::mt19937_64 random_;
};

class Twins : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<ReplacementPolicy> PolicyWithTwin(uint32_t capacity) {
    const PolicyOptions options{.max_blocks = capacity + 1};
    return WithTwin(*MakeReplacementPolicy(GetParam(), options), MakeNaive(GetParam(), options));
  }
  // Aborts where they differ.
  sim::Result Play(const sim::Workload& workload, uint32_t capacity) {
    return sim::ReplayWith(workload, {.policy = GetParam(), .capacity_blocks = capacity},
                           PolicyWithTwin(capacity));
  }
};

TEST_P(Twins, AgreeOnRandomRequests) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    for (const uint32_t capacity : {16u, 40u, 150u}) {
      const sim::Result result = Play(RandomWorkload(seed, 1500), capacity);
      EXPECT_GT(result.evictions, 1000u);
      EXPECT_GT(result.hit_blocks, 1000u);
    }
  }
}

TEST_P(Twins, AgreeOnWhatEnginesAndScorersSay) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const uint32_t capacity = seed % 2 == 0 ? 40 : 150;
    const sim::Result result =
        sim::ReplayWith(RandomWorkload(seed, 1500), {.policy = GetParam(), .capacity_blocks = capacity},
                        std::make_unique<Advised>(PolicyWithTwin(capacity), seed));
    EXPECT_GT(result.evictions, 1000u);
  }
}

TEST_P(Twins, AgreeOnConversations) {
  const sim::Workload workload = Conversations();
  EXPECT_GT(Play(workload, std::max(400u, workload.largest_request())).evictions, 5000u);
}

std::vector<std::string> WithNaiveTwin() {
  std::vector<std::string> names;
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    if (MakeNaive(policy.name, {.max_blocks = 2}) != nullptr) names.emplace_back(policy.name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Policies, Twins, ::testing::ValuesIn(WithNaiveTwin()),
                         [](const auto& info) { return info.param; });

TEST(Registry, NamesItsPolicies) {
  for (const PolicyEntry& entry : ReplacementPolicies()) {
    const auto policy = MakeReplacementPolicy(entry.name, 16);
    ASSERT_TRUE(policy.ok()) << policy.status();
    EXPECT_EQ((*policy)->name(), entry.name);
    EXPECT_EQ((*policy)->Victim(0), kNullBlock) << "nothing is on offer";
    EXPECT_FALSE(entry.summary.empty());
  }
  const absl::Status unknown = MakeReplacementPolicy("best", 16).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "\"best\" is unknown; there are: lru, fifo")) << unknown;
}

}  // namespace
}  // namespace kvpool
