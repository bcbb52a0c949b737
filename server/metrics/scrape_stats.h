// What came of connections to the metrics address.
#ifndef KVPOOL_SERVER_METRICS_SCRAPE_STATS_H_
#define KVPOOL_SERVER_METRICS_SCRAPE_STATS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace kvpool {

// Why a connection is closed that has no answer, or not the whole of it.
enum class ScrapeRefusal : uint8_t {
  kOpenFiles,  // The daemon has no descriptor for it.
  kDisplaced,  // It waits for its peer, and others came.
  kTimeout,    // It has not said what it wants, or not taken its answer.
  kTls,        // No TLS came about, or its certificate does not serve.
};
inline constexpr std::array<const char*, 4> kScrapeRefusals = {"open_files", "displaced", "timeout", "tls"};

// Thread-safe.
class ScrapeStats {
 public:
  void Count(ScrapeRefusal why) {
    refused_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }
  // Each reason is there from the start.
  std::map<std::string, uint64_t> refused() const {
    std::map<std::string, uint64_t> refused;
    for (size_t why = 0; why < kScrapeRefusals.size(); ++why)
      refused[kScrapeRefusals[why]] = refused_[why].load(std::memory_order_relaxed);
    return refused;
  }

 private:
  std::array<std::atomic<uint64_t>, kScrapeRefusals.size()> refused_{};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_SCRAPE_STATS_H_
