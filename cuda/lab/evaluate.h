// What a policy says of a sequence from a file: scores, victims, what stays.
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

struct Options {
  std::string policy = scorers::kDefaultPolicy;
  std::vector<std::pair<std::string, std::string>> settings;
  scorers::Scope scope = scorers::Scope::kSequence;
  scorers::TokenReduction over_tokens = scorers::TokenReduction::kMean;
  scorers::PlaneReduction over_heads = scorers::PlaneReduction::kMean;
  scorers::PlaneReduction over_layers = scorers::PlaneReduction::kMean;
  uint32_t budget_tokens = 0;  // 0: the file's.
  uint32_t tokens_per_block = 0;
  uint32_t threads = 1;
  KvCompute* compute = nullptr;  // That scores; null: this host, on so many threads.
};

// The policy with its parameters. Over a host that is not named, an importance in the file is the host.
absl::StatusOr<scorers::BoundPolicy> BindFor(const Options& options, const Problem& problem);

struct Scores {
  uint32_t rows = 0;
  std::vector<float> tokens;                      // [rows][tokens]
  std::vector<float> blocks;                      // [rows][blocks]
  std::vector<scorers::AttentionSpread> spreads;  // [layers]; empty if no queries were read.
};
absl::StatusOr<Scores> Score(const Problem& problem, const scorers::BoundPolicy& policy,
                             const Options& options);

// Ascending indices of blocks (Prune) or tokens (Compact), one list a row.
struct Choice {
  Scores scores;
  std::vector<std::vector<uint32_t>> victims;
  std::vector<std::vector<uint32_t>> kept;
};
// INVALID_ARGUMENT: no budget, or one below what is protected.
absl::StatusOr<Choice> Prune(const Problem& problem, const scorers::BoundPolicy& policy,
                             const Options& options);
absl::StatusOr<Choice> Compact(const Problem& problem, const scorers::BoundPolicy& policy,
                               const Options& options);

// A sequence that grows: at each step one token is appended, the newest query's attention over the resident tokens is
// drawn or read, and one token leaves when more than the budget are resident.
//   T       steps                      budget   resident tokens
//   rows    [step][resident]           the attention; without it softmax of 2n, n from the generator below
//   recent  of the policy              seed     of the generator, by default 3
// The generator: x = x * 6364136223846793005 + 1442695040888963407, u = (x >> 11) / 2^53,
// n = (u1 + u2 + u3 + u4 - 2) * sqrt(3).
struct Growth {
  std::vector<std::pair<uint32_t, uint32_t>> evictions;  // Step, token.
  std::vector<uint32_t> final;                           // Resident tokens at the end.
};
// Whether the tensors are such a problem.
bool IsGrowth(const Tensors& tensors);
absl::StatusOr<Growth> Grow(const Tensors& tensors, const Options& options);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_EVALUATE_H_
