// Batches of verbs: exactly once, in order, parked where they have to wait. One handler for Step and
// for unary calls.
//
//   a verb                                   what becomes of it
//   of a sequence seen before                the first answer again, completions folded in; nothing is applied
//   of a session that has ended              ABORTED with the reason
//   with an `after` that is not passed, or   parked: it changes nothing now, and is applied by the fence that
//   behind a parked verb                     lets it through; a release that is beyond the limit on parked
//                                            verbs is answered now and applied then (late_releases.h)
//   a device operation that lacks blocks     parked as long as the space can grow by them
//   another device operation                 started, and parked until it is over (scoring/device_operation.h)
//   any other                                applied
//
// Not thread-safe: the space's mutex is around it. A batch that names many blocks pauses its turn now and then, so
// that other sessions get in. The calls of its own session wait until it is applied: so a repetition can't overtake
// the first application. Device operations of the session end meanwhile, but none is prepared: so what was looked at
// before a pause (whether one holds up a block) holds after it, unless the session has ended.
#ifndef KVPOOL_SERVER_SPACE_BATCH_H_
#define KVPOOL_SERVER_SPACE_BATCH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvpool/v1/engine.pb.h"
#include "server/space/answer_room.h"
#include "server/space/device_verbs.h"
#include "server/space/episode_verbs.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/turn.h"
#include "server/space/verbs.h"

namespace kvpool {

class Batches {
 public:
  Batches(SpaceState* state, BlockVerbs* verbs, DeviceVerbs* device_verbs)
      : state_(*state), verbs_(*verbs), device_verbs_(*device_verbs), episodes_(state, verbs) {}

  // The answer in serialised form too, where there is one already: it is good until the member's next call.
  // `response` is empty, but it may have the results of an earlier batch: they are written over, in their memory.
  // `stream` is the caller's; null: it has none, and delivers what it is answered.
  std::string_view Apply(Turn& turn, Member* member, const v1::StepRequest& request,
                         v1::StepResponse* response, const StreamListener* stream);
  // `done` gets the answer at the end of the turn, or stays with the parked verb.
  void ApplyUnary(Turn& turn, Member* member, const v1::Call& call, v1::Operation operation, Waiter done);
  // A device operation is done with: it is answered, and what waited behind it goes on.
  void OnOperationDone(Turn& turn, DeviceOperation* operation);
  // Of an earlier daemon's session: what is parked and waits for no step goes on once it is ready.
  void GoOnWhenReady(const std::shared_ptr<Session>& session);
  // It enters, and stands behind others. ABORTED: the session ended meanwhile, and with it all its gates.
  static absl::Status StandLast(Turn& turn, ParkedVerb* verb);
  // Verbs that lack blocks are looked at again, as there may be some now, or none to come: each goes on,
  // waits again or is refused. Late releases go on.
  void RetryLackingBlocks(Turn& turn);
  // A promotion of this session is over: the match that waited for it is answered.
  void AnswerWaiting(Turn& turn, uint64_t session);
  // Moves what is pending for the member's stream into the response; if that is large, a part of it, and the
  // caller asks again. False: there is nothing, or another one has replaced `stream` (null: whoever asks).
  bool TakePending(uint64_t now, Member* member, const StreamListener* stream, v1::StepResponse* response);

 private:
  using Blocks = absl::Span<const uint32_t>;
  // Where an operation stands.
  struct Place {
    uint64_t sequence = 0;
    uint32_t index = 0;
    // A unary call's, taken if the operation is parked. Null: the operation is on the stream.
    Waiter* waiter = nullptr;
    AnswerRoom* room = nullptr;  // The answer's that its result is in.
  };
  void ApplyOne(Turn& turn, Member* member, const v1::Operation& operation, const Place& place,
                v1::OperationResult* result);
  // Whether it is within the contract. The turn may pause.
  absl::Status Validate(Turn& turn, const v1::Operation& operation) const;
  // What its matches would find and is doubted is compared (ContentChecks). That takes a while, with the mutex free, so it is before
  // anything is done or written down: a session whose daemon dies meanwhile goes on. A match that is parked finds what is believed
  // by the time that it is applied.
  void CompareFirst(Turn& turn, const Session& session, absl::Span<const v1::Operation* const> operations);
  // Parks a match that may wait for what is below the pool. False: there is nothing to wait for.
  bool WaitForBelow(Turn& turn, Member* member, const v1::Operation& operation, const Place& place);
  // Answers through this sequence have arrived: what was remembered for them goes, as do holds that waited for it.
  void Acknowledge(Turn& turn, Member* member, uint64_t through);
  void ReleaseHeard(Turn& turn, Member* member);
  // Waits as long as a batch of the session is being applied.
  static void AwaitOthers(Turn& turn, const Session& session);
  // What is under way has changed: on it depends whether the session could go on in another daemon, and how much a fence
  // lets go.
  void Settle(Session* session) const;
  // What was put off while a batch was applied, and what follows from it.
  void EndApplying(Turn& turn, Session* session);
  // Counts what was refused.
  void Count(v1::Operation::VerbCase verb, const v1::OperationResult& result);
  // Adds what is pending to the answer to a batch, if that stream is still the member's. What does not fit wakes
  // it. `sequence`: the batch whose acknowledgement confirms it; 0: none.
  void AddPending(uint64_t now, Member* member, const StreamListener* stream, uint64_t sequence,
                  v1::StepResponse* response);
  // Applies a verb that was parked and may go now.
  void Resume(Turn& turn, ParkedVerb verb);
  // What is behind others or lacks blocks is looked at again.
  void Readmit(Turn& turn, Session* session);
  // Gives back a part of the late releases whose step is passed.
  void ReleaseLate(Turn& turn, Session* session);
  // Starts a device operation, or parks it if it lacks blocks that the space can grow by. Either way the verb
  // is parked then, with `waiter` unless that is null: both are moved from. After an error they are not, and what `verb` has
  // for a gate is to be left.
  absl::Status StartOnDevice(Turn& turn, ParkedVerb* verb, Waiter* waiter);
  // It leaves all gates at which it stands.
  static void Leave(Turn& turn, Session* session, BlockGates::Id gate);
  // What it waits for. The turn may pause meanwhile; other batches of the session wait for this one, so that no step
  // passes, and what an operation that ends lets go is admitted when the batch is over. ABORTED: the session ended.
  absl::StatusOr<ParkedVerbs::Wait> WaitOf(Turn& turn, Session* session, const v1::Operation& operation);
  // Visits the blocks that the operation names, part by part: see InParts.
  static absl::Status ForBlocks(Turn& turn, const v1::Operation& operation, const Session* session,
                                absl::FunctionRef<void(Blocks part)> visit);
  // A release that there is no room to park.
  void ParkLate(Turn& turn, Session* session, const v1::Release& release, uint64_t due,
                v1::OperationResult* result);
  // What can't be applied now: parked until its step, behind another verb, or on the device.
  absl::Status ParkOrStart(Turn& turn, Member* member, const v1::Operation& operation, const Place& place,
                           const ParkedVerbs::Wait& wait);
  // RESOURCE_EXHAUSTED: the session has too much parked to park this as well.
  absl::Status CheckRoom(const Member& member, const v1::Operation& operation, uint64_t due) const;
  // RESOURCE_EXHAUSTED: the member has not acknowledged too many bytes of completions.
  absl::Status CheckCompletionRoom(const std::string& what, const Member& member) const;
  // RESOURCE_EXHAUSTED: the parked verbs of the session, or of all, take too much memory.
  absl::Status CheckBytes(const std::string& what, const Member& member,
                          const v1::Operation& operation) const;
  absl::Status CheckDeviceRoom(const Member& member, const v1::Operation& operation) const;
  void ApplyVerb(Turn& turn, Member* member, const v1::Operation& operation, AnswerRoom* room,
                 v1::OperationResult* result);
  // Part by part; the turn may pause in between, and the session may have ended when it goes on.
  void ApplyToBlocks(Turn& turn, Session* session, const v1::Operation& operation,
                     v1::OperationResult* result);
  void Fence(Turn& turn, Member* member, const v1::Fence& fence, v1::OperationResult* result);
  void CloseSession(Turn& turn, Member* member, v1::CloseSessionResult* result);
  void SetFreeBlocks(const Session& session, v1::StepResponse* response) const;
  // The first answer again, with what has become of its parked verbs meanwhile.
  static void Replay(Member* member, uint64_t sequence, v1::StepResponse* response);
  void RepeatUnary(Turn& turn, Member* member, uint64_t sequence, Waiter done);

  SpaceState& state_;
  BlockVerbs& verbs_;
  DeviceVerbs& device_verbs_;
  EpisodeVerbs episodes_;
  // By id, the sessions that RetryLackingBlocks has to look at: they came to lack blocks, or late releases were
  // left. It runs at every acknowledgement of a slab, which must not cost each session of the space.
  std::map<uint64_t, std::weak_ptr<Session>> lacking_;
  // By id, the sessions with matches that wait.
  std::map<uint64_t, std::weak_ptr<Session>> waiting_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BATCH_H_
