// The part of a device operation that needs no device: which scores it wants and, once all ranks have given
// theirs, the victims and the answer. Who chooses the victims:
//
//   one rank, or a row for each head   the device, where its scores are
//   anything else                      this unit, from the ranks' rows joined (cuda/scorers/rank_rows.h)
#ifndef KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_
#define KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/scoring/device_operation.h"

namespace kvpool {

// What each rank computes of one sequence. Nothing at all: the sequence is not scored.
struct WantedScores {
  bool tokens = false;
  bool blocks = false;
  bool spreads = false;
  bool victims = false;  // The choice is ChoiceOf's.
  bool any() const { return tokens || blocks || spreads || victims; }
};
WantedScores WantedOf(const DeviceOperation& operation);

// How many items leave each row, and which ones may not. An item is a token or a block.
struct RowChoice {
  bool of_tokens = false;
  uint32_t count = 0;               // How many leave by their scores, the lowest first.
  std::vector<uint8_t> marks;       // Nonzero: the item may not leave. Empty if `count` is 0.
  std::vector<uint32_t> discarded;  // Items that leave every row besides, whatever their scores.
  uint32_t leaving() const { return count + static_cast<uint32_t>(discarded.size()); }
};
RowChoice ChoiceOf(const DeviceOperation& operation);

// Fills everything below "What came of it" in the operation from the ranks' outcomes. INVALID_ARGUMENT: the
// budget is below what is protected. REQUIRES: every rank's outcome is OK.
absl::Status AnswerOperation(DeviceOperation* operation);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_SCORE_ANSWER_H_
