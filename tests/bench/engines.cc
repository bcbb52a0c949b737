#include "tests/bench/engines.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "client/layouts.h"
#include "proto/support/check.h"

namespace kvpool::bench {

void Check(const absl::Status& status) { KVPOOL_CHECK(status.ok(), "%s", status.ToString().c_str()); }

SessionOptions EngineOptions(const std::string& socket) {
  SessionOptions options;
  options.socket = socket;
  options.client_name = "kvpool-bench";
  options.layout = OpaqueLayout({.block_bytes = kBlockBytes, .tokens_per_block = kTokensPerBlock});
  options.fingerprint.set_digest("kvpool-bench");
  options.give_back = GiveBack::kAnyTime;  // Its engines touch what they hold.
  return options;
}

std::unique_ptr<DaemonProcess> StartDaemon(const std::string& capacity, const std::string& slab_bytes,
                                           std::vector<std::string> flags) {
  auto daemon =
      DaemonProcess::Start({.capacity = capacity, .slab_bytes = slab_bytes, .flags = std::move(flags)});
  Check(daemon.status());
  return *std::move(daemon);
}

std::unique_ptr<Session> OpenSession(const SessionOptions& options) {
  auto session = Session::Open(options);
  Check(session.status());
  return *std::move(session);
}

SessionOptions SmallBlocks(const std::string& socket) {
  SessionOptions options = EngineOptions(socket);
  options.layout = OpaqueLayout({.block_bytes = kSmallBlockBytes, .tokens_per_block = kTokensPerBlock});
  options.magazine_blocks = 0;
  return options;
}

std::string KeyOf(uint64_t i) {
  std::string key(32, '\0');
  ++i;
  std::memcpy(key.data(), &i, sizeof(i));
  return key;
}

std::vector<Blocks> LeaseMillion(Session* session) {
  constexpr uint32_t kLeaseBlocks = 65536;
  std::vector<Blocks> leases;
  for (uint32_t leased = 0; leased < kMillion; leased += kLeaseBlocks) {
    auto blocks = session->LeaseWithin(kLeaseBlocks, Patience());
    Check(blocks.status());
    leases.push_back(*std::move(blocks));
  }
  return leases;
}

void CacheMillion(Session* session) {
  std::vector<Blocks> leases = LeaseMillion(session);
  uint64_t next = 0;
  for (Blocks& lease : leases) {
    std::vector<PendingSeal> pending;
    for (size_t first = 0; first < lease.size(); first += kChainBlocks) {
      std::string keys;
      for (uint32_t i = 0; i < kChainBlocks; ++i) keys += KeyOf(next++);
      const SealArguments chain = {.blocks = lease.refs().subspan(first, kChainBlocks), .keys = keys};
      auto seal = session->Seal(chain);
      while (absl::IsResourceExhausted(seal.status())) {
        Check(session->Flush(Patience()));
        seal = session->Seal(chain);
      }
      Check(seal.status());
      pending.push_back(*std::move(seal));
    }
    for (PendingSeal& seal : pending) Check(seal.Wait(Patience()).status());
    lease.Release();
    Check(session->Flush(Patience()));
  }
}

std::string CacheChain(Session* session) {
  auto blocks = session->LeaseWithin(kChainBlocks, Patience());
  Check(blocks.status());
  std::string keys;
  for (uint32_t i = 0; i < kChainBlocks; ++i) keys += KeyOf(i);
  auto seal = session->Seal({.blocks = blocks->refs(), .keys = keys});
  Check(seal.status());
  Check(seal->Wait(Patience()).status());
  return keys;
}

EngineProcess::EngineProcess(const std::vector<std::string>& arguments) {
  std::vector<char*> argv = {const_cast<char*>(KVPOOL_BENCH_ENGINE)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int to[2], from[2];
  KVPOOL_CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0, "pipe2: %s", strerror(errno));
  pid_ = fork();
  KVPOOL_CHECK(pid_ >= 0, "fork: %s", strerror(errno));
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  to_ = fdopen(to[1], "w");
  from_ = fdopen(from[0], "r");
}

EngineProcess::~EngineProcess() {
  fclose(to_);
  fclose(from_);
  Kill();
  waitpid(pid_, nullptr, 0);
}

std::string EngineProcess::ReadLine() {
  char line[4096];
  KVPOOL_CHECK(fgets(line, sizeof(line), from_) != nullptr, "bench_engine ended early");
  line[strcspn(line, "\n")] = '\0';
  return line;
}

void EngineProcess::WriteLine() {
  fputc('\n', to_);
  fflush(to_);
}

void EngineProcess::Kill() { kill(pid_, SIGKILL); }

}  // namespace kvpool::bench
