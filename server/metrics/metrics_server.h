// Serves GET /metrics and GET /health over HTTP, or over HTTPS alone.
//
// One thread has all connections, and waits for none of them: peers that say nothing, or take nothing, cost a descriptor for a while.
// Another computes what a scrape shows, once for all that wait for it; a probe does not wait for that.
#ifndef KVPOOL_SERVER_METRICS_METRICS_SERVER_H_
#define KVPOOL_SERVER_METRICS_METRICS_SERVER_H_

#include <prometheus/metric_family.h>

#include <chrono>
#include <climits>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/metrics/scrape_stats.h"
#include "server/rpc/tls_files.h"

namespace kvpool {

struct MetricsServerOptions {
  // Each handshake begins with a look at the files (see WatchedTlsFiles). Without a certificate there is no TLS; without a CA, clients
  // need no certificate.
  TlsFiles tls;
  // A connection whose descriptor is this or higher is closed at once.
  int fd_ceiling = INT_MAX;
  // Beyond so many, at least 1, the one that has waited longest for its peer gives way.
  size_t max_connections = 256;
  ScrapeStats* stats = nullptr;  // Outlives the server. Null: nobody counts.
};

// prometheus::Exposer is not used, since it adds metrics of its own and does not say that a port is taken.
class MetricsServer {
 public:
  // Called for each scrape, or for several at once, on one thread.
  using Collect = std::function<std::vector<prometheus::MetricFamily>()>;
  // Called for each probe: whether the daemon takes new sessions. Otherwise /health has status 503. It waits for nothing.
  using Serving = std::function<bool()>;
  // Peers have so long for a handshake and a request, and so long again to take the answer: Prometheus gives a scrape 10 s. The answer has
  // kCollectPatiences times as long to come about.
  static constexpr auto kPatience = std::chrono::milliseconds(3000);
  static constexpr int kCollectPatiences = 10;
  static constexpr int kThreads = 2;
  // `address` is "host:port", IPv6 in brackets; of a name's addresses the first that can be had is taken, and port 0 takes a free one.
  // UNAVAILABLE names the address and why it cannot be had, INVALID_ARGUMENT a file of options.tls and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address, Collect collect,
                                                              Serving serving,
                                                              std::chrono::milliseconds patience = kPatience,
                                                              const MetricsServerOptions& options = {});
  // Waits for no peer.
  ~MetricsServer();
  int port() const;
  // See OperatorTls::Look.
  void LookAtCertificates();

 private:
  class Rep;
  explicit MetricsServer(std::unique_ptr<Rep> rep);
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_METRICS_SERVER_H_
