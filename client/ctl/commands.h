// kvpoolctl's subcommands: one class and one line of the list each.
#ifndef KVPOOL_CLIENT_CTL_COMMANDS_H_
#define KVPOOL_CLIENT_CTL_COMMANDS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/tools/operator_client.h"
#include "proto/cli/flags.h"

namespace google::protobuf {
class Message;
}

namespace kvpool::ctl {

// Where answers go.
class Output {
 public:
  explicit Output(bool json) : json_(json) {}
  bool json() const { return json_; }
  // Prints one JSON document with the field names of the .proto files, or `text`.
  void Print(const google::protobuf::Message& message, const std::string& text) const;
  void PrintText(const std::string& text) const;

 private:
  const bool json_;
};

class Command {
 public:
  virtual ~Command() = default;
  virtual void AddFlags(Flags* flags) {}
  // Takes the words behind the command's name. INVALID_ARGUMENT: the command does not take these.
  virtual absl::Status TakeArguments(const std::vector<std::string>& arguments);
  // Called before the daemon is. INVALID_ARGUMENT: the flags don't make a request.
  virtual absl::Status Check(const Flags& flags) { return absl::OkStatus(); }
  virtual absl::Status Run(tools::OperatorClient* daemon, const Output& output) = 0;
};

struct CommandEntry {
  const char* name;
  const char* summary;
  std::unique_ptr<Command> (*make)();
};
absl::Span<const CommandEntry> Commands();

std::unique_ptr<Command> MakeTop();

}  // namespace kvpool::ctl

#endif  // KVPOOL_CLIENT_CTL_COMMANDS_H_
