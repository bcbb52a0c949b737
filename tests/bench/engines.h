// What the sections with a real daemon share: the shape of their space, and engines in other
// processes (bench_engine.cc).
#ifndef KVPOOL_TESTS_BENCH_ENGINES_H_
#define KVPOOL_TESTS_BENCH_ENGINES_H_

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "client/session.h"
#include "tests/support/daemon_process.h"

namespace kvpool::bench {

inline constexpr uint32_t kRequestBlocks = 64;
inline constexpr uint32_t kTokensPerBlock = 16;
inline constexpr uint64_t kBlockBytes = 4096;

inline Deadline Patience() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// REQUIRES: not empty.
inline double Percentile(std::vector<double> values, double share) {
  const auto at = values.begin() + static_cast<ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Ends the process if that went wrong: there is nothing to measure then.
void Check(const absl::Status& status);

SessionOptions EngineOptions(const std::string& socket);
// A daemon on host memory.
std::unique_ptr<DaemonProcess> StartDaemon(const std::string& capacity, const std::string& slab_bytes,
                                           std::vector<std::string> flags = {});
std::unique_ptr<Session> OpenSession(const SessionOptions& options);

// A million cached blocks, in chains.
inline constexpr uint32_t kMillion = 1u << 20;
inline constexpr uint32_t kChainBlocks = 64;
inline constexpr uint64_t kSmallBlockBytes = 512;
SessionOptions SmallBlocks(const std::string& socket);
// The key of the i-th block.
std::string KeyOf(uint64_t i);
std::vector<Blocks> LeaseMillion(Session* session);
void CacheMillion(Session* session);
// Caches one chain; answers its keys.
std::string CacheChain(Session* session);

// A bench_engine that was started with these arguments.
class EngineProcess {
 public:
  explicit EngineProcess(const std::vector<std::string>& arguments);
  ~EngineProcess();
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;
  pid_t pid() const { return pid_; }
  // The next line that it prints; ends the bench if there is none.
  std::string ReadLine();
  // Tells it to go on.
  void WriteLine();
  void Kill();

 private:
  pid_t pid_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_ENGINES_H_
