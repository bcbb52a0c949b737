// Results of a member's parked verbs, on their way to its stream.
//
//   waiting   for a response that has room
//   sent      a stream took it. Should that stream break, the next one gets it again
//   arrived   the answer to a batch that was behind it on the stream is acknowledged: it is dropped
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_COMPLETIONS_H_
#define KVPOOL_SERVER_SPACE_COMPLETIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "server/space/member_log.h"
#include "server/space/unacknowledged.h"

namespace kvpool {

class Completions {
 public:
  bool any_waiting() const { return !waiting_.empty(); }
  // Those that are waiting or sent.
  size_t size() const { return waiting_.size() + sent_.size(); }
  // Their sizes, serialised.
  const Unacknowledged& bytes() const { return bytes_; }

  // From now on the log, which has them too, hears of those that arrived.
  void KeepIn(MemberLog* log) { log_ = log; }
  void Add(uint64_t sequence, uint32_t index, const v1::OperationResult& result);
  // Moves those that wait into the response: at most `bytes` of them, or one that is larger.
  void Take(size_t bytes, v1::StepResponse* response);
  // The results of the batch's parked verbs go into their places in its answer, which carries them from now on: as many as
  // fit into so many bytes. Answers their indices.
  std::vector<uint32_t> Fold(size_t bytes, v1::StepResponse* answer);
  // The answer to this batch is behind what was sent up to now on the stream.
  void ConfirmBy(uint64_t sequence);
  // Answers through this sequence have arrived.
  void Acknowledge(uint64_t through);
  // A new stream gets all again that is not known to have arrived.
  void Resend();
  void Clear();

 private:
  struct Entry {
    v1::Completion completion;
    size_t bytes = 0;
    uint64_t confirmed_by = 0;  // The batch behind it on the stream; 0: there is none yet.
  };

  std::deque<Entry> waiting_, sent_;
  Unacknowledged bytes_;
  MemberLog* log_ = nullptr;  // Null: nothing of it outlives the daemon.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_COMPLETIONS_H_
