#include "tests/compat/wire_proxy.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "proto/support/unique_fd.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {

class WireProxy::Rep final : public v1::Engine::Service {
 public:
  Rep(const std::string& daemon_socket, Pass pass)
      : daemon_socket_(daemon_socket),
        pass_(std::move(pass)),
        stub_(v1::Engine::NewStub(ConnectTo("unix:" + daemon_socket))) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    KVPOOL_CHECK(server_ != nullptr, "no gRPC server on %s", socket_.c_str());
    attach_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string path = socket_ + kAttachSuffix;
    KVPOOL_CHECK(path.size() < sizeof(address.sun_path), "%s is too long", path.c_str());
    std::memcpy(address.sun_path, path.c_str(), path.size());
    KVPOOL_CHECK(bind(attach_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                     listen(attach_.get(), 16) == 0,
                 "listening on %s failed", path.c_str());
    acceptor_ = std::thread([this] { AcceptEngines(); });
  }
  ~Rep() override {
    shutdown(attach_.get(), SHUT_RDWR);
    acceptor_.join();
    for (std::thread& connection : connections_) connection.join();
    server_->Shutdown();
  }

  const std::string& socket() const { return socket_; }

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSession* request,
                           v1::OpenSessionResult* result) override {
    return Ask(&v1::Engine::Stub::OpenSession, *request, result);
  }
  grpc::Status AddMember(grpc::ServerContext*, const v1::AddMember* request,
                         v1::AddMemberResult* result) override {
    return Ask(&v1::Engine::Stub::AddMember, *request, result);
  }
  grpc::Status Step(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* engine) override {
    grpc::ClientContext call;
    const auto daemon = stub_->Step(&call);
    std::thread requests([&] {
      v1::StepRequest request;
      while (engine->Read(&request) && daemon->Write(Passed(&request))) {
      }
      call.TryCancel();  // The engine has hung up.
    });
    v1::StepResponse response;
    while (daemon->Read(&response) && engine->Write(Passed(&response))) {
    }
    context->TryCancel();  // The daemon has, or both.
    requests.join();
    return daemon->Finish();
  }

 private:
  template <typename Message>
  const Message& Passed(Message* message) {
    std::lock_guard lock(passing_);
    pass_(message);
    return *message;
  }
  template <typename Request, typename Result>
  grpc::Status Ask(grpc::Status (v1::Engine::Stub::*method)(grpc::ClientContext*, const Request&, Result*),
                   Request request, Result* result) {
    grpc::ClientContext call;
    const grpc::Status status = (stub_.get()->*method)(&call, Passed(&request), result);
    Passed(result);
    return status;
  }

  void AcceptEngines() {
    while (true) {
      UniqueFd engine(accept4(attach_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!engine.valid()) return;  // The listener was shut down.
      auto daemon = ConnectAttachSocket(daemon_socket_ + kAttachSuffix);
      if (!daemon.ok()) continue;
      connections_.emplace_back([this, engine = std::move(engine), daemon = *std::move(daemon)] {
        std::thread up([&] { Pump(engine.get(), daemon.get()); });
        Pump(daemon.get(), engine.get());
        up.join();
      });
    }
  }
  void Pump(int from, int to) {
    while (true) {
      v1::AttachFrame frame;
      UniqueFd fd;
      const auto received = ReceiveFrame(from, &frame, &fd);
      if (!received.ok() || *received != ReceiveOutcome::kFrame) break;
      if (!SendFrame(to, Passed(&frame), fd.get()).ok()) break;
    }
    shutdown(from, SHUT_RDWR);
    shutdown(to, SHUT_RDWR);
  }

  const std::string daemon_socket_;
  const Pass pass_;
  std::mutex passing_;
  const std::unique_ptr<v1::Engine::Stub> stub_;
  const TemporaryDirectory directory_;
  const std::string socket_ = directory_.path() + "/proxy.sock";
  std::unique_ptr<grpc::Server> server_;
  UniqueFd attach_;
  std::vector<std::thread> connections_;  // Touched by the acceptor until it has ended.
  std::thread acceptor_;
};

WireProxy::WireProxy(const std::string& daemon_socket, Pass pass)
    : rep_(std::make_unique<Rep>(daemon_socket, std::move(pass))) {}
WireProxy::~WireProxy() = default;
const std::string& WireProxy::socket() const { return rep_->socket(); }

}  // namespace kvpool
