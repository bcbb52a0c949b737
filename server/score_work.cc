#include "server/score_work.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/budget_plan.h"
#include "server/kept_digest.h"

namespace kvpool {
namespace {

using scorers::KvShape;

// Buffers grow in steps: a sequence that grows by a token must not mean a new one.
constexpr size_t kBufferStepBytes = 1 << 20;
constexpr size_t kAlignment = 64;

size_t RecordBytes(const scorers::ScorePlan& plan) {
  return (plan.record.floats * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
}

// Of each block: 0 the least, 1 the most valuable of all; of equal scores the later block is the more valuable. A
// score that is no number is the least.
std::vector<float> PlacesByScore(absl::Span<const float> scores, uint32_t rows, uint32_t blocks) {
  std::vector<std::pair<double, uint32_t>> order;
  for (uint32_t block = 0; block < blocks; ++block) {
    double sum = 0;
    for (uint32_t row = 0; row < rows; ++row) sum += scores[size_t{row} * blocks + block];
    order.emplace_back(std::isnan(sum) ? -std::numeric_limits<double>::infinity() : sum, block);
  }
  std::sort(order.begin(), order.end());
  std::vector<float> places(blocks, 0.5f);
  for (uint32_t i = 0; i < blocks && blocks > 1; ++i) {
    places[order[i].second] = static_cast<float>(i) / static_cast<float>(blocks - 1);
  }
  return places;
}

template <typename T>
T* Moved(T* pointer, uint64_t by) {
  return pointer == nullptr ? nullptr
                            : reinterpret_cast<T*>(reinterpret_cast<uint64_t>(pointer) - kStagingOrigin + by);
}

}  // namespace

scorers::Signals Relocate(const scorers::Signals& relative, uint64_t address) {
  scorers::Signals staged = relative;
  for (scorers::TokenSignal* signal :
       {&staged.mass, &staged.mass_square, &staged.counts, &staged.latest, &staged.peak,
        &staged.last_attended, &staged.interval, &staged.hits, &staged.importance, &staged.keep,
        &staged.window_mean, &staged.window_variance, &staged.window_peak, &staged.window_latest}) {
    signal->values = Moved(signal->values, address);
  }
  staged.hidden = Moved(staged.hidden, address);
  staged.weights = Moved(staged.weights, address);
  staged.window.data = Moved(static_cast<const char*>(staged.window.data), address);
  return staged;
}

absl::Status ScoreWork::Run(DeviceOperation* operation) {
  blocks_read_ = 0;
  switch (operation->request.verb_case()) {
    case v1::Operation::kScore:
      return RunScore(operation);
    case v1::Operation::kPrune:
      return RunPrune(operation);
    case v1::Operation::kCompact:
      return RunCompact(operation);
    default:
      return RunPlanBudgets(operation);
  }
}

// -------------------------------------------------------------------------------------------------- scores

absl::Status ScoreWork::Reserve(std::unique_ptr<KvBuffer>* buffer, size_t bytes) {
  if (*buffer != nullptr && (*buffer)->bytes() >= bytes) return absl::OkStatus();
  buffer->reset();
  const size_t rounded = (bytes + kBufferStepBytes - 1) / kBufferStepBytes * kBufferStepBytes;
  ASSIGN_OR_RETURN(*buffer, compute_.Allocate(rounded));
  return absl::OkStatus();
}

absl::Status ScoreWork::CheckWorkspace(const SequenceWork& sequence, size_t unkept_bytes) const {
  const size_t bytes = sequence.plan.workspace_bytes + sequence.signals.bytes + unkept_bytes;
  if (bytes <= workspace_limit_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the operation needs ", bytes, " bytes on the device: ", sequence.plan.workspace_bytes,
      " of workspace, ", sequence.signals.bytes, " of signals, ", unkept_bytes,
      " of features that are not kept; the limit is ", workspace_limit_bytes_, " (--score-workspace)"));
}

absl::Status ScoreWork::StageSignals(const StagedSignals& signals, scorers::Signals* staged) {
  if (signals.bytes > 0) {
    RETURN_IF_ERROR(Reserve(&staging_, signals.bytes));
    for (const StagedArray& array : signals.arrays) {
      RETURN_IF_ERROR(compute_.Stage(array.pieces, staging_->address() + array.offset));
    }
  }
  *staged = Relocate(signals.relative, signals.bytes > 0 ? staging_->address() : kStagingOrigin);
  return absl::OkStatus();
}

absl::Status ScoreWork::FindFeatures(const DeviceOperation& operation, const SequenceWork& sequence) {
  const KvShape& shape = sequence.kv.shape;
  const uint32_t floats = sequence.plan.record.floats;
  records_.clear();
  runs_.clear();
  unkept_blocks_.clear();
  if (floats == 0) return absl::OkStatus();
  records_.resize(shape.blocks());
  FeatureKey key{
      .space = operation.space, .group = sequence.group, .sections = SectionsOf(sequence.plan.record)};
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    float* record = nullptr;
    if (shape.TokensOf(block) == shape.tokens_per_block) {
      key.ref = sequence.refs[block];
      record = features_.Find(key);
      if (record != nullptr && !sequence.fresh) {
        records_[block] = record;
        continue;
      }
      if (record == nullptr) record = features_.Make(key, floats);
    }
    records_[block] = record;
    if (record == nullptr) unkept_blocks_.push_back(block);
    if (!runs_.empty() && runs_.back().first + runs_.back().count == block) {
      ++runs_.back().count;
    } else {
      runs_.push_back({block, 1});
    }
    ++blocks_read_;
  }
  const size_t record_bytes = RecordBytes(sequence.plan);
  RETURN_IF_ERROR(CheckWorkspace(sequence, unkept_blocks_.size() * record_bytes));
  if (unkept_blocks_.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(Reserve(&unkept_, unkept_blocks_.size() * record_bytes));
  for (size_t i = 0; i < unkept_blocks_.size(); ++i) {
    records_[unkept_blocks_[i]] = reinterpret_cast<float*>(unkept_->address() + i * record_bytes);
  }
  return absl::OkStatus();
}

absl::Status ScoreWork::Score(const DeviceOperation& operation, const SequenceWork& sequence,
                              const Wanted& wanted) {
  RETURN_IF_ERROR(CheckWorkspace(sequence, 0));  // Which also bounds the arrays here.
  const KvShape& shape = sequence.kv.shape;
  const size_t rows = sequence.plan.rows;
  token_scores_.resize(wanted.tokens ? rows * shape.tokens : 0);
  block_scores_.resize(wanted.blocks ? rows * shape.blocks() : 0);
  spreads_.resize(wanted.spreads ? shape.layers : 0);
  features_.BeginCall();
  ScoreCall call{.plan = &sequence.plan, .kv = sequence.kv};
  absl::Status status = FindFeatures(operation, sequence);
  if (status.ok()) status = StageSignals(sequence.signals, &call.signals);
  if (status.ok()) {
    call.records = records_;
    call.to_record = runs_;
    call.output = {.token_scores = wanted.tokens ? token_scores_.data() : nullptr,
                   .block_scores = wanted.blocks ? block_scores_.data() : nullptr,
                   .spreads = wanted.spreads ? spreads_.data() : nullptr};
    if (wanted.token_victims || wanted.block_victims) {
      call.choice = {.of_tokens = wanted.token_victims,
                     .count = static_cast<uint32_t>(victims_.size() / rows),
                     .protected_marks = marks_,
                     .victims = absl::MakeSpan(victims_)};
    }
    status = compute_.Score(call);
  }
  if (!status.ok()) features_.AbandonCall();
  return status;
}

absl::Status ScoreWork::RunScore(DeviceOperation* operation) {
  const v1::Score& request = operation->request.score();
  const SequenceWork& sequence = operation->sequences[0];
  RETURN_IF_ERROR(
      Score(*operation, sequence, {.tokens = request.token_scores(), .blocks = request.block_scores()}));
  v1::ScoreResult* result = operation->result.mutable_score();
  result->set_rows(sequence.plan.rows);
  result->set_tokens(sequence.kv.shape.tokens);
  result->set_blocks(sequence.kv.shape.blocks());
  result->mutable_token_scores()->Add(token_scores_.begin(), token_scores_.end());
  result->mutable_block_scores()->Add(block_scores_.begin(), block_scores_.end());
  result->set_blocks_read(blocks_read_);
  if (request.block_scores()) {
    operation->places = PlacesByScore(block_scores_, sequence.plan.rows, sequence.kv.shape.blocks());
  }
  return absl::OkStatus();
}

// --------------------------------------------------------------------------------------------------- prune

absl::Status ScoreWork::RunPrune(DeviceOperation* operation) {
  const v1::Prune& request = operation->request.prune();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.kv.shape;
  const uint32_t over = scorers::BlocksOverBudget(shape, operation->budget_tokens);
  victims_.resize(over);
  if (over > 0) {
    marks_.resize(shape.blocks());
    scorers::MarkProtectedBlocks(operation->protection, operation->protect, shape, absl::MakeSpan(marks_));
    RETURN_IF_ERROR(Score(*operation, sequence, {.block_victims = true}));
  }
  v1::PruneResult* result = operation->result.mutable_prune();
  kept_.clear();
  auto victim = victims_.begin();
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    if (victim != victims_.end() && *victim == block) {
      ++victim;
      result->add_victims(block);
      result->add_victim_blocks(sequence.refs[block]);
      if (!request.dry_run()) operation->released.push_back(BlockRef::Unpack(sequence.refs[block]));
      continue;
    }
    result->add_table(sequence.refs[block]);
    const uint32_t first = block * shape.tokens_per_block;
    for (uint32_t i = 0; i < shape.TokensOf(block); ++i) kept_.push_back(first + i);
  }
  result->set_kept_tokens(static_cast<uint32_t>(kept_.size()));
  result->set_released(static_cast<uint32_t>(operation->released.size()));
  result->set_blocks_read(blocks_read_);
  if (over > 0) result->set_kept_digest(KeptDigest(request.policy(), /*rows=*/1, kept_));
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------- compact

absl::Status ScoreWork::ChooseTokens(const DeviceOperation& operation, const SequenceWork& sequence) {
  const KvShape& shape = sequence.kv.shape;
  const uint32_t over =
      scorers::TokensOverBudget(sequence.plan.request.policy, shape, operation.budget_tokens);
  RETURN_IF_ERROR(CheckWorkspace(sequence, 0));  // Which also bounds the victims.
  marks_.resize(shape.tokens);
  victims_.resize(size_t{sequence.plan.rows} * over);
  scorers::MarkProtectedTokens(operation.protection, operation.protect, shape, absl::MakeSpan(marks_));
  RETURN_IF_ERROR(Score(operation, sequence, {.token_victims = true}));
  kept_.clear();
  for (uint32_t row = 0; row < sequence.plan.rows; ++row) {
    auto victim = victims_.begin() + size_t{row} * over;
    const auto end = victim + over;
    for (uint32_t token = 0; token < shape.tokens; ++token) {
      if (victim != end && *victim == token) {
        ++victim;
      } else {
        kept_.push_back(token);
      }
    }
  }
  return absl::OkStatus();
}

// Blocks at the start that keep all their tokens in every row: they stay where they are.
uint32_t ScoreWork::LeadingBlocks(const KvShape& shape, uint32_t rows, uint32_t kept) const {
  uint32_t same = kept;
  for (uint32_t row = 0; row < rows; ++row) {
    const uint32_t* const positions = kept_.data() + size_t{row} * kept;
    uint32_t i = 0;
    while (i < same && positions[i] == i) ++i;
    same = i;
  }
  // All of it, the last block's rest too.
  return same == shape.tokens ? shape.blocks() : same / shape.tokens_per_block;
}

absl::Status ScoreWork::RunCompact(DeviceOperation* operation) {
  const v1::Compact& request = operation->request.compact();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.kv.shape;
  uint32_t rows = 1;
  if (request.has_keep()) {
    kept_.assign(request.keep().positions().begin(), request.keep().positions().end());
  } else if (scorers::TokensOverBudget(sequence.plan.request.policy, shape, operation->budget_tokens) == 0) {
    kept_.resize(shape.tokens);
    for (uint32_t i = 0; i < shape.tokens; ++i) kept_[i] = i;
  } else {
    RETURN_IF_ERROR(ChooseTokens(*operation, sequence));
    rows = sequence.plan.rows;
  }
  const uint32_t kept = static_cast<uint32_t>(kept_.size() / rows);
  // A table that shared blocks with the sequence that stays would need a second hold on them.
  const uint32_t leading =
      request.keep_sources() && kept < shape.tokens ? 0 : LeadingBlocks(shape, rows, kept);
  const uint32_t settled = std::min(kept, leading * shape.tokens_per_block);
  if (settled < kept) {
    const bool layers = rows >= shape.layers && request.scope() == v1::SCOPE_LAYER;
    const bool heads = rows >= shape.layers && request.scope() == v1::SCOPE_HEAD;
    scorers::GatherRequest gather{.from = sequence.kv,
                                  .to_blocks = operation->destination_addresses.data(),
                                  .kept = kept_.data() + settled,
                                  .kept_tokens = kept - settled};
    if (layers) gather.kept_layer_stride = kept;
    if (heads) {
      gather.kept_layer_stride = uint64_t{kept} * shape.kv_heads;
      gather.kept_head_stride = kept;
    }
    RETURN_IF_ERROR(compute_.Gather(gather));
  }
  FillCompacted(operation, rows, kept, leading);
  return absl::OkStatus();
}

void ScoreWork::FillCompacted(DeviceOperation* operation, uint32_t rows, uint32_t kept, uint32_t leading) {
  const v1::Compact& request = operation->request.compact();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.kv.shape;
  const uint32_t per_block = shape.tokens_per_block;
  const uint32_t table = (kept + per_block - 1) / per_block;
  operation->destinations_used = table - leading;
  v1::CompactResult* result = operation->result.mutable_compact();
  for (uint32_t block = 0; block < leading; ++block) result->add_table(sequence.refs[block]);
  for (uint32_t i = 0; i < operation->destinations_used; ++i) {
    result->add_table(operation->destinations[i].Pack());
  }
  result->set_last_block_tokens(kept - (table - 1) * per_block);
  result->set_moved_from_block(leading);
  result->set_rows(rows);
  result->mutable_kept_positions()->Add(kept_.begin(), kept_.end());
  if (!request.keep_sources()) {
    for (uint32_t block = leading; block < shape.blocks(); ++block) {
      operation->released.push_back(BlockRef::Unpack(sequence.refs[block]));
    }
  }
  result->set_released(static_cast<uint32_t>(operation->released.size()));
  result->set_blocks_read(blocks_read_);
  if (kept < shape.tokens) result->set_kept_digest(KeptDigest(request.policy(), rows, kept_));
}

// ------------------------------------------------------------------------------------------------- budgets

absl::Status ScoreWork::RunPlanBudgets(DeviceOperation* operation) {
  std::vector<scorers::AttentionSpread> all;
  ObservedAttention observed;
  for (const SequenceWork& sequence : operation->sequences) {
    RETURN_IF_ERROR(Score(*operation, sequence, {.spreads = true}));
    all.insert(all.end(), spreads_.begin(), spreads_.end());
    observed.sequence_tokens = std::max<uint64_t>(observed.sequence_tokens, sequence.kv.shape.tokens);
    observed.window_tokens = std::max<uint64_t>(observed.window_tokens, sequence.plan.window.queries);
  }
  observed.spreads = all;
  return PlanLayerBudgets(operation->request.plan_budgets(), observed,
                          operation->result.mutable_plan_budgets());
}

}  // namespace kvpool
