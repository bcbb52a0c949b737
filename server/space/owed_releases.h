// Holds that a Prune or Compact has yet to give back, as its member may not have heard which: until it has, it may read these
// blocks.
//
// Without a keeper they go when the operation is over, and whoever asked for it waits for the answer. One whose daemon is killed
// first may go on with the blocks that it had, for all that it knows. So where what is held outlives the daemon, an answer that
// has arrived is what lets them go.
//
//   owed    the result is on its way: a completion, or a part of the answer to its batch or call
//   heard   it has arrived. These holds are given back part by part (Batches::Acknowledge)
//
// After a restart they are found again in the results that no member had heard (member_log.h).
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_OWED_RELEASES_H_
#define KVPOOL_SERVER_SPACE_OWED_RELEASES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "server/space/member_log.h"

namespace kvpool {

class OwedReleases {
 public:
  // What the result of an operation says that it gives back.
  static std::vector<BlockRef> Of(const v1::OperationResult& result) {
    std::vector<BlockRef> refs;
    if (result.prune().released() > 0) {
      for (const uint64_t ref : result.prune().victim_blocks()) refs.push_back(BlockRef::Unpack(ref));
    }
    for (const uint64_t ref : result.compact().released_blocks()) refs.push_back(BlockRef::Unpack(ref));
    return refs;
  }

  // From now on the log, which has the results, hears what was heard of.
  void KeepIn(MemberLog* log) { log_ = log; }
  void Add(uint64_t sequence, uint32_t index, bool on_stream, std::vector<BlockRef> refs) {
    if (!refs.empty()) (on_stream ? completions_ : answers_)[{sequence, index}] = std::move(refs);
  }
  // The completion has arrived.
  void Hear(uint64_t sequence, uint32_t index) {
    if (const auto it = completions_.find({sequence, index}); it != completions_.end()) {
      Heard(it->first, std::move(it->second));
      completions_.erase(it);
    }
  }
  // The answer to its batch has the completion from now on.
  void Fold(uint64_t sequence, uint32_t index) {
    if (auto completion = completions_.extract({sequence, index})) answers_.insert(std::move(completion));
  }
  // Answers through this sequence have arrived.
  void HearAnswers(uint64_t through) {
    while (!answers_.empty() && answers_.begin()->first.first <= through) {
      Heard(answers_.begin()->first, std::move(answers_.begin()->second));
      answers_.erase(answers_.begin());
    }
  }

  bool any_heard() const { return !heard_.empty(); }
  // At most `most` of those that were heard of.
  std::vector<BlockRef> Take(size_t most) {
    if (heard_.empty()) return {};
    std::vector<BlockRef>& last = heard_.back();
    if (last.size() <= most) {
      std::vector<BlockRef> all = std::move(last);
      heard_.pop_back();
      return all;
    }
    std::vector<BlockRef> part(last.end() - static_cast<ptrdiff_t>(most), last.end());
    last.resize(last.size() - most);
    return part;
  }

 private:
  using Id = std::pair<uint64_t, uint32_t>;  // Sequence and index.
  void Heard(Id id, std::vector<BlockRef> refs) {
    if (log_ != nullptr) log_->Hear(id.first, id.second);
    heard_.push_back(std::move(refs));
  }

  std::map<Id, std::vector<BlockRef>> completions_, answers_;
  std::vector<std::vector<BlockRef>> heard_;
  MemberLog* log_ = nullptr;  // Null: nothing outlives the daemon.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_OWED_RELEASES_H_
