#include "server/base/acceptor.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

constexpr uint64_t kLogAgainMs = 10'000;

}  // namespace

absl::Status Acceptor::Begin(int epoll, int listener, uint64_t key, const char* name) {
  epoll_ = epoll;
  listener_ = listener;
  key_ = key;
  name_ = name;
  KeepSpare();
  epoll_event event{.events = EPOLLIN, .data = {.u64 = key}};
  if (spare_.valid() && epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("no descriptors for ", name, " connections: ", strerror(errno)));
}

void Acceptor::KeepSpare() {
  if (!spare_.valid()) spare_.Reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void Acceptor::Watch(bool watches) const {
  epoll_event event{.events = watches ? EPOLLIN : 0u, .data = {.u64 = key_}};
  KVPOOL_CHECK(epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event) == 0, "epoll_ctl: errno %d", errno);
}

UniqueFd Acceptor::Next(Arrival* arrival) const {
  socklen_t size = sizeof(arrival->address);
  return UniqueFd(accept4(listener_, reinterpret_cast<sockaddr*>(&arrival->address), &size,
                          SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Acceptor::Arrival Acceptor::Accept(uint64_t now_ms) {
  KeepSpare();
  Arrival arrival;
  arrival.socket = Next(&arrival);
  if (arrival.socket.valid()) {
    arrival.kind = Kind::kConnection;
    return arrival;
  }
  if (errno == EMFILE || errno == ENFILE) {
    spare_.Reset();
    arrival.socket = Next(&arrival);
    if (arrival.socket.valid()) {
      arrival.kind = Kind::kWithoutFiles;
      return arrival;
    }
  }
  // One that has gone while it waited is no fault, and the next one is reported at once.
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED)
    Pause(now_ms, errno);
  return arrival;
}

void Acceptor::Pause(uint64_t now_ms, int error) {
  Watch(false);
  resume_ms_ = now_ms + kPauseMs;
  if (now_ms < log_ms_) return;
  log_ms_ = now_ms + kLogAgainMs;
  LogWarning("connections wait", {{"address", name_}, {"error", strerror(error)}});
}

void Acceptor::Resume(uint64_t now_ms) {
  if (now_ms < resume_ms_) return;
  resume_ms_ = UINT64_MAX;
  Watch(true);
}

}  // namespace kvpool
