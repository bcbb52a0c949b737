// What a daemon keeps of sessions that one living process has opened and closed: nothing should grow with their number.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

// The daemon's heap, and what the allocator keeps for each of the threads that open sessions, have reached their size
// by then.
constexpr uint32_t kWarmupSessions = 2500;

struct Usage {
  double heap_kib = 0, resident_kib = 0, files = 0, threads = 0;
};

Usage UsageOf(const DaemonProcess& daemon) {
  Usage usage;
  const absl::StatusOr<std::string> metrics = daemon.Metrics();
  Check(metrics.status());
  usage.heap_kib = MetricIn(*metrics, "kvpool_heap_bytes") / 1024;
  const std::string process = absl::StrCat("/proc/", daemon.pid());
  std::ifstream status(process + "/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> usage.resident_kib;
    if (word == "Threads:") status >> usage.threads;
  }
  usage.files = static_cast<double>(std::distance(std::filesystem::directory_iterator(process + "/fd"),
                                                  std::filesystem::directory_iterator()));
  return usage;
}

void OpenAndClose(const std::string& socket, uint32_t sessions) {
  for (uint32_t i = 0; i < sessions; ++i) {
    const auto session = OpenSession(EngineOptions(socket));
    auto block = session->LeaseWithin(1, Patience());
    KVPOOL_CHECK(block.ok(), "lease: %s", block.status().ToString().c_str());
    block->Release(0);
    const absl::Status closed = session->Close(Patience());
    KVPOOL_CHECK(closed.ok(), "close: %s", closed.ToString().c_str());
  }
}

}  // namespace

void BenchSessions(Figures* figures) {
  const auto daemon = StartDaemon("4MiB", "4MiB");
  OpenAndClose(daemon->socket(), kWarmupSessions);
  const Usage before = UsageOf(*daemon);
  const uint32_t sessions = figures->sessions();
  const auto start = std::chrono::steady_clock::now();
  OpenAndClose(daemon->socket(), sessions);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  const Usage after = UsageOf(*daemon);
  figures->Note(absl::StrCat(sessions, " sessions opened and closed one after another by one process"));
  figures->Add("open, lease, release and close", took.count() / sessions, "ms");
  figures->Add("what the daemon has allocated, growth", after.heap_kib - before.heap_kib, "KiB", AtMost(64));
  // What was freed by one thread and not yet taken by another stays with the allocator, more of it the longer threads
  // take turns: after 100,000 sessions 5 MiB.
  figures->Add("what it has in RAM, growth", after.resident_kib - before.resident_kib, "KiB");
  figures->Add("its open files, growth", after.files - before.files, "", AtMost(2));
  figures->Add("its threads, growth", after.threads - before.threads, "", AtMost(0));
}

}  // namespace kvpool::bench
