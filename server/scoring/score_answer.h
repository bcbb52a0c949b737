// The part of a device operation that needs no device: which scores it wants and, once all ranks have given
// theirs, the victims and the answer. Who chooses the victims:
//
//   heads that share a budget          this unit, from the ranks' rows joined (cuda/scorers/rank_rows.h)
//   one rank, or a row for each head   the device, where its scores are
//   anything else                      this unit, from the ranks' rows joined
#ifndef KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_
#define KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/scoring/device_operation.h"

namespace kvpool {

// What the request leaves to the scores: nothing but for Prune and Compact by policy. Each rank computes it once, before
// it scores; its outcome keeps it.
RowChoice ChoiceOf(const DeviceOperation& operation);

// What each rank computes of one sequence. Nothing at all: the sequence is not scored.
struct WantedScores {
  bool tokens = false;
  bool blocks = false;
  bool spreads = false;
  bool victims = false;  // The choice says how many.
  bool any() const { return tokens || blocks || spreads || victims; }
};
// `choice` is ChoiceOf(operation).
WantedScores WantedOf(const DeviceOperation& operation, const RowChoice& choice);

// Fills everything below "What came of it" in the operation from the ranks' outcomes. INVALID_ARGUMENT: the
// budget is below what is protected. REQUIRES: every rank's outcome is OK.
absl::Status AnswerOperation(DeviceOperation* operation);

// Whether tokens that leave are merged into those that stay.
bool Merges(const DeviceOperation& operation);
// Whether they are added to a state.
bool Folds(const DeviceOperation& operation);
// Whether the device has something to write: rows that move or go on in low precision, a state, or positions. REQUIRES: the operation is
// answered.
bool Moves(const DeviceOperation& operation);
// Adds what came of a merge or a fold to the answer; nothing if there was none. REQUIRES: every rank's rows are moved.
void AnswerDisposition(DeviceOperation* operation);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_
