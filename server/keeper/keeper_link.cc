#include "server/keeper/keeper_link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/peer_process.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

// The whole of the page's content.
enum Word : uint32_t { kTrusted = 0, kAlone = 1, kGpuLost = 2, kReplaced = 3 };
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

// Says hello, and receives what the keeper has; answers its last word on it.
absl::StatusOr<KeeperFrame> Greet(int socket,
                                  const std::function<absl::Status(const KeeperFrame&, UniqueFd)>& on_held) {
  RETURN_IF_ERROR(SendKeeperFrame(socket, KeeperFrame()));
  while (true) {
    KeeperFrame frame;
    UniqueFd fd;
    RETURN_IF_ERROR(ReceiveKeeperFrame(socket, &frame, &fd));
    if (frame.verb == KeeperVerb::kAllHeld) return frame;
    if (frame.verb == KeeperVerb::kRefused)
      return absl::FailedPreconditionError(absl::StrCat("the keeper: ", std::string(frame.text())));
    if (frame.verb != KeeperVerb::kHeld || !fd.valid()) {
      return absl::InvalidArgumentError(absl::StrCat("a keeper says ", static_cast<int>(frame.verb),
                                                     " where it has to show what it keeps"));
    }
    RETURN_IF_ERROR(on_held(frame, std::move(fd)));
  }
}

UniqueFd CopyOf(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }
absl::Status NoCopy() {
  return absl::ResourceExhaustedError(absl::StrCat("--keeper: copying a descriptor: ", strerror(errno)));
}

}  // namespace

absl::StatusOr<UniqueFd> ConnectToKeeper(const std::string& path) {
  UniqueFd connection(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path))
    return absl::InvalidArgumentError(
        absl::StrCat("the keeper's socket has a path of ", path.size(), " bytes"));
  memcpy(address.sun_path, path.c_str(), path.size());
  if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    const std::string words = absl::StrCat("connecting to ", path, ": ", strerror(errno));
    return errno == ENOENT || errno == ECONNREFUSED ? absl::NotFoundError(words)
                                                    : absl::UnavailableError(words);
  }
  // It is to get all that tenants have.
  ASSIGN_OR_RETURN(const PeerCredentials keeper, CredentialsOf(connection.get()));
  if (keeper.uid != geteuid())
    return absl::PermissionDeniedError(absl::StrCat(path, " is uid ", keeper.uid, "'s"));
  fcntl(connection.get(), F_SETFL, 0);
  return connection;
}

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

absl::StatusOr<std::unique_ptr<KeeperLink>> KeeperLink::Join(UniqueFd socket, const Options& options) {
  std::unique_ptr<KeeperLink> link(new KeeperLink(options));
  RETURN_IF_ERROR(link->Inherit(std::move(socket)));
  return link;
}

std::unique_ptr<KeeperLink> KeeperLink::Alone(const Options& options) {
  std::unique_ptr<KeeperLink> link(new KeeperLink(options));
  link->lost_.store(true, std::memory_order_relaxed);
  return link;
}

absl::Status KeeperLink::Inherit(UniqueFd socket) {
  RETURN_IF_ERROR(SetPatience(socket.get(), options_.hello_patience));
  MutexLock lock(&mu_);
  ASSIGN_OR_RETURN(
      const KeeperFrame end,
      Greet(socket.get(), [this](const KeeperFrame& frame, UniqueFd fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        KeptThing thing{.kind = static_cast<KeptKind>(frame.kind),
                        .facts = std::string(frame.text()),
                        .fd = std::move(fd),
                        .kept = Kept(this, frame.id)};
        if (thing.kind != KeptKind::kWord) {
          UniqueFd copy = CopyOf(thing.fd.get());
          if (!copy.valid()) return NoCopy();
          things_[frame.id] = {thing.kind, thing.facts, std::move(copy)};
        }
        inherited_.push_back(std::move(thing));
        next_id_ = std::max(next_id_, frame.id + 1);
        return absl::OkStatus();
      }));
  RETURN_IF_ERROR(SetPatience(socket.get(), options_.patience));
  last_upgrade_ = static_cast<UpgradeOutcome>(end.kind);
  upgrade_failure_ = std::string(end.text());
  keeper_ = end.keeper;
  socket_ = std::move(socket);
  return absl::OkStatus();
}

std::vector<KeptThing> KeeperLink::TakePlace() {
  const auto place = std::stable_partition(inherited_.begin(), inherited_.end(), [](const KeptThing& thing) {
    return thing.kind != KeptKind::kLock && thing.kind != KeptKind::kListener &&
           thing.kind != KeptKind::kEpoch;
  });
  std::vector<KeptThing> taken(std::make_move_iterator(place), std::make_move_iterator(inherited_.end()));
  inherited_.erase(place, inherited_.end());
  for (const KeptThing& thing : inherited_) {
    if (thing.kind != KeptKind::kWord) continue;
    const absl::StatusOr<SharedMemory> word = SharedMemory::Map(CopyOf(thing.fd.get()));
    if (!word.ok() || WordOf(*word).load(std::memory_order_acquire) != kReplaced) continue;
    // Another keeper has the place of that daemon. If it is gone as well, nobody has the locks once this one has let go.
    taken.clear();
    AwaitDropped();
    break;
  }
  return taken;
}

absl::Status KeeperLink::Trust(std::string devices) {
  Kept kept;
  std::string against = "the daemon went on without its keeper";
  ColdStart cold = ColdStart::kWentAlone;
  for (auto thing = inherited_.begin(); thing != inherited_.end(); ++thing) {
    if (thing->kind != KeptKind::kWord) continue;
    kept = std::move(thing->kept);
    ASSIGN_OR_RETURN(SharedMemory word, SharedMemory::Map(std::move(thing->fd)));
    inherited_.erase(thing);
    const uint32_t said = WordOf(word).load(std::memory_order_acquire);
    if (said == kGpuLost) {
      against = "a GPU was lost, and nobody knows what its memory holds";
      cold = ColdStart::kGpuLost;
    }
    const std::string before = DevicesOf(word);
    if (said == kTrusted && before == devices) {
      if (inherits()) cold_ = ColdStart::kWarm;
      kept.Forget();  // The page is the link's for good.
      MutexLock lock(&mu_);
      word_.emplace(std::move(word));
      devices_ = std::move(devices);
      return absl::OkStatus();
    }
    if (said == kTrusted) {
      against = absl::StrCat("the daemon before had other devices: ", before);
      cold = ColdStart::kOtherDevices;
    }
    break;
  }
  if (!inherited_.empty()) {
    LogError("kept for nothing", {{"reason", against}, {"lost", inherited_.size()}});
    cold_ = cold;
  }
  // The old page goes last: until nothing else is there, it has to say what it says.
  inherited_.clear();
  kept = Kept();
  MutexLock lock(&mu_);
  SendDrops();
  devices_ = std::move(devices);
  return KeepWord(socket_.valid() ? kTrusted : kAlone);
}

absl::Status KeeperLink::KeepWord(uint32_t says) {
  ASSIGN_OR_RETURN(SharedMemory word, SharedMemory::Make("kvpool-word", kPageBytes));
  devices_.copy(word.data() + sizeof(uint32_t), kPageBytes - sizeof(uint32_t));
  WordOf(word).store(says, std::memory_order_release);
  word_.emplace(std::move(word));
  if (!socket_.valid()) return absl::OkStatus();
  const absl::Status given = Give(next_id_++, KeptKind::kWord, "", word_->fd());
  // A keeper that is gone was said to be.
  return socket_.valid() ? given : absl::OkStatus();
}

absl::Status KeeperLink::Give(uint64_t id, KeptKind kind, std::string_view facts, int fd) {
  KeeperFrame frame, answer;
  frame.verb = KeeperVerb::kKeep;
  frame.id = id;
  frame.kind = static_cast<uint16_t>(kind);
  frame.set_text(facts);
  RETURN_IF_ERROR(Ask(frame, fd, &answer));
  if (answer.verb == KeeperVerb::kKept && answer.id == id) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("--keeper: ", std::string(answer.text())));
}

absl::StatusOr<Kept> KeeperLink::Keep(KeptKind kind, std::string_view facts, int fd) {
  KVPOOL_CHECK(facts.size() <= kMaxKeptFacts, "%zu bytes of facts of a thing to be kept", facts.size());
  MutexLock lock(&mu_);
  SendDrops();
  UniqueFd copy = CopyOf(fd);
  if (!copy.valid()) return NoCopy();
  const uint64_t id = next_id_++;
  if (socket_.valid()) {
    const absl::Status given = Give(id, kind, facts, fd);
    if (!given.ok() && socket_.valid()) return given;
  }
  things_[id] = {kind, std::string(facts), std::move(copy)};
  return Kept(this, id);
}

void KeeperLink::LookForAnother() {
  {
    MutexLock lock(&mu_);
    pollfd hung_up{socket_.get(), POLLRDHUP, 0};
    if (socket_.valid() && poll(&hung_up, 1, 0) == 1) Lose(absl::UnavailableError("it has hung up"));
    if (options_.another.empty() || socket_.valid() || left_) return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookPause;
  const absl::Status given = GiveToAnother();
  const std::string failure = given.ok() || absl::IsNotFound(given) ? "" : std::string(given.message());
  if (!failure.empty() && failure != last_failure_)
    LogWarning("keeper found and not used", {{"error", given}});
  last_failure_ = failure;
}

absl::Status KeeperLink::GiveToAnother() {
  ASSIGN_OR_RETURN(UniqueFd socket, ConnectToKeeper(options_.another));
  RETURN_IF_ERROR(SetPatience(socket.get(), options_.patience));
  std::vector<uint64_t> held;
  ASSIGN_OR_RETURN(const KeeperFrame end, Greet(socket.get(), [&held](const KeeperFrame& frame, UniqueFd) {
                     held.push_back(frame.id);
                     return absl::OkStatus();
                   }));
  MutexLock lock(&mu_);
  if (left_) return absl::OkStatus();
  SendDrops();
  socket_ = std::move(socket);
  keeper_ = end.keeper;
  const absl::Status given = GiveAll(held);
  if (!given.ok()) socket_.Reset();
  return given;
}

absl::Status KeeperLink::GiveAll(const std::vector<uint64_t>& held) {
  WordOf(*word_).store(kReplaced, std::memory_order_release);
  // They are of a daemon that has ended, or of this one in another state.
  KeeperFrame frame;
  frame.verb = KeeperVerb::kDrop;
  for (const uint64_t id : held) {
    frame.id = id;
    RETURN_IF_ERROR(SendKeeperFrame(socket_.get(), frame));
  }
  RETURN_IF_ERROR(KeepWord(kAlone));
  if (!socket_.valid()) return absl::UnavailableError("it is gone");
  for (const auto& [id, thing] : things_) RETURN_IF_ERROR(Give(id, thing.kind, thing.facts, thing.fd.get()));
  if (serving_) {
    frame.verb = KeeperVerb::kServing;
    RETURN_IF_ERROR(SendKeeperFrame(socket_.get(), frame));
  }
  WordOf(*word_).store(outlook_, std::memory_order_release);
  lost_.store(declined(), std::memory_order_relaxed);
  LogInfo("keeper found", {{"socket", options_.another}, {"things", things_.size()}});
  return absl::OkStatus();
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
  serving_ = true;
  if (!socket_.valid()) return;
  KeeperFrame frame;
  frame.verb = KeeperVerb::kServing;
  if (const absl::Status sent = SendKeeperFrame(socket_.get(), frame); !sent.ok()) Lose(sent);
}

void KeeperLink::Ending() {
  MutexLock lock(&mu_);
  if (!socket_.valid() || (keeper_ & kKnowsEnding) == 0) return;
  KeeperFrame frame;
  frame.verb = KeeperVerb::kEnding;
  // It is for the keeper's sake.
  SendKeeperFrame(socket_.get(), frame).IgnoreError();
}

void KeeperLink::Flush() {
  MutexLock lock(&mu_);
  SendDrops();
}

void KeeperLink::Distrust() {
  MutexLock lock(&mu_);
  outlook_ = kGpuLost;
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
  outlook_ = kAlone;
  if (word_.has_value()) WordOf(*word_).store(kAlone, std::memory_order_release);
  declined_.store(true, std::memory_order_relaxed);
  lost_.store(true, std::memory_order_relaxed);
}

void KeeperLink::Leave() {
  MutexLock lock(&mu_);
  left_ = true;
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
    things_.erase(id);
    if (!socket_.valid()) continue;
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
  LogError(
      "keeper lost",
      {{"error", why}, {"now", "nothing that is sealed outlives this process, unless another one comes"}});
}

}  // namespace kvpool
