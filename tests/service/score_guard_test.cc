// The quality guard: what it measures of Prune and Compact, that it turns a policy off which moves outputs too far, and that nothing else
// changes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "proto/support/status_macros.h"
#include "server/daemon/snapshot.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

v1::Signals* SignalsOf(v1::Operation* operation) {
  return operation->has_prune() ? operation->mutable_prune()->mutable_signals()
                                : operation->mutable_compact()->mutable_signals();
}
std::vector<uint64_t> BlocksOf(const v1::Operation& prune) {
  return {prune.prune().sequence().blocks().begin(), prune.prune().sequence().blocks().end()};
}
void SetPolicy(v1::Operation* operation, const std::string& name) {
  v1::Policy* const policy = operation->has_prune() ? operation->mutable_prune()->mutable_policy()
                                                    : operation->mutable_compact()->mutable_policy();
  policy->set_name(name);
}

class ScoreGuardTest : public ScoreTest {
 protected:
  void SetUp() override { Restart({.share = 1, .bound = 0.3, .samples = 3}); }
  void Restart(const GuardOptions& guard) {
    engine_.reset();
    daemon_.reset();
    hold_.Forget();
    options_.guard = guard;
    StartScoring(2);
    engine_ = OpenScored();
  }

  // One query head's queries are all `x` in each dim, in all layers.
  static void AddWindow(v1::Operation* operation, float x = 1) {
    AddWindow(operation, std::vector<float>(kLayers * kQueries * kQueryHeads * kDim, x));
  }
  static void AddWindow(v1::Operation* operation, const std::vector<float>& queries) {
    v1::QueryWindow* const window = SignalsOf(operation)->mutable_window();
    window->set_queries(kQueries);
    window->set_q_heads(kQueryHeads);
    window->mutable_data()->set_inlined(
        std::string(reinterpret_cast<const char*>(queries.data()), queries.size() * sizeof(float)));
  }
  // Four blocks, of which recency keeps the newest two. All attention is on the first one or on the last one.
  v1::Operation PruneBy(const std::string& policy, bool drops_attended, Engine* engine = nullptr) {
    engine = engine != nullptr ? engine : engine_.get();
    std::vector<uint64_t> blocks = LeaseWith(engine, {1, 1, 1, 1});
    const uint64_t attended = drops_attended ? blocks.front() : blocks.back();
    for (uint32_t token = 0; token < kTokens; ++token) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t head = 0; head < kHeads; ++head) {
          for (uint32_t dim = 0; dim < kDim; ++dim) {
            *Element(attended, false, layer, token, head, dim) = 10;
            *Element(attended, true, layer, token, head, dim) = 5;
          }
        }
      }
    }
    v1::Operation operation = PruneOp(blocks, 2 * kTokens);
    SetPolicy(&operation, policy);
    AddWindow(&operation);
    return operation;
  }
  // What is left of such a sequence goes back.
  void Done(const v1::OperationResult& result, Engine* engine = nullptr) {
    ASSERT_EQ(result.code(), 0) << result.message();
    (engine != nullptr ? engine : engine_.get())->Release(TableOf(result.prune()));
  }

  v1::GetGuardResponse Guard(uint64_t space = 0, const std::string& policy = "") {
    v1::GetGuardRequest request;
    request.set_space(space);
    request.set_policy(policy);
    v1::GetGuardResponse response;
    const absl::Status status = daemon_->GetGuard(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  absl::StatusOr<v1::ResetGuardResponse> Reset(const std::string& policy = "", uint64_t space = 0) {
    v1::ResetGuardRequest request;
    request.set_policy(policy);
    request.set_space(space);
    v1::ResetGuardResponse response;
    RETURN_IF_ERROR(daemon_->ResetGuard(request, &response));
    return response;
  }
  // That of the only policy.
  v1::GuardedPolicy Only() {
    const v1::GetGuardResponse guard = Guard();
    EXPECT_EQ(guard.policies_size(), 1);
    return guard.policies().empty() ? v1::GuardedPolicy() : guard.policies(0);
  }
  static uint64_t Count(const v1::GuardedPolicy& policy, const std::string& outcome) {
    const auto found = policy.operations().find(outcome);
    return found == policy.operations().end() ? 0 : found->second;
  }

  std::unique_ptr<Engine> engine_;
};

TEST_F(ScoreGuardTest, APolicyThatDropsWhatIsAttendedIsTurnedOffUntilItIsReset) {
  for (uint32_t i = 1; i <= 3; ++i) {
    Done(Run(engine_.get(), PruneBy("recency", true)));
    const v1::GuardedPolicy policy = Only();
    EXPECT_EQ(policy.policy(), "recency");
    EXPECT_EQ(policy.samples(), i);
    EXPECT_EQ(policy.off(), i == 3);
    EXPECT_NEAR(policy.mean(), 0.8, 1e-4);  // The output was 5, and is 1.
    EXPECT_NEAR(policy.greatest(), 0.8, 1e-4);
  }
  const v1::Operation refused = PruneBy("recency", true);
  const v1::OperationResult answer = Run(engine_.get(), refused);
  EXPECT_EQ(answer.code(), kFailedPrecondition);
  for (const char* part : {"policy recency is off in space 1", "newest 3 measurements", "moved by 0.8",
                           "the bound is 0.3", "kvpoolctl guard --on=recency --space=1"}) {
    EXPECT_NE(answer.message().find(part), std::string::npos) << answer.message();
  }
  v1::Operation compact = CompactOp(BlocksOf(refused), kTokens);
  SetPolicy(&compact, "recency");
  EXPECT_EQ(Run(engine_.get(), compact).code(), kFailedPrecondition);
  EXPECT_EQ(Only().refused(), 2u);

  // A dry run, another policy and the engine's own choice go on.
  v1::Operation dry = refused;
  dry.mutable_prune()->set_dry_run(true);
  EXPECT_EQ(Run(engine_.get(), dry).code(), 0);
  v1::Operation keep = CompactOp(BlocksOf(refused), 1);
  keep.mutable_compact()->mutable_keep()->add_positions(5);
  keep.mutable_compact()->set_keep_sources(true);
  const v1::OperationResult kept = Run(engine_.get(), keep);
  EXPECT_EQ(kept.code(), 0) << kept.message();
  v1::Operation other = refused;
  SetPolicy(&other, "random");
  Done(Run(engine_.get(), other));  // It finds all that was held: the refusals gave nothing back.

  const absl::StatusOr<v1::ResetGuardResponse> reset = Reset("recency", 1);
  ASSERT_TRUE(reset.ok()) << reset.status();
  ASSERT_EQ(reset->policies_size(), 1);
  EXPECT_TRUE(reset->policies(0).off());
  EXPECT_EQ(reset->policies(0).samples(), 3u);
  EXPECT_EQ(Guard(1, "recency").policies(0).samples(), 0u);
  Done(Run(engine_.get(), PruneBy("recency", true)));
  EXPECT_FALSE(Guard(1, "recency").policies(0).off());
  EXPECT_EQ(Reset("recency", 9).status().message(),
            "the guard knows of no drop by policy recency in space 9");
}

TEST_F(ScoreGuardTest, ADaemonThatStartsHasAllPoliciesOnAndMeasuresAnew) {
  for (int i = 0; i < 3; ++i) Done(Run(engine_.get(), PruneBy("recency", true)));
  EXPECT_TRUE(Only().off());
  Restart(options_.guard);
  EXPECT_EQ(Guard().policies_size(), 0);
  for (int i = 0; i < 3; ++i) Done(Run(engine_.get(), PruneBy("recency", true)));
  EXPECT_TRUE(Only().off());
}

TEST_F(ScoreGuardTest, AGoodPolicyStaysOn) {
  for (int i = 0; i < 5; ++i) Done(Run(engine_.get(), PruneBy("recency", false)));
  EXPECT_EQ(Count(Only(), "measured"), 5u);
  EXPECT_EQ(Only().samples(), 3u);
  EXPECT_LT(Only().greatest(), 1e-4);
  EXPECT_FALSE(Only().off());
}

TEST_F(ScoreGuardTest, ItIsJudgedByTheNewestSamplesAlone) {
  for (int i = 0; i < 3; ++i) Done(Run(engine_.get(), PruneBy("recency", false)));
  EXPECT_LT(Only().mean(), 1e-4);
  Done(Run(engine_.get(), PruneBy("recency", true)));
  EXPECT_NEAR(Only().mean(), 0.8 / 3, 1e-4);  // 0, 0, 0.8
  EXPECT_FALSE(Only().off());
  Done(Run(engine_.get(), PruneBy("recency", true)));
  EXPECT_TRUE(Only().off());
  EXPECT_EQ(Count(Only(), "measured"), 5u);
}

TEST_F(ScoreGuardTest, SpacesAreApartAndAClosedOneIsForgotten) {
  const auto other = OpenScored("other", "another model");
  // K and V of its blocks are zero, which is as good: what is measured there is nothing.
  const auto prune = [&] {
    v1::Operation operation = PruneOp(other->Lease(4), 2 * kTokens);
    SetPolicy(&operation, "recency");
    AddWindow(&operation);
    return operation;
  };
  for (int i = 0; i < 3; ++i) {
    Done(Run(engine_.get(), PruneBy("recency", true)));
    Done(Run(other.get(), prune()), other.get());
  }
  EXPECT_EQ(Run(engine_.get(), PruneBy("recency", true)).code(), kFailedPrecondition);
  Done(Run(other.get(), prune()), other.get());
  const v1::GetGuardResponse guard = Guard();
  ASSERT_EQ(guard.policies_size(), 2);
  EXPECT_EQ(guard.policies(0).space(), 1u);
  EXPECT_TRUE(guard.policies(0).off());
  EXPECT_EQ(guard.policies(1).space(), 2u);
  EXPECT_FALSE(guard.policies(1).off());
  EXPECT_EQ(guard.share(), 1);
  EXPECT_EQ(guard.bound(), 0.3);
  EXPECT_EQ(guard.samples(), 3u);
  EXPECT_EQ(daemon_->Snapshot().guard.at("recency").off_spaces, 1u);
  // Its counts stay, its state does not.
  engine_->Do(CloseOp());
  engine_->Die();
  clock_.Advance(options_.idle_space_ms + 1);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Guard(1).policies_size(), 0);
  const GuardTotals totals = daemon_->Snapshot().guard.at("recency");
  EXPECT_EQ(totals.off_spaces, 0u);
  EXPECT_EQ(totals.operations[static_cast<size_t>(GuardOutcome::kMeasured)], 7u);
  EXPECT_EQ(totals.refused, 1u);
}

TEST_F(ScoreGuardTest, WhatIsNotMeasuredIsCounted) {
  Restart({.share = 0.5});
  const auto with = [&](const auto& change) {
    v1::Operation operation = PruneBy("recency", true);
    change(&operation);
    const v1::OperationResult result = Run(engine_.get(), operation);
    EXPECT_EQ(result.code(), 0) << result.message();
    engine_->Release(operation.has_compact() ? TableOf(result.compact()) : TableOf(result.prune()));
  };
  const auto nothing = [](v1::Operation*) {};
  for (int i = 0; i < 5; ++i) with(nothing);
  EXPECT_EQ(Count(Only(), "measured"), 3u);  // The first, the third, the fifth.
  EXPECT_EQ(Count(Only(), "passed_over"), 2u);
  with([](v1::Operation* operation) { operation->mutable_prune()->clear_signals(); });
  EXPECT_EQ(Count(Only(), "no_window"), 1u);
  with([](v1::Operation* operation) {
    v1::Operation merge = CompactOp(BlocksOf(*operation), 2 * kTokens);
    SetPolicy(&merge, "recency");
    AddWindow(&merge);
    merge.mutable_compact()->set_disposition(v1::DISPOSITION_MERGE);
    *operation = merge;
  });
  EXPECT_EQ(Count(Only(), "unsuited"), 1u);
  // What the engine discards is not the policy's choice.
  with([](v1::Operation* operation) {
    v1::TokenRange* const discard = operation->mutable_prune()->add_discard();
    discard->set_begin(kTokens);
    discard->set_end(2 * kTokens);
  });
  EXPECT_EQ(Count(Only(), "unsuited"), 2u);
  // Where nothing leaves there is nothing to measure.
  with([](v1::Operation* operation) { operation->mutable_prune()->set_budget_tokens(100); });
  uint64_t all = 0;
  const v1::GuardedPolicy policy = Only();
  for (const auto& [outcome, count] : policy.operations()) all += count;
  EXPECT_EQ(all, 8u);
  EXPECT_FALSE(Only().off());
  EXPECT_EQ(Guard().bound(), 0);
}

TEST_F(ScoreGuardTest, AMeasurementThatFailsFailsNothingElse) {
  v1::Operation operation = PruneBy("recency", true);
  const uint64_t first = operation.prune().sequence().blocks(0);
  *Element(first, true, 0, 0, 0, 0) = std::numeric_limits<float>::quiet_NaN();
  Done(Run(engine_.get(), operation));
  EXPECT_EQ(Count(Only(), "failed"), 1u);
  EXPECT_EQ(Only().samples(), 0u);
  EXPECT_NE(Only().last_failure().find("OUT_OF_RANGE: the outputs are not finite"), std::string::npos)
      << Only().last_failure();
  // Scores of recency need less than a measurement of so many heads.
  options_.score_workspace_bytes = 2200;
  Restart(options_.guard);
  operation = PruneBy("recency", true);
  v1::QueryWindow* const window = operation.mutable_prune()->mutable_signals()->mutable_window();
  window->set_q_heads(2 * kQueryHeads);
  window->mutable_data()->mutable_inlined()->append(window->data().inlined());
  Done(Run(engine_.get(), operation));
  EXPECT_EQ(Count(Only(), "failed"), 1u);
  EXPECT_NE(Only().last_failure().find("the limit is 2200 (--score-workspace)"), std::string::npos)
      << Only().last_failure();
}

TEST_F(ScoreGuardTest, AWindowThatDoesNotFitIsRefusedWhateverThePolicy) {
  const auto refused = [&](const auto& change) {
    v1::Operation operation = PruneBy("recency", true);
    change(operation.mutable_prune()->mutable_signals()->mutable_window());
    const v1::OperationResult result = Run(engine_.get(), operation);
    EXPECT_EQ(result.code(), kInvalidArgument) << result.message();
    engine_->Release(BlocksOf(operation));  // All is held still.
    return result.message();
  };
  EXPECT_NE(refused([](v1::QueryWindow* window) {
              window->mutable_data()->mutable_inlined()->pop_back();
            }).find("window.data.inlined has 255 bytes; this sequence needs 256"),
            std::string::npos);
  refused([](v1::QueryWindow* window) {
    window->set_q_heads(3);
    window->mutable_data()->mutable_inlined()->resize(192);
  });
  refused([](v1::QueryWindow* window) {
    window->set_queries(17);
    window->mutable_data()->mutable_inlined()->resize(17 * 128);
  });
  EXPECT_EQ(Guard().policies_size(), 0);
}

// The window's queries may lie in blocks, as those of deep models do, and be newer than the sequence.
TEST_F(ScoreGuardTest, QueriesInBlocksAndBehindTheSequenceAreMeasured) {
  v1::Operation operation = PruneBy("recency", true);
  v1::QueryWindow* const window = operation.mutable_prune()->mutable_signals()->mutable_window();
  const std::string queries = window->data().inlined();
  const std::vector<uint64_t> blocks = engine_->Lease(2);
  // They begin in one block, within layer 0, and end in the next one.
  const uint64_t offset = kScoredBlockBytes - 64;
  auto* const first = reinterpret_cast<char*>(Element(blocks[0], false, 0, 0, 0, 0));
  auto* const second = reinterpret_cast<char*>(Element(blocks[1], false, 0, 0, 0, 0));
  std::copy(queries.begin(), queries.begin() + 64, first + offset);
  std::copy(queries.begin() + 64, queries.end(), second);
  window->clear_data();
  for (const uint64_t block : blocks) window->mutable_data()->add_blocks(block);
  window->mutable_data()->set_offset_bytes(offset);
  window->set_behind(true);
  Done(Run(engine_.get(), operation));
  EXPECT_NEAR(Only().mean(), 0.8, 1e-4);
}

// ---- Against the definition, on random numbers

class ScoreGuardReferenceTest : public ScoreGuardTest {
 protected:
  float Uniform() { return static_cast<float>(random_() % 2000) / 1000 - 1; }
  std::vector<uint64_t> RandomBlocks(uint32_t count) {
    const std::vector<uint64_t> blocks = engine_->Lease(count);
    for (const uint64_t ref : blocks) {
      for (const bool value : {false, true}) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
          for (uint32_t token = 0; token < kTokens; ++token) {
            for (uint32_t head = 0; head < kHeads; ++head) {
              for (uint32_t dim = 0; dim < kDim; ++dim)
                *Element(ref, value, layer, token, head, dim) = 2 * Uniform();
            }
          }
        }
      }
    }
    return blocks;
  }
  std::vector<float> RandomQueries() {
    std::vector<float> queries(kLayers * kQueries * kQueryHeads * kDim);
    for (float& x : queries) x = 3 * Uniform();
    return queries;
  }
  // Mean and greatest drift of a layer, where kept[head] stays.
  std::pair<double, double> Reference(const std::vector<uint64_t>& blocks, uint32_t tokens, uint32_t layer,
                                      const std::vector<float>& queries,
                                      const std::vector<std::set<uint32_t>>& kept) {
    double sum = 0, greatest = 0;
    for (uint32_t q_head = 0; q_head < kQueryHeads; ++q_head) {
      const uint32_t head = q_head / (kQueryHeads / kHeads);
      for (uint32_t query = 0; query < kQueries; ++query) {
        const auto output = [&](bool all) {
          std::vector<double> out(kDim);
          double weights = 0;
          for (uint32_t t = 0; t < tokens - (kQueries - 1 - query); ++t) {
            if (!all && kept[head].count(t) == 0) continue;
            double logit = 0;
            for (uint32_t dim = 0; dim < kDim; ++dim) {
              logit += queries[((layer * kQueries + query) * kQueryHeads + q_head) * kDim + dim] *
                       *Element(blocks[t / kTokens], false, layer, t % kTokens, head, dim) / 2;
            }
            weights += std::exp(logit);
            for (uint32_t dim = 0; dim < kDim; ++dim)
              out[dim] +=
                  std::exp(logit) * *Element(blocks[t / kTokens], true, layer, t % kTokens, head, dim);
          }
          for (double& x : out) x = weights > 0 ? x / weights : 0;
          return out;
        };
        const std::vector<double> whole = output(true), rest = output(false);
        double length = 0, moved = 0;
        for (uint32_t dim = 0; dim < kDim; ++dim) {
          length += whole[dim] * whole[dim];
          moved += (whole[dim] - rest[dim]) * (whole[dim] - rest[dim]);
        }
        sum += std::sqrt(moved / length);
        greatest = std::max(greatest, std::sqrt(moved / length));
      }
    }
    return {sum / (kQueryHeads * kQueries), greatest};
  }

  std::mt19937 random_{11};
};

TEST_F(ScoreGuardReferenceTest, PrunesAreMeasuredLayerByLayer) {
  Restart({.share = 1});
  for (const uint32_t layer : {0, 1, 0}) {
    const std::vector<uint64_t> blocks = RandomBlocks(5);
    const std::vector<float> queries = RandomQueries();
    v1::Operation operation = PruneOp(blocks, 2 * kTokens);
    operation.mutable_prune()->mutable_sequence()->set_last_block_tokens(3);
    AddWindow(&operation, queries);
    v1::Operation dry = operation;
    dry.mutable_prune()->set_dry_run(true);
    dry.mutable_prune()->clear_signals();  // The window has no say in what leaves.
    const v1::PruneResult expected = Prune(engine_.get(), dry);
    std::set<uint32_t> kept;
    for (uint32_t t = 0; t < 19; ++t) kept.insert(t);
    for (const uint32_t victim : expected.victims()) {
      for (uint32_t t = 0; t < kTokens; ++t) kept.erase(victim * kTokens + t);
    }
    const auto [mean, greatest] = Reference(blocks, 19, layer, queries, {kept, kept});
    const v1::PruneResult result = Prune(engine_.get(), operation);
    EXPECT_EQ(TableOf(result), TableOf(expected));
    EXPECT_NEAR(Only().mean(), mean, 1e-5) << layer;
    EXPECT_NEAR(Only().greatest(), greatest, 1e-5) << layer;
    ASSERT_TRUE(Reset().ok());
    engine_->Release(TableOf(result));
  }
}

TEST_F(ScoreGuardReferenceTest, CompactionsAreMeasuredInEachScope) {
  for (const v1::Scope scope : {v1::SCOPE_SEQUENCE, v1::SCOPE_LAYER, v1::SCOPE_HEAD}) {
    Restart({.share = 1});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<uint64_t> blocks = RandomBlocks(5);
      const std::vector<float> queries = RandomQueries();
      v1::Operation operation = CompactOp(blocks, 7);
      operation.mutable_compact()->set_scope(scope);
      operation.mutable_compact()->set_keep_sources(true);
      operation.mutable_compact()->mutable_protection();  // Nothing stays but by its score.
      AddWindow(&operation, queries);
      const v1::OperationResult result = Run(engine_.get(), operation);
      ASSERT_EQ(result.code(), 0) << result.message();
      const v1::CompactResult& compact = result.compact();
      const uint32_t rows = compact.rows(), each = compact.kept_positions_size() / rows;
      std::vector<std::set<uint32_t>> kept(kHeads);
      for (uint32_t head = 0; head < kHeads; ++head) {
        const uint32_t row = scope == v1::SCOPE_HEAD    ? layer * kHeads + head
                             : scope == v1::SCOPE_LAYER ? layer
                                                        : 0;
        for (uint32_t i = 0; i < each; ++i) kept[head].insert(compact.kept_positions(row * each + i));
      }
      const auto [mean, greatest] = Reference(blocks, 5 * kTokens, layer, queries, kept);
      EXPECT_NEAR(Only().mean(), mean, 1e-5) << v1::Scope_Name(scope) << " layer " << layer;
      EXPECT_NEAR(Only().greatest(), greatest, 1e-5) << v1::Scope_Name(scope) << " layer " << layer;
      ASSERT_TRUE(Reset().ok());
      engine_->Release(blocks);
      engine_->Release(TableOf(compact));
    }
  }
}

}  // namespace
}  // namespace kvpool
