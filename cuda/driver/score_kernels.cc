#include "cuda/driver/score_kernels.h"

#include "cuda/driver/kernels_image.h"
#include "kvpool_policies/all.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

struct TypeNames {
  const char *records, *anchor_dots, *window_lse, *window, *nearest, *low, *fold;
};
#define KVPOOL_TYPE_NAMES(type)                                                                         \
  {                                                                                                     \
    "kvpool_score_records_" #type, "kvpool_score_anchor_dots_" #type, "kvpool_score_window_lse_" #type, \
        "kvpool_score_window_" #type, "kvpool_score_nearest_" #type, "kvpool_score_low_" #type,         \
        "kvpool_score_fold_" #type                                                                      \
  }
// Indexed by KvDtype.
constexpr TypeNames kTypeNames[] = {KVPOOL_TYPE_NAMES(f32), KVPOOL_TYPE_NAMES(f16), KVPOOL_TYPE_NAMES(bf16),
                                    KVPOOL_TYPE_NAMES(fp8_e4m3), KVPOOL_TYPE_NAMES(fp8_e5m2)};

struct PolicyNames {
  const char *score, *blocks;
};
template <typename Policy>
constexpr const char* kBlocksName = nullptr;
#define KVPOOL_BLOCKS_NAME(Policy) \
  template <>                      \
  constexpr const char* kBlocksName<scorers::Policy> = "kvpool_score_blocks_" #Policy;
KVPOOL_BLOCK_POLICIES(KVPOOL_BLOCKS_NAME)
#define KVPOOL_POLICY_NAMES(Policy) {"kvpool_score_" #Policy, kBlocksName<scorers::Policy>},
constexpr PolicyNames kPolicyNames[] = {KVPOOL_POLICIES(KVPOOL_POLICY_NAMES)};

}  // namespace

absl::StatusOr<ScoreKernels> ScoreKernels::Load(const std::shared_ptr<const CudaContext>& context) {
  const Driver& driver = context->driver();
  CUmodule module;
  RETURN_IF_ERROR(context->Check(driver.cuModuleLoadData(&module, kvpool_score_kernels_image),
                                 "score kernels: cuModuleLoadData"));
  ScoreKernels kernels;
  kernels.module_ = CudaModule(context, module);
  absl::Status status;
  const auto find = [&](const char* name) {
    CudaKernel kernel{.name = name};
    status.Update(context->Check(driver.cuModuleGetFunction(&kernel.function, module, name), name));
    return kernel;
  };
  for (size_t type = 0; type < kernels.types_.size(); ++type) {
    const TypeNames& names = kTypeNames[type];
    kernels.types_[type] = {find(names.records), find(names.anchor_dots), find(names.window_lse),
                            find(names.window),  find(names.nearest),     find(names.low),
                            find(names.fold)};
  }
  for (const PolicyNames& names : kPolicyNames) {
    kernels.policies_.push_back(
        {find(names.score), names.blocks != nullptr ? find(names.blocks) : CudaKernel{}});
  }
  kernels.unpack = find("kvpool_score_unpack");
  kernels.anchors = find("kvpool_score_anchors");
  kernels.queries = find("kvpool_score_queries");
  kernels.reduce_planes = find("kvpool_score_reduce_planes");
  kernels.reduce_tokens = find("kvpool_score_reduce_tokens");
  kernels.gather = find("kvpool_score_gather");
  kernels.merge_norms = find("kvpool_score_merge_norms");
  kernels.link = find("kvpool_score_link");
  kernels.merge = find("kvpool_score_merge");
  kernels.sum_folds = find("kvpool_score_sum_folds");
  kernels.drift_logits = find("kvpool_score_drift_logits");
  kernels.drift_outputs = find("kvpool_score_drift_outputs");
  kernels.copy_pieces = find("kvpool_score_copy_pieces");
  kernels.count_digits = find("kvpool_score_count_digits");
  kernels.count_tile = find("kvpool_score_count_tile");
  kernels.victims = find("kvpool_score_victims");
  RETURN_IF_ERROR(status);
  return kernels;
}

}  // namespace kvpool
