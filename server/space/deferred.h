// What a call has to do once the space's mutex is free again: neither sends nor listeners run under it. Filled
// under the mutex, carried out by Daemon::Settle.
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

struct Deferred {
  struct Answer {
    std::vector<Waiter> waiters;
    v1::OperationResult result;
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

  std::vector<std::shared_ptr<StreamListener>> wake;        // Something is pending.
  std::vector<std::shared_ptr<StreamListener>> superseded;  // A newer stream took over.
  std::vector<Answer> answers;                              // Unary calls to answer.
  std::vector<Hangup> hangups;                              // Peers to close.
  std::vector<Ended> ended;                                 // Sessions that ended.
  std::vector<uint64_t> gone;                               // Sessions whose blocks all came back.
  bool send = false;                                        // The space's outbox has frames.
  bool housekeep = false;                                   // There is work for the housekeeper.
  bool reclaim = false;                                     // Blocks are to be reclaimed: few, here.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEFERRED_H_
