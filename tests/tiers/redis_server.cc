#include "tests/tiers/redis_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/support/unique_fd.h"
#include "tests/support/send_signal.h"

namespace kvpool {
namespace {

sockaddr_in Local(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

bool Answers(uint16_t port) {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = Local(port);
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

std::string Text(const RespReply& reply) {
  switch (reply.kind) {
    case RespReply::Kind::kError:
      return "-" + std::string(reply.text);
    case RespReply::Kind::kInteger:
      return absl::StrCat(reply.number);
    case RespReply::Kind::kArray:
      return absl::StrJoin(reply.items, " ",
                           [](std::string* out, const RespReply& item) { *out += Text(item); });
    case RespReply::Kind::kNil:
      return "(nil)";
    case RespReply::Kind::kText:
    case RespReply::Kind::kBytes:
      return std::string(reply.text);
  }
  return "";
}

}  // namespace

bool Eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kTestLimit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

uint16_t FreePort() {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = Local(0);
  socklen_t size = sizeof(address);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  return ntohs(address.sin_port);
}

TestCertificates MakeCertificates(const std::string& folder, const std::string& name) {
  const auto at = [&](const std::string& file) { return folder + "/" + file; };
  const auto run = [](const std::string& command) {
    EXPECT_EQ(std::system((command + " 2>/dev/null").c_str()), 0) << command;
  };
  const std::string key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes ";
  run(absl::StrCat(key, "-x509 -days 2 -subj /CN=authority -keyout ", at("ca.key"), " -out ", at("ca.crt")));
  std::ofstream(at("extensions")) << "subjectAltName = " << name << "\n";
  for (const char* const who : {"node", "client"}) {
    run(absl::StrCat(key, "-subj /CN=", who, " -keyout ", at(who), ".key -out ", at(who), ".csr"));
    run(absl::StrCat("openssl x509 -req -days 2 -in ", at(who), ".csr -CA ", at("ca.crt"), " -CAkey ",
                     at("ca.key"), " -CAcreateserial -extfile ", at("extensions"), " -out ", at(who),
                     ".crt"));
  }
  return {at("ca.crt"), at("node.crt"), at("node.key"), at("client.crt"), at("client.key")};
}

std::string RedisServer::Program() {
  // Debian has the server under the first name in redis-tools, which starts no service.
  for (const char* const program :
       {"/usr/bin/redis-check-rdb", "/usr/bin/redis-server", "/usr/bin/valkey-server"}) {
    if (access(program, X_OK) == 0) return program;
  }
  return "";
}

RedisServer::RedisServer(const Options& options) : options_(options) {
  // Another process may take a port between the look and the use.
  for (int i = 0; i < 20; ++i) {
    port_ = FreePort();
    bus_port_ = FreePort();
    if (Launch()) return;
  }
  ADD_FAILURE() << "redis-server does not start: " << folder_.path();
}

RedisServer::~RedisServer() { Kill(); }

bool RedisServer::Launch() {
  std::vector<std::string> words = {"redis-server",
                                    "--bind",
                                    "127.0.0.1",
                                    "--dir",
                                    folder_.path(),
                                    "--save",
                                    "",
                                    "--appendonly",
                                    "no",
                                    "--logfile",
                                    folder_.path() + "/log"};
  if (options_.tls == nullptr) {
    words.insert(words.end(), {"--port", absl::StrCat(port_)});
  } else {
    words.insert(words.end(),
                 {"--port", "0", "--tls-port", absl::StrCat(port_), "--tls-ca-cert-file", options_.tls->ca,
                  "--tls-cert-file", options_.tls->node, "--tls-key-file", options_.tls->node_key});
  }
  if (options_.cluster) {
    words.insert(words.end(), {"--cluster-enabled", "yes", "--cluster-port", absl::StrCat(bus_port_),
                               "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000"});
  }
  words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::remove((folder_.path() + "/log").c_str());
  const std::string program = Program();
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent) execv(program.c_str(), argv.data());
    _exit(127);
  }
  bool gone = false;
  const bool up = Eventually([&] {
    gone = waitpid(pid_, nullptr, WNOHANG) == pid_;
    // Its own word: on the port there may be the server of another test, which ours could not bind then.
    std::ifstream log(folder_.path() + "/log");
    const std::string said{std::istreambuf_iterator<char>(log), {}};
    return gone || (absl::StrContains(said, "Ready to accept connections") && Answers(port_));
  });
  if (gone) pid_ = -1;
  return up && !gone;
}

void RedisServer::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void RedisServer::Signal(int signal) const { SendSignal(pid_, signal); }

void RedisServer::Restart() {
  Kill();
  // Its port may be somebody's for a moment.
  ASSERT_TRUE(Eventually([&] { return Launch(); }));
}

std::string RedisServer::Command(const std::vector<std::string>& words) const {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = Local(port_);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return "-no server";
  std::string text, input;
  AppendRespCommand(std::vector<std::string_view>(words.begin(), words.end()), &text);
  if (send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) return "-";
  RespReply reply;
  size_t used = 0;
  char bytes[65536];
  while (ParseRespReply(input, {.bytes = 1 << 30, .items = 1 << 20}, &reply, &used) == RespParse::kPart) {
    const ssize_t got = recv(fd.get(), bytes, sizeof(bytes), 0);
    if (got <= 0) return "-closed";
    input.append(bytes, static_cast<size_t>(got));
  }
  return Text(reply);
}

std::vector<std::string> RedisServer::Keys(const std::string& pattern) const {
  const std::string keys = Command({"KEYS", pattern});
  return absl::StrSplit(keys, ' ', absl::SkipEmpty());
}

std::string RedisServer::Info(const std::string& section, const std::string& field) const {
  const std::string info = Command({"INFO", section});
  for (absl::string_view line : absl::StrSplit(info, "\r\n")) {
    if (absl::ConsumePrefix(&line, field + ":")) return std::string(line);
  }
  return "";
}

// --------------------------------------------------------------------------------------------------- cluster

RedisCluster::RedisCluster(size_t nodes) {
  for (size_t i = 0; i < nodes; ++i) {
    RedisServer::Options options;
    options.cluster = true;
    nodes_.push_back(std::make_unique<RedisServer>(options));
  }
  for (size_t i = 0; i < nodes; ++i) {
    const size_t first = i * kRespSlots / nodes, last = (i + 1) * kRespSlots / nodes - 1;
    EXPECT_EQ(nodes_[i]->Command({"CLUSTER", "ADDSLOTSRANGE", absl::StrCat(first), absl::StrCat(last)}),
              "OK");
    EXPECT_EQ(nodes_[i]->Command({"CLUSTER", "SET-CONFIG-EPOCH", absl::StrCat(i + 1)}), "OK");
    std::fill(owners_.begin() + static_cast<ptrdiff_t>(first),
              owners_.begin() + static_cast<ptrdiff_t>(last) + 1, i);
  }
  for (size_t i = 1; i < nodes; ++i) {
    const std::string bus = nodes_[i]->Command({"CONFIG", "GET", "cluster-port"}).substr(13);
    EXPECT_EQ(nodes_[0]->Command({"CLUSTER", "MEET", "127.0.0.1", absl::StrCat(nodes_[i]->port()), bus}),
              "OK");
  }
  for (const auto& node : nodes_) {
    EXPECT_TRUE(Eventually([&] {
      const std::string info = node->Command({"CLUSTER", "INFO"});
      return absl::StrContains(info, "cluster_state:ok") && absl::StrContains(info, "cluster_slots_ok:16384");
    }));
  }
}

void RedisCluster::BeginMigration(uint16_t slot, size_t to) {
  const size_t from = owners_[slot];
  EXPECT_EQ(nodes_[to]->Command({"CLUSTER", "SETSLOT", absl::StrCat(slot), "IMPORTING", Id(from)}), "OK");
  EXPECT_EQ(nodes_[from]->Command({"CLUSTER", "SETSLOT", absl::StrCat(slot), "MIGRATING", Id(to)}), "OK");
}

void RedisCluster::Migrate(uint16_t slot, size_t to) {
  const size_t from = owners_[slot];
  BeginMigration(slot, to);
  while (true) {
    const std::string keys = nodes_[from]->Command({"CLUSTER", "GETKEYSINSLOT", absl::StrCat(slot), "100"});
    if (keys.empty()) break;
    std::vector<std::string> words = {
        "MIGRATE", "127.0.0.1", absl::StrCat(nodes_[to]->port()), "", "0", "10000", "REPLACE", "KEYS"};
    for (const absl::string_view key : absl::StrSplit(keys, ' ')) words.emplace_back(key);
    const std::string moved = nodes_[from]->Command(words);
    ASSERT_TRUE(moved == "OK" || moved == "NOKEY") << moved;
  }
  for (const size_t node : {to, from}) {
    EXPECT_EQ(nodes_[node]->Command({"CLUSTER", "SETSLOT", absl::StrCat(slot), "NODE", Id(to)}), "OK");
  }
  owners_[slot] = to;
}

RespTier::Options RespOptions(const RespEndpoint& endpoint) {
  return {.endpoint = endpoint,
          .connect_timeout = kTestLimit,
          .io_timeout = kTestLimit,
          .first_pause = std::chrono::milliseconds(10)};
}

std::unique_ptr<RespTier> OpenResp(const RespTier::Options& options) {
  auto tier = RespTier::Open(options);
  EXPECT_TRUE(tier.ok()) << tier.status();
  return tier.ok() ? *std::move(tier) : nullptr;
}

}  // namespace kvpool
