// The audit lines of operator calls that change something.
#ifndef KVPOOL_SERVER_RPC_AUDIT_H_
#define KVPOOL_SERVER_RPC_AUDIT_H_

#include <google/protobuf/message.h>

#include <string_view>

#include "absl/status/status.h"
#include "server/access/peer.h"

namespace kvpool {

// A line with the scalar fields of both messages, and the sizes of repeated ones. Then one for each message and each text that is
// repeated in the answer, for 32 of a field at most.
void AuditOperatorCall(const Peer& peer, std::string_view method, const google::protobuf::Message& request,
                       const google::protobuf::Message& response, const absl::Status& status);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_AUDIT_H_
