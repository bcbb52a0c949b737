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
  // One JSON document with the field names of the .proto files, or what people read.
  void Print(const google::protobuf::Message& message, const std::string& text) const;
  void PrintText(const std::string& text) const;

 private:
  const bool json_;
};

class Command {
 public:
  virtual ~Command() = default;
  virtual void AddFlags(Flags* flags) {}
  // Words behind the command's name. INVALID_ARGUMENT: not these.
  virtual absl::Status TakeArguments(const std::vector<std::string>& arguments);
  // INVALID_ARGUMENT before anything was asked: the flags given don't make a request.
  virtual absl::Status Check(const Flags& flags) { return absl::OkStatus(); }
  virtual absl::Status Run(tools::OperatorClient* daemon, const Output& output) = 0;
};

struct CommandEntry {
  const char* name;
  const char* summary;
  std::unique_ptr<Command> (*make)();
};
absl::Span<const CommandEntry> Commands();

std::unique_ptr<Command> MakeTop();  // In top.cc.

}  // namespace kvpool::ctl

#endif  // KVPOOL_CLIENT_CTL_COMMANDS_H_
