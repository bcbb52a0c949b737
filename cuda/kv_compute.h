// Scores and moves K and V in place: the device side of Score, Prune, Compact and PlanBudgets.
//
//   Allocate   makes memory on the side that computes, which the caller keeps: for records and signals
//   Stage      copies signals, from host memory or from blocks, into such memory
//   Score      computes the records that are missing, then the policy and its reductions. The answer is
//              scores in host memory, or only which candidates leave: a million scores need not be copied
//   Gather     copies rows of K and V into other blocks
//
// Addresses of blocks are those of Slab::address() on this device. The workspace grows to the largest call's
// and stays. Plan is thread-safe; of the other calls one thread makes one at a time, and each returns when
// its work on the device is done. On a GPU the work runs on a stream of its own, of the lowest priority.
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
  virtual uint64_t address() const = 0;  // a multiple of 64
  virtual size_t bytes() const = 0;
};

// Bytes to stage: on the device, in a block of K and V, or in this process's memory.
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

// The choice of tokens, or else blocks, that leave each row of scores, as by scorers::SelectVictims.
struct VictimChoice {
  bool of_tokens = false;
  uint32_t count = 0;                         // victims of each row; 0: nothing is chosen
  absl::Span<const uint8_t> protected_marks;  // one for each token or block; 1: it stays
  absl::Span<uint32_t> victims;               // [rows][count], ascending in each row
};

struct ScoreCall {
  const scorers::ScorePlan* plan = nullptr;
  scorers::KvView kv;        // kv.blocks is an array in this process's memory
  scorers::Signals signals;  // staged: on the device
  // One record for each block, in memory of Allocate; empty if the plan needs none.
  absl::Span<float* const> records;
  // The blocks whose records this call computes; those of the others are computed already.
  absl::Span<const BlockRun> to_record;
  // Arrays in this process's memory.
  scorers::ScoreOutput output;
  VictimChoice choice;
};

class KvCompute {
 public:
  virtual ~KvCompute() = default;
  // RESOURCE_EXHAUSTED: the device is out of memory, with the numbers.
  virtual absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) = 0;
  // Copies the pieces one behind the other to `to`, an address inside a buffer.
  virtual absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) = 0;
  // scorers::PlanScore with its errors, and the bytes of workspace that Score will use. Any thread may call.
  virtual absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                                  const scorers::Signals& signals) const = 0;
  // INVALID_ARGUMENT: more victims are asked for than there are candidates. RESOURCE_EXHAUSTED:
  // like Allocate.
  virtual absl::Status Score(const ScoreCall& call) = 0;
  // The request's arrays are in this process's memory. REQUIRES: no destination is a source.
  virtual absl::Status Gather(const scorers::GatherRequest& request) = 0;
};

struct KvComputeOptions {
  uint32_t host_threads = 1;  // threads of a host device, 1 to 1024
};

std::unique_ptr<KvCompute> MakeHostKvCompute(const KvComputeOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_KV_COMPUTE_H_
