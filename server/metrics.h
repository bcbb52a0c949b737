// What Prometheus sees. Everything is computed when it is scraped; nothing in the daemon reads a metric.
#ifndef KVPOOL_SERVER_METRICS_H_
#define KVPOOL_SERVER_METRICS_H_

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/attach_server.h"
#include "server/daemon.h"
#include "server/rpc_stats.h"

namespace prometheus {
class Exposer;
}

namespace kvpool {

struct BuildFacts {
  std::string version;
  std::string cuda;  // "built without", "no driver", "2 GPUs".
};

struct MetricSources {
  std::function<DaemonSnapshot()> daemon;
  std::function<std::map<std::string, RpcStats::Method>()> rpc;
  std::function<AttachStats()> attach;
  BuildFacts build;
  double start_time_seconds = 0;  // Unix time.
};

class MetricsCollector : public prometheus::Collectable {
 public:
  explicit MetricsCollector(MetricSources sources) : sources_(std::move(sources)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const MetricSources sources_;
};

// GET /metrics over HTTP.
class MetricsServer {
 public:
  // `address` is "host:port"; port 0 takes a free one. UNAVAILABLE: it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              MetricSources sources);
  ~MetricsServer();
  int port() const;

 private:
  MetricsServer(std::unique_ptr<prometheus::Exposer> exposer, std::shared_ptr<MetricsCollector> collector);
  const std::shared_ptr<MetricsCollector> collector_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_H_
