// Every method that kvpoold serves, one line each.
#ifndef KVPOOL_SERVER_RPC_RPC_METHODS_H_
#define KVPOOL_SERVER_RPC_RPC_METHODS_H_

#include <functional>

#include "kvpool/v1/operator.grpc.pb.h"
#include "server/access/peer.h"
#include "server/access/refusal_log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/health_service.h"
#include "server/rpc/openings.h"
#include "server/rpc/step_call.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

// Has another process take over from this one, or says why not.
using UpgradeCall = std::function<absl::Status(const Peer&, const v1::UpgradeRequest&, v1::UpgradeResponse*)>;

// Both accept calls on the site's queue, for as long as it runs, and run verbs there.
void AcceptEngineCalls(const RpcSite<EngineService>& site, const EngineHost& host);
// The calls themselves run on `workers`. While the daemon drains, `health` says that it is not serving. Those who lack the
// role are in `refusals`.
void AcceptOperatorCalls(const RpcSite<v1::Operator::AsyncService>& site, Daemon* daemon, HealthState* health,
                         CallWorkers* workers, RefusalLog* refusals, UpgradeCall upgrade);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_METHODS_H_
