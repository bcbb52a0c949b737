#include "server/keeper/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/peer_process.h"
#include "server/base/sockets.h"
#include "server/keeper/inventory.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

constexpr char kSocketVariable[] = "KVPOOL_KEEPER_SOCKET";
constexpr char kProgramVariable[] = "KVPOOL_KEEPER_PROGRAM";
// The program that runs, even if its file was replaced since.
constexpr char kThisProgram[] = "/proc/self/exe";
constexpr size_t kOwnFiles = 16 + 2 * kMostCallers;
// Between the end of a daemon that served and the start of the next.
constexpr int kPauseMs = 20;
constexpr int kFailedPauseMs = 100;  // The same after the first start that failed. It doubles with each.
// A daemon that is killed hangs up when it dies. One that lives on so long after it has hung up does so for another reason.
constexpr std::chrono::milliseconds kLongestDeath{10000}, kLongestUnseenDeath{60000};
// A daemon that is alone looks for another keeper every second. One that has not come by then does not look here.
constexpr std::chrono::milliseconds kMostComing{10000};
constexpr int kComingPauseMs = 100;
// Whoever does not read what it is shown is waited for no longer.
constexpr timeval kPatience{.tv_sec = 5, .tv_usec = 0};

struct End {
  int status = 0;    // waitpid's; of a daemon that is no child, the one that fits what it said.
  bool seen = true;  // False: it has said nothing, and the status is that of a kill.
  int exit_status() const {
    if (!WIFEXITED(status)) return 128 + WTERMSIG(status);
    return WEXITSTATUS(status) == kHandsOver ? 0 : WEXITSTATUS(status);
  }
  std::string words() const {
    if (!seen) return "ended, and how was not seen";
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

bool IsLocked(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return fd.valid() && flock(fd.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

// What a link of /proc leads to.
std::string PathBehind(const std::string& link) {
  std::array<char, 4096> path;
  const ssize_t bytes = readlink(link.c_str(), path.data(), path.size());
  return std::string(path.data(), static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
}

// Somebody at the socket who is not served yet.
struct Caller {
  UniqueFd socket, pidfd;
  int64_t pid = 0;
  bool spoke = false;  // It has said hello, and waits for the end of the last daemon.
};

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
        inventory_(most_files, kKnowsEnding | (options.starts_daemons ? 0 : kStartsNoProgram)),
        program_(std::move(program)) {}
  ~Keeper() {
    if (listener_.valid()) unlink(options_.socket.c_str());
  }

  // FAILED_PRECONDITION: another keeper has the socket, or the path is that of another file.
  absl::Status Listen() {
    struct stat there;
    if (lstat(options_.socket.c_str(), &there) == 0 && !S_ISSOCK(there.st_mode))
      return absl::FailedPreconditionError(absl::StrCat(options_.socket, " is there, and is no socket"));
    absl::StatusOr<FileLock> lock = FileLock::Take(options_.socket + ".lock");
    if (absl::IsAlreadyExists(lock.status())) return absl::FailedPreconditionError(lock.status().message());
    RETURN_IF_ERROR(lock.status());
    ASSIGN_OR_RETURN(listener_,
                     ListenUnix({.path = options_.socket, .type = SOCK_SEQPACKET, .group = {}, .own = true}));
    lock_.emplace(*std::move(lock));
    return absl::OkStatus();
  }

  int Run() {
    AwaitDaemonThatServes();
    if (adopted_.valid() && untold_ != 0) SignalDaemon(untold_);
    if (stopping_ && !adopted_.valid()) return 0;
    while (true) {
      if (!adopted_.valid()) {
        if (const absl::Status started = Start(); !started.ok()) {
          LogError("daemon not started", {{"error", started}});
          return 1;
        }
      }
      const End end = Serve();
      if (!stopping_ && (HasHandedOver(end) || HasFailedTrial(end))) continue;
      if (stopping_ || (WIFEXITED(end.status) && WEXITSTATUS(end.status) == 0)) return end.exit_status();
      if (!ever_served_ && !inventory_.serving()) return end.exit_status();
      if (HasDiedTooOften(end)) return 1;
      Pause(failed_starts_ == 0 ? kPauseMs : kFailedPauseMs << failed_starts_);
      if (stopping_) return 0;
    }
  }

  // For daemons that somebody else starts.
  int KeepOnly() {
    LogInfo("keeping", {{"socket", options_.socket}});
    while (true) {
      const End end = Serve();
      if (stopping_) return 0;
      if (!WIFEXITED(end.status) && HasDiedTooOften(end)) {
        inventory_.Clear();
        failed_starts_ = 0;
        deaths_.clear();
      }
    }
  }

 private:
  // Whether what is kept may be what kills it.
  bool HasDiedTooOften(const End& end) {
    failed_starts_ = inventory_.serving() ? 0 : failed_starts_ + 1;
    CountDeath();
    LogError("daemon ended", {{"seen", end.seen},
                              {"signal", end.seen && WIFSIGNALED(end.status) ? WTERMSIG(end.status) : 0},
                              {"exit_status", WIFEXITED(end.status) ? WEXITSTATUS(end.status) : 0},
                              {"kept", inventory_.size()},
                              {"failed_starts", failed_starts_},
                              {"deaths", deaths_.size()}});
    if (failed_starts_ < kMostFailedStarts && deaths_.size() < options_.most_deaths) return false;
    LogError("keeper gives up", {{"failed_starts", failed_starts_},
                                 {"deaths", deaths_.size()},
                                 {"within_seconds", std::chrono::seconds(kDeathsWithin).count()},
                                 {"lost", inventory_.size()}});
    return true;
  }

  // A daemon whose keeper was killed serves on, and comes here by itself: one that was started now would find its locks taken.
  // Nor may this process end before that one can be told to, if it is to end.
  void AwaitDaemonThatServes() {
    if (!listener_.valid()) return;
    const auto until = std::chrono::steady_clock::now() + kMostComing;
    for (bool said = false; !adopted_.valid() && IsAlive() && std::chrono::steady_clock::now() < until;
         said = true) {
      if (!said) LogInfo("waiting for the daemon that serves", {{"socket", options_.socket}});
      Turn(kComingPauseMs);
    }
  }

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
    if (!inventory_.handing_over()) return;
    const auto now = std::chrono::steady_clock::now();
    if (!hand_over_end_.has_value()) hand_over_end_ = now + options_.most_start;
    if (now < *hand_over_end_) return;
    hand_over_end_ = std::chrono::steady_clock::time_point::max();
    SignalDaemon(SIGKILL);
  }

  // A daemon that was told to end and hangs would outlive the keeper, and nobody else ends it.
  void LookAtStop() {
    if (!stopping_) return;
    const auto now = std::chrono::steady_clock::now();
    if (!stop_end_.has_value()) stop_end_ = now + options_.most_end;
    if (now < *stop_end_) return;
    stop_end_ = std::chrono::steady_clock::time_point::max();
    LogError("daemon killed", {{"pid", DaemonPid()}, {"reason", "it was told to end, and did not"}});
    SignalDaemon(SIGKILL);
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
    OnDaemon();
    return absl::OkStatus();
  }

  void OnDaemon() {
    ever_served_ = ever_served_ || inventory_.serving();  // The same daemon may have come back.
    hung_up_.reset();
    inventory_.OnDaemon();
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
      // A daemon that somebody else started is not told to end with this process.
      if (stopping_ && !options_.starts_daemons) return {};
      if (const std::optional<End> end = Ended()) {
        // What it sent before it was killed is in the socket still.
        while (socket_.valid() && Readable()) ServeOne();
        socket_.Reset();
        hung_up_.reset();
        LookAtTrial();
        return adopted_.valid() ? EndOfAdopted() : *end;
      }
      LookAtHandOver();
      LookAtStop();
      LookAtTrial();
      LookAtHangUp();
      Turn(TimeoutMs());
    }
  }

  std::optional<End> Ended() {
    const std::optional<End> end = Reap();
    if (!adopted_.valid()) return end;
    return ProcessEnded(adopted_.get()) ? std::optional<End>(End()) : std::nullopt;
  }

  End EndOfAdopted() {
    adopted_.Reset();
    ever_served_ = true;
    if (inventory_.ending()) return {.status = W_EXITCODE(0, 0)};
    if (inventory_.handing_over()) return {.status = W_EXITCODE(kHandsOver, 0)};
    return {.status = W_EXITCODE(0, SIGKILL), .seen = false};
  }

  void LookAtHangUp() {
    if (!hung_up_.has_value() || std::chrono::steady_clock::now() - *hung_up_ < LongestDeath()) return;
    // Its descriptors are closed one by one, and a GPU's may take longer than the keeper's is gone.
    if (IsExiting(DaemonPid())) {
      hung_up_ = std::chrono::steady_clock::now();
    } else {
      LetGo();
    }
  }

  // Waits until something has come up, and sees to it.
  void Turn(int timeout_ms) {
    HearWaiting();
    // A descriptor of -1 is not waited for.
    std::vector<pollfd> waiting = {{signals_.get(), POLLIN, 0},
                                   {socket_.get(), POLLIN, 0},
                                   {listener_.get(), POLLIN, 0},
                                   {adopted_.get(), POLLIN, 0}};
    for (const auto& caller : callers_) {
      const auto events = static_cast<int16_t>(caller->spoke ? POLLRDHUP : POLLIN);
      waiting.push_back({caller->socket.get(), events, 0});
    }
    if (poll(waiting.data(), waiting.size(), timeout_ms) <= 0) return;
    if (waiting[0].revents != 0) ReadSignal();
    if (socket_.valid() && waiting[1].revents != 0) ServeOne();
    const auto* events = waiting.data() + 4;
    std::erase_if(callers_, [&events](const std::unique_ptr<Caller>& caller) {
      const bool came_up = (events++)->revents != 0;
      return came_up && (caller->spoke || !SaysHello(caller.get()));
    });
    if (waiting[2].revents != 0) Accept();
  }

  void Accept() {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) return;
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
      setsockopt(socket.get(), SOL_SOCKET, option, &kPatience, sizeof(kPatience));
    const absl::StatusOr<PeerCredentials> peer = CredentialsOf(socket.get());
    if (!peer.ok()) return;
    absl::StatusOr<UniqueFd> pidfd = PidfdOf(socket.get(), *peer);
    if (peer->uid != geteuid() || !pidfd.ok()) {
      LogWarning("caller refused", {{"uid", peer->uid}, {"pid", peer->pid}, {"error", pidfd.status()}});
      return;
    }
    if (callers_.size() >= kMostCallers) {
      const auto silent = std::find_if(callers_.begin(), callers_.end(),
                                       [](const std::unique_ptr<Caller>& caller) { return !caller->spoke; });
      if (silent == callers_.end()) return;
      callers_.erase(silent);
    }
    callers_.push_back(std::make_unique<Caller>(Caller{std::move(socket), *std::move(pidfd), peer->pid}));
  }

  // False: it says something else, or has hung up. One of another version is told so.
  static bool SaysHello(Caller* caller) {
    KeeperFrame frame;
    frame.magic = 0;
    const ssize_t size =
        recv(caller->socket.get(), &frame, sizeof(frame), MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
    caller->spoke = size == sizeof(frame) && frame.magic == KeeperFrame::kMagic &&
                    frame.version == kKeeperVersion && frame.verb == KeeperVerb::kHello;
    if (caller->spoke || size <= 0) return caller->spoke;
    const bool other_version = frame.magic == KeeperFrame::kMagic && frame.version != kKeeperVersion;
    const std::string why = other_version ? absl::StrCat("its frames have version ", frame.version,
                                                         ", those of this kvpoold ", kKeeperVersion)
                                          : absl::StrCat("a packet of ", size, " bytes is no hello");
    LogWarning("caller not understood", {{"pid", caller->pid}, {"error", why}});
    if (other_version) Refuse(caller, why);
    return false;
  }

  static void Refuse(Caller* caller, const std::string& why) {
    KeeperFrame hello, refusal;
    // The answer would be lost with a connection that is closed while there is something to read.
    (void)recv(caller->socket.get(), &hello, sizeof(hello), MSG_DONTWAIT);
    refusal.verb = KeeperVerb::kRefused;
    refusal.set_text(why);
    SendKeeperFrame(caller->socket.get(), refusal).IgnoreError();
  }

  // Serves one who has said hello, if there is nobody else to be served, or it is the one who has been.
  void HearWaiting() {
    std::erase_if(callers_, [this](const std::unique_ptr<Caller>& caller) {
      if (!caller->spoke) return false;
      const bool here = child_ > 0 || adopted_.valid();
      const bool same = here && caller->pid > 0 && caller->pid == DaemonPid();
      if (here && !same && !socket_.valid()) return false;  // The one that is here may be about to end.
      if (here && !same) {
        Refuse(caller.get(), absl::StrCat("it serves another daemon, pid ", DaemonPid()));
        return true;
      }
      socket_ = std::move(caller->socket);
      if (child_ <= 0) adopted_ = std::move(caller->pidfd);
      LogInfo("daemon came", {{"pid", caller->pid}, {"kept", inventory_.size()}});
      OnDaemon();
      return true;
    });
  }

  // By its locks: it has them as long as it lives, whatever becomes of its sockets.
  bool IsAlive() const {
    return std::any_of(options_.daemon_locks.begin(), options_.daemon_locks.end(), IsLocked);
  }

  pid_t DaemonPid() const { return adopted_.valid() ? static_cast<pid_t>(PidOf(adopted_.get())) : child_; }
  // Whether one of another pid namespace is about to end can't be seen.
  std::chrono::milliseconds LongestDeath() const {
    return DaemonPid() > 0 ? kLongestDeath : kLongestUnseenDeath;
  }
  void SignalDaemon(int signal) {
    if (adopted_.valid()) {
      syscall(SYS_pidfd_send_signal, adopted_.get(), signal, nullptr, 0);
    } else if (child_ > 0) {
      kill(child_, signal);
    }
  }

  // Until there is something to do that no descriptor tells of; -1: for ever.
  int TimeoutMs() const {
    const bool on_trial = former_.has_value() && !late_;
    auto next = std::chrono::steady_clock::time_point::max();
    if (hung_up_.has_value()) next = *hung_up_ + LongestDeath();
    if (on_trial) next = std::min(next, trial_end_);
    for (const auto& end : {hand_over_end_, stop_end_}) next = std::min(next, end.value_or(next));
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
    // Somebody else's daemon may be followed by another one, which has nothing of it.
    if (!options_.starts_daemons) adopted_.Reset();
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
    if (options_.starts_daemons && DaemonPid() == 0) untold_ = stopping_ ? SIGTERM : SIGHUP;
    if (options_.starts_daemons) SignalDaemon(static_cast<int>(signal.ssi_signo));
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
  // A daemon that hands over, or was told to end, has to end by then.
  std::optional<std::chrono::steady_clock::time_point> hand_over_end_, stop_end_;
  std::optional<FileLock> lock_;
  UniqueFd listener_;  // Invalid: nobody can come.
  std::vector<std::unique_ptr<Caller>> callers_;
  UniqueFd socket_;
  UniqueFd adopted_;  // The pidfd of a daemon that is no child.
  // When its end of the socket was gone, while the daemon lived.
  std::optional<std::chrono::steady_clock::time_point> hung_up_;
  pid_t child_ = 0;
  int failed_starts_ = 0;
  std::deque<std::chrono::steady_clock::time_point> deaths_;  // Those within kDeathsWithin.
  bool ever_served_ = false;
  bool stopping_ = false;
  int untold_ = 0;  // The signal for a daemon that has not come yet.
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
  Keeper keeper(arguments, options, std::move(program), before, std::move(events),
                *files - std::min<uint64_t>(*files, kOwnFiles));
  const absl::Status listens = keeper.Listen();
  if (!listens.ok() && (absl::IsFailedPrecondition(listens) || !options.starts_daemons)) {
    LogError("keeper not started", {{"error", listens}});
    return 1;
  }
  // The daemon serves all the same. What is wrong with the directory it says itself.
  if (!listens.ok()) LogWarning("keeper without a socket", {{"error", listens}});
  return options.starts_daemons ? keeper.Run() : keeper.KeepOnly();
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
