#include "server/settings.h"

#include <algorithm>
#include <iterator>
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
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
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
constexpr uint32_t kMostRpcThreads = 64;
constexpr uint64_t kLeastTierBuffer = 1 << 20;

// The targets of the flags. Most are members of Settings, whose initial values are the defaults that --help
// shows; the rest is converted after parsing.
struct CommandLine {
  Settings settings;
  std::vector<std::string> config;
  std::string socket_group, keeper_socket, replacement_weights;
  uint32_t score_threads = 0;  // 0: half of the cores.
  absl::Duration idle_space = absl::Milliseconds(settings.daemon.idle_space_ms);
  absl::Duration reattach_timeout = absl::Milliseconds(settings.daemon.reattach_ms);
  absl::Duration score_time = absl::Milliseconds(settings.daemon.score_time_ms);
  absl::Duration shutdown_grace = absl::FromChrono(settings.shutdown_grace);
  std::vector<std::string> tiers;
  absl::Duration tier_flush = absl::FromChrono(settings.tier_flush);
  bool help = false, version = false;
};

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// The inverse of ParseBytes: a whole number of the largest unit that allows one.
std::string ByteText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  for (; bytes != 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return absl::StrCat(bytes, kUnits[unit]);
}

// Adds a flag for a size in bytes. 0 is allowed if `least` is 0.
void AddSize(const std::string& name, uint64_t* target, uint64_t least, const std::string& help,
             Flags* flags) {
  flags->AddText(name, ByteText(*target), help, [=](absl::string_view text) -> absl::Status {
    uint64_t bytes = 0;
    if (least > 0 || text != "0") {
      ASSIGN_OR_RETURN(bytes, ParseBytes(std::string_view(text.data(), text.size())));
    }
    if (bytes < least) return Invalid(absl::StrCat(text, " is below ", least, " bytes"));
    *target = bytes;
    return absl::OkStatus();
  });
}

// Devices, sockets, files and the log.
void AddPlaceFlags(CommandLine* line, Flags* flags) {
  Settings& settings = line->settings;
  flags->AddRepeated("config", &line->config,
                     "file of flags: lines \"name = value\", # for comments. The command line wins over it");
  flags->Add(
      "device", &settings.device,
      "auto (every GPU that the driver shows, otherwise host), host, cuda:N or cuda:GPU-UUID, or a comma "
      "list: tensor-parallel ranks have a GPU each, host beside GPUs is for engines that name it");
  flags->AddText("capacity", settings.capacity,
                 "memory of each device to use: bytes (8GiB, 500MB) or a share (0.5, 50%); for each its own: "
                 "cuda:0=40GiB,host=64GiB",
                 [&settings](absl::string_view text) {
                   settings.capacity = std::string(text);
                   return CheckCapacity(settings.capacity);
                 });
  AddSize("slab-bytes", &settings.daemon.slab_bytes, 0, "size of a slab; 0: 64MiB on host, 256MiB on cuda",
          flags);
  flags->Add("socket", &settings.socket,
             "gRPC socket; the attach socket is beside it, with .attach added. Empty: kvpool/kvpoold.sock in "
             "$XDG_RUNTIME_DIR, or in /run");
  flags->Add("socket-group", &line->socket_group,
             "group, by name or number, that may use the sockets; empty: the daemon's own");
  flags->Add(
      "access", &settings.access,
      "file of rules, who may do what, read again on SIGHUP; empty: the daemon's own user and root may do "
      "all, others nothing");
  flags->Add(
      "state-dir", &settings.state_dir,
      "where epoch, lock and kvpoold.json are kept, made if it is missing; empty: the socket's directory");
  flags->AddText(
      "keeper", "off",
      "on: a small process starts the daemon, and another one when that is killed, which goes on with what "
      "was sealed. socket:PATH: the same, but the process is one with --keeper-only and that "
      "--keeper-socket, "
      "and starts none. off: what is cached ends with the daemon",
      [&settings](absl::string_view text) -> absl::Status {
        absl::string_view path = text;
        settings.keeper_elsewhere = absl::ConsumePrefix(&path, "socket:");
        if (settings.keeper_elsewhere && (path.empty() || path[0] != '/'))
          return Invalid(absl::StrCat("\"", text, "\": write an absolute path behind socket:"));
        if (!settings.keeper_elsewhere && text != "on" && text != "off")
          return Invalid(absl::StrCat("\"", text, "\" is not on, off or socket:PATH"));
        if (settings.keeper_elsewhere) settings.keeper_socket = std::string(path);
        settings.keeper = text == "on";
        return absl::OkStatus();
      });
  flags->Add("keeper-socket", &line->keeper_socket,
             "where a keeper waits for a daemon whose keeper was killed, or that it has not started; empty: "
             "keeper.sock in --state-dir");
  flags->Add("keeper-only", &settings.keeper_only,
             "start no daemon: keep what those with --keeper=socket:PATH give");
  flags->Add(
      "keeper-deaths", &settings.keeper_deaths, {.min = 1},
      "the keeper gives up when the daemon has died so often within 10 minutes: what it keeps may be what "
      "kills it");
  flags->Add(
      "metrics-listen", &settings.metrics_listen,
      "host:port for GET /metrics and GET /health; port 0 takes a free one (see kvpoold.json); empty: none");
  flags->Add("metrics-tls-cert", &settings.metrics_tls.certificate,
             "PEM file with the certificate chain of --metrics-listen, which is HTTPS then");
  flags->Add("metrics-tls-key", &settings.metrics_tls.key, "PEM file with its key");
  flags->Add(
      "metrics-tls-client-ca", &settings.metrics_tls.client_ca,
      "PEM file with the CA that signs the certificates which scrapes and probes must show; empty: they "
      "need none");
  flags->AddText(
      "metrics-detail", "standard",
      "standard, or debug: measures the processor time of each hold of a space's mutex too, which "
      "takes a microsecond or two",
      [&settings](absl::string_view text) -> absl::Status {
        if (text != "standard" && text != "debug") {
          return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is neither standard nor debug"));
        }
        settings.daemon.measure_work = text == "debug";
        return absl::OkStatus();
      });
  flags->AddText("log-level", "info", "debug, info, warning or error",
                 [&settings](absl::string_view text) -> absl::Status {
                   ASSIGN_OR_RETURN(settings.log.level, ParseLogLevel({text.data(), text.size()}));
                   return absl::OkStatus();
                 });
  flags->AddText("log-format", "text", "text or json", [&settings](absl::string_view text) -> absl::Status {
    ASSIGN_OR_RETURN(settings.log.format, ParseLogFormat({text.data(), text.size()}));
    return absl::OkStatus();
  });
}

// Replacement, sessions, threads and scoring.
void AddDaemonFlags(CommandLine* line, Flags* flags) {
  DaemonOptions& daemon = line->settings.daemon;
  flags->Add("policy", &daemon.policy, "replacement policy of new spaces; see the list below");
  flags->Add("replacement-weights", &line->replacement_weights,
             "weights of a policy that was trained, as kvpool-sim train writes them; empty: those built in");
  flags->Add(
      "event-log", &daemon.event_log,
      "record what engines ask for in this file, keys hashed, to replay it with kvpool-sim; empty: do not");
  AddSize("event-log-bytes", &daemon.event_log_bytes, kLeastEventLogBytes,
          "most that it takes; at half of this the file becomes FILE.1 and is begun anew", flags);
  flags->AddRepeated(
      "tier", &line->tiers,
      "memory below the pool, for what would be evicted: host:capacity=BYTES, host memory; "
      "file:PATH,capacity=BYTES, a folder "
      "on a disk; resp:HOST:PORT[,...], a Redis or Valkey server or cluster that nodes share, "
      "with cluster=auto|on|off, tls=on|off, ca=FILE, cert=FILE, key=FILE, user=NAME, "
      "password-file=FILE, prefix=TEXT, ttl=DURATION, connections=N; s3:http[s]://HOST[:PORT]/BUCKET[,...], "
      "a "
      "bucket of an S3-compatible store that nodes share, with region=NAME (AWS_REGION or us-east-1), "
      "style=path|virtual, credentials-file=FILE (without it AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
      "AWS_SESSION_TOKEN of the environment), profile=NAME, ca=FILE, prefix=TEXT, connections=N. Each may "
      "have write=evict, of what is "
      "about to "
      "leave the pool, write=seal, of all, or write=reuse:N, of what N requests had (evict; resp: and s3: "
      "seal). "
      "It may be "
      "given once for each kind; what several have is loaded from the fastest");
  flags->Add(
      "tier-key-file", &line->settings.tier_key_file,
      "file with the secret, 32 bytes or more, that keys in tiers are derived from; empty: one is made in "
      "the file tier's folder, or in --state-dir. Nodes that share a tier have the same one. Without --tier "
      "it lets operators attach tiers later");
  flags->Add(
      "tier-encryption-keys", &line->settings.tier_encryption_keys,
      "file of lines TENANT KEY: values in file:, resp: and s3: are encrypted with AES-256-GCM. KEY is 64 "
      "hexadecimal digits, or none; a tenant's first line writes, the others read; TENANT * is for all that "
      "no line names. The file may change at any time; empty: values lie as they are");
  AddSize("tier-buffer", &daemon.tier_buffer_bytes, kLeastTierBuffer,
          "memory for copies on their way to the tier, and again as much for those from it; with a GPU it is "
          "page-locked, and taken at the start. Each tier that encrypts takes as much besides at most",
          flags);
  flags->Add("tier-flush", &line->tier_flush, {.min = absl::ZeroDuration(), .max = absl::Hours(1)},
             "on SIGTERM, after the grace, copy so long to the tier what is not there yet");
  flags->Add("low-watermark", &daemon.low_watermark, 1,
             "reclaim in the background when less than this share of a space is free");
  flags->Add("high-watermark", &daemon.high_watermark, 1, "and stop when this share is free");
  flags->Add("pin-budget", &daemon.pin_budget, 1, "most of a space that may be pinned or retained, 0 to 1");
  flags->Add("tenant-share", &daemon.tenant_share, 1,
             "most of each device that the spaces of one tenant may have, 0 to 1");
  flags->Add("max-sessions", &daemon.max_sessions, {.min = 1, .max = kMostSessions}, "sessions at once");
  flags->Add("max-members", &daemon.max_members, {.min = 1, .max = kMaxMembers}, "processes of one session");
  flags->Add("idle-space", &line->idle_space, {.min = absl::ZeroDuration()},
             "close a space that has had no session for so long");
  flags->Add("reattach-timeout", &line->reattach_timeout,
             {.min = absl::ZeroDuration(), .max = absl::Hours(1)},
             "with --keeper=on: so long after a start engines may come back to the sessions that they had");
  flags->AddText(
      "verify", "off",
      "seal: what a block holds is summed soon after it was sealed, and compared before the first match "
      "after a restart or a tier has it, and a sample all the time; no key finds a block that is another. "
      "Host memory only. off: nothing is",
      [&daemon](absl::string_view text) -> absl::Status {
        if (text != "seal" && text != "off")
          return Invalid(absl::StrCat("\"", text, "\" is not seal or off"));
        daemon.verify = text == "seal";
        return absl::OkStatus();
      });
  AddSize("verify-sample", &daemon.verify_sample_bytes, 0,
          "with --verify=seal: so much of what was sealed is compared in a second; 0: nothing", flags);
  flags->Add("rpc-threads", &line->settings.rpc_threads, {.max = kMostRpcThreads},
             "threads that serve gRPC; 0: a quarter of the cores, 1 to 8");
  flags->Add("score-threads", &line->score_threads, {.max = kMostScoreThreads},
             "threads that score, prune and compact on host memory; 0: half of the cores, at least 1");
  flags->Add(
      "score-queue", &daemon.score_queue, {.min = 1, .max = kMostScoreQueue},
      "operations that may wait for a device, a quarter of them of one session; those beyond are refused");
  AddSize(
      "score-features", &daemon.score_features_bytes, 1,
      "most memory of each device for features of full blocks, kept so that a prune reads only new blocks",
      flags);
  flags->Add("score-time", &line->score_time, {.min = absl::Milliseconds(1), .max = absl::Hours(24)},
             "most time of a device that one operation may take, by a guess at what it multiplies; it is "
             "refused beyond");
  flags->Add("guard-share", &daemon.guard.share, 1,
             "measure so large a share of the prunes and compactions that come with a query window: how far "
             "a layer's attention output moves; 0: none");
  flags->Add("guard-bound", &daemon.guard.bound, kMostGuardBound,
             "turn a pruning policy off in a space where outputs move further than this in the mean, in "
             "lengths of the output; 0: never");
  flags->Add("guard-samples", &daemon.guard.samples, {.min = 1, .max = kMostGuardSamples},
             "the mean is taken over so many of the newest measurements, and judged once there are so many");
  AddSize("score-workspace", &daemon.score_workspace_bytes, 1,
          "most memory of a device that one operation may use besides", flags);
}

void AddFlags(CommandLine* line, Flags* flags) {
  AddPlaceFlags(line, flags);
  AddDaemonFlags(line, flags);
  Settings& settings = line->settings;
  flags->Add("operator-tls-listen", &settings.operator_tls_listen,
             "host:port for operator verbs over TCP with mutual TLS, by --access; empty: none");
  flags->Add("operator-tls-cert", &settings.operator_tls.certificate,
             "PEM file with the daemon's certificate chain");
  flags->Add("operator-tls-key", &settings.operator_tls.key, "PEM file with its key");
  flags->Add("operator-tls-ca", &settings.operator_tls.client_ca,
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

// Parses lines "name = value" as flags.
absl::Status ReadConfig(const std::string& path, Flags* flags) {
  ASSIGN_OR_RETURN(const std::string text, ReadFlagFile("config", path));
  std::map<std::string, std::string> seen;  // Flag -> its place.
  int number = 0;
  for (const absl::string_view whole : absl::StrSplit(text, '\n')) {
    const std::string place = absl::StrCat(path, ":", ++number);
    const absl::string_view line = absl::StripAsciiWhitespace(whole);
    if (line.empty() || line[0] == '#') continue;
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits('=', 1));
    const std::string name = absl::StrReplaceAll(absl::StripAsciiWhitespace(parts[0]), {{"_", "-"}});
    if (parts.size() != 2) return Invalid(absl::StrCat(place, ": \"", line, "\" is not \"name = value\""));
    if (name == "config") return Invalid(absl::StrCat(place, ": a config file names no other one"));
    const auto [first, is_first] = seen.emplace(name, place);
    // There may be several.
    if (!is_first && name != "tier")
      return Invalid(absl::StrCat(place, ": --", name, " is set at ", first->second, " too"));
    const auto rest =
        flags->Parse({absl::StrCat("--", name, "=", absl::StripAsciiWhitespace(parts[1]))}, place);
    if (!rest.ok()) return Invalid(absl::StrCat(place, ": ", rest.status().message()));
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
  // Those of the command line replace those of files.
  std::vector<std::string> tiers = std::exchange(line->tiers, {});
  const bool tiers_given = flags->given("tier");
  for (const std::string& path : config) RETURN_IF_ERROR(ReadConfig(path, flags));
  std::vector<std::string> of_files = std::exchange(line->tiers, {});
  RETURN_IF_ERROR(flags->Parse(arguments).status());
  line->tiers = tiers_given ? std::move(tiers) : std::move(of_files);
  return absl::OkStatus();
}

absl::Status BadFlag(const char* name, const std::string& value, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, "=", value, ": ", why));
}

// A policy that can't run with its weights is an error now, not at the first space.
absl::Status ReadPolicy(const CommandLine& line, DaemonOptions* daemon) {
  const bool given = !line.replacement_weights.empty();
  if (given) {
    absl::StatusOr<Weights> weights = Weights::Read(line.replacement_weights);
    if (!weights.ok()) {
      return Invalid(absl::StrCat("--replacement-weights: ", weights.status().message()));
    }
    daemon->policy_weights = std::make_shared<const Weights>(*std::move(weights));
  }
  const PolicyOptions options{.max_blocks = 1, .weights = daemon->policy_weights};
  const absl::Status status = MakeReplacementPolicy(daemon->policy, options).status();
  if (status.ok()) return status;
  return BadFlag("policy", absl::StrCat(daemon->policy, given ? " with --replacement-weights" : ""),
                 status.message());
}

// One address, or none: the libraries that listen would take a list, and a port that is no number for 0.
absl::Status CheckAddress(const char* flag, const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  const bool good = colon != std::string::npos && !absl::StrContains(address, ",") &&
                    absl::SimpleAtoi(address.substr(colon + 1), &port) && port <= UINT16_MAX;
  if (address.empty() || good) return absl::OkStatus();
  return BadFlag(flag, address, "write host:port, with a port of 0 to 65535");
}

absl::Status ReadPaths(const CommandLine& line, Settings* settings) {
  settings->default_socket = settings->socket.empty();
  if (settings->default_socket) settings->socket = DefaultSocket(SocketUser::kDaemon);
  if (settings->socket[0] != '/') {
    return BadFlag("socket", settings->socket, "write an absolute path");
  }
  if (settings->socket.back() == '/') return BadFlag("socket", settings->socket, "write a file's path");
  if (settings->attach_socket().size() > kMaxSocketPathBytes) {
    return BadFlag("socket", settings->socket,
                   absl::StrCat("with .attach it has ", settings->attach_socket().size(),
                                " bytes; the limit is ", kMaxSocketPathBytes));
  }
  if (settings->state_dir.empty()) settings->state_dir = settings->socket_directory();
  if (settings->keeper_elsewhere && (settings->keeper_only || !line.keeper_socket.empty()))
    return BadFlag("keeper", "socket:" + settings->keeper_socket,
                   "is for daemons; --keeper-only and --keeper-socket are for keepers");
  if (!settings->keeper_elsewhere) {
    settings->keeper_socket =
        line.keeper_socket.empty() ? settings->state_dir + "/keeper.sock" : line.keeper_socket;
  }
  if (settings->keeper_socket == settings->socket || settings->keeper_socket == settings->attach_socket())
    return BadFlag("keeper-socket", settings->keeper_socket, "is a socket of the daemon's");
  const bool listens = settings->keeper_only || !line.keeper_socket.empty();
  if ((listens || settings->keeper_elsewhere) && settings->keeper_socket.size() > kMaxSocketPathBytes) {
    return BadFlag("keeper-socket", settings->keeper_socket,
                   absl::StrCat("it has ", settings->keeper_socket.size(), " bytes; the limit is ",
                                kMaxSocketPathBytes));
  }
  const std::string& group = line.socket_group;
  if (!group.empty()) {
    const absl::StatusOr<uint32_t> id = GroupId(group);
    if (!id.ok()) return BadFlag("socket-group", group, id.status().message());
    settings->socket_group = *id;
  }
  RETURN_IF_ERROR(CheckAddress("metrics-listen", settings->metrics_listen));
  RETURN_IF_ERROR(CheckAddress("operator-tls-listen", settings->operator_tls_listen));
  return absl::OkStatus();
}

// All four are given, or none.
absl::Status CheckOperatorTls(const Settings& settings) {
  const TlsFiles& tls = settings.operator_tls;
  const std::string& address = settings.operator_tls_listen;
  const std::pair<const char*, const std::string&> files[] = {{"operator-tls-cert", tls.certificate},
                                                              {"operator-tls-key", tls.key},
                                                              {"operator-tls-ca", tls.client_ca}};
  for (const auto& [flag, path] : files) {
    if (!address.empty() && path.empty()) {
      return BadFlag("operator-tls-listen", address,
                     "needs --operator-tls-cert, --operator-tls-key and --operator-tls-ca");
    }
    if (address.empty() && !path.empty()) return BadFlag(flag, path, "is for --operator-tls-listen");
  }
  if (!address.empty() && settings.access.empty()) {
    return BadFlag("operator-tls-listen", address,
                   "needs --access, a file of rules that says whose certificates are operators'");
  }
  return absl::OkStatus();
}

// Certificate and key go together, and a CA with them.
absl::Status CheckMetricsTls(const Settings& settings) {
  const TlsFiles& tls = settings.metrics_tls;
  const std::pair<const char*, const std::string&> files[] = {{"metrics-tls-cert", tls.certificate},
                                                              {"metrics-tls-key", tls.key},
                                                              {"metrics-tls-client-ca", tls.client_ca}};
  for (const auto& [flag, path] : files) {
    if (path.empty()) continue;
    if (settings.metrics_listen.empty()) return BadFlag(flag, path, "is for --metrics-listen");
    if (tls.certificate.empty() || tls.key.empty())
      return BadFlag(flag, path, "needs --metrics-tls-cert and --metrics-tls-key");
  }
  return absl::OkStatus();
}

absl::Status ReadDaemonOptions(const CommandLine& line, DaemonOptions* daemon) {
  if (daemon->low_watermark > daemon->high_watermark) {
    return BadFlag("low-watermark", absl::StrCat(daemon->low_watermark),
                   absl::StrCat("the limits are 0 and --high-watermark, ", daemon->high_watermark));
  }
  if (daemon->tenant_share == 0) return BadFlag("tenant-share", "0", "no tenant could have any memory");
  if (daemon->guard.share > 0 && daemon->guard.share < kLeastGuardShare) {
    return BadFlag("guard-share", absl::StrCat(daemon->guard.share),
                   absl::StrCat("must be 0, or ", kLeastGuardShare, " to 1"));
  }
  if (daemon->guard.bound > 0 && daemon->guard.share == 0) {
    return BadFlag("guard-bound", absl::StrCat(daemon->guard.bound),
                   "needs --guard-share, without which nothing is measured");
  }
  const uint32_t half = std::max(1u, std::thread::hardware_concurrency() / 2);
  daemon->score_threads = line.score_threads == 0 ? half : line.score_threads;
  daemon->idle_space_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(line.idle_space));
  daemon->reattach_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(line.reattach_timeout));
  daemon->score_time_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(line.score_time));
  return ReadPolicy(line, daemon);
}

// What can be checked only once all flags are known.
absl::Status Finish(const CommandLine& line, Settings* settings) {
  RETURN_IF_ERROR(ReadPaths(line, settings));
  RETURN_IF_ERROR(CheckOperatorTls(*settings));
  RETURN_IF_ERROR(CheckMetricsTls(*settings));
  for (const std::string& text : line.tiers) {
    if (text.empty()) continue;
    ASSIGN_OR_RETURN(settings->tiers.emplace_back(), ParseTierOptions(text));
  }
  RETURN_IF_ERROR(CheckTogether(settings->tiers));
  for (const TierOptions& tier : settings->tiers)
    RETURN_IF_ERROR(CheckTierKeyFile(tier, settings->tier_key_file));
  if (settings->tiers.empty() && settings->tier_key_file.empty() && !settings->tier_encryption_keys.empty()) {
    return BadFlag("tier-encryption-keys", settings->tier_encryption_keys,
                   "is for --tier, or for tiers that are attached, which need --tier-key-file");
  }
  settings->shutdown_grace = absl::ToChronoMilliseconds(line.shutdown_grace);
  settings->tier_flush = absl::ToChronoMilliseconds(line.tier_flush);
  return ReadDaemonOptions(line, &settings->daemon);
}

}  // namespace

absl::Status Settings::Placed(const absl::Status& status) const {
  absl::string_view name = status.message();
  if (!absl::ConsumePrefix(&name, "--")) return status;
  const auto place = places.find(std::string(name.substr(0, name.find_first_of("=: "))));
  if (place == places.end()) return status;
  return absl::Status(status.code(), absl::StrCat(place->second, ": ", status.message()));
}

absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& arguments) {
  CommandLine line;
  Flags flags;
  AddFlags(&line, &flags);
  RETURN_IF_ERROR(Parse(arguments, &line, &flags));
  Settings settings = std::move(line.settings);
  settings.places = flags.places();
  settings.arguments = arguments;
  if (line.help || line.version) {
    settings.reply = line.help ? Help(flags) : VersionText("kvpoold");
    return settings;
  }
  RETURN_IF_ERROR(settings.Placed(Finish(line, &settings)));
  return settings;
}

}  // namespace kvpool
