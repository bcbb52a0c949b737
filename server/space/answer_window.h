// The answers that a member may not have received yet. They make a verb apply once:
//
//   sequence <= floor     forgotten: the call is refused, whether it was applied or not
//   in the window         remembered: a repetition gets the first answer again
//   else                  new
//
// The floor is what the member acknowledged, or the newest sequence less 64, or what the bounds on memory
// pushed out, whichever is highest. Calls may come out of order inside the window (a unary call overtakes the
// stream): then the floor may pass a call while it is applied, as the results of parked verbs that it lets go
// are remembered too. Its answer is forgotten at once, and a repetition is refused.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_ANSWER_WINDOW_H_
#define KVPOOL_SERVER_SPACE_ANSWER_WINDOW_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "server/space/member_log.h"
#include "server/space/unacknowledged.h"

namespace kvpool {

class AnswerWindow {
 public:
  static constexpr uint64_t kAnswers = 64;
  // Results of parked operations of a stream that it keeps, beyond which a repetition has the others as completions: all may
  // be forgotten at once.
  static constexpr size_t kMostKept = 4096;
  enum class Seen { kNew, kRemembered, kForgotten };
  Seen Look(uint64_t sequence) const;
  void Acknowledge(uint64_t through);
  // Answers its serialised form, good until the next call, so that the wire needs no second one; empty if the
  // floor has passed it meanwhile. It is kept in `memory`, if that is not empty. REQUIRES: Look(sequence) was kNew before the
  // call was applied.
  std::string_view Remember(uint64_t sequence, const v1::StepResponse& answer, std::string memory = {});
  // A parked operation of a remembered answer was applied; ignored if it is forgotten. That of a stream counts, and is a
  // completion until a repetition takes it from there (Completions::Fold).
  void Complete(uint64_t sequence, uint32_t index, const v1::OperationResult& result, bool on_stream);
  void Keep(uint64_t sequence, uint32_t index, const v1::OperationResult& result);
  // The results of the first answer, with those of parked operations that are here in their places. What else the first
  // answer carried (notices, completions of other batches, free blocks) was of its time. Answers how many bytes those of parked
  // operations have. REQUIRES: Look(sequence) == kRemembered.
  size_t Replay(uint64_t sequence, v1::StepResponse* answer) const;
  // The session is over: nobody repeats what came before its end.
  void ForgetAll() { RaiseFloor(newest_); }

  // From now on what is here is in the log too, which outlives it.
  void KeepIn(MemberLog* log) { log_ = log; }
  // An answer that an earlier daemon gave, from the log; the floor comes first.
  void RecallFloor(uint64_t floor) { floor_ = newest_ = floor; }
  void Recall(uint64_t sequence, std::string answer);

  uint64_t floor() const { return floor_; }
  // The member has said that the answers through this one have arrived: the floor may be further on.
  uint64_t acknowledged() const { return acknowledged_; }
  // Results of parked operations that are here.
  size_t kept() const { return kept_; }

 private:
  struct Slot {
    uint64_t sequence = 0;
    std::string answer;
    std::vector<std::pair<uint32_t, v1::OperationResult>> completed;
    size_t bytes = 0;
  };
  void RaiseFloor(uint64_t floor);
  void Forget(Slot* slot);
  void Charge(Slot* slot, size_t bytes);

  uint64_t floor_ = 0;
  uint64_t newest_ = 0;
  uint64_t acknowledged_ = 0;
  size_t kept_ = 0;
  Unacknowledged bytes_;
  MemberLog* log_ = nullptr;                           // Null: nothing of it outlives the daemon.
  std::unique_ptr<std::array<Slot, kAnswers>> slots_;  // Made by the first answer.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_ANSWER_WINDOW_H_
