#include "server/rpc/operator_tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>

#include <utility>

#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// gRPC's C++ credentials have fixed texts. These are its C API's, which asks for them at each handshake.
class FetchedCredentials final : public grpc::ServerCredentials {
 public:
  explicit FetchedCredentials(grpc_server_credentials* credentials) : credentials_(credentials) {}
  ~FetchedCredentials() override { grpc_server_credentials_release(credentials_); }
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OperatorTls>> OperatorTls::Open(const TlsFiles& files) {
  ASSIGN_OR_RETURN(WatchedTlsFiles watched, WatchedTlsFiles::Open(kOperatorTlsNames, files));
  return std::unique_ptr<OperatorTls>(new OperatorTls(std::move(watched)));
}

std::shared_ptr<grpc::ServerCredentials> OperatorTls::Credentials() {
  grpc_ssl_server_credentials_options* options =
      grpc_ssl_server_credentials_create_options_using_config_fetcher(
          GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, &OnHandshake, this);
  return std::make_shared<FetchedCredentials>(grpc_ssl_server_credentials_create_with_options(options));
}

grpc_ssl_certificate_config_reload_status OperatorTls::OnHandshake(
    void* tls, grpc_ssl_server_certificate_config** config) {
  auto* self = static_cast<OperatorTls*>(tls);
  MutexLock lock(&self->mu_);
  if (self->files_.Look()) self->fresh_ = true;
  if (!self->fresh_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  self->fresh_ = false;
  const WatchedTlsFiles::Pem& pem = self->files_.pem();
  const grpc_ssl_pem_key_cert_pair pair{.private_key = pem.key.c_str(),
                                        .cert_chain = pem.certificate.c_str()};
  *config = grpc_ssl_server_certificate_config_create(pem.client_ca.c_str(), &pair, 1);
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

void OperatorTls::Look() {
  MutexLock lock(&mu_);
  if (files_.Look()) fresh_ = true;
}

}  // namespace kvpool
