// Batches of verbs: exactly once, in order, parked where they have to wait. One handler for Step and for unary
// calls.
//
//   sequence seen before     the first answer again, completions folded in; nothing is applied
//   session ended            ABORTED with the reason
//   `after` not passed, or
//   behind a parked verb     parked: changes nothing now, is applied by the fence that lets it through
//   a device operation       started, and parked until it is over (server/scoring/device_operation.h); before that parked
//                            as long as it needs blocks that are free in no slab so far, and there can be another
//   else                     applied
//
// Not thread-safe: the space's mutex is around it, so a repetition can't overtake the first application.
#ifndef KVPOOL_SERVER_SPACE_BATCH_H_
#define KVPOOL_SERVER_SPACE_BATCH_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"
#include "server/space/deferred.h"
#include "server/space/device_verbs.h"
#include "server/space/episode_verbs.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/verbs.h"

namespace kvpool {

class Batches {
 public:
  Batches(SpaceState* state, BlockVerbs* verbs, DeviceVerbs* device_verbs)
      : state_(*state), verbs_(*verbs), device_verbs_(*device_verbs), episodes_(state, verbs) {}

  // The answer in serialised form too, where there is one already: until the member's next call.
  std::string_view Apply(Member* member, const v1::StepRequest& request, uint64_t now,
                         v1::StepResponse* response, Deferred* deferred);
  // The answer goes to `done` through `deferred`, or stays with the parked verb.
  void ApplyUnary(Member* member, const v1::Call& call, v1::Operation operation, Waiter done, uint64_t now,
                  Deferred* deferred);
  // A device operation is over: it is answered, and what waited behind it goes on.
  void OnOver(DeviceOperation* operation, uint64_t now, Deferred* deferred);
  // There may be blocks for what waits for some, or none to come: it goes on, waits again or is refused.
  void ResumeShort(uint64_t now, Deferred* deferred);
  // Moves what is pending for the member's stream into the response: not all of it, if that is large.
  bool TakePending(Member* member, v1::StepResponse* response);

 private:
  struct Place {  // Where an operation stands.
    uint64_t sequence = 0;
    uint32_t index = 0;
    Waiter* waiter =
        nullptr;  // Of a unary call: taken if the operation is parked. Null: it is on the stream.
  };
  void ApplyOne(Member* member, const v1::Operation& operation, const Place& place, uint64_t now,
                v1::OperationResult* result, Deferred* deferred);
  // Applies a verb that was parked and may go now.
  void Resume(ParkedVerb verb, uint64_t now, Deferred* deferred);
  // What is behind others or lacks blocks is looked at again.
  void Readmit(Session* session, uint64_t now, Deferred* deferred);
  // Starts a device operation, as which the verb is parked then, with `waiter` unless that is null: both are moved from.
  // What lacks blocks that the space can grow by is parked as it is.
  // After an error they are not.
  absl::Status StartOnDevice(ParkedVerb* verb, Waiter* waiter, uint64_t now);
  // What can't be applied now: parked until step `due`, behind another verb, or on the device.
  absl::Status ParkOrStart(Member* member, const v1::Operation& operation, const Place& place, uint64_t due,
                           bool held_up, uint64_t now);
  // RESOURCE_EXHAUSTED: the session has too much parked to park this as well.
  absl::Status CheckRoom(const Member& member, const v1::Operation& operation, uint64_t due) const;
  absl::Status CheckDeviceRoom(const Member& member, const v1::Operation& operation) const;
  void ApplyVerb(Member* member, const v1::Operation& operation, uint64_t now, v1::OperationResult* result,
                 Deferred* deferred);
  void Fence(Member* member, const v1::Fence& fence, uint64_t now, v1::OperationResult* result,
             Deferred* deferred);
  void CloseSession(Member* member, uint64_t now, v1::CloseSessionResult* result, Deferred* deferred);
  void SetFreeBlocks(const Session& session, v1::StepResponse* response) const;
  void RepeatUnary(Member* member, uint64_t sequence, Waiter done, Deferred* deferred);

  SpaceState& state_;
  BlockVerbs& verbs_;
  DeviceVerbs& device_verbs_;
  EpisodeVerbs episodes_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BATCH_H_
