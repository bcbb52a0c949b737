// One sequence that an engine is generating, in one layer group: its blocks in order, and the keys under
// which full blocks may be shared.
//
//   Append            adds blocks to write; Extend tells the tokens whose K and V are in them
//   Seal              seals full blocks that were not sealed yet, under the chain of their tokens
//   Prune, Compact    hold a budget; the table changes when they are finished
//
// The class exists to keep keys true. Once tokens have been dropped, later K and V saw only the tokens that
// were kept, so from then on keys chain in policy, parameters and kept positions
// (PrefixHasher::BehindPruning): two sequences that were pruned alike share again, and no block is ever
// sealed under the key of its tokens alone. Full blocks that were not sealed by then stay private.
//
// Thread-compatible, on the session's thread; it must be gone before the session.
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
  std::string_view salt;                // PrefixHasher's.
  std::vector<std::string> extra_keys;  // They go into every block's key.
};

class LiveSequence {
 public:
  // `session` outlives it.
  explicit LiveSequence(Session* session, LiveSequenceOptions options = {});
  // Waits a few seconds for a pruning that is not finished, to know what is left to give back. Without an
  // answer the session keeps all blocks until it ends.
  ~LiveSequence();
  LiveSequence(const LiveSequence&) = delete;
  LiveSequence& operator=(const LiveSequence&) = delete;

  // ---- Growing
  // Adds leased, empty blocks behind the others. FAILED_PRECONDITION: a pruning is not finished.
  absl::Status Append(Blocks blocks);
  // Starts the sequence with blocks that a match found. REQUIRES: it is empty, and the
  // tokens fill the blocks.
  absl::Status Adopt(Blocks matched, absl::Span<const uint32_t> tokens);
  // Says that K and V of these tokens are in the blocks, or will be when step `after` of the calls below is
  // done. RESOURCE_EXHAUSTED: there are too few blocks, with the numbers.
  absl::Status Extend(absl::Span<const uint32_t> tokens);

  // ---- Properties
  absl::Span<const BlockRef> blocks() const { return blocks_.refs(); }
  uint32_t tokens() const { return tokens_; }  // Resident tokens.
  uint32_t room() const { return static_cast<uint32_t>(blocks_.size()) * tokens_per_block_ - tokens_; }
  // The blocks that hold tokens, for verbs of score.proto.
  v1::Sequence ToProto() const;
  // FAILED_PRECONDITION: a prune or compact of it is not finished.
  absl::Status CheckSettled() const;
  // The end of the key chain: a match ahead of the tokens goes on from it.
  const PrefixKey& last_key() const { return chain_; }

  // Gives all blocks back, with what the caller expects of them: the conversation is over, the beam was
  // pruned. The sequence is empty then. FAILED_PRECONDITION: a pruning is not finished; INVALID_ARGUMENT: the
  // hint breaks a limit.
  absl::Status Release(const ReleaseHint& hint, uint64_t after = kCurrentStep);

  // ---- Sharing
  // Queues a seal of the full blocks that are new; nothing if there are none. Where others have sealed the same
  // content, the sequence keeps its own block.
  absl::StatusOr<std::optional<PendingSeal>> Seal(uint64_t after = kCurrentStep);

  // ---- Holding a budget. All of `request.sequence` but `fresh` is filled in here. The table stays the same until
  // the answer was waited for; DEADLINE_EXCEEDED: call Finish… to wait again. With dry_run nothing changes.
  absl::StatusOr<v1::PruneResult> Prune(v1::Prune request, Deadline deadline, uint64_t after = kCurrentStep);
  absl::StatusOr<v1::CompactResult> Compact(v1::Compact request, Deadline deadline,
                                            uint64_t after = kCurrentStep);
  absl::StatusOr<v1::ScoreResult> Score(v1::Score request, Deadline deadline, uint64_t after = kCurrentStep);
  // The same for a caller that waits later.
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
  // Makes `table` the sequence's, with so many tokens.
  void Replace(const google::protobuf::RepeatedField<uint64_t>& table, uint32_t tokens,
               std::string_view digest);

  Session* const session_;
  const uint32_t group_;
  const std::vector<std::string> extra_keys_;
  const PrefixHasher hasher_;
  const uint32_t tokens_per_block_;
  Blocks blocks_;
  uint32_t tokens_ = 0;
  PrefixKey chain_;      // The next full block's parent: a block's key, or one that stands for it.
  bool at_root_ = true;  // chain_ is no block's key.
  std::vector<uint32_t> open_tokens_;  // Tokens in the block that is not full, since the last pruning.
  std::deque<Unsealed> unsealed_;      // Full blocks whose keys hold, in order.
  std::optional<Pending<v1::PruneResult>> pruning_;
  std::optional<Pending<v1::CompactResult>> compacting_;
  bool keeps_ = false;  // The pruning under way is a dry run, or leaves its sources.
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_LIVE_SEQUENCE_H_
