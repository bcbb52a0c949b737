// The standard services, health and reflection, and TLS: tools that know nothing of kvpool rely on them.
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
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
  drain.set_cancel(true);
  ASSERT_TRUE(operators->Drain(&cancel_context, drain, &drained).ok());
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), health::HealthCheckResponse::SERVING);

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

class OperatorTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (RunProgram({"/bin/sh", "-c", "command -v openssl"}).exit_code != 0) {
      GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
    }
    char pattern[] = "/tmp/kvpool-tls-XXXXXX";
    ASSERT_NE(mkdtemp(pattern), nullptr);
    directory_ = pattern;
    const ProgramEnd made = RunProgram({"/bin/sh", "-ec", absl::StrCat("cd ", directory_, R"(
      new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -batch"
      $new -x509 -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
      $new -x509 -days 2 -subj /CN=other -keyout other.key -out other.pem
      echo subjectAltName=DNS:localhost,IP:127.0.0.1 > san
      for name in daemon operator; do
        $new -subj /CN=$name -keyout $name.key -out $name.csr
        openssl x509 -req -days 2 -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile san -out $name.pem
      done
      printf '[operators]\nsan = localhost\nrole = operator\n[local]\nuid = *\nrole = engine\ntenant = *\n' > access
      )")});
    ASSERT_EQ(made.exit_code, 0) << made.output;
    daemon_ = StartDaemon({"--operator-tls-listen=127.0.0.1:0", "--access=" + directory_ + "/access",
                           "--operator-tls-cert=" + directory_ + "/daemon.pem",
                           "--operator-tls-key=" + directory_ + "/daemon.key",
                           "--operator-tls-ca=" + directory_ + "/ca.pem"});
    ASSERT_NE(daemon_, nullptr);
  }
  void TearDown() override {
    daemon_.reset();
    if (!directory_.empty()) RunProgram({"/bin/rm", "-r", directory_});
  }
  std::string Pem(const std::string& name) {
    std::stringstream text;
    text << std::ifstream(directory_ + "/" + name).rdbuf();
    return text.str();
  }
  std::shared_ptr<grpc::Channel> Connect(const std::string& identity) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Pem("ca.pem");
    if (!identity.empty()) {
      options.pem_cert_chain = Pem(identity + ".pem");
      options.pem_private_key = Pem(identity + ".key");
    }
    return grpc::CreateChannel(absl::StrCat("127.0.0.1:", daemon_->operator_port()),
                               grpc::SslCredentials(options));
  }
  grpc::Status GetStats(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::GetStatsResponse response;
    return v1::Operator::NewStub(channel)->GetStats(&context, v1::GetStatsRequest(), &response);
  }

  std::string directory_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(OperatorTlsTest, ServesOperatorsWithACertificateAndNobodyElse) {
  const auto channel = Connect("operator");
  const grpc::Status status = GetStats(channel);
  EXPECT_TRUE(status.ok()) << status.error_message();
  {
    grpc::ClientContext context;
    health::HealthCheckResponse response;
    EXPECT_TRUE(
        health::Health::NewStub(channel)->Check(&context, health::HealthCheckRequest(), &response).ok());
  }
  EXPECT_EQ(GetStats(Connect("other")).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(GetStats(Connect("")).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(GetStats(ConnectTo(absl::StrCat("127.0.0.1:", daemon_->operator_port()))).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(OperatorTlsTest, EngineVerbsStayOnTheUnixSocket) {
  const auto stub = v1::Engine::NewStub(Connect("operator"));
  grpc::ClientContext unary_context, stream_context;
  v1::OpenSessionResult opened;
  EXPECT_EQ(stub->OpenSession(&unary_context, SmallSession("token"), &opened).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  const auto stream = stub->Step(&stream_context);
  v1::StepResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

}  // namespace
}  // namespace kvpool
