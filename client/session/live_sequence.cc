#include "client/live_sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

constexpr std::chrono::seconds kFinishTimeout{5};
// The most that Session::Seal takes: half a batch of names, which are a block and its key.
constexpr size_t kSealedAtOnce = kMaxNames / 4;

std::vector<BlockRef> Unpack(const google::protobuf::RepeatedField<uint64_t>& refs) {
  std::vector<BlockRef> blocks;
  blocks.reserve(refs.size());
  for (const uint64_t ref : refs) blocks.push_back(BlockRef::Unpack(ref));
  return blocks;
}

// Fills in the request's sequence; `fresh` stays what the caller set.
template <typename Request>
void SetSequence(v1::Sequence sequence, Request* request) {
  sequence.set_fresh(request->sequence().fresh());
  *request->mutable_sequence() = std::move(sequence);
}

}  // namespace

LiveSequence::LiveSequence(Session* session, LiveSequenceOptions options)
    : session_(session),
      group_(options.group),
      extra_keys_(std::move(options.extra_keys)),
      hasher_(session->hash_seed(), options.salt, options.salt_from),
      tokens_per_block_(session->layout().groups(static_cast<int>(options.group)).tokens_per_block()),
      blocks_(session, 0u),
      chain_(hasher_.root()) {}

LiveSequence::~LiveSequence() {
  const Deadline deadline = std::chrono::steady_clock::now() + kFinishTimeout;
  if (pruning_.has_value()) FinishPrune(deadline).status().IgnoreError();
  if (compacting_.has_value()) FinishCompact(deadline).status().IgnoreError();
  // A block that the daemon has released for this sequence must not be released once more: another sequence
  // of the session may hold it too.
  if (!CheckSettled().ok()) blocks_.Detach();
}

absl::Status LiveSequence::CheckSettled() const {
  if (!pruning_.has_value() && !compacting_.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError("a prune or compact of this sequence is not finished");
}

absl::Status LiveSequence::CheckUnpadded() const {
  if (counts_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("heads of this sequence keep different numbers of its first ", counted_tokens_,
                   " tokens: only a compact with heads that share a budget knows what is padding"));
}

absl::Status LiveSequence::Append(Blocks blocks) {
  RETURN_IF_ERROR(CheckSettled());
  blocks_.Append(std::move(blocks));
  return absl::OkStatus();
}

absl::Status LiveSequence::Adopt(Blocks matched, absl::Span<const uint32_t> tokens) {
  if (!blocks_.empty() || tokens.size() != matched.size() * tokens_per_block_) {
    return absl::FailedPreconditionError(absl::StrCat(tokens.size(), " tokens do not fill the ",
                                                      matched.size(),
                                                      " blocks of a match, or the sequence has begun"));
  }
  RETURN_IF_ERROR(Append(std::move(matched)));
  RETURN_IF_ERROR(Extend(tokens));
  unsealed_.clear();  // They are sealed: that is how they were found.
  return absl::OkStatus();
}

absl::Status LiveSequence::Extend(absl::Span<const uint32_t> tokens) {
  RETURN_IF_ERROR(CheckSettled());
  if (tokens.size() > room()) {
    return absl::ResourceExhaustedError(absl::StrCat(tokens.size(), " tokens more, but the ", blocks_.size(),
                                                     " blocks have room for ", room()));
  }
  const std::vector<std::string_view> extra_keys(extra_keys_.begin(), extra_keys_.end());
  for (const uint32_t token : tokens) {
    open_tokens_.push_back(token);
    if (++tokens_ % tokens_per_block_ != 0) continue;
    Unsealed full{.block = blocks_[tokens_ / tokens_per_block_ - 1],
                  .key = hasher_.NextAt(chain_, chained_, open_tokens_, extra_keys),
                  .parent = chain_,
                  .at_root = at_root_};
    chain_ = full.key;
    chained_ += open_tokens_.size();
    at_root_ = false;
    open_tokens_.clear();
    unsealed_.push_back(full);
  }
  return absl::OkStatus();
}

absl::Status LiveSequence::Release(const ReleaseHint& hint, uint64_t after) {
  RETURN_IF_ERROR(CheckSettled());
  RETURN_IF_ERROR(session_->ReleaseWithHint(blocks_.refs(), hint, after));
  blocks_.Detach();
  tokens_ = counted_tokens_ = 0;
  counts_.clear();
  chain_ = hasher_.root();
  chained_ = 0;
  at_root_ = true;
  open_tokens_.clear();
  unsealed_.clear();
  return absl::OkStatus();
}

v1::Sequence LiveSequence::ToProto() const {
  v1::Sequence sequence;
  sequence.set_group(group_);
  const uint32_t used = (tokens_ + tokens_per_block_ - 1) / tokens_per_block_;
  for (uint32_t i = 0; i < used; ++i) sequence.add_blocks(blocks_[i].Pack());
  sequence.set_last_block_tokens(tokens_ % tokens_per_block_);
  return sequence;
}

absl::StatusOr<std::optional<PendingSeal>> LiveSequence::Seal(uint64_t after) {
  RETURN_IF_ERROR(CheckSettled());
  if (unsealed_.empty()) return std::nullopt;
  const auto end = unsealed_.begin() + static_cast<ptrdiff_t>(std::min(unsealed_.size(), kSealedAtOnce));
  std::vector<BlockRef> blocks;
  std::vector<PrefixKey> keys;
  for (auto full = unsealed_.begin(); full != end; ++full) {
    blocks.push_back(full->block);
    keys.push_back(full->key);
  }
  const Unsealed& first = unsealed_.front();
  ASSIGN_OR_RETURN(
      PendingSeal pending,
      session_->Seal({.group = group_,
                      .blocks = blocks,
                      .keys = KeyBytes(keys),
                      .parent_key = first.at_root ? std::string_view() : KeyBytes({&first.parent, 1}),
                      .leave_duplicates = true,
                      .after = after}));
  unsealed_.erase(unsealed_.begin(), end);
  return pending;
}

absl::StatusOr<Pending<v1::ScoreResult>> LiveSequence::StartScore(v1::Score request, uint64_t after) {
  RETURN_IF_ERROR(CheckSettled());
  RETURN_IF_ERROR(CheckUnpadded());
  SetSequence(ToProto(), &request);
  return session_->Score(request, after);
}

absl::StatusOr<v1::ScoreResult> LiveSequence::Score(v1::Score request, Deadline deadline, uint64_t after) {
  ASSIGN_OR_RETURN(Pending<v1::ScoreResult> pending, StartScore(std::move(request), after));
  return pending.Wait(deadline);
}

absl::StatusOr<v1::PruneResult> LiveSequence::Prune(v1::Prune request, Deadline deadline, uint64_t after) {
  RETURN_IF_ERROR(CheckSettled());
  RETURN_IF_ERROR(CheckUnpadded());
  SetSequence(ToProto(), &request);
  keeps_ = request.dry_run();
  ASSIGN_OR_RETURN(pruning_, session_->Prune(request, after));
  return FinishPrune(deadline);
}

absl::StatusOr<v1::CompactResult> LiveSequence::Compact(v1::Compact request, Deadline deadline,
                                                        uint64_t after) {
  RETURN_IF_ERROR(CheckSettled());
  if (request.heads() != v1::HEADS_ADA && request.heads() != v1::HEADS_GIVEN) {
    RETURN_IF_ERROR(CheckUnpadded());
  } else {
    // Also where there are none: the caller's would be another sequence's.
    request.mutable_ada()->mutable_counts()->Assign(counts_.begin(), counts_.end());
    request.mutable_ada()->set_counted_tokens(counted_tokens_);
  }
  SetSequence(ToProto(), &request);
  keeps_ = request.keep_sources();
  ASSIGN_OR_RETURN(compacting_, session_->Compact(request, after));
  return FinishCompact(deadline);
}

absl::StatusOr<v1::PruneResult> LiveSequence::FinishPrune(Deadline deadline) {
  if (!pruning_.has_value()) return absl::FailedPreconditionError("no prune of this sequence is under way");
  absl::StatusOr<v1::PruneResult> result = pruning_->Wait(deadline);
  if (absl::IsDeadlineExceeded(result.status())) return result;
  pruning_.reset();
  if (result.ok() && !keeps_ && result->victims_size() > 0) {
    Replace(result->table(), result->kept_tokens(), result->kept_digest());
  }
  return result;
}

absl::StatusOr<v1::CompactResult> LiveSequence::FinishCompact(Deadline deadline) {
  if (!compacting_.has_value())
    return absl::FailedPreconditionError("no compact of this sequence is under way");
  absl::StatusOr<v1::CompactResult> result = compacting_->Wait(deadline);
  if (absl::IsDeadlineExceeded(result.status())) return result;
  compacting_.reset();
  if (result.ok() && !keeps_ && !result->kept_digest().empty()) {
    const uint32_t full = static_cast<uint32_t>(result->table_size()) - 1;
    Replace(result->table(), full * tokens_per_block_ + result->last_block_tokens(), result->kept_digest());
    const auto& counts = result->counts();
    const bool pads =
        std::any_of(counts.begin(), counts.end(), [&](uint32_t count) { return count < tokens_; });
    counts_.clear();
    if (pads) counts_.assign(counts.begin(), counts.end());
    counted_tokens_ = pads ? tokens_ : 0;
  }
  return result;
}

void LiveSequence::Replace(const google::protobuf::RepeatedField<uint64_t>& table, uint32_t tokens,
                           std::string_view digest) {
  // Blocks behind the last token took no part in the pruning.
  const uint32_t used = (tokens_ + tokens_per_block_ - 1) / tokens_per_block_;
  Blocks unused = blocks_.SplitFrom(used);
  blocks_.Detach();  // The answer says what became of their holds: gone, or in the table.
  blocks_ = Blocks(session_, Unpack(table));
  blocks_.Append(std::move(unused));
  tokens_ = tokens;
  chain_ = hasher_.BehindPruning(chain_, open_tokens_, digest);
  chained_ += open_tokens_.size();
  at_root_ = true;
  open_tokens_.clear();
  unsealed_.clear();
}

}  // namespace kvpool
