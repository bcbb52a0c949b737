#include "server/keeper/keeper_link.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

// The whole of the page's content.
enum Word : uint32_t { kTrusted = 0, kAlone = 1, kGpuLost = 2 };
std::atomic_ref<uint32_t> WordOf(const SharedMemory& page) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(page.data()));
}
// Behind it are the ids of the daemon's devices, and zeros.
constexpr size_t kPageBytes = 4096;
std::string DevicesOf(const SharedMemory& page) {
  if (page.bytes() < kPageBytes) return "host";  // A daemon before this one's time had no other.
  const char* const text = page.data() + sizeof(uint32_t);
  return std::string(text, strnlen(text, kPageBytes - sizeof(uint32_t)));
}

absl::Status SetPatience(int socket, std::chrono::milliseconds patience) {
  const timeval time{.tv_sec = patience.count() / 1000, .tv_usec = patience.count() % 1000 * 1000};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (setsockopt(socket, SOL_SOCKET, option, &time, sizeof(time)) == 0) continue;
    return absl::UnavailableError(absl::StrCat("the socket of --keeper: ", strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

Kept& Kept::operator=(Kept&& other) noexcept {
  if (this == &other) return *this;
  if (link_ != nullptr) link_->Drop(id_);
  link_ = std::exchange(other.link_, nullptr);
  id_ = other.id_;
  return *this;
}

Kept::~Kept() {
  if (link_ != nullptr) link_->Drop(id_);
}

absl::StatusOr<std::unique_ptr<KeeperLink>> KeeperLink::Join(UniqueFd socket,
                                                             std::chrono::milliseconds patience) {
  RETURN_IF_ERROR(SetPatience(socket.get(), patience));
  std::unique_ptr<KeeperLink> link(new KeeperLink(std::move(socket)));
  RETURN_IF_ERROR(link->Inherit());
  return link;
}

std::vector<KeptThing> KeeperLink::TakePlace() {
  const auto place = std::stable_partition(inherited_.begin(), inherited_.end(), [](const KeptThing& thing) {
    return thing.kind != KeptKind::kLock && thing.kind != KeptKind::kListener &&
           thing.kind != KeptKind::kEpoch;
  });
  std::vector<KeptThing> taken(std::make_move_iterator(place), std::make_move_iterator(inherited_.end()));
  inherited_.erase(place, inherited_.end());
  return taken;
}

absl::Status KeeperLink::Inherit() {
  MutexLock lock(&mu_);
  RETURN_IF_ERROR(SendKeeperFrame(socket_.get(), KeeperFrame()));
  while (true) {
    KeeperFrame frame;
    UniqueFd fd;
    RETURN_IF_ERROR(ReceiveKeeperFrame(socket_.get(), &frame, &fd));
    if (frame.verb == KeeperVerb::kAllHeld) {
      last_upgrade_ = static_cast<UpgradeOutcome>(frame.kind);
      upgrade_failure_ = std::string(frame.text());
      return absl::OkStatus();
    }
    if (frame.verb != KeeperVerb::kHeld || !fd.valid()) {
      return absl::InvalidArgumentError(absl::StrCat("a keeper says ", static_cast<int>(frame.verb),
                                                     " where it has to show what it keeps"));
    }
    inherited_.push_back({.kind = static_cast<KeptKind>(frame.kind),
                          .facts = std::string(frame.text()),
                          .fd = std::move(fd),
                          .kept = Kept(this, frame.id)});
    next_id_ = std::max(next_id_, frame.id + 1);
  }
}

absl::Status KeeperLink::Trust(std::string devices) {
  Kept kept;
  std::string against = "the daemon went on without its keeper";
  for (auto thing = inherited_.begin(); thing != inherited_.end(); ++thing) {
    if (thing->kind != KeptKind::kWord) continue;
    kept = std::move(thing->kept);
    ASSIGN_OR_RETURN(SharedMemory word, SharedMemory::Map(std::move(thing->fd)));
    inherited_.erase(thing);
    const uint32_t said = WordOf(word).load(std::memory_order_acquire);
    if (said == kGpuLost) against = "a GPU was lost, and nobody knows what its memory holds";
    const std::string before = DevicesOf(word);
    if (said == kTrusted && before == devices) {
      kept.Forget();  // The page is the link's for good.
      MutexLock lock(&mu_);
      word_.emplace(std::move(word));
      return absl::OkStatus();
    }
    if (said == kTrusted) against = absl::StrCat("the daemon before had other devices: ", before);
    break;
  }
  if (!inherited_.empty()) {
    LogError("kept for nothing", {{"reason", against}, {"lost", inherited_.size()}});
  }
  // The old page goes last: until nothing else is there, it has to say what it says.
  inherited_.clear();
  kept = Kept();
  ASSIGN_OR_RETURN(SharedMemory word, SharedMemory::Make("kvpool-word", kPageBytes));
  devices.copy(word.data() + sizeof(uint32_t), kPageBytes - sizeof(uint32_t));
  ASSIGN_OR_RETURN(kept, Keep(KeptKind::kWord, "", word.fd()));
  kept.Forget();
  MutexLock lock(&mu_);
  word_.emplace(std::move(word));
  return absl::OkStatus();
}

absl::StatusOr<Kept> KeeperLink::Keep(KeptKind kind, std::string_view facts, int fd) {
  KVPOOL_CHECK(facts.size() <= kMaxKeptFacts, "%zu bytes of facts of a thing to be kept", facts.size());
  MutexLock lock(&mu_);
  SendDrops();
  if (!socket_.valid()) return Kept();
  KeeperFrame frame;
  frame.verb = KeeperVerb::kKeep;
  frame.id = next_id_++;
  frame.kind = static_cast<uint16_t>(kind);
  frame.set_text(facts);
  KeeperFrame answer;
  if (!Ask(frame, fd, &answer).ok()) return Kept();
  if (answer.verb == KeeperVerb::kKept && answer.id == frame.id) return Kept(this, frame.id);
  return absl::ResourceExhaustedError(absl::StrCat("--keeper: ", std::string(answer.text())));
}

absl::Status KeeperLink::Ask(const KeeperFrame& frame, int fd, KeeperFrame* answer) {
  UniqueFd none;
  absl::Status answered = SendKeeperFrame(socket_.get(), frame, fd);
  if (answered.ok()) answered = ReceiveKeeperFrame(socket_.get(), answer, &none);
  if (!answered.ok()) Lose(answered);
  return answered;
}

absl::Status KeeperLink::HandOverTo(int program, HandOver how) {
  MutexLock lock(&mu_);
  SendDrops();
  if (!socket_.valid()) return absl::UnavailableError("the keeper is gone");
  KeeperFrame frame, answer;
  frame.verb = KeeperVerb::kHandOver;
  frame.kind = static_cast<uint16_t>(how);
  RETURN_IF_ERROR(Ask(frame, program, &answer));
  if (answer.verb == KeeperVerb::kKept) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the keeper: ", std::string(answer.text())));
}

void KeeperLink::Serving() {
  MutexLock lock(&mu_);
  if (!socket_.valid()) return;
  KeeperFrame frame;
  frame.verb = KeeperVerb::kServing;
  if (const absl::Status sent = SendKeeperFrame(socket_.get(), frame); !sent.ok()) Lose(sent);
}

void KeeperLink::Flush() {
  MutexLock lock(&mu_);
  SendDrops();
}

void KeeperLink::Distrust() {
  MutexLock lock(&mu_);
  if (word_.has_value()) WordOf(*word_).store(kGpuLost, std::memory_order_release);
}

void KeeperLink::AwaitDropped() {
  MutexLock lock(&mu_);
  SendDrops();
  if (!socket_.valid()) return;
  // The keeper answers in order. One who asks for nothing to be kept is refused, and no more.
  KeeperFrame frame, answer;
  frame.verb = KeeperVerb::kKeep;
  Ask(frame, -1, &answer).IgnoreError();
}

void KeeperLink::Decline() {
  MutexLock lock(&mu_);
  if (word_.has_value()) WordOf(*word_).store(kAlone, std::memory_order_release);
  lost_.store(true, std::memory_order_relaxed);
}

void KeeperLink::Leave() {
  MutexLock lock(&mu_);
  socket_.Reset();
}

void KeeperLink::Drop(uint64_t id) {
  MutexLock lock(&drops_mu_);
  drops_.push_back(id);
}

void KeeperLink::SendDrops() {
  std::vector<uint64_t> drops;
  {
    MutexLock lock(&drops_mu_);
    drops.swap(drops_);
  }
  for (const uint64_t id : drops) {
    if (!socket_.valid()) return;
    KeeperFrame frame;
    frame.verb = KeeperVerb::kDrop;
    frame.id = id;
    if (const absl::Status sent = SendKeeperFrame(socket_.get(), frame); !sent.ok()) Lose(sent);
  }
}

void KeeperLink::Lose(const absl::Status& why) {
  // Nothing that the keeper does not know of is answered to anybody before this.
  if (word_.has_value()) WordOf(*word_).store(kAlone, std::memory_order_release);
  socket_.Reset();
  lost_.store(true, std::memory_order_relaxed);
  LogError("keeper lost", {{"error", why}, {"now", "nothing that is sealed outlives this process"}});
}

}  // namespace kvpool
