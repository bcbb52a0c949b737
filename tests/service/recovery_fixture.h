// Daemons that end without a word, one after the other, with one keeper.
#ifndef KVPOOL_TESTS_SERVICE_RECOVERY_FIXTURE_H_
#define KVPOOL_TESTS_SERVICE_RECOVERY_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/keeper/inventory.h"
#include "server/keeper/keeper_link.h"
#include "tests/service/service_fixture.h"

namespace kvpool {

// An inventory that is served by a thread, one daemon after the other.
class ServedKeeper {
 public:
  explicit ServedKeeper(size_t most = 1000) : inventory(most) {}
  ~ServedKeeper() { Await(); }
  // The daemon's end can say nothing any more, and does not know it.
  void Cut() { shutdown(theirs_, SHUT_RDWR); }
  // The end of a socket pair for a new daemon. REQUIRES: the one before has hung up.
  UniqueFd Connect() {
    Await();
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    theirs_ = pair[1];
    thread_ = std::thread([this, socket = UniqueFd(pair[0])] {
      while ((ended = inventory.Serve(socket.get())).ok()) {
      }
    });
    return UniqueFd(pair[1]);
  }
  // Waits until the daemon has hung up.
  void Await() {
    if (thread_.joinable()) thread_.join();
  }

  Inventory inventory;
  absl::Status ended;

 private:
  std::thread thread_;
  int theirs_ = -1;
};

// As a daemon with the devices of these tests joins its keeper.
absl::StatusOr<std::unique_ptr<KeeperLink>> JoinKeeper(UniqueFd socket,
                                                       const KeeperLink::Options& options = {});

// A process that does nothing until it is killed.
class Sleeper {
 public:
  Sleeper();
  ~Sleeper() { Kill(); }
  void Kill();
  PeerCredentials credentials() const;

 private:
  pid_t pid_;
};

class RecoveryTest : public testing::Test {
 protected:
  // The next daemon, once the one before has ended.
  absl::Status Start();
  void End();
  // The daemon ends, and has left what it would have left had it been killed: what its end does to that is undone.
  void Kill();
  v1::OpenSession Request() const;
  std::unique_ptr<Engine> Open(const PeerCredentials& credentials);
  // Another member of its session; it has mapped nothing yet.
  std::unique_ptr<Engine> Join(const Engine& inviter, const v1::Role& role,
                               const PeerCredentials& credentials) const;
  // A member comes back, and maps what it is sent.
  std::unique_ptr<Engine> ComeBack(const Engine& before, const PeerCredentials& credentials) const;
  // Why a member can't.
  absl::Status Refusal(const Engine& before, const PeerCredentials& credentials) const;
  v1::StateCounts Blocks();
  v1::GetRecoveryResponse Recovery();
  // Of the only space.
  v1::RecoveredSpace RecoveredSpace();

  ServedKeeper keeper_of_test_;
  ServedKeeper* keeper_ = &keeper_of_test_;
  FakeClock clock_;
  DaemonOptions options_;
  std::unique_ptr<KeeperLink> link_;
  std::unique_ptr<Daemon> daemon_;
  absl::Status opened_;
  std::string digest_ = "recovery", tenant_;
  uint32_t ranks_ = 1;
  uint64_t capacity_bytes_ = 32 << 20, max_space_bytes_ = 0;
  v1::Role role_;  // The member that opens has it.
  bool warmup_ = false;
  bool strided_ = false;                           // Blocks hold K and V, which a device can read.
  bool gives_back_ = false, takes_holes_ = false;  // Engines that open from now on do.
  uint32_t guaranteed_ = 0;
  uint64_t block_bytes_ = 4096;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_RECOVERY_FIXTURE_H_
