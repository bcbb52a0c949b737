// Compaction in which tokens that leave go on in low precision, on the device that this run is about: byte by byte against
// low.json (make_low.py), and for every shape against the formulas one element at a time.
#include "cuda/scorers/low.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/parts/element.h"
#include "nlohmann/json.hpp"
#include "tests/scorers/sequence.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers {
namespace {

using Json = nlohmann::json;
using lab::StagedSequence;
using Memory = std::vector<unsigned char>;

constexpr KvDtype kEveryType[] = {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3,
                                  KvDtype::kFp8E5m2};
constexpr Arrangement kEveryArrangement[] = {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                             Arrangement::kColumnMajorKeys, Arrangement::kScattered};
constexpr unsigned char kOld = 0xa5;

Memory ReadBytes(uint64_t address, uint64_t bytes) {
  Memory read((bytes + 7) / 8 * 8);
  for (uint64_t at = 0; at < read.size(); at += 8) {
    const uint64_t word = ReadWord(address + at);
    std::memcpy(read.data() + at, &word, sizeof word);
  }
  read.resize(bytes);
  return read;
}

const std::vector<uint32_t>& RowOf(const Rows& rows, const KvShape& shape, uint32_t plane) {
  return rows[rows.size() == 1 ? 0 : rows.size() == shape.layers ? plane / shape.kv_heads : plane];
}

// The blocks that KeepLow writes, each with `block_bytes`, and what is behind its records in them.
std::vector<Memory> KeepLow(const Sequence& from, const Rows& evicted, uint32_t bits, uint64_t block_bytes) {
  std::unique_ptr<KvCompute> host;
  KvCompute* const compute = TestOrHostCompute(&host);
  const KvShape& shape = from.kv().shape;
  const auto tokens = static_cast<uint32_t>(evicted[0].size());
  std::vector<uint32_t> all;
  for (const std::vector<uint32_t>& row : evicted) all.insert(all.end(), row.begin(), row.end());
  const LowLayout layout = LowLayout::Of({.planes = shape.planes(),
                                          .k_head_dim = shape.k_head_dim,
                                          .v_head_dim = shape.v_head_dim,
                                          .bits = bits,
                                          .block_bytes = block_bytes});
  const uint64_t blocks = layout.Blocks(tokens);
  const uint64_t pitch = (block_bytes + 7) / 8 * 8;  // Words can be read of it.
  const auto source = StagedSequence::Make(compute, from.kv(), {});
  const auto memory = compute->Allocate(blocks * pitch);
  EXPECT_TRUE(source.ok() && memory.ok());
  const Memory old(blocks * pitch, kOld);
  EXPECT_TRUE(compute
                  ->Stage({{.address = reinterpret_cast<uint64_t>(old.data()), .bytes = old.size()}},
                          (*memory)->address())
                  .ok());
  const KvView there = source->kv();
  // A word is a launch of the device: one block is compared.
  const Memory before = ReadBytes(there.blocks[0], lab::BlockBytes(there));
  std::vector<uint64_t> to(blocks);
  // The other way round: addresses are the table's.
  for (uint64_t i = 0; i < blocks; ++i) to[i] = (*memory)->address() + (blocks - 1 - i) * pitch;
  const uint64_t of_layer = evicted.size() == 1 ? 0 : evicted.size() == shape.layers ? 1 : shape.kv_heads;
  const absl::Status status = compute->KeepLow({.from = there,
                                                .to_blocks = to.data(),
                                                .evicted = all.data(),
                                                .evicted_layer_stride = of_layer * tokens,
                                                .evicted_head_stride = (of_layer > 1 ? 1 : 0) * tokens,
                                                .evicted_tokens = tokens,
                                                .layout = layout});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ReadBytes(there.blocks[0], lab::BlockBytes(there)), before) << "a source has changed";
  std::vector<Memory> written;
  for (const uint64_t address : to) written.push_back(ReadBytes(address, block_bytes));
  return written;
}

// ---- The formulas, one element at a time

float F16(uint32_t bits) { return Element<KvDtype::kF16>::Load(static_cast<uint16_t>(bits)); }

// The bits of the f16 nearest to x, of two the even one. REQUIRES: x is at most 65504 of either sign.
uint32_t F16BitsOf(double x) {
  const auto magnitude = [](uint32_t bits) { return double{F16(bits)}; };
  uint32_t below = 0, above = 0x7bff;
  while (above - below > 1) {
    const uint32_t middle = (below + above) / 2;
    (magnitude(middle) <= std::abs(x) ? below : above) = middle;
  }
  const double low = std::abs(x) - magnitude(below), high = magnitude(above) - std::abs(x);
  const uint32_t nearest = low < high || (low == high && below % 2 == 0) ? below : above;
  return nearest | (std::signbit(x) ? 0x8000u : 0);
}

struct Range {
  uint32_t scale, zero;
};
Range RangeOf(const std::vector<float>& elements, uint32_t bits) {
  float least = INFINITY, greatest = -INFINITY;
  for (const float x : elements) {
    if (!std::isfinite(x)) continue;
    least = std::min(least, std::clamp(x, -65504.0f, 65504.0f));
    greatest = std::max(greatest, std::clamp(x, -65504.0f, 65504.0f));
  }
  if (least > greatest) return {0, 0};
  return {F16BitsOf((greatest - least) / static_cast<float>((1 << bits) - 1)),
          F16BitsOf(least == 0 ? 0 : least)};
}
uint32_t CodeOf(float x, const Range& range, uint32_t bits) {
  const float scale = F16(range.scale);
  if (scale == 0 || std::isnan(x)) return 0;
  const float place = (x - F16(range.zero)) * (1 / scale);
  return static_cast<uint32_t>(std::nearbyint(std::clamp(place, 0.0f, static_cast<float>((1 << bits) - 1))));
}

void Put(Memory* block, uint64_t at, uint32_t value, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; ++i) block->at(at + i) |= static_cast<unsigned char>(value >> 8 * i);
}

// The record of up to 32 tokens, whose K or V element (t, d) `get` answers.
template <typename Get>
Memory RecordOf(uint32_t tokens, uint32_t k_dim, uint32_t v_dim, uint32_t bits, const Get& get) {
  const uint32_t k_row = (k_dim * bits + 31) / 32 * 4, v_row = (v_dim * bits + 31) / 32 * 4;
  Memory record(4 * k_dim + 32 * k_row + (v_dim > 0 ? 128 + 32 * v_row : 0));
  for (const bool value : {false, true}) {
    const uint32_t dim = value ? v_dim : k_dim, row = value ? v_row : k_row;
    const uint32_t ranges_at = value ? 4 * k_dim + 32 * k_row : 0;
    const uint32_t codes_at = ranges_at + (value ? 128 : 4 * k_dim);
    const uint32_t outer = value ? tokens : dim, inner = value ? dim : tokens;
    for (uint32_t o = 0; o < outer; ++o) {
      std::vector<float> elements;
      for (uint32_t i = 0; i < inner; ++i) elements.push_back(get(value, value ? o : i, value ? i : o));
      if (inner == 0) continue;
      const Range range = RangeOf(elements, bits);
      Put(&record, ranges_at + 4 * o, range.scale, 2);
      Put(&record, ranges_at + 4 * o + 2, range.zero, 2);
      for (uint32_t i = 0; i < inner; ++i) {
        const uint32_t t = value ? o : i, d = value ? i : o;
        Put(&record, codes_at + t * row + d * bits / 8, CodeOf(elements[i], range, bits) << d * bits % 8, 1);
      }
    }
  }
  return record;
}

void ExpectLow(const Sequence& from, const Rows& evicted, uint32_t bits, uint64_t block_bytes,
               const std::string& what) {
  const KvShape& shape = from.kv().shape;
  const std::vector<Memory> written = KeepLow(from, evicted, bits, block_bytes);
  const auto tokens = static_cast<uint32_t>(evicted[0].size());
  Memory expected;
  for (uint32_t first = 0; first < tokens; first += 32) {
    for (uint32_t plane = 0; plane < shape.planes(); ++plane) {
      const std::vector<uint32_t>& row = RowOf(evicted, shape, plane);
      const uint32_t layer = plane / shape.kv_heads, head = plane % shape.kv_heads;
      const Memory record = RecordOf(
          std::min(tokens - first, 32u), shape.k_head_dim, shape.v_head_dim, bits,
          [&](bool value, uint32_t t, uint32_t d) {
            const uint32_t token = row[first + t];
            return static_cast<float>(value ? from.V(layer, token, head, d) : from.K(layer, token, head, d));
          });
      const uint64_t left = expected.size() % block_bytes;
      if (left + record.size() > block_bytes) expected.resize(expected.size() + block_bytes - left, kOld);
      expected.insert(expected.end(), record.begin(), record.end());
    }
  }
  expected.resize((expected.size() + block_bytes - 1) / block_bytes * block_bytes, kOld);
  ASSERT_EQ(written.size() * block_bytes, expected.size()) << what;
  for (size_t block = 0; block < written.size(); ++block) {
    for (size_t i = 0; i < block_bytes; ++i) {
      ASSERT_EQ(written[block][i], expected[block * block_bytes + i])
          << what << ": block " << block << " byte " << i;
    }
  }
}

// ---- Tests

TEST(LowTest, MatchesTheIndependentImplementation) {
  const char* const folder = std::getenv("KVPOOL_SCORER_VECTORS");
  std::ifstream file(std::filesystem::path(folder != nullptr ? folder : KVPOOL_SCORER_VECTORS) / "low.json");
  ASSERT_TRUE(file);
  const Json json = Json::parse(file);
  const uint64_t block_bytes = json["block_bytes"];
  for (const Json& one : json["cases"]) {
    const std::string of = one["of"];
    const Json& tensors = json["tensors"][of];
    for (const KvDtype dtype : kEveryType) {
      if (of == "f32" && dtype != KvDtype::kF32) continue;
      SequenceOptions options = {.layers = json["layers"],
                                 .tokens = json["tokens"],
                                 .heads = json["heads"],
                                 .k_dim = json["k_dim"],
                                 .v_dim = json["v_dim"],
                                 .tokens_per_block = json["tokens_per_block"],
                                 .dtype = dtype};
      const Sequence from(
          options, [&](bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t d) {
            const uint64_t row = (uint64_t{layer} * options.tokens + token) * options.heads + head;
            return FloatOfBits(tensors[value ? "v" : "k"][row * (value ? options.v_dim : options.k_dim) + d]);
          });
      const uint32_t bits = one["bits"];
      const std::vector<Memory> written = KeepLow(from, one["evicted"], bits, block_bytes);
      ASSERT_EQ(written.size(), one["blocks"].size());
      for (size_t block = 0; block < written.size(); ++block) {
        const std::string hex = one["blocks"][block];
        for (size_t i = 0; i < block_bytes; ++i) {
          const bool is_record = 2 * i < hex.size();
          const int wanted = is_record ? std::stoi(hex.substr(2 * i, 2), nullptr, 16) : kOld;
          ASSERT_EQ(written[block][i], wanted)
              << of << ", " << bits << " bits, " << one["scope"] << ", type " << static_cast<int>(dtype)
              << ", block " << block << " byte " << i;
        }
      }
    }
  }
}

TEST(LowTest, EveryTypeAndArrangement) {
  for (const KvDtype dtype : kEveryType) {
    for (const Arrangement arrangement : kEveryArrangement) {
      for (const uint32_t bits : {2, 4, 8}) {
        const Sequence from({.tokens = 47,
                             .k_dim = 16,
                             .v_dim = 12,
                             .dtype = dtype,
                             .arrangement = arrangement,
                             .seed = 5 + static_cast<uint64_t>(arrangement)});
        ExpectLow(from, RandomRows(from.kv().shape, 4, 35, 3), bits, 3000,
                  "type " + std::to_string(static_cast<int>(dtype)) + " arrangement " +
                      std::to_string(static_cast<int>(arrangement)) + " bits " + std::to_string(bits));
      }
    }
  }
}

TEST(LowTest, OddShapes) {
  struct Shape {
    uint32_t layers, tokens, heads, k_dim, v_dim, per_block, evicted, bits;
    KvDtype dtype;
  };
  for (const Shape s :
       {Shape{1, 1, 1, 1, 1, 1, 1, 2, KvDtype::kF32}, Shape{1, 70, 2, 256, 256, 16, 64, 4, KvDtype::kBf16},
        Shape{1, 40, 1, 576, 0, 8, 33, 4, KvDtype::kF16}, Shape{1, 7, 1, 576, 512, 8, 6, 8, KvDtype::kF32},
        Shape{1, 100, 2, 7, 131, 32, 99, 2, KvDtype::kFp8E4m3},
        Shape{1, 4, 1, 4096, 8, 4, 3, 2, KvDtype::kF32}, Shape{1, 37, 1, 8, 4096, 1, 34, 2, KvDtype::kF32},
        Shape{1, 9, 2, 1000, 33, 4, 5, 8, KvDtype::kFp8E5m2}}) {
    const Sequence from({.layers = s.layers,
                         .tokens = s.tokens,
                         .heads = s.heads,
                         .k_dim = s.k_dim,
                         .v_dim = s.v_dim,
                         .tokens_per_block = s.per_block,
                         .dtype = s.dtype});
    const uint64_t record =
        LowLayout::Of({.k_head_dim = s.k_dim, .v_head_dim = s.v_dim, .bits = s.bits}).record_bytes;
    ExpectLow(from, RandomRows(from.kv().shape, 1, s.evicted, 8), s.bits, 2 * record + 12,
              std::to_string(s.k_dim) + " and " + std::to_string(s.v_dim) + " elements");
  }
}

TEST(LowTest, ElementsThatAreNotFiniteLeaveTheOthersAsTheyAre) {
  const Sequence from({.layers = 1, .tokens = 40, .heads = 1, .k_dim = 8, .v_dim = 8},
                      [](bool, uint32_t, uint32_t token, uint32_t, uint32_t d) -> double {
                        if (token == 3) return d % 2 == 0 ? NAN : INFINITY;
                        if (token == 4) return -INFINITY;
                        if (token == 5) return d % 2 == 0 ? 0.0 : -0.0;
                        if (token == 6) return d % 2 == 0 ? -0.0 : 0.0;
                        if (d == 5) return 0.25;                              // A channel that is constant.
                        if (d == 6) return token % 2 == 0 ? 1e30 : -70000.0;  // It is beyond an f16.
                        if (d == 7) return token % 2 == 0 ? -0.0 : 0.0;
                        return token + d;
                      });
  Rows rows(1);
  for (uint32_t t = 0; t < 40; ++t) rows[0].push_back(t);
  for (const uint32_t bits : {2, 4, 8}) ExpectLow(from, rows, bits, 4096, std::to_string(bits) + " bits");
}

TEST(LowTest, WithEightBitsNumbersComeBackWithinHalfAStep) {
  const Sequence from(
      {.layers = 1, .tokens = 64, .heads = 1, .k_dim = 64, .v_dim = 64, .tokens_per_block = 16});
  const Rows rows = RandomRows(from.kv().shape, 1, 50, 2);
  const LowLayout layout =
      LowLayout::Of({.planes = 1, .k_head_dim = 64, .v_head_dim = 64, .bits = 8, .block_bytes = 8192});
  const std::vector<Memory> blocks = KeepLow(from, rows, 8, 8192);
  ASSERT_EQ(blocks.size(), 2) << "a record is above a half of a block";
  for (uint32_t i = 0; i < 50; ++i) {
    const Memory& block = blocks[i / 32];
    const auto range = [&](uint32_t at) {
      return std::pair(F16(block[at] | block[at + 1] << 8), F16(block[at + 2] | block[at + 3] << 8));
    };
    for (uint32_t d = 0; d < 64; ++d) {
      const auto [k_scale, k_zero] = range(4 * d);
      const double k = k_zero + double{k_scale} * block[layout.k_codes_at + i % 32 * layout.k_row_bytes + d];
      EXPECT_NEAR(k, from.K(0, rows[0][i], 0, d), k_scale * 0.51 + 0x1p-10);
      const auto [v_scale, v_zero] = range(layout.v_ranges_at + 4 * (i % 32));
      const double v = v_zero + double{v_scale} * block[layout.v_codes_at + i % 32 * layout.v_row_bytes + d];
      EXPECT_NEAR(v, from.V(0, rows[0][i], 0, d), v_scale * 0.51 + 0x1p-10);
    }
  }
}

}  // namespace
}  // namespace kvpool::scorers
