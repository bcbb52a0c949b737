#include "server/rpc/stream_acceptor.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "proto/support/step_frames.h"
#include "server/base/peer_process.h"
#include "server/base/sockets.h"

namespace kvpool {
namespace {

constexpr uint64_t kListenerKey = 0, kStopKey = 1;
constexpr int kAcceptsPerTurn = 64;
constexpr std::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
static_assert(kHttp2Preface.size() == kStepPreface.size());

}  // namespace

absl::StatusOr<std::unique_ptr<StreamAcceptor>> StreamAcceptor::Open(const StreamAcceptorOptions& options,
                                                                     Connections* connections,
                                                                     RpcStats* stats, HandOver to_grpc,
                                                                     HandOver to_frames) {
  ASSIGN_OR_RETURN(UniqueFd listener,
                   options.listen({.path = options.path, .type = SOCK_STREAM, .group = options.group}));
  std::unique_ptr<StreamAcceptor> acceptor(new StreamAcceptor(options, connections, stats, std::move(to_grpc),
                                                              std::move(to_frames), std::move(listener)));
  RETURN_IF_ERROR(acceptor->Begin());
  return acceptor;
}

absl::StatusOr<std::unique_ptr<StreamAcceptor>> StreamAcceptor::Start(const StreamAcceptorOptions& options,
                                                                      Connections* connections,
                                                                      RpcStats* stats, HandOver to_grpc,
                                                                      HandOver to_frames) {
  ASSIGN_OR_RETURN(std::unique_ptr<StreamAcceptor> acceptor,
                   Open(options, connections, stats, std::move(to_grpc), std::move(to_frames)));
  acceptor->thread_ = NamedThread("acceptor", [self = acceptor.get()] {
    while (self->RunOnce(-1)) {
    }
  });
  return acceptor;
}

absl::Status StreamAcceptor::Begin() {
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  stop_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !stop_.valid()) {
    return absl::UnavailableError(absl::StrCat("no descriptors for the gRPC socket: ", strerror(errno)));
  }
  RETURN_IF_ERROR(acceptor_.Begin(epoll_.get(), listener_.get(), kListenerKey, "gRPC"));
  return Watch(stop_.get(), kStopKey);
}

StreamAcceptor::~StreamAcceptor() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KVPOOL_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one), "eventfd write: errno %d", errno);
  thread_.join();
}

absl::Status StreamAcceptor::Watch(int fd, uint64_t key) {
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.u64 = key}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("epoll_ctl: ", strerror(errno)));
}

bool StreamAcceptor::RunOnce(int timeout_ms) {
  const uint64_t deadline =
      std::min(silent_.empty() ? UINT64_MAX : silent_.begin()->second.deadline_ms, acceptor_.resume_ms());
  if (deadline != UINT64_MAX && timeout_ms != 0) {
    const uint64_t now = options_.clock->NowMs();
    const int left_ms = deadline <= now ? 0 : static_cast<int>(std::min<uint64_t>(deadline - now, 60000));
    timeout_ms = timeout_ms < 0 ? left_ms : std::min(timeout_ms, left_ms);
  }
  std::array<epoll_event, 64> ready;
  const int count = epoll_wait(epoll_.get(), ready.data(), ready.size(), timeout_ms);
  KVPOOL_CHECK(count >= 0 || errno == EINTR, "epoll_wait: errno %d", errno);
  // Newcomers come last: they displace silent connections, of which some may have spoken in this round.
  bool arrivals = false;
  for (int i = 0; i < count; ++i) {
    if (ready[i].data.u64 == kStopKey) return false;
    if (ready[i].data.u64 == kListenerKey) {
      arrivals = true;
    } else {
      OnReadable(ready[i].data.u64);
    }
  }
  if (arrivals) Accept();
  const uint64_t now = options_.clock->NowMs();
  acceptor_.Resume(now);
  while (!silent_.empty() && silent_.begin()->second.deadline_ms <= now) {
    CloseOldest(
        ConnectionRefusal::kPrefaceTimeout,
        absl::DeadlineExceededError(absl::StrCat("no preface within ", options_.preface_timeout_ms, " ms")));
  }
  return true;
}

void StreamAcceptor::Accept() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    auto [kind, socket, address] = acceptor_.Accept(options_.clock->NowMs());
    if (kind == Acceptor::Kind::kNone) return;
    if (kind == Acceptor::Kind::kWithoutFiles) {
      Refuse(ConnectionRefusal::kOpenFiles, nullptr,
             absl::ResourceExhaustedError("the daemon is at its limit of open files"));
      continue;
    }
    absl::StatusOr<PeerCredentials> credentials = CredentialsOf(socket.get());
    if (!credentials.ok()) {
      Refuse(ConnectionRefusal::kCredentials, nullptr, credentials.status());
      continue;
    }
    auto peer = std::make_shared<PeerCredentials>(*std::move(credentials));
    if (socket.get() >= options_.fd_ceiling) {
      Refuse(ConnectionRefusal::kOpenFiles, std::move(peer),
             absl::ResourceExhaustedError(absl::StrCat("the daemon has ", options_.fd_ceiling,
                                                       " open files, its limit for connections")));
      continue;
    }
    if (silent_.size() >= options_.max_silent) {
      CloseOldest(ConnectionRefusal::kDisplaced,
                  absl::ResourceExhaustedError(absl::StrCat("displaced by a newer connection: at most ",
                                                            options_.max_silent, " may say nothing")));
    }
    const uint64_t id = next_id_++;
    if (const absl::Status watched = Watch(socket.get(), id); !watched.ok()) {
      Refuse(ConnectionRefusal::kOpenFiles, std::move(peer), watched);
      continue;
    }
    silent_[id] = {std::move(socket), std::move(peer), options_.clock->NowMs() + options_.preface_timeout_ms};
  }
}

void StreamAcceptor::OnReadable(uint64_t id) {
  const auto found = silent_.find(id);
  if (found == silent_.end()) return;
  const int fd = found->second.socket.get();
  std::array<char, kHttp2Preface.size()> bytes;
  const ssize_t size = recv(fd, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  // A part of the preface does not count: clients send it whole, and waiting for the rest
  // would poll in circles.
  const std::string_view said(bytes.data(), size < 0 ? 0 : static_cast<size_t>(size));
  const bool speaks = said == kHttp2Preface || said == kStepPreface;
  if (size > 0 && !speaks) {
    Refuse(
        ConnectionRefusal::kProtocol, found->second.peer,
        absl::InvalidArgumentError("the first bytes are neither the preface of HTTP/2 nor of Step frames"));
  }
  if (speaks && Admit(fd, found->second.peer)) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    (said == kStepPreface ? to_frames_ : to_grpc_)(std::move(found->second.socket), found->second.peer);
  }
  silent_.erase(found);
}

bool StreamAcceptor::Admit(int fd, const std::shared_ptr<PeerCredentials>& peer) {
  // Where the process can't be watched, its cgroup is not known: no rule that names one matches it.
  const absl::StatusOr<UniqueFd> pidfd = PidfdOf(fd, *peer);
  if (pidfd.ok()) peer->cgroup = CgroupOf(peer->pid, pidfd->get());
  const absl::Status added = connections_->Add(fd, peer);
  if (!added.ok()) Refuse(ConnectionRefusal::kConnections, peer, added);
  return added.ok();
}

void StreamAcceptor::CloseOldest(ConnectionRefusal why, const absl::Status& status) {
  Refuse(why, silent_.begin()->second.peer, status);
  silent_.erase(silent_.begin());
}

void StreamAcceptor::Refuse(ConnectionRefusal why, std::shared_ptr<const PeerCredentials> peer,
                            const absl::Status& status) {
  stats_->CountRefusedConnection(why);
  refusals_.Add({.process = std::move(peer), .address = "unknown", .names = {}, .certificate = {}}, "connect",
                status);
}

}  // namespace kvpool
