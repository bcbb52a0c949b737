// A sequence's K, V and signals, copied to the side that computes.
#ifndef KVPOOL_CUDA_LAB_STAGED_SEQUENCE_H_
#define KVPOOL_CUDA_LAB_STAGED_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/kv_compute.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::lab {

class StagedSequence {
 public:
  // Copies `kv` and `signals`, which are in this process's memory.
  static absl::StatusOr<StagedSequence> Make(KvCompute* compute, const scorers::KvView& kv,
                                             const scorers::Signals& signals);
  // Blocks of this layout with undefined content.
  static absl::StatusOr<StagedSequence> MakeEmpty(KvCompute* compute, const scorers::KvView& kv);

  // Views of the copies. The array of block addresses is in this process's memory, as KvCompute takes it.
  scorers::KvView kv() const {
    scorers::KvView kv = kv_;
    kv.blocks = addresses_.data();
    return kv;
  }
  const scorers::Signals& signals() const { return signals_; }

 private:
  static absl::StatusOr<StagedSequence> Reserve(KvCompute* compute, const scorers::KvView& kv,
                                                size_t more_bytes);
  scorers::KvView kv_;
  scorers::Signals signals_;
  std::vector<uint64_t> addresses_;
  std::unique_ptr<KvBuffer> memory_;
  uint64_t signals_at_ = 0;
};

// The bytes from a block's first to the last that the view describes.
uint64_t BlockBytes(const scorers::KvView& kv);

struct ScoredSequence {
  scorers::ScorePlan plan;
  std::vector<float> tokens, blocks;              // [rows][tokens], [rows][blocks]
  std::vector<scorers::AttentionSpread> spreads;  // [layers]; empty if no queries were read
};
// Scores the sequence on `compute`, on which it is staged.
absl::StatusOr<ScoredSequence> ScoreStaged(KvCompute* compute, const StagedSequence& sequence,
                                           const scorers::ScoreRequest& request);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_STAGED_SEQUENCE_H_
