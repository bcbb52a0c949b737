// PutEpisode and ChooseEpisode against the pool (server/space/episode_sets.h).
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_
#define KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvpool/v1/score.pb.h"
#include "proto/support/block_ref.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/verbs.h"

namespace kvpool {

class EpisodeVerbs {
 public:
  EpisodeVerbs(SpaceState* state, BlockVerbs* verbs) : state_(*state), verbs_(*verbs) {}

  // REQUIRES: the request is valid (server/wire/validate_score.h), and the session has not ended.
  absl::Status Put(Session* session, const v1::PutEpisode& request, uint64_t now,
                   v1::PutEpisodeResult* result);
  absl::Status Choose(Session* session, const v1::ChooseEpisode& request, uint64_t now,
                      v1::ChooseEpisodeResult* result);

 private:
  absl::Status CheckHeld(const Session& session, const v1::Sequence& sequence) const;
  // Takes one more hold on each of them, or on none.
  absl::Status Hold(const Session& session, absl::Span<const BlockRef> blocks, uint64_t now);

  SpaceState& state_;
  BlockVerbs& verbs_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_EPISODE_VERBS_H_
