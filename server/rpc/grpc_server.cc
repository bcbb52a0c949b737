#include "server/rpc/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"
#include "proto/support/step_frames.h"
#include "server/base/log.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/connections.h"
#include "server/rpc/health_service.h"
#include "server/rpc/openings.h"
#include "server/rpc/operator_tls.h"
#include "server/rpc/reflection_service.h"
#include "server/rpc/rpc_methods.h"
#include "server/rpc/rpc_queue.h"
#include "server/rpc/socket_events.h"
#include "server/rpc/step_call.h"
#include "server/rpc/stream_acceptor.h"

namespace kvpool {
namespace {

constexpr int kMaxRequestBytes = kMaxStepRequestBytes;
// Each unary call that is parked holds a stream.
constexpr int kMaxStreamsPerConnection = 1024;
// Operator calls that run at the same time. A change of policy takes a second at a million blocks, and one waits for
// another: lists are to be had meanwhile.
constexpr int kOperatorThreads = 4;
constexpr size_t kMostOperatorCallsWaiting = 64;
constexpr size_t kMostOperatorBytesWaiting = 64 << 20;
// Large calls of engines: some ten milliseconds each, in pieces. Those that came in a stream have a place besides.
constexpr int kLargeCallThreads = 4;
constexpr size_t kMostLargeCallsWaiting = 256;
constexpr size_t kMostLargeBytesWaiting = 64 << 20;
// A connection that no call has used for so long is told to go; clients come back by themselves.
constexpr int kMaxIdleMs = 5 * 60 * 1000;

// gRPC's own words go where ours go: its logger writes to stderr on the thread that has something to say, which may
// be a queue's.
void LogWordsOfGrpc(gpr_log_func_args* words) {
  const LogLevel level = words->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : words->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                    : LogLevel::kDebug;
  Log(level, "gRPC says", {{"words", words->message}, {"file", words->file}, {"line", words->line}});
}

int ThreadsOrDefault(int threads) {
  if (threads > 0) return threads;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, 1, 8);
}

}  // namespace

class GrpcServer::Rep {
 public:
  Rep(Daemon* daemon, RpcStats* stats)
      : daemon_(daemon),
        stats_(stats),
        openings_(std::make_unique<Openings>(daemon, stats)),
        operators_(std::make_unique<CallWorkers>(
            CallWorkers::Options{.calls = "operator calls",
                                 .threads = kOperatorThreads,
                                 .most_waiting = kMostOperatorCallsWaiting,
                                 .most_waiting_bytes = kMostOperatorBytesWaiting,
                                 .turns_by = "user"})),
        large_calls_(
            std::make_unique<CallWorkers>(CallWorkers::Options{.calls = "large calls",
                                                               .threads = kLargeCallThreads,
                                                               .most_waiting = kMostLargeCallsWaiting,
                                                               .most_waiting_bytes = kMostLargeBytesWaiting,
                                                               .turns_by = "tenant"})) {}
  ~Rep() { Stop(std::chrono::milliseconds(0)); }

  absl::Status Start(const GrpcServerOptions& options);
  void Stop(std::chrono::milliseconds patience);
  void SetServing(bool serving) { health_.SetServing(serving); }
  bool serving() const { return health_.serving(); }
  void LookAtCertificates() {
    if (operator_tls_ != nullptr) operator_tls_->Look();
  }
  int operator_port() const { return operator_port_; }
  void Rest();
  void GoOn() {
    for (const std::unique_ptr<RpcQueue>& queue : queues_) queue->GoOn();
  }
  bool quiet() const {
    return std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue->calls() == 0; });
  }
  bool busy() { return !openings_->idle() || !large_calls_->idle(); }

 private:
  template <typename Service>
  RpcSite<Service> Site(Service* service, RpcQueue* queue) {
    return {.service = service, .queue = queue, .stats = stats_, .connections = &*connections_};
  }

  Daemon* const daemon_;
  RpcStats* const stats_;
  const std::vector<std::string> services_ = {
      v1::Engine::service_full_name(), v1::Operator::service_full_name(),
      grpc::health::v1::Health::service_full_name(),
      grpc::reflection::v1alpha::ServerReflection::service_full_name()};
  HealthState health_{services_};
  EngineService engine_service_;
  v1::Operator::AsyncService operator_service_;
  grpc::health::v1::Health::AsyncService health_service_;
  grpc::reflection::v1alpha::ServerReflection::AsyncService reflection_service_;
  RefusalLog refusals_{"operator call refused"};
  RefusalLog refused_verbs_{"verb refused"};
  std::optional<Connections> connections_;
  std::unique_ptr<OperatorTls> operator_tls_;  // Null without an operator address.
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::unique_ptr<RpcQueue>> queues_;
  std::unique_ptr<Openings> openings_;
  std::unique_ptr<CallWorkers> operators_;
  std::unique_ptr<CallWorkers> large_calls_;
  std::unique_ptr<StreamAcceptor> acceptor_;
  int operator_port_ = 0;
  Mutex rest_mu_;
  bool stopped_ ABSL_GUARDED_BY(rest_mu_) = false;
};

void GrpcServer::Rep::Rest() {
  MutexLock lock(&rest_mu_);
  // An operator's call may come to this while the server stops.
  if (stopped_) return;
  for (const std::unique_ptr<RpcQueue>& queue : queues_) queue->Rest();
}

absl::Status GrpcServer::Rep::Start(const GrpcServerOptions& options) {
  gpr_set_log_function(LogWordsOfGrpc);
  connections_.emplace(
      Connections::Limits{.all = options.max_connections, .of_uid = options.max_connections / 2});
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxIdleMs);
  builder.RegisterService(&engine_service_);
  builder.RegisterService(&operator_service_);
  builder.RegisterService(&health_service_);
  builder.RegisterService(&reflection_service_);
  if (!options.operator_address.empty()) {
    ASSIGN_OR_RETURN(operator_tls_, OperatorTls::Open(options.operator_tls));
    builder.AddListeningPort(options.operator_address, operator_tls_->Credentials(), &operator_port_);
  }
  const auto several = [daemon = daemon_] { return daemon->tenants() > 1; };
  const int threads = ThreadsOrDefault(options.threads);
  for (int i = 0; i < threads; ++i) {
    queues_.push_back(std::make_unique<RpcQueue>(MakeGrpcEvents(builder.AddCompletionQueue()), several));
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || (!options.operator_address.empty() && operator_port_ == 0)) {
    if (options.operator_address.empty()) return absl::UnavailableError("gRPC server did not start");
    return absl::UnavailableError(absl::StrCat("--operator-tls-listen=", options.operator_address,
                                               ": cannot serve there with this certificate, key and CA"));
  }
  const EngineHost host = {.daemon = daemon_,
                           .openings = openings_.get(),
                           .large_calls = large_calls_.get(),
                           .refusals = &refused_verbs_};
  for (const std::unique_ptr<RpcQueue>& queue : queues_) {
    AcceptEngineCalls(Site(&engine_service_, queue.get()), host);
    AcceptOperatorCalls(Site(&operator_service_, queue.get()), daemon_, &health_, operators_.get(),
                        &refusals_, options.upgrade);
    AcceptHealthCalls(Site(&health_service_, queue.get()), &health_);
    AcceptReflectionCalls(Site(&reflection_service_, queue.get()), &services_);
    queue->Start();
  }
  // As many again for frames, which take turns.
  std::vector<StepSockets> frames;
  for (int i = 0; i < threads; ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<SocketEvents> made, SocketEvents::Make());
    SocketEvents* const events = made.get();
    queues_.push_back(std::make_unique<RpcQueue>(std::move(made), several));
    frames.push_back(ServeStepSockets(queues_.back().get(), events, stats_, host));
    queues_.back()->Start();
  }
  ASSIGN_OR_RETURN(acceptor_, StreamAcceptor::Start(
                                  {.path = options.socket_path,
                                   .group = options.group,
                                   .listen = options.listen,
                                   .fd_ceiling = options.fd_ceiling},
                                  &*connections_, stats_,
                                  [server = server_.get()](UniqueFd socket,
                                                           const std::shared_ptr<const PeerCredentials>&) {
                                    grpc::AddInsecureChannelFromFd(server, socket.Release());
                                  },
                                  [frames = std::move(frames), next = size_t{0}](
                                      UniqueFd socket, std::shared_ptr<const PeerCredentials> peer) mutable {
                                    frames[next++ % frames.size()](std::move(socket), std::move(peer));
                                  }));
  return absl::OkStatus();
}

void GrpcServer::Rep::Stop(std::chrono::milliseconds patience) {
  acceptor_.reset();
  if (server_ == nullptr) return;
  {
    MutexLock lock(&rest_mu_);
    stopped_ = true;
  }
  server_->Shutdown(std::chrono::system_clock::now() + patience);
  for (const std::unique_ptr<RpcQueue>& queue : queues_) queue->Stop();
  // What they carry out still refers to calls of the server. An operator's call may look at the others.
  operators_.reset();
  openings_.reset();
  large_calls_.reset();
  server_.reset();
  queues_.clear();
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              Daemon* daemon, RpcStats* stats) {
  auto rep = std::make_unique<Rep>(daemon, stats);
  RETURN_IF_ERROR(rep->Start(options));
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(rep)));
}

GrpcServer::GrpcServer(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}
GrpcServer::~GrpcServer() = default;
void GrpcServer::SetServing(bool serving) { rep_->SetServing(serving); }
bool GrpcServer::serving() const { return rep_->serving(); }
void GrpcServer::LookAtCertificates() { rep_->LookAtCertificates(); }
void GrpcServer::Stop(std::chrono::milliseconds patience) { rep_->Stop(patience); }
void GrpcServer::Rest() { rep_->Rest(); }
void GrpcServer::GoOn() { rep_->GoOn(); }
bool GrpcServer::quiet() const { return rep_->quiet(); }
bool GrpcServer::busy() { return rep_->busy(); }
int GrpcServer::operator_port() const { return rep_->operator_port(); }

}  // namespace kvpool
