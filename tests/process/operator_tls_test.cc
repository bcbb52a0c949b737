// TLS of the operator address: who is let in, and what happens when its files change while the daemon serves.
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/process/raw_engine.h"
#include "tests/support/certificates.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

namespace fs = std::filesystem;
namespace health = grpc::health::v1;
using Channel = std::shared_ptr<grpc::Channel>;

constexpr char kRead[] = "operator certificates read category=audit";
constexpr char kRefused[] = "operator certificates refused";

// Two generations of certificates, "old" and "new", each with an authority. The daemon's files are laid out as Kubernetes
// mounts a secret: links to links, of which one is replaced when the secret changes.
class OperatorTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Certificates::CanBeMade())
      GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
    ASSERT_NO_FATAL_FAILURE(certificates_.Make(R"(
      authorities old new foreign
      for ca in old new foreign; do sign operator-$ca $ca 2; sign daemon-$ca $ca 2; done
      sign operator-expired new -1
      sign successor-old old 2
      mkdir mount
      for file in ca.pem daemon.pem daemon.key; do ln -s ..data/$file mount/$file; done
      printf '[operators]\nsan = localhost\nrole = operator\n[local]\nuid = *\nrole = engine\ntenant = *\n' > access
      )"));
    Mount("old");
    Start(Flags());
  }
  void Start(const std::vector<std::string>& flags) {
    auto daemon = DaemonProcess::Start({.flags = flags});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  std::vector<std::string> Flags() const {
    return {"--operator-tls-listen=127.0.0.1:0", "--access=" + File("access"),
            "--operator-tls-cert=" + File("mount/daemon.pem"),
            "--operator-tls-key=" + File("mount/daemon.key"), "--operator-tls-ca=" + File("mount/ca.pem")};
  }

  std::string File(const std::string& name) const { return certificates_.File(name); }
  std::string Text(const std::string& name) const { return certificates_.Text(name); }
  // Swaps the files for those of a generation, all at once.
  void Mount(const std::string& generation) const {
    const std::string folder = File("mount/.." + generation);
    fs::create_directory(folder);
    fs::copy(File(generation + ".pem"), folder + "/ca.pem");
    fs::copy(File("daemon-" + generation + ".pem"), folder + "/daemon.pem");
    fs::copy(File("daemon-" + generation + ".key"), folder + "/daemon.key");
    fs::create_symlink(".." + generation, File("mount/..data_tmp"));
    fs::rename(File("mount/..data_tmp"), File("mount/..data"));
  }

  // A channel with a connection of its own, which trusts a daemon of `generation`.
  Channel Connect(const std::string& generation, const std::string& identity) const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Text(generation + ".pem");
    if (!identity.empty()) {
      options.pem_cert_chain = Text(identity + ".pem");
      options.pem_private_key = Text(identity + ".key");
    }
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", daemon_->operator_port()),
                                     grpc::SslCredentials(options), arguments);
  }
  static grpc::Status GetStats(const Channel& channel) {
    grpc::ClientContext context;
    v1::GetStatsResponse response;
    return v1::Operator::NewStub(channel)->GetStats(&context, v1::GetStatsRequest(), &response);
  }
  // An operator's call that is audited, with the address of its connection.
  static grpc::Status GoOnServing(const Channel& channel) {
    grpc::ClientContext context;
    v1::DrainRequest request;
    request.set_cancel(true);
    v1::DrainResponse response;
    return v1::Operator::NewStub(channel)->Drain(&context, request, &response);
  }
  bool LetsIn(const std::string& generation, const std::string& identity) const {
    const grpc::Status status = GetStats(Connect(generation, identity));
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE)
        << status.error_message();
    return status.ok();
  }

  // The lines of the log with this text.
  std::vector<std::string> Lines(const std::string& text) const {
    std::vector<std::string> lines = absl::StrSplit(daemon_->Log(), '\n');
    std::erase_if(lines, [&](const std::string& line) { return !absl::StrContains(line, text); });
    return lines;
  }
  // Waits until there are so many.
  bool Logs(const std::string& text, size_t lines = 1) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (Lines(text).size() < lines) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // The peer that a line of the audit names.
  static std::string PeerIn(const std::string& line) {
    for (const absl::string_view word : absl::StrSplit(line, ' ')) {
      if (absl::StartsWith(word, "peer=")) return std::string(word);
    }
    return "";
  }

  Certificates certificates_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(OperatorTlsTest, ServesOperatorsWithACertificateAndNobodyElse) {
  const Channel channel = Connect("old", "operator-old");
  const grpc::Status status = GetStats(channel);
  EXPECT_TRUE(status.ok()) << status.error_message();
  {
    grpc::ClientContext context;
    health::HealthCheckResponse response;
    EXPECT_TRUE(
        health::Health::NewStub(channel)->Check(&context, health::HealthCheckRequest(), &response).ok());
  }
  EXPECT_FALSE(LetsIn("old", "operator-foreign"));
  EXPECT_FALSE(LetsIn("old", ""));
  EXPECT_EQ(GetStats(ConnectTo(absl::StrCat("127.0.0.1:", daemon_->operator_port()))).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(OperatorTlsTest, EngineVerbsStayOnTheUnixSocket) {
  const auto stub = v1::Engine::NewStub(Connect("old", "operator-old"));
  grpc::ClientContext unary_context, stream_context;
  v1::OpenSessionResult opened;
  EXPECT_EQ(stub->OpenSession(&unary_context, SmallSession("token"), &opened).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  const auto stream = stub->Step(&stream_context);
  v1::StepResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(OperatorTlsTest, ARotationCountsFromTheNextHandshakeOnAndLosesNoCall) {
  const Channel open = Connect("old", "operator-old");
  ASSERT_TRUE(GoOnServing(open).ok());
  std::atomic<bool> rotated{false};
  std::atomic<int> before{0}, after{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      // At least 20 calls begin once the rotation is over.
      for (int left = 20; left > 0;) {
        const bool late = rotated;
        const grpc::Status status = GetStats(open);
        EXPECT_TRUE(status.ok()) << status.error_message();
        ++(late ? after : before);
        if (late) --left;
      }
    });
  }
  while (before < 20) std::this_thread::yield();
  Mount("new");
  EXPECT_TRUE(LetsIn("new", "operator-new"));
  rotated = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(after, 60);
  EXPECT_TRUE(Logs(kRead));

  EXPECT_FALSE(LetsIn("new", "operator-old")) << "of the authority of before";
  EXPECT_FALSE(LetsIn("old", "operator-old")) << "the certificate of before is not shown any more";
  EXPECT_FALSE(LetsIn("new", "operator-foreign"));
  EXPECT_FALSE(LetsIn("new", "operator-expired"));
  EXPECT_FALSE(LetsIn("new", ""));
  EXPECT_TRUE(LetsIn("new", "operator-new"));

  // The connection is that of before, which could not be made any more.
  ASSERT_TRUE(GoOnServing(open).ok());
  ASSERT_TRUE(Logs("operator call category=audit method=Drain", 2)) << daemon_->Log();
  const std::vector<std::string> calls = Lines("operator call category=audit method=Drain");
  EXPECT_NE(PeerIn(calls[0]), "");
  EXPECT_EQ(PeerIn(calls[0]), PeerIn(calls[1]));
  EXPECT_EQ(Lines(kRead).size(), 1u) << daemon_->Log();
  EXPECT_EQ(daemon_->Stop(), 0);
}

// Handshakes are gRPC's threads'.
TEST_F(OperatorTlsTest, APipeIsNotWaitedFor) {
  for (const char* const name : {"daemon.pem", "daemon.key", "ca.pem"}) {
    SCOPED_TRACE(name);
    const std::string file = File(absl::StrCat("mount/..old/", name));
    fs::rename(file, file + ".kept");
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
    const size_t lines = Lines(kRefused).size();
    ASSERT_TRUE(LetsIn("old", "operator-old"));
    ASSERT_TRUE(Logs(kRefused, lines + 1)) << daemon_->Log();
    EXPECT_TRUE(absl::StrContains(Lines(kRefused).back(),
                                  absl::StrCat(name, ": cannot read it: it is no regular file")))
        << daemon_->Log();
    fs::rename(file + ".kept", file);
    ASSERT_TRUE(LetsIn("old", "operator-old"));
  }
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(OperatorTlsTest, FilesThatDoNotBelongTogetherChangeNothing) {
  const std::string certificate = Text("daemon-new.pem"), authority = Text("new.pem");
  struct {
    const char* file;
    std::string text;  // Empty: the file is removed.
    std::string why;
  } const kCases[] = {
      {"daemon.pem", certificate, "key values mismatch"},
      {"daemon.pem", certificate.substr(0, certificate.size() / 2), "certificate 1 of it can't be read"},
      {"daemon.pem", "", "cannot read it: No such file or directory"},
      {"daemon.key", Text("daemon-new.key"), "key values mismatch"},
      {"daemon.key", certificate, "there is no key without passphrase in it"},
      {"ca.pem", Text("new.key"), "there is no certificate in it"},
      {"ca.pem", authority + authority.substr(0, authority.size() / 2), "certificate 2 of it can't be read"},
  };
  for (const auto& bad : kCases) {
    SCOPED_TRACE(absl::StrCat(bad.file, ": ", bad.why));
    const std::string file = File(absl::StrCat("mount/..old/", bad.file));
    const std::string good = Text(absl::StrCat("mount/..old/", bad.file));
    const size_t lines = Lines(kRefused).size();
    if (bad.text.empty()) {
      fs::remove(file);
    } else {
      std::ofstream(file) << bad.text;
    }
    // However many connect, it is said once.
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(LetsIn("old", "operator-old"));
    EXPECT_FALSE(LetsIn("old", "operator-foreign"));
    ASSERT_TRUE(Logs(kRefused, lines + 1)) << daemon_->Log();
    const std::vector<std::string> refused = Lines(kRefused);
    EXPECT_EQ(refused.size(), lines + 1);
    EXPECT_TRUE(absl::StrContains(refused.back(), bad.why)) << refused.back();
    EXPECT_TRUE(absl::StrContains(refused.back(), absl::StrCat("=", File("mount/"), bad.file, ": ")))
        << refused.back();
    std::ofstream(file) << good;
    EXPECT_TRUE(LetsIn("old", "operator-old"));
  }
  EXPECT_EQ(Lines(kRead).size(), 0u) << daemon_->Log();
  Mount("new");
  EXPECT_TRUE(LetsIn("new", "operator-new"));
  EXPECT_TRUE(Logs(kRead));
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(OperatorTlsTest, SighupSaysWhatTheNextHandshakeWillFind) {
  std::ofstream(File("mount/..old/daemon.key")) << Text("daemon-new.key");
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logs(kRefused)) << daemon_->Log();
  const std::string why = absl::StrCat("--operator-tls-key=", File("mount/daemon.key"),
                                       ": is not the key of --operator-tls-cert=", File("mount/daemon.pem"));
  EXPECT_TRUE(absl::StrContains(Lines(kRefused)[0], why)) << Lines(kRefused)[0];
  std::vector<std::string> command = Flags();
  command.insert(command.begin(), {DaemonProcess::Program(), "--device=host", "--capacity=16MiB",
                                   "--socket=" + File("k.sock"), "--metrics-listen="});
  const ProgramEnd end = RunProgram(command);
  EXPECT_EQ(end.exit_code, 2) << end.output;
  EXPECT_TRUE(absl::StrContains(end.output, why)) << end.output;

  Mount("new");
  daemon_->Signal(SIGHUP);
  EXPECT_TRUE(Logs(kRead)) << daemon_->Log();
  EXPECT_TRUE(LetsIn("new", "operator-new"));
  EXPECT_EQ(Lines(kRead).size(), 1u) << daemon_->Log();
}

// Neither the next program could, nor this one again.
TEST_F(OperatorTlsTest, NothingIsUpgradedThatCouldNotStart) {
  std::vector<std::string> flags = Flags();
  flags.push_back("--keeper=on");
  ASSERT_NO_FATAL_FAILURE(Start(flags));
  std::ofstream(File("mount/..old/daemon.key")) << Text("daemon-new.key");
  const Channel channel = Connect("old", "operator-old");
  grpc::ClientContext context;
  v1::UpgradeResponse response;
  const grpc::Status status =
      v1::Operator::NewStub(channel)->Upgrade(&context, v1::UpgradeRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_TRUE(absl::StrContains(status.error_message(),
                                "could not start again, if the next one failed: "
                                "--operator-tls-key="))
      << status.error_message();
  EXPECT_TRUE(LetsIn("old", "operator-old"));
  // Its keeper can't be killed instead: the daemon would go on.
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(OperatorTlsTest, ACertificateIsTakenBackAndItsSuccessorOfTheSameNameIsNot) {
  const Channel lost = Connect("old", "operator-old");
  ASSERT_TRUE(GetStats(lost).ok());
  const ProgramEnd digest = RunProgram(
      {"/bin/sh", "-c", "openssl x509 -noout -fingerprint -sha256 -in " + File("operator-old.pem")});
  ASSERT_EQ(digest.exit_code, 0) << digest.output;
  const std::string fingerprint = digest.output.substr(digest.output.find('=') + 1);
  std::ofstream(File("access")) << "[lost]\ncertificate = " << fingerprint
                                << "\nrole = none\n[operators]\nsan = localhost\nrole = operator\n";
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logs("access rules read category=audit")) << daemon_->Log();
  for (const Channel& channel : {lost, Connect("old", "operator-old")}) {
    const grpc::Status refused = GetStats(channel);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED) << refused.error_message();
    EXPECT_TRUE(absl::StrContains(refused.error_message(), "rule [lost] gives it none"))
        << refused.error_message();
  }
  EXPECT_TRUE(LetsIn("old", "successor-old"));
}

TEST_F(OperatorTlsTest, ANameThatLeavesTheRulesIsRefusedOnConnectionsThatAreOpen) {
  const Channel open = Connect("old", "operator-old");
  grpc::ClientContext watch_context;
  const auto watch = health::Health::NewStub(open)->Watch(&watch_context, health::HealthCheckRequest());
  health::HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  ASSERT_TRUE(GoOnServing(open).ok());
  ASSERT_TRUE(GetStats(open).ok());

  std::ofstream(File("access")) << "[operators]\nsan = another.example\nrole = operator\n";
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logs("access rules read category=audit")) << daemon_->Log();
  const grpc::Status refused = GoOnServing(open);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED) << refused.error_message();
  EXPECT_EQ(GetStats(open).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(GetStats(Connect("old", "operator-old")).error_code(), grpc::StatusCode::PERMISSION_DENIED);

  // Both calls came by the connection that was open.
  ASSERT_TRUE(Logs("operator call refused category=audit method=Drain")) << daemon_->Log();
  const std::string served = PeerIn(Lines("operator call category=audit method=Drain")[0]);
  EXPECT_NE(served, "");
  EXPECT_EQ(PeerIn(Lines("operator call refused category=audit method=Drain")[0]), served) << daemon_->Log();
  watch_context.TryCancel();
  EXPECT_FALSE(watch->Read(&response));
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED) << "it had ended by itself";
}

}  // namespace
}  // namespace kvpool
