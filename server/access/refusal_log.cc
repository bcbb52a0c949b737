#include "server/access/refusal_log.h"

#include <algorithm>

#include "server/access/audit_line.h"

namespace kvpool {

void RefusalLog::Add(const Peer& peer, std::string_view method, const absl::Status& status) {
  uint64_t left_out = 0;
  {
    MutexLock lock(&mu_);
    const uint64_t now_ms = clock_->NowMs();
    Reasons& reasons = ReasonsOf(peer, now_ms);
    Reason& reason = reasons[std::min(static_cast<size_t>(status.code()), reasons.size() - 1)];
    if (now_ms - reason.window_begin_ms >= kWindowMs) {
      reason.window_begin_ms = now_ms;
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

RefusalLog::Reasons& RefusalLog::ReasonsOf(const Peer& peer, uint64_t now_ms) {
  if (peer.process == nullptr) return others_;
  const uint32_t uid = peer.process->uid;
  if (const auto found = users_.find(uid); found != users_.end()) return found->second;
  if (users_.size() == kMostUsers) ForgetQuiet(now_ms);
  return users_.size() == kMostUsers ? others_ : users_[uid];
}

void RefusalLog::ForgetQuiet(uint64_t now_ms) {
  std::erase_if(users_, [&](const auto& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const Reasons& reasons = user.second;
    for (const Reason& reason : reasons) {
      if (reason.lines > 0 && now_ms - reason.window_begin_ms < kWindowMs) return false;
    }
    for (size_t code = 0; code < reasons.size(); ++code) others_[code].left_out += reasons[code].left_out;
    return true;
  });
}

}  // namespace kvpool
