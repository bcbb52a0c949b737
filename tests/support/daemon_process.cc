#include "tests/support/daemon_process.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "proto/support/unique_fd.h"
#include "tests/support/send_signal.h"

extern char** environ;

namespace kvpool {
namespace {

constexpr int kPatienceMs = 60'000;  // Enough under a sanitizer, on a machine that builds beside it.

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& text : *strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Starts a program with stdout and stderr in `log` and the default action for SIGTERM.
pid_t Spawn(std::vector<std::string> command, std::vector<std::string> environment, const std::string& log) {
  for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, command[0].c_str(), &files, nullptr, Pointers(&command).data(),
                                Pointers(&environment).data());
  posix_spawn_file_actions_destroy(&files);
  return error == 0 ? pid : -1;
}

int ExitCode(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

// The number behind "name": in one line of JSON that we wrote ourselves.
int NumberIn(const std::string& json, const std::string& name) {
  const size_t at = json.find(absl::StrCat("\"", name, "\":"));
  return at == std::string::npos ? 0 : atoi(json.c_str() + at + name.size() + 3);
}

// A connected socket, or -1 if nobody listens.
int ConnectToPort(int port) {
  UniqueFd connection(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return -1;
  return connection.Release();
}

}  // namespace

ProgramEnd RunProgram(const std::vector<std::string>& command) {
  char log[] = "/tmp/kvpool-run-XXXXXX";
  UniqueFd file(mkstemp(log));
  const pid_t pid = Spawn(command, {}, log);
  int status = 0;
  if (pid > 0) waitpid(pid, &status, 0);
  ProgramEnd end{.exit_code = pid > 0 ? ExitCode(status) : -1, .output = ReadAll(log)};
  unlink(log);
  return end;
}

TemporaryDirectory::TemporaryDirectory() {
  const char* base = std::getenv("TMPDIR");
  path_ = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/kvpool.XXXXXX";
  KVPOOL_CHECK(mkdtemp(path_.data()) != nullptr, "mkdtemp %s failed", path_.c_str());
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string DaemonProcess::Program() { return KVPOOLD; }

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const DaemonProcessOptions& options) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess);
  daemon->directory_ = options.directory;
  if (options.directory.empty()) {
    char pattern[] = "/tmp/kvpoold-XXXXXX";
    if (mkdtemp(pattern) == nullptr) return absl::InternalError(absl::StrCat("mkdtemp: ", strerror(errno)));
    daemon->directory_ = pattern;
    daemon->owns_directory_ = true;
  }
  RETURN_IF_ERROR(daemon->Launch(options));
  return daemon;
}

absl::Status DaemonProcess::Launch(const DaemonProcessOptions& options) {
  UniqueFd changes(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!changes.valid() || inotify_add_watch(changes.get(), directory_.c_str(), IN_MOVED_TO) < 0) {
    return absl::InternalError(absl::StrCat("inotify: ", strerror(errno)));
  }
  std::filesystem::remove(directory_ + "/kvpoold.json");
  std::vector<std::string> command = {options.binary.empty() ? Program() : options.binary,
                                      "--device=" + options.device,
                                      "--capacity=" + options.capacity,
                                      "--slab-bytes=" + options.slab_bytes,
                                      "--socket=" + socket(),
                                      "--state-dir=" + directory_,
                                      "--metrics-listen=127.0.0.1:0",
                                      "--shutdown-grace=200ms"};
  command.insert(command.end(), options.flags.begin(), options.flags.end());
  pid_ = Spawn(std::move(command), options.environment, directory_ + "/log");
  if (pid_ <= 0) return absl::InternalError(absl::StrCat("cannot start ", Program()));

  UniqueFd death(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  const std::string facts = directory_ + "/kvpoold.json";
  while (!std::filesystem::exists(facts)) {
    std::array<pollfd, 2> waiting = {pollfd{changes.get(), POLLIN, 0}, pollfd{death.get(), POLLIN, 0}};
    const int ready = poll(waiting.data(), waiting.size(), kPatienceMs);
    if (ready == 0) return absl::DeadlineExceededError(absl::StrCat("kvpoold does not serve:\n", Log()));
    if (waiting[1].revents != 0) {
      const int code = ExitCode(Reap());
      return absl::UnavailableError(absl::StrCat("kvpoold ended with ", code, ":\n", Log()));
    }
    std::array<char, 4096> events;
    while (read(changes.get(), events.data(), events.size()) > 0) {
    }
  }
  const std::string json = ReadAll(facts);
  metrics_port_ = NumberIn(json, "metrics_port");
  operator_port_ = NumberIn(json, "operator_port");
  return absl::OkStatus();
}

DaemonProcess::~DaemonProcess() {
  int status = 0;
  if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
    pid_ = 0;
    // It may hold a sanitizer's report or a failed check, and would be removed with the directory.
    const bool was_told = WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
    if (status != 0 && !was_told) {
      std::fprintf(stderr, "kvpoold ended under the test, wait status %d:\n%s\n", status, Log().c_str());
    }
  }
  Kill();
  if (owns_directory_) std::filesystem::remove_all(directory_);
}

int DaemonProcess::Reap() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = 0;
  return status;
}

void DaemonProcess::Signal(int signal) const {
  KVPOOL_CHECK(pid_ > 0, "no daemon to send signal %d to", signal);
  SendSignal(pid_, signal);
}

int DaemonProcess::End(int signal) {
  Signal(signal);
  return Reap();
}

int DaemonProcess::Stop() { return ExitCode(End(SIGTERM)); }

void DaemonProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  Reap();
}

absl::StatusOr<std::string> DaemonProcess::Get(const std::string& path) const {
  UniqueFd connection(ConnectToPort(metrics_port_));
  if (!connection.valid()) return absl::UnavailableError("no connection to the metrics port");
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n");
  if (send(connection.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) {
    return absl::UnavailableError(absl::StrCat("asking for ", path, ": ", strerror(errno)));
  }
  std::string answer;
  std::array<char, 65536> bytes;
  ssize_t size;
  while ((size = recv(connection.get(), bytes.data(), bytes.size(), 0)) > 0)
    answer.append(bytes.data(), size);
  const size_t body = answer.find("\r\n\r\n");
  if (!absl::StartsWith(answer, "HTTP/1.1 200") || body == std::string::npos) {
    return absl::UnavailableError(absl::StrCat(path, " answered: ", answer.substr(0, 200)));
  }
  return answer.substr(body + 4);
}

double DaemonProcess::Metric(const std::string& name, const std::string& label) const {
  const absl::StatusOr<std::string> text = Metrics();
  return text.ok() ? MetricIn(*text, name, label) : 0;
}

double MetricIn(const std::string& text, const std::string& name, const std::string& label) {
  double sum = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, name) || !absl::StrContains(line, label)) continue;
    const absl::string_view rest = line.substr(name.size());
    if (rest.empty() || (rest[0] != '{' && rest[0] != ' ')) continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) sum += value;
  }
  return sum;
}

std::string DaemonProcess::Log() const { return ReadAll(directory_ + "/log"); }

std::string DaemonProcess::AwaitInLog(const std::string& text, int times) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (true) {
    std::string log = Log();
    int found = 0;
    for (size_t at = 0; (at = log.find(text, at)) != std::string::npos; ++at) ++found;
    if (found >= times || std::chrono::steady_clock::now() > deadline) return log;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace kvpool
