// Signals to other processes.
#ifndef KVPOOL_TESTS_SUPPORT_SEND_SIGNAL_H_
#define KVPOOL_TESTS_SUPPORT_SEND_SIGNAL_H_

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {

// Returns when all its threads stand still: after kill(SIGSTOP) they run on for some microseconds, in which they answer. The
// process need not be a child, and may end.
inline void StopProcess(pid_t pid) {
  KVPOOL_CHECK(pid > 0 && kill(pid, SIGSTOP) == 0, "no process %d to stop", pid);
  const auto stands = [pid] {
    std::error_code gone;
    for (const auto& thread :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), gone)) {
      std::ifstream file(thread.path() / "stat");
      const std::string stat{std::istreambuf_iterator<char>(file), {}};
      const size_t name_ends = stat.rfind(") ");
      if (name_ends == std::string::npos) continue;
      const char state = stat[name_ends + 2];
      if (state == 'R' || state == 'S' || state == 'D') return false;
    }
    return true;
  };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!stands()) {
    KVPOOL_CHECK(std::chrono::steady_clock::now() < limit, "process %d does not stop", pid);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

inline void SendSignal(pid_t pid, int signal) {
  if (signal == SIGSTOP) return StopProcess(pid);
  KVPOOL_CHECK(pid > 0 && kill(pid, signal) == 0, "no process %d for signal %d", pid, signal);
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_SEND_SIGNAL_H_
