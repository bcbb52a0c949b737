// What a turn at a space has to do once the space's mutex is free again: neither sends nor listeners run
// under it. Filled under the mutex, carried out by Space::Settle and SpaceOwner::AfterTurn.
#ifndef KVPOOL_SERVER_SPACE_DEFERRED_H_
#define KVPOOL_SERVER_SPACE_DEFERRED_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "server/space/attach_peer.h"
#include "server/space/parked_verbs.h"
#include "server/space/stream_listener.h"

namespace kvpool {

class Session;

// Why a session ended. The names are label values of a metric.
enum class EndKind { kClosed, kMemberDied, kHangup, kRefusedSlab, kUnsentSlab, kOperator };
inline constexpr int kEndKinds = 6;
constexpr std::string_view EndKindName(EndKind kind) {
  switch (kind) {
    case EndKind::kClosed:
      return "closed";
    case EndKind::kMemberDied:
      return "member_died";
    case EndKind::kHangup:
      return "hangup";
    case EndKind::kRefusedSlab:
      return "refused_slab";
    case EndKind::kUnsentSlab:
      return "unsent_slab";
    case EndKind::kOperator:
      return "operator";
  }
  return "";
}

struct Promotion;

struct Deferred {
  struct Answer {
    std::vector<Waiter> waiters;
    v1::OperationResult result;
  };
  // Verbs that were parked when their session ended.
  struct Dropped {
    std::shared_ptr<Session> session;
    ParkedVerbs verbs;
  };
  struct Hangup {
    std::shared_ptr<AttachPeer> peer;
    std::string reason;
  };
  struct Ended {
    uint64_t session = 0;
    EndKind kind = EndKind::kClosed;
    std::string reason;
  };

  // ---- Carried out by the space
  bool send = false;                                        // The outbox has frames.
  std::vector<Dropped> dropped;                             // Many verbs, to be answered part by part.
  std::vector<std::shared_ptr<StreamListener>> wake;        // Something is pending for these streams.
  std::vector<std::shared_ptr<StreamListener>> superseded;  // A newer stream took over from these.
  std::vector<Answer> answers;                              // Unary calls have their results.
  std::vector<Hangup> hangups;                              // Connections are to be closed.

  // ---- Carried out by the space's owner
  std::vector<Ended> ended;
  std::vector<uint64_t> gone;                          // These sessions' blocks have all come back.
  std::vector<std::shared_ptr<Promotion>> promotions;  // Blocks to be brought up from below.
  bool housekeep = false;                              // The housekeeper has work.
  bool reclaim = false;  // The thread that used up a few blocks is to reclaim some.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEFERRED_H_
