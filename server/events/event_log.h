// What engines asked for, on file: matches, seals and hints as chains of hashed keys, to be replayed by kvpool-sim.
//
// Threads that answer engines append to a buffer in memory and never wait for the file; a thread of its own writes it
// out. What finds the buffer full is counted as lost, and the file says where. The file is bounded: at half of its
// bytes it is renamed to FILE.1, in place of the one before, and begun anew.
//
// A file is an EventFileHeader, then records: an EventHeader and as many 8-byte words as it says, all little-endian. A
// word is a key hashed with a secret of this log, which is kept nowhere: equal words mean equal keys, and nothing
// else can be learned of them.
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
  uint64_t max_bytes = 256 << 20;   // Of FILE and FILE.1 together.
  uint64_t buffer_bytes = 4 << 20;  // At most half of max_bytes: it is written at once.
  bool thread = true;               // False: tests call Drain.
};

class EventLog {
 public:
  // A file that is there already becomes FILE.1. UNAVAILABLE: it can't be written. INVALID_ARGUMENT: what is there is
  // no file, but a device, a folder or the like.
  static absl::StatusOr<std::unique_ptr<EventLog>> Open(const EventLogOptions& options);
  ~EventLog();

  // Never 0.
  uint64_t Hash(const BlockKey& key) const;
  // REQUIRES: header.words == words.size().
  void Add(const EventHeader& header, absl::Span<const uint64_t> words) ABSL_LOCKS_EXCLUDED(mu_);
  // Writes what was added until now. After an error nothing is written any more.
  void Drain() ABSL_LOCKS_EXCLUDED(mu_, file_mu_);

  struct Counters {
    uint64_t written = 0;  // Events that are on file.
    uint64_t lost = 0;     // That there was no room for, or that the file did not take.
  };
  Counters counters() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit EventLog(const EventLogOptions& options);
  absl::Status BeginFile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(file_mu_);
  // Counts in file_bytes_ what the file took.
  absl::Status Write(absl::Span<const char> bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(file_mu_);

  const EventLogOptions options_;
  const uint64_t id_, secret_;

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(file_mu_);
  std::vector<char> filling_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);
  uint64_t untold_ ABSL_GUARDED_BY(mu_) = 0;  // Lost, and not yet said in the file.
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
