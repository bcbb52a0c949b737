// A daemon's operator verbs, each a call with a deadline.
#ifndef KVPOOL_CLIENT_TOOLS_OPERATOR_CLIENT_H_
#define KVPOOL_CLIENT_TOOLS_OPERATOR_CLIENT_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvpool/v1/operator.pb.h"

namespace kvpool::tools {

struct Endpoint {
  std::string socket;             // Path; see proto/support/default_socket.h.
  std::string address;            // HOST:PORT; when set, TLS over TCP instead of the socket.
  std::string tls_ca;             // A PEM file; the daemon's certificate must be signed by this.
  std::string tls_cert, tls_key;  // PEM files, this client's; the daemon asks for them.
  std::string tls_name;           // The name in the daemon's certificate, where HOST is not it.
  absl::Duration deadline = absl::Seconds(5);
};

enum class Health { kServing, kNotServing, kUnknownService };

// Errors of the calls: UNAVAILABLE, and DEADLINE_EXCEEDED, when no daemon answers, with what to try; all
// others are the daemon's own. UNIMPLEMENTED: the daemon is older than this tool.
class OperatorClient {
 public:
  // INVALID_ARGUMENT: a PEM file is missing or can't be read.
  static absl::StatusOr<std::unique_ptr<OperatorClient>> Open(const Endpoint& endpoint);
  ~OperatorClient();
  // The longest wait for an answer.
  absl::Duration deadline() const;

  absl::StatusOr<v1::EvictResponse> Evict(const v1::EvictRequest& request);
  absl::StatusOr<v1::ListSpacesResponse> ListSpaces(const v1::ListSpacesRequest& request);
  absl::StatusOr<v1::ListSessionsResponse> ListSessions(const v1::ListSessionsRequest& request);
  absl::StatusOr<v1::ListBlocksResponse> ListBlocks(const v1::ListBlocksRequest& request);
  absl::StatusOr<v1::GetStatsResponse> GetStats(const v1::GetStatsRequest& request);
  absl::StatusOr<v1::RevokeResponse> Revoke(const v1::RevokeRequest& request);
  absl::StatusOr<v1::EndSessionResponse> EndSession(const v1::EndSessionRequest& request);
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request);
  absl::StatusOr<v1::ExplainResponse> Explain(const v1::ExplainRequest& request);
  absl::StatusOr<v1::PinPrefixResponse> PinPrefix(const v1::PinPrefixRequest& request);
  absl::StatusOr<v1::GetPoliciesResponse> GetPolicies(const v1::GetPoliciesRequest& request);
  absl::StatusOr<v1::SetPolicyResponse> SetPolicy(const v1::SetPolicyRequest& request);
  absl::StatusOr<v1::EraseResponse> Erase(const v1::EraseRequest& request);
  absl::StatusOr<v1::SetShareResponse> SetShare(const v1::SetShareRequest& request);
  absl::StatusOr<v1::GetGuardResponse> GetGuard(const v1::GetGuardRequest& request);
  absl::StatusOr<v1::ResetGuardResponse> ResetGuard(const v1::ResetGuardRequest& request);
  absl::StatusOr<v1::GetRecoveryResponse> GetRecovery(const v1::GetRecoveryRequest& request);
  absl::StatusOr<v1::ListTiersResponse> ListTiers(const v1::ListTiersRequest& request);
  absl::StatusOr<v1::AttachTierResponse> AttachTier(const v1::AttachTierRequest& request);
  absl::StatusOr<v1::DrainTierResponse> DrainTier(const v1::DrainTierRequest& request);
  absl::StatusOr<v1::DetachTierResponse> DetachTier(const v1::DetachTierRequest& request);
  absl::StatusOr<v1::UpgradeResponse> Upgrade(const v1::UpgradeRequest& request);
  // What the daemon that comes after the one with this epoch says first. UNAVAILABLE: none came until then.
  absl::StatusOr<v1::GetStatsResponse> AwaitAfter(uint64_t epoch, absl::Time give_up);
  // grpc.health.v1.Health/Check; "" asks about the server as a whole. May be repeated until
  // a daemon is there.
  absl::StatusOr<Health> CheckHealth(const std::string& service);

 private:
  class Rep;
  explicit OperatorClient(std::unique_ptr<Rep> rep);
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool::tools

#endif  // KVPOOL_CLIENT_TOOLS_OPERATOR_CLIENT_H_
