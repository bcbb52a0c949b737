// The standard reflection service, on the same queues as all other services.
#ifndef KVPOOL_SERVER_RPC_REFLECTION_SERVICE_H_
#define KVPOOL_SERVER_RPC_REFLECTION_SERVICE_H_

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

// One answer. It depends on the arguments alone, since the descriptors linked into the program do not change.
grpc::reflection::v1alpha::ServerReflectionResponse Reflect(
    const grpc::reflection::v1alpha::ServerReflectionRequest& request,
    const std::vector<std::string>& services);

// Serves calls on the site's queue, for as long as it runs. `services` outlives the queue.
void AcceptReflectionCalls(const RpcSite<grpc::reflection::v1alpha::ServerReflection::AsyncService>& site,
                           const std::vector<std::string>* services);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_REFLECTION_SERVICE_H_
