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
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cuda/block_copier.h"
#include "cuda/block_stamper.h"
#include "proto/support/status_macros.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

constexpr char kVariable[] = "KVPOOL_GPU_WITNESS";  // Its value is the device's id.
constexpr char kThisProgram[] = "/proc/self/exe";
// The witness's end of the socket.
constexpr int kSocket = 3;

// Of each of the two pieces of memory.
constexpr size_t kLeastBytes = size_t{32} << 20;
constexpr size_t kBlockBytes = size_t{64} << 10;
// So many threads write, each a part of its own, every block of which one launch, or one call of copies, writes so often: work for
// milliseconds is on its way when the witness is killed.
constexpr size_t kRepetitions = 64;
constexpr size_t kThreads = 8;
// A witness opens the GPU first, which takes a second where there are many.
constexpr std::chrono::seconds kPatience{20};
// What is written late comes within the time of what was on its way.
constexpr std::chrono::milliseconds kWatch{100};
// So long the witness writes before it is killed.
constexpr std::chrono::milliseconds kLife{20};
using Deadline = std::chrono::steady_clock::time_point;
constexpr uint64_t kWitnessKey = 1, kDaemonKey = 2, kFirstChangingKey = 3;

size_t BytesFor(const Device& gpu) {
  const size_t granule = std::max<size_t>(gpu.granularity_bytes(), kThreads * kBlockBytes);
  return (kLeastBytes + granule - 1) / granule * granule;
}

std::vector<StampedBlock> BlocksAt(uint64_t address, size_t bytes, uint64_t key) {
  std::vector<StampedBlock> blocks(bytes / kBlockBytes);
  for (size_t i = 0; i < blocks.size(); ++i)
    blocks[i] = {.address = address + i * kBlockBytes, .key_digest = key, .block_ref = i};
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
  ~Witness() { Kill().IgnoreError(); }

  // The next piece of memory.
  absl::StatusOr<UniqueFd> Memory() {
    KeeperFrame frame;
    UniqueFd fd;
    const absl::Status received = ReceiveKeeperFrame(socket_.get(), &frame, &fd);
    if (!received.ok())
      return absl::UnavailableError(
          "the process that was to be killed for it has not opened the GPU, and said nothing");
    if (!fd.valid())
      return absl::UnavailableError(
          absl::StrCat("the process that was to be killed for it: ", std::string(frame.text())));
    return fd;
  }
  // Returns when the process has ended. DEADLINE_EXCEEDED: it has not.
  absl::Status Kill() {
    if (pid_ == 0) return absl::OkStatus();
    const pid_t pid = std::exchange(pid_, 0);
    kill(pid, SIGKILL);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (pid_t ended = 0; ended != pid;) {
      ended = waitpid(pid, nullptr, WNOHANG);
      if (ended < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "waiting for a process");
      if (std::chrono::steady_clock::now() >= end)
        return absl::DeadlineExceededError(absl::StrCat("process ", pid, " was killed, and does not end"));
    }
    return absl::OkStatus();
  }

 private:
  Witness(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}
  pid_t pid_;
  UniqueFd socket_;
};

// One of the parts that change, by kernels: of as many as there are stampers.
void Stamp(BlockStamper* stamper, uint64_t address, size_t bytes, Deadline end) {
  uint64_t key = kFirstChangingKey;
  for (absl::Status written; written.ok() && std::chrono::steady_clock::now() < end; ++key) {
    std::vector<StampedBlock> blocks;
    for (size_t times = 0; times < kRepetitions; ++times) {
      const std::vector<StampedBlock> once = BlocksAt(address, bytes, key);
      blocks.insert(blocks.end(), once.begin(), once.end());
    }
    written = stamper->Write(blocks, kBlockBytes);
  }
}

// The same by copies from the host's memory, which is how blocks come up from a tier. REQUIRES: `from` has as many bytes.
void CopyUp(BlockCopier* copier, const std::vector<char>& from, uint64_t address, Deadline end) {
  std::vector<CopyRange> ranges;
  for (size_t times = 0; times < kRepetitions; ++times) {
    ranges.push_back({.device_address = address,
                      .host_address = reinterpret_cast<uint64_t>(from.data()),
                      .bytes = from.size()});
  }
  while (std::chrono::steady_clock::now() < end) {
    const auto ticket = copier->Submit(CopyDirection::kToDevice, ranges, /*after=*/nullptr);
    if (!ticket.ok() || !(*ticket)->Wait().ok()) return;
  }
}

absl::Status Bear(const WitnessPart& part) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> gpu, OpenCudaDevice(part.device));
  const size_t bytes = BytesFor(*gpu);
  const size_t part_bytes = bytes / kThreads;
  std::vector<std::unique_ptr<BlockStamper>> stampers(kThreads - 1);
  for (auto& stamper : stampers) {
    ASSIGN_OR_RETURN(stamper, OpenCudaStamper(gpu->uuid_bytes()));
  }
  const std::vector<char> copied(part_bytes, 'c');
  ASSIGN_OR_RETURN(const std::unique_ptr<BlockCopier> copier, OpenCudaBlockCopier(part.device));
  // Without it copies are slower, and some are on their way all the same.
  copier->Register(reinterpret_cast<uint64_t>(copied.data()), copied.size()).IgnoreError();
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> kept, gpu->MakeSlab(bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> changing, gpu->MakeSlab(bytes));
  RETURN_IF_ERROR(stampers[0]->Write(BlocksAt(kept->address(), bytes, kWitnessKey), kBlockBytes));
  const Deadline end = std::chrono::steady_clock::now() + kPatience;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (const auto& stamper : stampers) {
    threads.emplace_back(Stamp, stamper.get(), changing->address() + threads.size() * part_bytes, part_bytes,
                         end);
  }
  threads.emplace_back(CopyUp, copier.get(), std::cref(copied),
                       changing->address() + threads.size() * part_bytes, end);
  const absl::Cleanup join = [&threads] {
    for (std::thread& thread : threads) thread.join();
  };
  for (const Slab* slab : {kept.get(), changing.get()}) {
    ASSIGN_OR_RETURN(const UniqueFd fd, slab->Export());
    RETURN_IF_ERROR(SendKeeperFrame(part.socket.get(), KeeperFrame(), fd.get()));
  }
  std::this_thread::sleep_until(end);
  return absl::DeadlineExceededError("nobody has ended this process");
}

}  // namespace

absl::Status ProveThatMemoryOutlives(Device* gpu) {
  const size_t bytes = BytesFor(*gpu);
  ASSIGN_OR_RETURN(const std::unique_ptr<BlockStamper> stamper, OpenCudaStamper(gpu->uuid_bytes()));
  ASSIGN_OR_RETURN(Witness witness, Witness::Start(gpu->id()));
  ASSIGN_OR_RETURN(UniqueFd kept_fd, witness.Memory());
  ASSIGN_OR_RETURN(UniqueFd changing_fd, witness.Memory());
  // It is here before the witness ends, so that nothing is between that end and what is written then.
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> changing, gpu->AdoptSlab(std::move(changing_fd), bytes));
  const std::vector<StampedBlock> taken_over = BlocksAt(changing->address(), bytes, kDaemonKey);
  std::this_thread::sleep_for(kLife);
  RETURN_IF_ERROR(witness.Kill());
  RETURN_IF_ERROR(stamper->Write(taken_over, kBlockBytes));
  // Until now nothing but the descriptor has held it.
  ASSIGN_OR_RETURN(const std::unique_ptr<Slab> kept, gpu->AdoptSlab(std::move(kept_fd), bytes));
  RETURN_IF_ERROR(ExpectStamps(stamper.get(), BlocksAt(kept->address(), bytes, kWitnessKey),
                               "what a process had written before it was killed"));
  std::this_thread::sleep_for(kWatch);
  return ExpectStamps(stamper.get(), taken_over,
                      "what was written after the end of a process that had written there");
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
