#include "tests/client/stream_proxy.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "proto/support/check.h"

namespace kvpool {
namespace {

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  KVPOOL_CHECK(path.size() < sizeof(address.sun_path), "%s is too long", path.c_str());
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

UniqueFd StreamSocket() { return UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

}  // namespace

StreamProxy::StreamProxy(const std::string& daemon_socket) : daemon_socket_(daemon_socket) {
  // The attach socket is the daemon's own under another name.
  KVPOOL_CHECK(symlink((daemon_socket + ".attach").c_str(), (socket_ + ".attach").c_str()) == 0,
               "symlink failed");
  listener_ = StreamSocket();
  const sockaddr_un address = AddressOf(socket_);
  KVPOOL_CHECK(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                   listen(listener_.get(), 16) == 0,
               "listening on %s failed", socket_.c_str());
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
  thread_ = std::thread([this] { Run(); });
}

StreamProxy::~StreamProxy() {
  stop_.store(true);
  KVPOOL_CHECK(eventfd_write(wake_.get(), 1) == 0, "eventfd_write failed");
  thread_.join();
}

int StreamProxy::Cut() {
  MutexLock lock(&mu_);
  int cut = 0;
  // Shut down, not closed: the thread polls these.
  for (auto& [engine, daemon] : connections_) {
    cut += engine.valid() ? 1 : 0;
    shutdown(engine.get(), SHUT_RDWR);
    shutdown(daemon.get(), SHUT_RDWR);
  }
  return cut;
}

bool StreamProxy::Copy(int from, int to) {
  char buffer[65536];
  const ssize_t count = recv(from, buffer, sizeof(buffer), 0);
  if (count <= 0) return false;
  for (ssize_t sent = 0; sent < count;) {
    const ssize_t more = send(to, buffer + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return true;
}

bool StreamProxy::CopyAnswers(int daemon, int engine) {
  MutexLock lock(&mu_);
  // Polled before the hold began: left where it is.
  return hold_answers_ || Copy(daemon, engine);
}

void StreamProxy::HoldAnswers(bool hold) {
  MutexLock lock(&mu_);
  hold_answers_ = hold;
}

void StreamProxy::Run() {
  while (!stop_.load()) {
    int timeout_ms;
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    {
      MutexLock lock(&mu_);
      const short from_daemon = hold_answers_ ? 0 : POLLIN;
      // Held answers are looked at again when the hold may be over.
      timeout_ms = hold_answers_ ? 1 : 100;
      for (const auto& [engine, daemon] : connections_) {
        polled.push_back({engine.get(), POLLIN, 0});
        polled.push_back({daemon.get(), from_daemon, 0});
      }
    }
    if (poll(polled.data(), polled.size(), timeout_ms) < 0) continue;
    std::vector<size_t> closed;
    for (size_t i = 2; i < polled.size(); i += 2) {
      bool open = true;
      if (polled[i].revents != 0) open = Copy(polled[i].fd, polled[i + 1].fd);
      if (open && polled[i + 1].revents != 0) open = CopyAnswers(polled[i + 1].fd, polled[i].fd);
      if (!open) closed.push_back(i / 2 - 1);
    }
    MutexLock lock(&mu_);
    for (size_t i = closed.size(); i-- > 0;) {
      connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(closed[i]));
    }
    if (polled[1].revents == 0) continue;
    UniqueFd engine(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    UniqueFd daemon = StreamSocket();
    const sockaddr_un address = AddressOf(daemon_socket_);
    if (connect(daemon.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      connections_.emplace_back(std::move(engine), std::move(daemon));
    }
  }
}

}  // namespace kvpool
