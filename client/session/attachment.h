// The attach socket of one member, and the memory that comes through it.
//
// Its thread imports each slab as it comes, maps it into the member's reservation and acknowledges it,
// for as long as the session lives; the engine does nothing for growth. When the connection hangs up,
// the session is over.
#ifndef KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
#define KVPOOL_CLIENT_SESSION_ATTACHMENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/session_state.h"
#include "cuda/device.h"
#include "kvpool/v1/attach.pb.h"
#include "proto/support/mutex.h"

namespace kvpool {

class Attachment {
 public:
  // Connects, sends hello and receives the daemon's welcome. UNAVAILABLE: there is no daemon, or it hung up,
  // with its reason.
  static absl::StatusOr<std::unique_ptr<Attachment>> Connect(const std::string& daemon_socket,
                                                             const std::string& client_name,
                                                             std::chrono::steady_clock::time_point deadline);
  ~Attachment() { Unmap(); }
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  const std::string& token() const { return welcome_.attach_token(); }
  uint64_t daemon_epoch() const { return welcome_.daemon_epoch(); }

  struct Geometry {
    uint64_t block_stride_bytes = 0;
    uint32_t max_blocks = 0;
    uint64_t slab_bytes = 0;
    bool warmup = false;
  };
  // Starts the thread, which keeps capacity and slabs in `state`, and at the end tells it
  // why and calls `on_end`.
  void Start(const Geometry& geometry, SessionState* state, std::function<void()> on_end);

  // Hangs up, stops the thread and unmaps. From then on base() is 0.
  void Unmap() ABSL_LOCKS_EXCLUDED(mu_);

  // The address of block 0; 0 before the first slab came.
  uint64_t base() const { return base_.load(std::memory_order_acquire); }
  // 16 bytes, the UUID of the GPU that the memory is on; empty: it is host memory. REQUIRES: base() != 0.
  const std::string& device_uuid() const { return device_uuid_; }
  // See MemberMemory::FinishWarmup.
  absl::Status FinishWarmup() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Attachment(UniqueFd socket, const v1::AttachWelcome& welcome)
      : socket_(std::move(socket)), welcome_(welcome) {}

  void Run();
  // False: the connection is useless from now on, and the state says why.
  bool OnFrame(const v1::AttachFrame& frame, UniqueFd fd);
  absl::Status Map(const v1::Slab& slab, UniqueFd fd) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Reserve(const v1::Slab& slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  UniqueFd socket_;  // Closed once the thread has ended.
  const v1::AttachWelcome welcome_;
  Geometry geometry_;
  SessionState* state_ = nullptr;
  std::function<void()> on_end_;
  std::atomic<uint64_t> base_{0};
  std::string device_uuid_;  // Written before base_.
  Mutex mu_;
  std::unique_ptr<MemberMemory> memory_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
