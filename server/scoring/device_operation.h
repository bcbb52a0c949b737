// One Score, Prune, Compact or PlanBudgets on its way through the device.
//
//   prepared   under the space's mutex: refs checked, policy bound, everything planned, destinations leased
//   scored     a part for each rank, by the runner of its device, under no lock: scores of the rank's heads
//   answered   by whichever runner did the last part: ranks brought together, victims chosen, `result` filled, and what
//              is to be released noted (server/scoring/score_answer.h)
//   gathered   Compact alone: again a part for each rank
//   over       under the space's mutex again: holds given back, the verb answered, those behind it let go
//
// From prepared to over it is counted in Session::device_operations, so that no end of the session frees a block that
// it reads or writes; its session keeps the space. Between prepared and over it is the runners' alone; of `ranks` each
// entry is its own runner's while parts are out.
#ifndef KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_
#define KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "cuda/kv_compute.h"
#include "cuda/scorers/rank_rows.h"
#include "cuda/scorers/select.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

class DeviceRunner;
class Session;

// An array of an engine, copied to the computing side before the scorer reads it.
struct StagedArray {
  std::vector<std::vector<KvPiece>> by_rank;
  uint64_t offset = 0;  // From the start of the staging buffer.
};

// Signals whose pointers count from the start of the staging buffer plus kStagingOrigin: so that an array at its
// start is there too. They are at the same place on every rank.
struct StagedSignals {
  std::vector<StagedArray> arrays;
  scorers::Signals relative;
  size_t bytes = 0;
};
inline constexpr uint64_t kStagingOrigin = 64;
// The same with the pointers that a buffer at `address` makes of them.
scorers::Signals Relocate(const scorers::Signals& relative, uint64_t address);

// What one rank's device reads of a sequence: its share of the heads.
struct SequenceShare {
  std::vector<uint64_t> addresses;  // Of the sequence's blocks there.
  scorers::KvView kv;               // kv.blocks are the addresses.
  scorers::ScorePlan plan;          // Of a sequence that is scored, and not only moved.
};

// One sequence to read.
struct SequenceWork {
  uint32_t group = 0;
  bool fresh = false;
  std::vector<uint64_t> refs;  // As given.
  StagedSignals signals;
  scorers::ScoreRequest request;  // As asked; a rank's plan may be for finer rows (cuda/scorers/rank_rows.h).
  std::vector<SequenceShare> shares;  // By rank, of one shape.

  const scorers::KvShape& shape() const { return shares[0].kv.shape; }
  const scorers::ScorePlan& plan() const { return shares[0].plan; }
  // Rows of the answer.
  uint32_t rows() const { return scorers::RowsOfRanks(request, static_cast<uint32_t>(shares.size())); }
};

// How many leave of each row, and which may not.
struct RowChoice {
  bool of_tokens = false;           // Else of blocks.
  uint32_t count = 0;               // By their scores.
  std::vector<uint8_t> marks;       // Empty if none leaves.
  std::vector<uint32_t> discarded;  // Leave besides, of every row, whatever their scores.
  uint32_t leaving() const { return count + static_cast<uint32_t>(discarded.size()); }
};

// What came of one rank's part.
struct RankOutcome {
  absl::Status status;
  RowChoice choice;  // The same on every rank.
  uint32_t blocks_read = 0;
  std::vector<float> token_scores, block_scores;  // Rows of the rank's plan.
  std::vector<uint32_t> victims;  // Of each of those rows, where a rank can choose them alone.
  std::vector<scorers::AttentionSpread> spreads;  // By layer, of all sequences in order.
  std::vector<double> densities;                  // By plane, likewise.
};

struct RankWork {
  DeviceRunner* runner = nullptr;               // Of its device; ranks may share one.
  std::vector<uint64_t> destination_addresses;  // Of DeviceOperation::destinations.
  RankOutcome outcome;
};

struct DeviceOperation {
  uint64_t id = 0;  // Among those of its session.
  std::shared_ptr<Session> session;
  v1::Operation request;
  std::string_view policy;  // Of the metrics: a policy's name, or that of a method.
  uint64_t space = 0;
  std::vector<SequenceWork> sequences;  // One, but for PlanBudgets.
  std::vector<RankWork> ranks;
  // Of Prune and Compact.
  scorers::Protection protection;
  std::vector<scorers::IndexRange> protect;
  std::vector<scorers::IndexRange> discard;
  uint32_t budget_tokens = 0;
  std::vector<BlockRef> destinations;  // Leased for Compact.
  bool lacks_blocks = false;           // They can't be leased yet, and may be later: it is not prepared.

  std::atomic<bool> abandoned{false};  // Its session has ended: what it would answer nobody hears.
  std::atomic<uint32_t> parts_out{0};  // Of the present round: scoring, or gathering.
  bool answered = false;
  double seconds = 0;  // On the device of rank 0.

  // ---- What came of it
  absl::Status status;
  v1::OperationResult result;
  std::vector<BlockRef> released;  // Holds of the session to give back: victims, sources.
  uint32_t destinations_used = 0;  // The first so many; the others go back.
  // Of Score with block scores: where each block is among those of the sequence, for the replacement policy.
  std::vector<float> places;
  // What Compact moves: of each row, behind the `settled` tokens at the start that stay where they are. Empty: nothing.
  std::vector<uint32_t> kept;  // [kept_rows][kept_tokens]
  uint32_t kept_rows = 0, kept_tokens = 0, settled = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_
