// Sessions of several ranks, each with its share of the heads on its own device: they score, prune and compact as one rank
// with all heads does.
#include <array>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "cuda/scorers/policies/registry.h"
#include "proto/support/low_layout.h"
#include "server/space/turn.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

constexpr uint32_t kRanks = 2, kAllHeads = kRanks * kHeads;
constexpr uint32_t kBlocks = 6, kSequenceTokens = kBlocks * kTokens - 1;  // The last block is not full.

v1::OpenSession RequestWithHeads(const std::string& model, uint32_t heads) {
  v1::OpenSession request = ScoredRequest(model);
  v1::LayerGroup* group = request.mutable_layout()->mutable_groups(0);
  group->set_kv_heads(heads);
  for (v1::Plane* plane : {group->mutable_k(), group->mutable_v()}) {
    plane->set_token_stride_bytes(heads * plane->head_stride_bytes());
    plane->set_layer_stride_bytes(kTokens * plane->token_stride_bytes());
  }
  group->mutable_v()->set_offset_bytes(kLayers * group->k().layer_stride_bytes());
  return request;
}

// The same numbers, K and V and signals, for a session of one rank and for one of two.
class ScoreRanksTest : public ScoreTest {
 protected:
  ~ScoreRanksTest() override { daemon_.reset(); }

  void SetUp() override {
    StartScoringOn(absl::MakeSpan(holds_), /*slabs=*/2);
    v1::OpenSession request = RequestWithHeads("ranked", kHeads);
    request.set_ranks(kRanks);
    ranked_ = OpenEngine(request, "rank 0");
    rank1_ = Attach("rank 1");
    v1::AddMember join;
    join.set_session(ranked_->opened.session());
    join.set_invitation(ranked_->token);
    join.mutable_role()->set_rank(1);
    *join.mutable_layout() = request.layout();
    *join.mutable_fingerprint() = request.fingerprint();
    ASSERT_TRUE(rank1_->Join(*ranked_, join).ok());
    Settle({ranked_.get(), rank1_.get()});
    whole_ = OpenEngine(RequestWithHeads("whole", kAllHeads), "whole");
    Settle({whole_.get()});
    ranked_blocks_ = ranked_->Lease(kBlocks);
    whole_blocks_ = whole_->Lease(kBlocks);
    FillBoth();
  }

  float Uniform() { return static_cast<float>(random_() % 1000) / 1000; }

  // Head `head` of all.
  float* OfRanks(uint64_t ref, bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
    return At(holds_[head / kHeads].slab_addresses().at(0), ref, kHeads, value, layer, token, head % kHeads,
              dim);
  }
  float* OfWhole(uint64_t ref, bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
    return At(holds_[0].slab_addresses().at(1), ref, kAllHeads, value, layer, token, head, dim);
  }
  static float* At(uint64_t slab, uint64_t ref, uint32_t heads, bool value, uint32_t layer, uint32_t token,
                   uint32_t head, uint32_t dim) {
    auto* first = reinterpret_cast<float*>(slab + Index(BlockRef::Unpack(ref).id) * kScoredBlockBytes);
    const uint32_t plane = value ? kLayers : 0;
    return first + (((plane + layer) * kTokens + token) * heads + head) * kDim + dim;
  }
  using Visit = std::function<void(bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim)>;
  static void ForEachElement(const Visit& visit) {
    for (const bool value : {false, true}) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t token = 0; token < kTokens; ++token) {
          for (uint32_t head = 0; head < kAllHeads; ++head) {
            for (uint32_t dim = 0; dim < kDim; ++dim) visit(value, layer, token, head, dim);
          }
        }
      }
    }
  }
  void FillBoth() {
    for (uint32_t block = 0; block < kBlocks; ++block) {
      ForEachElement([&](bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
        const float x = Uniform() * 2 - 1;
        *OfRanks(ranked_blocks_[block], value, layer, token, head, dim) = x;
        *OfWhole(whole_blocks_[block], value, layer, token, head, dim) = x;
      });
    }
  }

  // One signal as both sessions are told it.
  struct Both {
    v1::Signals whole, ranked;
  };
  void AddSignal(v1::SignalKind kind, Both* both, uint32_t token_floats = 1) {
    const bool per_layer = random_() % 2 == 0, per_head = random_() % 2 == 0;
    const uint32_t layers = per_layer ? kLayers : 1, heads = per_head ? kAllHeads : 1;
    const uint32_t row = kSequenceTokens * token_floats;
    std::vector<float> values(size_t{layers} * heads * row);
    for (float& value : values) value = Uniform();
    std::vector<float> by_rank;  // [rank][layer][head of the rank][row]
    for (uint32_t rank = 0; per_head && rank < kRanks; ++rank) {
      for (uint32_t layer = 0; layer < layers; ++layer) {
        const auto first = values.begin() + (layer * kAllHeads + rank * kHeads) * row;
        by_rank.insert(by_rank.end(), first, first + kHeads * row);
      }
    }
    v1::Signal* signal = both->whole.add_signals();
    *signal = InlinedSignal(kind, values);
    v1::Signal* ranked = both->ranked.add_signals();
    *ranked = InlinedSignal(kind, per_head ? by_rank : values);
    for (v1::Signal* of_one : {signal, ranked}) {
      of_one->set_per_layer(per_layer);
      of_one->set_per_head(per_head);
    }
  }
  Both Everything() {
    Both both;
    for (const scorers::SignalFacts& facts : scorers::kSignals) {
      if (facts.shape == scorers::SignalShape::kToken)
        AddSignal(static_cast<v1::SignalKind>(facts.kind), &both);
    }
    constexpr uint32_t kQueries = 5, kGroup = 2;
    std::vector<float> whole, ranked;
    std::vector<float> rows(size_t{kLayers} * kQueries * kAllHeads * kGroup * kDim);
    for (float& x : rows) x = Uniform() * 4 - 2;
    const uint32_t of_rank = kHeads * kGroup * kDim;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (uint32_t row = 0; row < kLayers * kQueries; ++row) {
        const auto first = rows.begin() + (row * kRanks + rank) * of_rank;
        ranked.insert(ranked.end(), first, first + of_rank);
      }
    }
    for (v1::Signals* signals : {&both.whole, &both.ranked}) {
      const bool is_whole = signals == &both.whole;
      v1::QueryWindow* window = signals->mutable_window();
      window->set_queries(kQueries);
      window->set_q_heads((is_whole ? kAllHeads : kHeads) * kGroup);
      const std::vector<float>& data = is_whole ? rows : ranked;
      window->mutable_data()->set_inlined(data.data(), data.size() * sizeof(float));
      signals->set_now(kSequenceTokens);
    }
    return both;
  }
  // As many weights as the policy takes for all heads, which are the same to every rank, and hidden states if it reads them.
  void AddWeights(const v1::Policy& policy, Both* both) {
    constexpr uint32_t kHidden = 3;
    const std::vector<std::pair<std::string, std::string>> params(policy.params().begin(),
                                                                  policy.params().end());
    const auto bound = scorers::BindPolicy(policy.name(), params);
    const scorers::PolicyFacts& facts = bound->facts();
    const scorers::KvShape model = {
        .layers = kLayers, .kv_heads = kAllHeads, .k_head_dim = kDim, .v_head_dim = kDim};
    const bool reads_hidden = (facts.NeedsOf(bound->params) & scorers::kNeedHidden) != 0;
    std::vector<float> weights(facts.weight_count(bound->params, model, kHidden, /*given=*/1));
    for (float& x : weights) x = Uniform() * 2 - 1;
    for (v1::Signals* signals : {&both->whole, &both->ranked}) {
      if (!reads_hidden) continue;
      signals->clear_signals();  // There would be too many, those of tokens included.
      signals->set_hidden_dim(kHidden);
    }
    if (reads_hidden) AddSignal(v1::SIGNAL_KIND_HIDDEN, both, kHidden);
    for (v1::Signals* signals : {&both->whole, &both->ranked}) {
      *signals->add_signals() = InlinedSignal(v1::SIGNAL_KIND_WEIGHTS, weights);
    }
  }

  v1::OperationResult RunOk(Engine* engine, const v1::Operation& operation) {
    const v1::OperationResult result = Run(engine, operation);
    EXPECT_EQ(result.code(), 0) << result.message();
    return result;
  }
  template <typename Values>
  static void ExpectNear(const Values& whole, const Values& ranked, const std::string& what) {
    ASSERT_EQ(whole.size(), ranked.size()) << what;
    for (int i = 0; i < whole.size(); ++i) {
      if (std::isfinite(whole[i])) {
        EXPECT_NEAR(whole[i], ranked[i], 1e-5 * (1 + std::abs(whole[i]))) << what << ", " << i;
      } else {
        EXPECT_EQ(std::isnan(whole[i]), std::isnan(ranked[i])) << what << ", " << i;
      }
    }
  }
  void ExpectSameScores(v1::Score score, const Both& signals, const std::string& what) {
    v1::Operation whole = ScoreOp(whole_blocks_, kTokens - 1), ranked = ScoreOp(ranked_blocks_, kTokens - 1);
    for (v1::Operation* operation : {&whole, &ranked}) {
      operation->mutable_score()->MergeFrom(score);
      operation->mutable_score()->set_budget_tokens(3 * kTokens);
      *operation->mutable_score()->mutable_signals() = operation == &whole ? signals.whole : signals.ranked;
    }
    const v1::ScoreResult a = RunOk(whole_.get(), whole).score(), b = RunOk(ranked_.get(), ranked).score();
    EXPECT_EQ(a.rows(), b.rows()) << what;
    ExpectNear(a.token_scores(), b.token_scores(), what + ": tokens");
    ExpectNear(a.block_scores(), b.block_scores(), what + ": blocks");
  }
  void ExpectSameVictims(const v1::Policy& policy, const Both& signals, const std::string& what) {
    v1::Operation whole = PruneOp(whole_blocks_, 3 * kTokens), ranked = PruneOp(ranked_blocks_, 3 * kTokens);
    for (v1::Operation* operation : {&whole, &ranked}) {
      v1::Prune* prune = operation->mutable_prune();
      prune->mutable_sequence()->set_last_block_tokens(kTokens - 1);
      *prune->mutable_policy() = policy;
      *prune->mutable_signals() = operation == &whole ? signals.whole : signals.ranked;
      prune->mutable_protection();
      prune->set_dry_run(true);
    }
    const v1::PruneResult a = Prune(whole_.get(), whole), b = Prune(ranked_.get(), ranked);
    EXPECT_GT(a.victims_size(), 0) << what;
    EXPECT_EQ(std::vector<uint32_t>(a.victims().begin(), a.victims().end()),
              std::vector<uint32_t>(b.victims().begin(), b.victims().end()))
        << what;
    EXPECT_EQ(a.kept_digest(), b.kept_digest()) << what;
  }

  DeviceHold holds_[kRanks];
  std::minstd_rand random_{5};
  std::unique_ptr<Engine> ranked_, rank1_, whole_;
  Refs ranked_blocks_, whole_blocks_;
};

TEST_F(ScoreRanksTest, EveryPolicyScoresAndPrunesAsOneRankWithAllHeads) {
  for (const scorers::PolicyFacts* facts : scorers::Policies()) {
    const std::string name(facts->name);
    Both signals = Everything();
    v1::Score score;
    score.mutable_policy()->set_name(name);
    if (name == "attention_gate") {
      (*score.mutable_policy()->mutable_params())["source"] = "gate";
    }
    if (name == "learned_mlp") continue;  // The same network for all heads, as any of the others.
    if (facts->weight_count != nullptr) AddWeights(score.policy(), &signals);
    ExpectSameVictims(score.policy(), signals, name);
    ExpectSameScores(score, signals, name);
    for (const v1::Scope scope : {v1::SCOPE_LAYER, v1::SCOPE_HEAD}) {
      score.set_scope(scope);
      ExpectSameScores(score, signals, name + ", " + v1::Scope_Name(scope));
    }
  }
}

TEST_F(ScoreRanksTest, HeadsAreReducedBeforeLayersAreAndTokensAfterBoth) {
  const Both signals = Everything();
  for (const std::string policy : {"paged_eviction", "caote"}) {
    for (const v1::PlaneReduction over_heads : {v1::PLANE_REDUCTION_MEAN, v1::PLANE_REDUCTION_MAX}) {
      for (const v1::PlaneReduction over_layers : {v1::PLANE_REDUCTION_MEAN, v1::PLANE_REDUCTION_MAX}) {
        for (const v1::TokenReduction over_tokens : {v1::TOKEN_REDUCTION_MAX, v1::TOKEN_REDUCTION_P90}) {
          v1::Score score;
          score.mutable_policy()->set_name(policy);
          score.mutable_reductions()->set_over_heads(over_heads);
          score.mutable_reductions()->set_over_layers(over_layers);
          score.mutable_reductions()->set_over_tokens(over_tokens);
          ExpectSameScores(score, signals, score.ShortDebugString());
        }
      }
    }
  }
}

TEST_F(ScoreRanksTest, CompactGathersTheSameTokensOnEveryRank) {
  for (const int i : {0, 1, 2, 3, 4, 5, 8, 11}) {
    const v1::Scope scope = std::array{v1::SCOPE_SEQUENCE, v1::SCOPE_LAYER, v1::SCOPE_HEAD}[i % 3];
    const v1::Disposition disposition = i < 3 || i >= 8 ? v1::DISPOSITION_DROP : v1::DISPOSITION_MERGE;
    v1::Operation whole = CompactOp(whole_blocks_, 9), ranked = CompactOp(ranked_blocks_, 9);
    for (v1::Operation* operation : {&whole, &ranked}) {
      v1::Compact* compact = operation->mutable_compact();
      compact->mutable_sequence()->set_last_block_tokens(kTokens - 1);
      compact->set_scope(scope);
      compact->set_keep_sources(true);
      compact->mutable_policy()->set_name("inverse_key_l2");
      compact->set_disposition(disposition);
      if (i == 8) {
        // The heads of all ranks share a layer's budget.
        compact->set_heads(v1::HEADS_ADA);
        compact->mutable_ada()->set_most_tokens(12);
        for (const uint32_t count : {9u, 3u, 11u, 12u, 5u, 12u, 12u, 0u})
          compact->mutable_ada()->add_counts(count);
        compact->mutable_ada()->set_counted_tokens(12);
      }
      if (i == 11) {
        // What is discarded is all that has to leave, and nothing is scored.
        compact->set_heads(v1::HEADS_ADA);
        compact->mutable_ada()->set_most_tokens(12);
        compact->mutable_protection();
        v1::TokenRange* const range = compact->add_discard();
        range->set_begin(9);
        range->set_end(kSequenceTokens);
      }
    }
    const v1::CompactResult a = RunOk(whole_.get(), whole).compact();
    const v1::CompactResult b = RunOk(ranked_.get(), ranked).compact();
    ASSERT_EQ(a.table_size(), 3);
    ASSERT_EQ(b.table_size(), 3);
    EXPECT_EQ(Refs(a.counts().begin(), a.counts().end()), Refs(b.counts().begin(), b.counts().end()));
    EXPECT_EQ(a.counts_size(), i >= 8 ? kLayers * kAllHeads : 0);
    EXPECT_EQ(a.rows(), b.rows());
    EXPECT_EQ(Refs(a.kept_positions().begin(), a.kept_positions().end()),
              Refs(b.kept_positions().begin(), b.kept_positions().end()))
        << v1::Scope_Name(scope);
    EXPECT_EQ(a.merged_tokens() > 0, disposition == v1::DISPOSITION_MERGE);
    EXPECT_EQ(a.merged_tokens(), b.merged_tokens());
    EXPECT_EQ(std::vector<float>(a.merge_thresholds().begin(), a.merge_thresholds().end()),
              std::vector<float>(b.merge_thresholds().begin(), b.merge_thresholds().end()));
    for (int block = 0; block < 3; ++block) {
      ForEachElement([&](bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
        if (block == 2 && token >= a.last_block_tokens()) return;
        EXPECT_EQ(*OfWhole(a.table(block), value, layer, token, head, dim),
                  *OfRanks(b.table(block), value, layer, token, head, dim))
            << v1::Scope_Name(scope) << ", layer " << layer << ", head " << head;
      });
    }
  }
}

TEST_F(ScoreRanksTest, StatesAreThoseOfTheHeadsOfAllRanks) {
  constexpr uint32_t kRank = 3, kHidden = 5, kOfPlane = kRank * (kDim + 1);
  std::vector<float> weights(size_t{kLayers} * kAllHeads *
                             (kDim * kHidden + kHidden * kRank + kRank * kRank));
  for (float& x : weights) x = Uniform() * 2 - 1;
  const Refs states[] = {whole_->Lease(2), ranked_->Lease(2)};
  for (const v1::Scope scope : {v1::SCOPE_SEQUENCE, v1::SCOPE_LAYER, v1::SCOPE_HEAD}) {
    v1::Operation whole = CompactOp(whole_blocks_, 9), ranked = CompactOp(ranked_blocks_, 9);
    v1::CompactResult results[2];
    for (v1::Operation* operation : {&whole, &ranked}) {
      const bool is_whole = operation == &whole;
      const Refs& own = states[is_whole ? 0 : 1];
      v1::Compact* compact = operation->mutable_compact();
      compact->mutable_sequence()->set_last_block_tokens(kTokens - 1);
      compact->set_scope(scope);
      compact->set_keep_sources(true);
      compact->mutable_policy()->set_name("inverse_key_l2");
      compact->set_disposition(v1::DISPOSITION_LESS);
      v1::LessTerms* const terms = compact->mutable_less();
      terms->set_rank(kRank);
      terms->set_hidden(kHidden);
      terms->set_weights_name("random");
      terms->mutable_weights()->set_inlined(weights.data(), weights.size() * sizeof(float));
      terms->mutable_state()->add_blocks(own[0]);
      Engine* const engine = is_whole ? whole_.get() : ranked_.get();
      RunOk(engine, *operation);
      // Once more, added to that.
      terms->mutable_previous()->add_blocks(own[0]);
      terms->mutable_state()->set_blocks(0, own[1]);
      results[is_whole ? 0 : 1] = RunOk(engine, *operation).compact();
    }
    EXPECT_EQ(results[0].folded_tokens(), results[1].folded_tokens());
    EXPECT_EQ(results[0].folded_tokens(), kLayers * kAllHeads * (kSequenceTokens - 9));
    EXPECT_EQ(results[0].kept_digest(), results[1].kept_digest());
    for (int state = 0; state < 2; ++state) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t head = 0; head < kAllHeads; ++head) {
          const float* const of_rank = OfRanks(states[1][state], false, 0, 0, head / kHeads * kHeads, 0) +
                                       (layer * kHeads + head % kHeads) * kOfPlane;
          const float* const of_whole =
              OfWhole(states[0][state], false, 0, 0, 0, 0) + (layer * kAllHeads + head) * kOfPlane;
          for (uint32_t i = 0; i < kOfPlane; ++i) {
            EXPECT_EQ(of_rank[i], of_whole[i])
                << v1::Scope_Name(scope) << ", layer " << layer << ", head " << head;
          }
          EXPECT_GT(of_whole[kDim], 0);
        }
      }
    }
  }
}

TEST_F(ScoreRanksTest, EachRankKeepsItsOwnHeadsInLowPrecision) {
  for (const v1::Scope scope : {v1::SCOPE_SEQUENCE, v1::SCOPE_LAYER, v1::SCOPE_HEAD}) {
    v1::Operation whole = CompactOp(whole_blocks_, 9), ranked = CompactOp(ranked_blocks_, 9);
    const uint64_t whole_low = whole_->Lease(1)[0], ranked_low = ranked_->Lease(1)[0];
    for (v1::Operation* operation : {&whole, &ranked}) {
      v1::Compact* compact = operation->mutable_compact();
      compact->mutable_sequence()->set_last_block_tokens(kTokens - 1);
      compact->set_scope(scope);
      compact->set_keep_sources(true);
      compact->mutable_policy()->set_name("inverse_key_l2");
      compact->set_disposition(v1::DISPOSITION_LOW);
      compact->mutable_low()->add_blocks(operation == &whole ? whole_low : ranked_low);
    }
    const v1::CompactResult a = RunOk(whole_.get(), whole).compact();
    const v1::CompactResult b = RunOk(ranked_.get(), ranked).compact();
    EXPECT_EQ(a.low_tokens(), kSequenceTokens - 9);
    EXPECT_EQ(a.kept_digest(), b.kept_digest());
    const LowLayout layout =
        LowLayout::Of({.k_head_dim = kDim, .v_head_dim = kDim, .bits = 4, .block_bytes = kScoredBlockBytes});
    EXPECT_EQ(b.low_records_per_block(), layout.records_per_block);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t head = 0; head < kAllHeads; ++head) {
        const auto record = [&](const float* block, uint32_t heads, uint32_t of_block) {
          return std::string(
              reinterpret_cast<const char*>(block) + (layer * heads + of_block) * layout.record_bytes,
              layout.record_bytes);
        };
        EXPECT_EQ(record(OfWhole(whole_low, false, 0, 0, 0, 0), kAllHeads, head),
                  record(OfRanks(ranked_low, false, 0, 0, head / kHeads * kHeads, 0), kHeads, head % kHeads))
            << v1::Scope_Name(scope) << ", layer " << layer << ", head " << head;
      }
    }
  }
}

class GuardedRanksTest : public ScoreRanksTest {
 protected:
  void SetUp() override {
    options_.guard.share = 1;
    ScoreRanksTest::SetUp();
  }
};

TEST_F(GuardedRanksTest, EachRankMeasuresItsHeadsAndTheDriftIsThatOfAll) {
  for (const int i : {0, 1, 2, 3, 4}) {
    const v1::Scope scope =
        std::array{v1::SCOPE_SEQUENCE, v1::SCOPE_LAYER, v1::SCOPE_HEAD, v1::SCOPE_HEAD, v1::SCOPE_HEAD}[i];
    const Both signals = Everything();
    v1::Operation whole = CompactOp(whole_blocks_, 9), ranked = CompactOp(ranked_blocks_, 9);
    for (v1::Operation* operation : {&whole, &ranked}) {
      v1::Compact* compact = operation->mutable_compact();
      compact->mutable_sequence()->set_last_block_tokens(kTokens - 1);
      compact->set_scope(scope);
      compact->set_keep_sources(true);
      compact->mutable_policy()->set_name("inverse_key_l2");
      *compact->mutable_signals() = operation == &whole ? signals.whole : signals.ranked;
      if (i == 4) compact->set_heads(v1::HEADS_ADA);
    }
    const v1::CompactResult a = RunOk(whole_.get(), whole).compact();
    whole_->Release(Refs(a.table().begin(), a.table().end()));
    const v1::CompactResult b = RunOk(ranked_.get(), ranked).compact();
    ranked_->Release(Refs(b.table().begin(), b.table().end()));
    v1::GetGuardResponse guard;
    ASSERT_TRUE(daemon_->GetGuard({}, &guard).ok());
    ASSERT_EQ(guard.policies_size(), 2);
    EXPECT_EQ(guard.policies(0).samples(), 1u + i);
    EXPECT_EQ(guard.policies(1).samples(), 1u + i);
    EXPECT_GT(guard.policies(0).mean(), 0.01);
    EXPECT_GT(guard.policies(0).greatest(), guard.policies(0).mean());
    EXPECT_NEAR(guard.policies(0).mean(), guard.policies(1).mean(), 1e-5) << v1::Scope_Name(scope);
    EXPECT_NEAR(guard.policies(0).greatest(), guard.policies(1).greatest(), 1e-5) << v1::Scope_Name(scope);
  }
}

// One rank's measurement fails: the operation does not.
TEST_F(GuardedRanksTest, ARankThatCanNotMeasureFailsTheMeasurementAlone) {
  const Both signals = Everything();
  *OfRanks(ranked_blocks_[0], true, 0, 0, kAllHeads - 1, 0) = NAN;
  v1::Operation prune = PruneOp(ranked_blocks_, 3 * kTokens);
  *prune.mutable_prune()->mutable_signals() = signals.ranked;
  prune.mutable_prune()->mutable_sequence()->set_last_block_tokens(kTokens - 1);
  prune.mutable_prune()->mutable_policy()->set_name("recency");
  EXPECT_EQ(Prune(ranked_.get(), prune).victims_size(), 2);
  v1::GetGuardResponse guard;
  ASSERT_TRUE(daemon_->GetGuard({}, &guard).ok());
  ASSERT_EQ(guard.policies_size(), 1);
  EXPECT_EQ(guard.policies(0).operations().at("failed"), 1u);
  EXPECT_EQ(guard.policies(0).samples(), 0u);
}

TEST_F(ScoreRanksTest, SelectionsAreThoseOfTheHeadsOfAllRanks) {
  const Both signals = Everything();
  v1::Operation whole, ranked;
  for (v1::Operation* operation : {&whole, &ranked}) {
    const bool is_whole = operation == &whole;
    v1::Select* select = operation->mutable_select();
    *select->mutable_sequence() =
        ScoreOp(is_whole ? whole_blocks_ : ranked_blocks_, kTokens - 1).score().sequence();
    *select->mutable_window() = is_whole ? signals.whole.window() : signals.ranked.window();
    select->set_budget_blocks(3);
    select->set_last_blocks(1);
    select->set_bounds(true);
  }
  const Refs into = ranked_->Lease(1);
  ranked.mutable_select()->mutable_into()->add_blocks(into[0]);
  const v1::SelectResult a = RunOk(whole_.get(), whole).select();
  const v1::SelectResult b = RunOk(ranked_.get(), ranked).select();
  EXPECT_EQ(a.rows(), kLayers * kAllHeads);
  EXPECT_EQ(b.rows(), a.rows());
  EXPECT_EQ(b.blocks_read(), kBlocks);
  EXPECT_EQ(std::vector<uint32_t>(a.positions().begin(), a.positions().end()),
            std::vector<uint32_t>(b.positions().begin(), b.positions().end()));
  ExpectNear(a.bounds(), b.bounds(), "bounds");
  // Each rank has the positions of its own heads.
  const uint64_t offset = Index(BlockRef::Unpack(into[0]).id) * kScoredBlockBytes;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t head = 0; head < kAllHeads; ++head) {
      const auto* written =
          reinterpret_cast<const int32_t*>(holds_[head / kHeads].slab_addresses().at(0) + offset) +
          (layer * kHeads + head % kHeads) * 3;
      for (uint32_t i = 0; i < 3; ++i) {
        EXPECT_EQ(written[i],
                  static_cast<int32_t>(b.positions(static_cast<int>((layer * kAllHeads + head) * 3 + i))));
      }
    }
  }
}

TEST_F(ScoreRanksTest, BudgetsArePlannedFromTheHeadsOfAllRanks) {
  const Both signals = Everything();
  for (const v1::BudgetMethod method : {v1::BUDGET_METHOD_CAKE, v1::BUDGET_METHOD_D2O}) {
    v1::Operation whole, ranked;
    for (v1::Operation* operation : {&whole, &ranked}) {
      const bool is_whole = operation == &whole;
      v1::PlanBudgets* plan = operation->mutable_plan_budgets();
      plan->set_method(method);
      plan->set_tokens_per_layer(10);
      v1::GroupSequence* group = plan->add_sequences();
      *group->mutable_sequence() =
          ScoreOp(is_whole ? whole_blocks_ : ranked_blocks_, kTokens - 1).score().sequence();
      *group->mutable_window() = is_whole ? signals.whole.window() : signals.ranked.window();
    }
    const v1::PlanBudgetsResult a = RunOk(whole_.get(), whole).plan_budgets();
    const v1::PlanBudgetsResult b = RunOk(ranked_.get(), ranked).plan_budgets();
    ASSERT_EQ(a.budget_tokens_size(), static_cast<int>(kLayers));
    EXPECT_NE(a.weights(0), a.weights(1)) << v1::BudgetMethod_Name(method);
    EXPECT_EQ(Refs(a.budget_tokens().begin(), a.budget_tokens().end()),
              Refs(b.budget_tokens().begin(), b.budget_tokens().end()));
    ExpectNear(a.weights(), b.weights(), v1::BudgetMethod_Name(method));
  }
}

TEST_F(ScoreRanksTest, ASignalInBlocksIsReadFromEveryRanksOwnPart) {
  const Refs statistics = ranked_->Lease(1);
  const uint64_t offset = Index(BlockRef::Unpack(statistics[0]).id) * kScoredBlockBytes;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    auto* mass = reinterpret_cast<float*>(holds_[rank].slab_addresses().at(0) + offset);
    for (uint32_t token = 0; token < kSequenceTokens; ++token) mass[token] = rank == 0 ? token : 1;
  }
  v1::Operation operation = ScoreOp(ranked_blocks_, kTokens - 1);
  operation.mutable_score()->mutable_policy()->set_name("h2o");
  v1::Signal* signal = operation.mutable_score()->mutable_signals()->add_signals();
  signal->set_kind(v1::SIGNAL_KIND_MASS);
  signal->mutable_data()->add_blocks(statistics[0]);
  const v1::ScoreResult result = RunOk(ranked_.get(), operation).score();
  ASSERT_EQ(result.token_scores_size(), static_cast<int>(kSequenceTokens));
  for (uint32_t token = 0; token < kSequenceTokens; ++token) {
    EXPECT_NEAR(result.token_scores(static_cast<int>(token)), (token + 1.0) / 2, 1e-5);
  }
}

TEST_F(ScoreRanksTest, AnInlinedSignalOfHeadsHasOneArrayForEachRank) {
  v1::Operation operation = ScoreOp(ranked_blocks_, kTokens - 1);
  operation.mutable_score()->mutable_policy()->set_name("h2o");
  v1::Signal* signal = operation.mutable_score()->mutable_signals()->add_signals();
  *signal = InlinedSignal(v1::SIGNAL_KIND_MASS, std::vector<float>(kHeads * kSequenceTokens));
  signal->set_per_head(true);
  const v1::OperationResult answer = Run(ranked_.get(), operation);
  EXPECT_EQ(answer.code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_NE(answer.message().find("needs 368, 184 for each of 2 ranks"), std::string::npos)
      << answer.message();
}

TEST_F(ScoreRanksTest, FeaturesAreKeptForEachRank) {
  v1::Operation operation = ScoreOp(ranked_blocks_, kTokens - 1);
  EXPECT_EQ(RunOk(ranked_.get(), operation).score().blocks_read(), kBlocks);
  EXPECT_EQ(RunOk(ranked_.get(), operation).score().blocks_read(), 1);
}

// What one rank's device refuses, nobody does.
TEST_F(ScoreRanksTest, AnErrorOfOneRankIsTheOperations) {
  holds_[1].FailWith(absl::ResourceExhaustedError("out of memory"));
  v1::Operation compact = CompactOp(ranked_blocks_, 9);
  compact.mutable_compact()->mutable_sequence()->set_last_block_tokens(kTokens - 1);
  const v1::OperationResult answer = Run(ranked_.get(), compact);
  EXPECT_EQ(answer.code(), static_cast<int>(absl::StatusCode::kResourceExhausted)) << answer.message();
  holds_[1].FailWith(absl::OkStatus());
  EXPECT_EQ(ranked_->Release(ranked_blocks_).refused_size(), 0) << "nothing was released";
  EXPECT_EQ(Blocks().leased(), kBlocks + 2) << "the other session's and two sinks: no destination stays";
}

TEST_F(ScoreRanksTest, NoBlockComesFreeWhileAnyRankReadsIt) {
  holds_[1].Hold();
  const auto answer = Begin(ranked_.get(), ScoreOp(ranked_blocks_, kTokens - 1));
  holds_[0].AwaitCalls(1);
  holds_[1].AwaitCalls(1);
  const v1::StateCounts before = Blocks();
  ranked_->Do(CloseOp());
  EXPECT_EQ(answer->Await().code(), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Blocks().free(), before.free()) << "rank 1 still reads";
  holds_[1].Release();
  v1::Operation score = ScoreOp(whole_blocks_, kTokens - 1);
  RunOk(whole_.get(), score);  // Device 0 is done with it; the device of rank 1 may still run.
  daemon_.reset();
}

TEST_F(ScoreRanksTest, ADaemonThatEndsAnswersWhatRanksAreAt) {
  const auto unavailable = [](const std::shared_ptr<LateAnswer>& answer) {
    const v1::OperationResult result = answer->Await();
    EXPECT_EQ(result.code(), static_cast<int>(absl::StatusCode::kUnavailable)) << result.message();
    EXPECT_EQ(result.message(), "the daemon shuts down");
  };
  for (DeviceHold& hold : holds_) hold.Hold();
  const auto running = Begin(ranked_.get(), ScoreOp(ranked_blocks_, kTokens - 1));
  for (DeviceHold& hold : holds_) hold.AwaitCalls(1);
  const auto queued = Begin(ranked_.get(), ScoreOp(ranked_blocks_, kTokens - 1));
  const auto of_one_rank = Begin(whole_.get(), ScoreOp(whole_blocks_, kTokens - 1));
  daemon_->StopDeviceOperations();
  const auto late = Begin(whole_.get(), ScoreOp(whole_blocks_, kTokens - 1));
  // The second rank first: what is queued there must not run while the first is still at it.
  for (DeviceHold* hold : {&holds_[1], &holds_[0]}) hold->Release();
  EXPECT_EQ(running->Await().code(), 0) << "all of its parts ran";
  unavailable(queued);
  unavailable(of_one_rank);
  unavailable(late);
  for (DeviceHold& hold : holds_) EXPECT_EQ(hold.calls(), 1) << "a part that was queued has run";
  EXPECT_EQ(ranked_->Release(ranked_blocks_).refused_size(), 0);
}

// The parts that move blocks are a second round.
TEST_F(ScoreRanksTest, ADaemonThatEndsBeginsNoSecondRound) {
  holds_[1].Hold();
  v1::Operation compact = CompactOp(ranked_blocks_, 9);
  compact.mutable_compact()->mutable_sequence()->set_last_block_tokens(kTokens - 1);
  const auto running = Begin(ranked_.get(), compact);
  for (DeviceHold& hold : holds_) hold.AwaitCalls(1);
  daemon_->StopDeviceOperations();
  holds_[1].Release();
  EXPECT_EQ(running->Await().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  for (DeviceHold& hold : holds_) EXPECT_EQ(hold.calls(), 1);
  EXPECT_EQ(ranked_->Release(ranked_blocks_).refused_size(), 0) << "nothing was moved";
}

// Others get in between the addresses of one rank and those of the next.
class LargeRanksTest : public ScoreTest {
 protected:
  ~LargeRanksTest() override {
    for (DeviceHold& hold : holds_) hold.Release();
    daemon_.reset();
  }
  // How often the mutex of the space is taken for the beginning of a score.
  uint64_t HoldsOfScore(const Refs& blocks) {
    const auto holds = [&] {
      const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
      return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
    };
    v1::Operation score = ScoreOp(blocks);
    score.mutable_score()->set_token_scores(false);
    const uint64_t before = holds();
    answers_.push_back(Begin(rank0_.get(), score));
    return holds() - before;
  }

  DeviceHold holds_[kRanks];
  std::unique_ptr<Engine> rank0_, rank1_;
  std::vector<std::shared_ptr<LateAnswer>> answers_;
};

TEST_F(LargeRanksTest, AnOperationIsPreparedRankByRank) {
  constexpr uint32_t kMany = 8 * Turn::kNames + 8;
  slab_blocks_ = 96;
  StartScoringOn(absl::MakeSpan(holds_), /*slabs=*/1);
  v1::OpenSession request = RequestWithHeads("ranked", kHeads);
  request.mutable_layout()->set_block_bytes(512);  // More than ten thousand in 6 MiB.
  request.set_ranks(kRanks);
  rank0_ = OpenEngine(request, "rank 0");
  rank1_ = Attach("rank 1");
  v1::AddMember join;
  join.set_session(rank0_->opened.session());
  join.set_invitation(rank0_->token);
  join.mutable_role()->set_rank(1);
  *join.mutable_layout() = request.layout();
  *join.mutable_fingerprint() = request.fingerprint();
  ASSERT_TRUE(rank1_->Join(*rank0_, join).ok());
  Settle({rank0_.get(), rank1_.get()});
  const Refs blocks = rank0_->Lease(kMany), few = rank0_->Lease(1);
  ASSERT_EQ(blocks.size(), kMany);
  for (DeviceHold& hold : holds_) hold.Hold();
  const uint64_t of_many = HoldsOfScore(blocks);
  for (DeviceHold& hold : holds_) hold.AwaitCalls(1);
  EXPECT_GE(of_many, HoldsOfScore(few) + kRanks);
  for (DeviceHold& hold : holds_) hold.Release();
  for (const auto& answer : answers_) {
    const v1::OperationResult result = answer->Await();
    EXPECT_EQ(result.code(), 0) << result.message();
  }
}

}  // namespace
}  // namespace kvpool
