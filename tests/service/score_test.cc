// Score, Prune, Compact and PlanBudgets: what they answer and what they release.
#include <cmath>
#include <numeric>

#include "cuda/scorers/budgets.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

std::vector<uint32_t> Victims(const v1::PruneResult& result) {
  return {result.victims().begin(), result.victims().end()};
}

TEST_F(ScoreTest, ScoresTokensAndBlocksByPagedEvictionUnlessToldOtherwise) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = engine->Lease(2);
  Write(blocks[0], {2, 4, 6, 8});
  Write(blocks[1], {1, 3, 77, 77});
  const v1::OperationResult answer = Run(engine.get(), ScoreOp(blocks, 2));
  ASSERT_EQ(answer.code(), 0) << answer.message();
  const v1::ScoreResult& result = answer.score();
  EXPECT_EQ(result.rows(), 1);
  EXPECT_EQ(result.tokens(), 6);
  EXPECT_EQ(result.blocks(), 2);
  ASSERT_EQ(result.token_scores_size(), 6);
  const float expected[] = {2, 4, 6, 8, 1, 3};
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(result.token_scores(i), expected[i], 1e-5) << i;
  EXPECT_NEAR(result.block_scores(0), 5, 1e-5);
  EXPECT_NEAR(result.block_scores(1), 2, 1e-5) << "over the tokens there are";
}

TEST_F(ScoreTest, BlockScoresJoinRecencyWhereThePolicyGoesByThem) {
  const auto left = [&](const std::string& policy, bool block_scores) {
    daemon_.reset();
    hold_.Forget();
    options_.policy = policy;
    StartScoring(1);
    const auto engine = OpenScored();
    const Refs blocks = LeaseWith(engine.get(), {5, 1, 3});
    const std::vector<std::string> keys = Keys("k", 3);
    for (int i = 0; i < 3; ++i) engine->Seal({blocks[i]}, {keys[i]});
    v1::Operation operation = ScoreOp(blocks);
    operation.mutable_score()->set_block_scores(block_scores);
    EXPECT_EQ(Run(engine.get(), operation).code(), 0);
    for (const uint64_t block : blocks) engine->Release({block});
    engine->Lease(kScoredSlabBlocks - 2 - 2);  // All but the null block, the sink, and two of the three.
    Refs there;
    for (int i = 0; i < 3; ++i) {
      if (engine->Match({keys[i]}).tokens() == 0) there.push_back(i);
    }
    return there;
  };
  EXPECT_EQ(left("score_weighted", true), Refs{1}) << "the block of the least score";
  EXPECT_EQ(left("score_weighted", false), Refs{0}) << "the one used longest ago";
  EXPECT_EQ(left("lru", true), Refs{0});
}

TEST_F(ScoreTest, RowsAreLayersOrPlanesIfAsked) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1});
  for (uint32_t dim = 0; dim < kDim; ++dim) *Element(blocks[0], true, 1, 2, 1, dim) = 9;
  v1::Operation operation = ScoreOp(blocks);
  operation.mutable_score()->set_scope(v1::SCOPE_HEAD);
  const v1::ScoreResult result = Run(engine.get(), operation).score();
  ASSERT_EQ(result.token_scores_size(), 16);
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(result.token_scores(i), i == 3 * 4 + 2 ? 9 : 1, 1e-5) << i;
  operation.mutable_score()->set_scope(v1::SCOPE_LAYER);
  operation.mutable_score()->mutable_reductions()->set_over_heads(v1::PLANE_REDUCTION_MAX);
  operation.mutable_score()->mutable_reductions()->set_over_tokens(v1::TOKEN_REDUCTION_MAX);
  const v1::ScoreResult layers = Run(engine.get(), operation).score();
  ASSERT_EQ(layers.block_scores_size(), 2);
  EXPECT_NEAR(layers.block_scores(0), 1, 1e-5);
  EXPECT_NEAR(layers.block_scores(1), 9, 1e-5);
}

TEST_F(ScoreTest, PruneReleasesTheLowestBlocksButTheFirstAndTheNewest) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 5, 2, 3, 1});
  const v1::PruneResult result = Prune(engine.get(), PruneOp(blocks, 3 * kTokens));
  EXPECT_EQ(Victims(result), (std::vector<uint32_t>{2, 3}));
  EXPECT_EQ(TableOf(result), (Refs{blocks[0], blocks[1], blocks[4]}));
  EXPECT_EQ(result.kept_tokens(), 3 * kTokens);
  EXPECT_EQ(result.released(), 2);
  EXPECT_EQ(result.kept_digest().size(), 32);
  EXPECT_EQ(Blocks().leased(), 4) << "three and the sink";
  EXPECT_EQ(engine->Release({blocks[2]}).refused_size(), 1) << "it is released";
}

TEST_F(ScoreTest, ADryRunReleasesNothing) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 5, 2, 3, 1});
  v1::Operation operation = PruneOp(blocks, 3 * kTokens);
  operation.mutable_prune()->set_dry_run(true);
  const v1::PruneResult result = Prune(engine.get(), operation);
  EXPECT_EQ(Victims(result), (std::vector<uint32_t>{2, 3}));
  EXPECT_EQ(result.released(), 0);
  EXPECT_EQ(Blocks().leased(), 6);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
}

// Decoding: a call when the newest block has just filled.
TEST_F(ScoreTest, AtSteadyStateOneBlockLeavesPerBlockOfTokens) {
  StartScoring(1);
  const auto engine = OpenScored();
  constexpr uint32_t kBudget = 4 * kTokens;
  Refs table;
  for (int step = 0; step < 20; ++step) {
    const Refs newest = LeaseWith(engine.get(), {static_cast<float>((step * 7) % 11 + 1)});
    table.push_back(newest[0]);
    EXPECT_LE(table.size() * kTokens, kBudget + kTokens);
    // While it fills, nothing goes.
    v1::Operation partial = PruneOp(table, kBudget);
    partial.mutable_prune()->mutable_sequence()->set_last_block_tokens(kTokens - 1);
    EXPECT_EQ(Prune(engine.get(), partial).victims_size(), 0);
    const v1::PruneResult result = Prune(engine.get(), PruneOp(table, kBudget));
    EXPECT_EQ(result.victims_size(), step < 4 ? 0 : 1);
    if (step > 4) {
      EXPECT_EQ(result.blocks_read(), 1) << "features of the others are kept";
    }
    table = TableOf(result);
    EXPECT_LE(result.kept_tokens(), kBudget);
    EXPECT_EQ(Blocks().leased(), table.size() + 1);
  }
}

TEST_F(ScoreTest, FeaturesAreReadAnewIfAskedAndForANewLifeOfABlock) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2});
  EXPECT_EQ(Run(engine.get(), ScoreOp(blocks)).score().blocks_read(), 2);
  EXPECT_EQ(Run(engine.get(), ScoreOp(blocks)).score().blocks_read(), 0);
  EXPECT_EQ(Run(engine.get(), ScoreOp(blocks, 2)).score().blocks_read(), 1) << "its features are not whole";
  Write(blocks[0], {8, 8, 8, 8});
  v1::Operation fresh = ScoreOp(blocks);
  fresh.mutable_score()->mutable_sequence()->set_fresh(true);
  const v1::ScoreResult anew = Run(engine.get(), fresh).score();
  EXPECT_EQ(anew.blocks_read(), 2);
  EXPECT_NEAR(anew.block_scores(0), 8, 1e-5);
  EXPECT_NEAR(Run(engine.get(), ScoreOp(blocks)).score().block_scores(0), 8, 1e-5);
  engine->Release(blocks);
  const Refs again = LeaseWith(engine.get(), {5, 6});
  const v1::ScoreResult next_life = Run(engine.get(), ScoreOp(again)).score();
  EXPECT_EQ(next_life.blocks_read(), 2);
  EXPECT_NEAR(next_life.block_scores(0), 5, 1e-5);
}

TEST_F(ScoreTest, WhereNoFeaturesCanBeKeptScoresAreTheSame) {
  options_.score_features_bytes = 0;
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {3, 2, 7});
  for (int round = 0; round < 2; ++round) {
    const v1::ScoreResult result = Run(engine.get(), ScoreOp(blocks)).score();
    EXPECT_EQ(result.blocks_read(), 3);
    EXPECT_NEAR(result.block_scores(2), 7, 1e-5);
  }
}

TEST_F(ScoreTest, ASharedBlockOnlyLosesThisReference) {
  StartScoring(1);
  const auto engine = OpenScored("one");
  const auto other = OpenScored("other");
  Refs blocks = LeaseWith(engine.get(), {5, 1, 2});
  engine->Seal({blocks[0], blocks[1]}, {Key("a"), Key("b")});
  const v1::MatchResult match = other->Match({Key("a"), Key("b")});
  ASSERT_EQ(match.tokens(), 2 * kTokens);
  const v1::PruneResult result = Prune(engine.get(), PruneOp(blocks, 2 * kTokens));
  EXPECT_EQ(Victims(result), (std::vector<uint32_t>{1}));
  EXPECT_EQ(Blocks().sealed(), 2) << "the other session reads it";
  EXPECT_EQ(engine->Release({blocks[1]}).refused_size(), 1);
  EXPECT_EQ(other->Release({match.groups(0).blocks(1)}).refused_size(), 0);
  EXPECT_EQ(ValueAt(blocks[1], 0), 1);
}

TEST_F(ScoreTest, ForkedSequencesLoseOneHoldEach) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {5, 1, 2});
  engine->Do(RefOp(blocks));
  EXPECT_EQ(Prune(engine.get(), PruneOp(blocks, 2 * kTokens)).released(), 1);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0) << "the fork's holds are its own";
}

TEST_F(ScoreTest, ProtectionCanBeOverriddenAndAdded) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 5, 2, 3, 1});
  v1::Operation operation = PruneOp(blocks, 3 * kTokens);
  operation.mutable_prune()->set_dry_run(true);
  operation.mutable_prune()->mutable_protection();
  EXPECT_EQ(Victims(Prune(engine.get(), operation)), (std::vector<uint32_t>{0, 4})) << "nothing is protected";
  v1::TokenRange* range = operation.mutable_prune()->add_protect();
  range->set_begin(3);
  range->set_end(4);
  EXPECT_EQ(Victims(Prune(engine.get(), operation)), (std::vector<uint32_t>{2, 4}))
      << "of block 0 one token is";
  operation.mutable_prune()->clear_protection();
  operation.mutable_prune()->clear_protect();
  (*operation.mutable_prune()->mutable_policy()->mutable_params())["paper_literal"] = "true";
  EXPECT_EQ(Victims(Prune(engine.get(), operation)), (std::vector<uint32_t>{0, 4}));
}

TEST_F(ScoreTest, CompactGathersTheHighestTokensInOrder) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = engine->Lease(3);
  Write(blocks[0], {9, 8, 9, 8});
  Write(blocks[1], {1, 7, 1, 6});
  Write(blocks[2], {1, 5, 4, 1});
  v1::Operation operation = CompactOp(blocks, 8);
  operation.mutable_compact()->mutable_protection();
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  const v1::CompactResult& result = answer.compact();
  const Refs table = TableOf(result);
  ASSERT_EQ(table.size(), 2);
  EXPECT_EQ(table[0], blocks[0]) << "it keeps all of its tokens";
  EXPECT_EQ(result.moved_from_block(), 1);
  EXPECT_EQ(result.last_block_tokens(), 4);
  const uint32_t kept[] = {0, 1, 2, 3, 5, 7, 9, 10};
  ASSERT_EQ(result.kept_positions_size(), 8);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(result.kept_positions(i), kept[i]);
  const float moved[] = {7, 6, 5, 4};
  for (uint32_t token = 0; token < 4; ++token) EXPECT_EQ(ValueAt(table[1], token, 1, 1), moved[token]);
  EXPECT_EQ(result.released(), 2);
  EXPECT_EQ(Blocks().leased(), 3) << "two and the sink";
  EXPECT_EQ(engine->Release(table).refused_size(), 0);
}

TEST_F(ScoreTest, CompactKeepsOtherTokensInEachLayerIfAsked) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 1});
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint32_t dim = 0; dim < kDim; ++dim) {
      *Element(blocks[0], true, 0, 1, head, dim) = 11;
      *Element(blocks[1], true, 1, 2, head, dim) = 12;
    }
  }
  v1::Operation operation = CompactOp(blocks, 1);
  operation.mutable_compact()->mutable_protection();
  operation.mutable_compact()->set_scope(v1::SCOPE_LAYER);
  const v1::CompactResult result = Run(engine.get(), operation).compact();
  ASSERT_EQ(result.table_size(), 1);
  EXPECT_EQ(result.rows(), kLayers);
  EXPECT_EQ(result.last_block_tokens(), 1);
  EXPECT_EQ(result.kept_positions(0), 1);
  EXPECT_EQ(result.kept_positions(1), 6);
  EXPECT_EQ(ValueAt(result.table(0), 0, 0), 11);
  EXPECT_EQ(ValueAt(result.table(0), 0, 1), 12);
}

TEST_F(ScoreTest, CompactTakesTheEnginesOwnChoiceAndMayLeaveTheSources) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = engine->Lease(2);
  Write(blocks[0], {1, 2, 3, 4});
  Write(blocks[1], {5, 6, 7, 8});
  v1::Operation operation = CompactOp(blocks, 1);
  for (const uint32_t position : {2, 5, 7})
    operation.mutable_compact()->mutable_keep()->add_positions(position);
  operation.mutable_compact()->set_keep_sources(true);
  const v1::CompactResult result = Run(engine.get(), operation).compact();
  ASSERT_EQ(result.table_size(), 1);
  EXPECT_EQ(result.last_block_tokens(), 3);
  EXPECT_EQ(ValueAt(result.table(0), 0), 3);
  EXPECT_EQ(ValueAt(result.table(0), 1), 6);
  EXPECT_EQ(ValueAt(result.table(0), 2), 8);
  EXPECT_EQ(result.released(), 0);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
}

TEST_F(ScoreTest, ACompactLeasesOnlyWhatTheEnginesChoiceMoves) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), std::vector<float>(kScoredSlabBlocks - 3, 2));
  Write(blocks[4], {1, 2, 3, 4});
  v1::Operation operation = CompactOp({blocks.begin(), blocks.begin() + 5}, 1);
  v1::KeptTokens* keep = operation.mutable_compact()->mutable_keep();
  for (uint32_t token = 0; token < 5 * kTokens; ++token) {
    if (token != 4 * kTokens) keep->add_positions(token);
  }
  const v1::OperationResult answer = Run(engine.get(), operation);  // One block is free.
  ASSERT_EQ(answer.code(), 0) << answer.message();
  EXPECT_EQ(answer.compact().moved_from_block(), 4);
  EXPECT_EQ(answer.compact().last_block_tokens(), 3);
  EXPECT_EQ(ValueAt(answer.compact().table(4), 2), 4);
  EXPECT_EQ(answer.compact().released(), 1);

  // A whole block less at the end needs none.
  operation = CompactOp(TableOf(answer.compact()), 1);
  operation.mutable_compact()->mutable_sequence()->set_last_block_tokens(3);
  keep = operation.mutable_compact()->mutable_keep();
  for (uint32_t token = 0; token < 4 * kTokens; ++token) keep->add_positions(token);
  const v1::CompactResult shorter = Run(engine.get(), operation).compact();
  EXPECT_EQ(TableOf(shorter), (Refs{blocks.begin(), blocks.begin() + 4}));
  EXPECT_EQ(shorter.last_block_tokens(), kTokens);
  EXPECT_EQ(shorter.released(), 1);
  EXPECT_EQ(shorter.kept_digest().size(), 32);
}

TEST_F(ScoreTest, WithinItsBudgetASequenceStaysWhereItIs) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2});
  const v1::CompactResult result = Run(engine.get(), CompactOp(blocks, 100)).compact();
  EXPECT_EQ(TableOf(result), blocks);
  EXPECT_EQ(result.moved_from_block(), 2);
  EXPECT_EQ(result.kept_digest(), "") << "its keys are still right";
  EXPECT_EQ(Blocks().leased(), 3);
}

// Keys are all the same, so the oldest token that stays is the nearest of all.
TEST_F(ScoreTest, ACompactMergesWhatLeavesAndItsSourcesKeepTheirBytes) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = engine->Lease(3);
  Write(blocks[0], {1, 2, 3, 4});
  Write(blocks[1], {5, 6, 7, 8});
  Write(blocks[2], {9, 9, 9, 9});
  engine->Seal({blocks[0], blocks[1]}, {Key("a"), Key("b")});
  const auto bytes_of = [&](uint64_t ref) {
    const float* const at = Element(ref, false, 0, 0, 0, 0);
    return std::vector<float>(at, at + kScoredBlockBytes / sizeof(float));
  };
  const std::vector<float> before[] = {bytes_of(blocks[0]), bytes_of(blocks[1]), bytes_of(blocks[2])};
  v1::Operation operation = CompactOp({blocks.begin(), blocks.begin() + 2}, 1);
  for (const uint32_t position : {0, 1, 2, 3, 7})
    operation.mutable_compact()->mutable_keep()->add_positions(position);
  const v1::Operation dropping = operation;
  v1::Compact* const compact = operation.mutable_compact();
  compact->set_disposition(v1::DISPOSITION_MERGE);
  compact->set_keep_sources(true);
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  const v1::CompactResult& result = answer.compact();
  const Refs table = TableOf(result);
  ASSERT_EQ(table.size(), 2);
  EXPECT_EQ(result.moved_from_block(), 0);
  EXPECT_EQ(result.merged_tokens(), 3 * kLayers * kHeads);
  ASSERT_EQ(result.merge_thresholds_size(), kLayers * kHeads);
  for (const float threshold : result.merge_thresholds()) EXPECT_EQ(threshold, 1);
  EXPECT_NEAR(ValueAt(table[0], 0, 1, 1), (1 + 5 + 6 + 7) / 4.0, 1e-5);
  for (uint32_t token = 1; token < 4; ++token) EXPECT_EQ(ValueAt(table[0], token, 1, 1), token + 1);
  EXPECT_EQ(ValueAt(table[1], 0), 8);
  for (uint32_t block = 0; block < 3; ++block) EXPECT_EQ(bytes_of(blocks[block]), before[block]);

  // With one threshold for all planes that nothing reaches nothing is merged.
  compact->mutable_merge()->add_thresholds(1.5);
  const v1::CompactResult dropped = Run(engine.get(), operation).compact();
  EXPECT_EQ(dropped.merged_tokens(), 0);
  EXPECT_EQ(dropped.merge_thresholds(3), 1.5f);
  EXPECT_EQ(ValueAt(dropped.table(0), 0), 1);
  EXPECT_NE(dropped.kept_digest(), result.kept_digest()) << "K and V are others";
  // Half of the mean, 1, and half of what was given.
  compact->mutable_merge()->set_smoothing(0.5);
  EXPECT_EQ(Run(engine.get(), operation).compact().merge_thresholds(0), 1.25f);

  // A leading block that keeps all its tokens is moved too, since a token may be merged into them; dropping leaves it.
  compact->set_keep_sources(false);
  compact->clear_merge();
  const v1::CompactResult released = Run(engine.get(), operation).compact();
  EXPECT_EQ(released.released(), 2);
  EXPECT_EQ(released.moved_from_block(), 0);
  EXPECT_EQ(bytes_of(blocks[0]), before[0]);
  EXPECT_NE(released.kept_digest(), dropped.kept_digest());
}

TEST_F(ScoreTest, AMergeWithinItsBudgetOrAfterADeviceErrorLeavesAllAsItWas) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2, 3});
  v1::Operation operation = CompactOp(blocks, 100);
  operation.mutable_compact()->set_disposition(v1::DISPOSITION_MERGE);
  const v1::CompactResult result = Run(engine.get(), operation).compact();
  EXPECT_EQ(TableOf(result), blocks);
  EXPECT_EQ(result.merge_thresholds_size(), 0);
  EXPECT_EQ(result.kept_digest(), "");
  operation.mutable_compact()->mutable_keep()->add_positions(5);
  hold_.FailWith(absl::InternalError("the kernel did not start"));
  EXPECT_EQ(Run(engine.get(), operation).code(), static_cast<int>(absl::StatusCode::kInternal));
  EXPECT_EQ(Blocks().leased(), 4);
  hold_.FailWith(absl::OkStatus());
  EXPECT_EQ(Run(engine.get(), operation).compact().merged_tokens(), 11 * kLayers * kHeads);
}

// Keys are all 1, and so are the weights but the last: psi is 2 gelu(gelu(4)) for every token.
TEST_F(ScoreTest, ACompactAddsWhatLeavesToAState) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = engine->Lease(3), states = engine->Lease(2);
  Write(blocks[0], {1, 2, 3, 4});
  Write(blocks[1], {5, 6, 7, 8});
  Write(blocks[2], {9, 10, 11, 12});
  const auto gelu = [](double x) { return x / 2 * (1 + std::erf(x / std::sqrt(2.0))); };
  const double psi = 2 * gelu(gelu(4));
  const auto state_of = [&](uint64_t ref, uint32_t plane) {
    const float* const at = Element(ref, false, 0, 0, 0, 0) + 2 + plane * (kDim + 1);
    return std::vector<float>(at, at + kDim + 1);
  };
  const auto expect_state = [&](uint64_t ref, double values, double tokens) {
    for (uint32_t plane = 0; plane < kLayers * kHeads; ++plane) {
      const std::vector<float> state = state_of(ref, plane);
      for (uint32_t dim = 0; dim < kDim; ++dim) EXPECT_NEAR(state[dim], psi * values, 1e-5 * psi * values);
      EXPECT_NEAR(state[kDim], psi * tokens, 1e-5 * psi * tokens);
    }
  };
  v1::Operation operation = CompactOp(blocks, 1);
  v1::Compact* const compact = operation.mutable_compact();
  const auto keep = [&](const std::vector<uint32_t>& positions) {
    compact->mutable_keep()->mutable_positions()->Assign(positions.begin(), positions.end());
  };
  keep({0, 1, 2, 3, 7});
  compact->set_keep_sources(true);
  compact->set_disposition(v1::DISPOSITION_LESS);
  v1::LessTerms* const terms = compact->mutable_less();
  terms->set_rank(1);
  terms->set_hidden(1);
  terms->set_weights_name("ones");
  std::vector<float> weights;
  for (uint32_t plane = 0; plane < kLayers * kHeads; ++plane)
    weights.insert(weights.end(), {1, 1, 1, 1, 1, -2});
  terms->mutable_weights()->set_inlined(weights.data(), weights.size() * sizeof(float));
  terms->mutable_state()->add_blocks(states[0]);
  terms->mutable_state()->set_offset_bytes(8);
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  EXPECT_EQ(answer.compact().folded_tokens(), 7 * kLayers * kHeads);
  EXPECT_EQ(ValueAt(answer.compact().table(1), 0), 8);
  expect_state(states[0], 5 + 6 + 7 + 9 + 10 + 11 + 12, 7);
  v1::Operation dropping = operation;
  dropping.mutable_compact()->set_disposition(v1::DISPOSITION_DROP);
  dropping.mutable_compact()->clear_less();
  EXPECT_NE(Run(engine.get(), dropping).compact().kept_digest(), answer.compact().kept_digest());
  terms->set_weights_name("others");
  const v1::CompactResult renamed = Run(engine.get(), operation).compact();
  EXPECT_NE(renamed.kept_digest(), answer.compact().kept_digest());

  // Nothing moves, and what leaves is added to the state before, which keeps its bytes.
  compact->set_keep_sources(false);
  keep({0, 1, 2, 3, 4, 5, 6, 7});
  terms->mutable_previous()->add_blocks(states[0]);
  terms->mutable_previous()->set_offset_bytes(8);
  terms->mutable_state()->set_blocks(0, states[1]);
  const v1::CompactResult settled = Run(engine.get(), operation).compact();
  EXPECT_EQ(settled.moved_from_block(), 2);
  EXPECT_EQ(settled.folded_tokens(), 4 * kLayers * kHeads);
  expect_state(states[1], 60 + 42, 7 + 4);
  expect_state(states[0], 60, 7);

  // Where nothing leaves the state is copied.
  *Element(states[1], false, 0, 0, 0, 0) = -1;
  compact->mutable_sequence()->mutable_blocks()->Truncate(2);
  const v1::CompactResult none = Run(engine.get(), operation).compact();
  EXPECT_EQ(none.folded_tokens(), 0);
  EXPECT_EQ(none.kept_digest(), "");
  expect_state(states[1], 60, 7);
}

TEST_F(ScoreTest, AStateThatCannotBeWrittenLeavesAllAsItWas) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2, 3}), state = engine->Lease(1);
  v1::Operation operation = CompactOp(blocks, 4);
  v1::Compact* const compact = operation.mutable_compact();
  compact->mutable_protection();
  compact->set_disposition(v1::DISPOSITION_LESS);
  v1::LessTerms* const terms = compact->mutable_less();
  terms->set_rank(1);
  terms->set_hidden(1);
  terms->set_weights_name("none");
  terms->mutable_weights()->set_inlined(std::string(kLayers * kHeads * (kDim + 2) * sizeof(float), 0));
  terms->mutable_state()->add_blocks(state[0]);
  hold_.FailWith(absl::InternalError("the kernel did not start"));
  EXPECT_EQ(Run(engine.get(), operation).code(), static_cast<int>(absl::StatusCode::kInternal));
  EXPECT_EQ(Blocks().leased(), 5);
  hold_.FailWith(absl::OkStatus());
  const v1::OperationResult answer = Run(engine.get(), operation);
  EXPECT_EQ(answer.code(), 0) << answer.message();
  EXPECT_EQ(answer.compact().folded_tokens(), 8 * kLayers * kHeads);
  EXPECT_EQ(engine->Release(state).refused_size(), 0);
}

TEST_F(ScoreTest, ACompactWhoseDestinationsFallShortChangesNothing) {
  StartScoring(1);
  const auto engine = OpenScored();
  std::vector<float> values(kScoredSlabBlocks - 3, 1);  // All but the null block, the sink and one.
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Refs blocks = LeaseWith(engine.get(), values);
  const v1::OperationResult answer = Run(engine.get(), CompactOp(blocks, 4 * kTokens));
  EXPECT_EQ(answer.code(), kResourceExhausted);
  EXPECT_NE(answer.message().find("4 blocks to be leased"), std::string::npos) << answer.message();
  EXPECT_NE(answer.message().find("1 free"), std::string::npos) << answer.message();
  EXPECT_EQ(Blocks().free(), 1);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
}

TEST_F(ScoreTest, ADeviceErrorGivesDestinationsBack) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2, 3});
  hold_.FailWith(absl::InternalError("the kernel did not start"));
  EXPECT_EQ(Run(engine.get(), CompactOp(blocks, kTokens)).code(),
            static_cast<int>(absl::StatusCode::kInternal));
  EXPECT_EQ(Run(engine.get(), PruneOp(blocks, 2 * kTokens)).code(),
            static_cast<int>(absl::StatusCode::kInternal));
  EXPECT_EQ(Blocks().leased(), 4);
  hold_.FailWith(absl::OkStatus());
  EXPECT_EQ(Run(engine.get(), ScoreOp(blocks)).score().blocks_read(), 3) << "what was not made is not kept";
  EXPECT_EQ(Prune(engine.get(), PruneOp(blocks, 2 * kTokens)).released(), 1);
}

// ------------------------------------------------------------------------------------------------- signals

TEST_F(ScoreTest, AttentionMassIsReadInlinedAndOutOfStatisticsBlocks) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 1, 1});
  std::vector<float> mass(3 * kTokens, 1);
  for (uint32_t i = 0; i < kTokens; ++i) mass[kTokens + i] = 0.25;
  v1::Operation inlined = PruneOp(blocks, 2 * kTokens);
  inlined.mutable_prune()->set_dry_run(true);
  inlined.mutable_prune()->mutable_policy()->set_name("h2o");
  *inlined.mutable_prune()->mutable_signals()->add_signals() = InlinedSignal(v1::SIGNAL_KIND_MASS, mass);
  inlined.mutable_prune()->mutable_protection();
  EXPECT_EQ(Victims(Prune(engine.get(), inlined)), (std::vector<uint32_t>{1}));

  // The same across the border of two blocks.
  const Refs statistics = engine->Lease(2);
  const uint64_t offset = kScoredBlockBytes - 5 * sizeof(float);
  for (size_t i = 0; i < mass.size(); ++i) {
    const uint64_t at = offset / sizeof(float) + i, per_block = kScoredBlockBytes / sizeof(float);
    Element(statistics[at / per_block], false, 0, 0, 0, 0)[at % per_block] = mass[i];
  }
  v1::Operation staged = inlined;
  v1::Data* data = staged.mutable_prune()->mutable_signals()->mutable_signals(0)->mutable_data();
  data->clear_inlined();
  data->mutable_blocks()->Add(statistics.begin(), statistics.end());
  data->set_offset_bytes(offset);
  EXPECT_EQ(Victims(Prune(engine.get(), staged)), (std::vector<uint32_t>{1}));
}

TEST_F(ScoreTest, AWindowOfQueriesIsAttendedToHere) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 1});
  // Token 2 has the key that the queries look for.
  std::vector<float> queries(size_t{kLayers} * 1 * kHeads * kDim, 0);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      *Element(blocks[0], false, layer, 2, head, 0) = 6;
      queries[(layer * kHeads + head) * kDim] = 4;
    }
  }
  v1::Operation operation = ScoreOp(blocks);
  operation.mutable_score()->mutable_policy()->set_name("tova");
  v1::QueryWindow* window = operation.mutable_score()->mutable_signals()->mutable_window();
  window->set_queries(1);
  window->set_q_heads(kHeads);
  window->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  const auto& scores = answer.score().token_scores();
  EXPECT_EQ(std::max_element(scores.begin(), scores.end()) - scores.begin(), 2);
  EXPECT_NEAR(std::accumulate(scores.begin(), scores.end(), 0.0), 1, 1e-4);
}

TEST_F(ScoreTest, AMissingSignalIsNamed) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 2});
  for (const auto& [policy, needed] :
       {std::pair("h2o", "attention mass"), std::pair("snapkv", "query window"),
        std::pair("attention_gate", "keep flags")}) {
    v1::Operation operation = ScoreOp(blocks);
    operation.mutable_score()->mutable_policy()->set_name(policy);
    const v1::OperationResult answer = Run(engine.get(), operation);
    EXPECT_EQ(answer.code(), kFailedPrecondition) << policy;
    EXPECT_NE(answer.message().find(needed), std::string::npos) << answer.message();
  }
}

// ------------------------------------------------------------------------------------------------- budgets

TEST_F(ScoreTest, BudgetsArePlannedByStatisticsAtOnce) {
  StartScoring(1);
  const auto engine = OpenScored();
  v1::Operation operation;
  v1::PlanBudgets* plan = operation.mutable_plan_budgets();
  plan->set_method(v1::BUDGET_METHOD_UNIFORM);
  plan->set_layers(3);
  plan->set_tokens_per_layer(10);
  v1::OperationResult answer = engine->Do(operation);
  ASSERT_EQ(answer.plan_budgets().budget_tokens_size(), 3) << answer.message();
  EXPECT_EQ(answer.plan_budgets().budget_tokens(2), 10);

  plan->set_method(v1::BUDGET_METHOD_CAKE);
  for (const double statistic : {1.0, 1.0, 2.0, 1.0, 1.0, 1.0}) plan->add_statistics(statistic);
  answer = engine->Do(operation);
  ASSERT_EQ(answer.plan_budgets().budget_tokens_size(), 3) << answer.message();
  EXPECT_EQ(answer.plan_budgets().budget_tokens(2), 15);
  EXPECT_EQ(answer.plan_budgets().budget_tokens(0) + answer.plan_budgets().budget_tokens(1), 15);
  EXPECT_EQ(answer.plan_budgets().weights(2), 2);
}

TEST_F(ScoreTest, BudgetsArePlannedByAQueryWindow) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 1, 1});
  v1::Operation operation;
  v1::PlanBudgets* plan = operation.mutable_plan_budgets();
  plan->set_method(v1::BUDGET_METHOD_CAKE);
  plan->set_tokens_per_layer(6);
  v1::GroupSequence* group = plan->add_sequences();
  group->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  group->mutable_window()->set_queries(2);
  group->mutable_window()->set_q_heads(kHeads);
  std::vector<float> queries(size_t{kLayers} * 2 * kHeads * kDim, 0);
  // In layer 1 the two queries look elsewhere, so that its attention varies.
  for (uint32_t head = 0; head < kHeads; ++head) {
    queries[(2 * 1 + 0) * kHeads * kDim + head * kDim] = 4;
    *Element(blocks[0], false, 1, 1, head, 0) = 8;
  }
  group->mutable_window()->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  const v1::PlanBudgetsResult& result = answer.plan_budgets();
  ASSERT_EQ(result.budget_tokens_size(), static_cast<int>(kLayers));
  EXPECT_EQ(result.budget_tokens(0) + result.budget_tokens(1), 12);
  EXPECT_LT(result.budget_tokens(0), result.budget_tokens(1));
  EXPECT_GE(result.budget_tokens(0), 2) << "the window stays in every layer";
}

// Against D2O's formulas over the attention of the window, in doubles.
TEST_F(ScoreTest, D2oIsPlannedByTheDensityOfAWindowsAttention) {
  StartScoring(1);
  const auto engine = OpenScored();
  const Refs blocks = LeaseWith(engine.get(), {1, 1, 1});
  constexpr uint32_t kAll = 3 * kTokens;
  std::vector<float> queries(size_t{kLayers} * 2 * kHeads * kDim);
  std::vector<double> column_sums(size_t{kLayers} * kHeads * kAll);
  uint32_t next = 7;
  const auto random = [&next] {
    return static_cast<float>((next = next * 48271 % 2147483647) % 1000) / 500 - 1;
  };
  for (float& x : queries) x = 3 * random();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t token = 0; token < kAll; ++token) {
        for (uint32_t dim = 0; dim < kDim; ++dim) {
          *Element(blocks[token / kTokens], false, layer, token % kTokens, head, dim) = random();
        }
      }
      for (uint32_t query = 0; query < 2; ++query) {
        std::vector<double> weights(kAll);
        double sum = 0;
        for (uint32_t token = 0; token < kAll; ++token) {
          double logit = 0;
          for (uint32_t dim = 0; dim < kDim; ++dim) {
            logit += double{queries[((layer * 2 + query) * kHeads + head) * kDim + dim]} *
                     double{*Element(blocks[token / kTokens], false, layer, token % kTokens, head, dim)};
          }
          sum += weights[token] = std::exp(logit / std::sqrt(double{kDim}));
        }
        for (uint32_t token = 0; token < kAll; ++token) {
          column_sums[(layer * kHeads + head) * kAll + token] += weights[token] / sum;
        }
      }
    }
  }
  v1::Operation operation;
  v1::PlanBudgets* plan = operation.mutable_plan_budgets();
  plan->set_method(v1::BUDGET_METHOD_D2O);
  plan->set_tokens_per_layer(6);
  v1::GroupSequence* group = plan->add_sequences();
  group->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  group->mutable_window()->set_queries(2);
  group->mutable_window()->set_q_heads(kHeads);
  group->mutable_window()->set_behind(true);
  group->mutable_window()->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
  const v1::OperationResult answer = Run(engine.get(), operation);
  ASSERT_EQ(answer.code(), 0) << answer.message();
  std::vector<double> density(kLayers), ratios(kLayers);
  ASSERT_TRUE(scorers::D2oDensity(column_sums, kLayers, kHeads, absl::MakeSpan(density)).ok());
  ASSERT_TRUE(scorers::D2oRatios(density, 6.0 / kAll, absl::MakeSpan(ratios)).ok());
  EXPECT_GT(std::abs(ratios[0] - ratios[1]), 1e-3);
  const v1::PlanBudgetsResult& result = answer.plan_budgets();
  ASSERT_EQ(result.weights_size(), static_cast<int>(kLayers));
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_NEAR(result.weights(static_cast<int>(layer)), ratios[layer], 1e-5);
  }
  EXPECT_EQ(result.budget_tokens(0) + result.budget_tokens(1), 12);
}

TEST_F(ScoreTest, BadBudgetsAreRefused) {
  StartScoring(1);
  const auto engine = OpenScored();
  v1::Operation operation;
  v1::PlanBudgets* plan = operation.mutable_plan_budgets();
  plan->set_tokens_per_layer(10);
  const auto refused = [&](const std::string& part) {
    const v1::OperationResult answer = engine->Do(operation);
    EXPECT_EQ(answer.code(), kInvalidArgument) << part;
    EXPECT_NE(answer.message().find(part), std::string::npos) << answer.message();
  };
  refused("plan_budgets.method");
  plan->set_method(v1::BUDGET_METHOD_D2O);
  refused("plan_budgets.layers");
  plan->add_statistics(NAN);
  refused("finite");
  plan->set_statistics(0, 1);
  refused("sequence_tokens is missing");
  (*plan->mutable_params())["sequence_tokens"] = "many";
  refused("whole number");
  (*plan->mutable_params())["sequence_tokens"] = "100";
  EXPECT_EQ(engine->Do(operation).code(), 0);
  (*plan->mutable_params())["beta"] = "2";
  refused("no parameter of d2o");
}

}  // namespace
}  // namespace kvpool
