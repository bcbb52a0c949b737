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

SessionOptions EngineOptions(const std::string& socket) {
  SessionOptions options;
  options.socket = socket;
  options.client_name = "kvpool-bench";
  options.layout = OpaqueLayout({.block_bytes = kBlockBytes, .tokens_per_block = kTokensPerBlock});
  options.fingerprint.set_digest("kvpool-bench");
  return options;
}

std::unique_ptr<DaemonProcess> StartDaemon(const std::string& capacity, const std::string& slab_bytes) {
  auto daemon = DaemonProcess::Start({.capacity = capacity, .slab_bytes = slab_bytes});
  KVPOOL_CHECK(daemon.ok(), "%s", daemon.status().ToString().c_str());
  return *std::move(daemon);
}

std::unique_ptr<Session> OpenSession(const SessionOptions& options) {
  auto session = Session::Open(options);
  KVPOOL_CHECK(session.ok(), "%s", session.status().ToString().c_str());
  return *std::move(session);
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
