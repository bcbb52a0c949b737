#include "tests/bench/pairs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool::bench {
namespace {

void PinThread(pid_t thread, const cpu_set_t& set) {
  // A thread may have ended meanwhile.
  KVPOOL_CHECK(sched_setaffinity(thread, sizeof(set), &set) == 0 || errno == ESRCH, "sched_setaffinity: %s",
               strerror(errno));
}

cpu_set_t Only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

std::vector<pid_t> ThreadsOf(pid_t pid) {
  std::vector<pid_t> threads;
  for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"))) {
    threads.push_back(std::stoi(task.path().filename()));
  }
  return threads;
}

}  // namespace

std::vector<int> UsableCpus() {
  cpu_set_t set;
  KVPOOL_CHECK(sched_getaffinity(0, sizeof(set), &set) == 0, "sched_getaffinity: %s", strerror(errno));
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

Pinned::Pinned(pid_t pid, int cpu) : pid_(pid) {
  KVPOOL_CHECK(sched_getaffinity(pid, sizeof(before_), &before_) == 0, "sched_getaffinity: %s",
               strerror(errno));
  for (const pid_t thread : ThreadsOf(pid_)) PinThread(thread, Only(cpu));
}

Pinned::~Pinned() {
  for (const pid_t thread : ThreadsOf(pid_)) PinThread(thread, before_);
}

int Pinned::PinThreads(const std::string& name, int cpu) const {
  int pinned = 0;
  for (const pid_t thread : ThreadsOf(pid_)) {
    std::ifstream comm(absl::StrCat("/proc/", pid_, "/task/", thread, "/comm"));
    std::string its_name;
    if (!std::getline(comm, its_name) || its_name != name) continue;
    PinThread(thread, Only(cpu));
    ++pinned;
  }
  return pinned;
}

double UsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double UpperEnd(std::vector<double> values) {
  KVPOOL_CHECK(values.size() == kPairs, "%zu pairs, not %d", values.size(), kPairs);
  std::sort(values.begin(), values.end());
  return values[14];
}

}  // namespace kvpool::bench
