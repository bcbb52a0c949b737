#include "server/base/log.h"

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/mutex.h"
#include "proto/support/named_thread.h"

namespace kvpool {
namespace {

std::atomic<LogLevel> log_level{LogLevel::kInfo};
std::atomic<LogFormat> log_format{LogFormat::kText};
std::atomic<int> log_fd{STDERR_FILENO};

constexpr std::string_view kLevelNames[] = {"debug", "info", "warning", "error"};
constexpr char kLevelLetters[] = {'D', 'I', 'W', 'E'};

// Lines between those who log and the LogWriter.
class Queue {
 public:
  // Takes the line, or drops it. False: no LogWriter lives, and the caller writes.
  bool Push(bool audit, std::string* line) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (!open_) return false;
    const size_t room = LogWriter::kMostQueuedBytes - (audit ? 0 : LogWriter::kAuditBytes);
    if (bytes_ + line->size() > room) {
      ++dropped_.lines;
      dropped_.audit += audit ? 1 : 0;
      return true;
    }
    bytes_ += line->size();
    lines_.push_back(std::move(*line));
    changed_.SignalAll();
    return true;
  }
  void Open() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    open_ = true;
    ended_ = false;
  }
  // True: everything was written, and the writer's thread is at its end.
  bool Close(std::chrono::steady_clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    open_ = false;
    changed_.SignalAll();
    while (!ended_) {
      if (!changed_.WaitUntil(&mu_, deadline) && !ended_) return false;
    }
    return true;
  }
  // The writer's thread: the next lines, and how many have been dropped in all; no line: the queue is closed.
  struct Batch {
    std::deque<std::string> lines;
    LogDropped dropped;
  };
  Batch Next() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (lines_.empty() && open_) changed_.Wait(&mu_);
    if (lines_.empty()) {
      ended_ = true;
      changed_.SignalAll();
    }
    bytes_ = 0;
    return {.lines = std::exchange(lines_, {}), .dropped = dropped_};
  }
  LogDropped dropped() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return dropped_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = true;
  std::deque<std::string> lines_ ABSL_GUARDED_BY(mu_);
  size_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  LogDropped dropped_ ABSL_GUARDED_BY(mu_);
};

// It is never destroyed: a writer that is stuck when the program ends still uses it.
Queue& TheQueue() {
  static Queue* const queue = new Queue;
  return *queue;
}

void AppendTime(std::string* line) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm utc;
  gmtime_r(&now.tv_sec, &utc);
  char text[40];
  const size_t size = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  line->append(text, size);
  std::snprintf(text, sizeof text, ".%03ldZ", now.tv_nsec / 1000000);
  line->append(text);
}

// Escapes a JSON string. Bytes that are not UTF-8 come out unchanged; readers replace them.
void AppendQuoted(std::string_view text, std::string* line) {
  line->push_back('"');
  for (const char c : text) {
    switch (c) {
      case '"':
      case '\\':
        line->push_back('\\');
        line->push_back(c);
        break;
      case '\n':
        line->append("\\n");
        break;
      case '\t':
        line->append("\\t");
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          char escape[8];
          std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned char>(c));
          line->append(escape);
        } else {
          line->push_back(c);
        }
    }
  }
  line->push_back('"');
}

bool NeedsQuotes(std::string_view text) {
  if (text.empty()) return true;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == '"' || c == '\\' || c == '=' || c == 0x7f) return true;
  }
  return false;
}

void AppendValue(const LogField& field, bool always_quote, std::string* line) {
  if (const auto* text = std::get_if<std::string_view>(&field.value)) {
    if (always_quote || NeedsQuotes(*text)) {
      AppendQuoted(*text, line);
    } else {
      line->append(*text);
    }
  } else if (const auto* number = std::get_if<double>(&field.value)) {
    // JSON has neither infinities nor NaN.
    absl::StrAppend(line, std::isfinite(*number) ? *number : 0.0);
  } else if (const auto* number = std::get_if<int64_t>(&field.value)) {
    absl::StrAppend(line, *number);
  } else {
    absl::StrAppend(line, std::get<uint64_t>(field.value));
  }
}

std::string TextLine(LogLevel level, std::string_view event, absl::Span<const LogField> fields) {
  std::string line;
  AppendTime(&line);
  line.push_back(' ');
  line.push_back(kLevelLetters[static_cast<int>(level)]);
  line.push_back(' ');
  line.append(event);
  for (const LogField& field : fields) {
    line.push_back(' ');
    line.append(field.name);
    line.push_back('=');
    AppendValue(field, /*always_quote=*/false, &line);
  }
  line.push_back('\n');
  return line;
}

std::string JsonLine(LogLevel level, std::string_view event, absl::Span<const LogField> fields) {
  std::string line = "{\"time\":\"";
  AppendTime(&line);
  line.append("\",\"level\":");
  AppendQuoted(kLevelNames[static_cast<int>(level)], &line);
  line.append(",\"event\":");
  AppendQuoted(event, &line);
  for (const LogField& field : fields) {
    line.push_back(',');
    AppendQuoted(field.name, &line);
    line.push_back(':');
    AppendValue(field, /*always_quote=*/true, &line);
  }
  line.append("}\n");
  return line;
}

std::string Line(LogLevel level, std::string_view event, absl::Span<const LogField> fields) {
  return log_format.load(std::memory_order_relaxed) == LogFormat::kJson ? JsonLine(level, event, fields)
                                                                        : TextLine(level, event, fields);
}

// What can't be written is lost: there is nobody to tell.
void WriteLine(const std::string& line) {
  [[maybe_unused]] const ssize_t written =
      ::write(log_fd.load(std::memory_order_relaxed), line.data(), line.size());
}

void Put(bool audit, std::string line) {
  if (!TheQueue().Push(audit, &line)) WriteLine(line);
}

void WriteQueued(LogDropped told) {
  while (true) {
    const Queue::Batch batch = TheQueue().Next();
    if (batch.lines.empty()) return;
    for (const std::string& line : batch.lines) WriteLine(line);
    // They were dropped behind the lines of this batch.
    if (const uint64_t count = batch.dropped.lines - told.lines; count > 0) {
      WriteLine(Line(LogLevel::kWarning, "log lines dropped", {{"count", count}}));
    }
    if (const uint64_t count = batch.dropped.audit - told.audit; count > 0) {
      WriteLine(Line(LogLevel::kWarning, "audit lines dropped", {{"category", "audit"}, {"count", count}}));
    }
    told = batch.dropped;
  }
}

}  // namespace

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name) {
  for (int i = 0; i < 4; ++i) {
    if (kLevelNames[i] == name) return LogLevel{i};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level is \"", std::string(name), "\"; there are debug, info, warning and error"));
}

absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return absl::InvalidArgumentError(
      absl::StrCat("log format is \"", std::string(name), "\"; there are text and json"));
}

void SetLog(const LogOptions& options) {
  log_level = options.level;
  log_format = options.format;
  log_fd = options.fd;
}

void Log(LogLevel level, std::string_view event, absl::Span<const LogField> fields) {
  if (level < log_level.load(std::memory_order_relaxed)) return;
  Put(/*audit=*/false, Line(level, event, fields));
}

void LogAudit(std::string_view event, absl::Span<const LogField> fields) {
  std::vector<LogField> all = {{"category", "audit"}};
  all.insert(all.end(), fields.begin(), fields.end());
  Put(/*audit=*/true, Line(LogLevel::kInfo, event, all));
}

LogWriter::LogWriter() {
  TheQueue().Open();
  thread_ = NamedThread("log", [dropped = TheQueue().dropped()] { WriteQueued(dropped); });
}

LogWriter::~LogWriter() {
  if (TheQueue().Close(std::chrono::steady_clock::now() + std::chrono::seconds(1))) {
    thread_.join();
  } else {
    thread_.detach();  // It waits for a reader, and ends with the program.
  }
}

LogDropped LogLinesDropped() { return TheQueue().dropped(); }

}  // namespace kvpool
