#include "server/access/refusal_log.h"

#include <algorithm>
#include <utility>

#include "server/access/audit_line.h"

namespace kvpool {

void RefusalLog::Add(const Peer& peer, std::string_view method, const absl::Status& status) {
  uint64_t left_out = 0;
  {
    MutexLock lock(&mu_);
    Reason& reason = reasons_[std::min(static_cast<size_t>(status.code()), reasons_.size() - 1)];
    const auto now = std::chrono::steady_clock::now();
    if (now - reason.window_begin >= kWindow) {
      reason.window_begin = now;
      reason.lines = 0;
    }
    if (reason.lines == kMostLines) {
      ++reason.left_out;
      return;
    }
    ++reason.lines;
    left_out = std::exchange(reason.left_out, 0);
  }
  AuditLine line(peer, method, status);
  if (left_out > 0) line.Add({"left_out", left_out});
  line.Write(event_);
}

}  // namespace kvpool
