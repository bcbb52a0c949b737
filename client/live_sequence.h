// One sequence that an engine is generating, in one layer group: its blocks in order, and the keys that full ones may be
// shared under.
//
//   Append     blocks to write, and with Extend the tokens whose K and V are in them
//   Seal       full blocks that were not sealed yet, under the chain of their tokens
//   Prune, Compact    hold a budget; the table changes when they are finished
//
// What it is there for: keys that stay true. Once tokens have been dropped, later K and V saw what was kept and not the
// sequence, so from then on keys chain in policy, parameters and kept positions (PrefixHasher::BehindPruning): two
// sequences that were pruned alike share again, and no block is ever sealed under the key of its tokens alone. Full blocks
// that were not sealed by then stay private.
//
// Thread-compatible, on the session's thread; gone before the session.
#ifndef KVPOOL_CLIENT_LIVE_SEQUENCE_H_
#define KVPOOL_CLIENT_LIVE_SEQUENCE_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/blocks.h"
#include "client/prefix_hasher.h"
#include "client/session.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

struct LiveSequenceOptions {
  uint32_t group = 0;
  std::string_view salt;                // As for PrefixHasher.
  std::vector<std::string> extra_keys;  // Into every block's key.
};

class LiveSequence {
 public:
  // `session` outlives it.
  explicit LiveSequence(Session* session, LiveSequenceOptions options = {});
  // Waits a few seconds for a pruning that is not finished, to know what is left to give back; without an answer all of it
  // stays the session's until that ends.
  ~LiveSequence();
  LiveSequence(const LiveSequence&) = delete;
  LiveSequence& operator=(const LiveSequence&) = delete;

  // ---- Growing
  // Blocks behind the others, empty: leased ones. FAILED_PRECONDITION: a pruning is not finished.
  absl::Status Append(Blocks blocks);
  // Starts with blocks that a match found, full of these tokens. REQUIRES: it is empty, and tokens fill the blocks.
  absl::Status Adopt(Blocks matched, absl::Span<const uint32_t> tokens);
  // K and V of these tokens are in the blocks, or will be when step `after` of the calls below is done.
  // RESOURCE_EXHAUSTED: there are too few blocks, with the numbers.
  absl::Status Extend(absl::Span<const uint32_t> tokens);

  // ---- What it is
  absl::Span<const BlockRef> blocks() const { return blocks_.refs(); }
  uint32_t tokens() const { return tokens_; }  // Resident.
  uint32_t room() const { return static_cast<uint32_t>(blocks_.size()) * tokens_per_block_ - tokens_; }
  // Blocks that hold tokens, as verbs of score.proto take them.
  v1::Sequence ToProto() const;
  // FAILED_PRECONDITION: a prune or compact of it is not finished.
  absl::Status CheckSettled() const;
  // Keys of the full blocks since the start or the last pruning, for a match ahead of the tokens.
  const PrefixKey& last_key() const { return chain_; }

  // Gives its blocks back, saying what is expected of them: the conversation is over, the beam was pruned. It begins anew then.
  // FAILED_PRECONDITION: a pruning is not finished; INVALID_ARGUMENT: a hint that is none.
  absl::Status Release(const ReleaseHint& hint, uint64_t after = kCurrentStep);

  // ---- Sharing
  // Queues a seal of the full blocks that are new; no answer if there are none. It keeps its own where others have sealed
  // the same.
  absl::StatusOr<std::optional<PendingSeal>> Seal(uint64_t after = kCurrentStep);

  // ---- Holding a budget. `request.sequence` is filled in here, but for `fresh`. The table is the same until the answer has
  // been waited for; DEADLINE_EXCEEDED: ask Finish again. With dry_run nothing changes.
  absl::StatusOr<v1::PruneResult> Prune(v1::Prune request, Deadline deadline, uint64_t after = kCurrentStep);
  absl::StatusOr<v1::CompactResult> Compact(v1::Compact request, Deadline deadline,
                                            uint64_t after = kCurrentStep);
  absl::StatusOr<v1::ScoreResult> Score(v1::Score request, Deadline deadline, uint64_t after = kCurrentStep);
  // The same for those who wait elsewhere.
  absl::StatusOr<Pending<v1::ScoreResult>> StartScore(v1::Score request, uint64_t after = kCurrentStep);
  absl::StatusOr<v1::PruneResult> FinishPrune(Deadline deadline);
  absl::StatusOr<v1::CompactResult> FinishCompact(Deadline deadline);

 private:
  struct Unsealed {
    BlockRef block;
    PrefixKey key;
    PrefixKey parent;
    bool at_root = false;  // `parent` is no block's key.
  };
  // The table is now this one, with so many tokens.
  void Replace(const google::protobuf::RepeatedField<uint64_t>& table, uint32_t tokens,
               std::string_view digest);

  Session* const session_;
  const uint32_t group_;
  const std::vector<std::string> extra_keys_;
  const PrefixHasher hasher_;
  const uint32_t tokens_per_block_;
  Blocks blocks_;
  uint32_t tokens_ = 0;
  PrefixKey chain_;                    // Of the last full block, or what its successor has for a parent.
  bool at_root_ = true;                // chain_ is no block's key.
  std::vector<uint32_t> open_tokens_;  // In the block that is not full, since the last pruning.
  std::deque<Unsealed> unsealed_;      // Full blocks whose keys hold, in order.
  std::optional<Pending<v1::PruneResult>> pruning_;
  std::optional<Pending<v1::CompactResult>> compacting_;
  bool keeps_ = false;  // The pruning under way is a dry run, or leaves its sources.
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_LIVE_SEQUENCE_H_
