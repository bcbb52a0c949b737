// The standard health service, on the same queues as all other services.
#ifndef KVPOOL_SERVER_RPC_HEALTH_SERVICE_H_
#define KVPOOL_SERVER_RPC_HEALTH_SERVICE_H_

#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "proto/support/mutex.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

class HealthWatch;

// One status for all services: SERVING at first, then what SetServing says.
class HealthState {
 public:
  explicit HealthState(std::vector<std::string> services) : services_(std::move(services)) {}
  // False while the daemon drains or shuts down. Open Watch calls are told of the change.
  void SetServing(bool serving);
  bool serving() const;
  // "" is the whole server.
  bool Knows(const std::string& service) const;

 private:
  friend class HealthWatch;
  const std::vector<std::string> services_;
  mutable Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = true;
  std::set<HealthWatch*> watches_ ABSL_GUARDED_BY(mu_);
};

// Serves Check and Watch on the site's queue, for as long as it runs.
void AcceptHealthCalls(const RpcSite<grpc::health::v1::Health::AsyncService>& site, HealthState* state);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_HEALTH_SERVICE_H_
