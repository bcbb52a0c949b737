// One Score, Select, Prune, Compact or PlanBudgets on its way through the device.
//
//   state      done                                                   by
//   prepared   refs checked, all planned, destinations leased         a verb, under the space's mutex
//   scored     scores of each rank's heads                            the runner of its device, under no lock
//   answered   ranks joined, victims chosen, `result` filled          the runner that did the last part
//   gathered   Compact: rows are in their blocks,                     the runner of each rank's device
//              tokens that leave added to a state, if asked for;
//              Select: positions written to blocks, if asked for;
//              in the guard's sample (quality_guard.h): drift measured
//              before that, of the blocks as they are
//   over       holds given back, answered, parked verbs resumed       the last runner, under the mutex
//
// From prepared to over the operation is counted in Session::device_operations: as long as it is, no end of
// the session frees a block that it reads or writes, and the session keeps the space. In between it belongs
// to the runners alone; while parts are out, each entry of `ranks` belongs to its own runner.
#ifndef KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_
#define KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kv_compute.h"
#include "cuda/scorers/rank_rows.h"
#include "cuda/scorers/select.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/low_layout.h"

namespace kvpool {

class DeviceRunner;
class Session;

// An array of an engine, copied to the computing side before the scorer reads it.
struct StagedArray {
  std::vector<std::vector<KvPiece>> by_rank;
  uint64_t offset = 0;  // Bytes behind the start of the staging buffer.
};

// Signals whose pointers are offsets: kStagingOrigin plus the place in the staging buffer, which is the same
// on every rank. The origin keeps an array at the buffer's start from looking like a null pointer, which
// means that it was not given.
struct StagedSignals {
  std::vector<StagedArray> arrays;
  scorers::Signals relative;
  std::optional<size_t> window;  // The place in `arrays` of the window's queries, if they were given.
  size_t bytes = 0;
};
inline constexpr uint64_t kStagingOrigin = 64;
// The same signals with pointers into a staging buffer at `address`.
scorers::Signals Relocate(const scorers::Signals& relative, uint64_t address);

// What one rank's device reads of a sequence: its share of the heads.
struct SequenceShare {
  std::vector<uint64_t> addresses;  // The sequence's blocks on this device.
  scorers::KvView kv;               // kv.blocks points into `addresses`.
  scorers::ScorePlan plan;          // plan.rows is 0 where the sequence is only moved.
};

// One sequence to read.
struct SequenceWork {
  uint32_t group = 0;
  bool fresh = false;
  std::vector<uint64_t> refs;  // The request's, unchanged.
  StagedSignals signals;
  // The engine's request; a rank's plan may be for finer rows (cuda/scorers/rank_rows.h).
  scorers::ScoreRequest request;
  std::vector<SequenceShare> shares;  // One for each rank, all of one shape.

  const scorers::KvShape& shape() const { return shares[0].kv.shape; }
  const scorers::ScorePlan& plan() const { return shares[0].plan; }
  // Rows of the answer.
  uint32_t rows() const { return scorers::RowsOfRanks(request, static_cast<uint32_t>(shares.size())); }
};

// How many items leave each row, and which ones may not. An item is a token or a block.
struct RowChoice {
  bool of_tokens = false;
  uint32_t count = 0;               // How many leave by their scores, the lowest first.
  std::vector<uint8_t> marks;       // Nonzero: the item may not leave. Empty if `count` is 0.
  std::vector<uint32_t> discarded;  // Items that leave every row besides, whatever their scores.
  uint32_t leaving() const { return count + static_cast<uint32_t>(discarded.size()); }
};

// What came of one rank's part. Rows are those of the rank's plan, planes are (layer, head of the rank).
struct RankOutcome {
  absl::Status status;
  RowChoice choice;  // The same on every rank.
  uint32_t blocks_read = 0;
  std::vector<float> token_scores, block_scores;  // [rows][tokens], [rows][blocks]
  std::vector<uint32_t> victims;                  // [rows][count]; empty unless a rank can choose them alone.
  // PlanBudgets: one for each layer, and one for each plane. The first sequence's come first.
  std::vector<scorers::AttentionSpread> spreads;
  std::vector<double> densities;
  MergeOutcome merge;   // Compact with DISPOSITION_MERGE, once its rows are moved.
  uint64_t folded = 0;  // Tokens added to the rank's state with DISPOSITION_LESS, summed over planes.
  // That of the operation's drift_layer, once it is measured.
  absl::StatusOr<scorers::Drift> drift = absl::UnavailableError("it was not measured");
};

struct RankWork {
  DeviceRunner* runner = nullptr;               // The runner of the rank's device; ranks may share one.
  std::vector<uint64_t> destination_addresses;  // DeviceOperation::destinations on this device.
  std::vector<uint64_t> low_addresses;          // Those of Compact's low blocks that are written.
  std::vector<KvPiece> into;  // Where the positions of a Select or a Compact's state go; empty: nowhere.
  RankOutcome outcome;
};

struct DeviceOperation {
  uint64_t id = 0;  // Unique within its session.
  std::shared_ptr<Session> session;
  v1::Operation request;
  std::string_view policy;  // The metrics' label: the name of a policy, or of a method of PlanBudgets.
  uint64_t space = 0;
  std::string tenant;                   // Whose turn it takes.
  std::vector<SequenceWork> sequences;  // One; PlanBudgets may have several.
  std::vector<RankWork> ranks;
  uint32_t selected_blocks = 0;  // Select: blocks of each row.
  // ---- Prune and Compact alone
  scorers::Protection protection;
  std::vector<scorers::IndexRange> protect;
  std::vector<scorers::IndexRange> discard;
  uint32_t budget_tokens = 0;
  std::vector<BlockRef> destinations;  // Leased for Compact.
  LowLayout low;                       // Compact with DISPOSITION_LOW: what its low blocks hold.
  uint32_t most_tokens = 0;  // Compact with HEADS_ADA or HEADS_GIVEN: what a head keeps at most; else 0.
  // The tokens of each plane of all ranks that are padding of a compaction before, [layers][heads of ranks]; empty: none.
  std::vector<scorers::IndexRange> padding;
  uint64_t block_bytes = 0;  // What a block has from its address on; 0 without padding.
  StagedSignals less;  // Compact with DISPOSITION_LESS: its weights, then the state before if there is one.
  bool lacks_blocks = false;  // `destinations` can't be leased yet, but may be later: it is not prepared.

  // ---- Progress
  std::atomic<bool> abandoned{false};  // Its session has ended, and nobody waits for the answer.
  std::atomic<uint32_t> parts_out{0};  // Parts of this round, scoring or gathering, that are not done.
  bool answered = false;
  std::optional<uint32_t> drift_layer;  // Its drift is measured in this layer.
  double seconds = 0;                   // Time on rank 0's device.

  // ---- What came of it
  absl::Status status;
  v1::OperationResult result;
  std::vector<BlockRef> released;  // Holds that the session gives back: victims, and sources of a compaction.
  uint32_t destinations_used = 0;  // Destinations from the first on that were filled; the others go back.
  // Score with block scores: the place of each block among those of the sequence, from 0 for the least
  // valuable to 1, for the replacement policy.
  std::vector<float> places;
  // Compact: the tokens that stay. The first `settled` of each row stay where they are, the others are moved.
  // Rows that are shorter end with scorers::kNoToken.
  std::vector<uint32_t> kept;  // [kept_rows][kept_tokens]; empty: nothing is moved.
  uint32_t kept_rows = 0, kept_tokens = 0, settled = 0;
  bool loses = false;  // Some token leaves, of some row.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_DEVICE_OPERATION_H_
