#include "client/tools/operator_client.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/session/connect_error.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "kvpool/v1/operator.grpc.pb.h"
#include "proto/cli/flags.h"
#include "proto/support/status_macros.h"

namespace kvpool::tools {
namespace {

using google::protobuf::internal::WireFormatLite;

// The largest replies have 1,000 blocks (ListBlocks) or a few thousand sessions, which is a daemon's most.
constexpr int kMostReplyBytes = 64 << 20;
// The pause between two looks for a daemon that is about to come.
constexpr absl::Duration kLookAgain = absl::Milliseconds(2);
// A connection that one left behind which has ended may say nothing for long.
constexpr absl::Duration kSoonAnswered = absl::Milliseconds(500);

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const Endpoint& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMostReplyBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A proxy for the outside world has no business between an operator and this machine's daemon.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (endpoint.address.empty()) {
    if (!absl::StrCat(endpoint.tls_ca, endpoint.tls_cert, endpoint.tls_key, endpoint.tls_name).empty()) {
      return absl::InvalidArgumentError("--tls-ca, --tls-cert, --tls-key and --tls-name are for --address");
    }
    return grpc::CreateCustomChannel("unix:" + endpoint.socket, grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  if (endpoint.tls_ca.empty() || endpoint.tls_cert.empty() || endpoint.tls_key.empty()) {
    return absl::InvalidArgumentError(
        "--address needs --tls-ca, --tls-cert and --tls-key: operator verbs over TCP are served with mutual "
        "TLS only");
  }
  grpc::SslCredentialsOptions tls;
  ASSIGN_OR_RETURN(tls.pem_root_certs, ReadFlagFileOrPipe("tls-ca", endpoint.tls_ca));
  ASSIGN_OR_RETURN(tls.pem_cert_chain, ReadFlagFileOrPipe("tls-cert", endpoint.tls_cert));
  ASSIGN_OR_RETURN(tls.pem_private_key, ReadFlagFileOrPipe("tls-key", endpoint.tls_key));
  if (!endpoint.tls_name.empty()) arguments.SetSslTargetNameOverride(endpoint.tls_name);
  return grpc::CreateCustomChannel(endpoint.address, grpc::SslCredentials(tls), arguments);
}

// The cause of a failed connection over TCP, found in gRPC's long message.
std::string TcpTrouble(absl::string_view grpc_words) {
  if (absl::StrContains(grpc_words, "Connection refused")) return "connection refused";
  if (absl::StrContains(grpc_words, "DNS resolution")) return "no such host";
  if (absl::StrContains(grpc_words, "andshak") || absl::StrContains(grpc_words, "SSL")) {
    return "the TLS handshake failed";
  }
  return "the connection failed";
}

// Nobody answers at the endpoint: why, as far as it can be told, and what to try.
absl::Status Unreachable(const grpc::Status& status, const Endpoint& endpoint) {
  const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  const std::string no_answer = absl::StrCat("no answer within ", absl::FormatDuration(endpoint.deadline));
  if (endpoint.address.empty()) {
    return absl::UnavailableError(
        CannotReach(endpoint.socket, "", SOCK_STREAM, late ? no_answer : "it hung up (see its log)"));
  }
  return absl::UnavailableError(
      absl::StrCat("cannot reach kvpoold at ", endpoint.address, ": ",
                   late ? no_answer : TcpTrouble(status.error_message()),
                   ". Is that its --operator-tls-listen, and do both sides trust the other's CA?"));
}

absl::Status ToAbsl(const grpc::Status& status, const Endpoint& endpoint) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  if (code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kDeadlineExceeded) {
    return Unreachable(status, endpoint);
  }
  if (code == absl::StatusCode::kUnimplemented) {
    return absl::UnimplementedError("this kvpoold is older than kvpoolctl and does not know the verb");
  }
  return absl::Status(code, status.error_message());
}

std::string SerializeHealthRequest(const std::string& service) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  if (!service.empty()) WireFormatLite::WriteString(1, service, &out);
  out.Trim();
  return bytes;
}

// grpc.health.v1.HealthCheckResponse{ServingStatus status = 1}: 1 is SERVING.
bool IsServing(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.DumpToSingleSlice(&slice).ok()) return false;
  google::protobuf::io::CodedInputStream in(slice.begin(), static_cast<int>(slice.size()));
  uint64_t status = 0;
  while (const uint32_t tag = in.ReadTag()) {
    if (tag == WireFormatLite::MakeTag(1, WireFormatLite::WIRETYPE_VARINT)) {
      if (!in.ReadVarint64(&status)) return false;
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return false;
    }
  }
  return status == 1;
}

}  // namespace

class OperatorClient::Rep {
 public:
  Rep(Endpoint endpoint, std::shared_ptr<grpc::Channel> channel)
      : endpoint_(std::move(endpoint)),
        channel_(std::move(channel)),
        stub_(v1::Operator::NewStub(channel_)) {}

  absl::Duration deadline() const { return endpoint_.deadline; }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::Operator::Stub::*method)(grpc::ClientContext*,
                                                                           const Request&, Response*),
                                const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(Deadline());
    Response response;
    RETURN_IF_ERROR(ToAbsl((stub_.get()->*method)(&context, request, &response), endpoint_));
    return response;
  }

  absl::StatusOr<v1::GetStatsResponse> AwaitAfter(uint64_t epoch, absl::Time give_up) const {
    while (true) {
      absl::StatusOr<v1::GetStatsResponse> stats = absl::UnavailableError("");
      if (!endpoint_.address.empty() || SocketTrouble(endpoint_.socket, SOCK_STREAM).empty())
        stats = AskAnew();
      if (stats.ok() && stats->daemon_epoch() > epoch) return stats;
      // One that is ending cuts its calls.
      const bool ends = absl::IsUnavailable(stats.status()) || absl::IsCancelled(stats.status());
      if (!stats.ok() && !ends) return stats;
      if (absl::Now() >= give_up) {
        return Unreachable(grpc::Status(grpc::StatusCode::UNAVAILABLE, "Connection refused"), endpoint_);
      }
      absl::SleepFor(kLookAgain);
    }
  }

  absl::StatusOr<Health> CheckHealth(const std::string& service) {
    // A channel that failed to connect waits for seconds before it tries again, even for a new call.
    if (endpoint_.address.empty() && !SocketTrouble(endpoint_.socket, SOCK_STREAM).empty()) {
      return absl::UnavailableError(
          CannotReach(endpoint_.socket, "", SOCK_STREAM, "it has started only now"));
    }
    grpc::ClientContext context;
    context.set_deadline(Deadline());
    grpc::CompletionQueue queue;
    const grpc::Slice slice(SerializeHealthRequest(service));
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    auto call = grpc::GenericStub(channel_).PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                                             request, &queue);
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag;
    bool ok;
    queue.Next(&tag, &ok);
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) return Health::kUnknownService;
    RETURN_IF_ERROR(ToAbsl(status, endpoint_));
    return IsServing(response) ? Health::kServing : Health::kNotServing;
  }

 private:
  // A channel of its own has nothing to wait for that another one did.
  absl::StatusOr<v1::GetStatsResponse> AskAnew() const {
    ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, OpenChannel(endpoint_));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(kSoonAnswered));
    v1::GetStatsResponse stats;
    RETURN_IF_ERROR(
        ToAbsl(v1::Operator::NewStub(channel)->GetStats(&context, v1::GetStatsRequest(), &stats), endpoint_));
    return stats;
  }
  std::chrono::system_clock::time_point Deadline() const {
    return std::chrono::system_clock::now() + absl::ToChronoMilliseconds(endpoint_.deadline);
  }

  const Endpoint endpoint_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Operator::Stub> stub_;
};

OperatorClient::OperatorClient(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}
OperatorClient::~OperatorClient() = default;

absl::Duration OperatorClient::deadline() const { return rep_->deadline(); }

absl::StatusOr<std::unique_ptr<OperatorClient>> OperatorClient::Open(const Endpoint& endpoint) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, OpenChannel(endpoint));
  return std::unique_ptr<OperatorClient>(
      new OperatorClient(std::make_unique<Rep>(endpoint, std::move(channel))));
}

absl::StatusOr<v1::EvictResponse> OperatorClient::Evict(const v1::EvictRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Evict, request);
}
absl::StatusOr<v1::ListSpacesResponse> OperatorClient::ListSpaces(const v1::ListSpacesRequest& request) {
  return rep_->Call(&v1::Operator::Stub::ListSpaces, request);
}
absl::StatusOr<v1::ListSessionsResponse> OperatorClient::ListSessions(
    const v1::ListSessionsRequest& request) {
  return rep_->Call(&v1::Operator::Stub::ListSessions, request);
}
absl::StatusOr<v1::ListBlocksResponse> OperatorClient::ListBlocks(const v1::ListBlocksRequest& request) {
  return rep_->Call(&v1::Operator::Stub::ListBlocks, request);
}
absl::StatusOr<v1::GetStatsResponse> OperatorClient::GetStats(const v1::GetStatsRequest& request) {
  return rep_->Call(&v1::Operator::Stub::GetStats, request);
}
absl::StatusOr<v1::RevokeResponse> OperatorClient::Revoke(const v1::RevokeRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Revoke, request);
}
absl::StatusOr<v1::EndSessionResponse> OperatorClient::EndSession(const v1::EndSessionRequest& request) {
  return rep_->Call(&v1::Operator::Stub::EndSession, request);
}
absl::StatusOr<v1::DrainResponse> OperatorClient::Drain(const v1::DrainRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Drain, request);
}
absl::StatusOr<v1::ExplainResponse> OperatorClient::Explain(const v1::ExplainRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Explain, request);
}
absl::StatusOr<v1::PinPrefixResponse> OperatorClient::PinPrefix(const v1::PinPrefixRequest& request) {
  return rep_->Call(&v1::Operator::Stub::PinPrefix, request);
}
absl::StatusOr<v1::GetPoliciesResponse> OperatorClient::GetPolicies(const v1::GetPoliciesRequest& request) {
  return rep_->Call(&v1::Operator::Stub::GetPolicies, request);
}
absl::StatusOr<v1::EraseResponse> OperatorClient::Erase(const v1::EraseRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Erase, request);
}

absl::StatusOr<v1::SetShareResponse> OperatorClient::SetShare(const v1::SetShareRequest& request) {
  return rep_->Call(&v1::Operator::Stub::SetShare, request);
}

absl::StatusOr<v1::SetPolicyResponse> OperatorClient::SetPolicy(const v1::SetPolicyRequest& request) {
  return rep_->Call(&v1::Operator::Stub::SetPolicy, request);
}
absl::StatusOr<v1::GetGuardResponse> OperatorClient::GetGuard(const v1::GetGuardRequest& request) {
  return rep_->Call(&v1::Operator::Stub::GetGuard, request);
}
absl::StatusOr<v1::ResetGuardResponse> OperatorClient::ResetGuard(const v1::ResetGuardRequest& request) {
  return rep_->Call(&v1::Operator::Stub::ResetGuard, request);
}
absl::StatusOr<v1::GetRecoveryResponse> OperatorClient::GetRecovery(const v1::GetRecoveryRequest& request) {
  return rep_->Call(&v1::Operator::Stub::GetRecovery, request);
}
absl::StatusOr<v1::ListTiersResponse> OperatorClient::ListTiers(const v1::ListTiersRequest& request) {
  return rep_->Call(&v1::Operator::Stub::ListTiers, request);
}
absl::StatusOr<v1::AttachTierResponse> OperatorClient::AttachTier(const v1::AttachTierRequest& request) {
  return rep_->Call(&v1::Operator::Stub::AttachTier, request);
}
absl::StatusOr<v1::DrainTierResponse> OperatorClient::DrainTier(const v1::DrainTierRequest& request) {
  return rep_->Call(&v1::Operator::Stub::DrainTier, request);
}
absl::StatusOr<v1::DetachTierResponse> OperatorClient::DetachTier(const v1::DetachTierRequest& request) {
  return rep_->Call(&v1::Operator::Stub::DetachTier, request);
}
absl::StatusOr<v1::UpgradeResponse> OperatorClient::Upgrade(const v1::UpgradeRequest& request) {
  return rep_->Call(&v1::Operator::Stub::Upgrade, request);
}
absl::StatusOr<v1::GetStatsResponse> OperatorClient::AwaitAfter(uint64_t epoch, absl::Time give_up) {
  return rep_->AwaitAfter(epoch, give_up);
}
absl::StatusOr<Health> OperatorClient::CheckHealth(const std::string& service) {
  return rep_->CheckHealth(service);
}

}  // namespace kvpool::tools
