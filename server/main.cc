// kvpoold owns the KV-cache memory of GPUs and leases it to LLM engines. Exit status: 0 after SIGTERM or
// SIGINT, 2 if the settings can't be met, 1 for everything else; and kHandsOver, to its keeper alone.
#include <google/protobuf/stubs/logging.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/base/log.h"
#include "server/base/sockets.h"
#include "server/base/time_slices.h"
#include "server/gpu_witness.h"
#include "server/keeper/keeper.h"
#include "server/kvpoold.h"
#include "server/settings.h"

namespace {

constexpr auto kDrainPoll = std::chrono::milliseconds(20);
// A daemon that ends gives memory back in so long, or hangs. With the defaults its keeper kills it before systemd kills that.
constexpr auto kLastFreeing = std::chrono::seconds(10);

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "kvpoold: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

// Words about bytes of a peer, who is answered: Protocol Buffers' own logger writes them to stderr on the thread that
// parses, where they may be any number, and where nobody may read.
void LogWordsOfProtobuf(google::protobuf::LogLevel, const char* file, int line, const std::string& words) {
  kvpool::Log(kvpool::LogLevel::kDebug, "Protocol Buffers says",
              {{"words", words}, {"file", file}, {"line", line}});
}

sigset_t SetOf(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) sigaddset(&set, signal);
  return set;
}

// Waits until all sessions have ended by themselves, the grace is over, or a second signal comes.
void DrainFor(kvpool::Kvpoold* kvpoold, std::chrono::milliseconds grace, const sigset_t& signals) {
  const timespec poll{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kDrainPoll).count()};
  const auto end = std::chrono::steady_clock::now() + grace;
  while (kvpoold->Drain() > 0 && std::chrono::steady_clock::now() < end) {
    if (sigtimedwait(&signals, nullptr, &poll) > 0) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Debian builds Abseil with deadlock detection, where each of gRPC's locks looks for cycles:
  // 3 % of a round trip.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  if (const std::optional<kvpool::WitnessPart> part = kvpool::TakeWitnessPart())
    return kvpool::BearWitness(*part);
  // One that comes before somebody waits for it is seen then, by the daemon or its keeper, instead of ending it.
  const sigset_t reloads = SetOf({SIGHUP});
  pthread_sigmask(SIG_BLOCK, &reloads, nullptr);
  const absl::StatusOr<kvpool::Settings> settings = kvpool::ParseSettings({argv + 1, argv + argc});
  if (!settings.ok()) return Fail(settings.status());
  if (!settings->reply.empty()) {
    std::fputs(settings->reply.c_str(), stdout);
    return 0;
  }
  kvpool::AskFor(kvpool::Slices::kShort);
  kvpool::SetLog(settings->log);
  signal(SIGPIPE, SIG_IGN);  // A log that nobody reads any more ends neither the daemon nor its keeper.
  kvpool::KeeperEnd keeper = kvpool::TakeKeeperEnd();
  if (settings->keeper_only || (settings->keeper && !keeper.socket.valid())) {
    // As the daemon does, which says what is wrong with it: a socket's directory that somebody named is not made.
    if (settings->default_socket || settings->state_dir != settings->socket_directory())
      kvpool::MakeOwnDirectory("--state-dir", settings->state_dir).IgnoreError();
    return kvpool::RunKeeper(
        {argv, argv + argc},
        {.most_deaths = settings->keeper_deaths,
         .most_start = settings->most_start(),
         .socket = settings->keeper_socket,
         .daemon_locks = {settings->socket + ".lock", settings->state_dir + "/kvpoold.lock"},
         .most_end = settings->shutdown_grace + settings->tier_flush + kLastFreeing,
         .starts_daemons = !settings->keeper_only});
  }
  // Its keeper starts it by a descriptor, and it would go by that number.
  prctl(PR_SET_NAME, "kvpoold");
  google::protobuf::SetLogHandler(LogWordsOfProtobuf);
  // Main waits for them. They are blocked before the first thread starts, so that no thread gets them.
  const sigset_t ends = SetOf({SIGTERM, SIGINT}),
                 all = SetOf({SIGTERM, SIGINT, SIGHUP, kvpool::Kvpoold::kHandOverSignal});
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::optional<kvpool::LogWriter> log_writer(std::in_place);

  absl::StatusOr<std::unique_ptr<kvpool::Kvpoold>> kvpoold =
      kvpool::Kvpoold::Start(*settings, std::move(keeper));
  if (!kvpoold.ok()) return Fail(settings->Placed(kvpoold.status()));

  int signal_number = 0;
  while (sigwait(&all, &signal_number) == 0) {
    if (signal_number == SIGHUP) {
      (*kvpoold)->ReadAccessAgain();
    } else if (signal_number != kvpool::Kvpoold::kHandOverSignal) {
      break;
    } else if ((*kvpoold)->handing_over()) {
      (*kvpoold)->HandOver();
      kvpool::LogInfo("handed over");
      log_writer.reset();
      // What is in memory is the next daemon's, and nothing of it is to be put away.
      _exit(kvpool::kHandsOver);
    }
  }
  kvpool::LogInfo("shutting down", {{"signal", signal_number}});
  // While an upgrade begins all verbs are refused: no session would end by itself.
  const bool drains = (*kvpoold)->BeginEnd();
  if ((*kvpoold)->EndForNext()) {
    kvpool::LogInfo("ended", {{"next", "goes on with all that the keeper has"}});
    log_writer.reset();
    _exit(0);
  }
  if (drains) DrainFor(kvpoold->get(), settings->shutdown_grace, ends);
  (*kvpoold)->Stop();
  kvpool::LogInfo("ended");
  return 0;
}
