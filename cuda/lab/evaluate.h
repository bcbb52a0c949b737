// Runs a policy on a sequence from a file: scores, victims, and the tokens or blocks that stay.
#ifndef KVPOOL_CUDA_LAB_EVALUATE_H_
#define KVPOOL_CUDA_LAB_EVALUATE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/kv_compute.h"
#include "cuda/lab/problem.h"
#include "cuda/lab/tensor.h"
#include "cuda/scorers/score.h"

namespace kvpool::lab {

// How the heads of a layer share its budget, where each head keeps tokens of its own (Scope::kHead).
enum class HeadBudgets : uint8_t {
  kUniform,  // each keeps as many
  kAda,      // scorers::SelectShared
  kCurve,    // scorers::KeptByShares of the input's budget_curve
};

struct Options {
  std::string policy = scorers::kDefaultPolicy;
  std::vector<std::pair<std::string, std::string>> settings;
  scorers::Scope scope = scorers::Scope::kSequence;
  scorers::TokenReduction over_tokens = scorers::TokenReduction::kMean;
  scorers::PlaneReduction over_heads = scorers::PlaneReduction::kMean;
  scorers::PlaneReduction over_layers = scorers::PlaneReduction::kMean;
  uint32_t budget_tokens = 0;  // 0: as in the file
  HeadBudgets heads = HeadBudgets::kUniform;
  double safeguard = 0.2;  // kAda leaves each head this share of its budget at least.
  uint32_t tokens_per_block = 0;
  uint32_t threads = 1;
  // The device that scores; null: this host, on `threads` threads.
  KvCompute* compute = nullptr;
};

// The policy with its parameters. The host of a policy that builds on one is the one named, else the file's
// importance if it has any, else the policy's default.
absl::StatusOr<scorers::BoundPolicy> BindFor(const Options& options, const Problem& problem);

struct Scores {
  uint32_t rows = 0;
  std::vector<float> tokens;                      // [rows][tokens]
  std::vector<float> blocks;                      // [rows][blocks]
  std::vector<scorers::AttentionSpread> spreads;  // [layers]; empty if no queries were read
};
absl::StatusOr<Scores> Score(const Problem& problem, const scorers::BoundPolicy& policy,
                             const Options& options);

// Ascending indices of blocks (Prune) or tokens (Compact), a list for each row.
struct Choice {
  Scores scores;
  std::vector<std::vector<uint32_t>> victims;
  std::vector<std::vector<uint32_t>> kept;
};
// INVALID_ARGUMENT: there is no budget, it is below the number of protected ones, heads are to share it in another
// scope than theirs, or by a curve that the input has not.
absl::StatusOr<Choice> Prune(const Problem& problem, const scorers::BoundPolicy& policy,
                             const Options& options);
absl::StatusOr<Choice> Compact(const Problem& problem, const scorers::BoundPolicy& policy,
                               const Options& options);

// A sequence that grows: at each step one token is appended, the newest query's attention over the resident
// tokens is drawn or read, and one token leaves when more than the budget are resident.
//
//   tensor    meaning
//   T         number of steps
//   budget    resident tokens
//   rows      [step][resident], the attention; without it the softmax of 2n, n from the generator below
//   seed      of the generator; 3 unless given
//   recent    the policy's parameter of this name
//
// The generator: x = x * 6364136223846793005 + 1442695040888963407, u = (x >> 11) / 2^53,
// n = (u1 + u2 + u3 + u4 - 2) * sqrt(3).
struct Growth {
  std::vector<std::pair<uint32_t, uint32_t>> evictions;  // (step, token)
  std::vector<uint32_t> final;                           // tokens that are resident at the end
};
// Whether the tensors describe such a sequence.
bool IsGrowth(const Tensors& tensors);
absl::StatusOr<Growth> Grow(const Tensors& tensors, const Options& options);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_EVALUATE_H_
