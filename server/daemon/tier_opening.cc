#include "server/daemon/tier_opening.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// Who waits looks so often whether the daemon is to end.
constexpr std::chrono::milliseconds kStopPoll{20};

}  // namespace

void TierOpening::RunOnThread(const Open& open, UnderWay* under_way) {
  absl::StatusOr<TierMember> opened = open();
  {
    MutexLock lock(&under_way->mu);
    if (!under_way->given_up) {
      under_way->opened = std::move(opened);
      under_way->over = true;
      under_way->changed.SignalAll();
      return;
    }
  }
  // Nobody wants it. To close it may take long as well.
  opened = absl::CancelledError();
  MutexLock lock(&under_way->mu);
  under_way->over = true;
}

absl::StatusOr<TierMember> TierOpening::Run(Open open, std::chrono::milliseconds limit,
                                            const std::atomic<bool>& stop) {
  const auto until = std::chrono::steady_clock::now() + limit;
  const auto under_way = std::make_shared<UnderWay>();
  {
    MutexLock lock(&mu_);
    if (last_ != nullptr) {
      MutexLock last(&last_->mu);
      if (!last_->over)
        return absl::FailedPreconditionError("another tier is being opened, or is closed again: try later");
    }
    last_ = under_way;
  }
  std::thread([open = std::move(open), under_way] { RunOnThread(open, under_way.get()); }).detach();
  MutexLock lock(&under_way->mu);
  while (!under_way->over && !stop && std::chrono::steady_clock::now() < until) {
    under_way->changed.WaitUntil(&under_way->mu,
                                 std::min(until, std::chrono::steady_clock::now() + kStopPoll));
  }
  if (under_way->over) return std::move(under_way->opened);
  under_way->given_up = true;
  if (stop) return absl::UnavailableError("the daemon is ending, and the tier is not attached");
  return absl::DeadlineExceededError(absl::StrCat("the tier was not open after ", limit.count(),
                                                  " ms, and is not attached: give it longer"));
}

}  // namespace kvpool
