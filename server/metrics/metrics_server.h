// Serves GET /metrics and GET /health over HTTP.
#ifndef KVPOOL_SERVER_METRICS_METRICS_SERVER_H_
#define KVPOOL_SERVER_METRICS_METRICS_SERVER_H_

#include <prometheus/metric_family.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvpool {

// prometheus::Exposer is not used, since it adds metrics of its own and does not say that a port is taken.
class MetricsServer {
 public:
  // Called for each scrape, on any thread.
  using Collect = std::function<std::vector<prometheus::MetricFamily>()>;
  // The same for each probe: whether the daemon takes new sessions. Otherwise /health has status 503.
  using Serving = std::function<bool()>;
  // Peers that have not said what they want, or not taken their answer, occupy a thread each for about so long: Prometheus gives
  // a scrape 10 s.
  static constexpr auto kPatience = std::chrono::milliseconds(3000);
  static constexpr int kThreads = 16;
  // `address` is "host:port"; port 0 takes a free one. UNAVAILABLE names the address and
  // why it cannot be had.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address, Collect collect,
                                                              Serving serving,
                                                              std::chrono::milliseconds patience = kPatience);
  ~MetricsServer();
  int port() const;

 private:
  class Rep;
  explicit MetricsServer(std::unique_ptr<Rep> rep);
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_METRICS_SERVER_H_
