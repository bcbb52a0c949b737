#include "server/rpc/socket_events.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/rpc/rpc_queue.h"

namespace kvpool {
namespace {

// A batch is read, applied and answered in two or three tags. A look that finds nothing costs a third of a microsecond.
constexpr int kTagsBetweenLooks = 8;
constexpr uint64_t kNsPerMs = 1'000'000;

}  // namespace

class SocketEvents::Alarm final : public RpcAlarm {
 public:
  explicit Alarm(SocketEvents* events) : events_(*events) {}
  void Set(RpcTag* tag) override { events_.Post(tag); }
  void SetAfter(std::chrono::milliseconds time, RpcTag* tag) override {
    timer_ = {NowNs() + static_cast<uint64_t>(time.count()) * kNsPerMs, tag};
    events_.timers_.insert(timer_);
  }
  void Cancel() override {
    // Else it was due, and its tag is on its way.
    if (events_.timers_.erase(timer_) > 0) events_.Return(timer_.second, false);
  }

 private:
  SocketEvents& events_;
  Timers::value_type timer_;
};

absl::StatusOr<std::unique_ptr<SocketEvents>> SocketEvents::Make() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC)), wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {.ptr = nullptr}};
  if (!epoll.valid() || !wake.valid() || epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return absl::UnavailableError(absl::StrCat("no descriptors for Step streams: ", strerror(errno)));
  }
  return std::unique_ptr<SocketEvents>(new SocketEvents(std::move(epoll), std::move(wake)));
}

SocketEvents::~SocketEvents() {
  std::deque<RpcTag*> left;
  {
    MutexLock lock(&mu_);
    left.swap(posted_);
  }
  for (RpcTag* tag : left) tag->Run(false);
}

std::unique_ptr<RpcAlarm> SocketEvents::MakeAlarm() { return std::make_unique<Alarm>(this); }

absl::Status SocketEvents::Watch(int fd, SocketOwner* owner) {
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data = {.ptr = owner}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("epoll_ctl: ", strerror(errno)));
}

void SocketEvents::AwaitRoom(int fd, SocketOwner* owner, bool await) {
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data = {.ptr = owner}};
  // Not always, since whoever reads an answer makes room.
  if (await) event.events |= EPOLLOUT;
  KVPOOL_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0, "epoll_ctl: errno %d", errno);
}

void SocketEvents::Unwatch(int fd) {
  KVPOOL_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr) == 0, "epoll_ctl: errno %d", errno);
}

void SocketEvents::Post(RpcTag* tag) {
  {
    MutexLock lock(&mu_);
    posted_.push_back(tag);
    any_posted_.store(true, std::memory_order_seq_cst);
  }
  // Whoever waits says first that it sleeps, and then looks whether anything was posted.
  if (asleep_.load(std::memory_order_seq_cst)) eventfd_write(wake_.get(), 1);
}

void SocketEvents::Shut() {
  {
    MutexLock lock(&mu_);
    shut_ = true;
    any_posted_.store(true, std::memory_order_seq_cst);
  }
  if (asleep_.load(std::memory_order_seq_cst)) eventfd_write(wake_.get(), 1);
}

bool SocketEvents::Take(Event* event) {
  if (ready_.empty()) return false;
  *event = ready_.front();
  ready_.pop_front();
  ++taken_;
  return true;
}

bool SocketEvents::Look(Event* event) {
  if (ready_.empty() || taken_ >= kTagsBetweenLooks) TakeIn(0);
  return Take(event);
}

bool SocketEvents::Wait(Event* event) {
  if (taken_ >= kTagsBetweenLooks) TakeIn(0);
  while (!Take(event)) {
    if (over_) return false;
    TakeIn(-1);
  }
  return true;
}

void SocketEvents::TakePosted() {
  if (!any_posted_.load(std::memory_order_seq_cst)) return;
  MutexLock lock(&mu_);
  for (RpcTag* tag : posted_) Return(tag, true);
  posted_.clear();
  over_ = shut_;
  any_posted_.store(false, std::memory_order_seq_cst);
}

int SocketEvents::FireTimers(int timeout_ms) {
  if (timers_.empty()) return timeout_ms;
  const uint64_t now = NowNs();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    Return(timers_.begin()->second, true);
    timers_.erase(timers_.begin());
  }
  if (timeout_ms == 0 || !ready_.empty()) return 0;
  if (timers_.empty()) return timeout_ms;
  return static_cast<int>((timers_.begin()->first - now) / kNsPerMs + 1);
}

void SocketEvents::TakeIn(int timeout_ms) {
  taken_ = 0;
  timeout_ms = FireTimers(timeout_ms);
  if (timeout_ms != 0) asleep_.store(true, std::memory_order_seq_cst);
  TakePosted();
  if (!ready_.empty() || over_) timeout_ms = 0;
  std::array<epoll_event, 64> told;
  const int count = epoll_wait(epoll_.get(), told.data(), told.size(), timeout_ms);
  asleep_.store(false, std::memory_order_relaxed);
  KVPOOL_CHECK(count >= 0 || errno == EINTR, "epoll_wait: errno %d", errno);
  for (int i = 0; i < count; ++i) {
    if (told[i].data.ptr != nullptr) static_cast<SocketOwner*>(told[i].data.ptr)->OnSocket(told[i].events);
  }
}

}  // namespace kvpool
