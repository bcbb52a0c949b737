// The pass over K and V: every type, layout and instruction set against sums in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cuda/scorers/host/host_kernels.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/records.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

constexpr KvDtype kDtypes[] = {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3,
                               KvDtype::kFp8E5m2};
constexpr Arrangement kArrangements[] = {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                         Arrangement::kColumnMajorKeys, Arrangement::kScattered};

// The value by the definition of the formats: sign, exponent, fraction.
double Decode(uint32_t code, int exponent_bits, int fraction_bits, int bias, bool ieee) {
  const uint32_t fraction = code & ((1u << fraction_bits) - 1);
  const uint32_t exponent = code >> fraction_bits & ((1u << exponent_bits) - 1);
  const double sign = (code >> (exponent_bits + fraction_bits) & 1) != 0 ? -1 : 1;
  const uint32_t top = (1u << exponent_bits) - 1;
  if (exponent == top && ieee) return fraction == 0 ? sign * HUGE_VAL : NAN;
  if (exponent == top && fraction == (1u << fraction_bits) - 1) return NAN;
  const double part = std::ldexp(fraction, -fraction_bits);
  return sign * (exponent == 0 ? std::ldexp(part, 1 - bias)
                               : std::ldexp(1 + part, static_cast<int>(exponent) - bias));
}

template <KvDtype dtype, typename Storage>
void CheckEveryCode(int exponent_bits, int fraction_bits, int bias, bool ieee) {
  for (uint32_t code = 0; code < (1u << 8 * sizeof(Storage)); ++code) {
    const double expected = Decode(code, exponent_bits, fraction_bits, bias, ieee);
    const float actual = Element<dtype>::Load(static_cast<Storage>(code));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << code;
    } else {
      EXPECT_EQ(actual, expected) << code;
      EXPECT_EQ(std::signbit(actual), std::signbit(expected)) << code;
    }
  }
}

TEST(ElementTest, EveryCodeOfEveryType) {
  CheckEveryCode<KvDtype::kF16, uint16_t>(5, 10, 15, true);
  CheckEveryCode<KvDtype::kBf16, uint16_t>(8, 7, 127, true);
  CheckEveryCode<KvDtype::kFp8E4m3, uint8_t>(4, 3, 7, false);
  CheckEveryCode<KvDtype::kFp8E5m2, uint8_t>(5, 2, 15, true);
}

void CheckRecord(const Sequence& sequence, const HostRows& rows) {
  const KvView& kv = sequence.kv();
  const KvShape& shape = kv.shape;
  const RecordLayout at =
      LayOutRecord(shape, kNeedNorms | kNeedUnitAnchor | kNeedMeanAnchor | kNeedKeyBounds);
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    std::vector<float> record(at.floats, -77);
    for (uint32_t layer = 0; layer < shape.layers; ++layer)
      RecordLayer(HostTeam(rows), kv, at, block, layer, record.data());
    const uint32_t first = block * shape.tokens_per_block;
    for (uint32_t l = 0; l < shape.layers; ++l) {
      for (uint32_t h = 0; h < shape.kv_heads; ++h) {
        const uint32_t plane = l * shape.kv_heads + h;
        for (uint32_t t = 0; t < shape.TokensOf(block); ++t) {
          const double k = sequence.Norm(false, l, first + t, h);
          ASSERT_NEAR(record[at.k_norms + plane * shape.tokens_per_block + t], k, 2e-6 * k) << rows.name;
          if (shape.v_head_dim == 0) continue;
          const double v = sequence.Norm(true, l, first + t, h);
          ASSERT_NEAR(record[at.v_norms + plane * shape.tokens_per_block + t], v, 2e-6 * v) << rows.name;
        }
        for (uint32_t d = 0; d < shape.k_head_dim; ++d) {
          double unit = 0, sum = 0, least = HUGE_VAL, greatest = -HUGE_VAL;
          for (uint32_t t = 0; t < shape.TokensOf(block); ++t) {
            const double x = sequence.K(l, first + t, h, d), norm = sequence.Norm(false, l, first + t, h);
            unit += norm > 0 ? x / norm : 0;
            sum += x;
            least = std::min(least, x);
            greatest = std::max(greatest, x);
          }
          const uint64_t own = uint64_t{plane} * shape.k_head_dim + d;
          ASSERT_NEAR(record[at.unit_key_sums + own], unit, 1e-5);
          ASSERT_NEAR(record[at.key_sums + own], sum, 1e-4);
          ASSERT_EQ(record[at.key_min + own], static_cast<float>(least));
          ASSERT_EQ(record[at.key_max + own], static_cast<float>(greatest));
        }
      }
    }
  }
}

TEST(FeaturesTest, EveryTypeLayoutAndInstructionSet) {
  for (const KvDtype dtype : kDtypes) {
    for (const Arrangement arrangement : kArrangements) {
      for (const uint32_t dim : {1u, 16u, 33u, 136u}) {
        const Sequence sequence({.k_dim = dim,
                                 .v_dim = dim + 3,
                                 .tokens_per_block = 20,
                                 .dtype = dtype,
                                 .arrangement = arrangement});
        for (const HostRows* rows : RunnableHostRows()) CheckRecord(sequence, *rows);
      }
    }
  }
}

// Norms of rows with one element that is not 0, at every place around the ends of whole vectors.
template <KvDtype dtype, typename Storage>
void CheckNormOfEveryCode(uint32_t step) {
  constexpr uint32_t kDim = 71, kRows = 5;
  std::vector<Storage> elements(kRows * kDim);
  std::vector<float> norms(kRows);
  for (const HostRows* rows : RunnableHostRows()) {
    for (uint32_t code = 0; code < (1u << 8 * sizeof(Storage)); code += step) {
      const uint32_t row = code / step % kRows, d = code / step % kDim;
      elements[row * kDim + d] = static_cast<Storage>(code);
      HostTeam(*rows).NormsOfRows<dtype>({.first = reinterpret_cast<const unsigned char*>(elements.data()),
                                          .outer_count = 1,
                                          .inner_count = kRows,
                                          .inner_stride_bytes = kDim * sizeof(Storage),
                                          .dim = kDim,
                                          .norms = norms.data(),
                                          .inner_step = 1});
      const float x = Element<dtype>::Load(static_cast<Storage>(code));
      const float expected = std::sqrt(x * x);
      for (uint32_t i = 0; i < kRows; ++i) {
        if (i == row && std::isnan(x)) {
          ASSERT_TRUE(std::isnan(norms[i])) << rows->name << " " << code;
        } else {
          ASSERT_EQ(norms[i], i == row ? expected : 0) << rows->name << " " << code;
        }
      }
      elements[row * kDim + d] = 0;
    }
  }
}

TEST(FeaturesTest, NormsOfEveryCode) {
  CheckNormOfEveryCode<KvDtype::kFp8E4m3, uint8_t>(1);
  CheckNormOfEveryCode<KvDtype::kFp8E5m2, uint8_t>(1);
  CheckNormOfEveryCode<KvDtype::kF16, uint16_t>(7);
  CheckNormOfEveryCode<KvDtype::kBf16, uint16_t>(7);
}

TEST(FeaturesTest, WithoutValues) {
  const Sequence sequence({.v_dim = 0});
  for (const HostRows* rows : RunnableHostRows()) CheckRecord(sequence, *rows);
  const auto paged = ScoreSequence(sequence.kv(), {}, "paged_eviction");
  EXPECT_EQ(paged.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(paged.status().message().find("needs V"), std::string::npos);
  EXPECT_TRUE(ScoreSequence(sequence.kv(), {}, "keydiff").ok());
}

TEST(FeaturesTest, ThreadsChangeNothing) {
  const Sequence sequence({.layers = 5, .tokens = 211});
  Random random(9);
  std::vector<float> queries(5 * 3 * 4 * 20);
  for (float& x : queries) x = static_cast<float>(random.Normal());
  Signals signals;
  signals.window = {.data = queries.data(),
                    .queries = 3,
                    .q_heads = 4,
                    .layer_stride_bytes = 3 * 4 * 20 * 4,
                    .query_stride_bytes = 4 * 20 * 4,
                    .head_stride_bytes = 20 * 4};
  for (const char* policy : {"paged_eviction", "keydiff", "snapkv", "cake"}) {
    const auto one = ScoreSequence(sequence.kv(), signals, policy, {}, {}, 1);
    const auto many = ScoreSequence(sequence.kv(), signals, policy, {}, {}, 7);
    ASSERT_TRUE(one.ok() && many.ok());
    EXPECT_EQ(one->tokens, many->tokens) << policy;
    EXPECT_EQ(one->blocks, many->blocks) << policy;
  }
}

}  // namespace
}  // namespace kvpool::scorers
