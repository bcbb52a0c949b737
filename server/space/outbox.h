// Frames on their way from a space to the members' attach connections, in order.
//
// Frames are queued under the space's mutex and sent outside it. So that they keep their order, one thread at
// a time is the sender: it becomes so by BeginSending, and no longer is once Next answers nothing. Not
// thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_OUTBOX_H_
#define KVPOOL_SERVER_SPACE_OUTBOX_H_

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "cuda/device.h"
#include "kvpool/v1/attach.pb.h"
#include "server/space/attach_peer.h"

namespace kvpool {

class Session;

// The fd or handle of the slab is taken when the frame is sent, outside the mutex.
struct OutgoingFrame {
  std::shared_ptr<Session> session;
  std::shared_ptr<AttachPeer> peer;
  v1::AttachFrame frame;
  std::shared_ptr<Slab> slab;  // Null: the frame carries no memory.
};

class Outbox {
 public:
  void Push(OutgoingFrame frame) { frames_.push_back(std::move(frame)); }
  // False: another thread is the sender, and will send what is here.
  bool BeginSending() { return !std::exchange(sending_, true); }
  std::optional<OutgoingFrame> Next() {
    if (frames_.empty()) {
      sending_ = false;
      return std::nullopt;
    }
    std::optional<OutgoingFrame> next(std::move(frames_.front()));
    frames_.pop_front();
    return next;
  }
  void Clear() { frames_.clear(); }

 private:
  std::deque<OutgoingFrame> frames_;
  bool sending_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_OUTBOX_H_
