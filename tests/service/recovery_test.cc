// A daemon that ends without a word, and the next one, with one keeper: what it finds, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "server/base/shared_memory.h"
#include "server/keeper/inventory.h"
#include "server/keeper/keeper_frames.h"
#include "server/keeper/keeper_link.h"
#include "tests/service/service_fixture.h"
#include "tests/support/access.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kCapacity = 32 << 20;
constexpr uint64_t kSlab = 4 << 20;

// An inventory that is served by a thread, one daemon after the other.
class ServedKeeper {
 public:
  explicit ServedKeeper(size_t most = 1000) : inventory(most) {}
  ~ServedKeeper() { Await(); }
  // The end of a socket pair for a new daemon. REQUIRES: the one before has hung up.
  UniqueFd Connect() {
    Await();
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
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
};

// A process that does nothing until it is killed.
class Sleeper {
 public:
  Sleeper() : pid_(fork()) {
    if (pid_ == 0) {
      // Not only forked: it would hold this process's end of a socket pair open.
      execlp("sleep", "sleep", "3600", static_cast<char*>(nullptr));
      _exit(127);
    }
  }
  ~Sleeper() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  PeerCredentials credentials() const {
    return {.pid = pid_,
            .uid = 1000,
            .process = static_cast<uint64_t>(pid_),
            .pidfd = std::make_shared<const UniqueFd>(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)))};
  }

 private:
  pid_t pid_;
};

class RecoveryTest : public testing::Test {
 protected:
  absl::Status Start() {
    End();
    auto link = KeeperLink::Join(keeper_.Connect());
    if (!link.ok()) return link.status();
    link_ = *std::move(link);
    options_.housekeeping_thread = options_.device_threads = false;
    options_.access = MakeAccess();
    options_.device_capacity_bytes = {kCapacity};
    if (options_.slab_bytes == 0) options_.slab_bytes = kSlab;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice({.capacity_bytes = kCapacity, .try_huge_pages = false}));
    auto daemon = Daemon::Start(options_, std::move(devices), &clock_, link_.get());
    if (!daemon.ok()) {
      link_.reset();
      return daemon.status();
    }
    daemon_ = *std::move(daemon);
    return absl::OkStatus();
  }
  void End() {
    daemon_.reset();
    link_.reset();
  }
  v1::OpenSession Request() const {
    v1::OpenSession request;
    v1::LayerGroup* group = request.mutable_layout()->add_groups();
    request.mutable_layout()->set_encoding(v1::ENCODING_OPAQUE);
    request.mutable_layout()->set_block_bytes(4096);
    group->set_name("full");
    group->add_layers(0);
    group->set_tokens_per_block(16);
    request.mutable_fingerprint()->set_digest("recovery");
    return request;
  }
  std::unique_ptr<Engine> Open(const PeerCredentials& credentials) {
    auto engine = std::make_unique<Engine>(daemon_.get(), "engine", credentials);
    opened_ = engine->Open(Request());
    if (!opened_.ok()) return nullptr;
    for (int i = 0; i < 4; ++i) {
      engine->MapSlabs();
      daemon_->HousekeepOnce();
    }
    return engine;
  }
  v1::StateCounts Blocks() {
    v1::ListSpacesResponse spaces;
    EXPECT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
    return spaces.spaces_size() == 1 ? spaces.spaces(0).blocks() : v1::StateCounts();
  }

  ServedKeeper keeper_;
  FakeClock clock_;
  DaemonOptions options_;
  std::unique_ptr<KeeperLink> link_;
  std::unique_ptr<Daemon> daemon_;
  absl::Status opened_;
};

TEST_F(RecoveryTest, SealedBlocksAreCachedAndHeldOnesStayUntilTheirProcessEnds) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<std::string> keys = Keys("k", 6);
  const std::vector<uint64_t> blocks = engine->Lease(8);
  ASSERT_EQ(blocks.size(), 8u);
  engine->Seal({blocks.begin(), blocks.begin() + 6}, keys);
  engine->Release({blocks.begin() + 2, blocks.begin() + 6});
  const std::string seed = engine->opened.hash_seed();
  const uint64_t session = engine->opened.session();
  engine.reset();

  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Start().ok());
    daemon_->HousekeepOnce();
    const v1::StateCounts counts = Blocks();
    EXPECT_EQ(counts.cached(), 4u);
    EXPECT_EQ(counts.sealed(), 2u);
    EXPECT_EQ(counts.quarantined(), 3u) << "two leases and the sink";
  }
  Sleeper other;
  auto second = Open(other.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  EXPECT_EQ(second->opened.hash_seed(), seed);
  EXPECT_GT(second->opened.session(), session) << "its pages of holds would be taken for the old one's";
  EXPECT_EQ(second->Match(keys).groups(0).blocks_size(), 6);
  process.Kill();
  daemon_->HousekeepOnce();
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.quarantined(), 0u);
  EXPECT_EQ(counts.sealed(), 6u);
}

TEST_F(RecoveryTest, StateOfAnotherVersionIsRefusedAndBothAreNamed) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  ASSERT_NE(Open(process.credentials()), nullptr) << opened_;
  End();
  {
    auto link = KeeperLink::Join(keeper_.Connect());
    ASSERT_TRUE(link.ok()) << link.status();
    for (KeptThing& thing : (*link)->TakeInherited()) {
      if (thing.kind != KeptKind::kTable) continue;
      auto memory = SharedMemory::Map(std::move(thing.fd));
      ASSERT_TRUE(memory.ok()) << memory.status();
      memory->data()[8] = 99;
    }
    (*link)->Leave();
  }
  const absl::Status started = Start();
  EXPECT_EQ(started.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(started.message()), HasSubstr("version 99"));
  EXPECT_THAT(std::string(started.message()), HasSubstr("version 1"));
}

TEST_F(RecoveryTest, ASpaceThatHasOtherSizesTodayIsLostAndNothingElse) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  ASSERT_NE(Open(process.credentials()), nullptr) << opened_;
  options_.slab_bytes = 2 * kSlab;
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().capacity(), 0u);
  daemon_->HousekeepOnce();
  End();
  keeper_.Await();
  EXPECT_EQ(keeper_.inventory.size(), 0u) << "its memory is held for nobody";
}

TEST_F(RecoveryTest, WhatReleasesUnheardIsRefused) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(2);
  v1::Operation operation;
  v1::Sequence* sequence = operation.mutable_compact()->mutable_sequence();
  for (const uint64_t block : blocks) sequence->add_blocks(block);
  sequence->set_last_block_tokens(16);
  operation.mutable_compact()->mutable_keep()->add_positions(3);
  const v1::OperationResult result = engine->Do(operation);
  EXPECT_EQ(result.code(), static_cast<int>(absl::StatusCode::kUnimplemented)) << result.message();
  EXPECT_THAT(result.message(), HasSubstr("--keeper=on"));
}

class KeeperLinkTest : public testing::Test {
 protected:
  // A descriptor that tells which one it is.
  static UniqueFd Pipe(char word) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    EXPECT_EQ(write(ends[1], &word, 1), 1);
    close(ends[1]);
    return UniqueFd(ends[0]);
  }
  static char WordIn(const UniqueFd& fd) {
    char word = 0;
    EXPECT_EQ(read(fd.get(), &word, 1), 1);
    return word;
  }
};

TEST_F(KeeperLinkTest, WhatWasKeptIsThereInOrderAndWhatWasDroppedIsNot) {
  ServedKeeper keeper;
  {
    auto link = *KeeperLink::Join(keeper.Connect());
    auto a = link->Keep(KeptKind::kSlab, "a", Pipe('a').get());
    {
      const auto b = link->Keep(KeptKind::kSlab, "b", Pipe('b').get());
      ASSERT_TRUE(b.ok());
    }
    auto c = link->Keep(KeptKind::kMember, std::string(kMaxKeptFacts, 'c'), Pipe('c').get());
    ASSERT_TRUE(a.ok() && c.ok());
    link->Leave();
  }
  auto link = *KeeperLink::Join(keeper.Connect());
  std::vector<KeptThing> things = link->TakeInherited();
  ASSERT_EQ(things.size(), 2u);
  EXPECT_EQ(things[0].facts, "a");
  EXPECT_EQ(WordIn(things[0].fd), 'a');
  EXPECT_EQ(things[1].kind, KeptKind::kMember);
  EXPECT_EQ(things[1].facts, std::string(kMaxKeptFacts, 'c'));
  EXPECT_EQ(WordIn(things[1].fd), 'c');
  // Ids go on behind those that are taken.
  EXPECT_TRUE(link->Keep(KeptKind::kSlab, "d", Pipe('d').get()).ok());
  things.clear();
  link->Flush();
  link->Leave();
  keeper.Await();
  EXPECT_EQ(keeper.inventory.size(), 0u);
}

TEST_F(KeeperLinkTest, AKeeperThatIsFullSaysSo) {
  ServedKeeper keeper(1);
  auto link = *KeeperLink::Join(keeper.Connect());
  const auto first = link->Keep(KeptKind::kSlab, "", Pipe('a').get());
  const auto second = link->Keep(KeptKind::kSlab, "", Pipe('b').get());
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("RLIMIT_NOFILE"));
  link->Leave();
}

TEST_F(KeeperLinkTest, WhoSpeaksAnotherVersionIsNotServed) {
  ServedKeeper keeper;
  const UniqueFd socket = keeper.Connect();
  KeeperFrame frame;
  frame.version = 7;
  ASSERT_TRUE(SendKeeperFrame(socket.get(), frame).ok());
  keeper.Await();
  EXPECT_EQ(keeper.ended.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(keeper.ended.message()), HasSubstr("version 7"));
  EXPECT_THAT(std::string(keeper.ended.message()), HasSubstr("speaks 1"));
}

TEST_F(KeeperLinkTest, GarbageIsNotServed) {
  ServedKeeper keeper;
  const UniqueFd socket = keeper.Connect();
  ASSERT_EQ(send(socket.get(), "hello", 5, 0), 5);
  keeper.Await();
  EXPECT_EQ(keeper.ended.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(KeeperLinkTest, WithoutItsKeeperADaemonGoesOn) {
  std::unique_ptr<KeeperLink> link;
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  {
    Inventory inventory(10);
    const UniqueFd theirs(pair[0]);
    std::thread keeper([&] { EXPECT_TRUE(inventory.Serve(theirs.get()).ok()); });
    link = *KeeperLink::Join(UniqueFd(pair[1]));
    keeper.join();
  }
  EXPECT_TRUE(link->Keep(KeptKind::kSlab, "", Pipe('a').get()).ok());
  link->Flush();
}

}  // namespace
}  // namespace kvpool
