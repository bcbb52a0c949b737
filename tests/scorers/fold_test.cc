// Tokens that leave, added to a state of constant size, on the device that this run is about: for every type against the
// formulas in doubles.
#include "cuda/scorers/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "tests/scorers/sequence.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers {
namespace {

using lab::StagedSequence;
using testing::HasSubstr;

struct Network {
  Network(const KvShape& shape, uint32_t of_hidden, uint32_t of_features, uint64_t seed)
      : hidden(of_hidden), features(of_features) {
    Random random(seed);
    const uint64_t layers[][2] = {{shape.k_head_dim, hidden}, {hidden, features}, {features, features}};
    for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
      for (const auto& [in, out] : layers) {
        for (uint64_t i = 0; i < in * out; ++i) {
          weights.push_back(static_cast<float>(random.Normal() * std::sqrt(2.0 / in)));
        }
      }
    }
  }
  uint32_t hidden, features;
  std::vector<float> weights;  // [planes] of W1, W2, W3
};

struct Folded {
  uint64_t tokens = 0;
  std::vector<float> state;
};
Folded Fold(const Sequence& from, const Rows& rows, const Network& network,
            const std::vector<float>& before) {
  std::unique_ptr<KvCompute> host;
  KvCompute* const compute = TestOrHostCompute(&host);
  const KvShape& shape = from.kv().shape;
  const auto source = StagedSequence::Make(compute, from.kv(), {});
  EXPECT_TRUE(source.ok());
  std::vector<uint32_t> evicted;
  for (const std::vector<uint32_t>& row : rows) evicted.insert(evicted.end(), row.begin(), row.end());
  const uint64_t tokens = rows[0].size();
  FoldRequest request = {.from = source->kv(),
                         .evicted = evicted.data(),
                         .evicted_tokens = static_cast<uint32_t>(tokens),
                         .features = network.features,
                         .hidden = network.hidden};
  if (rows.size() > 1)
    request.evicted_layer_stride = rows.size() == shape.layers ? tokens : shape.kv_heads * tokens;
  if (rows.size() > shape.layers) request.evicted_head_stride = tokens;
  request.weights_head_stride = request.WeightFloats();
  request.weights_layer_stride = shape.kv_heads * request.WeightFloats();
  EXPECT_EQ(network.weights.size(), shape.planes() * request.WeightFloats());
  const size_t floats = shape.planes() * request.StateFloats();
  const size_t weight_bytes = network.weights.size() * sizeof(float);
  const size_t state_bytes = (floats * sizeof(float) + 7) / 8 * 8;
  const auto memory = compute->Allocate(weight_bytes + 8 + 2 * state_bytes);
  EXPECT_TRUE(memory.ok());
  // What the state was has no influence.
  const std::vector<float> old(state_bytes / sizeof(float), 17);
  const uint64_t state_at = (*memory)->address(), before_at = state_at + state_bytes,
                 weights_at = before_at + state_bytes;
  const auto stage = [&](const std::vector<float>& floats_of, uint64_t to) {
    const KvPiece piece = {.address = reinterpret_cast<uint64_t>(floats_of.data()),
                           .bytes = floats_of.size() * sizeof(float)};
    EXPECT_TRUE(compute->Stage({&piece, 1}, to).ok());
  };
  stage(old, state_at);
  stage(network.weights, weights_at);
  if (!before.empty()) {
    stage(before, before_at);
    request.before = reinterpret_cast<const float*>(before_at);
  }
  request.weights = reinterpret_cast<const float*>(weights_at);
  request.state = reinterpret_cast<float*>(state_at);
  EXPECT_TRUE(CheckFold(request, weight_bytes, uint64_t{1} << 30).ok());
  const auto done = compute->Fold(request);
  EXPECT_TRUE(done.ok()) << done.status();
  Folded folded{.tokens = done.value_or(0), .state = std::vector<float>(state_bytes / sizeof(float))};
  for (uint64_t at = 0; at < state_bytes; at += 8) {
    const uint64_t word = ReadWord(state_at + at);
    std::memcpy(reinterpret_cast<unsigned char*>(folded.state.data()) + at, &word, sizeof word);
  }
  folded.state.resize(floats);
  return folded;
}

// ---- The formulas in doubles

std::vector<double> Times(const std::vector<double>& x, const float* matrix, size_t out) {
  std::vector<double> y(out);
  for (size_t j = 0; j < out; ++j) {
    for (size_t i = 0; i < x.size(); ++i) y[j] += x[i] * matrix[i * out + j];
  }
  return y;
}
std::vector<double> Gelus(std::vector<double> x) {
  for (double& one : x) one = one / 2 * std::erfc(-one / std::sqrt(2.0));
  return x;
}

void ExpectFolded(const Sequence& from, const Rows& rows, const Network& network,
                  const std::vector<float>& before, const std::string& what) {
  const Folded folded = Fold(from, rows, network, before);
  const KvShape& shape = from.kv().shape;
  const uint32_t width = shape.v_head_dim + 1;
  const size_t of_plane = size_t{network.features} * width,
               of_weights = network.weights.size() / shape.planes();
  uint64_t tokens = 0;
  for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
    const uint32_t layer = plane / shape.kv_heads, head = plane % shape.kv_heads;
    std::vector<double> wanted(of_plane), scale(of_plane);
    if (!before.empty()) std::copy_n(before.begin() + plane * of_plane, of_plane, wanted.begin());
    const float* const w1 = network.weights.data() + plane * of_weights;
    const float* const w2 = w1 + size_t{shape.k_head_dim} * network.hidden;
    const float* const w3 = w2 + size_t{network.hidden} * network.features;
    for (const uint32_t token : rows[rows.size() == 1 ? 0 : rows.size() == shape.layers ? layer : plane]) {
      std::vector<double> x(shape.k_head_dim);
      for (uint32_t d = 0; d < shape.k_head_dim; ++d) x[d] = from.K(layer, token, head, d);
      x = Times(Gelus(Times(Gelus(Times(x, w1, network.hidden)), w2, network.features)), w3,
                network.features);
      bool takes_part = std::all_of(x.begin(), x.end(), [](double y) { return std::isfinite(y); });
      takes_part = takes_part && std::isfinite(from.Norm(true, layer, token, head));
      if (!takes_part) continue;
      ++tokens;
      for (uint32_t j = 0; j < network.features; ++j) {
        for (uint32_t d = 0; d < width; ++d) {
          const double term = std::abs(x[j]) * (d + 1 == width ? 1 : from.V(layer, token, head, d));
          wanted[j * width + d] += term;
          scale[j * width + d] += std::abs(term);
        }
      }
    }
    for (size_t i = 0; i < of_plane; ++i) {
      ASSERT_NEAR(folded.state[plane * of_plane + i], wanted[i],
                  1e-5 + 2e-5 * (scale[i] + std::abs(wanted[i])))
          << what << " plane " << plane << " row " << i / width << " column " << i % width;
    }
  }
  EXPECT_EQ(folded.tokens, tokens) << what;
}

// ---- Tests

TEST(FoldTest, EveryTypeAndArrangement) {
  for (const KvDtype dtype :
       {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3, KvDtype::kFp8E5m2}) {
    for (const Arrangement arrangement : {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                          Arrangement::kColumnMajorKeys, Arrangement::kScattered}) {
      const Sequence from({.tokens = 47,
                           .k_dim = 16,
                           .v_dim = 12,
                           .dtype = dtype,
                           .arrangement = arrangement,
                           .seed = 5 + static_cast<uint64_t>(arrangement)});
      ExpectFolded(from, RandomRows(from.kv().shape, 4, 29, 3), Network(from.kv().shape, 20, 5, 2), {},
                   "type " + std::to_string(static_cast<int>(dtype)) + " arrangement " +
                       std::to_string(static_cast<int>(arrangement)));
    }
  }
}

TEST(FoldTest, OddShapes) {
  struct Shape {
    uint32_t layers, tokens, heads, k_dim, v_dim, per_block, leaving, hidden, features;
  };
  for (const Shape s : {Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}, Shape{1, 9, 1, 1, 256, 4, 8, 3, 2},
                        Shape{1, 40, 2, 256, 1, 16, 33, 512, 64}, Shape{3, 25, 2, 7, 300, 32, 24, 257, 3},
                        Shape{1, 1100, 1, 3, 2, 16, 1040, 5, 7}}) {
    const Sequence from({.layers = s.layers,
                         .tokens = s.tokens,
                         .heads = s.heads,
                         .k_dim = s.k_dim,
                         .v_dim = s.v_dim,
                         .tokens_per_block = s.per_block,
                         .seed = s.k_dim});
    ExpectFolded(from, RandomRows(from.kv().shape, 1, s.leaving, 8),
                 Network(from.kv().shape, s.hidden, s.features, 9), {}, "k_dim " + std::to_string(s.k_dim));
  }
}

TEST(FoldTest, AddsToTheStateBefore) {
  const Sequence from({});
  const KvShape& shape = from.kv().shape;
  const Network network(shape, 11, 3, 4);
  Random random(6);
  std::vector<float> before(shape.planes() * 3 * (shape.v_head_dim + 1));
  for (float& one : before) one = static_cast<float>(random.Normal());
  for (const uint32_t rows : {1, 2, 4}) {
    ExpectFolded(from, RandomRows(shape, rows, 10, 7), network, before, std::to_string(rows) + " rows");
  }
  // Where nothing leaves it is copied.
  EXPECT_EQ(Fold(from, {{}}, network, before).state, before);
  EXPECT_EQ(Fold(from, {{}}, network, {}).state, std::vector<float>(before.size()));
}

TEST(FoldTest, TokensThatAreNotFiniteTakeNoPart) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Sequence from({}, [](bool value, uint32_t, uint32_t token, uint32_t, uint32_t dim) {
    if (dim == 3 && token == (value ? 5 : 6)) return std::numeric_limits<double>::quiet_NaN();
    if (dim == 2 && token == (value ? 7 : 8)) return kInfinity;
    return (token * 7 + dim * 5) % 11 / 4.0 - 1;
  });
  const KvShape& shape = from.kv().shape;
  const Rows rows = RandomRows(shape, 1, shape.tokens, 1);
  Network network(shape, 6, 4, 1);
  ExpectFolded(from, rows, network, {}, "");
  const Folded folded = Fold(from, rows, network, {});
  EXPECT_EQ(folded.tokens, shape.planes() * (shape.tokens - 4));
  // Nor do those of a plane with such a weight.
  network.weights.back() = NAN;
  EXPECT_EQ(Fold(from, rows, network, {}).tokens, (shape.planes() - 1) * (shape.tokens - 4));
  EXPECT_THAT(Fold(from, rows, network, {}).state,
              testing::Each(testing::Truly([](float x) { return IsFinite(x); })));
}

TEST(FoldTest, LimitsAreChecked) {
  FoldRequest request{.evicted_tokens = 1 << 20, .features = 64, .hidden = 512};
  request.from.shape = {.layers = 64,
                        .kv_heads = 8,
                        .tokens_per_block = 16,
                        .tokens = 1 << 21,
                        .k_head_dim = 256,
                        .v_head_dim = 256};
  EXPECT_THAT(
      CheckFold(request, 0, uint64_t{1} << 60).message(),
      HasSubstr(
          "adding 1048576 tokens of 512 planes to a state takes 9.89904e+13 products, 184384 for each"));
  request.evicted_tokens = 2048;
  // 512 planes, of which each has two shares' sums and a state, and 2,048 indices.
  const uint64_t bytes = 512 * (uint64_t{3} * 64 * 257 * 4 + 3 * 4) + 2048 * 4 + 100;
  EXPECT_TRUE(CheckFold(request, 100, bytes).ok());
  EXPECT_THAT(CheckFold(request, 100, bytes - 1).message(),
              HasSubstr("adding tokens to a state needs " + std::to_string(bytes) +
                        " bytes on the device, 100 of them"));
  request.from.shape.k_head_dim = 257;
  EXPECT_THAT(CheckFold(request, 0, bytes).message(), HasSubstr("k_head_dim is 257; the limit is 256"));
  request.from.shape.v_head_dim = 0;
  EXPECT_THAT(CheckFold(request, 0, bytes).message(), HasSubstr("this layout has no V"));
}

}  // namespace
}  // namespace kvpool::scorers
