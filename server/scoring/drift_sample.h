// Between device operations and the quality guard: which operations it is told of, what is measured of one, and what came of it.
#ifndef KVPOOL_SERVER_SCORING_DRIFT_SAMPLE_H_
#define KVPOOL_SERVER_SCORING_DRIFT_SAMPLE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/scoring/device_operation.h"
#include "server/scoring/quality_guard.h"

namespace kvpool {

// Does it drop tokens that a policy chooses? Neither a dry run does, nor one whose engine has chosen.
bool IsGuarded(const v1::Operation& operation);

// Sets `drift_layer` if the operation is in the sample. REQUIRES: it is answered.
void TakeSample(QualityGuard* guard, DeviceOperation* operation);

// The bits of the tokens that stay in the operation's layer, for scorers::DriftRequest of one rank: rows of its heads if they differ,
// else one row. REQUIRES: it is in the sample.
std::vector<uint32_t> KeptBits(const DeviceOperation& operation, uint32_t rank);
// Whether they differ.
bool KeepsByHead(const DeviceOperation& operation);

// Tells the guard what all ranks have measured. REQUIRES: the operation is in the sample.
void ReportSample(QualityGuard* guard, const DeviceOperation& operation);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_DRIFT_SAMPLE_H_
