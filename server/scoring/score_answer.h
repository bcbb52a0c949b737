// What of a device operation needs no device: which scores it wants, and, when all ranks have given theirs, the victims and
// the answer.
//
//   one rank, or rows of heads   a device chooses the victims where its scores lie
//   else                         ranks give rows of scores, which are joined (cuda/scorers/rank_rows.h) and chosen from here
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

// What each rank computes of one sequence; nothing: it is not scored.
struct WantedScores {
  bool tokens = false;
  bool blocks = false;
  bool spreads = false;
  bool victims = false;  // As the choice says.
  bool any() const { return tokens || blocks || spreads || victims; }
};
// `choice` is ChoiceOf(operation).
WantedScores WantedOf(const DeviceOperation& operation, const RowChoice& choice);

// Fills the result and what is to be released, used and gathered, out of what ranks gave. INVALID_ARGUMENT: the budget is
// below what is protected. REQUIRES: every rank's outcome is OK.
absl::Status AnswerOperation(DeviceOperation* operation);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_
