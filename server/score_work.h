// What one thread needs to carry out device operations: the arrays that it uses again and again, and the features it
// keeps.
//
//   Run     signals staged -> features found or made -> scores -> victims -> answer; Compact: rows gathered
//
// Everything that an operation would release is only noted in it. Not thread-safe: the runner's thread.
#ifndef KVPOOL_SERVER_SCORE_WORK_H_
#define KVPOOL_SERVER_SCORE_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cuda/kv_compute.h"
#include "server/device_operation.h"
#include "server/feature_cache.h"

namespace kvpool {

class ScoreWork {
 public:
  // `compute` outlives it.
  ScoreWork(KvCompute* compute, size_t feature_cache_bytes, size_t workspace_bytes)
      : compute_(*compute),
        features_(compute, feature_cache_bytes),
        workspace_limit_bytes_(workspace_bytes) {}

  // Fills operation->result and what is to be released. RESOURCE_EXHAUSTED: it needs more workspace than there may be.
  // INVALID_ARGUMENT: the budget is below what is protected.
  absl::Status Run(DeviceOperation* operation);
  FeatureStats feature_stats() const { return features_.stats(); }

 private:
  absl::Status RunScore(DeviceOperation* operation);
  absl::Status RunPrune(DeviceOperation* operation);
  absl::Status RunCompact(DeviceOperation* operation);
  absl::Status RunPlanBudgets(DeviceOperation* operation);

  struct Wanted {
    bool tokens = false;
    bool blocks = false;
    bool spreads = false;
    bool token_victims = false;  // That are not in marks_, of each row.
    bool block_victims = false;
  };
  // Into token_scores_, block_scores_, spreads_ and, as many as it has room for in each row, victims_.
  absl::Status Score(const DeviceOperation& operation, const SequenceWork& sequence, const Wanted& wanted);
  absl::Status StageSignals(const StagedSignals& signals, scorers::Signals* staged);
  // records_ and runs_ of the sequence; blocks_read_.
  absl::Status FindFeatures(const DeviceOperation& operation, const SequenceWork& sequence);
  absl::Status Reserve(std::unique_ptr<KvBuffer>* buffer, size_t bytes);
  absl::Status CheckWorkspace(const SequenceWork& sequence, size_t unkept_bytes) const;
  // kept_: of each row, ascending.
  absl::Status ChooseTokens(const DeviceOperation& operation, const SequenceWork& sequence);
  uint32_t LeadingBlocks(const scorers::KvShape& shape, uint32_t rows, uint32_t kept) const;
  void FillCompacted(DeviceOperation* operation, uint32_t rows, uint32_t kept, uint32_t leading);

  KvCompute& compute_;
  FeatureCache features_;
  const size_t workspace_limit_bytes_;
  std::unique_ptr<KvBuffer> staging_;
  std::unique_ptr<KvBuffer> unkept_;  // Records of blocks that are not full, or beyond what is kept.
  std::vector<float*> records_;
  std::vector<BlockRun> runs_;
  std::vector<uint32_t> unkept_blocks_;
  uint32_t blocks_read_ = 0;
  std::vector<float> token_scores_, block_scores_;
  std::vector<scorers::AttentionSpread> spreads_;
  std::vector<uint8_t> marks_;
  std::vector<uint32_t> victims_, kept_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORE_WORK_H_
