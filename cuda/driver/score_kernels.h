// The kernels of the scorers (cuda/kernels/score_kernels.cu), loaded into one GPU's context.
#ifndef KVPOOL_CUDA_DRIVER_SCORE_KERNELS_H_
#define KVPOOL_CUDA_DRIVER_SCORE_KERNELS_H_

#include <cuda.h>

#include <array>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/policies/registry.h"

namespace kvpool {

struct CudaKernel {
  CUfunction function = nullptr;
  const char* name = nullptr;  // named in errors
};

class ScoreKernels {
 public:
  struct OfType {
    CudaKernel records, anchor_dots, window_lse, window, nearest, low, fold;
  };
  struct OfPolicy {
    CudaKernel score;
    CudaKernel blocks;  // only of policies with blocks of their own
  };

  // REQUIRES: the context is current.
  static absl::StatusOr<ScoreKernels> Load(const std::shared_ptr<const CudaContext>& context);

  const OfType& of(scorers::KvDtype dtype) const { return types_[static_cast<size_t>(dtype)]; }
  const OfPolicy& of(scorers::PolicyId policy) const { return policies_[static_cast<size_t>(policy)]; }

  CudaKernel unpack, anchors, queries, reduce_planes, reduce_tokens;
  CudaKernel gather, copy_pieces;
  CudaKernel merge_norms, link, merge, sum_folds;
  CudaKernel drift_logits, drift_outputs;
  CudaKernel count_digits, count_tile, victims;

 private:
  CudaModule module_;
  std::array<OfType, 5> types_;     // indexed by KvDtype
  std::vector<OfPolicy> policies_;  // indexed by PolicyId
};

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_SCORE_KERNELS_H_
