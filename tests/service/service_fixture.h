// A daemon without sockets, and engines that talk to it by calling it.
//
// One block is 1 KiB, one granule 16 KiB and, unless a test says otherwise, one slab 16 blocks: small numbers,
// so that a test can name every block.
#ifndef KVPOOL_TESTS_SERVICE_SERVICE_FIXTURE_H_
#define KVPOOL_TESTS_SERVICE_SERVICE_FIXTURE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/support/block_ref.h"
#include "server/daemon/daemon.h"
#include "tests/support/access.h"
#include "tests/support/fake_clock.h"
#include "tests/support/memory_device.h"

namespace kvpool {

// What an OperationResult has for a code.
inline constexpr int kInvalidArgument = static_cast<int>(absl::StatusCode::kInvalidArgument);
inline constexpr int kNotFound = static_cast<int>(absl::StatusCode::kNotFound);
inline constexpr int kResourceExhausted = static_cast<int>(absl::StatusCode::kResourceExhausted);
inline constexpr int kFailedPrecondition = static_cast<int>(absl::StatusCode::kFailedPrecondition);
inline constexpr int kAborted = static_cast<int>(absl::StatusCode::kAborted);
inline constexpr int kOutOfRange = static_cast<int>(absl::StatusCode::kOutOfRange);
inline constexpr int kUnimplemented = static_cast<int>(absl::StatusCode::kUnimplemented);

inline uint32_t IdOf(uint64_t ref) { return Index(BlockRef::Unpack(ref).id); }

inline constexpr uint64_t kBlockBytes = 1024;
inline constexpr uint64_t kGranuleBytes = 16 << 10;
inline constexpr uint32_t kSlabBlocks = 16;

// What the attach socket would have carried.
class FakePeer final : public AttachPeer {
 public:
  void Send(const v1::AttachFrame& frame, UniqueFd fd) override;
  void Close(const std::string& reason) override;
  void Bound() override { bound = true; }
  void NotAwaited(AttachId) override { not_awaited = true; }

  std::vector<v1::Slab> slabs();        // Those sent so far.
  std::vector<v1::SlabReady> ready();   // Those announced so far.
  std::vector<v1::SlabLeave> leaves();  // Those asked for so far.
  std::optional<std::string> closed();  // Why the daemon hung up.
  std::function<void(const v1::SlabLeave&)> on_leave;
  std::function<void(const v1::Slab&, UniqueFd)> on_slab;  // Who wants the memory itself.
  uint32_t fds() const { return fds_; }                    // How many came with slab frames.
  std::atomic<bool> bound{false}, not_awaited{false};

 private:
  std::mutex mu_;
  std::vector<v1::Slab> slabs_;
  std::vector<v1::SlabReady> ready_;
  std::vector<v1::SlabLeave> leaves_;
  std::optional<std::string> closed_;
  std::atomic<uint32_t> fds_{0};
};

class FakeListener final : public StreamListener {
 public:
  void OnPending() override { ++pending; }
  void OnSuperseded() override { ++superseded; }
  std::atomic<int> pending{0}, superseded{0};
};

// One member process.
class Engine {
 public:
  // One that gives back unmaps at once what it is asked to.
  Engine(Daemon* daemon, const std::string& name, PeerCredentials credentials, bool gives_back = false,
         bool holes = false);
  // A member of an earlier daemon that comes back to this one: `returned` says whether it may.
  Engine(Daemon* daemon, const Engine& before, PeerCredentials credentials, absl::Status* returned);

  absl::Status Open(const v1::OpenSession& request);
  absl::Status Join(const Engine& inviter, const v1::AddMember& request);
  // Maps what was sent; false: nothing to map.
  bool MapSlabs();
  void Die() {
    daemon_->OnHangup(id);
    daemon_->OnProcessDead(id);
  }

  // Unary calls. A call that is parked answers later: `answer` stays empty until then.
  v1::OperationResult Do(v1::Operation operation);
  void Send(v1::Operation operation, std::optional<v1::OperationResult>* answer);
  std::vector<uint64_t> Lease(uint32_t count);
  v1::LeaseResult LeaseAsked(uint32_t count, uint32_t min);
  v1::SealResult Seal(const std::vector<uint64_t>& blocks, const std::vector<std::string>& keys,
                      const std::string& parent = "", uint64_t after = 0);
  v1::MatchResult Match(const std::vector<std::string>& keys);
  v1::ReleaseResult Release(const std::vector<uint64_t>& blocks, uint64_t after = 0);
  uint64_t Fence(uint64_t step);

  v1::StepResponse Step(std::vector<v1::Operation> operations);
  v1::StepResponse Step(const v1::StepRequest& request);
  v1::StepResponse Pending();

  AttachId id{};
  std::string attach_token;
  std::shared_ptr<FakePeer> peer = std::make_shared<FakePeer>();
  std::shared_ptr<Member> member;
  v1::OpenSessionResult opened;
  std::string token;
  uint64_t sequence = 0;
  const bool gives_back, holes;
  std::atomic<uint32_t> mapped{0};

 private:
  v1::AttachHello Hello();

  Daemon* const daemon_;
};

// Operations, for batches and for odd cases.
v1::Operation LeaseOp(uint32_t count, uint32_t min = 0);
v1::Operation ReleaseOp(const std::vector<uint64_t>& blocks, uint64_t after = 0);
v1::Operation RefOp(const std::vector<uint64_t>& blocks);
v1::Operation TouchOp(const std::vector<uint64_t>& blocks);
v1::Operation PinOp(const std::vector<uint64_t>& blocks, uint64_t ttl_ms);
v1::Operation UnpinOp(const std::vector<uint64_t>& blocks);
v1::Operation RetainOp(const std::vector<uint64_t>& blocks, uint32_t priority, uint64_t ttl_ms);
v1::Operation SealOp(const std::vector<uint64_t>& blocks, const std::vector<std::string>& keys,
                     const std::string& parent = "", uint64_t after = 0);
v1::Operation MatchOp(const std::vector<std::string>& keys);
v1::Operation FenceOp(uint64_t step);
v1::Operation WarmupDoneOp();
v1::Operation CloseOp(uint64_t after = 0);

// A 32-byte key.
std::string Key(const std::string& name);
std::vector<std::string> Keys(const std::string& prefix, int count);

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() { options_.access = access_; }
  // `slabs`: capacity of each device in slabs of 16 blocks.
  // The last `gpus` of the devices pass for GPUs.
  void StartDaemon(uint32_t slabs, int devices = 1, int gpus = 0);
  std::unique_ptr<Engine> Attach(const std::string& name = "engine", uint32_t uid = 1000);
  bool engines_give_back_ = false, engines_take_holes_ = false;  // Those that attach from now on.
  // Attached, opened, and all slabs mapped.
  std::unique_ptr<Engine> OpenEngine(const v1::OpenSession& request, const std::string& name = "engine");
  v1::OpenSession OpenRequest(const std::string& model = "model") const;
  v1::AddMember JoinRequest(const Engine& inviter, uint32_t rank, const std::string& model = "model") const;
  v1::StateCounts Blocks();
  // All engines map until nothing is sent any more, with rounds of housekeeping between.
  void Settle(const std::vector<Engine*>& engines);

  FakeClock clock_;
  const std::shared_ptr<AccessControl> access_ = MakeAccess();
  DaemonOptions options_;
  std::vector<std::unique_ptr<MemoryDevice::Script>> scripts_;
  std::unique_ptr<Daemon> daemon_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_SERVICE_FIXTURE_H_
