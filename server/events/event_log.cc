#include "server/events/event_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/random_bytes.h"
#include "server/pool/prefix_index.h"

namespace kvpool {
namespace {

uint64_t RandomWord() {
  const std::string bytes = RandomBytes(sizeof(uint64_t));
  uint64_t word;
  std::memcpy(&word, bytes.data(), sizeof(word));
  return word;
}

// RESOURCE_EXHAUSTED: there is no room on the disk, or none for this process. UNAVAILABLE: all else.
absl::Status Failed(const char* what, const std::string& path) {
  const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
  return absl::Status(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
                      absl::StrCat(path, " can't be ", what, ": ", std::strerror(errno)));
}

template <typename T>
void Append(const T* values, size_t count, std::vector<char>* out) {
  const char* const bytes = reinterpret_cast<const char*>(values);
  out->insert(out->end(), bytes, bytes + count * sizeof(T));
}

// How many events are complete within the first `bytes` of a buffer. A record of lost ones is not an event.
uint64_t EventsIn(const std::vector<char>& buffer, uint64_t bytes) {
  uint64_t events = 0;
  for (uint64_t at = 0; at < bytes;) {
    EventHeader header;
    std::memcpy(&header, buffer.data() + at, sizeof(header));
    at += sizeof(header) + header.words * sizeof(uint64_t);
    if (at <= bytes && header.kind != EventKind::kLost) ++events;
  }
  return events;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EventLog>> EventLog::Open(const EventLogOptions& options) {
  std::unique_ptr<EventLog> log(new EventLog(options));
  {
    MutexLock file_lock(&log->file_mu_);
    const absl::Status begun = log->BeginFile();
    if (!begun.ok() && !absl::IsResourceExhausted(begun)) return begun;
    if (!begun.ok()) {
      // As when the disk fills later: the daemon serves, and counts what is lost.
      LogError("event log stopped", {{"error", begun}});
      MutexLock lock(&log->mu_);
      log->broken_ = true;
    }
  }
  if (options.thread) log->drainer_ = std::make_unique<Housekeeper>([log = log.get()] { log->Drain(); });
  return log;
}

EventLog::EventLog(const EventLogOptions& options)
    : options_(options), id_(RandomWord()), secret_(RandomWord()) {
  filling_.reserve(options_.buffer_bytes);
  writing_.reserve(options_.buffer_bytes);
}

EventLog::~EventLog() {
  drainer_.reset();
  Drain();
}

uint64_t EventLog::Hash(const BlockKey& key) const {
  const auto product = static_cast<unsigned __int128>(HashKey(key) ^ secret_) * 0x9e3779b97f4a7c15u;
  const uint64_t hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ secret_;
  return hash == 0 ? 1 : hash;
}

void EventLog::Add(const EventHeader& header, absl::Span<const uint64_t> words) {
  const size_t bytes = sizeof(header) + words.size() * sizeof(uint64_t);
  MutexLock lock(&mu_);
  // Room stays for one record of what was lost.
  if (broken_ || filling_.size() + bytes + sizeof(EventHeader) > options_.buffer_bytes) {
    ++counters_.lost;
    ++untold_;
    return;
  }
  if (untold_ != 0) {
    const EventHeader lost = {.kind = EventKind::kLost,
                              .time_ms = header.time_ms,
                              .space = header.space,
                              .session = std::exchange(untold_, 0)};
    Append(&lost, 1, &filling_);
  }
  Append(&header, 1, &filling_);
  Append(words.data(), words.size(), &filling_);
}

EventLog::Counters EventLog::counters() const {
  MutexLock lock(&mu_);
  return counters_;
}

absl::Status EventLog::BeginFile() {
  struct stat there;
  if (stat(options_.path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(options_.path, " is no regular file"));
  }
  const std::string before = options_.path + ".1";
  if (std::rename(options_.path.c_str(), before.c_str()) != 0 && errno != ENOENT) {
    return Failed("renamed", options_.path);
  }
  file_ = UniqueFd(open(options_.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file_.valid()) return Failed("opened", options_.path);
  file_bytes_ = 0;
  const EventFileHeader header = {.log = id_, .part = part_++};
  return Write({reinterpret_cast<const char*>(&header), sizeof(header)});
}

absl::Status EventLog::Write(absl::Span<const char> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("written", options_.path);
    file_bytes_ += static_cast<uint64_t>(written);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

void EventLog::Drain() {
  MutexLock file_lock(&file_mu_);
  writing_.clear();
  {
    MutexLock lock(&mu_);
    if (broken_) return;
    std::swap(filling_, writing_);
  }
  if (writing_.empty()) return;
  absl::Status status;
  if (file_bytes_ + writing_.size() > options_.max_bytes / 2 && file_bytes_ > sizeof(EventFileHeader)) {
    status = BeginFile();
  }
  const uint64_t before = file_bytes_;
  if (status.ok()) status = Write(writing_);
  const uint64_t events = EventsIn(writing_, writing_.size());
  const uint64_t written = status.ok() ? events : EventsIn(writing_, file_bytes_ - before);
  if (!status.ok()) LogError("event log stopped", {{"error", status}});
  MutexLock lock(&mu_);
  counters_.written += written;
  if (status.ok()) return;
  broken_ = true;
  counters_.lost += events - written + EventsIn(filling_, filling_.size());
  filling_.clear();
}

}  // namespace kvpool
