#include "proto/cli/flags.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

constexpr size_t kMostFileBytes = 1 << 20;

absl::Status Wrong(absl::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("\"", value, "\" is not ", wanted));
}

absl::StatusOr<std::string> ParseBytes(absl::string_view value, size_t most_bytes) {
  std::string bytes;
  if (absl::ConsumePrefix(&value, "base64:")) {
    if (!absl::Base64Unescape(value, &bytes)) return Wrong(value, "base64");
  } else {
    if (value.size() % 2 != 0 || !std::all_of(value.begin(), value.end(), absl::ascii_isxdigit)) {
      return Wrong(value, "an even number of hex digits");
    }
    bytes = absl::HexStringToBytes(value);
  }
  if (bytes.empty() || bytes.size() > most_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes.size(), " bytes; 1 to ", most_bytes, " are allowed"));
  }
  return bytes;
}

}  // namespace

void Flags::Add(const std::string& name, std::string* target, const std::string& help) {
  AddText(name, *target, help, [target](absl::string_view value) {
    *target = std::string(value);
    return absl::OkStatus();
  });
}

void Flags::AddText(const std::string& name, const std::string& default_text, const std::string& help,
                    std::function<absl::Status(absl::string_view value)> set) {
  AddFlag({name, "TEXT", default_text, help, std::move(set)});
}

void Flags::Add(const std::string& name, bool* target, const std::string& help) {
  AddFlag({name, "", *target ? "true" : "", help,
           [target](absl::string_view value) {
             return absl::SimpleAtob(value, target) ? absl::OkStatus() : Wrong(value, "true or false");
           },
           true});
}

template <typename Count>
void Flags::AddCount(const std::string& name, Count* target, CountRange range, const std::string& help) {
  range.max = std::min<uint64_t>(range.max, std::numeric_limits<Count>::max());
  AddFlag({name, "N", *target == 0 ? "" : absl::StrCat(*target), help, [=](absl::string_view value) {
             uint64_t number;
             if (!absl::SimpleAtoi(value, &number) || number < range.min || number > range.max) {
               return Wrong(value, absl::StrCat("a whole number of ", range.min, " to ", range.max));
             }
             *target = static_cast<Count>(number);
             return absl::OkStatus();
           }});
}

void Flags::Add(const std::string& name, uint64_t* target, CountRange range, const std::string& help) {
  AddCount(name, target, range, help);
}

void Flags::Add(const std::string& name, uint32_t* target, CountRange range, const std::string& help) {
  AddCount(name, target, range, help);
}

void Flags::Add(const std::string& name, double* target, double most, const std::string& help) {
  AddFlag({name, "X", *target == 0 ? "" : absl::StrCat(*target), help, [=](absl::string_view value) {
             double number;
             if (!absl::SimpleAtod(value, &number) || !(number >= 0 && number <= most)) {
               return Wrong(value, absl::StrCat("a number of 0 to ", most));
             }
             *target = number;
             return absl::OkStatus();
           }});
}

void Flags::Add(const std::string& name, absl::Duration* target, TimeRange range, const std::string& help) {
  AddFlag({name, "TIME", *target == absl::ZeroDuration() ? "" : absl::FormatDuration(*target), help,
           [=](absl::string_view value) {
             absl::Duration duration;
             if (!absl::ParseDuration(value, &duration)) return Wrong(value, "a time like 300ms, 10s or 2h");
             if (duration < range.min || duration > range.max) {
               return Wrong(value, absl::StrCat("a time of ", absl::FormatDuration(range.min), " to ",
                                                absl::FormatDuration(range.max)));
             }
             *target = duration;
             return absl::OkStatus();
           }});
}

void Flags::AddBytes(const std::string& name, std::string* target, size_t most_bytes,
                     const std::string& help) {
  AddFlag({name, "HEX", "", help, [=](absl::string_view value) -> absl::Status {
             ASSIGN_OR_RETURN(*target, ParseBytes(value, most_bytes));
             return absl::OkStatus();
           }});
}

void Flags::AddRepeated(const std::string& name, std::vector<std::string>* target, const std::string& help) {
  AddFlag({name, "TEXT", "", help, [target](absl::string_view value) {
             target->emplace_back(value);
             return absl::OkStatus();
           }});
}

void Flags::AddFlag(Flag flag) {
  KVPOOL_CHECK(Find(flag.name) == nullptr, "flag --%s is there twice", flag.name.c_str());
  flags_.push_back(std::move(flag));
}

Flags::Flag* Flags::Find(absl::string_view name) {
  for (Flag& flag : flags_) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

void Flags::SetDefault(const std::string& name, const std::string& value) {
  Flag* const flag = Find(name);
  KVPOOL_CHECK(flag != nullptr, "there is no flag --%s", name.c_str());
  flag->default_text = value;
  if (flag->given) return;
  const absl::Status set = flag->set(value);
  KVPOOL_CHECK(set.ok(), "--%s can't be \"%s\"", name.c_str(), value.c_str());
}

bool Flags::given(absl::string_view name) const {
  return std::any_of(flags_.begin(), flags_.end(),
                     [&](const Flag& flag) { return flag.name == name && flag.given; });
}

std::map<std::string, std::string> Flags::places() const {
  std::map<std::string, std::string> places;
  for (const Flag& flag : flags_) {
    if (!flag.place.empty()) places[flag.name] = flag.place;
  }
  return places;
}

absl::Status Flags::Set(Flag* flag, absl::string_view value, const std::string& place) {
  flag->given = true;
  flag->place = place;
  const absl::Status status = flag->set(value);
  return status.ok() ? status
                     : absl::InvalidArgumentError(absl::StrCat("--", flag->name, ": ", status.message()));
}

absl::StatusOr<std::vector<std::string>> Flags::Parse(const std::vector<std::string>& arguments,
                                                      const std::string& place) {
  size_t i = 0;
  for (; i < arguments.size(); ++i) {
    absl::string_view text = arguments[i];
    if (text == "--") {
      ++i;
      break;
    }
    if (!absl::ConsumePrefix(&text, "--")) break;
    const size_t equals = text.find('=');
    const std::string name = absl::StrReplaceAll(text.substr(0, equals), {{"_", "-"}});
    Flag* flag = Find(name);
    if (flag == nullptr && equals == absl::string_view::npos && absl::StartsWith(name, "no-")) {
      flag = Find(absl::string_view(name).substr(3));
      if (flag != nullptr && flag->is_bool) {
        RETURN_IF_ERROR(Set(flag, "false", place));
        continue;
      }
      flag = nullptr;
    }
    if (flag == nullptr) return absl::InvalidArgumentError(absl::StrCat("no flag --", name, "; see --help"));
    if (equals != absl::string_view::npos) {
      RETURN_IF_ERROR(Set(flag, text.substr(equals + 1), place));
    } else if (flag->is_bool) {
      RETURN_IF_ERROR(Set(flag, "true", place));
    } else if (++i < arguments.size()) {
      RETURN_IF_ERROR(Set(flag, arguments[i], place));
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": a value is missing"));
    }
  }
  return std::vector<std::string>(arguments.begin() + static_cast<ptrdiff_t>(i), arguments.end());
}

std::string Flags::Help() const {
  size_t width = 0;
  const auto head = [](const Flag& flag) {
    return absl::StrCat("  --", flag.name, flag.is_bool ? "" : absl::StrCat("=", flag.value_name));
  };
  for (const Flag& flag : flags_) {
    if (!flag.help.empty()) width = std::max(width, head(flag).size());
  }
  std::string text;
  for (const Flag& flag : flags_) {
    if (flag.help.empty()) continue;
    const std::string start = head(flag);
    absl::StrAppend(&text, start, std::string(width + 2 - start.size(), ' '), flag.help,
                    flag.default_text.empty() ? "" : absl::StrCat(" [", flag.default_text, "]"), "\n");
  }
  return text;
}

namespace {

enum class FlagFile : uint8_t { kRegular, kAny };

absl::StatusOr<std::string> Read(absl::string_view flag, const std::string& path, FlagFile kind) {
  const auto failed = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": cannot read it: ", why));
  };
  // Without O_NONBLOCK the opening of a named pipe waits for a writer.
  const UniqueFd file(
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | (kind == FlagFile::kRegular ? O_NONBLOCK : 0)));
  struct stat facts {};
  if (!file.valid() || fstat(file.get(), &facts) != 0) return failed(std::strerror(errno));
  if (kind == FlagFile::kRegular && !S_ISREG(facts.st_mode)) return failed("it is no regular file");
  std::string text;
  std::array<char, 16384> bytes;
  while (text.size() <= kMostFileBytes) {
    const ssize_t size = read(file.get(), bytes.data(), bytes.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return failed(std::strerror(errno));
    if (size == 0) break;
    text.append(bytes.data(), static_cast<size_t>(size));
  }
  if (text.empty()) return failed("it is empty");
  if (text.size() > kMostFileBytes)
    return failed(absl::StrCat("it has more than ", kMostFileBytes, " bytes"));
  return text;
}

}  // namespace

absl::StatusOr<std::string> ReadFlagFile(absl::string_view flag, const std::string& path) {
  return Read(flag, path, FlagFile::kRegular);
}

absl::StatusOr<std::string> ReadFlagFileOrPipe(absl::string_view flag, const std::string& path) {
  return Read(flag, path, FlagFile::kAny);
}

}  // namespace kvpool
