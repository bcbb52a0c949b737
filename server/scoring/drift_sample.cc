#include "server/scoring/drift_sample.h"

#include <algorithm>

namespace kvpool {
namespace {

using scorers::KvShape;

bool Drops(const DeviceOperation& operation) {
  if (operation.request.has_prune()) return operation.result.prune().victims_size() > 0;
  return operation.loses;
}

// What stays has to be where it was, as it was.
bool KeepsBytes(const v1::Operation& request) {
  const v1::Disposition disposition = request.compact().disposition();
  return request.has_prune() || disposition == v1::DISPOSITION_UNSPECIFIED ||
         disposition == v1::DISPOSITION_DROP;
}

GuardOutcome CanBeMeasured(const DeviceOperation& operation) {
  const SequenceWork& sequence = operation.sequences[0];
  // What the engine discards was not the policy's choice. Padding would be attended before.
  if (sequence.shape().v_head_dim == 0 || !KeepsBytes(operation.request) || !operation.discard.empty() ||
      !operation.padding.empty())
    return GuardOutcome::kUnsuited;
  return sequence.signals.window.has_value() ? GuardOutcome::kMeasured : GuardOutcome::kNoWindow;
}

}  // namespace

bool IsGuarded(const v1::Operation& operation) {
  return operation.has_prune() ? !operation.prune().dry_run()
                               : operation.has_compact() && !operation.compact().has_keep();
}

void TakeSample(QualityGuard* guard, DeviceOperation* operation) {
  if (!IsGuarded(operation->request) || !Drops(*operation)) return;
  const std::optional<uint32_t> number =
      guard->Take(operation->space, operation->policy, CanBeMeasured(*operation));
  if (!number.has_value()) return;
  // The multiples of the golden ratio are spread evenly, also those of every second sample where two groups take turns.
  constexpr uint32_t kGolden = 2654435769u;
  const uint32_t layers = operation->sequences[0].shape().layers;
  operation->drift_layer = static_cast<uint32_t>(uint64_t{*number * kGolden} * layers >> 32);
}

bool KeepsByHead(const DeviceOperation& operation) {
  return operation.request.has_compact() && operation.kept_rows > 1 &&
         operation.sequences[0].request.scope == scorers::Scope::kHead;
}

std::vector<uint32_t> KeptBits(const DeviceOperation& operation, uint32_t rank) {
  const SequenceWork& sequence = operation.sequences[0];
  const KvShape& shape = sequence.shape();
  const uint32_t words = shape.tokens / 32 + (shape.tokens % 32 != 0);
  if (operation.request.has_prune()) {
    std::vector<uint32_t> bits(words, UINT32_MAX);
    for (const uint32_t block : operation.result.prune().victims()) {
      const uint32_t first = block * shape.tokens_per_block;
      for (uint32_t token = first; token < first + shape.TokensOf(block); ++token)
        bits[token / 32] &= ~(1u << token % 32);
    }
    return bits;
  }
  const bool by_head = KeepsByHead(operation);
  const uint32_t layer = *operation.drift_layer, heads = by_head ? shape.kv_heads : 1;
  uint64_t row = operation.kept_rows > 1 ? layer : 0;
  if (by_head) row = (row * operation.ranks.size() + rank) * heads;
  std::vector<uint32_t> bits(size_t{heads} * words);
  for (uint32_t head = 0; head < heads; ++head) {
    const uint32_t* const kept = operation.kept.data() + (row + head) * operation.kept_tokens;
    for (uint32_t i = 0; i < operation.kept_tokens && kept[i] != scorers::kNoToken; ++i)
      bits[size_t{head} * words + kept[i] / 32] |= 1u << kept[i] % 32;
  }
  return bits;
}

void ReportSample(QualityGuard* guard, const DeviceOperation& operation) {
  absl::Status status = operation.status;
  scorers::Drift all;
  for (const RankWork& rank : operation.ranks) {
    const absl::StatusOr<scorers::Drift>& drift = rank.outcome.drift;
    status.Update(drift.status());
    if (!drift.ok()) continue;
    all.sum += drift->sum;
    all.rows += drift->rows;
    all.greatest = std::max(all.greatest, drift->greatest);
  }
  if (!status.ok()) return guard->Fail(operation.space, operation.policy, status);
  guard->Add(operation.space, operation.policy, all.sum / static_cast<double>(all.rows), all.greatest);
}

}  // namespace kvpool
