// Answers that are on their way from the daemon, and what match, seal and episode answers hold.
#ifndef KVPOOL_CLIENT_PENDING_H_
#define KVPOOL_CLIENT_PENDING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/blocks.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

struct AnswerState;

using Deadline = std::chrono::steady_clock::time_point;

// The holds that a match took. Those that are not moved out are given back.
struct MatchHit {
  uint64_t tokens = 0;         // Length of the common prefix.
  std::vector<Blocks> groups;  // Parallel to the groups asked for.
  v1::MissReason miss = v1::MISS_REASON_NONE;
  uint64_t below_tokens = 0;  // So many more are in a tier: see v1::MatchResult.
  uint32_t below_ms = 0;      // When they could be here; 0: not known.
  bool may_be_below = false;  // More may be there. A match that waits asks.
};

// What became of sealed blocks.
struct SealOutcome {
  // Parallel to the blocks. For each block one of:
  //   its own ref   it is sealed
  //   another ref   its key existed, and `duplicates` holds that block; the caller's own stays leased and private
  //   null          it was refused, or it is a duplicate and leave_duplicates was set
  std::vector<BlockRef> canonical;
  Blocks duplicates;
  std::vector<v1::Refusal> refused;
};

// The episode that was chosen, and the caller's holds on its blocks.
struct EpisodeTable {
  uint32_t group = 0;
  Blocks blocks;
  uint32_t last_block_tokens = 0;  // 0: it is full.
};
struct EpisodeHit {
  std::string name;
  float similarity = 0;
  std::vector<EpisodeTable> tables;
};

// All that was queued before is answered.
struct Flushed {};

// One answer. Move-only; may be dropped at any time, and then the holds that it brings are given back.
template <typename Answer>
class Pending {
 public:
  explicit Pending(std::shared_ptr<AnswerState> state) : state_(std::move(state)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&& other) noexcept {
    Abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  ~Pending() { Abandon(); }

  bool Ready() const;
  // Takes the answer, once. DEADLINE_EXCEEDED: it may be waited for again. Other errors are the daemon's, or
  // the session's end.
  absl::StatusOr<Answer> Wait(Deadline deadline);

 private:
  void Abandon();
  std::shared_ptr<AnswerState> state_;  // Null once taken.
};
using PendingMatch = Pending<MatchHit>;
using PendingSeal = Pending<SealOutcome>;
using PendingFlush = Pending<Flushed>;

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_PENDING_H_
