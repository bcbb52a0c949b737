// The metrics of kvpoold. Everything is computed when it is scraped, and nothing in the
// daemon reads a metric.
#ifndef KVPOOL_SERVER_METRICS_METRICS_H_
#define KVPOOL_SERVER_METRICS_METRICS_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/attach/attach_server.h"
#include "server/daemon/daemon.h"
#include "server/rpc/rpc_stats.h"

namespace kvpool {

struct BuildFacts {
  std::string version;
  std::string cuda;  // "built without", "no driver", "1 GPU", "2 GPUs", …
};

struct MetricSources {
  std::function<DaemonSnapshot()> daemon;
  std::function<RpcStats::Totals()> rpc;
  std::function<AttachStats()> attach;
  std::function<std::map<std::string, uint64_t>()> scrapes_refused;  // ScrapeStats::refused().
  std::function<std::optional<bool>()> keeper_up;                    // None: it has none.
  BuildFacts build;
  double start_time_seconds = 0;  // Unix time.
};

std::vector<prometheus::MetricFamily> CollectMetrics(const MetricSources& sources);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_METRICS_H_
