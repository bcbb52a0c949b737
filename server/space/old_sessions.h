// Sessions of a daemon that ended before this one started, and whose processes may still run.
//
// An engine knows what it held, and goes on reading and writing it; nobody else may touch those blocks. So the pool has the
// sessions as ended ones, with all they held, and each goes when the last of its processes has ended.
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_
#define KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "proto/support/unique_fd.h"
#include "server/keeper/keeper_link.h"
#include "server/pool/block_pool.h"

namespace kvpool {

struct OldMember {
  uint64_t session = 0;
  UniqueFd pidfd;
  Kept kept;
};

class OldSessions {
 public:
  explicit OldSessions(BlockPool* pool) : pool_(*pool) {}

  // `members` are of the sessions that the pool has found, or of others, which held nothing. A session without members goes
  // at once.
  void Adopt(const RecoveredPool& found, std::vector<std::shared_ptr<OldMember>> members);
  // Those whose processes are not known to have ended; to be asked outside the mutex.
  const std::vector<std::shared_ptr<OldMember>>& members() const { return members_; }
  // Their processes have ended.
  void OnEnded(const std::vector<std::shared_ptr<OldMember>>& ended);

  // Sessions that still hold blocks.
  size_t size() const { return holders_.size(); }

 private:
  // What sessions without members held.
  void GiveBack();

  BlockPool& pool_;
  std::vector<std::shared_ptr<OldMember>> members_;
  std::map<uint64_t, Holder> holders_;  // The key is the session's id.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_OLD_SESSIONS_H_
