// The PEM files of an address that is served with TLS, which may change while the daemon serves.
//
// Files that can't be read, or do not belong together, change nothing: those before them stay, and the log says why, once.
#ifndef KVPOOL_SERVER_RPC_TLS_FILES_H_
#define KVPOOL_SERVER_RPC_TLS_FILES_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

struct ssl_ctx_st;

namespace kvpool {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate, key;
  std::string client_ca;  // Signs the certificates that clients must show. Empty: they need none.
};

// What the files of one address are called in errors and in the log.
struct TlsNames {
  const char* address;  // The log says "ADDRESS certificates read".
  const char *certificate_flag, *key_flag, *ca_flag;
};
inline constexpr TlsNames kOperatorTlsNames = {"operator", "operator-tls-cert", "operator-tls-key",
                                               "operator-tls-ca"};
inline constexpr TlsNames kMetricsTlsNames = {"metrics", "metrics-tls-cert", "metrics-tls-key",
                                              "metrics-tls-client-ca"};

// Not thread-safe.
class WatchedTlsFiles {
 public:
  // What the files say.
  struct Pem {
    std::string client_ca, certificate, key;
    bool operator==(const Pem& other) const = default;
  };

  // INVALID_ARGUMENT names flag, file and what is wrong with it.
  static absl::StatusOr<WatchedTlsFiles> Open(const TlsNames& names, const TlsFiles& files);

  // Reads the files again. True: they say something new, which is good.
  bool Look();
  // The last that were good; and a server's context with them, of TLS 1.2 or later, without sessions that could be resumed: each
  // connection shows its certificate anew.
  const Pem& pem() const { return pem_; }
  const std::shared_ptr<ssl_ctx_st>& context() const { return context_; }

 private:
  WatchedTlsFiles(const TlsNames& names, const TlsFiles& files, Pem pem, std::shared_ptr<ssl_ctx_st> context)
      : names_(names), files_(files), pem_(std::move(pem)), context_(std::move(context)) {}
  static absl::StatusOr<Pem> Read(const TlsNames& names, const TlsFiles& files);
  static absl::StatusOr<std::shared_ptr<ssl_ctx_st>> MakeContext(const TlsNames& names, const TlsFiles& files,
                                                                 const Pem& pem);

  TlsNames names_;
  TlsFiles files_;
  Pem pem_;
  std::shared_ptr<ssl_ctx_st> context_;
  std::string refused_;  // Why the files are not pem_, as it was logged; empty: they are.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_TLS_FILES_H_
