// Real servers for tests of the resp tier: processes of this test, on ports of their own, in a folder that goes with them.
#ifndef KVPOOL_TESTS_TIERS_REDIS_SERVER_H_
#define KVPOOL_TESTS_TIERS_REDIS_SERVER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/tiers/resp_codec.h"
#include "server/tiers/resp_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {

// Tests wait for what must come; this is for what never does.
inline constexpr std::chrono::seconds kTestLimit(60);
// False: it did not come about.
bool Eventually(const std::function<bool()>& holds);

// A port of 127.0.0.1 that nobody has at this moment.
uint16_t FreePort();

// Certificates that the openssl program makes: an authority, and a node and a client of it.
struct TestCertificates {
  std::string ca, node, node_key, client, client_key;
};
// The node's is for `name`, "DNS:localhost" or "IP:127.0.0.1".
TestCertificates MakeCertificates(const std::string& folder, const std::string& name);

class RedisServer {
 public:
  struct Options {
    std::vector<std::string> arguments;  // What redis-server takes.
    const TestCertificates* tls = nullptr;
    bool cluster = false;
  };
  // The program, or empty: it is not installed.
  static std::string Program();

  RedisServer() : RedisServer(Options{}) {}
  explicit RedisServer(const Options& options);
  ~RedisServer();
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  RespEndpoint endpoint() const { return {.host = "127.0.0.1", .port = port_}; }
  uint16_t port() const { return port_; }
  void Kill();
  void Signal(int signal) const;
  // Again, on the same port, with nothing in it.
  void Restart();
  // The reply as text: arrays are joined by blanks, errors begin with "-". REQUIRES: no TLS.
  std::string Command(const std::vector<std::string>& words) const;
  // Keys that match.
  std::vector<std::string> Keys(const std::string& pattern) const;
  // A field of INFO.
  std::string Info(const std::string& section, const std::string& field) const;

 private:
  bool Launch();
  const Options options_;
  TierFolder folder_{TierFolder::On::kMemory};
  uint16_t port_ = 0, bus_port_ = 0;
  pid_t pid_ = -1;
};

// Masters that share the slots, without replicas: while one is gone the others go on.
class RedisCluster {
 public:
  explicit RedisCluster(size_t nodes = 3);
  RedisServer& node(size_t i) { return *nodes_[i]; }
  size_t size() const { return nodes_.size(); }
  // The node whose slots this one is among.
  size_t OwnerOf(uint16_t slot) const { return owners_[slot]; }
  // The slot is the other's from now on, with what is in it.
  void Migrate(uint16_t slot, size_t to);
  // The first half of that: keys that are not there are asked for at the other (ASK).
  void BeginMigration(uint16_t slot, size_t to);

 private:
  std::string Id(size_t i) const { return nodes_[i]->Command({"CLUSTER", "MYID"}); }
  std::vector<std::unique_ptr<RedisServer>> nodes_;
  std::vector<size_t> owners_ = std::vector<size_t>(kRespSlots);
};

// A tier on the server that gives up soon.
RespTier::Options RespOptions(const RespEndpoint& endpoint);
std::unique_ptr<RespTier> OpenResp(const RespTier::Options& options);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_REDIS_SERVER_H_
