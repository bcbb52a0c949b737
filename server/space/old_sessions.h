// Sessions of a daemon that ended before this one started, and whose processes may still run.
//
// An engine knows what it held, and goes on reading and writing it; nobody else may touch those blocks. So the pool has the
// sessions as ended ones, with all they held, and each goes when the last of its processes has ended.
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_
#define KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/unique_fd.h"
#include "server/keeper/keeper_link.h"
#include "server/pool/block_pool.h"
#include "server/space/kept_facts.h"

namespace kvpool {

struct OldMember {
  uint64_t session = 0;
  KeptMember facts;
  bool ended = false;  // The space's mutex is around it.
  bool keeps = true;   // It may map slabs until it ends. One that does not says so in its log.
  std::shared_ptr<const UniqueFd> pidfd;
  Kept kept, log;
};

inline size_t CountKeeping(absl::Span<const std::shared_ptr<OldMember>> members) {
  return static_cast<size_t>(
      std::count_if(members.begin(), members.end(), [](const auto& member) { return member->keeps; }));
}

class OldSessions {
 public:
  explicit OldSessions(BlockPool* pool) : pool_(*pool) {}

  // `members` are of the sessions that the pool has found, or of others, which held nothing. A session without members goes
  // at once.
  void Adopt(const RecoveredPool& found, std::vector<std::shared_ptr<OldMember>> members);
  // Those whose processes are not known to have ended; to be asked outside the mutex.
  const std::vector<std::shared_ptr<OldMember>>& members() const { return members_; }
  // Their processes have ended. It costs the sum of both: call it with few.
  void OnEnded(absl::Span<const std::shared_ptr<OldMember>> ended);

  // Sessions that still hold blocks.
  size_t size() const {
    return static_cast<size_t>(std::count_if(sessions_.begin(), sessions_.end(), [](const auto& session) {
      return session.second.holder != kNobody;
    }));
  }

 private:
  BlockPool& pool_;
  std::vector<std::shared_ptr<OldMember>> members_;
  struct Old {
    Holder holder = kNobody;  // It has none if it held nothing.
    uint32_t members = 0;
  };
  std::map<uint64_t, Old> sessions_;  // The key is the session's id.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_
