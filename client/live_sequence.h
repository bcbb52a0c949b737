// LiveSequence follows one sequence that an engine generates, in one layer group of the model: its block
// table, and the keys under which full blocks may be shared.
//
//   Append            adds blocks to write; Extend says which tokens have their K and V in them
//   Seal              seals full blocks that were not sealed yet, under the chain of their tokens
//   Prune, Compact    hold a budget; the table changes when they are finished. Either is a *pruning* below
//
// The class makes sure that a key is only given to a block whose content it names. After a pruning, later K
// and V saw only the tokens that were kept, so from then on a block's key also depends on the policy, its
// parameters and the positions that were kept (PrefixHasher::BehindPruning): two sequences that were pruned
// alike share again, and no block written after a pruning is sealed under the key of its tokens alone. Full
// blocks that were not sealed by then stay private. A salt that counts from a later token on counts from the
// first pruning on at the latest.
//
// A compaction with HEADS_ADA or HEADS_GIVEN leaves *padding* behind the tokens of some heads. The class tells the next one of it, and refuses
// with FAILED_PRECONDITION what would take padding for tokens: Prune, Score, and a Compact with equal heads.
//
// Thread-compatible: the thread that uses the session at the time uses it. Destroy it before the session.
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
  uint64_t salt_from = 0;               // The position that the salt counts from; 0: it is in every key.
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

  // While a pruning is not finished, every call but Finish… and the properties answers FAILED_PRECONDITION.
  // ---- Growing
  // Adds leased, empty blocks behind the others.
  absl::Status Append(Blocks blocks);
  // Starts the sequence with the blocks of a match, whose holds it takes. FAILED_PRECONDITION: it is not empty,
  // or the tokens do not fill the blocks exactly.
  absl::Status Adopt(Blocks matched, absl::Span<const uint32_t> tokens);
  // Says that K and V of these tokens are in the blocks, or will be when the step is done that the next Seal,
  // Prune or the like is given as `after`. RESOURCE_EXHAUSTED: more tokens than room(); the error has both
  // numbers.
  absl::Status Extend(absl::Span<const uint32_t> tokens);

  // ---- Properties
  absl::Span<const BlockRef> blocks() const { return blocks_.refs(); }
  // Tokens whose K and V are in blocks(); those dropped do not count.
  uint32_t tokens() const { return tokens_; }
  // Tokens that still fit.
  uint32_t room() const { return static_cast<uint32_t>(blocks_.size()) * tokens_per_block_ - tokens_; }
  // How many of the first padded_tokens() tokens each plane has, [layers][kv heads of all ranks]; the rest of them is padding.
  // Empty: there is none.
  absl::Span<const uint32_t> head_counts() const { return counts_; }
  uint32_t padded_tokens() const { return counted_tokens_; }
  // FAILED_PRECONDITION: it has padding.
  absl::Status CheckUnpadded() const;
  // The blocks that hold tokens, for verbs of score.proto.
  v1::Sequence ToProto() const;
  // FAILED_PRECONDITION: a prune or compact of it is not finished.
  absl::Status CheckSettled() const;
  // The parent key of the block that is being filled. Right after a pruning it is no block's key, but stands for
  // all before it.
  const PrefixKey& last_key() const { return chain_; }

  // Gives all blocks back, with what the caller expects of them: the conversation is over, a beam was given
  // up. Then the sequence is empty and may begin again. INVALID_ARGUMENT: the hint breaks a limit of
  // ReleaseHint, and nothing was released.
  absl::Status Release(const ReleaseHint& hint, uint64_t after = kCurrentStep);

  // ---- Sharing
  // Queues a seal of the full blocks that were not sealed yet, the first 16,384 of them: the next call goes on. Answers nullopt if
  // there are none. Where a key has a block already, the sequence keeps its own.
  absl::StatusOr<std::optional<PendingSeal>> Seal(uint64_t after = kCurrentStep);

  // ---- Holding a budget. All of `request.sequence` but `fresh` is filled in here, and so are `counts` and `counted_tokens` of
  // `request.ada`. The table stays the same until
  // the answer was waited for. DEADLINE_EXCEEDED of Prune or Compact: call FinishPrune or FinishCompact to wait
  // again; the answer of a Score that runs out of time is lost, and StartScore is for those who need it. The
  // table also stays with Prune.dry_run and Compact.keep_sources.
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
  // Takes over a finished pruning's table and tokens, and its digest, from which keys go on.
  void Replace(const google::protobuf::RepeatedField<uint64_t>& table, uint32_t tokens,
               std::string_view digest);

  Session* const session_;
  const uint32_t group_;
  const std::vector<std::string> extra_keys_;
  const PrefixHasher hasher_;
  const uint32_t tokens_per_block_;
  Blocks blocks_;
  uint32_t tokens_ = 0;
  PrefixKey chain_;       // The next full block's parent: a block's key, or one that stands for it.
  bool at_root_ = true;   // chain_ is no block's key.
  uint64_t chained_ = 0;  // Tokens that chain_ stands for, dropped ones too: the position of open_tokens_.
  std::vector<uint32_t> open_tokens_;  // Tokens in the block that is not full, since the last pruning.
  std::vector<uint32_t> counts_;       // What head_counts() gives.
  uint32_t counted_tokens_ = 0;        // What padded_tokens() gives.
  std::deque<Unsealed> unsealed_;      // Full blocks not sealed yet, in order; none after a pruning.
  std::optional<Pending<v1::PruneResult>> pruning_;
  std::optional<Pending<v1::CompactResult>> compacting_;
  bool keeps_ = false;  // The pruning under way leaves the table as it is.
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_LIVE_SEQUENCE_H_
