// A match that names many keys. Nobody waits for all of it: keys are looked up and blocks taken a part at a time, between
// which others get in.
//
//   1  Where a group has a window, what is resident is looked up first: only its end says how much of the others is
//      of use. That holds nothing.
//   2  The groups without a window are taken from the root, as far as they are there and may be held.
//   3  Of the others the windows at that end: they are good whole or not at all. Where a block of one went meanwhile, or
//      may not be held, a shorter prefix is tried, a few times.
//   4  What was taken beyond the end is given back.
//
// What is found is what one match of all keys would find, unless others change it meanwhile: then it may be shorter. It
// is counted as one lookup.
#ifndef KVPOOL_SERVER_SPACE_LONG_MATCH_H_
#define KVPOOL_SERVER_SPACE_LONG_MATCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "server/pool/block_pool.h"
#include "server/pool/match_search.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/turn.h"

namespace kvpool {

class EventLog;

v1::MissReason WireReason(MissReason reason);
void AppendRefs(absl::Span<const BlockRef> refs, google::protobuf::RepeatedField<uint64_t>* wire);
// Records what was asked of a group; `words` are its keys' hashes.
void LogMatch(EventLog* log, uint64_t space, uint64_t session, TimeMs now, const GroupQuery& query,
              absl::Span<const uint64_t> words);

class LongMatch {
 public:
  // `log` may be null. REQUIRES: the match is valid, the session is ready and past its warm-up, and it outlives this.
  LongMatch(SpaceState* state, EventLog* log, Session* session, const v1::Match& match);

  // Fills in the answer, which has a group for each that is asked for. False: the session ended meanwhile, and what
  // it held is no longer this match's.
  bool Run(Turn& turn, v1::MatchResult* answer);

 private:
  // Lets others in. False: the session has ended.
  bool Pause(Turn& turn, size_t names);
  bool ReadKeys(Turn& turn);
  // Looks up how much is resident, at most steps_.
  bool Look(Turn& turn);
  bool TakeRuns(Turn& turn);
  bool TakeWindows(Turn& turn);
  // Takes the window of query q at the end, and adds to `got` how much of it.
  bool TakeWindow(Turn& turn, size_t q, uint64_t* got);
  // Gives back what was taken behind the end.
  bool Trim(Turn& turn);
  // Gives back what was taken of query q from this block on.
  bool GiveBack(Turn& turn, size_t q, size_t end);
  bool CountMissed(Turn& turn);
  size_t BlocksOf(size_t query, uint64_t steps) const {
    return static_cast<size_t>(steps * search_->BlocksPerStep(query));
  }

  SpaceState& state_;
  EventLog* const log_;
  Session* const session_;
  const v1::Match& match_;
  std::vector<BlockKey> keys_;
  std::vector<GroupQuery> queries_;
  std::unique_ptr<MatchSearch> search_;
  uint64_t run_blocks_ = 0;                   // Those of one step, in the groups without a window.
  bool windowed_ = false;                     // One of the groups has a window.
  uint64_t steps_ = 0;                        // The prefix that may still be answered.
  MissReason miss_ = MissReason::kNone;       // Why it is not longer.
  std::vector<std::vector<BlockRef>> taken_;  // Parallel to the queries.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_LONG_MATCH_H_
