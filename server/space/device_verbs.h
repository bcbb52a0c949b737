// Score, Select, Prune, Compact and PlanBudgets against one space: what happens to them under its mutex, before and
// after the device (server/scoring/device_operation.h).
//
//   Prepare   refs checked, policy bound, signals staged, destinations leased
//   Submit    on its way to the device
//   Commit    scores and holds applied
//
// Refs are checked once, in Prepare. Until the end of Commit no verb can take a hold from them: later verbs of the
// session on its blocks wait behind the operation, and the session's end frees nothing. So what was true of
// them still is.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_DEVICE_VERBS_H_
#define KVPOOL_SERVER_SPACE_DEVICE_VERBS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvpool/v1/engine.pb.h"
#include "server/scoring/device_operation.h"
#include "server/scoring/device_runner.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/turn.h"
#include "server/space/verbs.h"

namespace kvpool {

// The runner of a rank's device. Null where the device can't run operations; `why` says so.
struct RunnerOrWhy {
  DeviceRunner* runner = nullptr;
  absl::Status why;
};

// The part of a request about scoring, beside its sequence and signals.
struct ScoreTerms {
  const v1::Policy* policy = nullptr;
  const v1::Reductions* reductions = nullptr;
  v1::Scope scope = v1::SCOPE_SEQUENCE;
  uint32_t budget_tokens = 0;
};

class DeviceVerbs {
 public:
  // So many addresses are looked up in the time that a block or key takes.
  static constexpr size_t kAddressesOfName = 8;

  // `runners` are indexed by rank.
  DeviceVerbs(SpaceState* state, BlockVerbs* verbs, std::vector<RunnerOrWhy> runners)
      : state_(*state), verbs_(*verbs), runners_(std::move(runners)) {}

  // Checks and plans the operation and leases what it writes. REQUIRES: ValidateOperation(operation) is OK,
  // and it is a device operation; the session has not ended, and its other calls wait. The turn may pause.
  // ABORTED: the session ended meanwhile.
  absl::StatusOr<std::shared_ptr<DeviceOperation>> Prepare(Turn& turn, Session* session,
                                                           const v1::Operation& operation);
  // Hands it to the runner. After an error it is as if it had never been prepared.
  absl::Status Submit(Turn& turn, std::shared_ptr<DeviceOperation> operation);
  // Applies what came of it: the replacement policy gets the scores, and holds that are to be released are, part by part, or are
  // the caller's to owe (owed_releases.h) where what is held outlives the daemon.
  // REQUIRES: its session has not ended. ABORTED: it ended meanwhile.
  absl::Status Commit(Turn& turn, DeviceOperation* operation);

 private:
  absl::Status CheckCanRun() const;
  // FAILED_PRECONDITION: the quality guard has turned the operation's policy off.
  absl::Status CheckGuard(const DeviceOperation& operation) const;
  absl::Status PrepareSequence(Turn& turn, const Session& session, const v1::Sequence& sequence,
                               SequenceWork* work);
  absl::Status PrepareScore(Turn& turn, const v1::Score& score, DeviceOperation* operation);
  absl::Status PrepareSelect(Turn& turn, const v1::Select& select, DeviceOperation* operation);
  absl::Status PreparePrune(Turn& turn, const v1::Prune& prune, DeviceOperation* operation);
  absl::Status PrepareCompact(Turn& turn, const v1::Compact& compact, DeviceOperation* operation);
  // Binds the policy and plans the scoring of work's sequence, with the signals that are staged,
  // on every rank.
  absl::Status PlanWork(const ScoreTerms& terms, SequenceWork* work) const;
  absl::Status PreparePlanBudgets(Turn& turn, const v1::PlanBudgets& plan, DeviceOperation* operation);
  // Checks the arrays of a state and notes where they are.
  absl::Status StageLess(Turn& turn, const v1::LessTerms& terms, DeviceOperation* operation);
  // Checks what HEADS_ADA or HEADS_GIVEN asks for against the sequence, of whose tokens a head keeps `kept` on average, and fills what the operation
  // needs for it.
  absl::Status PrepareAda(const v1::Compact& compact, uint32_t kept, DeviceOperation* operation) const;
  // Checks compact.low against the sequence, of whose tokens `kept` stay, and fills what the operation needs to write it.
  absl::Status PrepareLow(Turn& turn, const v1::Compact& compact, uint32_t kept, DeviceOperation* operation);
  absl::Status LeaseDestinations(Turn& turn, uint32_t count, DeviceOperation* operation);
  // Gives back holds of the operation, the last ones first.
  absl::Status Release(Turn& turn, const DeviceOperation& operation, absl::Span<const BlockRef> refs);
  // An array as one rank reads it.
  struct ArrayShape {
    uint64_t bytes = 0;
    uint64_t element_bytes = 0;
    // Each rank has an array of its own heads. Inlined, they stand one behind the other, in order of ranks.
    bool of_heads = false;
  };
  // Checks `data`, appends what is to be copied from where to the signals of the sequence, and answers where
  // the array will be, as StagedSignals counts.
  absl::StatusOr<uint64_t> StageData(Turn& turn, const Session& session, std::string_view field,
                                     const v1::Data& data, const ArrayShape& shape, StagedSignals* signals);
  // Checks that the array fits into the blocks of `data`, which the session must have leased.
  absl::Status CheckInBlocks(Turn& turn, const Session& session, std::string_view field, const v1::Data& data,
                             const ArrayShape& shape);
  // The parts of an array that lies in blocks, on one rank.
  absl::StatusOr<std::vector<KvPiece>> PiecesOf(Turn& turn, const Session& session, const v1::Data& data,
                                                uint64_t bytes, size_t rank) const;
  absl::Status StageSignals(Turn& turn, const Session& session, const v1::Signals& signals,
                            SequenceWork* work);
  absl::Status StageSignal(Turn& turn, const Session& session, const v1::Signals& signals,
                           const v1::Signal& signal, SequenceWork* work);
  absl::Status StageWindow(Turn& turn, const Session& session, const v1::QueryWindow& window,
                           SequenceWork* work);
  // With a group, the session must hold the blocks in it; without one, it must have leased them.
  absl::Status CheckRefs(Turn& turn, const Session& session, std::string_view field,
                         std::optional<uint32_t> group, absl::Span<const uint64_t> refs);

  SpaceState& state_;
  BlockVerbs& verbs_;
  const std::vector<RunnerOrWhy> runners_;
  // Those of one part: others use them during a pause.
  std::vector<BlockRef> refs_;
  std::vector<Verdict> verdicts_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEVICE_VERBS_H_
