// A daemon with a keeper, killed under its engines: what was sealed is found again, and no block has two owners.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The daemon's pid, as kvpoold.json has it; 0: none serves.
pid_t PidIn(const std::string& directory) {
  std::ifstream file(directory + "/kvpoold.json");
  std::stringstream text;
  text << file.rdbuf();
  const size_t at = text.str().find("\"pid\":");
  return at == std::string::npos ? 0 : atoi(text.str().c_str() + at + 6);
}

// Kills the daemon, not its keeper, and returns when the next one serves; 0: none came.
pid_t KillDaemon(const DaemonProcess& daemon) {
  const pid_t killed = PidIn(daemon.directory());
  if (killed <= 0 || kill(killed, SIGKILL) != 0) return 0;
  for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
    const pid_t next = PidIn(daemon.directory());
    if (next != 0 && next != killed) return next;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 0;
}

class KeeperTest : public SessionTest {
 protected:
  void StartWithKeeper(const std::string& capacity = "32MiB", std::vector<std::string> flags = {}) {
    flags.push_back("--keeper=on");
    StartDaemon(capacity, std::move(flags));
    ASSERT_NE(PidIn(daemon_->directory()), daemon_->pid()) << "the daemon is its own keeper";
  }
  std::vector<PrefixKey> KeysOf(const Session& session, uint32_t seed, size_t blocks) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(seed, blocks), kTokensPerBlock);
  }
  absl::StatusOr<MatchHit> Match(Session* session, absl::Span<const PrefixKey> keys) const {
    auto pending = session->Match(KeyBytes(keys));
    if (!pending.ok()) return pending.status();
    return pending->Wait(Soon());
  }
  v1::StateCounts Counts() const {
    auto client = tools::OperatorClient::Open({.socket = daemon_->socket()});
    if (!client.ok()) return {};
    const auto spaces = (*client)->ListSpaces({});
    return spaces.ok() && spaces->spaces_size() == 1 ? spaces->spaces(0).blocks() : v1::StateCounts();
  }
  // The log once the text is in it: a thread of the daemon's own writes it.
  std::string AwaitInLog(const std::string& text) const {
    std::string log = daemon_->Log();
    for (const Deadline deadline = Soon();
         log.find(text) == std::string::npos && std::chrono::steady_clock::now() < deadline;
         log = daemon_->Log()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return log;
  }
  // Waits until nothing is held; answers the counts then.
  v1::StateCounts AwaitAllBack() const {
    v1::StateCounts counts;
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      counts = Counts();
      if (counts.capacity() > 0 && counts.leased() + counts.sealed() + counts.quarantined() == 0) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return counts;
  }
};

TEST_F(KeeperTest, WhatWasSealedIsFoundAgainAndWhatWasHeldStaysItsHolders) {
  StartWithKeeper();
  auto first = Open();
  ASSERT_NE(first, nullptr);
  const std::string seed = first->hash_seed();
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, 8);
  Share(first.get(), keys);
  auto mine = first->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  const std::vector<PrefixKey> marks = KeysOf(*first, 2, 4);
  for (size_t i = 0; i < 4; ++i) Stamp(first->data((*mine)[i]), marks[i]);

  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  EXPECT_EQ(second->hash_seed(), seed);
  const auto hit = Match(second.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  ASSERT_EQ(hit->groups[0].size(), 8u) << daemon_->Log();
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(HasStamp(second->data(hit->groups[0][i]), keys[i])) << i;

  // All that can be had is nobody's: the first session's process, which is this one, still writes to its blocks.
  std::set<uint32_t> firsts;
  for (const BlockRef block : mine->refs()) firsts.insert(Index(block.id));
  std::vector<Blocks> all;
  while (true) {
    auto more = second->LeaseWithin(1, std::chrono::steady_clock::now() + std::chrono::milliseconds(300));
    if (!more.ok()) break;
    EXPECT_FALSE(firsts.contains(Index((*more)[0].id)))
        << "block " << Index((*more)[0].id) << " has two owners";
    std::memset(second->data((*more)[0]), 0xff, kBlockBytes);
    all.push_back(*std::move(more));
  }
  EXPECT_FALSE(all.empty());
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(first->data((*mine)[i]), marks[i])) << i;
  EXPECT_EQ(first->status().code(), absl::StatusCode::kUnavailable) << first->status();
}

TEST_F(KeeperTest, BlocksOfAnOldSessionComeBackWhenItsProcessEnds) {
  StartWithKeeper();
  PeerProcess peer(daemon_->socket());
  ASSERT_EQ(peer.Ask("lease 5"), "ok");
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  v1::StateCounts counts = Counts();
  EXPECT_GE(counts.quarantined(), 5u) << counts.ShortDebugString();
  // A second daemon in a row knows of it, too.
  ASSERT_NE(KillDaemon(*daemon_), 0) << daemon_->Log();
  counts = Counts();
  EXPECT_GE(counts.quarantined(), 5u) << counts.ShortDebugString();
  peer.End(SIGKILL);
  counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(KeeperTest, EndsWithTheDaemonThatIsToldToEnd) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
  EXPECT_NE(kill(daemon, 0), 0);
}

TEST_F(KeeperTest, SighupIsForTheDaemon) {
  StartWithKeeper();
  const pid_t daemon = PidIn(daemon_->directory());
  ASSERT_EQ(kill(daemon_->pid(), SIGHUP), 0);
  EXPECT_THAT(AwaitInLog("SIGHUP"), HasSubstr("SIGHUP, and no --access to read again"));
  EXPECT_NE(Open(), nullptr) << daemon_->Log();
  EXPECT_EQ(PidIn(daemon_->directory()), daemon);
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
}

TEST_F(KeeperTest, ADaemonGoesOnWithoutItsKeeper) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const pid_t daemon = PidIn(daemon_->directory());
  daemon_->Kill();
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 40);
  Share(session.get(), keys);
  const auto hit = Match(session.get(), keys);
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->groups[0].size(), keys.size());
  // An opening gives the keeper something, or tries.
  auto other = Open();
  EXPECT_NE(other, nullptr);
  EXPECT_THAT(AwaitInLog("keeper lost"), HasSubstr("keeper lost"));
  kill(daemon, SIGKILL);
}

TEST_F(KeeperTest, GivesUpOnADaemonThatCanNotStart) {
  StartWithKeeper();
  const std::string away = daemon_->directory() + ".away";
  const std::string log = daemon_->directory() + "/log";
  const pid_t daemon = PidIn(daemon_->directory());
  ASSERT_EQ(rename(daemon_->directory().c_str(), away.c_str()), 0);
  kill(daemon, SIGKILL);
  const int status = daemon_->End(0);  // It ends by itself.
  ASSERT_EQ(rename(away.c_str(), daemon_->directory().c_str()), 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_THAT(daemon_->Log(), HasSubstr("keeper gives up"));
}

TEST_F(KeeperTest, ADaemonThatCanNotStartAtAllIsSaidAtOnce) {
  const ProgramEnd end = RunProgram({DaemonProcess::Program(), "--keeper=on", "--device=host", "--capacity=1",
                                     "--socket=/tmp/kvpool-no-such-directory/kvpoold.sock"});
  EXPECT_EQ(end.exit_code, 2) << end.output;
  EXPECT_THAT(end.output, Not(HasSubstr("gives up")));
}

// ------------------------------------------------------------------------------------------ seeded kills

constexpr uint64_t kSmallBlock = 4096;
constexpr uint32_t kMostBlocks = 1 << 16;
constexpr uint32_t kWriters = 3;
constexpr uint32_t kChain = 4;
constexpr uint32_t kMostChains = 1500;

// What all writers and the test see. A block is its owner's from the moment in which a lease brings it to that in which it is
// given back; for ever, if the daemon is killed in between, as nobody knows what it has heard.
struct Oracle {
  std::atomic<pid_t> owners[kMostBlocks];
  std::atomic<uint32_t> double_owners, wrong_stamps, missing;
  // Chains that were sealed, and of which the writer was told so: the seed of their tokens.
  std::atomic<uint32_t> chains[kWriters];
  std::atomic<uint32_t> rounds;  // Writers have finished so many, together.
  std::atomic<bool> stop;
};

SessionOptions WriterOptions(const std::string& socket) {
  SessionOptions options = OptionsFor(socket);
  options.layout = OpaqueLayout({.block_bytes = kSmallBlock, .tokens_per_block = kTokensPerBlock});
  options.fingerprint.set_digest("keeper_test");
  options.magazine_blocks = 8;
  return options;
}

void Fill(std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kSmallBlock; at += key.size()) std::memcpy(block + at, key.data(), key.size());
}
bool Filled(const std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kSmallBlock; at += key.size()) {
    if (std::memcmp(block + at, key.data(), key.size()) != 0) return false;
  }
  return true;
}

class Writer {
 public:
  Writer(std::string socket, uint32_t index, Oracle* oracle)
      : socket_(std::move(socket)), index_(index), oracle_(*oracle), random_(index + 1) {}

  void Run() {
    while (!oracle_.stop) {
      auto session = Session::Open(WriterOptions(socket_));
      if (!session.ok()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      while (!oracle_.stop && Round(session->get())) {
      }
    }
  }

 private:
  uint32_t SeedOf(uint32_t chain) const { return 1 + index_ + kWriters * chain; }
  std::vector<PrefixKey> KeysOf(const Session& session, uint32_t chain) const {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(SeedOf(chain), kChain), kTokensPerBlock);
  }
  // False: the daemon is gone.
  bool Round(Session* session) {
    const uint32_t sealed = oracle_.chains[index_];
    const auto keys = KeysOf(*session, sealed);
    auto blocks = session->LeaseWithin(kChain, std::chrono::steady_clock::now() + std::chrono::seconds(20));
    if (!blocks.ok()) return false;
    for (const BlockRef block : blocks->refs()) Claim(block);
    for (size_t i = 0; i < kChain; ++i) Fill(session->data((*blocks)[i]), keys[i]);
    bool told = false;
    if (sealed < kMostChains && random_() % 4 != 0) {
      auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
      if (!seal.ok()) return Keep(&*blocks);
      const auto outcome = seal->Wait(std::chrono::steady_clock::now() + std::chrono::seconds(20));
      if (!outcome.ok()) return Keep(&*blocks);
      told = outcome->refused.empty();
    }
    for (size_t i = 0; i < kChain; ++i) {
      if (!Filled(session->data((*blocks)[i]), keys[i])) ++oracle_.wrong_stamps;
    }
    if (told) oracle_.chains[index_] = sealed + 1;
    for (const BlockRef block : blocks->refs()) oracle_.owners[Index(block.id)] = 0;
    blocks->Release();
    ++oracle_.rounds;
    return sealed == 0 || LookUp(session, static_cast<uint32_t>(random_() % sealed));
  }
  // The daemon may have sealed them before it was killed: the same keys can't be sealed again by whoever wants to be told so.
  bool Keep(Blocks* blocks) {
    blocks->Detach();
    return false;
  }
  bool LookUp(Session* session, uint32_t chain) {
    const auto keys = KeysOf(*session, chain);
    auto pending = session->Match(KeyBytes(keys));
    if (!pending.ok()) return false;
    const auto hit = pending->Wait(std::chrono::steady_clock::now() + std::chrono::seconds(20));
    if (!hit.ok()) return false;
    if (hit->groups[0].size() != kChain) ++oracle_.missing;
    for (size_t i = 0; i < hit->groups[0].size(); ++i) {
      if (!Filled(session->data(hit->groups[0][i]), keys[i])) ++oracle_.wrong_stamps;
    }
    return true;
  }
  void Claim(BlockRef block) {
    pid_t nobody = 0;
    if (!oracle_.owners[Index(block.id)].compare_exchange_strong(nobody, getpid())) ++oracle_.double_owners;
  }

  const std::string socket_;
  const uint32_t index_;
  Oracle& oracle_;
  std::mt19937_64 random_;
};

// KVPOOL_KILLS says how many, for a longer run by hand.
// Its writers are forked, so nothing in its process may have used gRPC before: it runs alone, as ctest runs each test.
TEST_F(KeeperTest, KillsOfTheDaemonLoseNoSealAndGiveNoBlockTwice) {
  const char* const asked = std::getenv("KVPOOL_KILLS");
  const int kills = asked == nullptr ? 20 : atoi(asked);
  StartWithKeeper("192MiB", {"--low-watermark=0", "--high-watermark=0"});
  auto* const oracle = static_cast<Oracle*>(
      mmap(nullptr, sizeof(Oracle), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> writers;
  for (uint32_t i = 0; i < kWriters; ++i) {
    writers.push_back(fork());
    if (writers.back() != 0) continue;
    Writer(daemon_->socket(), i, oracle).Run();
    _exit(0);
  }
  std::mt19937_64 random(42);
  for (int i = 0; i < kills; ++i) {
    // Each daemon is let do something, more or less of it.
    const uint32_t enough = oracle->rounds + 1 + random() % 60;
    for (const Deadline deadline = Soon(); oracle->rounds < enough;) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "kill " << i << "\n" << daemon_->Log();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    ASSERT_NE(KillDaemon(*daemon_), 0) << "kill " << i << "\n" << daemon_->Log();
  }
  oracle->stop = true;
  for (const pid_t writer : writers) {
    int status = 0;
    waitpid(writer, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(oracle->double_owners, 0u);
  EXPECT_EQ(oracle->wrong_stamps, 0u);
  EXPECT_EQ(oracle->missing, 0u);

  auto session = Open(WriterOptions(daemon_->socket()));
  ASSERT_NE(session, nullptr);
  uint32_t chains = 0;
  for (uint32_t writer = 0; writer < kWriters; ++writer) {
    for (uint32_t chain = 0; chain < oracle->chains[writer]; ++chain, ++chains) {
      const auto keys = PrefixHasher(session->hash_seed())
                            .Chain(TokensOf(1 + writer + kWriters * chain, kChain), kTokensPerBlock);
      const auto hit = Match(session.get(), keys);
      ASSERT_TRUE(hit.ok()) << hit.status();
      ASSERT_EQ(hit->groups[0].size(), kChain) << "writer " << writer << " chain " << chain;
      for (size_t i = 0; i < kChain; ++i) {
        ASSERT_TRUE(Filled(session->data(hit->groups[0][i]), keys[i]))
            << "writer " << writer << " chain " << chain;
      }
    }
  }
  EXPECT_GE(chains, static_cast<uint32_t>(kills));
  EXPECT_EQ(daemon_->Metric("kvpool_evicted_blocks_total"), 0);
  ASSERT_TRUE(session->Close(Soon()).ok());
  const v1::StateCounts counts = AwaitAllBack();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
  std::printf("%d kills, %u chains of %u blocks sealed and found\n", kills, chains, kChain);
  munmap(oracle, sizeof(Oracle));
}

}  // namespace
}  // namespace kvpool
