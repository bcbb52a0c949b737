// Results of a member's parked verbs, on their way to its stream.
//
//   waiting   for a response that has room
//   sent      a stream took it. Should that stream break, the next one gets it again
//   arrived   the answer to a batch that was behind it on the stream is acknowledged: it is dropped
//
// They are kept in order of arrival, and those that were sent are in front of those that wait: a stream takes the first
// that waits, and a new one begins with the first of all. There may be as many as verbs may be parked, so that nothing here
// but Clear visits all of them.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_COMPLETIONS_H_
#define KVPOOL_SERVER_SPACE_COMPLETIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "kvpool/v1/engine.pb.h"
#include "server/space/member_log.h"
#include "server/space/owed_releases.h"
#include "server/space/unacknowledged.h"

namespace kvpool {

class Completions {
 public:
  // Some 0.5 ms of copying.
  static constexpr size_t kMostTaken = 4096;
  static constexpr size_t kMostFolded = 1024;

  bool any_waiting() const { return !entries_.empty() && entries_.rbegin()->first >= next_; }
  // Those that are waiting or sent.
  size_t size() const { return entries_.size(); }
  // Their sizes, serialised.
  const Unacknowledged& bytes() const { return bytes_; }

  // From now on the log, which has them too, hears of those that arrived.
  void KeepIn(MemberLog* log) { log_ = log; }
  void Add(uint64_t sequence, uint32_t index, const v1::OperationResult& result);
  // Those that wait go into the response: at most `bytes` of them, or one that is larger, and at most kMostTaken.
  void Take(size_t bytes, v1::StepResponse* response);
  // The results of the batch's parked verbs go into their places in its answer, which carries them from now on: as many as
  // fit into so many bytes, which it counts down, and at most `most` and kMostFolded. Answers their indices.
  std::vector<uint32_t> Fold(size_t* bytes, size_t most, v1::StepResponse* answer);
  // The answer to this batch is behind what was sent up to now on the stream.
  void ConfirmBy(uint64_t sequence);
  // Answers through this sequence have arrived: drops at most so many of what was in front of them. True: there are more.
  // `owed` hears of each.
  bool Acknowledge(uint64_t through, size_t most, OwedReleases* owed);
  // A new stream gets all again that is not known to have arrived.
  void Resend();
  void Clear();

 private:
  struct Entry {
    v1::Completion completion;
    size_t bytes = 0;
  };
  // Keyed by number of arrival.
  using Entries = std::map<uint64_t, Entry>;
  // Some that were sent in front of the answer to one batch, and are not dropped.
  struct Run {
    uint64_t confirmed_by = 0;  // The batch's sequence.
    size_t left = 0;            // There is one, at least.
  };
  void Drop(Entries::iterator it);

  Entries entries_;
  // The sequence of each, and its number.
  absl::btree_set<std::pair<uint64_t, uint64_t>> by_sequence_;
  uint64_t arrived_ = 0;  // So many were ever added.
  uint64_t next_ = 0;     // All from here on wait.
  // From this one on to next_ no answer is behind them yet, and so many of these are here.
  uint64_t unconfirmed_ = 0;
  size_t unconfirmed_here_ = 0;
  // Keyed by the number that each begins with, and the other way round: by the batch that is behind it.
  std::map<uint64_t, Run> runs_;
  std::set<std::pair<uint64_t, uint64_t>> by_confirming_;
  Unacknowledged bytes_;
  MemberLog* log_ = nullptr;  // Null: nothing of it outlives the daemon.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_COMPLETIONS_H_
