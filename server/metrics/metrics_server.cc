#include "server/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <netinet/in.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

class MetricsServer::Rep {
 public:
  Rep(Collect collect, Serving serving) : collect_(std::move(collect)), serving_(std::move(serving)) {}
  ~Rep();

  absl::Status Listen(const std::string& address, std::chrono::milliseconds patience) {
    mg_callbacks callbacks{};
    callbacks.log_message = &Rep::OnLog;
    const std::string threads = absl::StrCat(kThreads), timeout_ms = absl::StrCat(patience.count());
    const char* options[] = {"listening_ports",    address.c_str(),    "num_threads", threads.c_str(),
                             "request_timeout_ms", timeout_ms.c_str(), nullptr};
    mg_init_data init{.callbacks = &callbacks, .user_data = this, .configuration_options = options};
    context_ = mg_start2(&init, nullptr);
    if (context_ == nullptr) {
      MutexLock lock(&mu_);
      return absl::UnavailableError(complaint_.empty() ? "not an address" : complaint_);
    }
    mg_set_request_handler(context_, "/metrics", &Rep::OnMetrics, this);
    mg_set_request_handler(context_, "/health", &Rep::OnHealth, this);
    return absl::OkStatus();
  }
  int port() const {
    mg_server_port port{};
    return mg_get_server_ports(context_, 1, &port) == 1 ? port.port : 0;
  }

 private:
  // The library's first message while it starts is the cause if it can't.
  static int OnLog(const mg_connection* connection, const char* message) {
    auto* rep = static_cast<Rep*>(mg_get_user_context_data(connection));
    if (rep != nullptr) {
      MutexLock lock(&rep->mu_);
      if (rep->complaint_.empty()) rep->complaint_ = message;
    }
    return 1;  // The library does not log the message itself.
  }
  // Answers with the text that `body` makes. The status code.
  static int Answer(mg_connection* connection, int code, const std::function<std::string()>& body) {
    if (absl::string_view(mg_get_request_info(connection)->request_method) != "GET") {
      mg_send_http_error(connection, 405, "%s", "only GET is served");
      return 405;
    }
    const std::string text = body();
    mg_printf(connection,
              "HTTP/1.1 %d %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
              "Content-Length: %zu\r\nConnection: close\r\n\r\n",
              code, mg_get_response_code_text(connection, code), text.size());
    mg_write(connection, text.data(), text.size());
    return code;
  }
  static int OnMetrics(mg_connection* connection, void* rep) {
    return Answer(connection, 200, [of = static_cast<Rep*>(rep)] {
      // One at a time: verbs wait for what a scrape looks at.
      MutexLock lock(&of->collect_mu_);
      std::string text;
      for (prometheus::MetricFamily& family : of->collect_()) {
        text += prometheus::TextSerializer().Serialize({std::move(family)});
        // A thread that computes goes on to the kernel's next tick, 4 ms, though verbs wait for its processor.
        std::this_thread::yield();
      }
      return text;
    });
  }
  static int OnHealth(mg_connection* connection, void* rep) {
    const bool serving = static_cast<Rep*>(rep)->serving_();
    return Answer(connection, serving ? 200 : 503,
                  [serving] { return serving ? "serving\n" : "draining\n"; });
  }

  const Collect collect_;
  const Serving serving_;
  mg_context* context_ = nullptr;
  Mutex collect_mu_;
  Mutex mu_;
  std::string complaint_ ABSL_GUARDED_BY(mu_);
};

MetricsServer::Rep::~Rep() {
  if (context_ == nullptr) return;
  // The library looks once in two seconds whether it is to stop, or when somebody connects.
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::atomic<bool> stopped{false};
  std::thread stop([this, &stopped] {
    mg_stop(context_);
    stopped = true;
  });
  while (!stopped) {
    UniqueFd somebody(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    (void)connect(somebody.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop.join();
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address,
                                                                    Collect collect, Serving serving,
                                                                    std::chrono::milliseconds patience) {
  auto rep = std::make_unique<Rep>(std::move(collect), std::move(serving));
  const absl::Status listening = rep->Listen(address, patience);
  if (!listening.ok()) {
    return absl::UnavailableError(
        absl::StrCat("--metrics-listen=", address, ": cannot serve metrics there: ", listening.message()));
  }
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(rep)));
}

MetricsServer::MetricsServer(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}

MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const { return rep_->port(); }

}  // namespace kvpool
