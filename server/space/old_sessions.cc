#include "server/space/old_sessions.h"

namespace kvpool {

void OldSessions::Adopt(const RecoveredPool& found, std::vector<std::shared_ptr<OldMember>> members) {
  members_ = std::move(members);
  for (const std::shared_ptr<OldMember>& member : members_) ++sessions_[member->session].members;
  for (const RecoveredPool::Session& session : found.sessions) {
    if (const auto living = sessions_.find(session.id); living != sessions_.end()) {
      living->second.holder = session.holder;
    } else {
      pool_.FreeQuarantine(session.holder);
    }
  }
}

void OldSessions::OnEnded(absl::Span<const std::shared_ptr<OldMember>> ended) {
  for (const std::shared_ptr<OldMember>& member : ended) {
    member->ended = true;
    const auto session = sessions_.find(member->session);
    if (--session->second.members > 0) continue;
    if (session->second.holder != kNobody) pool_.FreeQuarantine(session->second.holder);
    sessions_.erase(session);
  }
  std::erase_if(members_, [](const auto& member) { return member->ended; });
}

}  // namespace kvpool
