// The standard services, health and reflection: tools that know nothing of kvpool rely on them.
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/match.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

namespace health = grpc::health::v1;
namespace reflection = grpc::reflection::v1alpha;

std::unique_ptr<DaemonProcess> StartDaemon(std::vector<std::string> flags = {}) {
  auto daemon = DaemonProcess::Start({.flags = std::move(flags)});
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  return daemon.ok() ? std::move(*daemon) : nullptr;
}

TEST(HealthTest, ChecksAndWatches) {
  auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const auto channel = ConnectTo(daemon->target());
  const auto stub = health::Health::NewStub(channel);
  auto check = [&](const std::string& service, health::HealthCheckResponse* response) {
    health::HealthCheckRequest request;
    request.set_service(service);
    grpc::ClientContext context;
    return stub->Check(&context, request, response);
  };
  health::HealthCheckResponse response;
  for (const char* service : {"", "kvpool.v1.Engine", "kvpool.v1.Operator"}) {
    ASSERT_TRUE(check(service, &response).ok()) << service;
    EXPECT_EQ(response.status(), health::HealthCheckResponse::SERVING);
  }
  EXPECT_EQ(check("no.such.Service", &response).error_code(), grpc::StatusCode::NOT_FOUND);
  // The same over HTTP, beside the metrics.
  const auto over_http = [&daemon] {
    const absl::StatusOr<std::string> text = daemon->Get("/health");
    return text.ok() ? *text : std::string(text.status().message());
  };
  EXPECT_EQ(over_http(), "serving\n");

  grpc::ClientContext watch_context, unknown_context, drain_context, cancel_context;
  const auto watch = stub->Watch(&watch_context, health::HealthCheckRequest());
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), health::HealthCheckResponse::SERVING);
  health::HealthCheckRequest unknown_request;
  unknown_request.set_service("no.such.Service");
  const auto unknown = stub->Watch(&unknown_context, unknown_request);
  ASSERT_TRUE(unknown->Read(&response));
  EXPECT_EQ(response.status(), health::HealthCheckResponse::SERVICE_UNKNOWN);

  const auto operators = v1::Operator::NewStub(channel);
  v1::DrainRequest drain;
  v1::DrainResponse drained;
  ASSERT_TRUE(operators->Drain(&drain_context, drain, &drained).ok());
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), health::HealthCheckResponse::NOT_SERVING);
  EXPECT_TRUE(absl::StartsWith(over_http(), "/health answered: HTTP/1.1 503 ")) << over_http();
  drain.set_cancel(true);
  ASSERT_TRUE(operators->Drain(&cancel_context, drain, &drained).ok());
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), health::HealthCheckResponse::SERVING);
  EXPECT_EQ(over_http(), "serving\n");

  // When the daemon ends, one watch is cancelled and one is open.
  unknown_context.TryCancel();
  EXPECT_EQ(daemon->Stop(), 0);
}

TEST(ReflectionTest, ListsServicesAndTheirFiles) {
  auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const auto stub = reflection::ServerReflection::NewStub(ConnectTo(daemon->target()));
  grpc::ClientContext context;
  const auto stream = stub->ServerReflectionInfo(&context);
  reflection::ServerReflectionRequest request;
  reflection::ServerReflectionResponse response;
  auto ask = [&] { return stream->Write(request) && stream->Read(&response); };

  request.set_list_services("");
  ASSERT_TRUE(ask());
  std::set<std::string> services;
  for (const auto& service : response.list_services_response().service()) services.insert(service.name());
  EXPECT_EQ(services,
            (std::set<std::string>{"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
                                   "kvpool.v1.Engine", "kvpool.v1.Operator"}));

  request.set_file_containing_symbol("kvpool.v1.Engine.Step");
  ASSERT_TRUE(ask());
  EXPECT_EQ(response.file_descriptor_response().file_descriptor_proto_size(),
            3);  // engine.proto, layout.proto and score.proto.
  request.set_file_by_filename("kvpool/v1/operator.proto");
  ASSERT_TRUE(ask());
  EXPECT_EQ(response.file_descriptor_response().file_descriptor_proto_size(), 4);
  request.set_file_by_filename("no/such.proto");
  ASSERT_TRUE(ask());
  EXPECT_EQ(response.error_response().error_code(), static_cast<int>(grpc::StatusCode::NOT_FOUND));
  request.set_all_extension_numbers_of_type("kvpool.v1.Lease");
  ASSERT_TRUE(ask());
  EXPECT_EQ(response.all_extension_numbers_response().extension_number_size(), 0);
  request.clear_message_request();
  ASSERT_TRUE(ask());
  EXPECT_EQ(response.error_response().error_code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace kvpool
