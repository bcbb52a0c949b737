#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

constexpr char kServing[] = "serving";

void CopyRest(UniqueFd from, UniqueFd to) {
  char buffer[4096];
  ssize_t read_bytes = 0;
  while ((read_bytes = read(from.get(), buffer, sizeof(buffer))) > 0) {
    if (write(to.get(), buffer, static_cast<size_t>(read_bytes)) < 0) return;
  }
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  const char* base = std::getenv("TMPDIR");
  path_ = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/kvpool.XXXXXX";
  KVPOOL_CHECK(mkdtemp(path_.data()) != nullptr, "mkdtemp %s failed", path_.c_str());
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const DaemonProcessOptions& options) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess);
  RETURN_IF_ERROR(daemon->Spawn(options));
  return daemon;
}

absl::Status DaemonProcess::Spawn(const DaemonProcessOptions& options) {
  std::vector<std::string> arguments = {
      options.binary,      "--device=host",       "--capacity=" + options.capacity,
      "--metrics_listen=", "--socket=" + socket_, "--state_dir=" + directory_.path()};
  arguments.insert(arguments.end(), options.flags.begin(), options.flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  UniqueFd reader(ends[0]), writer(ends[1]);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    dup2(writer.get(), STDOUT_FILENO);
    dup2(writer.get(), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  writer.Reset();
  return AwaitServing(reader.Release());
}

absl::Status DaemonProcess::AwaitServing(int pipe) {
  UniqueFd reader(pipe);
  const std::string log_path = directory_.path() + "/log";
  UniqueFd log(open(log_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!log.valid()) return absl::ErrnoToStatus(errno, log_path);
  std::string text;
  char buffer[4096];
  while (text.find(kServing) == std::string::npos) {
    const ssize_t read_bytes = read(reader.get(), buffer, sizeof(buffer));
    if (read_bytes <= 0)
      return absl::UnavailableError(absl::StrCat("kvpoold ended before it served:\n", text));
    text.append(buffer, static_cast<size_t>(read_bytes));
    if (write(log.get(), buffer, static_cast<size_t>(read_bytes)) < 0)
      return absl::ErrnoToStatus(errno, log_path);
  }
  log_ = std::thread(CopyRest, std::move(reader), std::move(log));
  return absl::OkStatus();
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) End(SIGKILL);
  if (log_.joinable()) log_.join();
}

void DaemonProcess::Signal(int signal) const {
  KVPOOL_CHECK(pid_ > 0 && kill(pid_, signal) == 0, "no daemon to send signal %d to", signal);
}

int DaemonProcess::End(int signal) {
  Signal(signal);
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return status;
}

}  // namespace kvpool
