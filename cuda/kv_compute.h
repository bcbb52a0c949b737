// KvCompute scores K and V where they lie, and copies rows of them between blocks: the device side of Score, Select,
// Prune, Compact and PlanBudgets. A *record* is what policies need to know of one block (its features), kept so
// that the block is read once.
//
//   Allocate   reserves memory of the device, or of the host for the host device, which the caller owns: for
//              records and signals
//   Stage      copies signals, from host memory or from blocks, into such memory; or what a kernel is to read into blocks
//   Score      computes the records of `to_record`, then the policy and its reductions. The answer is scores in
//              host memory, or only the indices of the tokens or blocks that leave: a million scores need not be
//              copied
//   Gather     copies rows of K and V into other blocks
//   Merge      does so too, and merges the rows that are not copied into those that are
//   Fold       adds rows that are not copied to a state of constant size
//   KeepLow    writes rows of K and V to other blocks in low precision
//   Drift      measures how far a layer's attention output moves when tokens leave; it changes nothing
//
// Block addresses are as Slab::address() gives them (cuda/device.h). The workspace grows with the largest call
// so far and is kept until destruction. Plan may be called from any thread at any time; of all other calls at
// most one runs at a time, and it returns when its work on the device is done. On a GPU the work runs on its
// own stream, of the lowest priority. In host memory a shortage ends the process, as any does.
#ifndef KVPOOL_CUDA_KV_COMPUTE_H_
#define KVPOOL_CUDA_KV_COMPUTE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/scorers/drift.h"
#include "cuda/scorers/fold.h"
#include "cuda/scorers/gather.h"
#include "cuda/scorers/low.h"
#include "cuda/scorers/merge.h"
#include "cuda/scorers/score.h"

namespace kvpool {

// Memory that Allocate made.
class KvBuffer {
 public:
  virtual ~KvBuffer() = default;
  virtual uint64_t address() const = 0;  // a multiple of 64
  virtual size_t bytes() const = 0;
};

// Bytes to stage. in_block: `address` is in a block, on the device; else it is in this process's memory.
struct KvPiece {
  uint64_t address = 0;
  size_t bytes = 0;
  bool in_block = false;
};

// Blocks [first, first + count) of a sequence.
struct BlockRun {
  uint32_t first = 0;
  uint32_t count = 0;
};

// Which tokens (of_tokens) or blocks leave: in each row the `count` lowest scores among those not protected, as
// scorers::SelectVictims chooses.
struct VictimChoice {
  bool of_tokens = false;
  uint32_t count = 0;  // victims of each row; 0: nothing is chosen
  absl::Span<const uint8_t>
      protected_marks;           // the same for every row, one for each token or block; 1: it stays
  absl::Span<uint32_t> victims;  // [rows][count], ascending in each row
};

// What came of a merge, for each plane.
struct MergeOutcome {
  std::vector<float> thresholds;  // cosines, from which on tokens were merged
  std::vector<uint32_t> merged;   // tokens
};

struct ScoreCall {
  const scorers::ScorePlan* plan = nullptr;
  scorers::KvView kv;        // kv.blocks is an array in this process's memory
  scorers::Signals signals;  // their data was staged and lies on the device
  // A pointer for each block to its record, in memory of Allocate; empty if the plan needs none.
  absl::Span<float* const> records;
  // The blocks whose records this call computes. REQUIRES: the records of the others are computed.
  absl::Span<const BlockRun> to_record;
  // The arrays of both are in this process's memory; of `output`, those not wanted are null.
  scorers::ScoreOutput output;
  VictimChoice choice;
};

class KvCompute {
 public:
  virtual ~KvCompute() = default;
  // RESOURCE_EXHAUSTED: the GPU is out of memory.
  virtual absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) = 0;
  // Copies the pieces one behind the other to `to`, an address inside a KvBuffer or a block. REQUIRES: they fit there.
  virtual absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) = 0;
  // Does scorers::PlanScore, with its errors, and adds the workspace that Score will take here.
  virtual absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                                  const scorers::Signals& signals) const = 0;
  // INVALID_ARGUMENT: choice.count is above the number of tokens or blocks not protected. RESOURCE_EXHAUSTED:
  // the GPU is out of memory.
  virtual absl::Status Score(const ScoreCall& call) = 0;
  // About how long the products of a plan take, in seconds: a guess by the kind of the device, for a bound.
  virtual double SecondsFor(const scorers::ScorePlan& plan) const = 0;
  // The request's arrays are in this process's memory. REQUIRES: no destination is a source.
  virtual absl::Status Gather(const scorers::GatherRequest& request) = 0;
  // The same of these arrays. RESOURCE_EXHAUSTED: the GPU is out of memory. REQUIRES: no destination is a source;
  // scorers::CheckMerge(request) is OK.
  virtual absl::StatusOr<MergeOutcome> Merge(const scorers::MergeRequest& request) = 0;
  // Block addresses and indices of tokens are in this process's memory; weights and states lie on the device. Returns how many
  // tokens were added, summed over planes. RESOURCE_EXHAUSTED: the GPU is out of memory. REQUIRES: scorers::CheckFold is OK.
  virtual absl::StatusOr<uint64_t> Fold(const scorers::FoldRequest& request) = 0;
  // The same of these arrays. RESOURCE_EXHAUSTED: the GPU is out of memory, or takes no launch of so many records. REQUIRES: no
  // destination is a source.
  virtual absl::Status KeepLow(const scorers::LowRequest& request) = 0;
  // The window's data was staged and lies on the device; the other arrays of the request are in this process's memory. OUT_OF_RANGE: the
  // outputs are not finite. RESOURCE_EXHAUSTED: the GPU is out of memory. REQUIRES: scorers::CheckDrift(request) is OK.
  virtual absl::StatusOr<scorers::Drift> Drift(const scorers::DriftRequest& request) = 0;
};

struct KvComputeOptions {
  uint32_t host_threads = 1;  // threads of a host device, 1 to 1024
};

// Computes on host memory; a GPU's comes from Device::MakeKvCompute.
std::unique_ptr<KvCompute> MakeHostKvCompute(const KvComputeOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_KV_COMPUTE_H_
