// An engine that prunes: K and V written here, scored by the daemon, and what attention makes
// of what is left.
#include <signal.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "client/live_sequence.h"
#include "client/signals.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 8;

// Position in the model's context -> K or V of a head.
using Row = std::array<float, kDim>;

class ScoringTest : public SessionTest {
 protected:
  void SetUp() override {
    StartDaemon();
    SessionOptions options = OptionsFor(daemon_->socket());
    options.layout = PagedLayout({.layers = kLayers,
                                  .kv_heads = kHeads,
                                  .head_dim = kDim,
                                  .tokens_per_block = 4,
                                  .dtype = v1::DTYPE_F32});
    session_ = Open(options);
    ASSERT_NE(session_, nullptr);
  }

  float* RowAt(const LiveSequence& sequence, bool value, uint32_t layer, uint32_t token, uint32_t head) {
    const v1::LayerGroup& group = session_->layout().groups(0);
    const v1::Plane& plane = value ? group.v() : group.k();
    return reinterpret_cast<float*>(session_->data(sequence.blocks()[token / 4]) + plane.offset_bytes() +
                                    layer * plane.layer_stride_bytes() +
                                    token % 4 * plane.token_stride_bytes() +
                                    head * plane.head_stride_bytes());
  }
  static Row Random(uint32_t seed) {
    std::minstd_rand random(seed + 1);
    Row row;
    for (float& x : row) x = static_cast<float>(random()) / 1e9f - 1;
    return row;
  }
  // What the model computes for the token at `position`.
  static Row RowOf(bool value, uint32_t layer, uint32_t position, uint32_t head) {
    return Random(((position * kLayers + layer) * kHeads + head) * 2 + (value ? 1 : 0));
  }
  // Generates tokens until the sequence has `count` more, with blocks as they are needed.
  void Generate(LiveSequence* sequence, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      if (sequence->room() == 0) {
        absl::StatusOr<Blocks> block = session_->LeaseWithin(1, Soon());
        ASSERT_TRUE(block.ok()) << block.status();
        ASSERT_TRUE(sequence->Append(*std::move(block)).ok());
      }
      const uint32_t at = sequence->tokens(), position = next_position_++;
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t head = 0; head < kHeads; ++head) {
          for (const bool value : {false, true}) {
            const Row row = RowOf(value, layer, position, head);
            std::memcpy(RowAt(*sequence, value, layer, at, head), row.data(), sizeof(row));
          }
        }
      }
      positions_.push_back(position);
      ASSERT_TRUE(sequence->Extend({&position, 1}).ok());
    }
  }
  // Softmax attention of one query over these rows.
  template <typename Rows>
  static std::vector<double> Attention(uint32_t tokens, const Rows& row) {
    const Row query = Random(4711);
    std::vector<double> output(kDim, 0);
    double sum = 0;
    for (uint32_t token = 0; token < tokens; ++token) {
      const Row k = row(false, token), v = row(true, token);
      double logit = 0;
      for (uint32_t d = 0; d < kDim; ++d) logit += double{query[d]} * k[d];
      const double weight = std::exp(logit / std::sqrt(double{kDim}));
      sum += weight;
      for (uint32_t d = 0; d < kDim; ++d) output[d] += weight * v[d];
    }
    for (double& x : output) x /= sum;
    return output;
  }
  // What is in the blocks attends as the tokens of positions_ do.
  void ExpectAttentionOfSurvivors(const LiveSequence& sequence) {
    ASSERT_EQ(sequence.tokens(), positions_.size());
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        const auto resident = Attention(sequence.tokens(), [&](bool value, uint32_t token) {
          Row row;
          std::memcpy(row.data(), RowAt(sequence, value, layer, token, head), sizeof(row));
          return row;
        });
        const auto reference = Attention(sequence.tokens(), [&](bool value, uint32_t token) {
          return RowOf(value, layer, positions_[token], head);
        });
        EXPECT_EQ(resident, reference) << "layer " << layer << " head " << head;
      }
    }
  }

  std::unique_ptr<Session> session_;
  uint32_t next_position_ = 0;
  std::vector<uint32_t> positions_;  // The tokens that are left, in order.
};

v1::Prune BudgetOf(uint32_t tokens) {
  v1::Prune prune;
  prune.set_budget_tokens(tokens);
  return prune;
}

TEST_F(ScoringTest, DecodingHoldsItsBudgetAndAttendsToWhatIsLeft) {
  LiveSequence sequence(session_.get());
  constexpr uint32_t kBudget = 32;
  for (int block = 0; block < 40; ++block) {
    Generate(&sequence, 4);
    EXPECT_LE(sequence.tokens(), kBudget + 4);
    const absl::StatusOr<v1::PruneResult> pruned = sequence.Prune(BudgetOf(kBudget), Soon());
    ASSERT_TRUE(pruned.ok()) << pruned.status();
    ASSERT_EQ(pruned->victims_size(), block < 8 ? 0 : 1);
    for (const uint32_t victim : pruned->victims()) {
      positions_.erase(positions_.begin() + victim * 4, positions_.begin() + victim * 4 + 4);
    }
    if (block > 8) {
      EXPECT_EQ(pruned->blocks_read(), 1);
    }
    ExpectAttentionOfSurvivors(sequence);
  }
  EXPECT_EQ(sequence.tokens(), kBudget);
  EXPECT_EQ(session_->counters().refused, 0);
  EXPECT_EQ(daemon_->Metric("kvpool_pruned_blocks_total"), 32);
  EXPECT_EQ(daemon_->Metric("kvpool_device_ops_total", "op=\"prune\""), 40);
  EXPECT_EQ(daemon_->Metric("kvpool_feature_cache_misses_total"), 40) << "every block was read once";
  EXPECT_GT(daemon_->Metric("kvpool_feature_cache_hits_total"), 200);
  EXPECT_GT(daemon_->Metric("kvpool_feature_cache_bytes"), 0);
  EXPECT_EQ(daemon_->Metric("kvpool_device_ops_queued"), 0);
}

TEST_F(ScoringTest, APromptIsCompactedTokenByToken) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 50);
  v1::Compact request;
  request.set_budget_tokens(22);
  const absl::StatusOr<v1::CompactResult> compacted = sequence.Compact(request, Soon());
  ASSERT_TRUE(compacted.ok()) << compacted.status();
  positions_.assign(compacted->kept_positions().begin(), compacted->kept_positions().end());
  EXPECT_LT(positions_.size(), 50);
  EXPECT_TRUE(std::is_sorted(positions_.begin(), positions_.end()));
  ExpectAttentionOfSurvivors(sequence);
  Generate(&sequence, 11);
  ExpectAttentionOfSurvivors(sequence);
}

TEST_F(ScoringTest, HeadsThatShareABudgetAreCompactedAgainAndAgain) {
  constexpr uint32_t kBudget = 12, kNone = UINT32_MAX;
  LiveSequence sequence(session_.get());
  Generate(&sequence, 50);
  std::vector<std::vector<uint32_t>> there(kLayers *
                                           kHeads);  // The position that each plane has at each place.
  for (auto& plane : there) plane = positions_;
  for (int round = 0; round < 3; ++round) {
    v1::Compact request;
    request.set_budget_tokens(kBudget);
    request.mutable_policy()->set_name("keydiff");
    request.mutable_protection();
    request.set_scope(v1::SCOPE_HEAD);
    request.set_heads(v1::HEADS_ADA);
    const absl::StatusOr<v1::CompactResult> compacted = sequence.Compact(request, Soon());
    ASSERT_TRUE(compacted.ok()) << compacted.status();
    ASSERT_EQ(compacted->kept_positions_size(), static_cast<int>(kBudget * there.size()));
    EXPECT_EQ(sequence.padded_tokens(), sequence.tokens());
    EXPECT_TRUE(std::equal(sequence.head_counts().begin(), sequence.head_counts().end(),
                           compacted->counts().begin(), compacted->counts().end()));
    EXPECT_LE(sequence.tokens(), 2 * kBudget);
    auto kept = compacted->kept_positions().begin();
    for (uint32_t plane = 0; plane < there.size(); ++plane) {
      std::vector<uint32_t> now(sequence.tokens(), kNone);
      for (uint32_t i = 0; i < sequence.head_counts()[plane]; ++i) now[i] = there[plane][*kept++];
      there[plane] = now;
      EXPECT_EQ(std::count(now.begin(), now.end(), kNone), sequence.tokens() - compacted->counts(plane))
          << "padding of before stays";
    }
    const uint32_t first = next_position_;
    Generate(&sequence, 11);
    for (auto& plane : there)
      for (uint32_t position = first; position < next_position_; ++position) plane.push_back(position);
    for (uint32_t plane = 0; plane < there.size(); ++plane) {
      for (uint32_t i = 0; i < sequence.tokens(); ++i) {
        for (const bool value : {false, true}) {
          const uint32_t position = there[plane][i], layer = plane / kHeads, head = plane % kHeads;
          const Row expected = position == kNone ? Row{} : RowOf(value, layer, position, head);
          const float* const row = RowAt(sequence, value, layer, i, head);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), row)) << "plane " << plane << ", " << i;
        }
      }
    }
  }
  // What knows no padding is refused, until the sequence begins again.
  const auto refused = [&] {
    v1::Score score;
    score.set_block_scores(true);
    v1::Compact equal;
    equal.set_budget_tokens(kBudget);
    const absl::StatusCode code = sequence.CheckUnpadded().code();
    EXPECT_EQ(sequence.Prune(BudgetOf(kBudget), Soon()).status().code(), code);
    EXPECT_EQ(sequence.Score(score, Soon()).status().code(), code);
    EXPECT_EQ(sequence.Compact(equal, Soon()).status().code(), code);
    return code;
  };
  EXPECT_EQ(refused(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(sequence.Release({}).ok());
  Generate(&sequence, 20);
  EXPECT_EQ(refused(), absl::StatusCode::kOk);
}

TEST_F(ScoringTest, AttentionMassInBlocksDecidesH2o) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 16);
  absl::StatusOr<BlockArray> mass = BlockArray::Lease(session_.get(), 16 * sizeof(float), Soon());
  ASSERT_TRUE(mass.ok()) << mass.status();
  std::vector<float> values(16, 1);
  for (int i = 8; i < 12; ++i) values[i] = 0;
  mass->Write(0, values);
  v1::Prune prune = BudgetOf(12);
  prune.mutable_policy()->set_name("h2o");
  prune.mutable_protection();
  *prune.mutable_signals()->add_signals() = mass->Signal(v1::SIGNAL_KIND_MASS);
  const absl::StatusOr<v1::PruneResult> pruned = sequence.Prune(prune, Soon());
  ASSERT_TRUE(pruned.ok()) << pruned.status();
  ASSERT_EQ(pruned->victims_size(), 1);
  EXPECT_EQ(pruned->victims(0), 2);
}

TEST_F(ScoringTest, ScoresAndBudgetsComeBack) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 10);
  v1::Score score;
  score.set_token_scores(true);
  const absl::StatusOr<v1::ScoreResult> scored = sequence.Score(score, Soon());
  ASSERT_TRUE(scored.ok()) << scored.status();
  EXPECT_EQ(scored->token_scores_size(), 10);
  v1::PlanBudgets plan;
  plan.set_method(v1::BUDGET_METHOD_PYRAMID);
  plan.set_layers(8);
  plan.set_tokens_per_layer(320);
  auto pending = session_->PlanBudgets(plan);
  ASSERT_TRUE(pending.ok()) << pending.status();
  const absl::StatusOr<v1::PlanBudgetsResult> planned = pending->Wait(Soon());
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->budget_tokens(0), 500 + 64);
  EXPECT_EQ(planned->budget_tokens(7), 17 + 64);
}

// The block that holds the key which a query looks for is selected, whichever it is.
TEST_F(ScoringTest, ASelectionHasTheBlocksThatQueriesLookInto) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 30);
  std::vector<float> query(size_t{kLayers} * kHeads * kDim);
  for (const uint32_t token : {1u, 14u, 22u}) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        const float* const key = RowAt(sequence, false, layer, token, head);
        std::copy(key, key + kDim, &query[(layer * kHeads + head) * kDim]);
        for (uint32_t dim = 0; dim < kDim; ++dim) RowAt(sequence, false, layer, token, head)[dim] *= 4;
      }
    }
    v1::Select request;
    *request.mutable_sequence() = sequence.ToProto();
    request.mutable_sequence()->set_fresh(true);
    request.mutable_window()->set_queries(1);
    request.mutable_window()->set_q_heads(kHeads);
    request.mutable_window()->mutable_data()->set_inlined(query.data(), query.size() * sizeof(float));
    request.set_budget_blocks(2);
    request.set_last_blocks(1);
    auto pending = session_->Select(request);
    ASSERT_TRUE(pending.ok()) << pending.status();
    const absl::StatusOr<v1::SelectResult> selected = pending->Wait(Soon());
    ASSERT_TRUE(selected.ok()) << selected.status();
    ASSERT_EQ(selected->positions_size(), 2 * static_cast<int>(kLayers * kHeads));
    for (int row = 0; row < static_cast<int>(kLayers * kHeads); ++row) {
      EXPECT_EQ(selected->positions(2 * row), 7) << "the block that is being written";
      EXPECT_EQ(selected->positions(2 * row + 1), token / 4) << "row " << row;
    }
  }
  EXPECT_EQ(sequence.tokens(), 30);
}

TEST_F(ScoringTest, EveryVerbReadsBlocksAnewThatAreFresh) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 16);
  const auto blocks_read = [&](bool fresh) {
    v1::Score score;
    score.set_block_scores(true);
    score.mutable_sequence()->set_fresh(fresh);
    v1::Prune prune = BudgetOf(12);
    prune.set_dry_run(true);
    prune.mutable_sequence()->set_fresh(fresh);
    v1::Compact compact;
    compact.set_budget_tokens(12);
    compact.set_keep_sources(true);
    compact.mutable_sequence()->set_fresh(fresh);
    const absl::StatusOr<v1::ScoreResult> scored = sequence.Score(score, Soon());
    const absl::StatusOr<v1::PruneResult> pruned = sequence.Prune(prune, Soon());
    const absl::StatusOr<v1::CompactResult> compacted = sequence.Compact(compact, Soon());
    EXPECT_TRUE(scored.ok() && pruned.ok() && compacted.ok())
        << scored.status() << pruned.status() << compacted.status();
    return std::vector<uint32_t>{scored->blocks_read(), pruned->blocks_read(), compacted->blocks_read()};
  };
  EXPECT_EQ(blocks_read(false), (std::vector<uint32_t>{4, 0, 0})) << "the first reads, the others know";
  EXPECT_EQ(blocks_read(false), (std::vector<uint32_t>{0, 0, 0}));
  EXPECT_EQ(blocks_read(true), (std::vector<uint32_t>{4, 4, 4}));
}

// Keys of tokens that saw a pruned context are not those of the same tokens in a whole one.
TEST_F(ScoringTest, APrunedSequenceNeverSealsUnderItsOldKeys) {
  const auto generate = [&](bool prune) {
    next_position_ = 0;
    auto sequence = std::make_unique<LiveSequence>(session_.get());
    Generate(sequence.get(), 16);
    EXPECT_TRUE(sequence->Seal()->has_value());
    if (prune) {
      EXPECT_EQ(sequence->Prune(BudgetOf(12), Soon())->victims_size(), 1);
    }
    EXPECT_FALSE(sequence->Seal()->has_value()) << "nothing is new";
    Generate(sequence.get(), 4);
    return sequence;
  };
  const auto seal = [](LiveSequence* sequence) {
    absl::StatusOr<std::optional<PendingSeal>> pending = sequence->Seal();
    EXPECT_TRUE(pending.ok() && pending->has_value());
    absl::StatusOr<SealOutcome> outcome = (*pending)->Wait(Soon());
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->refused.empty());
    return outcome->canonical.at(0);
  };
  const auto whole = generate(false), pruned = generate(true), alike = generate(true);
  const BlockRef of_whole = seal(whole.get()), of_pruned = seal(pruned.get()), of_alike = seal(alike.get());
  EXPECT_EQ(of_whole, whole->blocks().back());
  EXPECT_EQ(of_pruned, pruned->blocks().back()) << "sealed under a key of its own";
  EXPECT_EQ(of_alike, kNullRef) << "pruned alike: that key is there";
  EXPECT_NE(whole->last_key(), pruned->last_key());
  EXPECT_EQ(alike->last_key(), pruned->last_key());
}

// Two users of one tenant have a system prompt of 10 tokens in common: 2 of its blocks are full.
TEST_F(ScoringTest, SequencesWithSoftSaltsShareTheHeadAlone) {
  constexpr uint32_t kHead = 10, kTokens = 16, kHeadBlocks = 2;
  std::vector<uint32_t> tokens(kTokens);
  for (uint32_t i = 0; i < kTokens; ++i) tokens[i] = i;
  const auto find = [&](std::string_view salt, uint32_t salt_from) {
    const PrefixHasher hasher(session_->hash_seed(), salt, salt_from);
    absl::StatusOr<PendingMatch> pending = session_->Match(KeyBytes(hasher.Chain(tokens, 4)));
    EXPECT_TRUE(pending.ok()) << pending.status();
    absl::StatusOr<MatchHit> hit = pending->Wait(Soon());
    EXPECT_TRUE(hit.ok()) << hit.status();
    return *std::move(hit);
  };
  const auto seal = [&](LiveSequence* sequence) {
    absl::StatusOr<std::optional<PendingSeal>> pending = sequence->Seal();
    ASSERT_TRUE(pending.ok() && pending->has_value());
    const absl::StatusOr<SealOutcome> outcome = (*pending)->Wait(Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->refused.empty());
  };
  LiveSequence first(session_.get(), {.salt = "first", .salt_from = kHead});
  Generate(&first, kTokens);
  seal(&first);
  const std::vector<BlockRef> of_first(first.blocks().begin(), first.blocks().end());
  EXPECT_EQ(first.last_key(), PrefixHasher(session_->hash_seed(), "first", kHead).Chain(tokens, 4).back());
  EXPECT_EQ(find("first", kHead).groups[0].size(), of_first.size());
  EXPECT_EQ(find("first", kHeadBlocks * 4).groups[0].size(), of_first.size()) << "the same block is salted";
  EXPECT_EQ(find("", 0).groups[0].size(), kHeadBlocks);
  EXPECT_EQ(find("first", kHeadBlocks * 4 + 4).groups[0].size(), kHeadBlocks) << "salted one block later";
  EXPECT_EQ(find("first", 0).groups[0].size(), 0u) << "salted from the root on";

  MatchHit hit = find("second", kHead);
  ASSERT_EQ(hit.groups[0].size(), kHeadBlocks);
  LiveSequence second(session_.get(), {.salt = "second", .salt_from = kHead});
  const absl::Span<const uint32_t> head = absl::MakeConstSpan(tokens).first(kHeadBlocks * 4);
  ASSERT_TRUE(second.Adopt(std::move(hit.groups[0]), head).ok());
  next_position_ = kHeadBlocks * 4;
  Generate(&second, kTokens - next_position_);
  seal(&second);
  const Blocks found = std::move(find("second", kHead).groups[0]);
  ASSERT_EQ(found.size(), of_first.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found.refs()[i], second.blocks()[i]) << "block " << i;
    EXPECT_EQ(found.refs()[i] == of_first[i], i < kHeadBlocks) << "block " << i;
  }

  // Positions begin anew with the sequence.
  const PrefixKey key = second.last_key();
  ASSERT_TRUE(second.Release({}).ok());
  next_position_ = 0;
  Generate(&second, kTokens);
  EXPECT_EQ(second.last_key(), key);
}

TEST_F(ScoringTest, ASoftSaltCountsFromAPruningOn) {
  constexpr uint32_t kFar = 1000;
  std::string digest;
  const auto pruned = [&](std::string_view salt, uint32_t salt_from) {
    next_position_ = 0;
    LiveSequence sequence(session_.get(), {.salt = salt, .salt_from = salt_from});
    Generate(&sequence, 18);
    const absl::StatusOr<v1::PruneResult> result = sequence.Prune(BudgetOf(12), Soon());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_GT(result->victims_size(), 0);
    digest = result->kept_digest();
    Generate(&sequence, 3);  // Tokens 18 and 19 fill a block.
    return sequence.last_key();
  };
  const PrefixKey none = pruned("", kFar), a = pruned("a", kFar), b = pruned("b", kFar);
  EXPECT_EQ(none, pruned("", 0));
  EXPECT_EQ(a, pruned("a", kFar)) << "those with the salt share";
  EXPECT_NE(a, none);
  EXPECT_NE(a, b);
  EXPECT_NE(pruned("a", 2), pruned("b", 2));
  // Positions go on as if nothing had been dropped: the block behind the pruning begins at 18.
  for (const uint32_t from : {12u, 17u, 18u, 19u, 20u}) {
    const PrefixKey key = pruned("a", from);
    const PrefixHasher hasher(session_->hash_seed(), "a", from);
    std::vector<uint32_t> tokens(20);
    for (uint32_t i = 0; i < 20; ++i) tokens[i] = i;
    const absl::Span<const uint32_t> all = tokens;
    const PrefixKey parent =
        hasher.BehindPruning(hasher.Chain(all.first(16), 4).back(), all.subspan(16, 2), digest);
    EXPECT_EQ(key, hasher.NextAt(parent, 18, all.subspan(18))) << "salt from " << from;
  }
}

TEST_F(ScoringTest, BlocksReleasedWhileTheyAreReadComeBackThroughTheDaemon) {
  absl::StatusOr<Blocks> blocks = session_->LeaseWithin(4, Soon());
  ASSERT_TRUE(blocks.ok());
  v1::Score score;
  score.set_block_scores(true);
  for (const BlockRef ref : blocks->refs()) score.mutable_sequence()->add_blocks(ref.Pack());
  auto pending = session_->Score(score);
  ASSERT_TRUE(pending.ok()) << pending.status();
  blocks->Release();
  EXPECT_TRUE(pending->Wait(Soon()).ok());
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  EXPECT_EQ(session_->counters().refused, 0);
}

TEST_F(ScoringTest, AnAbandonedCompactGivesItsBlocksBack) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 16);
  v1::Compact request;
  *request.mutable_sequence() = sequence.ToProto();
  request.mutable_keep()->add_positions(3);
  request.set_keep_sources(true);
  { auto pending = session_->Compact(request); }
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  // Waits behind it; then nothing but what this engine holds is leased.
  v1::Score score;
  score.set_block_scores(true);
  ASSERT_TRUE(sequence.Score(score, Soon()).ok());
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  EXPECT_EQ(session_->counters().refused, 0);
}

// The daemon is busy: the sequence waits for what it asked, and nothing of it is given back twice.
TEST_F(ScoringTest, AnAnswerThatIsLateCanBeAskedForAgain) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 16);
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  daemon_->Signal(SIGSTOP);
  const absl::StatusOr<v1::PruneResult> late = sequence.Prune(BudgetOf(12), std::chrono::steady_clock::now());
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
  EXPECT_EQ(sequence.blocks().size(), 4) << "as before";
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Prune(BudgetOf(12), Soon()).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Seal().status()));
  const uint32_t token = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Extend({&token, 1})));
  daemon_->Signal(SIGCONT);
  const absl::StatusOr<v1::PruneResult> pruned = sequence.FinishPrune(Soon());
  ASSERT_TRUE(pruned.ok()) << pruned.status();
  EXPECT_EQ(sequence.blocks().size(), 3);
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.FinishPrune(Soon()).status())) << "it is finished";
}

TEST_F(ScoringTest, ASequenceThatEndsBeforeItsAnswerGivesBackWhatIsLeft) {
  std::vector<BlockRef> forked;
  {
    LiveSequence sequence(session_.get());
    Generate(&sequence, 16);
    forked.assign(sequence.blocks().begin(), sequence.blocks().end());
    absl::StatusOr<Blocks> fork = session_->Ref(forked);
    ASSERT_TRUE(fork.ok());
    fork->Detach();
    ASSERT_TRUE(session_->Flush(Soon()).ok());
    daemon_->Signal(SIGSTOP);
    const absl::StatusOr<v1::PruneResult> late =
        sequence.Prune(BudgetOf(12), std::chrono::steady_clock::now());
    EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
    daemon_->Signal(SIGCONT);
  }
  session_->Release(forked);
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  EXPECT_EQ(session_->counters().refused, 0) << "four holds of the sequence and four of the fork";
}

TEST_F(ScoringTest, ErrorsOfTheDaemonArriveInWords) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 16);
  v1::Prune prune = BudgetOf(8);
  prune.mutable_policy()->set_name("snapkv");
  absl::StatusOr<v1::PruneResult> pruned = sequence.Prune(prune, Soon());
  EXPECT_TRUE(absl::IsFailedPrecondition(pruned.status())) << pruned.status();
  prune.mutable_policy()->set_name("no such policy");
  pruned = sequence.Prune(prune, Soon());
  EXPECT_TRUE(absl::IsInvalidArgument(pruned.status())) << pruned.status();
  pruned = sequence.Prune(BudgetOf(8), Soon());
  EXPECT_TRUE(pruned.ok()) << pruned.status();
}

TEST_F(ScoringTest, ASequenceThatWasReleasedBeginsAnew) {
  LiveSequence sequence(session_.get());
  Generate(&sequence, 11);
  const absl::Status category = sequence.Release({.category = 16});
  EXPECT_EQ(category.message(), "ReleaseHint.category is 16; must be 0 to 15");
  EXPECT_EQ(sequence.blocks().size(), 3u) << "of 4 tokens";
  const PrefixKey root = LiveSequence(session_.get()).last_key();
  EXPECT_NE(sequence.last_key(), root);
  ASSERT_TRUE(sequence.Release({.reuse = v1::REUSE_NEVER}).ok());
  // It begins anew.
  EXPECT_TRUE(sequence.blocks().empty());
  EXPECT_EQ(sequence.tokens(), 0u);
  EXPECT_EQ(sequence.last_key(), root);
  Generate(&sequence, 3);
  EXPECT_EQ(sequence.tokens(), 3u);
  const absl::StatusOr<std::optional<PendingSeal>> sealed = sequence.Seal();
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_FALSE(sealed->has_value()) << "no block of what was released";
  ASSERT_TRUE(session_->Flush(Soon()).ok());
  EXPECT_EQ(session_->counters().refused, 0u);
}

TEST_F(ScoringTest, AnEpisodeHoldsItsBlocksUntilAQuestionFindsThem) {
  BlockRef kept;
  {
    absl::StatusOr<Blocks> blocks = session_->LeaseWithin(2, Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    kept = (*blocks)[1];
    std::memset(session_->data(kept), 42, 8);
    v1::PutEpisode put;
    put.set_name("travel");
    for (const float x : {0.0f, 1.0f}) put.add_centroid(x);
    v1::Sequence* sequence = put.add_sequences();
    for (const BlockRef block : blocks->refs()) sequence->add_blocks(block.Pack());
    sequence->set_last_block_tokens(3);
    auto pending = session_->PutEpisode(put);
    ASSERT_TRUE(pending.ok()) << pending.status();
    const auto answer = pending->Wait(Soon());
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->episodes(), 1);
  }  // The engine's own holds go.
  v1::ChooseEpisode question;
  for (const float x : {0.3f, 1.0f}) question.add_embedding(x);
  for (int round = 0; round < 2; ++round) {
    auto pending = session_->ChooseEpisode(question);
    ASSERT_TRUE(pending.ok()) << pending.status();
    if (round == 0) continue;  // Nobody waits: what was held goes back.
    const absl::StatusOr<EpisodeHit> hit = pending->Wait(Soon());
    ASSERT_TRUE(hit.ok()) << hit.status();
    EXPECT_EQ(hit->name, "travel");
    ASSERT_EQ(hit->tables.size(), 1u);
    ASSERT_EQ(hit->tables[0].blocks.size(), 2u);
    EXPECT_EQ(hit->tables[0].last_block_tokens, 3u);
    EXPECT_TRUE(hit->tables[0].blocks[1] == kept);
    EXPECT_EQ(static_cast<int>(session_->data(kept)[0]), 42);
  }
}

}  // namespace
}  // namespace kvpool
