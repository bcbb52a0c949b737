#include "server/settings.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "cuda/scorers/policies/registry.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "proto/support/default_socket.h"
#include "proto/support/status_macros.h"
#include "server/base/sockets.h"
#include "server/devices.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

constexpr uint64_t kLeastEventLogBytes = 8 << 20;

// The flags as they are written, with their defaults.
struct CommandLine {
  std::vector<std::string> config;
  std::string device = "auto", capacity = "0.5", slab_bytes = "0";
  std::string socket, socket_group, state_dir, metrics_listen = "127.0.0.1:9400";
  std::string log_level = "info", log_format = "text";
  std::string policy = "learned", replacement_weights, event_log, event_log_bytes = "256MiB";
  double low_watermark = 0.005, high_watermark = 0.01, pin_budget = 0.25, tenant_share = 1;
  uint64_t max_sessions = 1024, max_members = 64;
  absl::Duration idle_space = absl::Hours(1);
  std::string tenant_uids;
  uint64_t rpc_threads = 0;
  uint64_t score_threads = 0, score_queue = 4096;
  std::string score_features = "256MiB", score_workspace = "1GiB";
  std::string operator_tls_listen;
  TlsFiles operator_tls;
  absl::Duration shutdown_grace = absl::Seconds(5);
  bool help = false, version = false;
};

void AddFlags(CommandLine* line, Flags* flags) {
  flags->AddRepeated("config", &line->config,
                     "file of flags: lines \"name = value\", # for comments. The command line wins over it");
  flags->Add("device", &line->device,
             "auto (every GPU that the driver shows, otherwise host), host, cuda:N or cuda:GPU-UUID; a comma "
             "list gives "
             "one device to each tensor-parallel rank");
  flags->Add("capacity", &line->capacity,
             "memory of each device to use: bytes (8GiB, 500MB) or a share (0.5, 50%)");
  flags->Add("slab-bytes", &line->slab_bytes, "size of a slab; 0: 64MiB on host, 256MiB on cuda");
  flags->Add("socket", &line->socket,
             "gRPC socket; the attach socket is beside it, with .attach added. Empty: kvpool/kvpoold.sock in "
             "$XDG_RUNTIME_DIR, or in /run");
  flags->Add("socket-group", &line->socket_group,
             "group, by name or number, that may use the sockets; empty: the daemon's own");
  flags->Add(
      "state-dir", &line->state_dir,
      "where epoch, lock and kvpoold.json are kept, made if it is missing; empty: the socket's directory");
  flags->Add("metrics-listen", &line->metrics_listen,
             "host:port for GET /metrics; port 0 takes a free one (see kvpoold.json); empty: none");
  flags->Add("log-level", &line->log_level, "debug, info, warning or error");
  flags->Add("log-format", &line->log_format, "text or json");
  flags->Add("policy", &line->policy, "replacement policy of new spaces; see the list below");
  flags->Add("replacement-weights", &line->replacement_weights,
             "weights of a policy that was trained, as kvpool-sim train writes them; empty: those built in");
  flags->Add(
      "event-log", &line->event_log,
      "record what engines ask for in this file, keys hashed, to replay it with kvpool-sim; empty: do not");
  flags->Add("event-log-bytes", &line->event_log_bytes,
             "most that it takes; at half of this the file becomes FILE.1 and is begun anew");
  flags->Add("low-watermark", &line->low_watermark, 1,
             "reclaim in the background when less than this share of a space is free");
  flags->Add("high-watermark", &line->high_watermark, 1, "and stop when this share is free");
  flags->Add("pin-budget", &line->pin_budget, 1, "most of a space that may be pinned or retained, 0 to 1");
  flags->Add("tenant-share", &line->tenant_share, 1,
             "most of each device that the spaces of one tenant may have, 0 to 1");
  flags->Add("max-sessions", &line->max_sessions, {.min = 1, .max = 65534}, "sessions at once");
  flags->Add("max-members", &line->max_members, {.min = 1, .max = 1024}, "processes of one session");
  flags->Add("idle-space", &line->idle_space, {.min = absl::ZeroDuration()},
             "close a space that has had no session for so long");
  flags->Add("tenant-uids", &line->tenant_uids,
             "tenants shared between users: name=uid+uid,name=uid; others are scoped by the caller's uid");
  flags->Add("rpc-threads", &line->rpc_threads, {.max = 64},
             "threads that serve gRPC; 0: a quarter of the cores, 1 to 8");
  flags->Add("score-threads", &line->score_threads, {.max = 1024},
             "threads that score, prune and compact on host memory; 0: half of the cores, at least 1");
  flags->Add(
      "score-queue", &line->score_queue, {.min = 1, .max = 65536},
      "operations that may wait for a device, a quarter of them of one session; those beyond are refused");
  flags->Add("score-features", &line->score_features,
             "most memory of each device for features of full blocks, kept so that a prune reads only new "
             "blocks");
  flags->Add("score-workspace", &line->score_workspace,
             "most memory of a device that one operation may use besides");
  flags->Add("operator-tls-listen", &line->operator_tls_listen,
             "host:port for operator verbs over TCP with mutual TLS; empty: none");
  flags->Add("operator-tls-cert", &line->operator_tls.certificate,
             "PEM file with the daemon's certificate chain");
  flags->Add("operator-tls-key", &line->operator_tls.key, "PEM file with its key");
  flags->Add("operator-tls-ca", &line->operator_tls.client_ca,
             "PEM file with the CA that signs operators' certificates");
  flags->Add("shutdown-grace", &line->shutdown_grace, {.min = absl::ZeroDuration(), .max = absl::Hours(1)},
             "on SIGTERM, wait so long for sessions to end");
  flags->Add("help", &line->help, "this text");
  flags->Add("version", &line->version, "what this build is");
}

std::string Help(const Flags& flags) {
  std::string help = absl::StrCat(
      "kvpoold [FLAGS]: owns the KV-cache memory of GPUs and leases it to LLM engines\n\n"
      "  kvpoold --device=cuda:0 --capacity=0.6\n"
      "  kvpoold --config=/etc/kvpool/kvpoold.conf\n\n"
      "Flags:\n",
      flags.Help(), "\nReplacement policies:\n");
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    absl::StrAppend(&help, "  ", std::string(policy.name), ": ", std::string(policy.summary), "\n");
  }
  absl::StrAppend(&help, "\nPruning policies, which engines choose by sequence:\n", scorers::PoliciesHelp());
  absl::StrAppend(
      &help, "\nExit status: 0 after SIGTERM or SIGINT, 2 what was asked for cannot be, 1 anything else.\n");
  return help;
}

// Lines "name = value" as flags.
absl::Status ReadConfig(const std::string& path, Flags* flags) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--config: cannot read ", path));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text[0] == '#') continue;
    const std::vector<absl::string_view> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    const absl::string_view name = absl::StripAsciiWhitespace(parts[0]);
    std::string problem;
    if (parts.size() != 2) {
      problem = absl::StrCat("\"", text, "\" is not \"name = value\"");
    } else if (name == "config") {
      problem = "a config file names no other one";
    } else if (const auto rest =
                   flags->Parse({absl::StrCat("--", name, "=", absl::StripAsciiWhitespace(parts[1]))});
               !rest.ok()) {
      problem = std::string(rest.status().message());
    }
    if (!problem.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--config: ", path, ":", number, ": ", problem));
    }
  }
  return absl::OkStatus();
}

absl::Status Parse(const std::vector<std::string>& arguments, CommandLine* line, Flags* flags) {
  ASSIGN_OR_RETURN(const std::vector<std::string> rest, flags->Parse(arguments));
  if (!rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument ", rest.front(), "; see --help"));
  }
  const std::vector<std::string> config = line->config;
  if (config.empty()) return absl::OkStatus();
  for (const std::string& path : config) RETURN_IF_ERROR(ReadConfig(path, flags));
  return flags->Parse(arguments).status();
}

absl::Status BadFlag(const char* name, const std::string& value, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, "=", value, ": ", why));
}

// A policy that can't run with its weights is an error now, not at the first space.
absl::Status ParsePolicy(const CommandLine& line, DaemonOptions* daemon) {
  daemon->policy = line.policy;
  const bool given = !line.replacement_weights.empty();
  if (given) {
    absl::StatusOr<Weights> weights = Weights::Read(line.replacement_weights);
    if (!weights.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--replacement-weights: ", weights.status().message()));
    }
    daemon->policy_weights = std::make_shared<const Weights>(*std::move(weights));
  }
  const PolicyOptions options{.max_blocks = 1, .weights = daemon->policy_weights};
  const absl::Status status = MakeReplacementPolicy(daemon->policy, options).status();
  if (status.ok()) return status;
  return BadFlag("policy", absl::StrCat(line.policy, given ? " with --replacement-weights" : ""),
                 status.message());
}

absl::Status ParseTenants(const std::string& text, std::map<std::string, std::vector<uint32_t>>* tenants) {
  for (absl::string_view entry : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(entry, absl::MaxSplits('=', 1));
    if (parts.size() != 2 || parts[0].empty() || parts[1].empty()) {
      return BadFlag("tenant-uids", text, absl::StrCat("\"", entry, "\" is not name=uid+uid"));
    }
    for (absl::string_view uid : absl::StrSplit(parts[1], '+')) {
      uint32_t number;
      if (!absl::SimpleAtoi(uid, &number)) {
        return BadFlag("tenant-uids", text, absl::StrCat("\"", uid, "\" is no uid"));
      }
      (*tenants)[parts[0]].push_back(number);
    }
  }
  return absl::OkStatus();
}

absl::Status ReadPaths(const CommandLine& line, Settings* settings) {
  settings->default_socket = line.socket.empty();
  settings->socket = settings->default_socket ? DefaultSocket(SocketUser::kDaemon) : line.socket;
  if (settings->socket[0] != '/') {
    return BadFlag("socket", settings->socket, "write an absolute path");
  }
  if (settings->attach_socket().size() > kMaxSocketPathBytes) {
    return BadFlag("socket", settings->socket,
                   absl::StrCat("with .attach it has ", settings->attach_socket().size(),
                                " bytes; the limit is ", kMaxSocketPathBytes));
  }
  settings->state_dir = line.state_dir;
  if (settings->state_dir.empty()) settings->state_dir = settings->socket_directory();
  const std::string& group = line.socket_group;
  if (!group.empty()) {
    const absl::StatusOr<uint32_t> id = GroupId(group);
    if (!id.ok()) return BadFlag("socket-group", group, id.status().message());
    settings->socket_group = *id;
  }
  settings->metrics_listen = line.metrics_listen;
  if (!settings->metrics_listen.empty() && !absl::StrContains(settings->metrics_listen, ":")) {
    return BadFlag("metrics-listen", settings->metrics_listen, "write host:port");
  }
  settings->operator_tls_listen = line.operator_tls_listen;
  settings->operator_tls = line.operator_tls;
  const TlsFiles& tls = settings->operator_tls;
  if (!settings->operator_tls_listen.empty() &&
      (tls.certificate.empty() || tls.key.empty() || tls.client_ca.empty())) {
    return BadFlag("operator-tls-listen", settings->operator_tls_listen,
                   "needs --operator-tls-cert, --operator-tls-key and --operator-tls-ca");
  }
  return absl::OkStatus();
}

absl::Status ReadDaemonOptions(const CommandLine& line, DaemonOptions* daemon) {
  if (line.slab_bytes != "0") {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(line.slab_bytes);
    if (!bytes.ok()) return BadFlag("slab-bytes", line.slab_bytes, bytes.status().message());
    daemon->slab_bytes = *bytes;
  }
  const absl::StatusOr<uint64_t> features = ParseBytes(line.score_features);
  if (!features.ok()) return BadFlag("score-features", line.score_features, features.status().message());
  daemon->score_features_bytes = *features;
  const absl::StatusOr<uint64_t> workspace = ParseBytes(line.score_workspace);
  if (!workspace.ok()) return BadFlag("score-workspace", line.score_workspace, workspace.status().message());
  daemon->score_workspace_bytes = *workspace;
  const uint64_t half = std::max(1u, std::thread::hardware_concurrency() / 2);
  daemon->score_threads = static_cast<uint32_t>(line.score_threads == 0 ? half : line.score_threads);
  daemon->score_queue = static_cast<uint32_t>(line.score_queue);
  daemon->low_watermark = line.low_watermark;
  daemon->high_watermark = line.high_watermark;
  if (daemon->low_watermark > daemon->high_watermark) {
    return BadFlag("low-watermark", absl::StrCat(daemon->low_watermark),
                   absl::StrCat("the limits are 0 and --high-watermark, ", daemon->high_watermark));
  }
  const absl::StatusOr<uint64_t> event_log_bytes = ParseBytes(line.event_log_bytes);
  if (!event_log_bytes.ok())
    return BadFlag("event-log-bytes", line.event_log_bytes, event_log_bytes.status().message());
  if (*event_log_bytes < kLeastEventLogBytes) {
    return BadFlag("event-log-bytes", line.event_log_bytes,
                   absl::StrCat("the least is ", kLeastEventLogBytes));
  }
  daemon->event_log = line.event_log;
  daemon->event_log_bytes = *event_log_bytes;
  RETURN_IF_ERROR(ParsePolicy(line, daemon));
  daemon->pin_budget = line.pin_budget;
  daemon->tenant_share = line.tenant_share;
  daemon->max_sessions = static_cast<uint32_t>(line.max_sessions);
  daemon->max_members = static_cast<uint32_t>(line.max_members);
  daemon->idle_space_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(line.idle_space));
  return ParseTenants(line.tenant_uids, &daemon->tenant_uids);
}

}  // namespace

absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& arguments) {
  CommandLine line;
  Flags flags;
  AddFlags(&line, &flags);
  RETURN_IF_ERROR(Parse(arguments, &line, &flags));
  Settings settings;
  if (line.help || line.version) {
    settings.reply = line.help ? Help(flags) : VersionText("kvpoold");
    return settings;
  }
  const absl::StatusOr<LogLevel> level = ParseLogLevel(line.log_level);
  if (!level.ok()) return BadFlag("log-level", line.log_level, level.status().message());
  const absl::StatusOr<LogFormat> format = ParseLogFormat(line.log_format);
  if (!format.ok()) return BadFlag("log-format", line.log_format, format.status().message());
  settings.log.level = *level;
  settings.log.format = *format;
  settings.device = line.device;
  settings.capacity = line.capacity;
  const absl::StatusOr<uint64_t> capacity = ParseCapacity(settings.capacity, UINT64_MAX);
  if (!capacity.ok()) return BadFlag("capacity", settings.capacity, capacity.status().message());
  RETURN_IF_ERROR(ReadPaths(line, &settings));
  settings.rpc_threads = static_cast<int>(line.rpc_threads);
  settings.shutdown_grace = absl::ToChronoMilliseconds(line.shutdown_grace);
  RETURN_IF_ERROR(ReadDaemonOptions(line, &settings.daemon));
  return settings;
}

}  // namespace kvpool
