// kvpoolctl: ask and steer kvpoold.
//
// Exit status: 0 done; 1 the daemon says no (or is not serving); 2 usage; 3 the daemon can't be reached.
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/commands.h"
#include "client/tools/operator_client.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "proto/support/default_socket.h"

namespace kvpool::ctl {
namespace {

enum ExitStatus { kDone = 0, kRefused = 1, kUsage = 2, kUnreachable = 3 };

struct Common {
  tools::Endpoint endpoint{.socket = DefaultSocket(SocketUser::kClient)};
  bool json = false;
  bool help = false;
  bool version = false;
};

void AddCommonFlags(Common* common, Flags* flags) {
  flags->Add("socket", &common->endpoint.socket, "kvpoold's Unix socket (also KVPOOL_SOCKET)");
  flags->Add("address", &common->endpoint.address,
             "HOST:PORT of kvpoold's operator verbs instead, with mutual TLS");
  flags->Add("tls-ca", &common->endpoint.tls_ca, "PEM file: who signs the daemon's certificate");
  flags->Add("tls-cert", &common->endpoint.tls_cert, "PEM file: this client's certificate");
  flags->Add("tls-key", &common->endpoint.tls_key, "PEM file: its private key");
  flags->Add("tls-name", &common->endpoint.tls_name,
             "name in the daemon's certificate, where HOST is not it");
  flags->Add("deadline", &common->endpoint.deadline, {.max = absl::Hours(1)}, "longest wait for an answer");
  flags->Add("json", &common->json, "answers as JSON, field names as in kvpool/v1/operator.proto");
  flags->Add("help", &common->help, "this text");
  flags->Add("version", &common->version, "what this build is");
}

int UsageError(const std::string& what) {
  std::fprintf(stderr, "kvpoolctl: %s\n", what.c_str());
  return kUsage;
}

int Help(const Flags& flags, const CommandEntry* command) {
  std::string text = command != nullptr
                         ? absl::StrFormat("kvpoolctl %s [FLAGS]: %s\n", command->name, command->summary)
                         : "kvpoolctl [FLAGS] COMMAND [FLAGS]: ask and steer kvpoold\n\nCommands:\n";
  if (command == nullptr) {
    for (const CommandEntry& entry : Commands())
      absl::StrAppendFormat(&text, "  %-9s %s\n", entry.name, entry.summary);
  }
  absl::StrAppend(&text, "\nFlags:\n", flags.Help(),
                  "\nExit status: 0 done, 1 the daemon says no, 2 usage, 3 the daemon can't be reached.\n");
  std::fputs(text.c_str(), stdout);
  return kDone;
}

int ExitStatusOf(const absl::Status& status) {
  if (status.ok()) return kDone;
  std::fprintf(stderr, "kvpoolctl: %s\n", std::string(status.message()).c_str());
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kUnreachable : kRefused;
}

int Main(const std::vector<std::string>& arguments) {
  Common common;
  Flags flags;
  AddCommonFlags(&common, &flags);
  absl::StatusOr<std::vector<std::string>> rest = flags.Parse(arguments);
  if (!rest.ok()) return UsageError(std::string(rest.status().message()));
  if (common.version) {
    std::fputs(VersionText("kvpoolctl").c_str(), stdout);
    return kDone;
  }
  if (rest->empty())
    return common.help ? Help(flags, nullptr) : UsageError("no command; see kvpoolctl --help");
  const CommandEntry* entry = nullptr;
  for (const CommandEntry& candidate : Commands()) {
    if (candidate.name == rest->front()) entry = &candidate;
  }
  if (entry == nullptr)
    return UsageError(absl::StrCat("no command ", rest->front(), "; see kvpoolctl --help"));

  const std::unique_ptr<Command> command = entry->make();
  command->AddFlags(&flags);
  // Flags may stand between the words and behind them.
  std::vector<std::string> words;
  do {
    words.push_back(rest->front());
    rest = flags.Parse({rest->begin() + 1, rest->end()});
    if (!rest.ok()) return UsageError(std::string(rest.status().message()));
  } while (!rest->empty());
  words.erase(words.begin());
  if (common.help) return Help(flags, entry);
  if (const absl::Status status = command->TakeArguments(words); !status.ok())
    return UsageError(absl::StrCat(entry->name, ": ", std::string(status.message())));
  if (const absl::Status status = command->Check(flags); !status.ok())
    return UsageError(std::string(status.message()));

  absl::StatusOr<std::unique_ptr<tools::OperatorClient>> daemon =
      tools::OperatorClient::Open(common.endpoint);
  if (!daemon.ok()) return UsageError(std::string(daemon.status().message()));
  return ExitStatusOf(command->Run(daemon->get(), Output(common.json)));
}

}  // namespace
}  // namespace kvpool::ctl

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // kvpoolctl blocks | head
  return kvpool::ctl::Main({argv + 1, argv + argc});
}
