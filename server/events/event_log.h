// A file of what engines asked for: matches, seals and hints as chains of hashed keys,
// which kvpool-sim replays.
//
// Threads that answer engines append to a buffer in memory and never wait for the file; the log's own thread
// writes it out. An event that finds the buffer full is counted as lost, and the file says where. The file is
// bounded: at half of the allowed bytes it is renamed to FILE.1, replacing the one before, and begun anew.
//
// A file is an EventFileHeader, then records: an EventHeader followed by as many 8-byte words as it says, all
// little-endian. A word is a key hashed with a secret of this log, which is stored nowhere: equal words mean
// equal keys, and nothing else can be learned from them.
#ifndef KVPOOL_SERVER_EVENTS_EVENT_LOG_H_
#define KVPOOL_SERVER_EVENTS_EVENT_LOG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/base/housekeeper.h"
#include "server/events/event_log_format.h"
#include "server/pool/block_pool.h"

namespace kvpool {

struct EventLogOptions {
  std::string path;
  uint64_t max_bytes = 256 << 20;   // Bounds FILE and FILE.1 together.
  uint64_t buffer_bytes = 4 << 20;  // Half of max_bytes or less, since the buffer is written at once.
  bool thread = true;               // False: tests call Drain.
};

class EventLog {
 public:
  // A file that exists becomes FILE.1. On a full disk the log is there, and loses every event. UNAVAILABLE: the path
  // can't be written. INVALID_ARGUMENT: it names no regular file.
  static absl::StatusOr<std::unique_ptr<EventLog>> Open(const EventLogOptions& options);
  ~EventLog();

  // The word of a key; never 0.
  uint64_t Hash(const BlockKey& key) const;
  // REQUIRES: header.words == words.size().
  void Add(const EventHeader& header, absl::Span<const uint64_t> words) ABSL_LOCKS_EXCLUDED(mu_);
  // Writes what was added until now. After an error the log stays silent.
  void Drain() ABSL_LOCKS_EXCLUDED(mu_, file_mu_);

  struct Counters {
    uint64_t written = 0;  // Events in the file.
    uint64_t lost = 0;     // Events that found no room in the buffer, or could not be written.
  };
  Counters counters() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit EventLog(const EventLogOptions& options);
  absl::Status BeginFile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(file_mu_);
  // Adds what the file took to file_bytes_.
  absl::Status Write(absl::Span<const char> bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(file_mu_);

  const EventLogOptions options_;
  const uint64_t id_, secret_;

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(file_mu_);
  std::vector<char> filling_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);
  uint64_t untold_ ABSL_GUARDED_BY(mu_) = 0;  // Lost events that the file does not mention yet.
  bool broken_ ABSL_GUARDED_BY(mu_) = false;

  Mutex file_mu_;
  UniqueFd file_ ABSL_GUARDED_BY(file_mu_);
  uint64_t file_bytes_ ABSL_GUARDED_BY(file_mu_) = 0;
  uint32_t part_ ABSL_GUARDED_BY(file_mu_) = 0;
  std::vector<char> writing_ ABSL_GUARDED_BY(file_mu_);

  std::unique_ptr<Housekeeper> drainer_;  // Last: its thread uses all the others.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_EVENTS_EVENT_LOG_H_
