// The attach socket of one member, and the memory that comes through it.
//
// Its thread imports each slab as it comes, maps it into the member's reservation and acknowledges it,
// for as long as the session lives; the engine does nothing for growth. When the daemon closes the connection, or hangs
// up, the session is over; but if its sessions outlive it, the thread comes back to the next one, which then sends the
// slabs anew. Until then the state says `away`.
#ifndef KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
#define KVPOOL_CLIENT_SESSION_ATTACHMENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

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
  // Starts the thread, which keeps capacity and slabs in `state`, and at the end tells it why. `on_change` is called then,
  // and when the daemon is gone or back.
  void Start(const Geometry& geometry, const std::string& member_token, SessionState* state,
             std::function<void()> on_change);

  // Hangs up, stops the thread and unmaps. From then on base() is 0.
  void Unmap() ABSL_LOCKS_EXCLUDED(mu_);

  // The address of block 0; 0 before the first slab came.
  uint64_t base() const { return base_.load(std::memory_order_acquire); }
  // 16 bytes, the UUID of the GPU that the memory is on; empty: it is host memory. REQUIRES: base() != 0.
  const std::string& device_uuid() const { return device_uuid_; }
  // See MemberMemory::FinishWarmup.
  absl::Status FinishWarmup() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Attachment(std::string path, std::string client_name, UniqueFd socket, const v1::AttachWelcome& welcome)
      : path_(std::move(path)),
        client_name_(std::move(client_name)),
        welcome_(welcome),
        socket_(std::move(socket)) {}

  void Run();
  // The daemon has hung up. True: the session goes on with the next one. False: it is over, and the state says why.
  bool ComeBack(const std::string& why);
  // One attempt. UNAVAILABLE: there is no daemon yet. RESOURCE_EXHAUSTED: it turned this connection away, and may take the
  // next. ABORTED: it does not know the session, and will not.
  absl::Status TryToComeBack(std::chrono::steady_clock::time_point deadline);
  // False: Unmap was called.
  bool Use(UniqueFd socket) ABSL_LOCKS_EXCLUDED(socket_mu_);
  // Sleeps; false: Unmap was called.
  bool Rest(std::chrono::milliseconds time) ABSL_LOCKS_EXCLUDED(socket_mu_);
  int socket() ABSL_LOCKS_EXCLUDED(socket_mu_);
  // False: the connection is useless from now on, and the state says why.
  bool OnFrame(const v1::AttachFrame& frame, UniqueFd fd);
  // The slab is sent again: is it the one that is mapped?
  absl::Status CheckSame(const v1::Slab& slab) const;
  absl::Status Map(const v1::Slab& slab, UniqueFd fd) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Reserve(const v1::Slab& slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string path_;  // The daemon's socket.
  const std::string client_name_;
  const v1::AttachWelcome welcome_;
  Geometry geometry_;
  std::string member_token_;
  SessionState* state_ = nullptr;
  std::function<void()> on_change_;
  Mutex socket_mu_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(socket_mu_) = false;
  UniqueFd socket_
      ABSL_GUARDED_BY(socket_mu_);     // The thread alone replaces it, and it is closed when that has ended.
  std::vector<std::string> slab_ids_;  // The thread's: those of mapped slabs.
  std::atomic<uint64_t> base_{0};
  std::string device_uuid_;  // Written before base_.
  Mutex mu_;
  std::unique_ptr<MemberMemory> memory_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
