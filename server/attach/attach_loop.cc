#include "server/attach/attach_loop.h"

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
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

// Packets read from one connection before the others get their turn.
constexpr int kPacketsPerTurn = 16;
constexpr int kAcceptsPerTurn = 64;
constexpr size_t kMaxReasonBytes = 1024;
// Descriptors in flight leave as receivers take them, of which no event tells.
constexpr uint64_t kInFlightPauseMs = 10;

// epoll returns a key with each event: the kind of its source in the low bits, an id above.
enum class Source : uint64_t { kListener, kMailbox, kStop, kConnection, kProcess };
constexpr uint64_t Key(Source source, uint64_t id) { return id << 3 | static_cast<uint64_t>(source); }

// The first bytes of a text in UTF-8, at most `most` and no part of a character: a peer takes a frame with one for garbage.
std::string_view Clip(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachLoop>> AttachLoop::Open(AttachServerOptions options, AttachEvents events,
                                                             UniqueFd listener,
                                                             std::shared_ptr<AttachMailbox> mailbox,
                                                             AttachSenses senses) {
  std::unique_ptr<AttachLoop> loop(new AttachLoop(std::move(options), std::move(events), std::move(listener),
                                                  std::move(mailbox), std::move(senses)));
  RETURN_IF_ERROR(loop->WatchAll());
  return loop;
}

absl::Status AttachLoop::Watch(int fd, uint64_t key, uint32_t events) {
  epoll_event event{.events = events, .data = {.u64 = key}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("epoll_ctl: ", strerror(errno)));
}

absl::Status AttachLoop::WatchAll() {
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  stop_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !stop_.valid()) {
    return absl::UnavailableError(absl::StrCat("no descriptors for the attach server: ", strerror(errno)));
  }
  RETURN_IF_ERROR(acceptor_.Begin(epoll_.get(), listener_.get(), Key(Source::kListener, 0), "attach"));
  RETURN_IF_ERROR(Watch(mailbox_->wake_fd(), Key(Source::kMailbox, 0), EPOLLIN));
  return Watch(stop_.get(), Key(Source::kStop, 0), EPOLLIN);
}

AttachLoop::~AttachLoop() {
  mailbox_->Shut();
  v1::AttachFrame farewell;
  farewell.mutable_closed()->set_reason("the daemon shuts down");
  for (auto& [id, connection] : connections_) {
    // Best effort: a peer that does not read learns it from the hang-up.
    if (connection.state != ConnectionState::kClosing) (void)SendFrame(connection.socket.get(), farewell);
  }
}

void AttachLoop::HangUp() {
  mailbox_->Shut();
  connections_.clear();
}

void AttachLoop::Stop() {
  const uint64_t one = 1;
  KVPOOL_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one), "eventfd write: errno %d", errno);
}

bool AttachLoop::RunOnce(int timeout_ms) {
  std::array<epoll_event, 64> ready;
  const int count = epoll_wait(epoll_.get(), ready.data(), ready.size(), timeout_ms);
  KVPOOL_CHECK(count >= 0 || errno == EINTR, "epoll_wait: errno %d", errno);
  for (int i = 0; i < count; ++i) {
    const uint64_t id = ready[i].data.u64 >> 3;
    switch (static_cast<Source>(ready[i].data.u64 & 7)) {
      case Source::kListener:
        Accept();
        break;
      case Source::kMailbox:
        ReadLetters();
        break;
      case Source::kStop:
        return false;
      case Source::kConnection:
        // An earlier event of this round may have ended the connection.
        if (Connection* connection = Find(id)) OnEvents(connection, ready[i].events);
        break;
      case Source::kProcess:
        if (const auto found = processes_.find(id); found != processes_.end()) OnProcessEnded(&found->second);
        break;
    }
  }
  acceptor_.Resume(NowMs());
  SendPaused();
  CloseLate();
  return true;
}

int AttachLoop::TimeoutMs() const {
  uint64_t deadline = acceptor_.resume_ms();
  // All silent connections have the same timeout, so that the oldest one is the first to be late.
  if (!silent_.empty()) deadline = connections_.at(*silent_.begin()).deadline_ms;
  for (const uint64_t id : closing_) deadline = std::min(deadline, connections_.at(id).deadline_ms);
  if (!paused_.empty()) deadline = std::min(deadline, resume_ms_);
  if (deadline == UINT64_MAX) return -1;
  const uint64_t now = NowMs();
  return deadline <= now ? 0 : static_cast<int>(std::min<uint64_t>(deadline - now, 60000));
}

void AttachLoop::CloseLate() {
  const uint64_t now = NowMs();
  while (!silent_.empty()) {
    Connection* oldest = Find(*silent_.begin());
    if (oldest->deadline_ms > now) break;
    Close(oldest, "hello_timeout", absl::StrCat("no hello within ", options_.hello_timeout_ms, " ms"));
  }
  for (auto next = closing_.begin(); next != closing_.end();) {
    Connection* connection = Find(*next++);
    if (connection->deadline_ms <= now) Forget(connection);
  }
}

void AttachLoop::SendPaused() {
  if (paused_.empty() || resume_ms_ > NowMs()) return;
  // The limit is that of the daemon's user: where it stops one it stops all.
  while (!paused_.empty()) {
    const uint64_t id = *paused_.begin();
    Flush(Find(id));
    if (paused_.contains(id)) return;
  }
}

// ---------------------------------------------------------------------------------------------- newcomers

void AttachLoop::Accept() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    auto [kind, socket, address] = acceptor_.Accept(NowMs());
    switch (kind) {
      case Acceptor::Kind::kConnection:
        Admit(std::move(socket));
        break;
      case Acceptor::Kind::kWithoutFiles:
        TurnAway(std::move(socket), "open_files", "the daemon is at its limit of open files");
        break;
      case Acceptor::Kind::kNone:
        return;
    }
  }
}

void AttachLoop::TurnAway(UniqueFd socket, std::string_view label, const std::string& reason) {
  Count(label);
  v1::AttachFrame closed;
  closed.mutable_closed()->set_reason(reason);
  (void)SendFrame(socket.get(), closed);  // It fits: the buffer of a new socket is empty.
}

void AttachLoop::Admit(UniqueFd socket) {
  if (socket.get() >= options_.fd_ceiling) {
    return TurnAway(std::move(socket), "open_files",
                    absl::StrCat("the daemon has ", options_.fd_ceiling,
                                 " open files, its limit for connections: raise its RLIMIT_NOFILE"));
  }
  if (connections_.size() >= options_.max_connections) {
    return TurnAway(
        std::move(socket), "connections",
        absl::StrCat("the daemon has ", options_.max_connections, " attach connections, its limit"));
  }
  const absl::StatusOr<PeerCredentials> peer = senses_.credentials(socket.get());
  if (!peer.ok()) return TurnAway(std::move(socket), "credentials", std::string(peer.status().message()));
  if (!MakeRoom(ConnectionState::kSilent, peer->uid)) {
    return TurnAway(
        std::move(socket), "unbound",
        absl::StrCat("the daemon has ", options_.max_unbound, " connections without a session, its limit"));
  }
  const uint64_t id = next_id_++;
  const absl::Status watched = Watch(socket.get(), Key(Source::kConnection, id), EPOLLIN | EPOLLRDHUP);
  if (!watched.ok()) return TurnAway(std::move(socket), "open_files", std::string(watched.message()));
  Connection& connection = connections_[id];
  connection.id = id;
  connection.socket = std::move(socket);
  connection.peer = *peer;
  connection.since_ms = NowMs();
  connection.deadline_ms = connection.since_ms + options_.hello_timeout_ms;
  silent_.insert(id);
  MutexLock lock(&stats_mu_);
  ++stats_.connections;
}

bool AttachLoop::MakeRoom(ConnectionState state, uint32_t uid) {
  const std::set<uint64_t>& group = state == ConnectionState::kSilent ? silent_ : greeted_;
  uint32_t of_uid = 0;
  uint64_t oldest_of_uid = 0;
  for (const uint64_t id : group) {
    if (connections_.at(id).peer.uid != uid) continue;
    if (of_uid++ == 0) oldest_of_uid = id;
  }
  Connection* displaced = nullptr;
  if (of_uid >= options_.max_unbound_per_uid) {
    displaced = Find(oldest_of_uid);
  } else if (state == ConnectionState::kSilent && silent_.size() + greeted_.size() >= options_.max_unbound) {
    displaced = Find(silent_.empty() ? *greeted_.begin() : *silent_.begin());
  } else {
    return true;
  }
  if (displaced->state == ConnectionState::kGreeted &&
      displaced->since_ms + options_.hello_timeout_ms > NowMs()) {
    return false;
  }
  Close(displaced, "displaced",
        absl::StrCat("displaced by a newer connection: at most ", options_.max_unbound,
                     " without a session, ", options_.max_unbound_per_uid, " of one uid"));
  return true;
}

// --------------------------------------------------------------------------------------------- connections

void AttachLoop::OnEvents(Connection* connection, uint32_t events) {
  const uint64_t id = connection->id;
  // A hang-up comes first: no frame that is still in the socket matters when nobody is there.
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
    Detach(connection);
    return Forget(connection);
  }
  if ((events & EPOLLOUT) != 0 && !Flush(connection)) return;
  if ((events & EPOLLIN) == 0 || connection->state == ConnectionState::kClosing) return;
  v1::AttachFrame frame;
  for (int i = 0; i < kPacketsPerTurn; ++i) {
    const auto received = ReceiveFrame(connection->socket.get(), &frame, nullptr);
    if (!received.ok()) return Close(connection, "bad_frame", std::string(received.status().message()));
    switch (*received) {
      case ReceiveOutcome::kWouldBlock:
        return;
      case ReceiveOutcome::kHangup:
        Detach(connection);
        return Forget(connection);
      case ReceiveOutcome::kEmpty:
        break;
      case ReceiveOutcome::kFrame:
        OnFrame(connection, frame);
        break;
    }
    connection = Find(id);
    if (connection == nullptr || connection->state == ConnectionState::kClosing) return;
  }
}

void AttachLoop::OnFrame(Connection* connection, const v1::AttachFrame& frame) {
  if (connection->state == ConnectionState::kSilent) {
    if (frame.has_hello()) return OnHello(connection, frame.hello());
    return Close(connection, "protocol", "the first frame must be hello");
  }
  if (frame.has_slab_ack()) return events_.slab_ack(connection->attach, frame.slab_ack());
  if (frame.has_slab_left()) return events_.slab_left(connection->attach, frame.slab_left());
  Close(connection, "protocol", "only slab_ack and slab_left may follow hello");
}

void AttachLoop::OnHello(Connection* connection, const v1::AttachHello& hello) {
  if (hello.protocol() != 1) {
    return Close(connection, "protocol",
                 absl::StrCat("hello.protocol is ", hello.protocol(), "; this daemon speaks 1"));
  }
  if (hello.client_name().size() > kMaxClientNameBytes) {
    return Close(connection, "protocol",
                 absl::StrCat("hello.client_name has ", hello.client_name().size(), " bytes; the limit is ",
                              kMaxClientNameBytes));
  }
  if (!MakeRoom(ConnectionState::kGreeted, connection->peer.uid)) {
    return Close(connection, "unbound",
                 absl::StrCat("uid ", connection->peer.uid, " has ", options_.max_unbound_per_uid,
                              " connections without a session, its limit"));
  }
  absl::StatusOr<Process*> process = WatchPeer(*connection);
  if (!process.ok()) return Close(connection, "process", std::string(process.status().message()));
  PeerCredentials credentials = connection->peer;
  credentials.process = (*process)->id;
  credentials.cgroup = CgroupOf(credentials.pid, (*process)->pidfd->get());
  credentials.pidfd = (*process)->pidfd;
  absl::StatusOr<Daemon::Welcome> welcome =
      events_.attached(MakeMailedPeer(mailbox_, connection->id, (*process)->id), credentials, hello);
  if (!welcome.ok()) {
    if ((*process)->attached.empty()) Unwatch(*process);
    connection->final = welcome.status().GetPayload(Daemon::kForGood).has_value();
    if (!absl::IsPermissionDenied(welcome.status())) {
      return Close(connection, "refused", std::string(welcome.status().message()));
    }
    refusals_.Add({.process = std::make_shared<const PeerCredentials>(credentials)}, "attach",
                  welcome.status());
    return Close(connection, "access", std::string(welcome.status().message()));
  }
  connection->attach = welcome->id;
  connection->process = (*process)->id;
  (*process)->connections.insert(connection->id);
  (*process)->attached.push_back(welcome->id);
  Move(connection, ConnectionState::kGreeted);
  Queue(connection, {.frame = std::move(welcome->frame), .fd = {}});
}

void AttachLoop::ReadLetters() {
  for (AttachLetter& letter : mailbox_->Take()) {
    if (letter.kind == AttachLetter::Kind::kNotAwaited) {  // The connection may be gone.
      NotAwaited(letter.process, letter.attach);
      continue;
    }
    Connection* connection = Find(letter.connection);
    if (connection == nullptr || connection->state == ConnectionState::kClosing) continue;
    switch (letter.kind) {
      case AttachLetter::Kind::kFrame:
        Queue(connection, {.frame = std::move(letter.frame), .fd = std::move(letter.fd)});
        break;
      case AttachLetter::Kind::kClose:
        Close(connection, "", letter.reason);
        break;
      case AttachLetter::Kind::kBound:
        Move(connection, ConnectionState::kBound);
        break;
      case AttachLetter::Kind::kNotAwaited:
        break;
    }
  }
}

void AttachLoop::Move(Connection* connection, ConnectionState state) {
  silent_.erase(connection->id);
  greeted_.erase(connection->id);
  if (state == ConnectionState::kGreeted) greeted_.insert(connection->id);
  if (state == ConnectionState::kClosing) closing_.insert(connection->id);
  connection->state = state;
  connection->since_ms = NowMs();
}

void AttachLoop::Queue(Connection* connection, Outgoing outgoing) {
  if (connection->out.size() >= options_.max_queued_frames) {
    connection->out.clear();
    return Close(connection, "slow_reader",
                 absl::StrCat("the peer has not read ", options_.max_queued_frames, " frames, the limit"));
  }
  connection->out.push_back(std::move(outgoing));
  if (connection->out.size() == 1) Flush(connection);
}

bool AttachLoop::Flush(Connection* connection) {
  paused_.erase(connection->id);
  while (!connection->out.empty()) {
    const Outgoing& next = connection->out.front();
    const auto sent = senses_.send(connection->socket.get(), next.frame, next.fd.get());
    KVPOOL_CHECK(sent.ok() || !absl::IsInvalidArgument(sent.status()), "frame too long: %s",
                 std::string(sent.status().message()).c_str());
    if (!sent.ok() || *sent == SendOutcome::kHangup) {
      Detach(connection);
      Forget(connection);
      return false;
    }
    if (*sent == SendOutcome::kTooManyInFlight) {
      paused_.insert(connection->id);
      // One that is paused later does not make the others wait longer.
      if (resume_ms_ <= NowMs()) resume_ms_ = NowMs() + kInFlightPauseMs;
    }
    if (*sent != SendOutcome::kSent) break;
    connection->out.pop_front();
  }
  const bool closing = connection->state == ConnectionState::kClosing;
  if (closing && connection->out.empty()) {
    Forget(connection);
    return false;
  }
  epoll_event event{.events = EPOLLRDHUP, .data = {.u64 = Key(Source::kConnection, connection->id)}};
  if (!closing) event.events |= EPOLLIN;
  // A paused one has room: its socket would be writable, again and again.
  if (!connection->out.empty() && !paused_.contains(connection->id)) event.events |= EPOLLOUT;
  KVPOOL_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection->socket.get(), &event) == 0,
               "epoll_ctl: errno %d", errno);
  return true;
}

void AttachLoop::Close(Connection* connection, std::string_view label, const std::string& reason) {
  if (!label.empty()) Count(label);
  // A flood of connections that come to nothing should not flood the log as well.
  Log(connection->state == ConnectionState::kBound ? LogLevel::kInfo : LogLevel::kDebug,
      "attach connection closed",
      {{"pid", connection->peer.pid}, {"uid", connection->peer.uid}, {"reason", reason}});
  Detach(connection);
  Move(connection, ConnectionState::kClosing);
  connection->deadline_ms = NowMs() + options_.close_timeout_ms;
  Outgoing farewell;
  farewell.frame.mutable_closed()->set_reason(std::string(Clip(reason, kMaxReasonBytes)));
  farewell.frame.mutable_closed()->set_final(connection->final);
  connection->out.push_back(std::move(farewell));
  Flush(connection);
}

void AttachLoop::Detach(Connection* connection) {
  const ConnectionState state = connection->state;
  if (state != ConnectionState::kGreeted && state != ConnectionState::kBound) return;
  const auto process = processes_.find(connection->process);
  // The daemon decides, not `state`: the letter that makes the connection bound may still be in the mailbox.
  const bool awaited = events_.hangup(connection->attach);
  if (process == processes_.end()) return;  // It has ended, and the daemon was told.
  process->second.connections.erase(connection->id);
  if (!awaited) NotAwaited(connection->process, connection->attach);
}

void AttachLoop::Forget(Connection* connection) {
  // Unread bytes of the peer would turn the last frame to it into ECONNRESET.
  std::array<char, 1> byte;
  for (int i = 0;
       i < kPacketsPerTurn && recv(connection->socket.get(), byte.data(), byte.size(), MSG_DONTWAIT) > 0;
       ++i) {
  }
  const uint64_t id = connection->id;
  silent_.erase(id);
  greeted_.erase(id);
  closing_.erase(id);
  paused_.erase(id);
  connections_.erase(id);
  MutexLock lock(&stats_mu_);
  --stats_.connections;
}

void AttachLoop::Count(std::string_view label) {
  MutexLock lock(&stats_mu_);
  ++stats_.refused[std::string(label)];
}

// ----------------------------------------------------------------------------------------------- processes

absl::StatusOr<AttachLoop::Process*> AttachLoop::WatchPeer(const Connection& connection) {
  const int64_t pid = connection.peer.pid;
  ASSIGN_OR_RETURN(UniqueFd pidfd, senses_.pidfd(connection.socket.get(), connection.peer));
  // A forked child may hold the socket and say hello, but no pidfd of ours would tell when that child ends.
  if (ProcessEnded(pidfd.get())) {
    return absl::FailedPreconditionError(absl::StrCat("pid ", pid, ", which connected, has already ended"));
  }
  // Two processes of one pid are the same if neither has ended. The peer has not, as was just seen; the
  // watched one may have, and its pid been given to the peer.
  if (const auto known = process_of_pid_.find(pid); pid > 0 && known != process_of_pid_.end()) {
    Process& process = processes_.at(known->second);
    if (!ProcessEnded(process.pidfd->get())) return &process;
  }
  const uint64_t id = next_id_++;
  RETURN_IF_ERROR(Watch(pidfd.get(), Key(Source::kProcess, id), EPOLLIN));
  Process& process = processes_[id];
  process.id = id;
  process.pid = pid;
  process.pidfd = std::make_shared<const UniqueFd>(std::move(pidfd));
  if (pid > 0) process_of_pid_[pid] = id;
  return &process;
}

void AttachLoop::Unwatch(Process* process) {
  if (const auto known = process_of_pid_.find(process->pid);
      known != process_of_pid_.end() && known->second == process->id) {
    process_of_pid_.erase(known);
  }
  // Others may hold the descriptor still, and while any does the kernel goes on to report it.
  KVPOOL_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, process->pidfd->get(), nullptr) == 0,
               "epoll_ctl: errno %d", errno);
  processes_.erase(process->id);
}

// A process that connects over and over would otherwise add an entry each time.
void AttachLoop::NotAwaited(uint64_t process, AttachId attach) {
  const auto watched = processes_.find(process);
  if (watched == processes_.end()) return;
  std::erase(watched->second.attached, attach);
  if (watched->second.attached.empty()) Unwatch(&watched->second);
}

void AttachLoop::OnProcessEnded(Process* process) {
  const std::vector<AttachId> attached = std::move(process->attached);
  const std::set<uint64_t> connections = std::move(process->connections);
  const std::string reason = absl::StrCat("pid ", process->pid, " has ended");
  Unwatch(process);
  for (const AttachId id : attached) events_.process_dead(id);
  // A forked child may still hold the socket, but it is not the member.
  for (const uint64_t id : connections) {
    if (Connection* connection = Find(id)) Close(connection, "", reason);
  }
}

}  // namespace kvpool
