#include "server/daemon/tier_opening.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"

namespace kvpool {
namespace {

// Who waits looks so often whether the daemon is to end.
constexpr std::chrono::milliseconds kStopPoll{20};

}  // namespace

void TierOpening::RunOnThread(const Open& open, UnderWay* under_way) {
  absl::StatusOr<TierMember> opened;
  // A start would end here. A daemon that serves does not.
  try {
    opened = open();
  } catch (const std::exception& error) {
    opened = absl::ResourceExhaustedError(absl::StrCat("opening the tier: ", error.what()));
  }
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

absl::StatusOr<TierMember> TierOpening::Run(const std::string& name, Open open,
                                            std::chrono::milliseconds limit, const std::atomic<bool>& stop) {
  const auto until = std::chrono::steady_clock::now() + limit;
  const auto under_way = std::make_shared<UnderWay>();
  {
    MutexLock lock(&mu_);
    std::shared_ptr<UnderWay>& last = last_[name];
    if (last != nullptr) {
      MutexLock of_last(&last->mu);
      if (!last->over) {
        return absl::FailedPreconditionError(
            absl::StrCat("tier ", name,
                         ": another one is being opened, or is closed again as it came too late: try later"));
      }
    }
    last = under_way;
  }
  try {
    NamedThread("tier-opening", [open = std::move(open), under_way] {
      RunOnThread(open, under_way.get());
    }).detach();
  } catch (const std::system_error& error) {
    MutexLock lock(&under_way->mu);
    under_way->over = true;
    return absl::ResourceExhaustedError(absl::StrCat("no thread to open the tier: ", error.what()));
  }
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
