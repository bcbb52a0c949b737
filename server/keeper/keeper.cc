#include "server/keeper/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/sockets.h"
#include "server/keeper/inventory.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

constexpr char kSocketVariable[] = "KVPOOL_KEEPER_SOCKET";
constexpr char kProgramVariable[] = "KVPOOL_KEEPER_PROGRAM";
// The program that runs, even if its file was replaced since.
constexpr char kThisProgram[] = "/proc/self/exe";
constexpr size_t kOwnFiles = 16;
// Between the end of a daemon that served and the start of the next.
constexpr int kPauseMs = 20;
constexpr int kFailedPauseMs = 100;  // The same after the first start that failed. It doubles with each.
// A daemon that is killed hangs up when it dies. One that lives on so long after it has hung up does so for another reason.
constexpr std::chrono::milliseconds kLongestDeath{10000};

struct End {
  int status = 0;  // waitpid's.
  int exit_status() const {
    if (!WIFEXITED(status)) return 128 + WTERMSIG(status);
    return WEXITSTATUS(status) == kHandsOver ? 0 : WEXITSTATUS(status);
  }
  std::string words() const {
    return WIFEXITED(status) ? absl::StrCat("ended with status ", WEXITSTATUS(status))
                             : absl::StrCat("was ended by signal ", WTERMSIG(status));
  }
};

// Whether a process is about to end, and does nothing more.
bool IsExiting(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  // The name may have spaces; behind it are state, ppid, pgrp, session, tty_nr, tpgid and flags.
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string word;
  for (int i = 0; i < 6; ++i) fields >> word;
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel.
  unsigned long flags = 0;
  return fields >> flags && (flags & kExiting) != 0;
}

// What a link of /proc leads to.
std::string PathBehind(const std::string& link) {
  std::array<char, 4096> path;
  const ssize_t bytes = readlink(link.c_str(), path.data(), path.size());
  return std::string(path.data(), static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
}

// A program that may be the daemon.
struct Program {
  UniqueFd file;
  std::string path;
};

class Keeper {
 public:
  Keeper(std::vector<std::string> arguments, const KeeperOptions& options, Program program, sigset_t before,
         UniqueFd signals, size_t most_files)
      : arguments_(std::move(arguments)),
        options_(options),
        before_(before),
        signals_(std::move(signals)),
        inventory_(most_files),
        program_(std::move(program)) {}

  int Run() {
    while (true) {
      if (const absl::Status started = Start(); !started.ok()) {
        LogError("daemon not started", {{"error", started}});
        return 1;
      }
      const End end = Serve();
      if (!stopping_ && (HasHandedOver(end) || HasFailedTrial(end))) continue;
      if (stopping_ || (WIFEXITED(end.status) && WEXITSTATUS(end.status) == 0)) return end.exit_status();
      if (!ever_served_ && !inventory_.serving()) return end.exit_status();
      failed_starts_ = inventory_.serving() ? 0 : failed_starts_ + 1;
      CountDeath();
      LogError("daemon ended", {{"signal", WIFSIGNALED(end.status) ? WTERMSIG(end.status) : 0},
                                {"exit_status", WIFEXITED(end.status) ? WEXITSTATUS(end.status) : 0},
                                {"kept", inventory_.size()},
                                {"failed_starts", failed_starts_},
                                {"deaths", deaths_.size()}});
      if (failed_starts_ >= kMostFailedStarts || deaths_.size() >= options_.most_deaths) {
        LogError("keeper gives up", {{"failed_starts", failed_starts_},
                                     {"deaths", deaths_.size()},
                                     {"within_seconds", std::chrono::seconds(kDeathsWithin).count()},
                                     {"lost", inventory_.size()}});
        return 1;
      }
      Pause(failed_starts_ == 0 ? kPauseMs : kFailedPauseMs << failed_starts_);
      if (stopping_) return 0;
    }
  }

 private:
  // The program that the daemon has named is the one to start.
  bool HasHandedOver(const End& end) {
    hand_over_end_.reset();
    UniqueFd next = inventory_.TakeNextProgram();
    if (!next.valid()) return false;
    if (!WIFEXITED(end.status) || WEXITSTATUS(end.status) != kHandsOver) {
      inventory_.SetLastUpgrade(UpgradeOutcome::kFailed,
                                absl::StrCat("the daemon ", end.words(), " before it had handed over"));
      return false;
    }
    std::string path = PathBehind(absl::StrCat("/proc/self/fd/", next.get()));
    LogInfo("daemon handed over", {{"program", path}, {"kept", inventory_.size()}});
    former_ = std::exchange(program_, {std::move(next), std::move(path)});
    inventory_.BeginTrial();
    inventory_.SetLastUpgrade(UpgradeOutcome::kDone, "");
    trial_end_ = std::chrono::steady_clock::now() + options_.most_start;
    late_ = false;
    failed_starts_ = 0;
    return true;
  }

  // A new program has ended before it served: the one before it is the one to start.
  bool HasFailedTrial(const End& end) {
    if (!former_.has_value()) return false;
    const std::string why = late_
                                ? absl::StrCat("it did not serve within ", options_.most_start.count(), " ms")
                                : "it " + end.words();
    LogError("upgrade failed", {{"program", program_.path}, {"reason", why}, {"back_to", former_->path}});
    inventory_.SetLastUpgrade(UpgradeOutcome::kFailed, absl::StrCat(why, "; its log says more"));
    inventory_.EndTrial(/*failed=*/true);
    program_ = *std::exchange(former_, std::nullopt);
    late_ = false;
    return true;
  }

  // A daemon that has said that it hands over, and does not end, serves nobody.
  void LookAtHandOver() {
    if (!inventory_.handing_over() || child_ <= 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (!hand_over_end_.has_value()) hand_over_end_ = now + options_.most_start;
    if (now < *hand_over_end_) return;
    hand_over_end_ = std::chrono::steady_clock::time_point::max();
    kill(child_, SIGKILL);
  }

  void LookAtTrial() {
    if (!former_.has_value()) return;
    if (inventory_.serving()) {
      LogInfo("upgraded", {{"program", program_.path}});
      inventory_.EndTrial(/*failed=*/false);
      former_.reset();
    } else if (child_ > 0 && std::chrono::steady_clock::now() >= trial_end_) {
      late_ = true;
      kill(child_, SIGKILL);
    }
  }

  absl::Status Start() {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
      return absl::UnavailableError(absl::StrCat("socketpair: ", strerror(errno)));
    }
    socket_.Reset(pair[0]);
    const UniqueFd theirs(pair[1]);
    // All that allocates is done here: the child has the log's lock as it was, and maybe nobody who lets go of it.
    setenv(kSocketVariable, absl::StrCat(theirs.get()).c_str(), 1);
    setenv(kProgramVariable, program_.path.c_str(), 1);
    std::vector<char*> pointers;
    for (std::string& argument : arguments_) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) return absl::UnavailableError(absl::StrCat("fork: ", strerror(errno)));
    if (child == 0) BecomeDaemon(theirs.get(), pointers.data());
    child_ = child;
    hung_up_.reset();
    inventory_.OnDaemon();
    return absl::OkStatus();
  }

  [[noreturn]] void BecomeDaemon(int socket, char* const* arguments) {
    setpgid(0, 0);
    // A SIGHUP that comes before the daemon waits for it is seen then, instead of ending it.
    sigset_t mask = before_;
    sigaddset(&mask, SIGHUP);
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    fcntl(socket, F_SETFD, 0);
    fexecve(program_.file.get(), arguments, environ);
    _exit(1);
  }

  void CountDeath() {
    const auto now = std::chrono::steady_clock::now();
    deaths_.push_back(now);
    while (now - deaths_.front() > kDeathsWithin) deaths_.pop_front();
  }

  // Until the daemon has ended.
  End Serve() {
    while (true) {
      if (const std::optional<End> end = Reap()) {
        // What it sent before it was killed is in the socket still.
        while (socket_.valid() && Readable()) ServeOne();
        socket_.Reset();
        LookAtTrial();
        return *end;
      }
      LookAtHandOver();
      LookAtTrial();
      pollfd waiting[] = {{signals_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
      if (poll(waiting, 2, TimeoutMs()) <= 0) {
        if (hung_up_.has_value() && std::chrono::steady_clock::now() - *hung_up_ >= kLongestDeath) {
          // Its descriptors are closed one by one, and a GPU's may take longer than the keeper's is gone.
          if (IsExiting(child_)) {
            hung_up_ = std::chrono::steady_clock::now();
          } else {
            LetGo();
          }
        }
        continue;
      }
      if (waiting[0].revents != 0) ReadSignal();
      if (socket_.valid() && waiting[1].revents != 0) ServeOne();
    }
  }

  // Until there is something to do that no descriptor tells of; -1: for ever.
  int TimeoutMs() const {
    const bool on_trial = former_.has_value() && !late_;
    if (!hung_up_.has_value() && !on_trial && !hand_over_end_.has_value()) return -1;
    auto next = std::chrono::steady_clock::time_point::max();
    if (hung_up_.has_value()) next = *hung_up_ + kLongestDeath;
    if (on_trial) next = std::min(next, trial_end_);
    if (hand_over_end_.has_value()) next = std::min(next, *hand_over_end_);
    if (next == std::chrono::steady_clock::time_point::max()) return -1;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(next - std::chrono::steady_clock::now()).count();
    return static_cast<int>(std::max<int64_t>(left, 0));
  }

  // The daemon goes on without the keeper. It has said so where the next one looks (keeper_link.h): this is about the memory.
  void LetGo() {
    LogError("kept for nothing",
             {{"reason", "the daemon went on without its keeper"}, {"lost", inventory_.size()}});
    inventory_.Clear();
    hung_up_.reset();
  }

  bool Readable() const {
    pollfd waiting{socket_.get(), POLLIN, 0};
    return poll(&waiting, 1, 0) == 1 && (waiting.revents & POLLIN) != 0;
  }

  void ServeOne() {
    const absl::Status served = inventory_.Serve(socket_.get());
    if (served.ok()) return;
    socket_.Reset();
    hung_up_ = std::chrono::steady_clock::now();
    if (absl::IsUnavailable(served)) return;
    if (!inventory_.greeted()) {
      LogError("daemon not understood", {{"error", served}});
      return;
    }
    LogError("daemon not understood", {{"error", served}, {"lost", inventory_.size()}});
    inventory_.Clear();
  }

  std::optional<End> Reap() {
    // As process 1 of a container it has the orphans of others, too.
    End end;
    for (pid_t pid; (pid = waitpid(-1, &end.status, WNOHANG)) > 0;) {
      if (pid != child_) continue;
      child_ = 0;
      ever_served_ = ever_served_ || inventory_.serving();
      return end;
    }
    return std::nullopt;
  }

  void ReadSignal() {
    signalfd_siginfo signal;
    if (read(signals_.get(), &signal, sizeof(signal)) != sizeof(signal)) return;
    if (signal.ssi_signo == SIGCHLD) return;
    stopping_ = stopping_ || signal.ssi_signo != SIGHUP;
    if (child_ > 0) kill(child_, static_cast<int>(signal.ssi_signo));
  }

  void Pause(int ms) {
    pollfd waiting{signals_.get(), POLLIN, 0};
    while (!stopping_ && poll(&waiting, 1, ms) == 1) ReadSignal();
  }

  std::vector<std::string> arguments_;
  const KeeperOptions options_;
  const sigset_t before_;  // The signals that were blocked when the keeper was started.
  const UniqueFd signals_;
  Inventory inventory_;
  Program program_;
  // The one before, while program_ is on trial: it has not served yet.
  std::optional<Program> former_;
  std::chrono::steady_clock::time_point trial_end_;
  bool late_ = false;  // It was killed for that.
  std::optional<std::chrono::steady_clock::time_point>
      hand_over_end_;  // A daemon that hands over has to end by then.
  UniqueFd socket_;
  // When its end of the socket was gone, while the daemon lived.
  std::optional<std::chrono::steady_clock::time_point> hung_up_;
  pid_t child_ = 0;
  int failed_starts_ = 0;
  std::deque<std::chrono::steady_clock::time_point> deaths_;  // Those within kDeathsWithin.
  bool ever_served_ = false;
  bool stopping_ = false;
};

}  // namespace

int RunKeeper(const std::vector<std::string>& arguments, const KeeperOptions& options) {
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, &before);
  UniqueFd events(signalfd(-1, &signals, SFD_CLOEXEC));
  Program program{UniqueFd(open(kThisProgram, O_PATH | O_CLOEXEC)), PathBehind(kThisProgram)};
  const absl::StatusOr<uint64_t> files = RaiseOpenFileLimit();
  if (!events.valid() || !program.file.valid() || !files.ok()) {
    LogError("keeper not started",
             {{"error", files.ok() ? strerror(errno) : std::string(files.status().message())}});
    return 1;
  }
  // Nobody may read what is logged, and the keeper must not wait for that.
  const LogWriter log_writer;
  return Keeper(arguments, options, std::move(program), before, std::move(events),
                *files - std::min<uint64_t>(*files, kOwnFiles))
      .Run();
}

KeeperEnd TakeKeeperEnd() {
  KeeperEnd end;
  const char* const program = getenv(kProgramVariable);
  if (program != nullptr) end.program = program;
  unsetenv(kProgramVariable);
  const char* const text = getenv(kSocketVariable);
  int fd = -1;
  if (text == nullptr || !absl::SimpleAtoi(text, &fd)) return end;
  unsetenv(kSocketVariable);
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) end.socket.Reset(fd);
  return end;
}

}  // namespace kvpool
