#include "tests/tiers/s3_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/s3_listing.h"
#include "tests/support/send_signal.h"

namespace kvpool {
namespace {

enum Port : size_t {
  kMaster,
  kMasterGrpc,
  kVolume,
  kVolumeGrpc,
  kFiler,
  kFilerGrpc,
  kS3,
  kS3Grpc,
  kS3Tls,
};

// What it leaves in a folder that all share.
constexpr std::pair<const char*, Port> kSockets[] = {
    {"master", kMasterGrpc}, {"volume", kVolumeGrpc}, {"filer", kFilerGrpc}, {"s3", kS3Grpc}};

}  // namespace

void WriteCredentials(const std::string& path, const std::string& access_key, const std::string& secret_key,
                      const std::string& profile) {
  const std::string made = path + ".new";
  std::ofstream(made) << "# of a test\n[" << profile << "]\naws_access_key_id = " << access_key
                      << "\naws_secret_access_key=" << secret_key << "\n";
  chmod(made.c_str(), 0600);
  std::rename(made.c_str(), path.c_str());
}

std::string S3Server::Program() { return access(KVPOOL_WEED, X_OK) == 0 ? KVPOOL_WEED : ""; }

S3Server::S3Server() {
  certificates_ = MakeCertificates(folder_.path(), "IP:127.0.0.1");
  credentials_ = folder_.path() + "/credentials";
  WriteCredentials(credentials_, kTestAccessKey, kTestSecretKey);
  std::ofstream(folder_.path() + "/s3.json")
      << R"({"identities":[{"name":"kv","credentials":[{"accessKey":")" << kTestAccessKey
      << R"(","secretKey":")" << kTestSecretKey
      << R"("}],"actions":["Admin","Read","Write","List","Tagging"]}]})";
  mkdir((folder_.path() + "/data").c_str(), 0700);
  // Another process may take a port between the look and the use.
  for (int i = 0; i < 5; ++i) {
    for (uint16_t& port : ports_) port = FreePort();
    if (Launch()) return;
  }
  ADD_FAILURE() << "weed does not start: " << folder_.path();
}

S3Server::~S3Server() {
  Kill();
  for (const auto& [who, port] : kSockets)
    std::remove(absl::StrCat("/tmp/seaweedfs-", who, "-grpc-", ports_[port], ".sock").c_str());
}

S3Endpoint S3Server::endpoint() const {
  return {.tls = false, .host = "127.0.0.1", .port = ports_[kS3], .bucket = kTestBucket};
}

S3Endpoint S3Server::tls_endpoint() const {
  return {.tls = true, .host = "127.0.0.1", .port = ports_[kS3Tls], .bucket = kTestBucket};
}

S3Endpoint S3Server::virtual_endpoint() const {
  S3Endpoint endpoint = S3Server::endpoint();
  endpoint.host = "localhost";
  endpoint.virtual_host = true;
  return endpoint;
}

bool S3Server::Launch() {
  const std::string folder = folder_.path();
  const auto port = [this](const char* name, Port which) {
    return absl::StrCat("-", name, "=", ports_[which]);
  };
  std::vector<std::string> words = {"weed",
                                    "server",
                                    "-dir=" + folder + "/data",
                                    "-ip=127.0.0.1",
                                    "-ip.bind=127.0.0.1",
                                    "-master.telemetry=false",
                                    "-master.electionTimeout=1s",  // A start after a kill waits for it.
                                    "-master.volumeSizeLimitMB=1024",
                                    "-volume.max=40",
                                    "-volume.minFreeSpace=1MiB",
                                    "-volume.preStopSeconds=0",
                                    port("master.port", kMaster),
                                    port("master.port.grpc", kMasterGrpc),
                                    port("volume.port", kVolume),
                                    port("volume.port.grpc", kVolumeGrpc),
                                    "-filer",
                                    port("filer.port", kFiler),
                                    port("filer.port.grpc", kFilerGrpc),
                                    "-filer.localSocket=" + folder + "/filer.sock",
                                    "-s3",
                                    port("s3.port", kS3),
                                    port("s3.port.grpc", kS3Grpc),
                                    port("s3.port.https", kS3Tls),
                                    "-s3.port.iceberg=0",
                                    "-s3.port.lance=0",
                                    "-s3.iam=false",
                                    "-s3.domainName=localhost",
                                    "-s3.localSocket=" + folder + "/s3.sock",
                                    "-s3.config=" + folder + "/s3.json",
                                    "-s3.cert.file=" + certificates_.node,
                                    "-s3.key.file=" + certificates_.node_key};
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string program = Program(), log = folder + "/log";
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    // It looks for its configuration at home and where it is.
    if (getppid() == parent && chdir(folder.c_str()) == 0 && setenv("HOME", folder.c_str(), 1) == 0 &&
        dup2(out, STDOUT_FILENO) >= 0 && dup2(out, STDERR_FILENO) >= 0) {
      execv(program.c_str(), argv.data());
    }
    _exit(127);
  }
  bool gone = false;
  const bool up = Eventually([&] {
    gone = waitpid(pid_, nullptr, WNOHANG) == pid_;
    if (gone) return true;
    // Its own bucket: on the port there may be the server of another test. It makes the bucket as soon as all its parts are up.
    const int status = Ask({.method = "PUT"}).status;
    if (status != 200 && status != 409) {
      usleep(50000);
      return false;
    }
    return Ask({.method = "PUT", .object = "up", .text = "up"}).status == 200;
  });
  if (gone) pid_ = -1;
  return up && !gone;
}

void S3Server::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void S3Server::Signal(int signal) const { SendSignal(pid_, signal); }

void S3Server::Restart() {
  Kill();
  // Its ports may be somebody's for a moment.
  ASSERT_TRUE(Eventually([&] { return Launch(); }));
}

S3Response S3Server::Ask(S3Request request) const {
  auto credentials = AwsCredentialSource::Open({.file = credentials_});
  EXPECT_TRUE(credentials.ok()) << credentials.status();
  auto client = S3Client::Open({.endpoint = endpoint(), .io_timeout = kTestLimit}, *std::move(credentials));
  EXPECT_TRUE(client.ok()) << client.status();
  bool over = false;
  S3Response answer;
  request.attempts = S3Client::kMostAttempts;
  request.done = [&](const S3Response* response) {
    over = true;
    if (response != nullptr) answer = *response;
  };
  (*client)->Send(std::move(request));
  while (!over) (*client)->Turn(S3Client::Clock::now() + kTestLimit);
  return answer;
}

std::string S3Server::Get(const std::string& object) const {
  std::string bytes;
  S3Request request{.object = object};
  request.receive = [&bytes](const S3Response&, std::string_view more) {
    bytes.append(more);
    return true;
  };
  EXPECT_EQ(Ask(std::move(request)).status, 200) << object;
  return bytes;
}

void S3Server::Put(const std::string& object, const std::string& bytes) const {
  EXPECT_EQ(Ask({.method = "PUT", .object = object, .text = bytes}).status, 200) << object;
}

void S3Server::Delete(const std::string& object) const {
  EXPECT_EQ(Ask({.method = "DELETE", .object = object}).status, 204) << object;
}

std::vector<std::string> S3Server::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  std::string token;
  do {
    S3Request request{.query = {{"list-type", "2"}, {"prefix", prefix}}};
    if (!token.empty()) request.query.emplace_back("continuation-token", token);
    const auto page = ParseS3Page(Ask(std::move(request)).body);
    EXPECT_TRUE(page.has_value());
    if (!page.has_value()) break;
    for (const S3Object& object : page->objects) names.push_back(object.name);
    token = page->next;
  } while (!token.empty());
  return names;
}

S3Tier::Options S3Options(const S3Server& server) {
  static std::atomic<int> last{0};
  S3Tier::Options options;
  options.client = {.endpoint = server.endpoint(),
                    .connect_timeout = kTestLimit,
                    .io_timeout = kTestLimit,
                    .first_pause = std::chrono::milliseconds(10),
                    .longest_pause = std::chrono::milliseconds(200)};
  options.credentials.file = server.credentials_file();
  options.prefix = absl::StrCat("test", ++last);
  return options;
}

std::unique_ptr<S3Tier> OpenS3(const S3Tier::Options& options) {
  auto tier = S3Tier::Open(options);
  EXPECT_TRUE(tier.ok()) << tier.status();
  return tier.ok() ? *std::move(tier) : nullptr;
}

}  // namespace kvpool
