#include "client/replay/replay.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/replay/child_process.h"
#include "client/replay/engine.h"
#include "client/tools/operator_client.h"
#include "client/tools/text.h"
#include "proto/support/status_macros.h"

namespace kvpool::replay {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kShowAfter = std::chrono::seconds(2);
constexpr auto kShowEvery = std::chrono::milliseconds(200);
// Members' deaths free their blocks in milliseconds; a machine that is busy with other
// things may take longer.
constexpr auto kSettleWithin = std::chrono::seconds(30);
// Blocks in magazines are leased and no cache: all of them together are at most this part of the pool, unless
// each has only one.
constexpr uint64_t kMagazinesPartOfPool = 400;
constexpr uint64_t kLargestMagazine = 256;

// One line on the terminal that is written over and over.
class ProgressLine {
 public:
  ProgressLine(bool wanted, uint32_t total) : wanted_(wanted), total_(total) {}
  ~ProgressLine() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }
  void Update(uint32_t done, uint64_t kills) {
    const auto now = Clock::now();
    if (!wanted_ || now < next_) return;
    next_ = now + kShowEvery;
    shown_ = true;
    constexpr size_t kCells = 30;
    const double share = static_cast<double>(done) / total_;
    const auto filled = static_cast<size_t>(share * kCells);
    const double seconds = std::chrono::duration<double>(now - start_).count();
    std::string line = absl::StrFormat("\r[%s%s] %3.0f %%  %s of %s requests", std::string(filled, '='),
                                       std::string(kCells - filled, ' '), 100 * share,
                                       tools::HumanCount(done), tools::HumanCount(total_));
    if (kills > 0) absl::StrAppend(&line, ", ", kills, " killed");
    if (done > 0) absl::StrAppend(&line, ", ", tools::HumanSeconds(seconds / share - seconds), " left");
    std::fputs((line + "\x1b[K").c_str(), stderr);
  }

 private:
  const bool wanted_;
  const uint32_t total_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_ + kShowAfter;
  bool shown_ = false;
};

// What the daemons of a replay counted, those that were killed included.
struct DaemonCounts {
  uint64_t evictions = 0;
  std::optional<BelowCounts> below;

  void Add(const DaemonCounts& other) {
    evictions += other.evictions;
    if (!other.below.has_value()) return;
    if (!below.has_value()) below.emplace();
    below->demoted_blocks += other.below->demoted_blocks;
    below->promoted_blocks += other.below->promoted_blocks;
    below->late_blocks += other.below->late_blocks;
    below->dropped_blocks += other.below->dropped_blocks;
    below->lost_blocks += other.below->lost_blocks;
    below->no_room_blocks += other.below->no_room_blocks;
    below->corrupt_values += other.below->corrupt_values;
  }
};

absl::StatusOr<DaemonCounts> CountsOf(const std::string& socket) {
  ASSIGN_OR_RETURN(const std::unique_ptr<tools::OperatorClient> daemon,
                   tools::OperatorClient::Open({.socket = socket, .deadline = absl::Seconds(30)}));
  ASSIGN_OR_RETURN(const v1::GetStatsResponse stats, daemon->GetStats({}));
  DaemonCounts counts{.evictions = stats.evicted_total()};
  const absl::StatusOr<v1::ListTiersResponse> tiers = daemon->ListTiers({});
  if (absl::IsUnimplemented(tiers.status())) return counts;  // An older daemon.
  RETURN_IF_ERROR(tiers.status());
  for (const v1::TierInfo& tier : tiers->tiers()) {
    counts.below = {.demoted_blocks = tier.demoted_blocks(),
                    .promoted_blocks = tier.promoted_blocks(),
                    .late_blocks = tier.late_blocks(),
                    .dropped_blocks = tier.unwritten_blocks(),
                    .lost_blocks = tier.lost_blocks(),
                    .no_room_blocks = tier.no_room_blocks(),
                    .corrupt_values = tier.corrupt()};
  }
  return counts;
}

// The engine processes, and which of them is killed when.
class Fleet {
 public:
  Fleet(const ReplayOptions& options, Board* board, std::vector<std::string> arguments)
      : options_(options), board_(board), arguments_(std::move(arguments)), dice_(options.seed) {
    if (options.kill_one_at > 0) {
      kill_once_at_ = static_cast<uint32_t>(options.kill_one_at * board->size().requests);
    }
    if (options.kill_every > 0) ScheduleKill(options.kill_every);
    next_daemon_kill_at_ = options.kill_daemon_every;
  }

  absl::Status Start() {
    for (uint32_t engine = 0; engine < options_.engines; ++engine) {
      ASSIGN_OR_RETURN(ChildProcess process, StartEngine(engine));
      processes_.push_back(std::move(process));
    }
    return absl::OkStatus();
  }

  // Until all requests are done and all engines have ended.
  absl::Status Run() {
    ProgressLine progress(options_.progress, board_->size().requests);
    while (!processes_.empty()) {
      const uint32_t done = board_->done();
      progress.Update(done, kills_);
      if (KillIsDue(done)) RETURN_IF_ERROR(KillOne());
      if (DaemonKillIsDue(done)) RETURN_IF_ERROR(KillDaemon());
      RETURN_IF_ERROR(ReapOne());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (board_->done() != board_->size().requests) {
      return absl::InternalError(absl::StrCat("the engines have ended with ", board_->done(), " of ",
                                              board_->size().requests, " requests done"));
    }
    return absl::OkStatus();
  }

  uint64_t kills() const { return kills_; }
  uint64_t reopened() const { return reopened_; }
  uint64_t daemon_kills() const { return daemon_kills_; }
  const DaemonCounts& killed_daemons() const { return killed_daemons_; }

 private:
  absl::StatusOr<ChildProcess> StartEngine(uint32_t engine) const {
    std::vector<std::string> arguments = arguments_;
    arguments.push_back(absl::StrCat("--engine-slot=", engine));
    arguments.push_back(absl::StrCat("--engine-board=", board_->fd()));
    return ChildProcess::Start(OwnPath(), arguments);
  }

  bool KillIsDue(uint32_t done) {
    if (done == board_->size().requests) return false;
    if (kill_once_at_.has_value() && done >= *kill_once_at_) {
      kill_once_at_.reset();
      return true;
    }
    if (next_kill_at_ == 0 || done < next_kill_at_) return false;
    ScheduleKill(next_kill_at_ + options_.kill_every);
    return true;
  }

  bool DaemonKillIsDue(uint32_t done) {
    if (next_daemon_kill_at_ == 0 || done < next_daemon_kill_at_ || done == board_->size().requests)
      return false;
    next_daemon_kill_at_ += options_.kill_daemon_every;
    return true;
  }

  // This ends the daemon first, so that engines meet its end, then they: their sessions have ended with it.
  absl::Status KillDaemon() {
    ASSIGN_OR_RETURN(const DaemonCounts counts, CountsOf(options_.socket));
    killed_daemons_.Add(counts);
    if (!options_.engines_outlive_daemon) {
      for (uint32_t engine = 0; engine < processes_.size(); ++engine) board_->Doom(engine);
    }
    RETURN_IF_ERROR(options_.restart_daemon());
    ++daemon_kills_;
    if (options_.engines_outlive_daemon) return absl::OkStatus();
    for (uint32_t engine = 0; engine < processes_.size(); ++engine) {
      processes_[engine].Signal(SIGKILL);
      processes_[engine].Wait();
      reopened_ += board_->Reopen(engine);
      ASSIGN_OR_RETURN(processes_[engine], StartEngine(engine));
    }
    return absl::OkStatus();
  }

  // Engines may be ahead of the next kill by as much as lies between two, so that it finds them at work.
  void ScheduleKill(uint64_t done) {
    next_kill_at_ = done;
    board_->HoldFrom(done + options_.kill_every);
  }

  // Three times in four this is an engine that serves a request, if one does: otherwise most kills would hit
  // an engine that is only starting.
  uint32_t ChooseVictim() {
    std::vector<uint32_t> busy;
    for (uint32_t engine = 0; engine < processes_.size(); ++engine) {
      if (board_->busy(engine)) busy.push_back(engine);
    }
    if (busy.empty() || dice_() % 4 == 0) return static_cast<uint32_t>(dice_() % processes_.size());
    return busy[dice_() % busy.size()];
  }

  // SIGKILL, in the middle of whatever it does; the next process in its place goes on.
  absl::Status KillOne() {
    const uint32_t engine = ChooseVictim();
    board_->Doom(engine);
    processes_[engine].Signal(SIGKILL);
    const int end = processes_[engine].Wait();
    reopened_ += board_->Reopen(engine);
    // It may have ended by itself just before.
    if (!WIFSIGNALED(end)) return absl::OkStatus();
    ++kills_;
    ASSIGN_OR_RETURN(processes_[engine], StartEngine(engine));
    return absl::OkStatus();
  }

  // Engines end by themselves when all is done, or because something is wrong.
  absl::Status ReapOne() {
    for (size_t i = 0; i < processes_.size(); ++i) {
      const std::optional<int> end = processes_[i].TryWait();
      if (!end.has_value()) continue;
      if (*end != 0) {
        board_->Stop();
        return absl::InternalError(absl::StrCat("engine ", i, " failed: ", DescribeEnd(*end)));
      }
      if (board_->done() == board_->size().requests) return WaitForAll();
      return absl::InternalError(absl::StrCat("engine ", i, " ended before all requests were done"));
    }
    return absl::OkStatus();
  }

  absl::Status WaitForAll() {
    for (size_t i = 0; i < processes_.size(); ++i) {
      const int end = processes_[i].Wait();
      if (end != 0) return absl::InternalError(absl::StrCat("engine ", i, " failed: ", DescribeEnd(end)));
    }
    processes_.clear();
    return absl::OkStatus();
  }

  const ReplayOptions& options_;
  Board* const board_;
  const std::vector<std::string> arguments_;
  std::mt19937_64 dice_;
  std::vector<ChildProcess> processes_;  // Indexed by slot.
  std::optional<uint32_t> kill_once_at_;
  uint64_t next_kill_at_ = 0;
  uint64_t kills_ = 0, reopened_ = 0;
  uint64_t next_daemon_kill_at_ = 0, daemon_kills_ = 0;
  DaemonCounts killed_daemons_;
};

absl::StatusOr<v1::SpaceInfo> FindSpace(tools::OperatorClient* daemon, const std::string& run) {
  ASSIGN_OR_RETURN(const v1::ListSpacesResponse spaces, daemon->ListSpaces({}));
  for (const v1::SpaceInfo& space : spaces.spaces()) {
    if (space.fingerprint() == run) return space;
  }
  return absl::NotFoundError("the replay's space is gone");
}

// Waits until the engines' sessions are over, and checks that they left nothing behind.
absl::StatusOr<v1::StateCounts> Settle(tools::OperatorClient* daemon, const std::string& run) {
  const auto give_up = Clock::now() + kSettleWithin;
  while (true) {
    ASSIGN_OR_RETURN(const v1::SpaceInfo space, FindSpace(daemon, run));
    const v1::StateCounts& states = space.blocks();
    const uint64_t held = states.leased() + states.sealed() + states.quarantined();
    if (states.free() + states.cached() + held != states.capacity()) {
      return absl::InternalError(
          absl::StrCat("states do not sum to the capacity: ", states.ShortDebugString()));
    }
    if (space.sessions() == 0 && held == 0) return states;
    if (Clock::now() > give_up) {
      return absl::InternalError(absl::StrCat("blocks are still held ", kSettleWithin.count(),
                                              " s after the last engine ended: ", space.sessions(),
                                              " sessions; ", states.ShortDebugString()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

uint64_t ChooseMagazine(const ReplayOptions& options, uint64_t pool_blocks) {
  if (options.magazine_blocks != 0) return options.magazine_blocks;
  return std::clamp<uint64_t>(pool_blocks / (kMagazinesPartOfPool * options.engines), 1, kLargestMagazine);
}

void Collect(const Board& board, const std::vector<Request>& requests, ReplayResult* result) {
  for (uint32_t i = 0; i < requests.size(); ++i) {
    const RequestRecord& record = board.record(i);
    ++result->hits.requests;
    result->hits.blocks += requests[i].hash_ids.size();
    result->hits.hit_blocks += record.hit_blocks;
    result->hits.tokens += requests[i].input_tokens;
    result->hits.hit_tokens += TokensInBlocks(requests[i], record.hit_blocks);
    result->deduplicated_blocks += record.deduplicated_blocks;
  }
  for (uint32_t engine = 0; engine < board.size().engines; ++engine) {
    const EngineSlot& slot = board.slot(engine);
    for (size_t verb = 0; verb < result->verbs.size(); ++verb) result->verbs[verb].Merge(slot.verbs[verb]);
    result->corrupt_blocks += slot.corrupt_blocks;
    result->checked_blocks += slot.checked_blocks;
    result->retries += slot.retries;
    result->sessions += slot.sessions;
    result->refused += slot.refused;
    result->late_tokens += slot.late_tokens;
    result->double_owners += slot.double_owners;
    result->sealed_again += slot.sealed_again;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReplayResult>> Replay(const ReplayOptions& options,
                                                     const std::vector<Request>& requests) {
  ASSIGN_OR_RETURN(const std::unique_ptr<tools::OperatorClient> daemon,
                   tools::OperatorClient::Open({.socket = options.socket, .deadline = absl::Seconds(30)}));
  ASSIGN_OR_RETURN(const v1::GetStatsResponse before, daemon->GetStats({}));
  if (before.devices().empty()) return absl::FailedPreconditionError("the daemon has no device");
  ASSIGN_OR_RETURN(const DaemonCounts counted_before, CountsOf(options.socket));
  const uint64_t pool_blocks = before.devices(0).capacity_bytes() / options.block_bytes;
  if (const uint64_t largest = LargestRequestBlocks(requests, {.decode = options.decode});
      largest >= pool_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the largest request has ", largest, " blocks, but device ", before.devices(0).device(),
                     " has room for ", pool_blocks, " blocks of ", options.block_bytes, " bytes"));
  }
  size_t keys = 0;
  for (const Request& request : requests) keys += request.hash_ids.size();
  ASSIGN_OR_RETURN(Board board, Board::Create({.requests = static_cast<uint32_t>(requests.size()),
                                               .engines = options.engines,
                                               .blocks = static_cast<uint32_t>(pool_blocks + 1),
                                               .keys = static_cast<uint32_t>(keys)}));
  std::vector<std::string> arguments = options.engine_arguments;
  arguments.push_back(absl::StrCat("--socket=", options.socket));
  arguments.push_back(absl::StrCat("--run=", tools::Hex(options.run)));
  arguments.push_back(absl::StrCat("--magazine=", ChooseMagazine(options, pool_blocks)));
  arguments.push_back(absl::StrCat("--engine-device=", before.devices(0).device()));
  arguments.push_back(absl::StrCat("--engine-start-ns=", SteadyNs()));
  Fleet fleet(options, &board, std::move(arguments));
  auto result = std::make_unique<ReplayResult>();
  const int64_t start_ns = SteadyNs();
  RETURN_IF_ERROR(fleet.Start());
  RETURN_IF_ERROR(fleet.Run());
  result->seconds = static_cast<double>(SteadyNs() - start_ns) * 1e-9;
  result->engines = options.engines;
  result->kills = fleet.kills();
  result->reopened = fleet.reopened();
  Collect(board, requests, result.get());

  // The one from before may have been killed.
  ASSIGN_OR_RETURN(const std::unique_ptr<tools::OperatorClient> last,
                   tools::OperatorClient::Open({.socket = options.socket, .deadline = absl::Seconds(30)}));
  ASSIGN_OR_RETURN(result->states, Settle(last.get(), options.run));
  result->capacity_blocks = result->states.capacity();
  result->daemon_kills = fleet.daemon_kills();
  result->engines_outlived_daemon = options.engines_outlive_daemon;
  DaemonCounts counted = fleet.killed_daemons();
  ASSIGN_OR_RETURN(const DaemonCounts counted_last, CountsOf(options.socket));
  counted.Add(counted_last);
  result->hits.evictions = counted.evictions - counted_before.evictions;
  result->below = counted.below;
  ASSIGN_OR_RETURN(result->exact, SimulateLru(requests, {.capacity_blocks = result->capacity_blocks,
                                                         .decode = options.decode}));
  if (result->below.has_value()) {
    ASSIGN_OR_RETURN(result->infinite,
                     SimulateLru(requests, {.capacity_blocks = UINT64_MAX, .decode = options.decode}));
  }
  return result;
}

}  // namespace kvpool::replay
