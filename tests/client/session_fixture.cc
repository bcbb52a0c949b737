#include "tests/client/session_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "proto/support/check.h"
#include "tests/support/send_signal.h"

namespace kvpool {

Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

std::vector<uint32_t> TokensOf(uint32_t seed, size_t blocks) {
  std::vector<uint32_t> tokens(blocks * kTokensPerBlock);
  std::iota(tokens.begin(), tokens.end(), seed * 1'000'000);
  return tokens;
}

void Stamp(std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kBlockBytes; at += key.size()) std::memcpy(block + at, key.data(), key.size());
}

bool HasStamp(const std::byte* block, const PrefixKey& key) {
  for (uint64_t at = 0; at < kBlockBytes; at += key.size()) {
    if (std::memcmp(block + at, key.data(), key.size()) != 0) return false;
  }
  return true;
}

SessionOptions OptionsFor(const std::string& socket) {
  SessionOptions options;
  options.socket = socket;
  options.client_name = "session_test";
  options.layout = OpaqueLayout({.block_bytes = kBlockBytes, .tokens_per_block = kTokensPerBlock});
  options.fingerprint.set_digest("session_test");
  options.magazine_blocks = 16;
  return options;
}

void Share(Session* session, absl::Span<const PrefixKey> keys) {
  auto blocks = session->LeaseWithin(static_cast<uint32_t>(keys.size()), Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  for (size_t i = 0; i < keys.size(); ++i) Stamp(session->data((*blocks)[i]), keys[i]);
  auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
  ASSERT_TRUE(seal.ok()) << seal.status();
  const auto outcome = seal->Wait(Soon());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->refused.empty()) << outcome->refused[0].message();
  blocks->Release();
  ASSERT_TRUE(session->Flush(Soon()).ok());
}

PeerProcess::PeerProcess(const std::string& socket, const std::string& program) {
  const std::string path = program.empty() ? KVPOOL_ENGINE_PEER : program;
  int to[2], from[2];
  KVPOOL_CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0, "pipe2 failed");
  pid_ = fork();
  KVPOOL_CHECK(pid_ >= 0, "fork failed");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execl(path.c_str(), path.c_str(), socket.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  to_ = fdopen(to[1], "w");
  from_ = fdopen(from[0], "r");
  EXPECT_EQ(Ask(""), "open");
}

PeerProcess::~PeerProcess() {
  fclose(to_);
  fclose(from_);
  if (pid_ > 0) End(SIGKILL);
}

std::string PeerProcess::Ask(const std::string& line) {
  fprintf(to_, "%s\n", line.c_str());
  fflush(to_);
  char answer[1024];
  if (fgets(answer, sizeof(answer), from_) == nullptr) return "";
  answer[strcspn(answer, "\n")] = '\0';
  return answer;
}

void PeerProcess::Signal(int signal) const { SendSignal(pid_, signal); }

int PeerProcess::End(int signal) {
  Signal(signal);
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  return status;
}

void SessionTest::StartDaemon(const std::string& capacity, std::vector<std::string> flags) {
  flags.push_back("--slab-bytes=4MiB");
  auto daemon =
      DaemonProcess::Start({.binary = KVPOOL_KVPOOLD, .capacity = capacity, .flags = std::move(flags)});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = std::move(*daemon);
}

std::unique_ptr<Session> SessionTest::Open(const SessionOptions& options) {
  auto session = Session::Open(options);
  EXPECT_TRUE(session.ok()) << session.status();
  return session.ok() ? std::move(*session) : nullptr;
}

std::unique_ptr<Session> SessionTest::OpenWithoutMagazine() {
  SessionOptions options = OptionsFor(daemon_->socket());
  options.magazine_blocks = 0;
  return Open(options);
}

SessionOptions SessionTest::RankOptions(uint32_t rank) const {
  SessionOptions options = OptionsFor(daemon_->socket());
  options.ranks = 2;
  options.role.set_rank(rank);
  return options;
}

}  // namespace kvpool
