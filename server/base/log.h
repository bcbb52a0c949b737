// The daemon's log: one event a line on stderr, one write(2) a line, so that lines of threads never mix.
//
//   text   2026-11-21T02:59:26.123Z I session opened session=7 client="vllm 0.30 pod-7"
//   json   {"time":"2026-11-21T02:59:26.123Z","level":"info","event":"session opened","session":7,…}
//
// The event is a constant phrase and fields carry what varies, so that lines can be counted by
// event. Not for hot paths.
//
// A log that nobody reads, such as a pipe that is full, stops whoever writes to it. While a LogWriter lives, that is a
// thread of its own, and other threads leave their lines in a queue. What the queue has no room for is dropped,
// counted, and told of in the log once it is read again. A share of the room is for audit lines alone: any peer may cause
// others, by opening and closing sessions, and could hide with them what was asked for.
#ifndef KVPOOL_SERVER_BASE_LOG_H_
#define KVPOOL_SERVER_BASE_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <thread>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvpool {

enum class LogLevel : int { kDebug, kInfo, kWarning, kError };
enum class LogFormat : int { kText, kJson };

// A name and a number or text. Text is quoted and escaped as needed.
struct LogField {
  template <std::integral T>
  LogField(std::string_view name, T value) : name(name) {
    if constexpr (std::same_as<T, bool>) {
      this->value = std::string_view(value ? "true" : "false");
    } else if constexpr (std::signed_integral<T>) {
      this->value = static_cast<int64_t>(value);
    } else {
      this->value = static_cast<uint64_t>(value);
    }
  }
  LogField(std::string_view name, double value) : name(name), value(value) {}
  LogField(std::string_view name, std::string_view value) : name(name), value(value) {}
  LogField(std::string_view name, const char* value) : LogField(name, std::string_view(value)) {}
  LogField(std::string_view name, const std::string& value) : LogField(name, std::string_view(value)) {}
  LogField(std::string_view name, const absl::Status& status)
      : LogField(name, std::string_view(status.message().data(), status.message().size())) {}

  std::string_view name;
  std::variant<int64_t, uint64_t, double, std::string_view> value;
};
using LogFields = std::initializer_list<LogField>;

// "debug", "info", "warning" or "error"; "text" or "json". INVALID_ARGUMENT lists the names.
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name);
absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name);

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  int fd = 2;  // Not owned.
};
// Sets the options of the process; until then the defaults hold. Thread-safe.
void SetLog(const LogOptions& options);

void Log(LogLevel level, std::string_view event, absl::Span<const LogField> fields);
inline void LogInfo(std::string_view event, LogFields fields = {}) { Log(LogLevel::kInfo, event, fields); }
inline void LogWarning(std::string_view event, LogFields fields = {}) {
  Log(LogLevel::kWarning, event, fields);
}
inline void LogError(std::string_view event, LogFields fields = {}) { Log(LogLevel::kError, event, fields); }
// Who asked for what: a line with the field category=audit, which no log level silences.
void LogAudit(std::string_view event, absl::Span<const LogField> fields);

// The thread that writes. The program has one, from after its signals are blocked to its end.
class LogWriter {
 public:
  static constexpr size_t kMostQueuedBytes = 1 << 20;
  static constexpr size_t kAuditBytes = 256 << 10;  // So many of them are for audit lines alone.

  LogWriter();
  // Waits a second at most for what is queued to be written. From then on lines are written by those who log.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

 private:
  std::thread thread_;
};

// Lines that were dropped since the start.
struct LogDropped {
  uint64_t lines = 0;
  uint64_t audit = 0;  // So many of these were audit lines.
};
LogDropped LogLinesDropped();

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_LOG_H_
