// A real daemon, and sessions with it in this process and in others.
#ifndef KVPOOL_TESTS_CLIENT_SESSION_FIXTURE_H_
#define KVPOOL_TESTS_CLIENT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/layouts.h"
#include "client/prefix_hasher.h"
#include "client/session.h"
#include "tests/support/daemon_process.h"

namespace kvpool {

inline constexpr uint64_t kBlockBytes = 64 << 10;
inline constexpr uint32_t kTokensPerBlock = 16;
inline constexpr uint32_t kSlabBlocks = 64;  // 4 MiB.

Deadline Soon();  // Nothing in these tests takes so long unless it is broken.

// Tokens of a sequence that no other seed starts with.
std::vector<uint32_t> TokensOf(uint32_t seed, size_t blocks);

// Fills a block with words that depend on its key, and tells whether a block is filled so.
void Stamp(std::byte* block, const PrefixKey& key);
bool HasStamp(const std::byte* block, const PrefixKey& key);

SessionOptions OptionsFor(const std::string& socket);

// Leases, stamps and seals the blocks of `keys` and gives them back: they stay in the cache.
void Share(Session* session, absl::Span<const PrefixKey> keys);

// An engine in a process of its own, engine_peer.cc or another program, told what to do line by line.
class PeerProcess {
 public:
  explicit PeerProcess(const std::string& socket, const std::string& program = "");
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;
  // Sends a line and returns the answer, "" if the peer is gone.
  std::string Ask(const std::string& line);
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  int End(int signal);

 private:
  pid_t pid_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

class SessionTest : public ::testing::Test {
 protected:
  void StartDaemon(const std::string& capacity = "32MiB", std::vector<std::string> flags = {});
  std::unique_ptr<Session> Open() { return Open(OptionsFor(daemon_->socket())); }
  std::unique_ptr<Session> Open(const SessionOptions& options);
  // A session that leaves every block that it does not use to others.
  std::unique_ptr<Session> OpenWithoutMagazine();
  // Options of a session of two ranks, on a daemon with two devices.
  SessionOptions RankOptions(uint32_t rank) const;

  std::unique_ptr<DaemonProcess> daemon_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_CLIENT_SESSION_FIXTURE_H_
