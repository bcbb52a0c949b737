#include "server/rpc/operator_tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/cli/flags.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

constexpr char kCaFlag[] = "operator-tls-ca";
constexpr char kCertificateFlag[] = "operator-tls-cert";
constexpr char kKeyFlag[] = "operator-tls-key";

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(X509* certificate) const { X509_free(certificate); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

absl::Status Unfit(const char* flag, const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": ", why));
}

// OpenSSL's word for what failed last.
std::string TakeReason() {
  const char* reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "no reason given" : reason;
}

Owned<BIO> Reader(const std::string& pem) {
  return Owned<BIO>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Without an empty one OpenSSL asks at the terminal.
void* NoPassphrase() { return const_cast<char*>(""); }

// The certificates of a text, of which half a one is none.
absl::StatusOr<std::vector<Owned<X509>>> Certificates(const char* flag, const std::string& path,
                                                      const std::string& pem) {
  ERR_clear_error();
  const Owned<BIO> reader = Reader(pem);
  std::vector<Owned<X509>> certificates;
  while (X509* next = PEM_read_bio_X509(reader.get(), nullptr, nullptr, NoPassphrase()))
    certificates.emplace_back(next);
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = TakeReason();
  if (certificates.empty() && at_end) return Unfit(flag, path, "there is no certificate in it");
  if (!at_end) {
    return Unfit(flag, path,
                 absl::StrCat("certificate ", certificates.size() + 1, " of it can't be read: ", reason));
  }
  return certificates;
}

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

absl::StatusOr<OperatorTls::Pem> OperatorTls::Read(const TlsFiles& files) {
  Pem pem;
  ASSIGN_OR_RETURN(pem.client_ca, ReadFlagFile(kCaFlag, files.client_ca));
  ASSIGN_OR_RETURN(pem.key, ReadFlagFile(kKeyFlag, files.key));
  ASSIGN_OR_RETURN(pem.certificate, ReadFlagFile(kCertificateFlag, files.certificate));
  return pem;
}

// All that gRPC looks at when it takes them, since it says of nothing what is wrong, and at half a list of authorities it
// takes that half.
absl::Status OperatorTls::Check(const TlsFiles& files, const Pem& pem) {
  RETURN_IF_ERROR(Certificates(kCaFlag, files.client_ca, pem.client_ca).status());
  ASSIGN_OR_RETURN(const auto chain, Certificates(kCertificateFlag, files.certificate, pem.certificate));
  const Owned<SSL_CTX> context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return absl::ResourceExhaustedError(absl::StrCat("TLS: ", TakeReason()));
  if (SSL_CTX_use_certificate(context.get(), chain[0].get()) != 1)
    return Unfit(kCertificateFlag, files.certificate, TakeReason());
  const Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Reader(pem.key).get(), nullptr, nullptr, NoPassphrase()));
  if (key == nullptr)
    return Unfit(kKeyFlag, files.key,
                 absl::StrCat("there is no key without passphrase in it: ", TakeReason()));
  if (SSL_CTX_use_PrivateKey(context.get(), key.get()) != 1 || SSL_CTX_check_private_key(context.get()) != 1)
    return Unfit(
        kKeyFlag, files.key,
        absl::StrCat("is not the key of --", kCertificateFlag, "=", files.certificate, ": ", TakeReason()));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OperatorTls>> OperatorTls::Open(const TlsFiles& files) {
  ASSIGN_OR_RETURN(Pem pem, Read(files));
  RETURN_IF_ERROR(Check(files, pem));
  return std::unique_ptr<OperatorTls>(new OperatorTls(files, std::move(pem)));
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
  self->LookLocked();
  if (!self->fresh_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  self->fresh_ = false;
  const grpc_ssl_pem_key_cert_pair pair{.private_key = self->pem_.key.c_str(),
                                        .cert_chain = self->pem_.certificate.c_str()};
  *config = grpc_ssl_server_certificate_config_create(self->pem_.client_ca.c_str(), &pair, 1);
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

void OperatorTls::Look() {
  MutexLock lock(&mu_);
  LookLocked();
}

void OperatorTls::LookLocked() {
  absl::StatusOr<Pem> found = Read(files_);
  absl::Status status = found.status();
  if (status.ok() && *found != pem_) status = Check(files_, *found);
  if (!status.ok()) {
    // Whoever connects has the files looked at, again and again.
    if (refused_ == status.message()) return;
    refused_ = std::string(status.message());
    return LogError("operator certificates refused", {{"error", status}});
  }
  refused_.clear();
  if (*found == pem_) return;
  pem_ = *std::move(found);
  fresh_ = true;
  LogAudit("operator certificates read",
           std::initializer_list<LogField>{{"certificate", files_.certificate}, {"ca", files_.client_ca}});
}

}  // namespace kvpool
