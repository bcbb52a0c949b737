// The error of pruning: attention over the tokens left after a choice and its compaction equals reference
// attention without the others, and the error that CAOTE predicts is the error that is made.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cuda/scorers/gather.h"
#include "cuda/scorers/select.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

constexpr uint32_t kDim = 8, kHeads = 2, kLayers = 2, kTokens = 30, kPerBlock = 4;

std::vector<double> Attend(const Sequence& s, uint32_t layer, uint32_t head, const std::vector<double>& query,
                           const std::vector<uint32_t>& tokens) {
  std::vector<double> logits, out(kDim);
  for (const uint32_t t : tokens) {
    double logit = 0;
    for (uint32_t d = 0; d < kDim; ++d) logit += query[d] * s.K(layer, t, head, d) / std::sqrt(double{kDim});
    logits.push_back(logit);
  }
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double& logit : logits) sum += logit = std::exp(logit - most);
  for (size_t i = 0; i < tokens.size(); ++i)
    for (uint32_t d = 0; d < kDim; ++d) out[d] += logits[i] / sum * s.V(layer, tokens[i], head, d);
  return out;
}

std::vector<uint32_t> Upto(uint32_t n) {
  std::vector<uint32_t> all(n);
  for (uint32_t i = 0; i < n; ++i) all[i] = i;
  return all;
}

double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  double square = 0;
  for (size_t d = 0; d < a.size(); ++d) square += (a[d] - b[d]) * (a[d] - b[d]);
  return std::sqrt(square);
}

SequenceOptions Options(uint64_t seed) {
  return {.layers = kLayers,
          .tokens = kTokens,
          .heads = kHeads,
          .k_dim = kDim,
          .v_dim = kDim,
          .tokens_per_block = kPerBlock,
          .seed = seed};
}

// Random keys, or keys in clusters with sinks at the start.
Sequence::Maker Structured(uint64_t seed) {
  return [seed](bool value, uint32_t l, uint32_t t, uint32_t h, uint32_t d) {
    Random cluster(seed + t / 5 * 7919 + d * 104729 + h * 31 + l),
        noise(seed * 77 + ((t * 64 + d) * 8 + h) * 8 + l + value);
    return (t < 2 ? 0.2 : 1.0) * cluster.Normal() + 0.1 * noise.Normal();
  };
}

class AttentionTest : public testing::TestWithParam<bool> {
 protected:
  Sequence::Maker Maker(uint64_t seed) { return GetParam() ? Structured(seed) : Sequence::Maker(); }
};

TEST_P(AttentionTest, CompactAndPruneEqualLeavingOutTheSameTokens) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const Sequence before(Options(seed), Maker(seed));
    for (const char* policy : {"paged_eviction", "keydiff", "inverse_key_l2", "streaming_llm", "random"}) {
      const auto bound = BindPolicy(policy, {});
      const auto scores = ScoreSequence(before.kv(), {}, policy);
      ASSERT_TRUE(bound.ok() && scores.ok());
      const KvShape& shape = before.kv().shape;
      for (const bool by_block : {false, true}) {
        const uint32_t items = by_block ? shape.blocks() : shape.tokens;
        const uint32_t count = by_block ? BlocksOverBudget(shape, 17) : TokensOverBudget(*bound, shape, 17);
        std::vector<uint8_t> marks(items);
        const Protection protection = ProtectionOf(*bound, shape, 0, 17);
        by_block ? MarkProtectedBlocks(protection, {}, shape, absl::MakeSpan(marks))
                 : MarkProtectedTokens(protection, {}, shape, absl::MakeSpan(marks));
        std::vector<uint64_t> keys(items);
        std::vector<uint32_t> victims(count);
        ASSERT_TRUE(SelectVictims(by_block ? scores->blocks : scores->tokens, marks, count,
                                  absl::MakeSpan(keys), absl::MakeSpan(victims))
                        .ok());
        std::vector<uint32_t> kept;
        for (const uint32_t t : Upto(kTokens)) {
          if (!std::binary_search(victims.begin(), victims.end(), by_block ? t / kPerBlock : t))
            kept.push_back(t);
        }
        SequenceOptions after_options = Options(seed);
        after_options.tokens = static_cast<uint32_t>(kept.size());
        const Sequence after(after_options, [](bool, uint32_t, uint32_t, uint32_t, uint32_t) { return 0.0; });
        HostWorkers workers(1);
        Gather({.from = before.kv(),
                .to_blocks = after.kv().blocks,
                .kept = kept.data(),
                .kept_tokens = static_cast<uint32_t>(kept.size())},
               &workers);
        Random random(seed);
        std::vector<double> query(kDim);
        for (double& x : query) x = random.Normal();
        for (uint32_t l = 0; l < kLayers; ++l)
          for (uint32_t h = 0; h < kHeads; ++h) {
            const auto whole = Attend(before, l, h, query, Upto(kTokens));
            const auto dropped = Attend(before, l, h, query, kept);
            const auto pruned = Attend(after, l, h, query, Upto(static_cast<uint32_t>(kept.size())));
            EXPECT_EQ(pruned, dropped) << policy;
            EXPECT_EQ(Distance(whole, pruned), Distance(whole, dropped)) << policy;
            EXPECT_GT(Distance(whole, pruned), 0) << policy;
          }
      }
    }
  }
}

TEST_P(AttentionTest, CaoteForetellsTheErrorOfEveryTokenAndBlock) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const Sequence s(Options(seed), Maker(seed));
    Random random(seed);
    std::vector<double> query(kDim);
    for (double& x : query) x = random.Normal();
    // The query's own attention as mass.
    std::vector<float> mass(kLayers * kHeads * kTokens);
    for (uint32_t plane = 0; plane < kLayers * kHeads; ++plane) {
      double sum = 0;
      std::vector<double> weights(kTokens);
      for (uint32_t t = 0; t < kTokens; ++t) {
        double logit = 0;
        for (uint32_t d = 0; d < kDim; ++d) logit += query[d] * s.K(plane / kHeads, t, plane % kHeads, d);
        sum += weights[t] = std::exp(logit / std::sqrt(double{kDim}));
      }
      for (uint32_t t = 0; t < kTokens; ++t) mass[plane * kTokens + t] = static_cast<float>(weights[t] / sum);
    }
    Signals signals;
    signals.mass = {mass.data(), uint64_t{kHeads} * kTokens, kTokens};
    const auto scores = ScoreSequence(s.kv(), signals, "caote", {}, {.scope = Scope::kHead});
    ASSERT_TRUE(scores.ok()) << scores.status();
    const uint32_t blocks = s.kv().shape.blocks();
    for (uint32_t plane = 0; plane < kLayers * kHeads; ++plane) {
      const auto error_without = [&](const std::function<bool(uint32_t)>& leaves) {
        std::vector<uint32_t> rest;
        for (const uint32_t t : Upto(kTokens))
          if (!leaves(t)) rest.push_back(t);
        return Distance(Attend(s, plane / kHeads, plane % kHeads, query, Upto(kTokens)),
                        Attend(s, plane / kHeads, plane % kHeads, query, rest));
      };
      for (uint32_t t = 0; t < kTokens; ++t) {
        const double made = error_without([t](uint32_t other) { return other == t; });
        EXPECT_NEAR(scores->tokens[plane * kTokens + t], made, 1e-5 * std::max(made, 0.01));
      }
      for (uint32_t b = 0; b < blocks; ++b) {
        const double made = error_without([b](uint32_t other) { return other / kPerBlock == b; });
        EXPECT_NEAR(scores->blocks[plane * blocks + b], made, 1e-5 * std::max(made, 0.05));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RandomAndStructured, AttentionTest, testing::Bool());

}  // namespace
}  // namespace kvpool::scorers
