#include "server/scoring/score_work.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/scoring/drift_sample.h"

namespace kvpool {
namespace {

using scorers::KvShape;

// Buffers grow in steps, so that a sequence that grows by a token does not need a new one.
constexpr size_t kBufferStepBytes = 1 << 20;
constexpr size_t kRecordAlignment = 64;
// What heads that share a budget take for each of their scores, on the runner's thread: 80 to 105 ns on a busy core of 2 GHz.
constexpr double kSecondsOfRanked = 1e-7;

size_t RecordBytes(const scorers::ScorePlan& plan) {
  return (plan.record.floats * sizeof(float) + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

// The bytes [begin, begin + bytes) of an array that lies in these pieces.
std::vector<KvPiece> PartOf(const std::vector<KvPiece>& pieces, uint64_t begin, uint64_t bytes) {
  std::vector<KvPiece> part;
  for (const KvPiece& piece : pieces) {
    const uint64_t skipped = std::min<uint64_t>(begin, piece.bytes);
    const uint64_t taken = std::min<uint64_t>(bytes, piece.bytes - skipped);
    begin -= skipped;
    bytes -= taken;
    if (taken > 0)
      part.push_back({.address = piece.address + skipped, .bytes = taken, .in_block = piece.in_block});
  }
  return part;
}

template <typename T>
T* Moved(T* pointer, uint64_t by) {
  return pointer == nullptr ? nullptr
                            : reinterpret_cast<T*>(reinterpret_cast<uint64_t>(pointer) - kStagingOrigin + by);
}

// The blocks of a sequence that have padding in some plane. Scores read copies of them.
struct PaddedBlocks {
  explicit PaddedBlocks(const DeviceOperation& operation) : shape(operation.sequences[0].shape()) {
    uint32_t least = UINT32_MAX;
    for (const scorers::IndexRange& range : operation.padding) {
      if (range.begin >= range.end) continue;
      least = std::min(least, range.begin);
      end = (range.end + shape.tokens_per_block - 1) / shape.tokens_per_block;
    }
    if (end > 0) begin = least / shape.tokens_per_block;
    block_bytes = (operation.block_bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
  }
  uint32_t count() const { return end - begin; }
  bool Has(uint32_t block) const { return begin <= block && block < end; }
  uint32_t tokens() const {
    return std::min(shape.tokens, end * shape.tokens_per_block) - begin * shape.tokens_per_block;
  }
  // They and the places of their tokens.
  uint64_t bytes() const {
    return count() * block_bytes +
           (count() == 0 ? 0 : uint64_t{shape.planes()} * tokens() * sizeof(uint32_t));
  }

  const KvShape& shape;
  uint32_t begin = 0, end = 0;
  uint64_t block_bytes = 0;  // Each copy has so many.
};

// The tokens that leave, one list for each that `gather` has of those that stay.
struct EvictedLists {
  std::vector<uint32_t> tokens;
  uint64_t layer_stride = 0, head_stride = 0;  // 0 where gather's are.
};
// `settled`: so many tokens at the start stay besides. Each list has `count`.
EvictedLists EvictedBeside(const scorers::GatherRequest& gather, uint32_t settled, uint32_t count) {
  const KvShape& shape = gather.from.shape;
  const uint32_t layers = gather.kept_layer_stride > 0 ? shape.layers : 1;
  const uint32_t heads = gather.kept_head_stride > 0 ? shape.kv_heads : 1;
  EvictedLists evicted;
  if (layers > 1) evicted.layer_stride = uint64_t{heads} * count;
  if (heads > 1) evicted.head_stride = count;
  evicted.tokens.reserve(size_t{layers} * heads * count);
  for (uint32_t layer = 0; layer < layers; ++layer) {
    for (uint32_t head = 0; head < heads; ++head) {
      const uint32_t* stays = gather.kept + layer * gather.kept_layer_stride + head * gather.kept_head_stride;
      const uint32_t* const end = stays + gather.kept_tokens;
      for (uint32_t token = settled; token < shape.tokens; ++token) {
        if (stays != end && *stays == token) {
          ++stays;
        } else {
          evicted.tokens.push_back(token);
        }
      }
    }
  }
  return evicted;
}

}  // namespace

scorers::Signals Relocate(const scorers::Signals& relative, uint64_t address) {
  scorers::Signals staged = relative;
  for (const scorers::SignalFacts& facts : scorers::kSignals) {
    scorers::SignalArray& array = staged.*facts.array;
    array.values = Moved(array.values, address);
  }
  staged.window.data = Moved(static_cast<const char*>(staged.window.data), address);
  return staged;
}

absl::Status ScoreWork::Reserve(std::unique_ptr<KvBuffer>* buffer, size_t bytes) {
  if (*buffer != nullptr && (*buffer)->bytes() >= bytes) return absl::OkStatus();
  buffer->reset();
  const size_t rounded = (bytes + kBufferStepBytes - 1) / kBufferStepBytes * kBufferStepBytes;
  ASSIGN_OR_RETURN(*buffer, compute_.Allocate(rounded));
  return absl::OkStatus();
}

absl::Status ScoreWork::CheckWorkspace(const Part& part, size_t unkept_bytes) const {
  const size_t workspace_bytes = part.share().plan.workspace_bytes,
               signal_bytes = part.sequence.signals.bytes;
  const uint64_t padded_bytes = PaddedBlocks(part.operation).bytes();
  const size_t bytes = workspace_bytes + signal_bytes + unkept_bytes + padded_bytes;
  if (bytes <= workspace_limit_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the operation needs ", bytes, " bytes on the device: ", workspace_bytes, " of workspace, ",
      signal_bytes, " of signals, ", unkept_bytes, " of features that are not kept, ", padded_bytes,
      " of copies of blocks with padding; the limit is ", workspace_limit_bytes_, " (--score-workspace)"));
}

absl::Status ScoreWork::CheckTime(const DeviceOperation& operation, uint32_t rank,
                                  const scorers::ScorePlan& besides) const {
  double products = besides.products + besides.window_products, seconds = compute_.SecondsFor(besides);
  for (const SequenceWork& sequence : operation.sequences) {
    const scorers::ScorePlan& plan = sequence.shares[rank].plan;
    products += plan.products + plan.window_products;
    seconds += compute_.SecondsFor(plan);
  }
  const SequenceWork& first = operation.sequences[0];
  const double ranked =
      operation.most_tokens == 0 ? 0 : static_cast<double>(first.rows()) * first.shape().tokens;
  return CheckTime(products, seconds, ranked);
}

absl::Status ScoreWork::CheckTime(double products, double seconds, double ranked) const {
  seconds += ranked * kSecondsOfRanked;
  if (seconds <= absl::ToDoubleSeconds(time_limit_)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the operation multiplies tokens with ", products, " numbers of queries, weights or other tokens",
      ranked == 0 ? "" : absl::StrCat(", and ranks ", ranked, " scores of heads"), ", about ",
      absl::FormatDuration(absl::Trunc(absl::Seconds(seconds), absl::Seconds(1))),
      " of this device; the limit is ", absl::FormatDuration(time_limit_), " (--score-time)"));
}

absl::Status ScoreWork::StageSignals(const Part& part, scorers::Signals* staged) {
  const StagedSignals& signals = part.sequence.signals;
  if (signals.bytes > 0) {
    RETURN_IF_ERROR(Reserve(&staging_, signals.bytes));
    for (const StagedArray& array : signals.arrays) {
      RETURN_IF_ERROR(compute_.Stage(array.by_rank[part.rank], staging_->address() + array.offset));
    }
  }
  *staged = Relocate(signals.relative, signals.bytes > 0 ? staging_->address() : kStagingOrigin);
  return absl::OkStatus();
}

absl::Status ScoreWork::FindFeatures(const Part& part, uint32_t* blocks_read) {
  const SequenceWork& sequence = part.sequence;
  const KvShape& shape = sequence.shape();
  const scorers::ScorePlan& plan = part.share().plan;
  records_.clear();
  runs_.clear();
  unkept_blocks_.clear();
  if (plan.record.floats == 0) return absl::OkStatus();
  records_.resize(shape.blocks());
  FeatureKey key{.space = part.operation.space,
                 .group = sequence.group,
                 .rank = part.rank,
                 .sections = SectionsOf(plan.record)};
  const PaddedBlocks padded(part.operation);
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    float* record = nullptr;
    if (shape.TokensOf(block) == shape.tokens_per_block && !padded.Has(block)) {
      key.ref = sequence.refs[block];
      record = features_.Find(key);
      if (record != nullptr && !sequence.fresh) {
        records_[block] = record;
        continue;
      }
      if (record == nullptr) record = features_.Make(key, plan.record.floats);
    }
    records_[block] = record;
    if (record == nullptr) unkept_blocks_.push_back(block);
    if (!runs_.empty() && runs_.back().first + runs_.back().count == block) {
      ++runs_.back().count;
    } else {
      runs_.push_back({block, 1});
    }
    ++*blocks_read;
  }
  const size_t record_bytes = RecordBytes(plan);
  RETURN_IF_ERROR(CheckWorkspace(part, unkept_blocks_.size() * record_bytes));
  if (unkept_blocks_.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(Reserve(&unkept_, unkept_blocks_.size() * record_bytes));
  for (size_t i = 0; i < unkept_blocks_.size(); ++i) {
    records_[unkept_blocks_[i]] = reinterpret_cast<float*>(unkept_->address() + i * record_bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<ScoreWork::BlankedBlocks> ScoreWork::BlankPadding(const Part& part) {
  const DeviceOperation& operation = part.operation;
  const SequenceShare& share = part.share();
  const KvShape& shape = share.kv.shape;
  const PaddedBlocks padded(operation);
  BlankedBlocks blanked{.addresses = share.addresses};
  if (padded.count() == 0) return blanked;
  ASSIGN_OR_RETURN(blanked.buffer, compute_.Allocate(padded.count() * padded.block_bytes));
  for (uint32_t i = 0; i < padded.count(); ++i)
    blanked.addresses[padded.begin + i] = blanked.buffer->address() + i * padded.block_bytes;
  const uint32_t first = padded.begin * shape.tokens_per_block, tokens = padded.tokens();
  std::vector<uint32_t> kept;
  kept.reserve(size_t{shape.planes()} * tokens);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const size_t of_layer = (layer * operation.ranks.size() + part.rank) * shape.kv_heads;
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      const scorers::IndexRange& padding = operation.padding[of_layer + head];
      for (uint32_t token = first; token < first + tokens; ++token) {
        const bool is_there = token < padding.begin || token >= padding.end;
        kept.push_back(is_there ? token : scorers::kNoToken);
      }
    }
  }
  RETURN_IF_ERROR(compute_.Gather({.from = share.kv,
                                   .to_blocks = blanked.addresses.data() + padded.begin,
                                   .kept = kept.data(),
                                   .kept_layer_stride = uint64_t{shape.kv_heads} * tokens,
                                   .kept_head_stride = tokens,
                                   .kept_tokens = tokens,
                                   .filler = scorers::Filler::kNan}));
  return blanked;
}

absl::Status ScoreWork::ScoreSequence(const Part& part, const WantedScores& wanted, RankOutcome* outcome) {
  RETURN_IF_ERROR(CheckWorkspace(part, 0));  // It also bounds the arrays below.
  const SequenceShare& share = part.share();
  const KvShape& shape = share.kv.shape;
  const size_t rows = share.plan.rows;
  outcome->token_scores.resize(wanted.tokens ? rows * shape.tokens : 0);
  outcome->block_scores.resize(wanted.blocks ? rows * shape.blocks() : 0);
  std::vector<scorers::AttentionSpread> spreads(wanted.spreads ? shape.layers : 0);
  std::vector<double> densities(wanted.spreads ? shape.planes() : 0);
  ScoreCall call{.plan = &share.plan, .kv = share.kv};
  BlankedBlocks blanked;
  if (!part.operation.padding.empty()) {
    ASSIGN_OR_RETURN(blanked, BlankPadding(part));
    call.kv.blocks = blanked.addresses.data();
  }
  features_.BeginCall();
  absl::Status status = FindFeatures(part, &outcome->blocks_read);
  if (status.ok()) status = StageSignals(part, &call.signals);
  if (status.ok()) {
    call.records = records_;
    call.to_record = runs_;
    call.output = {.token_scores = wanted.tokens ? outcome->token_scores.data() : nullptr,
                   .block_scores = wanted.blocks ? outcome->block_scores.data() : nullptr,
                   .spreads = wanted.spreads ? spreads.data() : nullptr,
                   .densities = wanted.spreads ? densities.data() : nullptr};
    if (wanted.victims) {
      const RowChoice& choice = outcome->choice;
      outcome->victims.resize(rows * choice.count);
      call.choice = {.of_tokens = choice.of_tokens,
                     .count = choice.count,
                     .protected_marks = choice.marks,
                     .victims = absl::MakeSpan(outcome->victims)};
    }
    status = compute_.Score(call);
  }
  if (!status.ok()) features_.AbandonCall();
  outcome->spreads.insert(outcome->spreads.end(), spreads.begin(), spreads.end());
  outcome->densities.insert(outcome->densities.end(), densities.begin(), densities.end());
  return status;
}

absl::Status ScoreWork::Score(DeviceOperation* operation, uint32_t rank) {
  RankOutcome* const outcome = &operation->ranks[rank].outcome;
  outcome->choice = ChoiceOf(*operation);
  const WantedScores wanted = WantedOf(*operation, outcome->choice);
  if (!wanted.any()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckTime(*operation, rank));
  for (const SequenceWork& sequence : operation->sequences) {
    const Part part{.operation = *operation, .sequence = sequence, .rank = rank};
    RETURN_IF_ERROR(ScoreSequence(part, wanted, outcome));
  }
  return absl::OkStatus();
}

absl::Status ScoreWork::Gather(DeviceOperation* operation, uint32_t rank) {
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.shape();
  const uint64_t kept = operation->kept_tokens;
  scorers::GatherRequest gather{.from = sequence.shares[rank].kv,
                                .to_blocks = operation->ranks[rank].destination_addresses.data(),
                                .kept = operation->kept.data() + operation->settled,
                                .kept_tokens = operation->kept_tokens - operation->settled};
  if (operation->kept_rows > 1 && sequence.request.scope == scorers::Scope::kLayer) {
    gather.kept_layer_stride = kept;
  } else if (operation->kept_rows > 1 && sequence.request.scope == scorers::Scope::kHead) {
    gather.kept += rank * shape.kv_heads * kept;
    gather.kept_layer_stride = kept * shape.kv_heads * operation->ranks.size();
    gather.kept_head_stride = kept;
  }
  if (Folds(*operation)) RETURN_IF_ERROR(Fold(operation, rank, gather));
  if (Merges(*operation)) return Merge(operation, rank, gather);
  RETURN_IF_ERROR(compute_.Gather(gather));
  return operation->ranks[rank].low_addresses.empty() ? absl::OkStatus() : KeepLow(*operation, rank, gather);
}

absl::Status ScoreWork::KeepLow(const DeviceOperation& operation, uint32_t rank,
                                const scorers::GatherRequest& gather) {
  const KvShape& shape = gather.from.shape;
  const uint32_t count = shape.tokens - operation.kept_tokens;
  scorers::ScorePlan as_window;
  // Records are written whole.
  as_window.window_products = scorers::kProductsOfLowElement * operation.low.Records(count) *
                              LowLayout::kGroupTokens * (shape.k_head_dim + shape.v_head_dim);
  RETURN_IF_ERROR(CheckTime(as_window.window_products, compute_.SecondsFor(as_window)));
  const uint64_t list_bytes = (gather.kept_head_stride > 0    ? shape.planes()
                               : gather.kept_layer_stride > 0 ? shape.layers
                                                              : uint64_t{1}) *
                              count * sizeof(uint32_t);
  if (list_bytes > workspace_limit_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("lists of the tokens that leave take ", list_bytes,
                                                     " bytes on the device; the limit is ",
                                                     workspace_limit_bytes_, " (--score-workspace)"));
  }
  const EvictedLists evicted = EvictedBeside(gather, operation.settled, count);
  return compute_.KeepLow({.from = gather.from,
                           .to_blocks = operation.ranks[rank].low_addresses.data(),
                           .evicted = evicted.tokens.data(),
                           .evicted_layer_stride = evicted.layer_stride,
                           .evicted_head_stride = evicted.head_stride,
                           .evicted_tokens = count,
                           .layout = operation.low});
}

absl::StatusOr<scorers::Drift> ScoreWork::MeasureDrift(const DeviceOperation& operation, uint32_t rank) {
  const SequenceWork& sequence = operation.sequences[0];
  const scorers::QueryWindow& given = sequence.signals.relative.window;
  scorers::DriftRequest request{
      .kv = sequence.shares[rank].kv, .layer = *operation.drift_layer, .window = given};
  request.window.queries = std::min(given.queries, scorers::kMostDriftQueries);
  request.kept_head_stride = KeepsByHead(operation) ? request.words() : 0;
  RETURN_IF_ERROR(scorers::CheckDrift(request, workspace_limit_bytes_));  // It also bounds the bits below.
  scorers::ScorePlan besides;
  besides.products = scorers::DriftProducts(request);
  RETURN_IF_ERROR(CheckTime(operation, rank, besides));
  const uint64_t bytes = request.window.queries * given.query_stride_bytes;
  RETURN_IF_ERROR(Reserve(&staging_, bytes));
  // The newest queries of the layer are its last.
  const uint64_t begin = (request.layer + 1) * given.layer_stride_bytes - bytes;
  RETURN_IF_ERROR(
      compute_.Stage(PartOf(sequence.signals.arrays[*sequence.signals.window].by_rank[rank], begin, bytes),
                     staging_->address()));
  request.window.data = reinterpret_cast<const void*>(staging_->address());
  const std::vector<uint32_t> kept = KeptBits(operation, rank);
  request.kept = kept.data();
  return compute_.Drift(request);
}

absl::Status ScoreWork::PutPositions(const DeviceOperation& operation, uint32_t rank) {
  const KvShape& shape = operation.sequences[0].shape();
  const auto& all = operation.result.select().positions();
  const size_t of_layer = size_t{shape.kv_heads} * operation.selected_blocks;
  std::vector<int32_t> own;
  own.reserve(shape.layers * of_layer);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto first = all.begin() + (layer * operation.ranks.size() + rank) * of_layer;
    own.insert(own.end(), first, first + of_layer);
  }
  auto from = reinterpret_cast<uint64_t>(own.data());
  for (const KvPiece& to : operation.ranks[rank].into) {
    RETURN_IF_ERROR(compute_.Stage({{.address = from, .bytes = to.bytes}}, to.address));
    from += to.bytes;
  }
  return absl::OkStatus();
}

absl::Status ScoreWork::Merge(DeviceOperation* operation, uint32_t rank,
                              const scorers::GatherRequest& gather) {
  const KvShape& shape = gather.from.shape;
  scorers::MergeRequest merge{.gather = gather, .evicted_tokens = shape.tokens - gather.kept_tokens};
  RETURN_IF_ERROR(scorers::CheckMerge(merge, workspace_limit_bytes_));  // It also bounds the arrays below.
  // The keys that leave are multiplied with those that stay in tiles, as a window's are.
  scorers::ScorePlan as_window;
  as_window.window_products =
      1.0 * gather.kept_tokens * merge.evicted_tokens * shape.planes() * shape.k_head_dim;
  RETURN_IF_ERROR(CheckTime(as_window.window_products, compute_.SecondsFor(as_window)));
  const EvictedLists evicted = EvictedBeside(gather, /*settled=*/0, merge.evicted_tokens);
  merge.evicted = evicted.tokens.data();
  merge.evicted_layer_stride = evicted.layer_stride;
  merge.evicted_head_stride = evicted.head_stride;
  const v1::MergeTerms& terms = operation->request.compact().merge();
  const auto ranks = static_cast<uint32_t>(operation->ranks.size());
  std::vector<float> thresholds;
  for (uint32_t plane = 0; plane < shape.planes() && !terms.thresholds().empty(); ++plane) {
    const uint32_t of_all = (plane / shape.kv_heads * ranks + rank) * shape.kv_heads + plane % shape.kv_heads;
    thresholds.push_back(terms.thresholds(terms.thresholds_size() == 1 ? 0 : static_cast<int>(of_all)));
  }
  merge.thresholds = thresholds.empty() ? nullptr : thresholds.data();
  merge.smoothing = terms.smoothing();
  ASSIGN_OR_RETURN(operation->ranks[rank].outcome.merge, compute_.Merge(merge));
  return absl::OkStatus();
}

absl::Status ScoreWork::Fold(DeviceOperation* operation, uint32_t rank,
                             const scorers::GatherRequest& gather) {
  const KvShape& shape = gather.from.shape;
  const v1::LessTerms& terms = operation->request.compact().less();
  const auto ranks = static_cast<uint32_t>(operation->ranks.size());
  const bool by_layer = gather.kept_layer_stride > 0 && shape.layers > 1;
  const bool by_head = gather.kept_head_stride > 0 && shape.kv_heads > 1;
  const uint32_t leaving = shape.tokens - operation->kept_tokens;
  scorers::FoldRequest fold{
      .from = gather.from,
      .evicted_layer_stride = by_layer ? uint64_t{by_head ? shape.kv_heads : 1} * leaving : 0,
      .evicted_head_stride = by_head ? leaving : 0,
      .evicted_tokens = leaving,
      .features = terms.rank(),
      .hidden = terms.hidden()};
  const StagedSignals& arrays = operation->less;
  const auto previous =
      arrays.arrays.size() > 1 ? kStagingOrigin : uint64_t{0};  // Not null where it is there.
  fold.before = reinterpret_cast<const float*>(previous);
  const uint64_t weight_bytes = shape.planes() * ranks * fold.WeightFloats() * sizeof(float);
  RETURN_IF_ERROR(
      scorers::CheckFold(fold, weight_bytes, workspace_limit_bytes_));  // It also bounds the arrays below.
  // Weights are multiplied with tokens in tiles, as keys are with a window's queries.
  scorers::ScorePlan as_window;
  as_window.window_products = scorers::FoldProducts(fold);
  RETURN_IF_ERROR(CheckTime(as_window.window_products, compute_.SecondsFor(as_window)));
  const EvictedLists evicted = EvictedBeside(gather, operation->settled, leaving);
  const uint64_t state_bytes = shape.planes() * fold.StateFloats() * sizeof(float);
  RETURN_IF_ERROR(Reserve(&staging_, arrays.bytes + state_bytes));
  for (const StagedArray& array : arrays.arrays) {
    RETURN_IF_ERROR(compute_.Stage(array.by_rank[rank], staging_->address() + array.offset));
  }
  const uint64_t state_at = staging_->address() + arrays.bytes;
  fold.evicted = evicted.tokens.data();
  fold.weights = reinterpret_cast<const float*>(staging_->address() + arrays.arrays[0].offset) +
                 rank * shape.kv_heads * fold.WeightFloats();
  fold.weights_head_stride = fold.WeightFloats();
  fold.weights_layer_stride = ranks * shape.kv_heads * fold.WeightFloats();
  if (fold.before != nullptr) {
    fold.before = reinterpret_cast<const float*>(staging_->address() + arrays.arrays[1].offset);
  }
  fold.state = reinterpret_cast<float*>(state_at);
  ASSIGN_OR_RETURN(operation->ranks[rank].outcome.folded, compute_.Fold(fold));
  uint64_t from = state_at;
  for (const KvPiece& to : operation->ranks[rank].into) {
    RETURN_IF_ERROR(compute_.Stage({{.address = from, .bytes = to.bytes, .in_block = true}}, to.address));
    from += to.bytes;
  }
  return absl::OkStatus();
}

}  // namespace kvpool
