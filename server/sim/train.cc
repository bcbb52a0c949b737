#include "server/sim/train.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/sim/train_cold_rl.h"
#include "server/sim/train_learned.h"

namespace kvpool::sim {
namespace {

constexpr Trainer kTrainers[] = {
    {"cold_rl", "deep Q-learning, a block at a time, from what its decisions led to", TrainColdRl},
    {"learned", "a network, from what was found again and when", TrainLearned},
};

}  // namespace

absl::Span<const Trainer> Trainers() { return kTrainers; }

absl::StatusOr<Weights> Train(std::string_view policy, const Workload& workload,
                              const TrainOptions& options) {
  for (const Trainer& trainer : kTrainers) {
    if (trainer.policy == policy) return trainer.train(workload, options);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "policy \"", absl::string_view(policy.data(), policy.size()), "\" is not trained; those that are: ",
      absl::StrJoin(kTrainers, ", ",
                    [](std::string* out, const Trainer& trainer) { out->append(trainer.policy); })));
}

}  // namespace kvpool::sim
