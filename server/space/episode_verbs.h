// PutEpisode and ChooseEpisode against the pool (server/space/episode_sets.h), part by part: the turn may pause in
// between. The other calls of the session wait meanwhile, so its episodes stay as they are unless it ends.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_
#define KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvpool/v1/score.pb.h"
#include "proto/support/block_ref.h"
#include "server/space/answer_room.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/turn.h"
#include "server/space/verbs.h"

namespace kvpool {

class EpisodeVerbs {
 public:
  EpisodeVerbs(SpaceState* state, BlockVerbs* verbs) : state_(*state), verbs_(*verbs) {}

  // REQUIRES: the request is valid (server/wire/validate_score.h), and the session has not ended. ABORTED: it ended
  // meanwhile.
  absl::Status Put(Turn& turn, Session* session, const v1::PutEpisode& request, v1::PutEpisodeResult* result);
  absl::Status Choose(Turn& turn, Session* session, const v1::ChooseEpisode& request, AnswerRoom* room,
                      v1::ChooseEpisodeResult* result);

 private:
  using Blocks = absl::Span<const BlockRef>;
  // Is one of them in use by a device operation?
  static absl::StatusOr<bool> AnyInUse(Turn& turn, const Session& session, Blocks blocks);
  absl::Status CheckHeld(Turn& turn, const Session& session, const v1::Sequence& sequence) const;
  // Takes one more hold on each of them, or on none.
  absl::Status Hold(Turn& turn, const Session& session, Blocks blocks);
  // Takes one hold off each of them, the tail first, and counts those.
  absl::StatusOr<uint32_t> GiveBack(Turn& turn, const Session& session, Blocks blocks);

  SpaceState& state_;
  BlockVerbs& verbs_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_
