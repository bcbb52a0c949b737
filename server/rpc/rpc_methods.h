// Every method that kvpoold serves, one line each.
#ifndef KVPOOL_SERVER_RPC_RPC_METHODS_H_
#define KVPOOL_SERVER_RPC_RPC_METHODS_H_

#include "kvpool/v1/operator.grpc.pb.h"
#include "server/daemon/daemon.h"
#include "server/rpc/health_service.h"
#include "server/rpc/step_call.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

// Both serve calls on the site's queue, for as long as it runs.
void AcceptEngineCalls(const RpcSite<EngineService>& site, Daemon* daemon);
// While the daemon drains, `health` says that it is not serving.
void AcceptOperatorCalls(const RpcSite<v1::Operator::AsyncService>& site, Daemon* daemon,
                         HealthState* health);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_METHODS_H_
