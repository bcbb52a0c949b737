#include "server/gpu_witness.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cuda/block_stamper.h"
#include "proto/support/status_macros.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

constexpr char kVariable[] = "KVPOOL_GPU_WITNESS";  // Its value is the device's id.
constexpr char kThisProgram[] = "/proc/self/exe";
// The witness's end of the socket; it has no other files but 0 to 2.
constexpr int kSocket = 3;

// A kernel that writes half of it takes longer than the driver takes to start the next one, so that the witness is most
// likely killed while one runs.
constexpr size_t kLeastBytes = size_t{64} << 20;
constexpr size_t kBlockBytes = size_t{64} << 10;
// A witness opens the GPU first, which takes a second where there are many.
constexpr std::chrono::seconds kPatience{60};
// What is written late comes within the time of a kernel.
constexpr std::chrono::milliseconds kWatch{100};
// So long the witness writes before it is killed.
constexpr std::chrono::milliseconds kLife{20};
// The content that each half has in the end.
constexpr uint64_t kWitnessKey = 1, kDaemonKey = 2, kFirstChangingKey = 3;

size_t BytesFor(const Device& gpu) {
  const size_t granule = gpu.granularity_bytes();
  return (kLeastBytes + granule - 1) / granule * granule;
}

// The blocks of a half of the memory at `address`.
std::vector<StampedBlock> Half(uint64_t address, size_t bytes, int half, uint64_t key) {
  std::vector<StampedBlock> blocks(bytes / 2 / kBlockBytes);
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i] = {.address = address + static_cast<uint64_t>(half) * (bytes / 2) + i * kBlockBytes,
                 .key_digest = key,
                 .block_ref = i};
  }
  return blocks;
}

absl::Status ExpectStamps(BlockStamper* stamper, const std::vector<StampedBlock>& blocks,
                          absl::string_view what) {
  ASSIGN_OR_RETURN(const std::vector<uint64_t> wrong, stamper->Verify(blocks, kBlockBytes));
  const uint64_t words = std::accumulate(wrong.begin(), wrong.end(), uint64_t{0});
  if (words == 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(what, ": ", words, " of ", blocks.size() * kBlockBytes / 8, " words differ"));
}

// A child process, which ends with this object at the latest.
class Witness {
 public:
  static absl::StatusOr<Witness> Start(const std::string& device) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
      return absl::ErrnoToStatus(errno, "socketpair");
    UniqueFd ours(pair[0]);
    const UniqueFd theirs(pair[1]);
    const timeval patience{.tv_sec = kPatience.count(), .tv_usec = 0};
    if (setsockopt(ours.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) != 0)
      return absl::ErrnoToStatus(errno, "SO_RCVTIMEO");
    std::string variable = absl::StrCat(kVariable, "=", device), name = "kvpoold-witness";
    std::vector<char*> environment = {variable.data()};
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.push_back(nullptr);
    char* const arguments[] = {name.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const absl::Cleanup destroy = [&actions] { posix_spawn_file_actions_destroy(&actions); };
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), kSocket);
    pid_t pid = 0;
    if (const int error = posix_spawn(&pid, kThisProgram, &actions, nullptr, arguments, environment.data());
        error != 0)
      return absl::ErrnoToStatus(error, "starting a process");
    return Witness(pid, std::move(ours));
  }
  Witness(Witness&& other) noexcept : pid_(std::exchange(other.pid_, 0)), socket_(std::move(other.socket_)) {}
  ~Witness() { Kill(); }

  // Returns once the memory's first half is written, and the other one is being written.
  absl::StatusOr<UniqueFd> Memory() {
    KeeperFrame frame;
    UniqueFd fd;
    RETURN_IF_ERROR(ReceiveKeeperFrame(socket_.get(), &frame, &fd));
    if (!fd.valid()) return absl::UnavailableError(std::string(frame.text()));
    return fd;
  }
  // Returns when the process has ended.
  void Kill() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = 0;
  }

 private:
  Witness(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}
  pid_t pid_;
  UniqueFd socket_;
};

absl::Status Bear(const WitnessPart& part) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> gpu, OpenCudaDevice(part.device));
  ASSIGN_OR_RETURN(const std::unique_ptr<BlockStamper> stamper, OpenCudaStamper(gpu->uuid_bytes()));
  const size_t bytes = BytesFor(*gpu);
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, gpu->MakeSlab(bytes));
  ASSIGN_OR_RETURN(const UniqueFd fd, slab->Export());
  RETURN_IF_ERROR(stamper->Write(Half(slab->address(), bytes, 0, kWitnessKey), kBlockBytes));
  std::vector<StampedBlock> changing = Half(slab->address(), bytes, 1, kFirstChangingKey);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (bool told = false; std::chrono::steady_clock::now() < end; told = true) {
    RETURN_IF_ERROR(stamper->Write(changing, kBlockBytes));
    if (!told) RETURN_IF_ERROR(SendKeeperFrame(part.socket.get(), KeeperFrame(), fd.get()));
    for (StampedBlock& block : changing) ++block.key_digest;
  }
  return absl::DeadlineExceededError("nobody has ended this process");
}

}  // namespace

absl::Status ProveThatMemoryOutlives(Device* gpu) {
  ASSIGN_OR_RETURN(Witness witness, Witness::Start(gpu->id()));
  ASSIGN_OR_RETURN(UniqueFd fd, witness.Memory());
  std::this_thread::sleep_for(kLife);
  witness.Kill();
  const size_t bytes = BytesFor(*gpu);
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, gpu->AdoptSlab(std::move(fd), bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<BlockStamper> stamper, OpenCudaStamper(gpu->uuid_bytes()));
  const std::vector<StampedBlock> taken_over = Half(slab->address(), bytes, 1, kDaemonKey);
  RETURN_IF_ERROR(stamper->Write(taken_over, kBlockBytes));
  RETURN_IF_ERROR(ExpectStamps(stamper.get(), Half(slab->address(), bytes, 0, kWitnessKey),
                               "what a process had written before it was killed"));
  std::this_thread::sleep_for(kWatch);
  return ExpectStamps(stamper.get(), taken_over,
                      "what was written after a process had been killed that wrote there");
}

std::optional<WitnessPart> TakeWitnessPart() {
  const char* const device = getenv(kVariable);
  if (device == nullptr) return std::nullopt;
  return WitnessPart{.socket = UniqueFd(kSocket), .device = device};
}

int BearWitness(const WitnessPart& part) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const absl::Status ended = Bear(part);
  KeeperFrame words;
  words.set_text(std::string(ended.message()));
  // Nobody may be left to hear it.
  SendKeeperFrame(part.socket.get(), words).IgnoreError();
  return 1;
}

}  // namespace kvpool
