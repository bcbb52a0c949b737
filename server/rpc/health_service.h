// The standard health service, on the queues of everything else.
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

// SERVING from the start until NotServing. One status for all services.
class HealthState {
 public:
  explicit HealthState(std::vector<std::string> services) : services_(std::move(services)) {}
  // It drains or shuts down; Watch calls are told.
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

// Waits for calls on the site's queue, for as long as it runs.
void AcceptHealthCalls(const RpcSite<grpc::health::v1::Health::AsyncService>& site, HealthState* state);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_HEALTH_SERVICE_H_
