// A sequence of blocks in any layout and type, with its values as doubles.
#ifndef KVPOOL_TESTS_SCORERS_SEQUENCE_H_
#define KVPOOL_TESTS_SCORERS_SEQUENCE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/score.h"

namespace kvpool::scorers {

enum class Arrangement { kTokenHeadDim, kHeadTokenDim, kColumnMajorKeys, kScattered };

struct SequenceOptions {
  uint32_t layers = 2, tokens = 37, heads = 2, k_dim = 20, v_dim = 20, tokens_per_block = 8;
  KvDtype dtype = KvDtype::kF32;
  Arrangement arrangement = Arrangement::kTokenHeadDim;
  uint64_t seed = 1;
};

class Sequence {
 public:
  using Maker =
      std::function<double(bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim)>;
  // Normally distributed values from the seed, or those of `maker`, rounded to the type.
  explicit Sequence(const SequenceOptions& options, const Maker& maker = nullptr);
  Sequence(const Sequence&) = delete;

  const KvView& kv() const { return kv_; }
  double K(uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) const {
    return Get(kv_.k, layer, token, head, dim);
  }
  double V(uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) const {
    return Get(kv_.v, layer, token, head, dim);
  }
  double Norm(bool value, uint32_t layer, uint32_t token, uint32_t head) const;

 private:
  double Get(const KvPlane& plane, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) const;
  void Put(const KvPlane& plane, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim, double x);

  std::vector<std::vector<unsigned char>> memory_;
  std::vector<uint64_t> addresses_;
  KvView kv_;
};

// Gives the same numbers on every platform, which the standard library's distributions do not.
class Random {
 public:
  explicit Random(uint64_t seed) : x_(seed * 2 + 1) {}
  uint64_t Next();
  double Uniform() { return static_cast<double>(Next() >> 11) / 9007199254740992.0; }
  double Normal();
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(Next() % n); }

 private:
  uint64_t x_;
};

// Which tokens leave: rows for all planes, for each layer or for each plane. Those of planes are told from those of layers only if there
// are more heads than one.
using Rows = std::vector<std::vector<uint32_t>>;
Rows RandomRows(const KvShape& shape, uint32_t rows, uint32_t tokens, uint64_t seed);

struct TestScores {
  std::vector<float> tokens, blocks;
  std::vector<AttentionSpread> spreads;
};
// Scores on the device that this run is about (test_compute.h); `threads` are the host's.
using TestSettings = std::vector<std::pair<std::string, std::string>>;
absl::StatusOr<TestScores> ScoreSequence(const KvView& kv, const Signals& signals, const std::string& policy,
                                         const TestSettings& settings = {}, ScoreRequest request = {},
                                         uint32_t threads = 1);

}  // namespace kvpool::scorers

#endif  // KVPOOL_TESTS_SCORERS_SEQUENCE_H_
