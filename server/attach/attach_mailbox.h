// Frames and commands for attach connections, from any thread, wait here until the attach thread takes them.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_MAILBOX_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_MAILBOX_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/daemon/daemon.h"

namespace kvpool {

struct AttachLetter {
  enum class Kind { kFrame, kClose, kBound, kNotAwaited };
  uint64_t connection = 0;
  Kind kind = Kind::kFrame;
  v1::AttachFrame frame;
  UniqueFd fd;
  std::string reason;    // Set for kClose.
  uint64_t process = 0;  // This and the next are set for kNotAwaited, whose connection may be gone.
  AttachId attach{0};
};

// Thread-safe. It outlives the server for as long as the daemon holds peers; letters to nobody are dropped.
// It stays short: the daemon has at most 8 unacknowledged slabs in flight for each member, and the attach
// thread empties it at every turn.
class AttachMailbox {
 public:
  static absl::StatusOr<std::shared_ptr<AttachMailbox>> Make();

  // Readable when there are letters.
  int wake_fd() const { return wake_.get(); }
  void Post(AttachLetter letter);
  // Takes all letters and makes wake_fd() unreadable.
  std::vector<AttachLetter> Take();
  // Nobody will take letters any more.
  void Shut();

 private:
  explicit AttachMailbox(UniqueFd wake) : wake_(std::move(wake)) {}

  const UniqueFd wake_;  // An eventfd.
  Mutex mu_;
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<AttachLetter> letters_ ABSL_GUARDED_BY(mu_);
};

// The daemon's face of one connection of a process: what it is told goes through `mailbox`.
std::shared_ptr<AttachPeer> MakeMailedPeer(std::shared_ptr<AttachMailbox> mailbox, uint64_t connection,
                                           uint64_t process);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_MAILBOX_H_
