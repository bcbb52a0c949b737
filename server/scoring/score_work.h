// Carries out one device's parts of operations, with buffers and a feature cache that are
// used again and again.
//
//   Score    stages signals -> finds or makes features -> computes scores, or victims, of the rank's heads
//   Gather   copies the rows of K and V of those heads that stay into the blocks of the new table; where the request
//            says so it merges the others into them, writes them to blocks in low precision, or adds them to a state
//
// Results go into the operation, as the outcome of the rank. Not thread-safe: it belongs to
// the runner's thread.
#ifndef KVPOOL_SERVER_SCORING_SCORE_WORK_H_
#define KVPOOL_SERVER_SCORING_SCORE_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cuda/kv_compute.h"
#include "server/scoring/device_operation.h"
#include "server/scoring/feature_cache.h"
#include "server/scoring/score_answer.h"

namespace kvpool {

class ScoreWork {
 public:
  // `compute` outlives this object.
  ScoreWork(KvCompute* compute, size_t feature_cache_bytes, size_t workspace_bytes, absl::Duration time_limit)
      : compute_(*compute),
        features_(compute, feature_cache_bytes),
        workspace_limit_bytes_(workspace_bytes),
        time_limit_(time_limit) {}

  // RESOURCE_EXHAUSTED: it needs more workspace than the limit, or would multiply for longer. INVALID_ARGUMENT: the
  // budget is below what is protected.
  absl::Status Score(DeviceOperation* operation, uint32_t rank);
  // RESOURCE_EXHAUSTED: a merge or a fold is too large, or it or lists of tokens need more workspace than the limit.
  absl::Status Gather(DeviceOperation* operation, uint32_t rank);
  // Measures what the operation does to attention outputs of its drift_layer, from blocks as they were before it. An error changes
  // nothing. RESOURCE_EXHAUSTED: it takes more workspace than the limit, or the operation would multiply for longer with it.
  absl::StatusOr<scorers::Drift> MeasureDrift(const DeviceOperation& operation, uint32_t rank);
  // Writes the rank's positions of a selection to its blocks.
  absl::Status PutPositions(const DeviceOperation& operation, uint32_t rank);
  FeatureStats feature_stats() const { return features_.stats(); }

 private:
  struct Part {
    const DeviceOperation& operation;
    const SequenceWork& sequence;
    uint32_t rank = 0;
    const SequenceShare& share() const { return sequence.shares[rank]; }
  };
  absl::Status ScoreSequence(const Part& part, const WantedScores& wanted, RankOutcome* outcome);
  // Copies of blocks in which padding is no numbers, for scores that know none.
  struct BlankedBlocks {
    std::unique_ptr<KvBuffer> buffer;
    std::vector<uint64_t> addresses;  // The sequence's blocks, or their copies.
  };
  // REQUIRES: the sequence has padding.
  absl::StatusOr<BlankedBlocks> BlankPadding(const Part& part);
  // `gather` is this rank's.
  absl::Status Merge(DeviceOperation* operation, uint32_t rank, const scorers::GatherRequest& gather);
  // The same of the tokens that leave.
  absl::Status KeepLow(const DeviceOperation& operation, uint32_t rank, const scorers::GatherRequest& gather);
  absl::Status Fold(DeviceOperation* operation, uint32_t rank, const scorers::GatherRequest& gather);
  absl::Status StageSignals(const Part& part, scorers::Signals* staged);
  // Fills records_ and runs_ for the sequence, and counts the blocks that are to be read.
  absl::Status FindFeatures(const Part& part, uint32_t* blocks_read);
  absl::Status Reserve(std::unique_ptr<KvBuffer>* buffer, size_t bytes);
  // What is under way on a device can't be stopped, and all others wait for it: it is refused before.
  // `besides` is what it does beside its plans.
  absl::Status CheckTime(const DeviceOperation& operation, uint32_t rank,
                         const scorers::ScorePlan& besides = {}) const;
  // `ranked`: scores that heads share a budget by, which takes the runner's time besides.
  absl::Status CheckTime(double products, double seconds, double ranked = 0) const;
  absl::Status CheckWorkspace(const Part& part, size_t unkept_bytes) const;

  KvCompute& compute_;
  FeatureCache features_;
  const size_t workspace_limit_bytes_;
  const absl::Duration time_limit_;
  std::unique_ptr<KvBuffer> staging_;
  std::unique_ptr<KvBuffer>
      unkept_;  // Records of blocks that are not full, or for which the cache has no room.
  std::vector<float*> records_;
  std::vector<BlockRun> runs_;
  std::vector<uint32_t> unkept_blocks_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_SCORE_WORK_H_
