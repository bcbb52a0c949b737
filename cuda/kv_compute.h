// Scores and moves K and V where they lie: the device side of Score, Prune, Compact and PlanBudgets.
//
//   Allocate   memory on the side that computes, kept by the caller and used again: records of features, staged signals
//   Stage      signals, out of host memory or out of blocks, into such memory
//   Score      features of the blocks that have none yet, then policy and reductions; scores come to host memory, or
//              only which of the candidates leave: what is chosen among a million is chosen where its scores lie
//   Gather     rows of K and V into other blocks
//
// Addresses of blocks are those of Slab::address() on this device. Workspace grows to what the largest call needs and
// stays. Not thread-safe, Plan aside: one thread calls, and each call returns when its work on the device is done. On a
// GPU work goes to a stream of its own of the lowest priority, never the default stream.
#ifndef KVPOOL_CUDA_KV_COMPUTE_H_
#define KVPOOL_CUDA_KV_COMPUTE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/scorers/gather.h"
#include "cuda/scorers/score.h"

namespace kvpool {

// Memory on the side that computes.
class KvBuffer {
 public:
  virtual ~KvBuffer() = default;
  virtual uint64_t address() const = 0;  // A multiple of 64.
  virtual size_t bytes() const = 0;
};

// Bytes to stage.
struct KvPiece {
  uint64_t address = 0;
  size_t bytes = 0;
  bool in_block = false;  // An address on the device; else in this process's memory.
};

// Blocks [first, first + count) of a sequence.
struct BlockRun {
  uint32_t first = 0;
  uint32_t count = 0;
};

// Which tokens or blocks leave of each row of scores, as scorers::SelectVictims.
struct VictimChoice {
  bool of_tokens = false;                     // Else of blocks.
  uint32_t count = 0;                         // Of each row; 0: nothing is chosen.
  absl::Span<const uint8_t> protected_marks;  // One a token or block; 1: stays.
  absl::Span<uint32_t> victims;               // [rows][count], ascending in each row.
};

struct ScoreCall {
  const scorers::ScorePlan* plan = nullptr;
  scorers::KvView kv;                    // kv.blocks: an array in this process's memory.
  scorers::Signals signals;              // Staged.
  absl::Span<float* const> records;      // One a block, in memory of Allocate; empty if the plan needs none.
  absl::Span<const BlockRun> to_record;  // Their records are to be made first; the others' are.
  scorers::ScoreOutput output;           // In this process's memory.
  VictimChoice choice;
};

class KvCompute {
 public:
  virtual ~KvCompute() = default;
  // RESOURCE_EXHAUSTED: the device is out of memory, with the numbers.
  virtual absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) = 0;
  // One piece behind the other, from `to` on: inside a buffer.
  virtual absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) = 0;
  // With the workspace that Score will use. Any thread: it looks at nothing that changes. INVALID_ARGUMENT,
  // FAILED_PRECONDITION: as scorers::PlanScore.
  virtual absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                                  const scorers::Signals& signals) const = 0;
  // INVALID_ARGUMENT: more victims are asked for than there are candidates. RESOURCE_EXHAUSTED: as Allocate.
  virtual absl::Status Score(const ScoreCall& call) = 0;
  // Arrays of the request are in this process's memory. REQUIRES: no destination is a source.
  virtual absl::Status Gather(const scorers::GatherRequest& request) = 0;
};

struct KvComputeOptions {
  uint32_t host_threads = 1;  // That a host device computes with. 1 to 1024.
};

std::unique_ptr<KvCompute> MakeHostKvCompute(const KvComputeOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_KV_COMPUTE_H_
