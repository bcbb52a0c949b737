#include "client/session/attachment.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session/connect_error.h"
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr uint32_t kProtocol = 1;
// A day: whatever a daemon says fits into a time of the clock.
constexpr uint64_t kLongestDeadlineMs = 86'400'000;
constexpr uint64_t kReserveGranularityBytes = 2 << 20;
// The whole warm-up range of a GPU maps the same few pages, because dummy K and V are never read back.
constexpr uint64_t kScratchBytes = 32 << 20;
// Between two attempts to find the next daemon.
constexpr std::chrono::milliseconds kComeBackPause{5};
// A daemon that turns many away at once is given more and more time, up to this.
constexpr std::chrono::milliseconds kLongestComeBackPause{100};

// Waits for the next frame. The socket stays blocking: only the handshake has a deadline.
absl::StatusOr<v1::AttachFrame> ReceiveBefore(int socket, steady_clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now()).count();
    pollfd waited{socket, POLLIN, 0};
    const int ready = poll(&waited, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
    if (ready < 0 && errno != EINTR)
      return absl::UnavailableError(absl::StrCat("poll: ", std::strerror(errno)));
    if (ready <= 0) {
      if (steady_clock::now() < deadline) continue;
      return absl::DeadlineExceededError("the daemon did not answer on the attach socket in time");
    }
    v1::AttachFrame frame;
    ASSIGN_OR_RETURN(const ReceiveOutcome outcome, ReceiveFrame(socket, &frame, nullptr));
    if (outcome == ReceiveOutcome::kFrame) return frame;
    if (outcome == ReceiveOutcome::kHangup)
      return absl::UnavailableError("the daemon hung up on the attach socket");
  }
}

v1::AttachFrame HelloOf(const Attachment::Options& options) {
  v1::AttachFrame frame;
  frame.mutable_hello()->set_protocol(kProtocol);
  frame.mutable_hello()->set_client_name(options.client_name);
  frame.mutable_hello()->set_gives_back(options.give_back != GiveBack::kNever);
  frame.mutable_hello()->set_holes(options.holes);
  return frame;
}

absl::Status CheckFrames(const v1::AttachWelcome& welcome, const std::string& socket) {
  if (welcome.step_frames() != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the daemon at ", socket,
                   " speaks gRPC alone: it is older than this library; upgrade the daemon first"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Connect(const Options& options,
                                                                steady_clock::time_point deadline) {
  absl::StatusOr<UniqueFd> connected = ConnectAttachSocket(options.socket + kAttachSuffix);
  if (absl::IsUnavailable(connected.status())) {
    return absl::UnavailableError(
        CannotReach(options.socket, kAttachSuffix, SOCK_SEQPACKET, "it has started only now: try again"));
  }
  ASSIGN_OR_RETURN(UniqueFd socket, std::move(connected));
  RETURN_IF_ERROR(SendFrame(socket.get(), HelloOf(options)).status());
  ASSIGN_OR_RETURN(const v1::AttachFrame answer, ReceiveBefore(socket.get(), deadline));
  if (answer.has_closed()) return absl::UnavailableError(answer.closed().reason());
  if (!answer.has_welcome()) {
    return absl::InternalError(
        absl::StrCat("attach socket: frame ", answer.frame_case(), " where a welcome was due"));
  }
  RETURN_IF_ERROR(CheckFrames(answer.welcome(), options.socket));
  return std::unique_ptr<Attachment>(new Attachment(options, std::move(socket), answer.welcome()));
}

void Attachment::Unmap() {
  {
    MutexLock lock(&socket_mu_);
    stop_ = true;
    stopped_.SignalAll();
    if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
  }
  if (thread_.joinable()) thread_.join();
  {
    MutexLock lock(&socket_mu_);
    socket_.Reset();
  }
  base_.store(0, std::memory_order_release);
  MutexLock lock(&mu_);
  slabs_.clear();
  TellAskedBack();
  memory_.reset();
}

int Attachment::socket() {
  MutexLock lock(&socket_mu_);
  return socket_.get();
}

bool Attachment::Use(UniqueFd socket) {
  MutexLock lock(&socket_mu_);
  if (stop_) return false;
  socket_ = std::move(socket);
  return true;
}

bool Attachment::Rest(std::chrono::milliseconds time) {
  const auto until = steady_clock::now() + time;
  MutexLock lock(&socket_mu_);
  while (!stop_ && steady_clock::now() < until) stopped_.WaitUntil(&socket_mu_, until);
  return !stop_;
}

absl::Status Attachment::TryToComeBack(steady_clock::time_point deadline) {
  ASSIGN_OR_RETURN(UniqueFd socket, ConnectAttachSocket(options_.socket + kAttachSuffix));
  const int fd = socket.get();
  // From here on Unmap ends what is waited for.
  if (!Use(std::move(socket))) return absl::CancelledError("the session is over");
  v1::AttachFrame hello = HelloOf(options_);
  hello.mutable_hello()->set_member_token(member_token_);
  RETURN_IF_ERROR(SendFrame(fd, hello).status());
  ASSIGN_OR_RETURN(const v1::AttachFrame answer, ReceiveBefore(fd, deadline));
  if (answer.has_closed()) {
    return answer.closed().final() ? absl::AbortedError(answer.closed().reason())
                                   : absl::ResourceExhaustedError(answer.closed().reason());
  }
  if (!answer.has_welcome()) return absl::AbortedError("the daemon answered hello with another frame");
  // A daemon that does not know of member tokens takes it for a newcomer.
  if (!answer.welcome().attach_token().empty())
    return absl::AbortedError("the daemon knows no session of before it");
  return CheckFrames(answer.welcome(), options_.socket);
}

bool Attachment::ComeBack(const std::string& why) {
  const std::chrono::milliseconds patience(welcome_.reattach_ms());
  absl::Status status = absl::UnavailableError(why);
  {
    // Who asked for them is gone. This is before there is another socket, on which the answer would be wrong.
    MutexLock lock(&mu_);
    KeepAll();
  }
  if (patience.count() > 0 && state_->open.load(std::memory_order_acquire) &&
      Rest(std::chrono::milliseconds(0))) {
    state_->away.store(true, std::memory_order_seq_cst);
    on_change_();
    const auto deadline = steady_clock::now() + patience;
    std::chrono::milliseconds pause = kComeBackPause;
    // Those who are turned away together don't come again together.
    std::minstd_rand random(static_cast<uint32_t>(steady_clock::now().time_since_epoch().count()) ^
                            static_cast<uint32_t>(reinterpret_cast<uintptr_t>(this) >> 4));
    while (true) {
      status = TryToComeBack(deadline);
      const bool turned_away = absl::IsResourceExhausted(status);
      if (!turned_away && !absl::IsUnavailable(status)) break;
      std::chrono::milliseconds rest = kComeBackPause;
      if (turned_away) {
        pause = std::min(2 * pause, kLongestComeBackPause);
        rest = pause / 2 + std::chrono::milliseconds(random() % static_cast<uint64_t>(pause.count() / 2 + 1));
      }
      if (steady_clock::now() >= deadline || !Rest(rest)) break;
    }
    if (status.ok()) {
      state_->away.store(false, std::memory_order_seq_cst);
      on_change_();
      return true;
    }
  }
  state_->End(
      absl::UnavailableError(absl::StrCat("detached: the daemon is gone (", why, ")",
                                          patience.count() == 0 ? "" : "; the session did not come back: ",
                                          patience.count() == 0 ? "" : status.message())));
  return false;
}

void Attachment::Start(const Geometry& geometry, const std::string& member_token, SessionState* state,
                       std::function<void()> on_change) {
  geometry_ = geometry;
  member_token_ = member_token;
  state_ = state;
  on_change_ = std::move(on_change);
  thread_ = std::thread([this] { Run(); });
}

void Attachment::Run() {
  bool usable = true;
  while (usable) {
    v1::AttachFrame frame;
    UniqueFd fd;
    const absl::StatusOr<ReceiveOutcome> outcome = ReceiveFrame(socket(), &frame, &fd);
    if (!outcome.ok()) {
      usable = ComeBack(std::string(outcome.status().message()));
      continue;
    }
    switch (*outcome) {
      case ReceiveOutcome::kFrame:
        usable = OnFrame(frame, std::move(fd));
        break;
      case ReceiveOutcome::kEmpty:
      case ReceiveOutcome::kWouldBlock:
        break;
      case ReceiveOutcome::kHangup:
        usable = ComeBack("its attach socket hung up");
        break;
    }
  }
  on_change_();
}

bool Attachment::OnFrame(const v1::AttachFrame& frame, UniqueFd fd) {
  switch (frame.frame_case()) {
    case v1::AttachFrame::kSlab:
      return OnSlab(frame.slab(), std::move(fd));
    case v1::AttachFrame::kSlabLeave:
      return OnSlabLeave(frame.slab_leave());
    case v1::AttachFrame::kSlabReady:
      // A daemon to which the session came back tells of each slab again, the first ones first: what is mapped and ready stays
      // so. It is slab_leave alone that takes some of it away.
      state_->capacity_blocks.store(std::max(state_->capacity_blocks.load(std::memory_order_relaxed),
                                             frame.slab_ready().capacity_blocks()),
                                    std::memory_order_seq_cst);
      state_->signal.Notify();
      return true;
    case v1::AttachFrame::kClosed:
      state_->End(absl::AbortedError(frame.closed().reason()));
      return false;
    case v1::AttachFrame::kHello:
    case v1::AttachFrame::kWelcome:
    case v1::AttachFrame::kSlabAck:
    case v1::AttachFrame::kSlabLeft:
    case v1::AttachFrame::FRAME_NOT_SET:
      break;
  }
  state_->End(
      absl::InternalError(absl::StrCat("attach socket: frame ", frame.frame_case(), " is not for clients")));
  return false;
}

bool Attachment::OnSlab(const v1::Slab& slab, UniqueFd fd) {
  absl::Status mapped;
  {
    MutexLock lock(&mu_);
    const bool again = slabs_.contains(slab.slab());
    mapped = again ? Keep(slab) : Map(slab, std::move(fd));
    if (mapped.ok() && !again) {
      slabs_[slab.slab()] = {.id = slab.id(),
                             .first_block = slab.first_block(),
                             .block_count = slab.block_count(),
                             .bytes = slab.bytes()};
      // This comes before the acknowledgement, after which answers may name these blocks.
      TellMapped();
      state_->signal.Notify();
    }
  }
  v1::AttachFrame ack;
  ack.mutable_slab_ack()->set_slab(slab.slab());
  if (!mapped.ok()) ack.mutable_slab_ack()->set_error(std::string(mapped.message()));
  // If it can't be sent, the next receive says why.
  SendFrame(socket(), ack).IgnoreError();
  if (!mapped.ok()) state_->End(mapped);
  return mapped.ok();
}

absl::Status Attachment::Keep(const v1::Slab& slab) {
  MappedSlab& mapped = slabs_.at(slab.slab());
  if (slab.id() != mapped.id || slab.first_block() != mapped.first_block) {
    return absl::DataLossError(
        absl::StrCat("slab ", slab.slab(), " is sent again, and is another than the one mapped here"));
  }
  mapped.leaves = false;
  TellAskedBack();
  return absl::OkStatus();
}

void Attachment::KeepAll() {
  for (auto& [index, slab] : slabs_) slab.leaves = false;
  TellAskedBack();
}

void Attachment::TellAskedBack() {
  if (state_ == nullptr) return;
  uint32_t asked = 0;
  auto first = SessionState::Time::max();
  for (const auto& [index, slab] : slabs_) {
    if (!slab.leaves) continue;
    ++asked;
    if (slab.until.has_value()) first = std::min(first, *slab.until);
  }
  state_->asked_back_until.store(first, std::memory_order_relaxed);
  state_->slabs_asked_back.store(asked, std::memory_order_seq_cst);
}

void Attachment::TellMapped() {
  if (state_ == nullptr) return;
  std::vector<MappedRange> ranges;
  for (const auto& [index, slab] : slabs_) {
    ranges.push_back({.first = slab.first_block, .end = slab.first_block + slab.block_count});
  }
  state_->SetMapped(std::move(ranges));
  state_->mapped_slabs.store(static_cast<uint32_t>(slabs_.size()), std::memory_order_seq_cst);
}

uint32_t Attachment::LastToStay() const {
  for (auto slab = slabs_.rbegin(); slab != slabs_.rend(); ++slab) {
    if (!slab->second.leaves) return slab->first;
  }
  KVPOOL_CHECK(false, "all %zu slabs are asked back", slabs_.size());
}

absl::Status Attachment::CheckLeave(const v1::SlabLeave& leave) const {
  const auto refuse = [&leave](const auto&... why) {
    return absl::InternalError(
        absl::StrCat("attach socket: slab ", leave.slab(), " is asked back, ", why...));
  };
  if (options_.give_back == GiveBack::kNever) return refuse("of an engine that gives nothing back");
  if (geometry_.scheduler) return absl::OkStatus();
  uint64_t stay = 0;
  for (const auto& [index, slab] : slabs_) stay += slab.leaves ? 0 : slab.block_count;
  if (stay == 0) return refuse("where none is mapped that was not");
  if (!options_.holes && leave.slab() != LastToStay())
    return refuse("where the last one that was not is ", LastToStay());
  const auto found = slabs_.find(leave.slab());
  if (found == slabs_.end()) return refuse("which is not mapped");
  if (found->second.leaves) return refuse("which it is already");
  stay -= found->second.block_count;
  if (leave.capacity_blocks() <= stay) return absl::OkStatus();
  return refuse("and ", leave.capacity_blocks(), " blocks are to stay usable, where ", stay, " stay mapped");
}

bool Attachment::OnSlabLeave(const v1::SlabLeave& leave) {
  absl::Status status;
  {
    MutexLock lock(&mu_);
    status = CheckLeave(leave);
    if (status.ok()) {
      // It goes down before mapped_blocks, which is never less.
      // Nor does it rise here: that of a session whose ranks have not all joined is still 0.
      state_->capacity_blocks.store(
          std::min(state_->capacity_blocks.load(std::memory_order_relaxed), leave.capacity_blocks()),
          std::memory_order_seq_cst);
      if (geometry_.scheduler) {
        SendLeft(leave.slab());
      } else {
        MappedSlab& slab = slabs_.at(leave.slab());
        slab.leaves = true;
        slab.until.reset();
        if (const uint64_t within = std::min(leave.deadline_ms(), kLongestDeadlineMs); within > 0)
          slab.until = std::chrono::steady_clock::now() + std::chrono::milliseconds(within);
        if (options_.give_back == GiveBack::kByCall) {
          TellAskedBack();
        } else {
          status = Leave().status();
        }
      }
      state_->signal.Notify();
    }
  }
  if (!status.ok()) EndAndHangUp(status);
  return status.ok();
}

absl::StatusOr<uint64_t> Attachment::GiveBackSlabs() {
  // Most of the time there is nothing, and then a mapping that is under way is not waited for.
  if (state_->slabs_asked_back.load(std::memory_order_acquire) == 0) return 0;
  absl::StatusOr<uint64_t> bytes = 0;
  {
    MutexLock lock(&mu_);
    // The daemon may have taken its wish back.
    if (state_->slabs_asked_back.load(std::memory_order_relaxed) == 0) return 0;
    const absl::Status finished = memory_->FinishWork();
    if (!finished.ok() && !IsSticky(finished)) return finished;
    bytes = Leave();
  }
  if (!bytes.ok()) EndAndHangUp(bytes.status());
  return bytes;
}

absl::StatusOr<uint64_t> Attachment::Leave() {
  uint64_t bytes = 0;
  std::vector<uint32_t> leave;
  for (const auto& [index, slab] : slabs_) {
    if (slab.leaves) leave.push_back(index);
  }
  for (; !leave.empty(); leave.pop_back()) {
    const MappedSlab slab = std::move(slabs_.extract(leave.back()).mapped());
    // Whoever looks must not be told of memory that is gone.
    TellMapped();
    RETURN_IF_ERROR(
        memory_->UnmapSlab(uint64_t{slab.first_block} * geometry_.block_stride_bytes, slab.bytes));
    bytes += slab.bytes;
    TellAskedBack();
    SendLeft(leave.back());
  }
  return bytes;
}

void Attachment::SendLeft(uint32_t slab) {
  v1::AttachFrame left;
  left.mutable_slab_left()->set_slab(slab);
  // If it can't be sent, the next receive says why.
  SendFrame(socket(), left).IgnoreError();
}

void Attachment::EndAndHangUp(const absl::Status& reason) {
  state_->End(reason);
  MutexLock lock(&socket_mu_);
  if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
}

absl::Status Attachment::Reserve(const v1::Slab& slab) {
  const uint64_t bytes = uint64_t{geometry_.max_blocks} * geometry_.block_stride_bytes;
  MemberMemoryOptions options;
  options.reserve_bytes =
      (bytes + kReserveGranularityBytes - 1) / kReserveGranularityBytes * kReserveGranularityBytes;
  options.warmup_scratch = geometry_.warmup;
  options.scratch_bytes = std::min(kScratchBytes, options.reserve_bytes);
  device_uuid_ = slab.device_uuid();
  if (device_uuid_.empty()) {
    ASSIGN_OR_RETURN(memory_, ReserveHostMemory(options));
  } else {
    ASSIGN_OR_RETURN(memory_, ReserveCudaMemory(device_uuid_, options));
  }
  return absl::OkStatus();
}

absl::Status Attachment::Map(const v1::Slab& slab, UniqueFd fd) {
  if (!options_.holes && slab.slab() != slabs_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab ", slab.slab(), " was sent, where ", slabs_.size(), " comes next"));
  }
  if (slab.block_count() > geometry_.max_blocks ||
      slab.first_block() > geometry_.max_blocks - slab.block_count() ||
      slab.bytes() != uint64_t{slab.block_count()} * geometry_.block_stride_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab ", slab.slab(), " has ", slab.block_count(), " blocks from ", slab.first_block(),
                     " on in ", slab.bytes(), " bytes; blocks have ", geometry_.block_stride_bytes,
                     ", and the space ", geometry_.max_blocks, " of them"));
  }
  if (memory_ == nullptr) RETURN_IF_ERROR(Reserve(slab));
  const bool ipc = !slab.ipc_handle().empty();
  if (ipc) {
    IpcHandle handle;
    if (slab.ipc_handle().size() != handle.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("slab ", slab.slab(), ": an IPC handle has 64 bytes, not ", slab.ipc_handle().size()));
    }
    std::memcpy(handle.data(), slab.ipc_handle().data(), handle.size());
    RETURN_IF_ERROR(memory_->MapIpcSlab(handle, slab.bytes()));
  } else {
    RETURN_IF_ERROR(memory_->MapSlab(
        std::move(fd), uint64_t{slab.first_block()} * geometry_.block_stride_bytes, slab.bytes()));
  }
  base_.store(memory_->base(), std::memory_order_release);
  return absl::OkStatus();
}

absl::Status Attachment::FinishWarmup() {
  MutexLock lock(&mu_);
  if (memory_ == nullptr)
    return absl::FailedPreconditionError("this member maps no memory, so it has no warm-up");
  return memory_->FinishWarmup();
}

}  // namespace kvpool
