// How kvpoold starts, refuses to start, and ends, and what it shows outside.
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/support/attach_socket.h"
#include "server/base/sockets.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

TEST(LifecycleTest, ServesAndEndsCleanly) {
  auto daemon = DaemonProcess::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  struct stat file;
  ASSERT_EQ(stat((*daemon)->socket().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0660u);
  ASSERT_EQ(stat((*daemon)->attach_socket().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0660u);
  EXPECT_EQ((*daemon)->Stop(), 0);
  std::set<std::string> left;  // The log is the test's own.
  for (const auto& entry : std::filesystem::directory_iterator((*daemon)->directory()))
    left.insert(entry.path().filename());
  EXPECT_EQ(left, (std::set<std::string>{"epoch", "log"}));
  EXPECT_TRUE(absl::StrContains((*daemon)->Log(), "ended"));
}

// A verb waits less for a processor that others use. See server/base/time_slices.h.
TEST(LifecycleTest, ItsThreadsAskForShortSlices) {
  struct {  // The kernel's struct sched_attr, up to what is of interest.
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
    uint32_t least_use, most_use;
  } asked{};
  ASSERT_EQ(syscall(SYS_sched_getattr, 0, &asked, sizeof(asked), 0), 0);
  if (asked.policy != SCHED_OTHER) GTEST_SKIP() << "the tests run with another scheduling policy";
  if (asked.runtime == 0) GTEST_SKIP() << "this kernel has no slices of a thread's own";
  const auto daemon = DaemonProcess::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  int serve_verbs = 0, others = 0;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", (*daemon)->pid(), "/task"))) {
    const pid_t thread = std::stoi(task.path().filename());
    if (syscall(SYS_sched_getattr, thread, &asked, sizeof(asked), 0) != 0) continue;  // It has ended.
    asked.runtime == 100'000 ? ++serve_verbs : ++others;
    EXPECT_TRUE(asked.runtime == 100'000 || asked.runtime == 300'000)
        << "thread " << thread << " asks for " << asked.runtime;
  }
  EXPECT_GE(serve_verbs, 2);  // The queues: of frames, and of gRPC.
  EXPECT_GT(others, 3);
}

TEST(LifecycleTest, ASecondDaemonIsRefusedAndTheFirstGoesOn) {
  auto first = DaemonProcess::Start();
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string other_state = (*first)->directory() + "/other";
  for (const std::string& state_dir : {(*first)->directory(), other_state}) {
    const ProgramEnd second =
        RunProgram({DaemonProcess::Program(), "--device=host", "--capacity=64MiB",
                    "--socket=" + (*first)->socket(), "--state-dir=" + state_dir, "--metrics-listen="});
    EXPECT_EQ(second.exit_code, 1);
    EXPECT_TRUE(absl::StrContains(second.output, absl::StrCat("pid ", (*first)->pid()))) << second.output;
  }
  EXPECT_TRUE(ConnectAttachSocket((*first)->attach_socket()).ok());
  EXPECT_TRUE(std::filesystem::exists((*first)->socket()));
}

TEST(LifecycleTest, StartsOverWhatAKilledDaemonLeft) {
  auto first = DaemonProcess::Start();
  ASSERT_TRUE(first.ok()) << first.status();
  (*first)->Kill();
  EXPECT_TRUE(std::filesystem::exists((*first)->socket()));
  auto epoch_of = [](const DaemonProcess& daemon) {
    uint64_t epoch = 0;
    std::ifstream(daemon.directory() + "/epoch") >> epoch;
    return epoch;
  };
  const uint64_t before = epoch_of(**first);
  auto second = DaemonProcess::Start({.directory = (*first)->directory()});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_GT(epoch_of(**second), before);
}

TEST(LifecycleTest, BadCommandLinesNameFlagValueAndLimits) {
  struct {
    std::string flag;
    std::vector<std::string> named;
  } const kCases[] = {
      {"--capacity=lots", {"--capacity", "lots", "GiB"}},
      {"--capacity=0", {"--capacity", "0"}},
      {"--device=tpu", {"tpu", "auto"}},
      {"--low-watermark=0.5", {"--low-watermark", "0.5", "0.01"}},
      {"--pin-budget=7", {"--pin-budget", "7", "0 to 1"}},
      {"--policy=clairvoyant", {"--policy", "clairvoyant", "lru"}},
      {"--max-sessions=0", {"--max-sessions", "0", "1"}},
      {"--max-members=66", {"--max-members", "66", "1 to 65"}},
      {"--log-level=loud", {"--log-level", "loud", "debug"}},
      {"--metrics-detail=all", {"--metrics-detail", "all", "standard", "debug"}},
      {"--socket=relative.sock", {"--socket", "relative.sock", "absolute"}},
      {"--socket=/" + std::string(120, 's'), {"--socket", "107"}},
      {"--operator-tls-listen=127.0.0.1:0", {"--operator-tls-listen", "--operator-tls-ca"}},
      {"--rpc-threads=many", {"--rpc-threads", "many", "64"}},
      {"--score-threads=2000", {"--score-threads", "2000", "1024"}},
      {"--score-queue=0", {"--score-queue", "0", "1"}},
      {"--score-features=lots", {"--score-features", "lots", "GiB"}},
      {"--score-workspace=-1", {"--score-workspace", "-1"}},
      {"--score-time=0s", {"--score-time", "0s"}},
      {"--guard-share=1.5", {"--guard-share", "1.5", "0 to 1"}},
      {"--guard-share=1e-9", {"--guard-share", "1e-09", "1e-06"}},
      {"--guard-bound=0.2", {"--guard-bound", "0.2", "--guard-share"}},
      {"--guard-samples=0", {"--guard-samples", "0", "1 to 4096"}},
      {"--no_such_flag", {"kvpoold: no flag --no-such-flag; see --help"}},
      {"--config=/nonexistent.conf", {"--config", "/nonexistent.conf"}},
      {"--capacity=150%", {"--capacity", "150%", "100%"}},
      {"--tenant-share=0", {"--tenant-share=0"}},
  };
  for (const auto& bad : kCases) {
    const ProgramEnd end = RunProgram({DaemonProcess::Program(), bad.flag});
    EXPECT_EQ(end.exit_code, 2) << bad.flag << "\n" << end.output;
    for (const std::string& word : bad.named) {
      EXPECT_TRUE(absl::StrContains(end.output, word)) << bad.flag << " lacks " << word << ":\n"
                                                       << end.output;
    }
  }
}

TEST(LifecycleTest, RulesOfAccessAreReadBeforeAnythingIsServed) {
  const TemporaryDirectory directory;
  const std::string access = directory.path() + "/access.conf", config = directory.path() + "/kvpoold.conf";
  std::ofstream(access) << "[engines]\nuid = 1000\nrole = engine\n";
  std::ofstream(config) << "access = /nonexistent\n";
  const std::vector<std::string> common = {DaemonProcess::Program(), "--device=host", "--capacity=64MiB",
                                           "--socket=" + directory.path() + "/k.sock", "--metrics-listen="};
  const auto output = [&common](const std::string& flag) {
    std::vector<std::string> command = common;
    command.push_back(flag);
    const ProgramEnd end = RunProgram(command);
    EXPECT_EQ(end.exit_code, 2) << end.output;
    return end.output;
  };
  EXPECT_EQ(
      output("--access=" + access),
      absl::StrCat(
          "kvpoold: ", access,
          ":1: [engines] tenant is missing: an engine needs one, or *, by which each uid has its own\n"));
  EXPECT_EQ(output("--config=" + config),
            absl::StrCat("kvpoold: ", config,
                         ":1: --access=/nonexistent: cannot read it: No such file or directory\n"));
}

bool Logs(const DaemonProcess& daemon, const std::string& text, int times) {
  const std::string log = daemon.AwaitInLog(text, times);
  int found = 0;
  for (size_t at = 0; (at = log.find(text, at)) != std::string::npos; ++at) ++found;
  return found >= times;
}

TEST(LifecycleTest, RulesOfAccessAreReadAgainOnSighup) {
  const TemporaryDirectory directory;
  const std::string access = directory.path() + "/access.conf";
  const std::string everybody = "[everybody]\nuid = *\nrole = engine, operator\ntenant = *\n";
  std::ofstream(access) << everybody;
  auto daemon = DaemonProcess::Start({.flags = {"--access=" + access}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto attach = [&] {
    const auto engine = RawEngine::Attach((*daemon)->socket());
    return engine.ok() ? "welcome" : std::string(engine.status().message());
  };
  EXPECT_EQ(attach(), "welcome");
  // What is wrong changes nothing.
  std::ofstream(access) << everybody << "sessions = none\n";
  (*daemon)->Signal(SIGHUP);
  EXPECT_TRUE(Logs(**daemon, "access rules refused", 1)) << (*daemon)->Log();
  EXPECT_TRUE(
      absl::StrContains((*daemon)->Log(), ":5: [everybody] sessions = none: the limits are 1 and 4294967294"))
      << (*daemon)->Log();
  EXPECT_EQ(attach(), "welcome");
  std::filesystem::remove(access);
  (*daemon)->Signal(SIGHUP);
  EXPECT_TRUE(Logs(**daemon, "access rules refused", 2)) << (*daemon)->Log();
  EXPECT_EQ(attach(), "welcome");
  std::ofstream(access) << "[operators]\nuid = *\nrole = operator\n";
  (*daemon)->Signal(SIGHUP);
  EXPECT_TRUE(Logs(**daemon, "access rules read category=audit", 1)) << (*daemon)->Log();
  EXPECT_TRUE(absl::StrContains(attach(), "rule [operators] gives it operator")) << attach();
  EXPECT_EQ((*daemon)->Metric("kvpool_attach_refused_total", "reason=\"access\""), 1);
  EXPECT_EQ((*daemon)->Stop(), 0);
}

// The only child of this process, whichever thread has started it; 0: there is none.
pid_t OnlyChild() {
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream children(thread.path() / "children");
    if (pid_t child = 0; children >> child) return child;
  }
  return 0;
}

// As after `systemctl restart`, where the manager knows of no moment from which on a process wants to hear of it.
TEST(LifecycleTest, AReloadThatComesAtTheStartEndsNothing) {
  for (const std::string keeper : {"off", "on"}) {
    SCOPED_TRACE(keeper);
    const TemporaryDirectory directory;
    const std::string config = directory.path() + "/kvpoold.conf";
    std::ofstream(config) << "keeper = " << keeper << "\n";
    const UniqueFd openings(inotify_init1(IN_CLOEXEC));
    ASSERT_GE(inotify_add_watch(openings.get(), config.c_str(), IN_OPEN), 0);
    // Whoever opens it has hardly begun. The keeper passes reloads on to the daemon that it starts.
    std::atomic<bool> started{false};
    int reloads = 0;
    std::thread reload([&] {
      pid_t child = 0;
      while (!started && (child = OnlyChild()) == 0) std::this_thread::yield();
      pollfd opening{.fd = openings.get(), .events = POLLIN, .revents = 0};
      if (poll(&opening, 1, /*milliseconds=*/30000) != 1) return;
      for (; !started; ++reloads) {
        kill(child, SIGHUP);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    auto daemon = DaemonProcess::Start({.directory = directory.path(), .flags = {"--config=" + config}});
    started = true;
    reload.join();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    EXPECT_GT(reloads, 0);
    // It is not forgotten either.
    EXPECT_TRUE(Logs(**daemon, "SIGHUP, and no --access to read again", 1)) << (*daemon)->Log();
    EXPECT_EQ((*daemon)->Stop(), 0);
  }
}

// The kernel's word for it: a process of another user, whom the socket's group lets in.
TEST(LifecycleTest, AnotherUserIsRefusedUnlessARuleNamesHim) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  const TemporaryDirectory directory;
  const std::string access = directory.path() + "/access.conf";
  std::filesystem::permissions(directory.path(), std::filesystem::perms(0755));
  const auto as_another = [](const DaemonProcess& daemon, const std::string& groups, const char* verb) {
    return RunProgram({"/usr/bin/setpriv", "--reuid=54321", "--regid=0", groups, KVPOOLCTL,
                       "--socket=" + daemon.socket(), verb});
  };
  {
    auto daemon = DaemonProcess::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    std::filesystem::permissions((*daemon)->directory(), std::filesystem::perms(0755));
    const ProgramEnd refused = as_another(**daemon, "--clear-groups", "status");
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_TRUE(
        absl::StrContains(refused.output, "GetStats needs the role observer, which uid 54321 (gid 0, pid "))
        << refused.output;
    EXPECT_TRUE(
        absl::StrContains(refused.output, "without --access=FILE only uid 0, the daemon's own, and root"))
        << refused.output;
    EXPECT_EQ(as_another(**daemon, "--clear-groups", "health").exit_code, 0) << "a probe may be anybody";
  }
  std::ofstream(access) << "[readers]\ngid = 54322\nrole = observer\n[root]\nuid = 0\nrole = operator\n";
  auto daemon = DaemonProcess::Start({.flags = {"--access=" + access}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  std::filesystem::permissions((*daemon)->directory(), std::filesystem::perms(0755));
  EXPECT_NE(as_another(**daemon, "--clear-groups", "status").exit_code, 0);
  const ProgramEnd read = as_another(**daemon, "--groups=7,54322,9", "status");
  EXPECT_EQ(read.exit_code, 0) << read.output;
  const ProgramEnd drained = as_another(**daemon, "--groups=7,54322,9", "drain");
  EXPECT_TRUE(absl::StrContains(drained.output, "Drain needs the role operator")) << drained.output;
}

TEST(LifecycleTest, HelpAndVersion) {
  const ProgramEnd help = RunProgram({DaemonProcess::Program(), "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(help.output, "lru:")) << help.output;
  EXPECT_TRUE(absl::StrContains(help.output, "--shutdown-grace")) << help.output;
  EXPECT_TRUE(absl::StrContains(help.output, "paged_eviction: ")) << help.output;
  EXPECT_TRUE(absl::StrContains(help.output, "streaming_llm: ")) << help.output;
  const ProgramEnd version = RunProgram({DaemonProcess::Program(), "--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(absl::StartsWith(version.output, "kvpoold 0.")) << version.output;
}

TEST(LifecycleTest, ReadsAConfigFile) {
  char directory[] = "/tmp/kvpoold-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string config = absl::StrCat(directory, "/kvpoold.conf");
  std::ofstream(config) << "# A comment.\n\nlog-format = json\n pin_budget=0.5\n";
  auto daemon = DaemonProcess::Start({.directory = directory, .flags = {"--config=" + config}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  // The daemon answers before it logs that it serves.
  EXPECT_TRUE(Logs(**daemon, "\"event\":\"serving\"", 1)) << (*daemon)->Log();
  std::ofstream(config) << "pin_budget\n";
  const ProgramEnd end = RunProgram({DaemonProcess::Program(), "--config=" + config});
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(end.output, config + ":1")) << end.output;
  // The command line wins, whichever comes first.
  std::ofstream(config) << "log-level = loud\n";
  const ProgramEnd won =
      RunProgram({DaemonProcess::Program(), "--log-level=info", "--config=" + config, "--capacity=0"});
  EXPECT_TRUE(absl::StrContains(won.output, "--capacity: \"0\"")) << won.output;
  daemon->reset();
  std::filesystem::remove_all(directory);
}

TEST(LifecycleTest, MakesItsOwnDirectoryAndNoOther) {
  const TemporaryDirectory directory;
  const std::string missing = directory.path() + "/typo";
  const ProgramEnd socket = RunProgram(
      {DaemonProcess::Program(), "--device=host", "--socket=" + missing + "/k.sock", "--metrics-listen="});
  EXPECT_EQ(socket.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(socket.output, "/k.sock: there is no directory " + missing)) << socket.output;
  const ProgramEnd state =
      RunProgram({DaemonProcess::Program(), "--device=host", "--socket=" + directory.path() + "/k.sock",
                  "--state-dir=" + missing + "/state", "--metrics-listen="});
  EXPECT_EQ(state.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(state.output, "--state-dir: cannot make")) << state.output;
  EXPECT_TRUE(absl::StrContains(state.output, "there is no directory " + missing)) << state.output;
  EXPECT_FALSE(std::filesystem::exists(missing));
}

TEST(LifecycleTest, ReplacesNoFileThatIsNoSocket) {
  const TemporaryDirectory directory;
  for (const char* name : {"/k.sock", "/k.sock.attach"}) {
    const std::string file = directory.path() + name;
    std::ofstream(file) << "letters";
    const ProgramEnd end = RunProgram({DaemonProcess::Program(), "--device=host",
                                       "--socket=" + directory.path() + "/k.sock", "--metrics-listen="});
    EXPECT_EQ(end.exit_code, 2);
    EXPECT_TRUE(absl::StrContains(end.output, file + " is there, and is no socket")) << end.output;
    EXPECT_EQ(std::filesystem::file_size(file), 7u);
    std::filesystem::remove(file);
  }
}

// Errors that come after parsing begin with the flag, and with file and line where a file sets it.
TEST(LifecycleTest, WhatDevicesCannotGiveNamesTheFlag) {
  const TemporaryDirectory directory;
  const std::string config = directory.path() + "/kvpoold.conf";
  std::ofstream(config) << "device = host\ncapacity = 16MiB\nslab-bytes = 32MiB\n";
  const std::vector<std::string> common = {DaemonProcess::Program(),
                                           "--socket=" + directory.path() + "/k.sock", "--metrics-listen="};
  const auto output = [&common](std::vector<std::string> flags) {
    flags.insert(flags.begin(), common.begin(), common.end());
    const ProgramEnd end = RunProgram(flags);
    EXPECT_EQ(end.exit_code, 2) << end.output;
    return end.output;
  };
  EXPECT_EQ(
      output({"--config=" + config}),
      absl::StrCat("kvpoold: ", config,
                   ":3: --slab-bytes=33554432: the limits on host are 2097152 and its capacity, 16777216\n"));
  EXPECT_EQ(output({"--device=host", "--capacity=1KiB"}),
            "kvpoold: --capacity=1KiB: 1024 bytes of host; the least is 2097152\n");
  const std::string access = directory.path() + "/access.conf";
  std::ofstream(access) << "[operators]\nsan = operator.example\nrole = operator\n";
  for (const char* flag : {"operator-tls-cert", "operator-tls-key", "operator-tls-ca"}) {
    std::vector<std::string> flags = {"--device=host", "--capacity=16MiB", "--log-level=error",
                                      "--operator-tls-listen=127.0.0.1:0", "--access=" + access};
    for (const char* file : {"operator-tls-cert", "operator-tls-key", "operator-tls-ca"}) {
      flags.push_back(absl::StrCat("--", file, "=", file == std::string(flag) ? "/nope" : config));
    }
    EXPECT_EQ(output(flags),
              absl::StrCat("kvpoold: --", flag, "=/nope: cannot read it: No such file or directory\n"));
  }
}

// Only one has the lock at a time, although each owner removes the file.
TEST(LifecycleTest, LockFilesThatAreRemovedKeepOthersOut) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/lock";
  std::atomic<int> owners{0}, taken{0}, crowds{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (taken < 200) {
        const absl::StatusOr<FileLock> lock = FileLock::Take(path);
        if (!lock.ok()) continue;
        ++taken;
        if (++owners != 1) ++crowds;
        std::this_thread::yield();
        if (owners != 1) ++crowds;
        --owners;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(crowds, 0);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(LifecycleTest, AMetricsPortThatIsTakenIsNamed) {
  auto first = DaemonProcess::Start();
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = absl::StrCat("127.0.0.1:", (*first)->metrics_port());
  const TemporaryDirectory directory;
  const ProgramEnd second =
      RunProgram({DaemonProcess::Program(), "--device=host", "--capacity=64MiB", "--log-level=error",
                  "--socket=" + directory.path() + "/k.sock", "--metrics-listen=" + address});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_EQ(std::count(second.output.begin(), second.output.end(), '\n'), 1) << second.output;
  EXPECT_TRUE(absl::StrContains(second.output, "--metrics-listen=" + address)) << second.output;
  EXPECT_TRUE(absl::StrContains(second.output, "Address already in use")) << second.output;
}

TEST(LifecycleTest, MetricsAreTheDaemonsOwn) {
  auto daemon = DaemonProcess::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto metrics = (*daemon)->Metrics();
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_TRUE(absl::StrContains(*metrics, "kvpool_build_info{version="));
  EXPECT_TRUE(absl::StrContains(*metrics, "cuda=\""));
  // Prometheus sees no increase from no series to the first count.
  for (const char* code : {"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}) {
    for (const char* method : {"Step", "OpenSession", "Evict"}) {
      EXPECT_TRUE(absl::StrContains(*metrics, absl::StrCat("kvpool_rpc_errors_total{method=\"", method,
                                                           "\",code=\"", code, "\"} 0\n")));
    }
  }
  EXPECT_EQ((*daemon)->Metric("kvpool_device_capacity_bytes"), 64 << 20);
  // The library adds no metrics of its own.
  for (absl::string_view line : absl::StrSplit(*metrics, '\n', absl::SkipEmpty())) {
    EXPECT_TRUE(absl::StartsWith(line, "#") || absl::StartsWith(line, "kvpool_") ||
                absl::StartsWith(line, "process_"))
        << line;
  }
}

TEST(LifecycleTest, SilentAndNoisyStrangersAtTheGrpcSocketHurtNobody) {
  auto daemon = DaemonProcess::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, (*daemon)->socket().c_str(), sizeof(address.sun_path) - 1);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 1000; ++i) {
    UniqueFd stranger(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (i % 2 == 1) {
      const std::string noise = "GET / HTTP/1.1\r\nHost: kvpool\r\n\r\n";
      (void)send(stranger.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    }
    strangers.push_back(std::move(stranger));
  }
  // Once the last noisy one is hung up on, all those before it have been handled.
  char byte;
  EXPECT_LE(recv(strangers.back().get(), &byte, 1, 0), 0);
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", (*daemon)->pid(), "/fd"))) {
    ++files;
  }
  EXPECT_LT(files, 200u);
}

}  // namespace
}  // namespace kvpool
