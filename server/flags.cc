#include "server/flags.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "proto/support/status_macros.h"
#include "server/devices.h"
#include "server/replacement/policy.h"
#include "server/sockets.h"

ABSL_FLAG(std::string, device, "auto",
          "auto (every GPU that the driver shows, otherwise host), host, cuda:N or cuda:GPU-UUID; a comma "
          "list gives one "
          "device to each tensor-parallel rank");
ABSL_FLAG(std::string, capacity, "0.5",
          "memory of each device to use: bytes (8GiB, 500MB) or a share (0.5, 50%)");
ABSL_FLAG(std::string, slab_bytes, "0", "size of a slab; 0: 64MiB on host, 256MiB on cuda");
ABSL_FLAG(std::string, socket, "",
          "gRPC socket; the attach socket is beside it, with .attach added. Empty: kvpool/kvpoold.sock in "
          "$XDG_RUNTIME_DIR, or in /run");
ABSL_FLAG(std::string, socket_group, "",
          "group, by name or number, that may use the sockets; empty: the daemon's own");
ABSL_FLAG(std::string, state_dir, "",
          "where epoch, lock and kvpoold.json are kept; empty: the socket's directory");
ABSL_FLAG(std::string, metrics_listen, "127.0.0.1:9400",
          "host:port for GET /metrics; port 0 takes a free one (see kvpoold.json); empty: none");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error");
ABSL_FLAG(std::string, log_format, "text", "text or json");
ABSL_FLAG(std::string, policy, "lru", "replacement policy of new spaces; see the list above");
ABSL_FLAG(double, low_watermark, 0.005,
          "reclaim in the background when less than this share of a space is free");
ABSL_FLAG(double, high_watermark, 0.01, "and stop when this share is free");
ABSL_FLAG(double, pin_budget, 0.25, "most of a space that may be pinned or retained, 0 to 1");
ABSL_FLAG(uint32_t, max_sessions, 1024, "sessions at once");
ABSL_FLAG(uint32_t, max_members, 64, "processes of one session");
ABSL_FLAG(absl::Duration, idle_space, absl::Hours(1), "close a space that has had no session for so long");
ABSL_FLAG(std::string, tenant_uids, "",
          "tenants shared between users: name=uid+uid,name=uid; others are scoped by the caller's uid");
ABSL_FLAG(int, rpc_threads, 0, "threads that serve gRPC; 0: a quarter of the cores, 1 to 8");
ABSL_FLAG(std::string, operator_tls_listen, "",
          "host:port for operator verbs over TCP with mutual TLS; empty: none");
ABSL_FLAG(std::string, operator_tls_cert, "", "PEM file with the daemon's certificate chain");
ABSL_FLAG(std::string, operator_tls_key, "", "PEM file with its key");
ABSL_FLAG(std::string, operator_tls_ca, "", "PEM file with the CA that signs operators' certificates");
ABSL_FLAG(absl::Duration, shutdown_grace, absl::Seconds(5), "on SIGTERM, wait so long for sessions to end");

namespace kvpool {
namespace {

std::string Usage() {
  std::string usage =
      "owns the KV-cache memory of GPUs and leases it to LLM engines.\n\n"
      "  kvpoold --device=cuda:0 --capacity=0.6\n"
      "  kvpoold --config=/etc/kvpool/kvpoold.conf   (lines \"name = value\", # for comments)\n\n"
      "Replacement policies:\n";
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    absl::StrAppend(&usage, "  ", std::string(policy.name), ": ", std::string(policy.summary), "\n");
  }
  return usage;
}

// Abseil ends the process with 1 for a flag that it does not know or cannot parse. Scripts tell a bad command line (2)
// from a daemon that failed (1).
bool parsing = false, help_wanted = false;
void ExitFromParsing() {
  if (!parsing) return;
  std::fflush(nullptr);
  _exit(help_wanted ? 0 : 2);
}

// Lines "name = value" as flags.
absl::Status AppendConfig(const std::string& path, std::vector<std::string>* arguments) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--config: cannot read ", path));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text[0] == '#') continue;
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(text, absl::MaxSplits('=', 1));
    if (!absl::StrContains(text, "=")) {
      return absl::InvalidArgumentError(
          absl::StrCat("--config: ", path, ":", number, ": \"", text, "\" is not \"name = value\""));
    }
    arguments->push_back(absl::StrCat("--", absl::StripAsciiWhitespace(parts.first), "=",
                                      absl::StripAsciiWhitespace(parts.second)));
  }
  return absl::OkStatus();
}

// Replaces --config by what the file says, and dashes in names of flags by underscores: people write both.
absl::StatusOr<std::vector<std::string>> Arguments(int argc, char** argv) {
  std::vector<std::string> arguments = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (absl::StartsWith(argument, "--config=")) {
      RETURN_IF_ERROR(AppendConfig(argument.substr(9), &arguments));
      continue;
    }
    if (argument == "--config") return absl::InvalidArgumentError("--config: write --config=FILE");
    arguments.push_back(argument);
  }
  for (std::string& argument : arguments) {
    if (&argument == &arguments[0] || !absl::StartsWith(argument, "--")) continue;
    const auto end =
        argument.begin() + static_cast<std::ptrdiff_t>(std::min(argument.find('='), argument.size()));
    std::replace(argument.begin() + 2, end, '-', '_');
    if (absl::StartsWith(argument, "--help")) help_wanted = true;
  }
  return arguments;
}

absl::Status BadFlag(const char* name, const std::string& value, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, "=", value, ": ", why));
}

absl::Status CheckShare(const char* name, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return BadFlag(name, absl::StrCat(value), absl::StrCat("the limits are ", low, " and ", high));
}

absl::Status CheckCount(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return BadFlag(name, absl::StrCat(value), absl::StrCat("the limits are ", low, " and ", high));
}

absl::Status CheckDuration(const char* name, absl::Duration value, absl::Duration high) {
  if (value >= absl::ZeroDuration() && value <= high) return absl::OkStatus();
  return BadFlag(name, absl::FormatDuration(value),
                 absl::StrCat("the limits are 0 and ", absl::FormatDuration(high)));
}

absl::Status ParseTenants(const std::string& text, std::map<std::string, std::vector<uint32_t>>* tenants) {
  for (absl::string_view entry : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(entry, absl::MaxSplits('=', 1));
    if (parts.size() != 2 || parts[0].empty() || parts[1].empty()) {
      return BadFlag("tenant_uids", text, absl::StrCat("\"", entry, "\" is not name=uid+uid"));
    }
    for (absl::string_view uid : absl::StrSplit(parts[1], '+')) {
      uint32_t number;
      if (!absl::SimpleAtoi(uid, &number)) {
        return BadFlag("tenant_uids", text, absl::StrCat("\"", uid, "\" is no uid"));
      }
      (*tenants)[parts[0]].push_back(number);
    }
  }
  return absl::OkStatus();
}

std::string DefaultSocket() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  return absl::StrCat(runtime != nullptr && *runtime != '\0' ? runtime : "/run", "/kvpool/kvpoold.sock");
}

absl::Status ReadPaths(Settings* settings) {
  settings->socket = absl::GetFlag(FLAGS_socket);
  if (settings->socket.empty()) settings->socket = DefaultSocket();
  if (settings->socket[0] != '/') {
    return BadFlag("socket", settings->socket, "write an absolute path");
  }
  if (settings->attach_socket().size() > kMaxSocketPathBytes) {
    return BadFlag("socket", settings->socket,
                   absl::StrCat("with .attach it has ", settings->attach_socket().size(),
                                " bytes; the limit is ", kMaxSocketPathBytes));
  }
  settings->state_dir = absl::GetFlag(FLAGS_state_dir);
  if (settings->state_dir.empty())
    settings->state_dir = settings->socket.substr(0, settings->socket.rfind('/'));
  const std::string group = absl::GetFlag(FLAGS_socket_group);
  if (!group.empty()) {
    const absl::StatusOr<uint32_t> id = GroupId(group);
    if (!id.ok()) return BadFlag("socket_group", group, id.status().message());
    settings->socket_group = *id;
  }
  settings->metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  if (!settings->metrics_listen.empty() && !absl::StrContains(settings->metrics_listen, ":")) {
    return BadFlag("metrics_listen", settings->metrics_listen, "write host:port");
  }
  settings->operator_tls_listen = absl::GetFlag(FLAGS_operator_tls_listen);
  settings->operator_tls = {.certificate = absl::GetFlag(FLAGS_operator_tls_cert),
                            .key = absl::GetFlag(FLAGS_operator_tls_key),
                            .client_ca = absl::GetFlag(FLAGS_operator_tls_ca)};
  const TlsFiles& tls = settings->operator_tls;
  if (!settings->operator_tls_listen.empty() &&
      (tls.certificate.empty() || tls.key.empty() || tls.client_ca.empty())) {
    return BadFlag("operator_tls_listen", settings->operator_tls_listen,
                   "needs --operator_tls_cert, --operator_tls_key and --operator_tls_ca");
  }
  return absl::OkStatus();
}

absl::Status ReadDaemonOptions(DaemonOptions* daemon) {
  const std::string slab_bytes = absl::GetFlag(FLAGS_slab_bytes);
  if (slab_bytes != "0") {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(slab_bytes);
    if (!bytes.ok()) return BadFlag("slab_bytes", slab_bytes, bytes.status().message());
    daemon->slab_bytes = *bytes;
  }
  daemon->low_watermark = absl::GetFlag(FLAGS_low_watermark);
  daemon->high_watermark = absl::GetFlag(FLAGS_high_watermark);
  RETURN_IF_ERROR(CheckShare("high_watermark", daemon->high_watermark, 0, 1));
  RETURN_IF_ERROR(CheckShare("low_watermark", daemon->low_watermark, 0, daemon->high_watermark));
  daemon->policy = absl::GetFlag(FLAGS_policy);
  const absl::StatusOr<std::unique_ptr<ReplacementPolicy>> policy = MakeReplacementPolicy(daemon->policy, 1);
  if (!policy.ok()) return BadFlag("policy", daemon->policy, policy.status().message());
  daemon->pin_budget = absl::GetFlag(FLAGS_pin_budget);
  RETURN_IF_ERROR(CheckShare("pin_budget", daemon->pin_budget, 0, 1));
  daemon->max_sessions = absl::GetFlag(FLAGS_max_sessions);
  RETURN_IF_ERROR(CheckCount("max_sessions", daemon->max_sessions, 1, 65534));
  daemon->max_members = absl::GetFlag(FLAGS_max_members);
  RETURN_IF_ERROR(CheckCount("max_members", daemon->max_members, 1, 1024));
  const absl::Duration idle_space = absl::GetFlag(FLAGS_idle_space);
  RETURN_IF_ERROR(CheckDuration("idle_space", idle_space, absl::Hours(24 * 365)));
  daemon->idle_space_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(idle_space));
  return ParseTenants(absl::GetFlag(FLAGS_tenant_uids), &daemon->tenant_uids);
}

}  // namespace

absl::StatusOr<Settings> ParseSettings(int argc, char** argv) {
  ASSIGN_OR_RETURN(std::vector<std::string> arguments, Arguments(argc, argv));
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());

  absl::SetProgramUsageMessage(Usage());
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return absl::EndsWith(file, "server/flags.cc"); };
  absl::SetFlagsUsageConfig(usage);
  std::atexit(ExitFromParsing);
  parsing = true;
  const std::vector<char*> rest = absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  parsing = false;
  if (rest.size() > 1) return absl::InvalidArgumentError(absl::StrCat("\"", rest[1], "\" is no flag"));

  Settings settings;
  const absl::StatusOr<LogLevel> level = ParseLogLevel(absl::GetFlag(FLAGS_log_level));
  if (!level.ok()) return BadFlag("log_level", absl::GetFlag(FLAGS_log_level), level.status().message());
  const absl::StatusOr<LogFormat> format = ParseLogFormat(absl::GetFlag(FLAGS_log_format));
  if (!format.ok()) return BadFlag("log_format", absl::GetFlag(FLAGS_log_format), format.status().message());
  settings.log.level = *level;
  settings.log.format = *format;
  settings.device = absl::GetFlag(FLAGS_device);
  settings.capacity = absl::GetFlag(FLAGS_capacity);
  const absl::StatusOr<uint64_t> capacity = ParseCapacity(settings.capacity, UINT64_MAX);
  if (!capacity.ok()) return BadFlag("capacity", settings.capacity, capacity.status().message());
  RETURN_IF_ERROR(ReadPaths(&settings));
  settings.rpc_threads = absl::GetFlag(FLAGS_rpc_threads);
  RETURN_IF_ERROR(CheckCount("rpc_threads", settings.rpc_threads, 0, 64));
  const absl::Duration grace = absl::GetFlag(FLAGS_shutdown_grace);
  RETURN_IF_ERROR(CheckDuration("shutdown_grace", grace, absl::Hours(1)));
  settings.shutdown_grace = absl::ToChronoMilliseconds(grace);
  RETURN_IF_ERROR(ReadDaemonOptions(&settings.daemon));
  return settings;
}

}  // namespace kvpool
