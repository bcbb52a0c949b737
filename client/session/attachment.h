// The attach socket of one member, and the memory that comes through it.
//
// Its thread imports each slab as it comes, maps it into the member's reservation and acknowledges it,
// for as long as the session lives; the engine does nothing for growth. A slab that the daemon asks back is unmapped by it, or by
// the engine's thread, as SessionOptions::give_back says. When the daemon closes the connection, or hangs
// up, the session is over; but if its sessions outlive it, the thread comes back to the next one, which then sends the
// slabs anew. Until then the state says `away`.
#ifndef KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
#define KVPOOL_CLIENT_SESSION_ATTACHMENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/session_state.h"
#include "client/session_options.h"
#include "cuda/device.h"
#include "kvpool/v1/attach.pb.h"
#include "proto/support/mutex.h"

namespace kvpool {

class Attachment {
 public:
  struct Options {
    std::string socket;  // The daemon's.
    std::string client_name;
    GiveBack give_back = GiveBack::kNever;
    bool holes = false;  // See SessionOptions::takes_holes().
  };
  // Connects, sends hello and receives the daemon's welcome. UNAVAILABLE: there is no daemon, or it hung up,
  // with its reason. FAILED_PRECONDITION: it takes no Step stream in frames.
  static absl::StatusOr<std::unique_ptr<Attachment>> Connect(const Options& options,
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
    bool scheduler = false;  // It maps nothing.
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
  // See Session::GiveBackSlabs. If a slab can't be unmapped the session is over.
  absl::StatusOr<uint64_t> GiveBackSlabs() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A slab that is mapped, or held back until warm-up is over.
  struct MappedSlab {
    std::string id;
    uint32_t first_block = 0, block_count = 0;
    uint64_t bytes = 0;
    bool leaves = false;                                         // It is asked back,
    std::optional<std::chrono::steady_clock::time_point> until;  // and the daemon waits until then.
  };

  Attachment(Options options, UniqueFd socket, const v1::AttachWelcome& welcome)
      : options_(std::move(options)), welcome_(welcome), socket_(std::move(socket)) {}

  void Run();
  // The daemon has hung up. True: the session goes on with the next one. False: it is over, and the state says why.
  bool ComeBack(const std::string& why);
  // One attempt. UNAVAILABLE: there is no daemon yet. RESOURCE_EXHAUSTED: it turned this connection away, and may take the
  // next. ABORTED: it does not know the session, and will not. FAILED_PRECONDITION: as of Connect.
  absl::Status TryToComeBack(std::chrono::steady_clock::time_point deadline);
  // False: Unmap was called.
  bool Use(UniqueFd socket) ABSL_LOCKS_EXCLUDED(socket_mu_);
  // Sleeps; false: Unmap was called.
  bool Rest(std::chrono::milliseconds time) ABSL_LOCKS_EXCLUDED(socket_mu_);
  int socket() ABSL_LOCKS_EXCLUDED(socket_mu_);
  // False: the connection is useless from now on, and the state says why.
  bool OnFrame(const v1::AttachFrame& frame, UniqueFd fd);
  bool OnSlab(const v1::Slab& slab, UniqueFd fd) ABSL_LOCKS_EXCLUDED(mu_);
  bool OnSlabLeave(const v1::SlabLeave& leave) ABSL_LOCKS_EXCLUDED(mu_);
  // The slab is sent again: it is the one that is mapped, and stays if it was asked back.
  absl::Status Keep(const v1::Slab& slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Map(const v1::Slab& slab, UniqueFd fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckLeave(const v1::SlabLeave& leave) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The last one that is mapped, where there are no gaps: what is asked back is left out. REQUIRES: there is one.
  uint32_t LastToStay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those that were asked back are not any more.
  void KeepAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Tells the state what is asked back, and what is mapped.
  void TellAskedBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellMapped() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Unmaps what is asked back, says so to the daemon, and answers the bytes.
  absl::StatusOr<uint64_t> Leave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendLeft(uint32_t slab) ABSL_LOCKS_EXCLUDED(socket_mu_);
  // Ends the session, and lets the daemon see it, which may wait for an answer.
  void EndAndHangUp(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(socket_mu_);
  absl::Status Reserve(const v1::Slab& slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const v1::AttachWelcome welcome_;
  Geometry geometry_;
  std::string member_token_;
  SessionState* state_ = nullptr;
  std::function<void()> on_change_;
  Mutex socket_mu_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(socket_mu_) = false;
  UniqueFd socket_
      ABSL_GUARDED_BY(socket_mu_);  // The thread alone replaces it, and it is closed when that has ended.
  std::atomic<uint64_t> base_{0};
  std::string device_uuid_;  // Written before base_.
  // It comes before socket_mu_: what is said of a slab is in the order of what became of it.
  Mutex mu_;
  std::unique_ptr<MemberMemory> memory_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, MappedSlab> slabs_ ABSL_GUARDED_BY(mu_);  // The key is Slab.slab.
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_ATTACHMENT_H_
