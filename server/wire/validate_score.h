// The part of server/wire/validate.h that checks device operations and episodes.
#ifndef KVPOOL_SERVER_WIRE_VALIDATE_SCORE_H_
#define KVPOOL_SERVER_WIRE_VALIDATE_SCORE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// `groups`: how many layer groups the space has. INVALID_ARGUMENT names field, value and limit.
absl::Status ValidateScore(const v1::Score& score, uint32_t groups);
absl::Status ValidateSelect(const v1::Select& select, uint32_t groups);
absl::Status ValidatePrune(const v1::Prune& prune, uint32_t groups);
absl::Status ValidateCompact(const v1::Compact& compact, uint32_t groups);
absl::Status ValidatePlanBudgets(const v1::PlanBudgets& plan, uint32_t groups);
absl::Status ValidatePutEpisode(const v1::PutEpisode& put, uint32_t groups);
absl::Status ValidateChooseEpisode(const v1::ChooseEpisode& choose);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_VALIDATE_SCORE_H_
