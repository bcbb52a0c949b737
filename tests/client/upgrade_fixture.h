// A daemon with a keeper, which starts another one when it dies or gives way to it.
#ifndef KVPOOL_TESTS_CLIENT_UPGRADE_FIXTURE_H_
#define KVPOOL_TESTS_CLIENT_UPGRADE_FIXTURE_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/session.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"

namespace kvpool {

inline std::string TextOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class UpgradeTest : public SessionTest {
 protected:
  void TearDown() override {
    if (daemon_ == nullptr || daemon_->pid() == 0) return;
    const pid_t daemon = DaemonPid();
    daemon_->Kill();
    // It would outlive the test.
    if (keeper_ && daemon > 0) kill(daemon, SIGKILL);
  }
  void StartWithKeeper(std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), "--keeper=on");
    StartDaemon("32MiB", std::move(flags));
    keeper_ = true;
  }
  // A daemon answers before it says in its file which process it is.
  pid_t DaemonPid() const {
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      const std::string text = TextOf(daemon_->directory() + "/kvpoold.json");
      const size_t at = text.find("\"pid\":");
      if (at != std::string::npos) return atoi(text.c_str() + at + 6);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
  }
  std::unique_ptr<tools::OperatorClient> Operator() const {
    auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  // What the next daemon says of it.
  absl::StatusOr<v1::UpgradeInfo> Upgrade(const v1::UpgradeRequest& request = {}) const {
    const auto client = Operator();
    const auto before = client->Upgrade(request);
    if (!before.ok()) return before.status();
    const auto after = client->AwaitAfter(before->daemon_epoch(), absl::Now() + absl::Seconds(60));
    if (!after.ok()) return after.status();
    return after->last_upgrade();
  }
  absl::StatusOr<v1::UpgradeInfo> UpgradeTo(const std::string& binary) const {
    v1::UpgradeRequest request;
    request.set_binary(binary);
    return Upgrade(request);
  }
  // The error's words; the daemon that answered it is the one that serves.
  std::string Refusal(const v1::UpgradeRequest& request) const {
    const pid_t daemon = DaemonPid();
    const auto refused = Operator()->Upgrade(request);
    EXPECT_FALSE(refused.ok());
    EXPECT_TRUE(Operator()->GetStats({}).ok());
    EXPECT_EQ(DaemonPid(), daemon);
    return std::string(refused.status().message());
  }
  std::string RefusalOf(const std::string& binary) const {
    v1::UpgradeRequest request;
    request.set_binary(binary);
    return Refusal(request);
  }
  // A copy of a program, which nobody else may write to.
  std::string CopyOf(const std::string& program, const std::string& name) const {
    const std::string path = daemon_->directory() + "/" + name;
    std::filesystem::copy_file(program, path);
    EXPECT_EQ(chmod(path.c_str(), 0755), 0);
    return path;
  }
  std::vector<PrefixKey> KeysOf(const Session& session, uint32_t seed, size_t blocks) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(seed, blocks), kTokensPerBlock);
  }
  // How many of the keys are found, once something is: until the session is back nothing is.
  size_t Found(Session* session, const std::vector<PrefixKey>& keys) const {
    size_t found = 0;
    for (const Deadline deadline = Soon(); found == 0 && std::chrono::steady_clock::now() < deadline;) {
      auto pending = session->Match(KeyBytes(keys));
      if (!pending.ok()) return 0;
      const auto hit = pending->Wait(Soon());
      if (!hit.ok()) return 0;
      found = hit->groups[0].size();
      for (size_t i = 0; i < found; ++i)
        EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
    }
    return found;
  }

  bool keeper_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_CLIENT_UPGRADE_FIXTURE_H_
