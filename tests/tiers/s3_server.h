// A real S3 server for tests of the s3 tier: SeaweedFS, a process of this test, on ports of its own, in a folder that goes with it.
#ifndef KVPOOL_TESTS_TIERS_S3_SERVER_H_
#define KVPOOL_TESTS_TIERS_S3_SERVER_H_

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/tiers/s3_client.h"
#include "server/tiers/s3_tier.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {

inline constexpr char kTestAccessKey[] = "AKIDKVPOOL";
inline constexpr char kTestSecretKey[] = "not/a+secret=0123456789abcdefghijklmnopq";
inline constexpr char kTestBucket[] = "kvpool-test";

// Writes a credentials file, as an editor does it: another file takes the name.
void WriteCredentials(const std::string& path, const std::string& access_key, const std::string& secret_key,
                      const std::string& profile = "default");

class S3Server {
 public:
  // The program, or empty: it is not installed.
  static std::string Program();

  // It serves in the clear and with TLS, with a certificate for 127.0.0.1. A start takes 3 seconds.
  S3Server();
  ~S3Server();
  S3Server(const S3Server&) = delete;
  S3Server& operator=(const S3Server&) = delete;

  S3Endpoint endpoint() const;
  S3Endpoint tls_endpoint() const;
  // The bucket in the host's name: libcurl knows where all names below localhost are.
  S3Endpoint virtual_endpoint() const;
  const std::string& ca_file() const { return certificates_.ca; }
  const std::string& credentials_file() const { return credentials_; }
  void Kill();
  void Signal(int signal) const;
  // Again, on the same ports, with what is in it.
  void Restart();
  // One request by itself.
  S3Response Ask(S3Request request) const;
  // An object as it is; a test's own bytes in its place.
  std::string Get(const std::string& object) const;
  void Put(const std::string& object, const std::string& bytes) const;
  void Delete(const std::string& object) const;
  // The names that begin with this.
  std::vector<std::string> Names(const std::string& prefix) const;

 private:
  bool Launch();

  TierFolder folder_{TierFolder::On::kMemory};
  TestCertificates certificates_;
  std::string credentials_;
  std::array<uint16_t, 9> ports_{};
  pid_t pid_ = -1;
};

// A tier on the server that gives up soon, with a prefix that no other has.
S3Tier::Options S3Options(const S3Server& server);
std::unique_ptr<S3Tier> OpenS3(const S3Tier::Options& options);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_S3_SERVER_H_
