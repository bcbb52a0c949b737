// Properties that hold for every policy, over random cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/policies/registry.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

constexpr uint64_t kMostWeights = 4096;
constexpr uint32_t kAllLayers = 3, kAllHeads = 2, kGroup = 2, kQueries = 5, kHeadDim = 8, kHidden = 6;

std::vector<uint32_t> RankOf(const std::vector<float>& scores) {
  std::vector<uint32_t> order(scores.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return OrderOf(scores[a], a) < OrderOf(scores[b], b); });
  return order;
}

// Every signal that a policy can need, from a seed.
struct AllSignals {
  AllSignals(uint32_t tokens, uint64_t seed) {
    Random random(seed);
    const auto fill = [&](size_t n, auto make) {
      buffers.emplace_back(n);
      for (float& x : buffers.back()) x = static_cast<float>(make());
      return buffers.back().data();
    };
    const uint64_t size = uint64_t{kAllLayers} * kAllHeads * tokens;
    const auto signal = [&](auto make) {
      return SignalArray{fill(size, make), uint64_t{kAllHeads} * tokens, tokens};
    };
    const auto positive = [&] { return random.Uniform() + 0.01; };
    const auto step = [&] { return random.Below(50); };
    buffers.reserve(2 * std::size(kSignals));
    for (const SignalFacts& facts : kSignals) {
      if (facts.shape == SignalShape::kToken && facts.need() != kNeedCounts)
        s.*facts.array = signal(positive);
    }
    s.mass_square = signal([&] { return 1 + random.Uniform(); });
    s.last_attended = signal(step);
    s.interval = signal(step);
    s.hits = signal(step);
    s.now = 60;
    s.window = {.data = fill(size_t{kAllLayers} * kQueries * kAllHeads * kGroup * kHeadDim,
                             [&] { return random.Normal(); }),
                .queries = kQueries,
                .q_heads = kAllHeads * kGroup,
                .layer_stride_bytes = kQueries * kAllHeads * kGroup * kHeadDim * 4,
                .query_stride_bytes = kAllHeads * kGroup * kHeadDim * 4,
                .head_stride_bytes = kHeadDim * 4};
    s.hidden = {.values = fill(size_t{kAllLayers} * tokens * kHidden, [&] { return random.Normal(); }),
                .layer_stride = uint64_t{tokens} * kHidden};
    s.hidden_dim = kHidden;
    s.weights = {.values = fill(kMostWeights, [&] { return random.Normal(); })};
  }
  // The signals, with as many weights as the policy and its host take.
  Signals For(const std::string& policy, const KvShape& shape) {
    const auto bound = BindPolicy(policy, {});
    EXPECT_TRUE(bound.ok()) << policy << bound.status();
    const PolicyFacts& facts = bound->facts();
    s.weight_count =
        facts.weight_count == nullptr ? 0 : facts.weight_count(bound->params, shape, kHidden, 60);
    EXPECT_LE(s.weight_count, kMostWeights) << policy;
    return s;
  }
  Signals s;
  std::vector<std::vector<float>> buffers;
};

SequenceOptions Small(uint64_t seed, uint32_t tokens) {
  return {.layers = kAllLayers,
          .tokens = tokens,
          .heads = kAllHeads,
          .k_dim = kHeadDim,
          .v_dim = kHeadDim,
          .tokens_per_block = 4,
          .seed = seed};
}

Sequence::Maker Normals(uint64_t seed, double k_scale = 1, double v_scale = 1, bool swap_heads = false) {
  return [=](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
    if (swap_heads) h = kAllHeads - 1 - h;
    Random random(seed * 1000003 + ((((uint64_t{value} * 64 + l) * 4096 + t) * 64 + h) * 64 + d));
    return random.Normal() * (value ? v_scale : k_scale);
  };
}

std::vector<float> TokensOf(const Sequence& sequence, const Signals& signals, const char* policy,
                            const TestSettings& settings = {}) {
  const auto scores = ScoreSequence(sequence.kv(), signals, policy, settings,
                                    {.budget_tokens = sequence.kv().shape.tokens / 2});
  EXPECT_TRUE(scores.ok()) << policy << scores.status();
  return scores.ok() ? scores->tokens : std::vector<float>();
}

TEST(InvariantsTest, ScaleOfKeysAndValuesChangesNoOrder) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const uint32_t tokens = 9 + static_cast<uint32_t>(seed);
    const Sequence plain(Small(seed, tokens), Normals(seed)),
        scaled(Small(seed, tokens), Normals(seed, 4, 0.25));
    for (const char* policy : {"paged_eviction", "inverse_key_l2", "keydiff"}) {
      EXPECT_EQ(RankOf(TokensOf(plain, {}, policy)), RankOf(TokensOf(scaled, {}, policy)))
          << policy << " seed " << seed;
    }
    const auto a = TokensOf(plain, {}, "paged_eviction"), b = TokensOf(scaled, {}, "paged_eviction");
    for (uint32_t t = 0; t < tokens; ++t) EXPECT_FLOAT_EQ(a[t], b[t] * 16);
  }
}

TEST(InvariantsTest, OrderOfHeadsDoesNotMatter) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const Sequence plain(Small(seed, 23), Normals(seed)), swapped(Small(seed, 23), Normals(seed, 1, 1, true));
    for (const char* policy : {"paged_eviction", "inverse_key_l2", "keydiff"}) {
      const auto a = TokensOf(plain, {}, policy), b = TokensOf(swapped, {}, policy);
      for (uint32_t t = 0; t < 23; ++t) EXPECT_NEAR(a[t], b[t], 1e-6) << policy;
    }
  }
}

TEST(InvariantsTest, OneWeightOfHybridIsThatPolicy) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Sequence sequence(Small(seed, 19), Normals(seed));
    const AllSignals all(19, seed);
    ScoreRequest heads = {.scope = Scope::kHead};
    for (const char* normalise : {"minmax", "l2"}) {
      for (const auto& [weight, term, policy] :
           {std::tuple("attention", "keydiff", "attention_mean"), std::tuple("recency", "keydiff", "recency"),
            std::tuple("score", "keydiff", "keydiff"),
            std::tuple("score", "paged_eviction", "paged_eviction")}) {
        TestSettings settings = {
            {"attention", "0"}, {"recency", "0"}, {"score", "0"}, {"term", term}, {"normalise", normalise}};
        settings.emplace_back(weight, "1");
        const auto hybrid = ScoreSequence(sequence.kv(), all.s, "hybrid", settings, heads);
        const auto pure = ScoreSequence(sequence.kv(), all.s, policy, {}, heads);
        ASSERT_TRUE(hybrid.ok() && pure.ok());
        for (size_t plane = 0; plane < kAllLayers * kAllHeads; ++plane) {
          const auto part = [&](const std::vector<float>& x) {
            return RankOf({x.begin() + plane * 19, x.begin() + (plane + 1) * 19});
          };
          EXPECT_EQ(part(hybrid->tokens), part(pure->tokens)) << policy << " " << normalise;
        }
      }
    }
  }
}

TEST(InvariantsTest, UniformAttentionHasNoVarianceAndTiesLeaveOldestFirst) {
  // Keys all alike: every query attends all it sees alike.
  const Sequence same(Small(1, 17),
                      [](bool value, uint32_t, uint32_t, uint32_t, uint32_t d) { return value ? 1.0 : d; });
  const AllSignals all(17, 1);
  const auto scores = ScoreSequence(same.kv(), all.s, "cake", {{"pool", "none"}});
  ASSERT_TRUE(scores.ok());
  for (uint32_t t = 0; t + kQueries < 17; ++t) EXPECT_FLOAT_EQ(scores->tokens[t], scores->tokens[0]);
  EXPECT_EQ(RankOf(TokensOf(same, {}, "inverse_key_l2"))[0], 0u);
  Signals constant = all.s;
  const std::vector<float> ones(kAllLayers * kAllHeads * 17, 1);
  constant.mass.values = ones.data();
  const auto h2o = RankOf(TokensOf(same, constant, "h2o"));
  for (uint32_t t = 0; t < 17; ++t) EXPECT_EQ(h2o[t], t) << "constant attention evicts the oldest";
}

TEST(InvariantsTest, PlantedTokensStay) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const uint32_t planted = static_cast<uint32_t>(seed) % 21;
    const Sequence odd(Small(seed, 21), [&](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
      if (value) return 1.0;
      return t == planted ? (d == 0 ? -3.0 : 0.1) : 1 + 0.01 * Normals(seed)(false, l, t, h, d);
    });
    EXPECT_EQ(RankOf(TokensOf(odd, {}, "keydiff")).back(), planted)
        << "one distinct key among near-duplicates";
    const Sequence valued(Small(seed, 21), [&](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
      return (value && t == planted ? 50 : 1) + 0.1 * Normals(seed)(value, l, t, h, d);
    });
    EXPECT_EQ(RankOf(TokensOf(valued, {}, "paged_eviction")).back(), planted);
  }
}

TEST(InvariantsTest, GraphkvKeepsOneOfTwoDuplicates) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Sequence twins(Small(seed, 15), [&](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
      return Normals(seed)(value, l, t == 9 ? 4 : t, h, d);
    });
    AllSignals all(15, seed);
    std::vector<float> importance(kAllLayers * kAllHeads * 15, 0.1f);
    for (size_t i = 0; i < importance.size(); ++i)
      importance[i] = i % 15 == 4 ? 1 : i % 15 == 9 ? 0.9f : 0.1f;
    all.s.importance.values = importance.data();
    const auto sequential = TokensOf(twins, all.s, "graphkv", {{"host", "importance"}, {"sources", "2"}});
    EXPECT_FLOAT_EQ(sequential[4], 1);
    EXPECT_NEAR(sequential[9], 0, 1e-6);
    const auto at_once =
        TokensOf(twins, all.s, "graphkv", {{"host", "importance"}, {"sources", "2"}, {"mode", "all"}});
    EXPECT_NEAR(at_once[4] + at_once[9], 0, 1e-5) << "all sources at once wipe each other out";
  }
}

TEST(InvariantsTest, BoundsAreAboveEveryKeyOfTheBlock) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Sequence sequence(Small(seed, 30), Normals(seed));
    const AllSignals all(30, seed);
    const auto bounds =
        ScoreSequence(sequence.kv(), all.s, "mpcache", {{"stage", "dynamic"}}, {.scope = Scope::kHead});
    const auto flat =
        ScoreSequence(sequence.kv(), all.s, "mpcache",
                      {{"stage", "dynamic"}, {"coarse", "3"}, {"coarse_keep", "1"}}, {.scope = Scope::kHead});
    ASSERT_TRUE(bounds.ok() && flat.ok());
    EXPECT_EQ(bounds->tokens, flat->tokens) << "two levels are one where the first keeps all";
    const float* const queries = static_cast<const float*>(all.s.window.data);
    for (uint32_t l = 0; l < kAllLayers; ++l)
      for (uint32_t h = 0; h < kAllHeads; ++h)
        for (uint32_t t = 0; t < 30; ++t) {
          double product = 0;
          for (uint32_t g = 0; g < kGroup; ++g)
            for (uint32_t d = 0; d < kHeadDim; ++d) {
              const uint32_t at =
                  ((l * kQueries + kQueries - 1) * kAllHeads * kGroup + h * kGroup + g) * kHeadDim + d;
              product += queries[at] * sequence.K(l, t, h, d) / std::sqrt(kHeadDim) / kGroup;
            }
          EXPECT_GE(bounds->tokens[(l * kAllHeads + h) * 30 + t], product - 1e-5);
        }
    const auto of_any = ScoreSequence(sequence.kv(), all.s, "quest", {}, {.scope = Scope::kHead});
    ASSERT_TRUE(of_any.ok());
    for (uint32_t l = 0; l < kAllLayers; ++l)
      for (uint32_t w = 0; w < kQueries; ++w)
        for (uint32_t h = 0; h < kAllHeads; ++h)
          for (uint32_t t = 0; t < 30; ++t) {
            double mean = 0;
            for (uint32_t g = 0; g < kGroup; ++g)
              for (uint32_t d = 0; d < kHeadDim; ++d) {
                const uint32_t at = ((l * kQueries + w) * kAllHeads * kGroup + h * kGroup + g) * kHeadDim + d;
                mean += queries[at] * sequence.K(l, t, h, d) / std::sqrt(kHeadDim) / kGroup;
              }
            EXPECT_GE(of_any->tokens[(l * kAllHeads + h) * 30 + t], mean - 1e-5);
          }
  }
}

TEST(InvariantsTest, LazyEvictionWaitsForWhatComesBack) {
  // Token 0 is active every 20 steps, last 19 steps ago; token 1 was active once, last 5 steps after it came.
  const Sequence sequence(Small(1, 2), Normals(1));
  std::vector<float> last(2), interval = {20, 1};
  Signals signals;
  signals.last_attended = {.values = last.data()};
  signals.interval = {.values = interval.data()};
  signals.now = 100;
  last = {81, 90};
  auto scores = TokensOf(sequence, signals, "lazy_eviction", {{"h2", "off"}});
  EXPECT_GT(scores[0], scores[1]) << "a gap of 19 with a period of 20; LRU would drop it";
  last = {-800, 90};
  scores = TokensOf(sequence, signals, "lazy_eviction", {{"h2", "off"}});
  EXPECT_LT(scores[0], 1e-15) << "a gap far above its interval";
}

TEST(InvariantsTest, RandomIsItsSeed) {
  const Sequence sequence(Small(1, 40), Normals(1)), other(Small(2, 40), Normals(2));
  EXPECT_EQ(TokensOf(sequence, {}, "random"), TokensOf(other, {}, "random"));
  EXPECT_NE(TokensOf(sequence, {}, "random"), TokensOf(sequence, {}, "random", {{"seed", "1"}}));
}

// For every policy that reads K or V: a token whose K or V is NaN leaves before all others, the other tokens'
// scores are numbers, and infinities do no harm.
TEST(InvariantsTest, NotANumberInOneTokenStaysThere) {
  for (const PolicyFacts* facts : Policies()) {
    const std::string name(facts->name);
    AllSignals all(18, 4);
    const auto maker = [&](double bad) {
      return [bad](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
        return t == 7 && l == 1 && h == 0 && d == 3 ? bad : Normals(4)(value, l, t, h, d);
      };
    };
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL}) {
      const Sequence sequence(Small(4, 18), maker(bad));
      const Signals signals = all.For(name, sequence.kv().shape);
      const auto scores = ScoreSequence(sequence.kv(), signals, name, {}, {.budget_tokens = 9});
      ASSERT_TRUE(scores.ok()) << name << scores.status();
      for (uint32_t t = 0; t < 18; ++t) {
        // Block bounds spread a token's NaN to its neighbours in the block.
        const bool near = t / 4 == 1;
        EXPECT_TRUE(near || !std::isnan(scores->tokens[t])) << name << " token " << t << " with " << bad;
      }
      const auto again = ScoreSequence(sequence.kv(), signals, name, {}, {.budget_tokens = 9});
      EXPECT_EQ(RankOf(scores->tokens), RankOf(again->tokens)) << name;
      EXPECT_EQ(RankOf(scores->blocks), RankOf(again->blocks)) << name;
    }
  }
  const Sequence sequence(Small(4, 18), [](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
    return t == 7 ? std::numeric_limits<double>::quiet_NaN() : Normals(4)(value, l, t, h, d);
  });
  for (const char* policy : {"paged_eviction", "inverse_key_l2", "keydiff"}) {
    EXPECT_EQ(RankOf(TokensOf(sequence, {}, policy))[0], 7u) << policy;
  }
}

TEST(InvariantsTest, ZeroKeysAndValuesAreNumbers) {
  const Sequence zeros(Small(1, 9), [](bool, uint32_t, uint32_t, uint32_t, uint32_t) { return 0.0; });
  AllSignals all(9, 1);
  for (const PolicyFacts* facts : Policies()) {
    const std::string name(facts->name);
    const auto scores =
        ScoreSequence(zeros.kv(), all.For(name, zeros.kv().shape), name, {}, {.budget_tokens = 5});
    ASSERT_TRUE(scores.ok()) << facts->name << scores.status();
    for (const float score : scores->tokens) EXPECT_FALSE(std::isnan(score)) << facts->name;
  }
}

TEST(InvariantsTest, ASequenceOfOneToken) {
  const Sequence one(Small(1, 1), Normals(1));
  AllSignals all(1, 1);
  all.s.window.queries = 1;
  for (const PolicyFacts* facts : Policies()) {
    const std::string name(facts->name);
    const auto scores =
        ScoreSequence(one.kv(), all.For(name, one.kv().shape), name, {}, {.budget_tokens = 1});
    EXPECT_TRUE(scores.ok()) << scores.status();
  }
}

TEST(InvariantsTest, WhatIsMissingIsNamed) {
  const Sequence sequence(Small(1, 9), Normals(1));
  const Signals none;
  for (const PolicyFacts* facts : Policies()) {
    const std::string name(facts->name);
    const auto bound = BindPolicy(name, {});
    ASSERT_TRUE(bound.ok()) << name;
    constexpr Needs kComputed = kNeedNorms | kNeedUnitAnchor | kNeedMeanAnchor | kNeedKeyBounds | kNeedKeys |
                                kNeedValues | kNeedValueNorms | kNeedHost;
    const auto scores = ScoreSequence(sequence.kv(), none, name);
    if ((bound->needs() & ~kComputed) == 0) {
      EXPECT_TRUE(scores.ok()) << name << scores.status();
      continue;
    }
    EXPECT_EQ(scores.status().code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_NE(scores.status().message().find(DescribeNeeds(bound->needs() & ~kComputed)), std::string::npos)
        << scores.status();
  }
}

}  // namespace
}  // namespace kvpool::scorers
