#include "tests/compat/wire_proxy.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "proto/support/step_frames.h"
#include "proto/support/unique_fd.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

UniqueFd ListenOn(const std::string& path, int type) {
  UniqueFd listener(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  KVPOOL_CHECK(path.size() < sizeof(address.sun_path), "%s is too long", path.c_str());
  std::memcpy(address.sun_path, path.c_str(), path.size());
  KVPOOL_CHECK(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                   listen(listener.get(), 16) == 0,
               "listening on %s failed", path.c_str());
  return listener;
}

short AwaitEvents(int socket, short events) {
  pollfd polled = {.fd = socket, .events = events};
  while (poll(&polled, 1, -1) < 0) {
  }
  return polled.revents;
}

}  // namespace

class WireProxy::Rep {
 public:
  Rep(const std::string& daemon_socket, Pass pass) : daemon_socket_(daemon_socket), pass_(std::move(pass)) {
    attach_acceptor_ = std::thread([this] { AcceptAttachments(); });
    step_acceptor_ = std::thread([this] { AcceptStreams(); });
  }
  ~Rep() {
    shutdown(attach_.get(), SHUT_RDWR);
    shutdown(step_.get(), SHUT_RDWR);
    attach_acceptor_.join();
    step_acceptor_.join();
    for (std::thread& connection : connections_) connection.join();
  }

  const std::string& socket() const { return socket_; }

 private:
  template <typename Message>
  const Message& Passed(Message* message) {
    std::lock_guard lock(passing_);
    pass_(message);
    return *message;
  }
  // Copies both ways, each by a thread, until one end hangs up.
  template <typename Up, typename Down>
  void Connect(UniqueFd engine, UniqueFd daemon, Up up, Down down) {
    std::lock_guard lock(connecting_);
    connections_.emplace_back([=, engine = std::move(engine), daemon = std::move(daemon)] {
      const auto copy = [&](int from, int to, auto copy_all) {
        copy_all(from, to);
        shutdown(from, SHUT_RDWR);
        shutdown(to, SHUT_RDWR);
      };
      std::thread requests([&] { copy(engine.get(), daemon.get(), up); });
      copy(daemon.get(), engine.get(), down);
      requests.join();
    });
  }

  void AcceptAttachments() {
    while (true) {
      UniqueFd engine(accept4(attach_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!engine.valid()) return;  // The listener was shut down.
      auto daemon = ConnectAttachSocket(daemon_socket_ + kAttachSuffix);
      if (!daemon.ok()) continue;
      const auto copy = [this](int from, int to) { CopyAttachFrames(from, to); };
      Connect(std::move(engine), *std::move(daemon), copy, copy);
    }
  }
  void AcceptStreams() {
    while (true) {
      UniqueFd engine(accept4(step_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!engine.valid()) return;  // The listener was shut down.
      std::string preface(kStepPreface.size(), '\0');
      const ssize_t said = recv(engine.get(), preface.data(), preface.size(), MSG_WAITALL);
      KVPOOL_CHECK(said == static_cast<ssize_t>(preface.size()) && preface == kStepPreface,
                   "an engine began its stream with \"%s\"", preface.c_str());
      auto daemon = ConnectStepSocket(daemon_socket_);
      if (!daemon.ok()) continue;
      Connect(
          std::move(engine), *std::move(daemon),
          [this](int from, int to) { CopyStepFrames<v1::StepRequest>(from, to, kMaxStepRequestBytes); },
          [this](int from, int to) { CopyStepFrames<v1::StepResponse>(from, to, kMaxStepResponseBytes); });
    }
  }

  void CopyAttachFrames(int from, int to) {
    while (true) {
      v1::AttachFrame frame;
      UniqueFd fd;
      const auto received = ReceiveFrame(from, &frame, &fd);
      if (!received.ok() || *received != ReceiveOutcome::kFrame) return;
      if (!SendFrame(to, Passed(&frame), fd.get()).ok()) return;
    }
  }
  template <typename Message>
  void CopyStepFrames(int from, int to, size_t most_bytes) {
    StepFrameReader reader(most_bytes);
    StepFrameWriter writer;
    while (true) {
      auto read = reader.Next(from);
      if (read == StepFrameReader::Outcome::kNoneYet) {
        reader.OnReadable((AwaitEvents(from, POLLIN) & POLLHUP) != 0);
        continue;
      }
      if (read != StepFrameReader::Outcome::kFrame) return;
      Message message;
      KVPOOL_CHECK(message.ParseFromString(std::string(reader.frame())), "a frame is not a %s",
                   message.GetTypeName().c_str());
      auto written = writer.Write(to, Passed(&message).SerializeAsString(), reader.is_end());
      while (written == StepFrameWriter::Outcome::kPending) {
        AwaitEvents(to, POLLOUT);
        written = writer.Flush(to);
      }
      if (written == StepFrameWriter::Outcome::kBroken) return;
    }
  }

  const std::string daemon_socket_;
  const Pass pass_;
  std::mutex passing_, connecting_;
  const TemporaryDirectory directory_;
  const std::string socket_ = directory_.path() + "/proxy.sock";
  const UniqueFd attach_ = ListenOn(socket_ + kAttachSuffix, SOCK_SEQPACKET);
  const UniqueFd step_ = ListenOn(socket_, SOCK_STREAM);
  std::vector<std::thread> connections_;  // Guarded by connecting_ until the acceptors have ended.
  std::thread attach_acceptor_, step_acceptor_;
};

WireProxy::WireProxy(const std::string& daemon_socket, Pass pass)
    : rep_(std::make_unique<Rep>(daemon_socket, std::move(pass))) {}
WireProxy::~WireProxy() = default;
const std::string& WireProxy::socket() const { return rep_->socket(); }

}  // namespace kvpool
