#include "client/replay/local_daemon.h"

#include <signal.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/tools/operator_client.h"
#include "proto/support/status_macros.h"

namespace kvpool::replay {
namespace {

constexpr uint64_t kPageBytes = 2 << 20;  // Slabs are whole numbers of these.
constexpr auto kStartsWithin = std::chrono::seconds(30);

// A keeper gives up after too many deaths, unless that is what is wanted.
constexpr int kMostDeaths = 1'000'000'000;

// The pid in kvpoold.json; 0: none serves.
pid_t PidIn(const std::string& folder) {
  std::ifstream file(folder + "/kvpoold.json");
  std::stringstream text;
  text << file.rdbuf();
  const std::string json = text.str();
  constexpr absl::string_view kField = "\"pid\":";
  const size_t at = json.find(kField.data(), 0, kField.size());
  return at == std::string::npos ? 0 : atoi(json.c_str() + at + kField.size());
}

std::string SocketIn(const std::string& folder) { return folder + "/kvpoold.sock"; }

// OK once it serves; an error when it ended, or takes too long.
absl::Status WaitUntilServing(ChildProcess* process, const std::string& socket) {
  ASSIGN_OR_RETURN(const std::unique_ptr<tools::OperatorClient> client,
                   tools::OperatorClient::Open({.socket = socket, .deadline = absl::Seconds(1)}));
  const auto give_up = std::chrono::steady_clock::now() + kStartsWithin;
  while (true) {
    const absl::StatusOr<tools::Health> health = client->CheckHealth("");
    if (health.ok() && *health == tools::Health::kServing) return absl::OkStatus();
    if (const std::optional<int> ended = process->TryWait(); ended.has_value()) {
      return absl::UnavailableError(absl::StrCat("kvpoold ended before it served: ", DescribeEnd(*ended)));
    }
    if (std::chrono::steady_clock::now() > give_up) {
      return absl::DeadlineExceededError(
          absl::StrCat("kvpoold does not serve after ", kStartsWithin.count(), " s"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalDaemon>> LocalDaemon::Start(const std::string& program,
                                                                const LocalDaemonOptions& options) {
  std::string folder = (std::filesystem::temp_directory_path() / "kvpool-replay-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, folder);
  // One slab: block 0 is no part of the capacity, and the pool has its size from the start.
  const uint64_t bytes = (options.blocks + 1) * options.block_bytes;
  const uint64_t capacity = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::vector<std::string> arguments = {absl::StrCat("--socket=", SocketIn(folder)),
                                        absl::StrCat("--state-dir=", folder),
                                        "--device=host",
                                        "--policy=lru",  // What an exact LRU is compared with.
                                        absl::StrCat("--capacity=", capacity),
                                        absl::StrCat("--slab-bytes=", capacity),
                                        "--metrics-listen="};
  if (options.keeper) {
    arguments.push_back("--keeper=on");
    arguments.push_back(absl::StrCat("--keeper-deaths=", kMostDeaths));
  }
  arguments.insert(arguments.end(), options.flags.begin(), options.flags.end());
  ASSIGN_OR_RETURN(ChildProcess process, ChildProcess::Start(program, arguments));
  std::unique_ptr<LocalDaemon> daemon(
      new LocalDaemon(std::move(folder), program, std::move(arguments), options.keeper, std::move(process)));
  RETURN_IF_ERROR(WaitUntilServing(&daemon->process_, daemon->socket_));
  return daemon;
}

LocalDaemon::LocalDaemon(std::string folder, std::string program, std::vector<std::string> arguments,
                         bool keeper, ChildProcess process)
    : folder_(std::move(folder)),
      socket_(SocketIn(folder_)),
      program_(std::move(program)),
      arguments_(std::move(arguments)),
      keeper_(keeper),
      process_(std::move(process)) {}

absl::Status LocalDaemon::KillUnderKeeper() {
  const auto give_up = std::chrono::steady_clock::now() + kStartsWithin;
  for (pid_t killed = 0; std::chrono::steady_clock::now() < give_up;) {
    const pid_t serving = PidIn(folder_);
    if (killed == 0 && serving > 0 && kill(serving, SIGKILL) == 0) killed = serving;
    if (killed != 0 && serving > 0 && serving != killed) return WaitUntilServing(&process_, socket_);
    if (const std::optional<int> ended = process_.TryWait(); ended.has_value())
      return absl::UnavailableError(absl::StrCat("the keeper ended: ", DescribeEnd(*ended)));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("no daemon after a kill within ", kStartsWithin.count(), " s"));
}

absl::Status LocalDaemon::KillAndRestart() {
  if (keeper_) return KillUnderKeeper();
  process_.Signal(SIGKILL);
  process_.Wait();
  ASSIGN_OR_RETURN(process_, ChildProcess::Start(program_, arguments_));
  return WaitUntilServing(&process_, socket_);
}

LocalDaemon::~LocalDaemon() {
  process_.Signal(SIGTERM);
  process_.Wait();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace kvpool::replay
