// Opens a tier while the daemon runs. Neither a disk nor a server can be told to stop: a thread waits for it, and whoever has
// waited for long enough does not wait for that thread.
#ifndef KVPOOL_SERVER_DAEMON_TIER_OPENING_H_
#define KVPOOL_SERVER_DAEMON_TIER_OPENING_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/tiers/tier_view.h"

namespace kvpool {

// Thread-safe. At most one of each name is being opened.
class TierOpening {
 public:
  using Open = std::function<absl::StatusOr<TierMember>()>;
  // What `open` answers, which may outlive this object. DEADLINE_EXCEEDED, or UNAVAILABLE once `stop` is true: it has not come;
  // it is closed as soon as it has. FAILED_PRECONDITION: one of this name is being opened, whether somebody waits for it or not.
  // RESOURCE_EXHAUSTED: the system has no memory or no thread for it.
  absl::StatusOr<TierMember> Run(const std::string& name, Open open, std::chrono::milliseconds limit,
                                 const std::atomic<bool>& stop);

 private:
  struct UnderWay {
    Mutex mu;
    CondVar changed;
    bool over ABSL_GUARDED_BY(mu) = false;
    bool given_up ABSL_GUARDED_BY(mu) = false;
    absl::StatusOr<TierMember> opened ABSL_GUARDED_BY(mu);
  };
  static void RunOnThread(const Open& open, UnderWay* under_way);

  Mutex mu_;
  // Keyed by name: the last one.
  absl::flat_hash_map<std::string, std::shared_ptr<UnderWay>> last_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_TIER_OPENING_H_
