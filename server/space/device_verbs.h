// Score, Prune, Compact and PlanBudgets against one space: what happens to them under its mutex, before and after the
// device (server/scoring/device_operation.h).
//
// Refs are checked when an operation starts. Until it is over no verb can take a hold from them: later verbs of the
// session on its blocks wait behind it, and the session's end frees nothing. So what was true of them still is.
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
#include "server/space/verbs.h"

namespace kvpool {

// What runs operations on a rank's memory. Null, and why, where the device can't.
struct RunnerOrWhy {
  DeviceRunner* runner = nullptr;
  absl::Status why;
};

// What requests say of scoring, beside sequence and signals.
struct ScoreTerms {
  const v1::Policy* policy = nullptr;
  const v1::Reductions* reductions = nullptr;
  v1::Scope scope = v1::SCOPE_SEQUENCE;
  uint32_t budget_tokens = 0;
};

class DeviceVerbs {
 public:
  // `runners`: by rank.
  DeviceVerbs(SpaceState* state, BlockVerbs* verbs, std::vector<RunnerOrWhy> runners)
      : state_(*state), verbs_(*verbs), runners_(std::move(runners)) {}

  // Checks and plans the operation and leases what it writes. REQUIRES: ValidateOperation(operation) is OK, and it is a
  // device operation; the session has not ended.
  absl::StatusOr<std::shared_ptr<DeviceOperation>> Prepare(Session* session, const v1::Operation& operation,
                                                           TimeMs now);
  // Hands it to the runner. After an error it is as if it had never been prepared.
  absl::Status Submit(std::shared_ptr<DeviceOperation> operation, TimeMs now);
  // Gives back what is to be released. REQUIRES: its session has not ended.
  void Settle(DeviceOperation* operation, TimeMs now);

 private:
  absl::Status CheckCanRun() const;
  absl::Status PrepareSequence(const Session& session, const v1::Sequence& sequence, SequenceWork* work);
  absl::Status PrepareScore(const v1::Score& score, DeviceOperation* operation);
  absl::Status PreparePrune(const v1::Prune& prune, DeviceOperation* operation);
  absl::Status PrepareCompact(const v1::Compact& compact, TimeMs now, DeviceOperation* operation);
  // Binds the policy and plans the scoring of work's sequence, with the signals that are staged, on every rank.
  absl::Status PlanWork(const ScoreTerms& terms, SequenceWork* work) const;
  absl::Status PreparePlanBudgets(const v1::PlanBudgets& plan, DeviceOperation* operation);
  absl::Status LeaseDestinations(uint32_t count, TimeMs now, DeviceOperation* operation);
  // An array as one rank reads it.
  struct ArrayShape {
    uint64_t bytes = 0;
    uint64_t element_bytes = 0;
    bool of_heads = false;  // Ranks differ: inlined, there is one array for each behind the other.
  };
  // What of `data` lies where: appended to the signals of the sequence. Answers the pointer, relative.
  absl::StatusOr<uint64_t> StageData(const Session& session, std::string_view field, const v1::Data& data,
                                     const ArrayShape& shape, StagedSignals* signals);
  // Where an array in blocks lies on a rank.
  std::vector<KvPiece> PiecesOf(const v1::Data& data, uint64_t bytes, size_t rank) const;
  absl::Status StageSignals(const Session& session, const v1::Signals& signals, SequenceWork* work);
  absl::Status StageSignal(const Session& session, const v1::Signals& signals, const v1::Signal& signal,
                           SequenceWork* work);
  absl::Status StageWindow(const Session& session, const v1::QueryWindow& window, SequenceWork* work);
  // Held by the session: in `group`; without one, leased.
  absl::Status CheckRefs(const Session& session, std::string_view field, std::optional<uint32_t> group,
                         absl::Span<const uint64_t> refs);
  uint64_t AddressOf(BlockId block, size_t rank) const;

  SpaceState& state_;
  BlockVerbs& verbs_;
  const std::vector<RunnerOrWhy> runners_;
  std::vector<BlockRef> refs_;
  std::vector<Verdict> verdicts_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEVICE_VERBS_H_
