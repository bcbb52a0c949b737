#include "server/place.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/space/kept_facts.h"

namespace kvpool {
namespace {

constexpr size_t kEpochBytes = 4096;
std::atomic_ref<uint64_t> EpochIn(const SharedMemory& page) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(page.data()));
}

// Of a listener: what is at its path, and how it came to be. A number of a file may be another's later, with another time.
struct KeptListener {
  uint64_t device, file;
  int64_t changed_s, changed_ns;
  uint32_t type;
  uint32_t has_group;
  uint64_t group;
};

absl::StatusOr<KeptListener> FactsOf(const ListenOptions& options) {
  struct stat there;
  if (lstat(options.path.c_str(), &there) != 0)
    return absl::UnavailableError(absl::StrCat("looking at ", options.path, ": ", strerror(errno)));
  return KeptListener{.device = there.st_dev,
                      .file = there.st_ino,
                      .changed_s = there.st_ctim.tv_sec,
                      .changed_ns = there.st_ctim.tv_nsec,
                      .type = static_cast<uint32_t>(options.type),
                      .has_group = options.group.has_value() ? 1u : 0u,
                      .group = options.group.value_or(0)};
}

std::string BoundPath(int listener) {
  sockaddr_un address{};
  socklen_t size = sizeof(address) - 1;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  return address.sun_path;
}

UniqueFd CopyOf(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

absl::Status NoCopy(const std::string& path) {
  return absl::UnavailableError(absl::StrCat("another descriptor of ", path, ": ", strerror(errno)));
}

}  // namespace

Place::Place(KeeperLink* keeper) : keeper_(keeper) {
  if (keeper_ == nullptr) return;
  for (KeptThing& thing : keeper_->TakePlace()) {
    if (thing.kind != KeptKind::kEpoch) {
      left_.push_back(std::move(thing));
      continue;
    }
    absl::StatusOr<SharedMemory> page = SharedMemory::Map(std::move(thing.fd));
    if (!page.ok() || page->bytes() != kEpochBytes) continue;
    epochs_.emplace(*std::move(page));
    epochs_kept_ = std::move(thing.kept);
  }
}

Place::~Place() {
  if (!inherited_ || served_) return;
  for (FileLock& lock : locks_) lock.LeaveFile();
}

std::optional<KeptThing> Place::FindLock(const std::string& path) {
  struct stat there, locked;
  if (stat(path.c_str(), &there) != 0) return std::nullopt;
  for (KeptThing& thing : left_) {
    if (thing.kind != KeptKind::kLock || fstat(thing.fd.get(), &locked) != 0) continue;
    if (locked.st_dev == there.st_dev && locked.st_ino == there.st_ino) return std::move(thing);
  }
  return std::nullopt;
}

absl::Status Place::Lock(const std::string& path) {
  Item item{.kind = KeptKind::kLock};
  if (std::optional<KeptThing> found = FindLock(path)) {
    locks_.push_back(FileLock::Adopt(std::move(found->fd), path));
    item.kept = std::move(found->kept);
    item.given = inherited_ = true;
  } else {
    ASSIGN_OR_RETURN(FileLock lock, FileLock::Take(path));
    locks_.push_back(std::move(lock));
  }
  item.fd = CopyOf(locks_.back().fd());
  if (!item.fd.valid()) return NoCopy(path);
  items_.push_back(std::move(item));
  return absl::OkStatus();
}

std::optional<KeptThing> Place::FindListener(const ListenOptions& options) {
  const absl::StatusOr<KeptListener> wanted = FactsOf(options);
  if (!wanted.ok()) return std::nullopt;
  for (KeptThing& thing : left_) {
    if (thing.kind == KeptKind::kListener && thing.facts == FactBytes(*wanted) &&
        BoundPath(thing.fd.get()) == options.path)
      return std::move(thing);
  }
  return std::nullopt;
}

absl::StatusOr<UniqueFd> Place::Listen(const ListenOptions& options) {
  Item item{.kind = KeptKind::kListener};
  UniqueFd listener;
  if (std::optional<KeptThing> found = FindListener(options)) {
    listener = std::move(found->fd);
    // From here on the kernel says of whom the socket is: this process, and not one that is gone.
    RETURN_IF_ERROR(ListenAgain(listener.get(), options.path));
    item.facts = std::move(found->facts);
    item.kept = std::move(found->kept);
    item.given = inherited_ = true;
  } else {
    ASSIGN_OR_RETURN(listener, ListenUnix(options));
    ASSIGN_OR_RETURN(const KeptListener facts, FactsOf(options));
    item.facts = std::string(FactBytes(facts));
  }
  item.fd = CopyOf(listener.get());
  if (!item.fd.valid()) return NoCopy(options.path);
  items_.push_back(std::move(item));
  return listener;
}

uint64_t Place::NextEpoch(uint64_t least) {
  epoch_ = least;
  if (!epochs_.has_value()) return epoch_;
  epoch_ = std::max(least, EpochIn(*epochs_).load(std::memory_order_relaxed) + 1);
  EpochIn(*epochs_).store(epoch_, std::memory_order_relaxed);
  return epoch_;
}

absl::Status Place::KeepEpoch() {
  if (keeper_ == nullptr || epochs_.has_value()) return absl::OkStatus();
  ASSIGN_OR_RETURN(SharedMemory page, SharedMemory::Make("kvpool-epoch", kEpochBytes));
  EpochIn(page).store(epoch_, std::memory_order_relaxed);
  ASSIGN_OR_RETURN(epochs_kept_, keeper_->Keep(KeptKind::kEpoch, "", page.fd()));
  epochs_.emplace(std::move(page));
  return absl::OkStatus();
}

void Place::Keep() {
  served_ = true;
  if (keeper_ == nullptr) return;
  left_.clear();
  for (Item& item : items_) {
    if (item.given) continue;
    absl::StatusOr<Kept> kept = keeper_->Keep(item.kind, item.facts, item.fd.get());
    if (!kept.ok()) {
      LogWarning("place not kept", {{"error", kept.status()}});
      continue;
    }
    item.kept = *std::move(kept);
    item.given = true;
  }
}

void Place::Withdraw() {
  for (Item& item : items_) {
    item.kept = Kept();
    item.given = false;
  }
}

void Place::Close() {
  items_.clear();
  if (keeper_ != nullptr) keeper_->Flush();
}

}  // namespace kvpool
