#include "server/rpc/tls_files.h"

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

// A client's certificates, with those of its authorities, in one handshake.
constexpr long kMostClientChainBytes = 32 << 10;

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
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

}  // namespace

absl::StatusOr<WatchedTlsFiles::Pem> WatchedTlsFiles::Read(const TlsNames& names, const TlsFiles& files) {
  Pem pem;
  if (!files.client_ca.empty()) {
    ASSIGN_OR_RETURN(pem.client_ca, ReadFlagFile(names.ca_flag, files.client_ca));
  }
  ASSIGN_OR_RETURN(pem.key, ReadFlagFile(names.key_flag, files.key));
  ASSIGN_OR_RETURN(pem.certificate, ReadFlagFile(names.certificate_flag, files.certificate));
  return pem;
}

// Looks at all that gRPC looks at when it takes them, too, since it says of nothing what is wrong, and at half a list of authorities
// it takes that half.
absl::StatusOr<std::shared_ptr<SSL_CTX>> WatchedTlsFiles::MakeContext(const TlsNames& names,
                                                                      const TlsFiles& files, const Pem& pem) {
  std::vector<Owned<X509>> authorities;
  if (!files.client_ca.empty()) {
    ASSIGN_OR_RETURN(authorities, Certificates(names.ca_flag, files.client_ca, pem.client_ca));
  }
  ASSIGN_OR_RETURN(const auto chain,
                   Certificates(names.certificate_flag, files.certificate, pem.certificate));
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return absl::ResourceExhaustedError(absl::StrCat("TLS: ", TakeReason()));
  SSL_CTX* const made = context.get();
  if (SSL_CTX_use_certificate(made, chain[0].get()) != 1)
    return Unfit(names.certificate_flag, files.certificate, TakeReason());
  const Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Reader(pem.key).get(), nullptr, nullptr, NoPassphrase()));
  if (key == nullptr)
    return Unfit(names.key_flag, files.key,
                 absl::StrCat("there is no key without passphrase in it: ", TakeReason()));
  if (SSL_CTX_use_PrivateKey(made, key.get()) != 1 || SSL_CTX_check_private_key(made) != 1)
    return Unfit(names.key_flag, files.key,
                 absl::StrCat("is not the key of --", names.certificate_flag, "=", files.certificate, ": ",
                              TakeReason()));
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(made, chain[i].get()) != 1)
      return Unfit(names.certificate_flag, files.certificate, TakeReason());
  }
  for (const Owned<X509>& authority : authorities) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(made), authority.get()) != 1 ||
        SSL_CTX_add_client_CA(made, authority.get()) != 1)
      return Unfit(names.ca_flag, files.client_ca, TakeReason());
  }
  if (!authorities.empty())
    SSL_CTX_set_verify(made, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_min_proto_version(made, TLS1_2_VERSION);
  // A client that closes without saying so has ended all the same.
  SSL_CTX_set_options(made, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_num_tickets(made, 0);
  SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(
      made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_max_cert_list(made, kMostClientChainBytes);
  return context;
}

absl::StatusOr<WatchedTlsFiles> WatchedTlsFiles::Open(const TlsNames& names, const TlsFiles& files) {
  ASSIGN_OR_RETURN(Pem pem, Read(names, files));
  ASSIGN_OR_RETURN(auto context, MakeContext(names, files, pem));
  return WatchedTlsFiles(names, files, std::move(pem), std::move(context));
}

bool WatchedTlsFiles::Look() {
  absl::StatusOr<Pem> found = Read(names_, files_);
  const bool changed = found.ok() && *found != pem_;
  absl::StatusOr<std::shared_ptr<SSL_CTX>> context = context_;
  if (changed) context = MakeContext(names_, files_, *found);
  const absl::Status status = found.ok() ? context.status() : found.status();
  if (!status.ok()) {
    // Whoever connects has the files looked at, again and again.
    if (refused_ == status.message()) return false;
    refused_ = std::string(status.message());
    LogError(absl::StrCat(names_.address, " certificates refused"), {{"error", status}});
    return false;
  }
  refused_.clear();
  if (!changed) return false;
  pem_ = *std::move(found);
  context_ = *std::move(context);
  LogAudit(absl::StrCat(names_.address, " certificates read"),
           std::initializer_list<LogField>{{"certificate", files_.certificate}, {"ca", files_.client_ca}});
  return true;
}

}  // namespace kvpool
