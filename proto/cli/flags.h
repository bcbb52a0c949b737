// Command-line flags of kvpoold and the tools: --name=value or --name value; a bool is --name, --no-name or
// --name=false. Names are written with dashes; underscores are as good.
#ifndef KVPOOL_PROTO_CLI_FLAGS_H_
#define KVPOOL_PROTO_CLI_FLAGS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvpool {

struct CountRange {
  uint64_t min = 0, max = ~uint64_t{0};  // The type of the target bounds max as well.
};
struct TimeRange {
  absl::Duration min = absl::Milliseconds(1), max = absl::Hours(24 * 365);
};

// A set of flags. Targets must outlive it; what they hold when they are added is the default that help shows.
// A flag without help text is for the tool's own processes, and not shown.
class Flags {
 public:
  void Add(const std::string& name, std::string* target, const std::string& help);
  void Add(const std::string& name, bool* target, const std::string& help);
  void Add(const std::string& name, uint64_t* target, CountRange range, const std::string& help);
  void Add(const std::string& name, uint32_t* target, CountRange range, const std::string& help);
  // 0 or more.
  void Add(const std::string& name, double* target, double most, const std::string& help);
  // "300ms", "10s", "2h30m".
  void Add(const std::string& name, absl::Duration* target, TimeRange range, const std::string& help);
  // Bytes given as hex digits, or as base64 behind "base64:", which is how JSON shows them.
  void AddBytes(const std::string& name, std::string* target, size_t most_bytes, const std::string& help);
  // A text that `set` understands or refuses. `set` may be called more than once, and the last call counts.
  void AddText(const std::string& name, const std::string& default_text, const std::string& help,
               std::function<absl::Status(absl::string_view value)> set);
  // A flag that may be given many times.
  void AddRepeated(const std::string& name, std::vector<std::string>* target, const std::string& help);

  // Takes flags up to the first argument that is none, or up to "--", and answers what is left. `place` is where
  // the arguments are written, "FILE:LINE"; empty: on the command line. INVALID_ARGUMENT names flag, value and
  // limit.
  absl::StatusOr<std::vector<std::string>> Parse(const std::vector<std::string>& arguments,
                                                 const std::string& place = "");
  // Has another default, which help shows; what was given already stays. REQUIRES: the flag was added, and may have this value.
  void SetDefault(const std::string& name, const std::string& value);
  // One flag a line.
  std::string Help() const;
  // Whether a Parse met it.
  bool given(absl::string_view name) const;
  // Flag -> where the value that counts is written; without those of the command line.
  std::map<std::string, std::string> places() const;

 private:
  struct Flag {
    std::string name, value_name, default_text, help;
    std::function<absl::Status(absl::string_view value)> set;
    bool is_bool = false;
    bool given = false;
    std::string place;
  };
  template <typename Count>
  void AddCount(const std::string& name, Count* target, CountRange range, const std::string& help);
  Flag* Find(absl::string_view name);
  void AddFlag(Flag flag);
  static absl::Status Set(Flag* flag, absl::string_view value, const std::string& place);

  std::vector<Flag> flags_;
};

// The content of the file that a flag names. INVALID_ARGUMENT, with flag, path and the cause: it can't be read, is
// no regular file, is empty, or has more than a mebibyte.
//
// The daemon reads its files again while it serves, on threads that may wait for nobody: a pipe could keep them for ever.
absl::StatusOr<std::string> ReadFlagFile(absl::string_view flag, const std::string& path);
// A pipe is as good, and is waited for: for tools that read once, `--tls-key <(vault …)`.
absl::StatusOr<std::string> ReadFlagFileOrPipe(absl::string_view flag, const std::string& path);

}  // namespace kvpool

#endif  // KVPOOL_PROTO_CLI_FLAGS_H_
