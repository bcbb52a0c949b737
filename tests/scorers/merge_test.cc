// Compaction in which tokens that leave are merged into those that stay, on the device that this run is about: against
// merge.json (make_merge.py), and for every type against the formulas in doubles.
#include "cuda/scorers/merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/parts/store_element.h"
#include "nlohmann/json.hpp"
#include "tests/scorers/sequence.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers {
namespace {

using Json = nlohmann::json;
using lab::StagedSequence;
using testing::HasSubstr;

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

// Bytes of the device.
std::vector<unsigned char> Bytes(uint64_t address, uint64_t bytes) {
  std::vector<unsigned char> read((bytes + 7) / 8 * 8);
  for (uint64_t at = 0; at < read.size(); at += 8) {
    const uint64_t word = ReadWord(address + at);
    std::memcpy(read.data() + at, &word, sizeof word);
  }
  return read;
}

std::vector<std::vector<unsigned char>> BlocksOf(const KvView& kv) {
  std::vector<std::vector<unsigned char>> blocks;
  for (uint32_t block = 0; block < kv.shape.blocks(); ++block) {
    blocks.push_back(Bytes(kv.blocks[block], lab::BlockBytes(kv)));
  }
  return blocks;
}

// Which tokens stay: rows for all planes, for each layer or for each plane.
struct Kept {
  std::vector<std::vector<uint32_t>> rows;
  uint32_t RowOf(const KvShape& shape, uint32_t layer, uint32_t head) const {
    return rows.size() == 1 ? 0 : rows.size() == shape.layers ? layer : layer * shape.kv_heads + head;
  }
};
// REQUIRES: there are more heads than one, or else rows of planes are those of layers.
Kept RandomKept(const KvShape& shape, uint32_t rows, uint32_t tokens, uint64_t seed) {
  Random random(seed);
  Kept kept;
  for (uint32_t row = 0; row < rows; ++row) {
    std::vector<uint32_t>& of_row = kept.rows.emplace_back(shape.tokens);
    for (uint32_t t = 0; t < shape.tokens; ++t) of_row[t] = t;
    while (of_row.size() > tokens) of_row.erase(of_row.begin() + random.Below(of_row.size()));
  }
  return kept;
}

struct Terms {
  std::vector<float> thresholds;
  float smoothing = 0;
};

// What a merge made of a sequence: its destination blocks as they are in memory, and elements of them.
class Merged {
 public:
  Merged(const Sequence& from, const Kept& kept, const Terms& terms) { Run(from, kept, terms); }

  const MergeOutcome& outcome() const { return outcome_; }
  const std::vector<std::vector<unsigned char>>& blocks() const { return blocks_; }
  const std::vector<std::vector<unsigned char>>& gathered() const { return gathered_; }
  double Get(bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) const {
    const unsigned char* const row =
        value ? kv_.ValueRow(layer, head, token) : kv_.KeyRow(layer, head, token);
    return LoadElement(row + dim * (value ? kv_.v : kv_.k).dim_stride_bytes, kv_.dtype);
  }

 private:
  void Run(const Sequence& from, const Kept& kept, const Terms& terms) {
    std::unique_ptr<KvCompute> host;
    KvCompute* const compute = TestOrHostCompute(&host);
    const KvShape& shape = from.kv().shape;
    const auto tokens = static_cast<uint32_t>(kept.rows[0].size());
    std::vector<uint32_t> stay, leave;
    for (const std::vector<uint32_t>& row : kept.rows) {
      stay.insert(stay.end(), row.begin(), row.end());
      for (uint32_t t = 0; t < shape.tokens; ++t) {
        if (!std::binary_search(row.begin(), row.end(), t)) leave.push_back(t);
      }
    }
    const uint32_t leaving = shape.tokens - tokens;
    const uint64_t of_layer = kept.rows.size() == 1              ? 0
                              : kept.rows.size() == shape.layers ? 1
                                                                 : shape.kv_heads;
    const uint64_t of_head = of_layer > 1 ? 1 : 0;
    const auto source = StagedSequence::Make(compute, from.kv(), {});
    kv_ = from.kv();
    kv_.shape.tokens = tokens;
    // Every byte has a value, as in blocks that were used before.
    const std::vector<unsigned char> old(lab::BlockBytes(kv_), 0xa5);
    const std::vector<uint64_t> old_blocks(kv_.shape.blocks(), reinterpret_cast<uint64_t>(old.data()));
    KvView before = kv_;
    before.blocks = old_blocks.data();
    const auto to = StagedSequence::Make(compute, before, {});
    ASSERT_TRUE(source.ok() && to.ok());
    const std::vector<std::vector<unsigned char>> untouched = BlocksOf(source->kv());
    const std::vector<uint64_t> to_blocks(to->kv().blocks, to->kv().blocks + kv_.shape.blocks());
    const MergeRequest request = {.gather = {.from = source->kv(),
                                             .to_blocks = to_blocks.data(),
                                             .kept = stay.data(),
                                             .kept_layer_stride = of_layer * tokens,
                                             .kept_head_stride = of_head * tokens,
                                             .kept_tokens = tokens},
                                  .evicted = leave.data(),
                                  .evicted_layer_stride = of_layer * leaving,
                                  .evicted_head_stride = of_head * leaving,
                                  .evicted_tokens = leaving,
                                  .thresholds = terms.thresholds.empty() ? nullptr : terms.thresholds.data(),
                                  .smoothing = terms.smoothing};
    ASSERT_TRUE(CheckMerge(request, uint64_t{1} << 30).ok());
    const auto outcome = compute->Merge(request);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    outcome_ = *outcome;
    EXPECT_EQ(BlocksOf(source->kv()), untouched) << "a source has changed";
    blocks_ = BlocksOf(to->kv());
    for (const auto& block : blocks_) addresses_.push_back(reinterpret_cast<uint64_t>(block.data()));
    kv_.blocks = addresses_.data();
    // What a gather alone would have copied.
    ASSERT_TRUE(compute->Gather(request.gather).ok());
    gathered_ = BlocksOf(to->kv());
  }

  KvView kv_;
  MergeOutcome outcome_;
  std::vector<std::vector<unsigned char>> blocks_, gathered_;
  std::vector<uint64_t> addresses_;
};

// ---- The formulas in doubles

struct ExpectedPlane {
  double threshold = 0;
  uint32_t merged = 0;
  std::vector<std::vector<double>> k, v;  // [tokens that stay][dim]
};
ExpectedPlane Expect(const Sequence& from, const std::vector<uint32_t>& kept, uint32_t layer, uint32_t head,
                     const Terms& terms) {
  const KvShape& shape = from.kv().shape;
  const auto takes_part = [&](uint32_t t) {
    const double norm = from.Norm(false, layer, t, head);
    return std::isfinite(norm) && norm > 0 &&
           (shape.v_head_dim == 0 || std::isfinite(from.Norm(true, layer, t, head)));
  };
  const auto cosine = [&](uint32_t a, uint32_t b) {
    double dot = 0;
    for (uint32_t d = 0; d < shape.k_head_dim; ++d)
      dot += from.K(layer, a, head, d) * from.K(layer, b, head, d);
    return dot / from.Norm(false, layer, a, head) / from.Norm(false, layer, b, head);
  };
  struct Nearest {
    uint32_t token, place;
    double cosine;
  };
  std::vector<Nearest> nearest;
  ExpectedPlane plane;
  for (uint32_t e = 0; e < shape.tokens; ++e) {
    if (std::binary_search(kept.begin(), kept.end(), e) || !takes_part(e)) continue;
    Nearest best{e, UINT32_MAX, -2};
    for (uint32_t i = 0; i < kept.size(); ++i) {
      if (!takes_part(kept[i])) continue;
      const double u = cosine(e, kept[i]);
      if (u > best.cosine + 1e-9) best = {e, i, u};
    }
    if (best.place != UINT32_MAX) nearest.push_back(best);
  }
  const uint32_t index = layer * shape.kv_heads + head;
  plane.threshold = terms.thresholds.empty() ? 1 : terms.thresholds[index];
  if (!nearest.empty()) {
    double mean = 0;
    for (const Nearest& one : nearest) mean += one.cosine / static_cast<double>(nearest.size());
    plane.threshold = terms.thresholds.empty()
                          ? mean
                          : terms.smoothing * mean + (1 - double{terms.smoothing}) * plane.threshold;
  }
  for (uint32_t i = 0; i < kept.size(); ++i) {
    std::vector<std::pair<uint32_t, double>> all = {{kept[i], 1}};
    for (const Nearest& one : nearest) {
      if (one.place != i || one.cosine < plane.threshold - 1e-9) continue;
      all.emplace_back(one.token, one.cosine);
      ++plane.merged;
    }
    for (const bool value : {false, true}) {
      const uint32_t dim = value ? shape.v_head_dim : shape.k_head_dim;
      std::vector<double>& row = (value ? plane.v : plane.k).emplace_back(dim);
      for (uint32_t d = 0; d < dim; ++d) {
        double weights = 0;
        for (const auto& [token, u] : all) {
          row[d] += std::exp(u) * (value ? from.V(layer, token, head, d) : from.K(layer, token, head, d));
          weights += std::exp(u);
        }
        row[d] /= weights;
      }
    }
  }
  return plane;
}

// Half the distance of neighbouring numbers, relative to them, and the least number.
struct Rounding {
  double relative, least;
};
Rounding RoundingOf(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kF32:
      return {1e-5, 1e-6};
    case KvDtype::kF16:
      return {0x1p-11, 0x1p-24};
    case KvDtype::kBf16:
      return {0x1p-8, 1e-30};
    case KvDtype::kFp8E4m3:
      return {0x1p-4, 0x1p-9};
    case KvDtype::kFp8E5m2:
      return {0x1p-3, 0x1p-16};
  }
  return {};
}

void ExpectMerged(const Sequence& from, const Kept& kept, const Terms& terms, const std::string& what) {
  const Merged merged(from, kept, terms);
  if (testing::Test::HasFatalFailure()) return;
  const KvShape& shape = from.kv().shape;
  const Rounding rounding = RoundingOf(from.kv().dtype);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      const std::vector<uint32_t>& row = kept.rows[kept.RowOf(shape, layer, head)];
      const ExpectedPlane expected = Expect(from, row, layer, head, terms);
      const uint32_t plane = layer * shape.kv_heads + head;
      ASSERT_NEAR(merged.outcome().thresholds[plane], expected.threshold, 1e-5) << what << " plane " << plane;
      ASSERT_EQ(merged.outcome().merged[plane], expected.merged) << what << " plane " << plane;
      for (uint32_t i = 0; i < row.size(); ++i) {
        for (const bool value : {false, true}) {
          const std::vector<double>& wanted = (value ? expected.v : expected.k)[i];
          for (uint32_t d = 0; d < wanted.size(); ++d) {
            const double x = merged.Get(value, layer, i, head, d);
            if (!std::isfinite(wanted[d])) {
              ASSERT_FALSE(std::isfinite(x)) << what << " plane " << plane << " token " << row[i];
              continue;
            }
            ASSERT_NEAR(x, wanted[d], 1.01 * rounding.relative * std::abs(wanted[d]) + rounding.least + 1e-6)
                << what << (value ? " V" : " K") << " plane " << plane << " token " << row[i] << " dim " << d;
          }
        }
      }
    }
  }
}

// ---- Tests

TEST(MergeTest, MatchesTheIndependentImplementation) {
  const char* const folder = std::getenv("KVPOOL_SCORER_VECTORS");
  std::ifstream file(std::filesystem::path(folder != nullptr ? folder : KVPOOL_SCORER_VECTORS) /
                     "merge.json");
  ASSERT_TRUE(file);
  const Json json = Json::parse(file);
  for (const Json& one : json["cases"]) {
    const std::string what = one["scope"].get<std::string>() + one["given"].dump();
    const Sequence from({.layers = json["layers"],
                         .tokens = json["tokens"],
                         .heads = json["heads"],
                         .k_dim = json["k_dim"],
                         .v_dim = json["v_dim"],
                         .tokens_per_block = json["tokens_per_block"]},
                        [&](bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
                          return one[value ? "v" : "k"][layer][token][head][dim].get<double>();
                        });
    // Two layers of two heads: two rows are those of layers.
    const Merged merged(from, {one["kept"]}, {one["given"], one["smoothing"]});
    ASSERT_FALSE(HasFatalFailure());
    const KvShape& shape = from.kv().shape;
    for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
      EXPECT_NEAR(merged.outcome().thresholds[plane], one["thresholds"][plane].get<double>(), 1e-6) << what;
      EXPECT_EQ(merged.outcome().merged[plane], one["merged"][plane].get<uint32_t>()) << what;
      for (const bool value : {false, true}) {
        const Json& rows = one[value ? "merged_v" : "merged_k"][plane];
        for (uint32_t i = 0; i < rows.size(); ++i) {
          for (uint32_t d = 0; d < rows[i].size(); ++d) {
            EXPECT_NEAR(merged.Get(value, plane / shape.kv_heads, i, plane % shape.kv_heads, d),
                        rows[i][d].get<double>(), 2e-6)
                << what << (value ? " V" : " K") << " plane " << plane << " row " << i;
          }
        }
      }
    }
  }
}

TEST(MergeTest, EveryTypeAndArrangementIsRoundedToTheNearest) {
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
      ExpectMerged(from, RandomKept(from.kv().shape, 4, 11, 3), {},
                   "type " + std::to_string(static_cast<int>(dtype)) + " arrangement " +
                       std::to_string(static_cast<int>(arrangement)));
    }
  }
}

TEST(MergeTest, OddShapes) {
  struct Shape {
    uint32_t layers, tokens, heads, k_dim, v_dim, per_block, kept;
  };
  for (const Shape s :
       {Shape{1, 2, 1, 4, 4, 1, 1}, Shape{1, 9, 1, 1, 1, 4, 4}, Shape{1, 40, 2, 256, 256, 16, 7},
        Shape{1, 40, 1, 576, 0, 8, 3}, Shape{1, 66, 3, 7, 5, 32, 33}, Shape{1, 300, 1, 3, 2, 8, 2},
        Shape{1, 7, 1, 4096, 4, 4, 3}}) {
    const Sequence from({.layers = s.layers,
                         .tokens = s.tokens,
                         .heads = s.heads,
                         .k_dim = s.k_dim,
                         .v_dim = s.v_dim,
                         .tokens_per_block = s.per_block,
                         .seed = s.k_dim});
    ExpectMerged(from, RandomKept(from.kv().shape, 1, s.kept, 8), {},
                 std::to_string(s.tokens) + " tokens of " + std::to_string(s.k_dim));
  }
}

// Bad tokens: a key of 0, keys and values that are no numbers or infinite, among those that stay and those that leave.
TEST(MergeTest, TokensThatAreNotFiniteTakeNoPart) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto value_at = [&](bool value, uint32_t token, uint32_t dim) {
    if (dim == 1 && token % 8 == 3) return value ? kNotANumber : 1.0;
    if (dim == 1 && token % 8 == 4) return value ? inf : 0.5;
    if (dim == 0 && token % 8 == 5) return value ? 1.0 : kNotANumber;
    if (dim == 0 && token % 8 == 6) return value ? 1.0 : -inf;
    if (!value && token % 8 == 7) return 0.0;
    return std::sin(token * 7 + dim * (value ? 3 : 5) + 1.0);
  };
  const Sequence from({.layers = 1, .tokens = 48, .heads = 1, .k_dim = 8, .v_dim = 6},
                      [&](bool value, uint32_t, uint32_t token, uint32_t, uint32_t dim) {
                        return value_at(value, token, dim);
                      });
  Kept kept{{{}}};
  for (uint32_t t = 0; t < 48; t += t % 16 < 8 ? 1 : 9) kept.rows[0].push_back(t);
  ExpectMerged(from, kept, {}, "bad tokens");
  // None that takes part is left.
  const Kept bad{{{3, 5, 6, 7}}};
  const Merged merged(from, bad, {});
  EXPECT_EQ(merged.outcome().merged[0], 0);
  EXPECT_EQ(merged.outcome().thresholds[0], 1);
  EXPECT_EQ(merged.blocks(), merged.gathered());
  EXPECT_EQ(Merged(from, bad, {.thresholds = {0.25f}, .smoothing = 1}).outcome().thresholds[0], 0.25f);
}

TEST(MergeTest, WhatIsBelowTheThresholdLeavesNoTrace) {
  const Sequence from({.tokens = 50, .dtype = KvDtype::kBf16});
  const Kept kept = RandomKept(from.kv().shape, 2, 21, 2);
  const Merged dropped(from, kept, {.thresholds = {1.5f, 1.5f, 1.5f, 1.5f}});
  EXPECT_EQ(dropped.blocks(), dropped.gathered());
  EXPECT_THAT(dropped.outcome().merged, testing::Each(0));
  const Merged merged(from, kept, {.thresholds = {-1.5f, -1.5f, -1.5f, -1.5f}});
  EXPECT_NE(merged.blocks(), merged.gathered());
  EXPECT_THAT(merged.outcome().merged, testing::Each(29));
}

TEST(MergeTest, AmongEqualsTheOldestTokenTakesIt) {
  // All keys point one way; values tell the tokens apart.
  const Sequence from({.layers = 1, .tokens = 90, .heads = 1, .k_dim = 4, .v_dim = 1},
                      [](bool value, uint32_t, uint32_t token, uint32_t, uint32_t dim) {
                        return value ? token : std::ldexp(dim + 1, static_cast<int>(token % 3));
                      });
  const Merged merged(from, {{{5, 6, 30, 31, 32, 33, 34, 35, 36, 80}}}, {});
  EXPECT_EQ(merged.outcome().merged[0], 80);
  for (uint32_t i = 1; i < 10; ++i)
    EXPECT_EQ(merged.Get(true, 0, i, 0, 0), i == 1 ? 6 : i == 9 ? 80 : 28 + i);
  EXPECT_NE(merged.Get(true, 0, 0, 0, 0), 5);
}

TEST(MergeTest, TooLargeAMergeIsRefusedWithItsNumbers) {
  const Sequence from({});
  MergeRequest request = {.gather = {.from = from.kv(), .kept_tokens = 17}, .evicted_tokens = 20};
  // 4 planes * (4 * 37 + 12 * 20 + 4 * 17 + 8) bytes.
  EXPECT_TRUE(CheckMerge(request, 1856).ok());
  EXPECT_THAT(std::string(CheckMerge(request, 1855).message()),
              HasSubstr("merging needs 1856 bytes of workspace on the device; the limit is 1855"));
  request.gather.kept_tokens = request.evicted_tokens = 1 << 19;
  const absl::Status refused = CheckMerge(request, UINT64_MAX);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("merging 524288 tokens into 524288 in 4 planes of 20"));
}

// ---- store_element.h

template <KvDtype dtype>
void ExpectNearestOfAll() {
  using Storage = typename Element<dtype>::Storage;
  std::vector<float> numbers;
  for (uint32_t code = 0; code < 1u << 8 * sizeof(Storage); ++code) {
    const float x = Element<dtype>::Load(static_cast<Storage>(code));
    if (!std::isfinite(x)) continue;
    unsigned char at[sizeof(Storage)];
    StoreElement(at, dtype, x);
    Storage stored;
    std::memcpy(&stored, at, sizeof stored);
    ASSERT_EQ(stored, code);
    if (x >= 0 && code < 1u << (8 * sizeof(Storage) - 1)) numbers.push_back(x);
  }
  const auto rounded = [](float x) {
    alignas(4) unsigned char at[4];
    StoreElement(at, dtype, x);
    return LoadElement(at, dtype);
  };
  for (size_t i = 1; i < numbers.size(); ++i) {
    const float low = numbers[i - 1], high = numbers[i];
    const float middle = low + (high - low) / 2;  // Exact: a float has more bits.
    ASSERT_EQ(rounded(middle), i % 2 == 0 ? high : low) << low << " and " << high;
    if (middle > low) {
      ASSERT_EQ(rounded(-std::nextafter(middle, low)), -low);
      ASSERT_EQ(rounded(-std::nextafter(middle, high)), -high);
    }
  }
}

TEST(StoreElementTest, TheNearestNumberIsStoredAndOfTwoTheEvenOne) {
  ExpectNearestOfAll<KvDtype::kF16>();
  ExpectNearestOfAll<KvDtype::kBf16>();
  ExpectNearestOfAll<KvDtype::kFp8E4m3>();
  ExpectNearestOfAll<KvDtype::kFp8E5m2>();
}

}  // namespace
}  // namespace kvpool::scorers
