// The host's blocked attention of a query window against the definition that GPUs run (window.h), on
// one lane.
#include "cuda/scorers/parts/window.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/host/host_kernels.h"
#include "cuda/scorers/host/host_logit_tile.h"
#include "cuda/scorers/host/host_window.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

struct Defined {
  const HostTeam& team;
  const ScoreContext& context;
  uint32_t plane;
  template <KvDtype dtype>
  void Run() const {
    LoadQueries(team, context, plane);
    WindowLse<HostLogitTile<dtype>>(team, context, plane);
    WindowStatistics<HostLogitTile<dtype>>(team, context, plane);
  }
};

// A context with memory of its own.
class Window {
 public:
  Window(const KvView& kv, const Signals& signals) : signals_(signals) {
    const ScorePlan plan = *PlanScore({.policy = *BindPolicy("cake", {}), .shape = kv.shape}, signals_, 1);
    const uint32_t planes = kv.shape.planes();
    memory_.resize(WorkspaceBytes(plan, planes) + 64);
    void* start = memory_.data();
    size_t space = memory_.size();
    std::align(64, WorkspaceBytes(plan, planes), start, space);
    context_ = LayOut(plan, {.kv = kv, .signals = signals_}, reinterpret_cast<uint64_t>(start), planes);
  }
  const ScoreContext& context() const { return context_; }

 private:
  Signals signals_;
  std::vector<std::byte> memory_;
  ScoreContext context_;
};

void ExpectAlike(const float* actual, const float* expected, uint64_t count, double tolerance,
                 const std::string& what) {
  for (uint64_t i = 0; i < count; ++i) {
    if (std::isnan(expected[i])) {
      ASSERT_TRUE(std::isnan(actual[i])) << what << " " << i;
    } else {
      ASSERT_NEAR(actual[i], expected[i], tolerance + 2e-5 * std::abs(expected[i])) << what << " " << i;
    }
  }
}

struct Case {
  uint32_t queries, group;
  KvDtype dtype = KvDtype::kF32;
  Arrangement arrangement = Arrangement::kTokenHeadDim;
  bool nan = false;
  bool behind = false;
};

void Check(const Case& test) {
  const Sequence sequence(
      {.tokens = 91, .k_dim = 20, .dtype = test.dtype, .arrangement = test.arrangement},
      [&, random = std::make_shared<Random>(5)](bool, uint32_t, uint32_t t, uint32_t h, uint32_t d) {
        return test.nan && (t == 40 || t == 90) && h == 1 && d == 3 ? NAN : random->Normal() * 2;
      });
  const KvShape& shape = sequence.kv().shape;
  const uint32_t q_heads = shape.kv_heads * test.group, dim = shape.k_head_dim;
  std::vector<float> queries(uint64_t{shape.layers} * test.queries * q_heads * dim);
  Random random(6);
  for (float& x : queries) x = static_cast<float>(random.Normal());
  Signals signals;
  signals.window = {.data = queries.data(),
                    .queries = test.queries,
                    .q_heads = q_heads,
                    .layer_stride_bytes = uint64_t{test.queries} * q_heads * dim * 4,
                    .query_stride_bytes = uint64_t{q_heads} * dim * 4,
                    .head_stride_bytes = uint64_t{dim} * 4,
                    .behind = test.behind};
  const Window expected(sequence.kv(), signals), actual(sequence.kv(), signals);
  const ScoreContext &e = expected.context(), &a = actual.context();
  std::vector<float> scratch(WindowScratchFloats(shape) + 16);
  float* const aligned = scratch.data() + (16 - reinterpret_cast<uint64_t>(scratch.data()) / 4 % 16) % 16;
  for (const HostRows* rows : RunnableHostRows()) {
    const HostTeam team(*rows);
    const std::string what = absl::StrCat(rows->name, " ", test.queries, "x", test.group);
    for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
      WithDtype(test.dtype, Defined{team, e, plane});
      LoadQueries(team, a, plane);
      AttendPlane(team, a, plane, aligned);
      ASSERT_NEAR(a.spreads[plane].entropy, e.spreads[plane].entropy, 1e-4 * e.spreads[plane].entropy + 1e-6)
          << what;
      ASSERT_NEAR(a.spreads[plane].variance, e.spreads[plane].variance,
                  1e-4 * e.spreads[plane].variance + 1e-9)
          << what;
      ASSERT_NEAR(a.spreads[plane].density, e.spreads[plane].density, 1e-4 * e.spreads[plane].density + 1e-12)
          << what;
    }
    const uint64_t floats = uint64_t{shape.planes()} * shape.tokens;
    ExpectAlike(a.lse, e.lse, uint64_t{shape.planes()} * test.group * test.queries, 1e-5, what + " lse");
    ExpectAlike(a.window_mean, e.window_mean, floats, 1e-8, what + " mean");
    ExpectAlike(a.window_variance, e.window_variance, floats, 1e-8, what + " variance");
    ExpectAlike(a.window_peak, e.window_peak, floats, 1e-8, what + " peak");
    ExpectAlike(a.window_latest, e.window_latest, floats, 1e-8, what + " latest");
  }
}

TEST(WindowTest, QueriesAndGroupsOfAllSizes) {
  for (const uint32_t queries : {1u, 2u, 5u, 16u, 31u, 33u, 64u, 91u}) {
    for (const uint32_t group : {1u, 3u, 8u}) Check({.queries = queries, .group = group});
  }
}

TEST(WindowTest, QueriesOfAPromptThatIsNotInTheSequence) {
  for (const uint32_t queries : {1u, 7u, 64u, 200u}) Check({.queries = queries, .group = 2, .behind = true});
}

TEST(WindowTest, TypesAndLayouts) {
  for (const KvDtype dtype :
       {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3, KvDtype::kFp8E5m2}) {
    for (const Arrangement arrangement : {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                          Arrangement::kColumnMajorKeys, Arrangement::kScattered}) {
      Check({.queries = 9, .group = 2, .dtype = dtype, .arrangement = arrangement});
    }
  }
}

TEST(WindowTest, KeysThatAreNoNumbersTakeNoPart) {
  for (const uint32_t queries : {1u, 7u, 64u}) Check({.queries = queries, .group = 2, .nan = true});
}

}  // namespace
}  // namespace kvpool::scorers
