// kvpool-replay: serve recorded requests with engine processes, and prove the memory right.
//
// Exit status: 0 done; 1 a corruption, or the replay failed; 2 usage.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/layouts.h"
#include "client/replay/board.h"
#include "client/replay/child_process.h"
#include "client/replay/conversation.h"
#include "client/replay/engine.h"
#include "client/replay/local_daemon.h"
#include "client/replay/replay.h"
#include "client/tools/operator_client.h"
#include "client/tools/text.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "proto/formats/trace.h"
#include "proto/support/default_socket.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool::replay {
namespace {

constexpr uint64_t kMostEngines = 256;
constexpr uint64_t kMostRequests = 10'000'000;
// Stamps are 8-byte words; a real block of 512 tokens has megabytes, which the traces' working
// sets would not fit.
constexpr uint64_t kBlockBytes = 4096;

struct Settings {
  std::string trace;
  std::string workload;
  uint64_t requests = 0;
  std::string part;
  uint64_t block_bytes = kBlockBytes;
  std::string layout = "opaque";
  bool spawn_daemon = false, keeper = false;
  uint64_t blocks = 10000;
  std::vector<std::string> daemon_flags;
  bool json = false, help = false, version = false;
  ReplayOptions replay{.socket = DefaultSocket(SocketUser::kClient)};
  uint64_t engines = 2;
  uint64_t wait_ms = 0;
  // What an engine process is told by the one that started it.
  uint64_t engine_slot = 0, engine_board = 0, engine_start_ns = 0;
  std::string engine_device;
};

void AddFlags(Settings* s, Flags* flags) {
  flags->Add("trace", &s->trace, "requests as JSON lines in Mooncake's form, plain or gzip");
  flags->Add("workload", &s->workload,
             "conversation: made requests, shaped like the public conversation trace");
  flags->Add("seed", &s->replay.seed, {}, "of the workload, and of who is killed");
  flags->Add("requests", &s->requests, {.max = kMostRequests},
             "how many; all of a trace, 12,031 of a workload");
  flags->Add("part", &s->part, "K/N: of those the Kth, and each Nth after it, as one of N nodes serves them");
  flags->Add("engines", &s->engines, {.min = 1, .max = kMostEngines}, "engine processes");
  flags->Add("socket", &s->replay.socket, "kvpoold's Unix socket (also KVPOOL_SOCKET)");
  flags->Add("spawn-daemon", &s->spawn_daemon, "start a kvpoold on host memory for this replay instead");
  flags->Add("keeper", &s->keeper,
             "with --spawn-daemon: give it a keeper. Engines then live through --kill-daemon-every");
  flags->Add("blocks", &s->blocks, {.min = 16, .max = 1u << 30}, "with --spawn-daemon: blocks of its pool");
  flags->AddRepeated("daemon-flag", &s->daemon_flags, "with --spawn-daemon: one more flag for it");
  flags->Add("layout", &s->layout, "opaque, or LAYERSxHEADSxDIM of a paged bf16 cache of 512 tokens a block");
  flags->Add("block-bytes", &s->block_bytes, {.min = 64, .max = 1u << 30}, "of an opaque block");
  flags->Add("magazine", &s->replay.magazine_blocks, {.max = kMaxNames},
             "blocks each engine keeps leased; by default a 400th of the pool for all of them");
  flags->Add("decode", &s->replay.decode, "hold blocks for the answers too");
  flags->Add("time-scale", &s->replay.time_scale, 1000, "1 is real time, 0 as fast as it goes");
  flags->Add("kill-one-at", &s->replay.kill_one_at, 1,
             "kill and restart an engine at this share of the requests");
  flags->Add("kill-every", &s->replay.kill_every, {}, "kill and restart an engine every so many requests");
  flags->Add(
      "kill-daemon-every", &s->replay.kill_daemon_every, {},
      "with --spawn-daemon: kill and restart it, and without --keeper all engines, every so many requests");
  flags->Add("wait-ms", &s->wait_ms, {.max = kMaxMatchWaitMs},
             "how long a match may wait for what is in a tier below the pool (kvpoold --tier); 0: not");
  flags->AddBytes("run", &s->replay.run, 64,
                  "name of the space; a new one by default, so that nothing is cached yet");
  flags->Add("json", &s->json, "the result as JSON");
  flags->Add("help", &s->help, "this text");
  flags->Add("version", &s->version, "what this build is");
  flags->Add("engine-slot", &s->engine_slot, {}, "");
  flags->Add("engine-board", &s->engine_board, {}, "");
  flags->Add("engine-start-ns", &s->engine_start_ns, {}, "");
  flags->Add("engine-device", &s->engine_device, "");
}

struct Workload {
  std::string name;
  std::vector<Request> requests;
};

// "K/N": a node's requests, where N nodes serve them in turns.
absl::Status KeepPart(const std::string& part, std::vector<Request>* requests) {
  const std::vector<std::string> numbers = absl::StrSplit(part, '/');
  uint32_t k = 0, n = 0;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &k) || !absl::SimpleAtoi(numbers[1], &n) ||
      k == 0 || k > n || n > requests->size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--part: \"", part, "\" is not K/N, with 1 <= K <= N <= ", requests->size(), " requests"));
  }
  std::vector<Request> kept;
  for (size_t i = k - 1; i < requests->size(); i += n) kept.push_back(std::move((*requests)[i]));
  *requests = std::move(kept);
  return absl::OkStatus();
}

absl::StatusOr<Workload> LoadAll(const Settings& s) {
  if (!s.workload.empty()) {
    if (s.workload != "conversation") {
      return absl::InvalidArgumentError(absl::StrCat("--workload: \"", s.workload, "\" is not conversation"));
    }
    ConversationOptions options{.seed = s.replay.seed};
    if (s.requests != 0) options.requests = s.requests;
    return Workload{absl::StrCat("conversation, seed ", options.seed), GenerateConversation(options)};
  }
  std::string path = s.trace;
  if (path.empty()) {
    const absl::StatusOr<std::string> found = FindConversationTrace();
    if (!found.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--trace or --workload is needed: ", found.status().message()));
    }
    path = *found;
  }
  ASSIGN_OR_RETURN(std::vector<Request> requests, ReadTrace(path, {.max_requests = s.requests}));
  return Workload{path, std::move(requests)};
}

absl::StatusOr<Workload> LoadWorkload(const Settings& s) {
  ASSIGN_OR_RETURN(Workload workload, LoadAll(s));
  if (!s.part.empty()) RETURN_IF_ERROR(KeepPart(s.part, &workload.requests));
  return workload;
}

absl::StatusOr<v1::Layout> MakeLayout(const Settings& s) {
  if (s.layout == "opaque") {
    return OpaqueLayout({.block_bytes = s.block_bytes, .tokens_per_block = kTokensPerBlock});
  }
  const std::vector<std::string> parts = absl::StrSplit(s.layout, 'x');
  PagedLayoutOptions options{.tokens_per_block = kTokensPerBlock};
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &options.layers) ||
      !absl::SimpleAtoi(parts[1], &options.kv_heads) || !absl::SimpleAtoi(parts[2], &options.head_dim) ||
      options.layers == 0 || options.layers > kMaxLayers || options.kv_heads == 0 ||
      options.kv_heads > kMaxKvHeads || options.head_dim == 0 || options.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("--layout: \"", s.layout,
                                                   "\" is not opaque or LAYERSxHEADSxDIM, of 1 to ",
                                                   kMaxLayers, ", ", kMaxKvHeads, " and ", kMaxHeadDim));
  }
  return PagedLayout(options);
}

absl::Status CheckFlags(const Settings& s, const Flags& flags) {
  if (!s.trace.empty() && !s.workload.empty()) {
    return absl::InvalidArgumentError("--trace and --workload exclude each other");
  }
  if (s.spawn_daemon && flags.given("socket")) {
    return absl::InvalidArgumentError("--spawn-daemon and --socket exclude each other");
  }
  if (!s.spawn_daemon &&
      (flags.given("blocks") || flags.given("daemon-flag") || flags.given("kill-daemon-every") || s.keeper)) {
    return absl::InvalidArgumentError(
        "--blocks, --daemon-flag, --kill-daemon-every and --keeper are for --spawn-daemon");
  }
  if (s.layout != "opaque" && flags.given("block-bytes")) {
    return absl::InvalidArgumentError("--block-bytes is for --layout=opaque");
  }
  return absl::OkStatus();
}

absl::Status RunAsEngine(const Settings& s, const Workload& workload, const v1::Layout& layout) {
  ASSIGN_OR_RETURN(Board board, Board::Open(UniqueFd(static_cast<int>(s.engine_board))));
  return RunEngine({.engine = static_cast<uint32_t>(s.engine_slot),
                    .socket = s.replay.socket,
                    .device = s.engine_device,
                    .run = s.replay.run,
                    .layout = layout,
                    .magazine_blocks = static_cast<uint32_t>(s.replay.magazine_blocks),
                    .wait_ms = static_cast<uint32_t>(s.wait_ms),
                    .awaits_daemon = s.keeper,
                    .decode = s.replay.decode,
                    .time_scale = s.replay.time_scale,
                    .start_ns = static_cast<int64_t>(s.engine_start_ns)},
                   workload.requests, &board);
}

// A name for the space that no earlier run had.
std::string FreshRun() {
  std::random_device random;
  std::string run;
  while (run.size() < 16) run.push_back(static_cast<char>(random()));
  return run;
}

absl::StatusOr<bool> RunReplay(Settings s, const Workload& workload, const v1::Layout& layout) {
  if (s.replay.run.empty()) s.replay.run = FreshRun();
  s.replay.engines = static_cast<uint32_t>(s.engines);
  s.replay.block_bytes = layout.block_bytes();
  s.replay.progress = isatty(STDERR_FILENO) != 0;
  std::unique_ptr<LocalDaemon> daemon;
  if (s.spawn_daemon) {
    const std::string program = std::filesystem::path(OwnPath()).replace_filename("kvpoold").string();
    ASSIGN_OR_RETURN(daemon, LocalDaemon::Start(program, {.blocks = s.blocks,
                                                          .block_bytes = layout.block_bytes(),
                                                          .keeper = s.keeper,
                                                          .flags = s.daemon_flags}));
    s.replay.socket = daemon->socket();
    s.replay.engines_outlive_daemon = s.keeper;
    s.replay.restart_daemon = [of = daemon.get()] { return of->KillAndRestart(); };
  }
  if (!s.json) std::printf("Requests: %s\n", tools::Printable(workload.name).c_str());
  std::fflush(stdout);
  ASSIGN_OR_RETURN(const std::unique_ptr<ReplayResult> result, Replay(s.replay, workload.requests));
  std::fputs(s.json ? RenderJson(*result, workload.name).c_str() : RenderTable(*result).c_str(), stdout);
  return result->corrupt_blocks == 0 && result->double_owners == 0;
}

int Main(const std::vector<std::string>& arguments) {
  const auto fail = [](const absl::Status& status, int exit_status) {
    std::fprintf(stderr, "kvpool-replay: %s\n", std::string(status.message()).c_str());
    return exit_status;
  };
  Settings settings;
  Flags flags;
  AddFlags(&settings, &flags);
  absl::StatusOr<std::vector<std::string>> rest = flags.Parse(arguments);
  if (rest.ok() && !rest->empty()) {
    rest = absl::InvalidArgumentError(absl::StrCat("unexpected argument ", rest->front(), "; see --help"));
  }
  if (!rest.ok()) return fail(rest.status(), 2);
  if (settings.version) {
    std::fputs(VersionText("kvpool-replay").c_str(), stdout);
    return 0;
  }
  if (settings.help) {
    std::printf(
        "kvpool-replay [FLAGS]: serve recorded requests with engine processes, and prove the memory right\n\n"
        "Flags:\n%s\nExit status: 0 done, 1 a corruption, a double owner or a failed replay, 2 usage.\n",
        flags.Help().c_str());
    return 0;
  }
  const bool is_engine = flags.given("engine-board");
  // Engines get all flags of the one that started them, and some of those exclude what it adds.
  if (const absl::Status status = is_engine ? absl::OkStatus() : CheckFlags(settings, flags); !status.ok()) {
    return fail(status, 2);
  }
  const absl::StatusOr<v1::Layout> layout = MakeLayout(settings);
  if (!layout.ok()) return fail(layout.status(), 2);
  const absl::StatusOr<Workload> workload = LoadWorkload(settings);
  if (!workload.ok()) return fail(workload.status(), 2);
  if (is_engine) {
    const absl::Status status = RunAsEngine(settings, *workload, *layout);
    return status.ok() ? 0 : fail(status, 1);
  }
  settings.replay.engine_arguments = arguments;
  const absl::StatusOr<bool> clean = RunReplay(std::move(settings), *workload, *layout);
  if (!clean.ok()) return fail(clean.status(), 1);
  return *clean ? 0 : 1;
}

}  // namespace
}  // namespace kvpool::replay

int main(int argc, char** argv) { return kvpool::replay::Main({argv + 1, argv + argc}); }
