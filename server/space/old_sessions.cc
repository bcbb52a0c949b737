#include "server/space/old_sessions.h"

#include <algorithm>
#include <set>

namespace kvpool {

void OldSessions::Adopt(const RecoveredPool& found, std::vector<std::shared_ptr<OldMember>> members) {
  members_ = std::move(members);
  for (const RecoveredPool::Session& session : found.sessions) holders_[session.id] = session.holder;
  GiveBack();
}

void OldSessions::OnEnded(const std::vector<std::shared_ptr<OldMember>>& ended) {
  std::erase_if(members_, [&](const std::shared_ptr<OldMember>& member) {
    return std::find(ended.begin(), ended.end(), member) != ended.end();
  });
  GiveBack();
}

void OldSessions::GiveBack() {
  std::set<uint64_t> living;
  for (const std::shared_ptr<OldMember>& member : members_) living.insert(member->session);
  std::erase_if(holders_, [&](const auto& session) {
    if (living.contains(session.first)) return false;
    pool_.FreeQuarantine(session.second);
    return true;
  });
}

}  // namespace kvpool
