#include "tests/service/recovery_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "cuda/device.h"

namespace kvpool {
namespace {

constexpr uint64_t kSlab = 4 << 20;

// What a descriptor's memory held.
class KeptMemory {
 public:
  explicit KeptMemory(UniqueFd fd) : fd_(std::move(fd)) {
    off_t hole = 0;
    for (off_t data = 0; (data = lseek(fd_.get(), hole, SEEK_DATA)) >= 0;) {
      hole = lseek(fd_.get(), data, SEEK_HOLE);
      std::string& bytes = parts_[data];
      bytes.resize(static_cast<size_t>(hole - data));
      EXPECT_EQ(pread(fd_.get(), bytes.data(), bytes.size(), data), hole - data);
    }
  }
  // What was never written by then may hold anything.
  void Restore() const {
    for (const auto& [at, bytes] : parts_)
      EXPECT_EQ(pwrite(fd_.get(), bytes.data(), bytes.size(), at), static_cast<ssize_t>(bytes.size()));
  }

 private:
  UniqueFd fd_;
  std::map<off_t, std::string> parts_;
};

}  // namespace

Sleeper::Sleeper() : pid_(fork()) {
  if (pid_ == 0) {
    // Not only forked: it would hold this process's end of a socket pair open.
    execlp("sleep", "sleep", "3600", static_cast<char*>(nullptr));
    _exit(127);
  }
}

void Sleeper::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(std::exchange(pid_, 0), nullptr, 0);
}

PeerCredentials Sleeper::credentials() const {
  return {.pid = pid_,
          .uid = 1000,
          .process = static_cast<uint64_t>(pid_),
          .pidfd = std::make_shared<const UniqueFd>(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)))};
}

absl::StatusOr<std::unique_ptr<KeeperLink>> JoinKeeper(UniqueFd socket, const KeeperLink::Options& options) {
  auto link = KeeperLink::Join(std::move(socket), options);
  if (!link.ok()) return link;
  if (const absl::Status trusted = (*link)->Trust("host"); !trusted.ok()) return trusted;
  return link;
}

absl::Status RecoveryTest::Start() {
  End();
  auto link = JoinKeeper(keeper_->Connect());
  if (!link.ok()) return link.status();
  link_ = *std::move(link);
  options_.housekeeping_thread = options_.device_threads = false;
  if (options_.access == nullptr) options_.access = MakeAccess();
  if (options_.slab_bytes == 0) options_.slab_bytes = kSlab;
  options_.device_capacity_bytes.assign(ranks_, capacity_bytes_);
  std::vector<std::unique_ptr<Device>> devices;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    devices.push_back(MakeHostDevice({.capacity_bytes = capacity_bytes_, .try_huge_pages = false}));
  }
  auto daemon = Daemon::Start(options_, std::move(devices), &clock_, link_.get());
  if (!daemon.ok()) {
    link_.reset();
    return daemon.status();
  }
  daemon_ = *std::move(daemon);
  return absl::OkStatus();
}

void RecoveryTest::End() {
  daemon_.reset();
  link_.reset();
}

void RecoveryTest::Kill() {
  std::map<ino_t, KeptMemory> kept;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // The folder itself was open.
    const std::string target = std::filesystem::read_symlink(file.path(), gone).string();
    if (target.find("memfd:kvpool-table") == std::string::npos &&
        target.find("memfd:kvpool-member") == std::string::npos)
      continue;
    UniqueFd fd(open(file.path().c_str(), O_RDWR | O_CLOEXEC));
    struct stat facts;
    ASSERT_EQ(fstat(fd.get(), &facts), 0);
    kept.emplace(facts.st_ino, KeptMemory(std::move(fd)));
  }
  ASSERT_FALSE(kept.empty());
  End();
  for (const auto& [inode, memory] : kept) memory.Restore();
}

v1::OpenSession RecoveryTest::Request() const {
  v1::OpenSession request;
  v1::LayerGroup* group = request.mutable_layout()->add_groups();
  request.mutable_layout()->set_encoding(v1::ENCODING_OPAQUE);
  request.mutable_layout()->set_block_bytes(block_bytes_);
  group->set_name("full");
  group->add_layers(0);
  group->set_tokens_per_block(16);
  if (strided_) {
    request.mutable_layout()->set_encoding(v1::ENCODING_STRIDED);
    group->set_kv_heads(1);
    group->set_k_head_dim(4);
    group->set_v_head_dim(4);
    group->set_dtype(v1::DTYPE_F32);
    v1::Plane* const k = group->mutable_k();
    k->set_dim_stride_bytes(4);
    k->set_head_stride_bytes(16);
    k->set_token_stride_bytes(16);
    k->set_layer_stride_bytes(256);
    *group->mutable_v() = *k;
    group->mutable_v()->set_offset_bytes(256);
  }
  request.mutable_fingerprint()->set_digest(digest_);
  request.set_tenant(tenant_);
  request.set_ranks(ranks_);
  *request.mutable_role() = role_;
  request.set_warmup(warmup_);
  request.set_guaranteed_blocks(guaranteed_);
  request.set_max_space_bytes(max_space_bytes_);
  return request;
}

std::unique_ptr<Engine> RecoveryTest::Open(const PeerCredentials& credentials) {
  auto engine = std::make_unique<Engine>(daemon_.get(), "engine", credentials, gives_back_, takes_holes_);
  opened_ = engine->Open(Request());
  if (!opened_.ok()) return nullptr;
  for (int i = 0; i < 4; ++i) {
    engine->MapSlabs();
    daemon_->HousekeepOnce();
  }
  return engine;
}

std::unique_ptr<Engine> RecoveryTest::Join(const Engine& inviter, const v1::Role& role,
                                           const PeerCredentials& credentials) const {
  auto engine = std::make_unique<Engine>(daemon_.get(), "member", credentials);
  v1::AddMember request;
  request.set_session(inviter.opened.session());
  request.set_invitation(inviter.token);
  *request.mutable_role() = role;
  *request.mutable_layout() = Request().layout();
  *request.mutable_fingerprint() = Request().fingerprint();
  const absl::Status joined = engine->Join(inviter, request);
  EXPECT_TRUE(joined.ok()) << joined;
  return joined.ok() ? std::move(engine) : nullptr;
}

std::unique_ptr<Engine> RecoveryTest::ComeBack(const Engine& before,
                                               const PeerCredentials& credentials) const {
  absl::Status returned;
  auto again = std::make_unique<Engine>(daemon_.get(), before, credentials, &returned);
  EXPECT_TRUE(returned.ok()) << returned;
  if (!returned.ok()) return nullptr;
  while (again->MapSlabs()) {
  }
  return again;
}

absl::Status RecoveryTest::Refusal(const Engine& before, const PeerCredentials& credentials) const {
  absl::Status returned;
  const Engine again(daemon_.get(), before, credentials, &returned);
  return returned;
}

v1::StateCounts RecoveryTest::Blocks() {
  v1::ListSpacesResponse spaces;
  EXPECT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  return spaces.spaces_size() == 1 ? spaces.spaces(0).blocks() : v1::StateCounts();
}

v1::GetRecoveryResponse RecoveryTest::Recovery() {
  v1::GetRecoveryResponse recovery;
  EXPECT_TRUE(daemon_->GetRecovery({}, &recovery).ok());
  return recovery;
}

v1::RecoveredSpace RecoveryTest::RecoveredSpace() {
  const v1::GetRecoveryResponse recovery = Recovery();
  EXPECT_EQ(recovery.start(), "warm");
  EXPECT_EQ(recovery.spaces_size(), 1) << recovery.ShortDebugString();
  return recovery.spaces_size() == 1 ? recovery.spaces(0) : v1::RecoveredSpace();
}

}  // namespace kvpool
