#include "server/scoring/score_answer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda/scorers/parts/order.h"
#include "proto/support/status_macros.h"
#include "server/scoring/budget_plan.h"
#include "server/scoring/kept_digest.h"

namespace kvpool {
namespace {

using scorers::KvShape;

constexpr double kLeastShare = 0.2;  // kvpress's alpha_safeguard.

// Has each head a number of tokens of its own? Those of all ranks are ranked together.
bool SharesHeads(const DeviceOperation& operation) {
  return operation.request.has_compact() && (operation.request.compact().heads() == v1::HEADS_ADA ||
                                             operation.request.compact().heads() == v1::HEADS_GIVEN);
}

// Can ranks choose victims alone? Yes where each row belongs to one head, and so to one rank.
bool ChosenByRanks(const DeviceOperation& operation) {
  if (SharesHeads(operation)) return false;
  return operation.ranks.size() == 1 || operation.sequences[0].request.scope == scorers::Scope::kHead;
}

uint32_t BlocksRead(const DeviceOperation& operation) {
  uint32_t most = 0;
  for (const RankWork& rank : operation.ranks) most = std::max(most, rank.outcome.blocks_read);
  return most;
}

// The scores of all heads, as far as they are wanted: [rows][tokens] and [rows][blocks].
struct JoinedScores {
  std::vector<float> tokens, blocks;
};

JoinedScores Join(DeviceOperation* operation, const WantedScores& wanted) {
  const SequenceWork& sequence = operation->sequences[0];
  JoinedScores joined;
  if (operation->ranks.size() == 1) {
    joined.tokens = std::move(operation->ranks[0].outcome.token_scores);
    joined.blocks = std::move(operation->ranks[0].outcome.block_scores);
    return joined;
  }
  const KvShape& shape = sequence.shape();
  const uint32_t rows = sequence.rows();
  std::vector<const float*> token_rows, block_rows;
  for (const RankWork& rank : operation->ranks) {
    token_rows.push_back(rank.outcome.token_scores.data());
    block_rows.push_back(rank.outcome.block_scores.data());
  }
  scorers::RankRows ranks{.asked = &sequence.request, .plan = &sequence.plan()};
  const bool own_blocks = sequence.plan().own_blocks;
  if (wanted.tokens || !own_blocks) {
    ranks.by_rank = token_rows;
    ranks.items = shape.tokens;
    joined.tokens.resize(size_t{rows} * shape.tokens);
    scorers::JoinTokenRows(ranks, joined.tokens.data());
  }
  if (!wanted.blocks) return joined;
  joined.blocks.resize(size_t{rows} * shape.blocks());
  if (own_blocks) {
    ranks.by_rank = block_rows;
    ranks.items = shape.blocks();
    scorers::JoinOwnBlockRows(ranks, joined.blocks.data());
  } else {
    scorers::ReduceBlockRows(sequence.request, rows, joined.tokens.data(), joined.blocks.data());
  }
  return joined;
}

// The place of each block among all, 0 for the least valuable and 1 for the most. With equal scores the later
// block is the more valuable; a NaN is the least.
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

// The items with the lowest scores: [rows][count]. Rows of heads are in order: within a layer
// rank 0's come first.
absl::StatusOr<std::vector<uint32_t>> LowestOfRows(DeviceOperation* operation, const RowChoice& choice) {
  const SequenceWork& sequence = operation->sequences[0];
  if (operation->ranks.size() == 1) return std::move(operation->ranks[0].outcome.victims);
  std::vector<uint32_t> victims;
  const size_t rows = sequence.rows();
  if (ChosenByRanks(*operation)) {
    victims.reserve(rows * choice.count);
    const size_t of_layer = size_t{sequence.shape().kv_heads} * choice.count;
    for (uint32_t layer = 0; layer < sequence.shape().layers; ++layer) {
      for (const RankWork& rank : operation->ranks) {
        const auto first = rank.outcome.victims.begin() + layer * of_layer;
        victims.insert(victims.end(), first, first + of_layer);
      }
    }
    return victims;
  }
  victims.resize(rows * choice.count);
  const JoinedScores joined = Join(operation, {.tokens = choice.of_tokens, .blocks = !choice.of_tokens});
  std::vector<uint64_t> keys;
  RETURN_IF_ERROR(scorers::SelectRows((choice.of_tokens ? joined.tokens : joined.blocks).data(), rows,
                                      choice.marks, choice.count, &keys, absl::MakeSpan(victims)));
  return victims;
}

// All items that leave, ascending within a row: [rows][choice.leaving()].
absl::StatusOr<std::vector<uint32_t>> Victims(DeviceOperation* operation, const RowChoice& choice) {
  std::vector<uint32_t> lowest;
  if (choice.count > 0) {
    ASSIGN_OR_RETURN(lowest, LowestOfRows(operation, choice));
  }
  if (choice.discarded.empty()) return lowest;
  std::vector<uint32_t> victims(size_t{operation->sequences[0].rows()} * choice.leaving());
  auto from = lowest.begin();
  for (auto to = victims.begin(); to != victims.end(); from += choice.count) {
    to = std::merge(from, from + choice.count, choice.discarded.begin(), choice.discarded.end(), to);
  }
  return victims;
}

absl::Status AnswerScore(DeviceOperation* operation) {
  const v1::Score& request = operation->request.score();
  const SequenceWork& sequence = operation->sequences[0];
  const JoinedScores joined =
      Join(operation, {.tokens = request.token_scores(), .blocks = request.block_scores()});
  v1::ScoreResult* result = operation->result.mutable_score();
  result->set_rows(sequence.rows());
  result->set_tokens(sequence.shape().tokens);
  result->set_blocks(sequence.shape().blocks());
  if (request.token_scores()) result->mutable_token_scores()->Add(joined.tokens.begin(), joined.tokens.end());
  if (request.block_scores()) result->mutable_block_scores()->Add(joined.blocks.begin(), joined.blocks.end());
  result->set_blocks_read(BlocksRead(*operation));
  if (request.block_scores()) {
    operation->places = PlacesByScore(joined.blocks, sequence.rows(), sequence.shape().blocks());
  }
  return absl::OkStatus();
}

// A row of block scores, as the row's part of the answer.
void SelectOfRow(const v1::Select& request, absl::Span<const float> bounds, uint32_t selected,
                 std::vector<uint32_t>* order, v1::SelectResult* result) {
  const auto blocks = static_cast<uint32_t>(bounds.size());
  const uint32_t first = std::min(request.first_blocks(), blocks);
  const uint32_t last = std::min(request.last_blocks(), blocks - first);
  order->resize(blocks);
  std::iota(order->begin(), order->end(), 0);
  // Those that are always selected stand in front; the others are between `first` and the last ones.
  std::rotate(order->begin() + first, order->end() - last, order->end());
  std::partial_sort(order->begin() + first + last, order->begin() + selected, order->end(),
                    [&](uint32_t a, uint32_t b) {
                      return scorers::OrderOf(bounds[a], a) > scorers::OrderOf(bounds[b], b);
                    });
  for (uint32_t i = 0; i < selected; ++i) {
    result->add_positions((*order)[i]);
    if (request.bounds()) result->add_bounds(bounds[(*order)[i]]);
  }
}

absl::Status AnswerSelect(DeviceOperation* operation) {
  const v1::Select& request = operation->request.select();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.shape();
  v1::SelectResult* result = operation->result.mutable_select();
  result->set_rows(sequence.rows());
  result->set_selected(operation->selected_blocks);
  result->set_blocks_read(BlocksRead(*operation));
  std::vector<uint32_t> order;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (const RankWork& rank : operation->ranks) {
      const absl::Span<const float> bounds(rank.outcome.block_scores);
      for (uint32_t plane = layer * shape.kv_heads; plane < (layer + 1) * shape.kv_heads; ++plane) {
        SelectOfRow(request, bounds.subspan(size_t{plane} * shape.blocks(), shape.blocks()),
                    operation->selected_blocks, &order, result);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status AnswerPrune(DeviceOperation* operation) {
  const v1::Prune& request = operation->request.prune();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.shape();
  ASSIGN_OR_RETURN(const std::vector<uint32_t> victims,
                   Victims(operation, operation->ranks[0].outcome.choice));
  v1::PruneResult* result = operation->result.mutable_prune();
  std::vector<uint32_t> kept;
  auto victim = victims.begin();
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    if (victim != victims.end() && *victim == block) {
      ++victim;
      result->add_victims(block);
      result->add_victim_blocks(sequence.refs[block]);
      if (!request.dry_run()) operation->released.push_back(BlockRef::Unpack(sequence.refs[block]));
      continue;
    }
    result->add_table(sequence.refs[block]);
    const uint32_t first = block * shape.tokens_per_block;
    for (uint32_t i = 0; i < shape.TokensOf(block); ++i) kept.push_back(first + i);
  }
  result->set_kept_tokens(static_cast<uint32_t>(kept.size()));
  result->set_released(static_cast<uint32_t>(operation->released.size()));
  result->set_blocks_read(BlocksRead(*operation));
  if (!victims.empty()) result->set_kept_digest(KeptDigest(request.policy(), /*rows=*/1, kept));
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------- compact

// The tokens that leave each of the heads whose scores these are, ascending; `first` is the first one's row.
absl::StatusOr<std::vector<std::vector<uint32_t>>> VictimsOfHeads(const DeviceOperation& operation,
                                                                  const RowChoice& choice, uint32_t first,
                                                                  uint32_t heads, const float* scores) {
  const v1::AdaTerms& terms = operation.request.compact().ada();
  const absl::Span<const scorers::IndexRange> padding(operation.padding);
  scorers::SharedChoice shared{.rows = heads,
                               .count = choice.count,
                               .safeguard = terms.least_share() == 0 ? kLeastShare : terms.least_share(),
                               .most = operation.most_tokens,
                               .discarded = choice.discarded,
                               .absent = padding.empty() ? padding : padding.subspan(first, heads)};
  if (terms.tokens().empty()) return scorers::SelectShared(scores, shared, choice.marks);
  // Alone, with room for all, a row loses what is above the most that it keeps.
  std::vector<std::vector<uint32_t>> victims;
  shared.rows = 1;
  shared.count = 0;
  for (uint32_t head = 0; head < heads; ++head) {
    shared.most = terms.tokens(static_cast<int>(first + head));
    if (!padding.empty()) shared.absent = padding.subspan(first + head, 1);
    ASSIGN_OR_RETURN(std::vector<std::vector<uint32_t>> of_head,
                     scorers::SelectShared(scores + head * choice.marks.size(), shared, choice.marks));
    victims.push_back(std::move(of_head[0]));
  }
  return victims;
}

// Fills operation->kept and its dimensions where heads differ: each row has its own number of tokens.
absl::Status ShareKept(DeviceOperation* operation, const RowChoice& choice) {
  const SequenceWork& sequence = operation->sequences[0];
  const uint32_t tokens = sequence.shape().tokens, rows = sequence.rows();
  const uint32_t heads = rows / sequence.shape().layers;
  const absl::Span<const scorers::IndexRange> padding(operation->padding);
  // Where what is discarded is enough nothing was scored.
  const bool scored = choice.count > 0;
  const JoinedScores joined = scored ? Join(operation, {.tokens = true}) : JoinedScores();
  std::vector<std::vector<uint32_t>> kept, victims(heads);
  for (uint32_t first = 0; first < rows; first += heads) {
    if (scored) {
      ASSIGN_OR_RETURN(victims, VictimsOfHeads(*operation, choice, first, heads,
                                               joined.tokens.data() + size_t{first} * tokens));
    }
    std::vector<uint8_t> leaves(tokens);
    for (uint32_t head = 0; head < heads; ++head) {
      std::fill(leaves.begin(), leaves.end(), 0);
      for (const uint32_t token : victims[head]) leaves[token] = 1;
      for (const uint32_t token : choice.discarded) leaves[token] = 1;
      if (!padding.empty()) {
        const scorers::IndexRange& own = padding[first + head];
        std::fill(leaves.begin() + own.begin, leaves.begin() + own.end, 1);
      }
      std::vector<uint32_t>& of_head = kept.emplace_back();
      for (uint32_t token = 0; token < tokens; ++token) {
        if (leaves[token] == 0) of_head.push_back(token);
      }
      operation->kept_tokens = std::max(operation->kept_tokens, static_cast<uint32_t>(of_head.size()));
    }
  }
  if (operation->kept_tokens == 0) {
    return absl::InvalidArgumentError("compact: no token would stay; all are padding or discarded");
  }
  operation->loses = true;
  operation->kept_rows = rows;
  operation->kept.assign(size_t{rows} * operation->kept_tokens, scorers::kNoToken);
  for (uint32_t row = 0; row < rows; ++row) {
    std::copy(kept[row].begin(), kept[row].end(),
              operation->kept.begin() + ptrdiff_t{row} * operation->kept_tokens);
    operation->result.mutable_compact()->add_counts(static_cast<uint32_t>(kept[row].size()));
  }
  return absl::OkStatus();
}

// Fills operation->kept and its dimensions.
absl::Status ChooseKept(DeviceOperation* operation) {
  const v1::Compact& request = operation->request.compact();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.shape();
  std::vector<uint32_t>& kept = operation->kept;
  operation->kept_rows = 1;
  if (request.has_keep()) {
    kept.assign(request.keep().positions().begin(), request.keep().positions().end());
  } else if (const RowChoice& choice = operation->ranks[0].outcome.choice; choice.leaving() == 0) {
    kept.resize(shape.tokens);
    std::iota(kept.begin(), kept.end(), 0);
  } else if (SharesHeads(*operation)) {
    return ShareKept(operation, choice);
  } else {
    ASSIGN_OR_RETURN(const std::vector<uint32_t> victims, Victims(operation, choice));
    operation->kept_rows = sequence.rows();
    for (uint32_t row = 0; row < operation->kept_rows; ++row) {
      auto victim = victims.begin() + size_t{row} * choice.leaving();
      const auto end = victim + choice.leaving();
      for (uint32_t token = 0; token < shape.tokens; ++token) {
        if (victim != end && *victim == token) {
          ++victim;
        } else {
          kept.push_back(token);
        }
      }
    }
  }
  operation->kept_tokens = static_cast<uint32_t>(kept.size() / operation->kept_rows);
  operation->loses = operation->kept_tokens < shape.tokens;
  return absl::OkStatus();
}

// Counts the blocks at the start that keep all their tokens in every row, and so stay where they are.
uint32_t LeadingBlocks(const DeviceOperation& operation) {
  const KvShape& shape = operation.sequences[0].shape();
  uint32_t same = operation.kept_tokens;
  for (uint32_t row = 0; row < operation.kept_rows; ++row) {
    const uint32_t* const positions = operation.kept.data() + size_t{row} * operation.kept_tokens;
    uint32_t i = 0;
    while (i < same && positions[i] == i) ++i;
    same = i;
  }
  // Everything stays where it is, also the part of the last block that is not filled.
  return same == shape.tokens ? shape.blocks() : same / shape.tokens_per_block;
}

absl::Status AnswerCompact(DeviceOperation* operation) {
  RETURN_IF_ERROR(ChooseKept(operation));
  const v1::Compact& request = operation->request.compact();
  const SequenceWork& sequence = operation->sequences[0];
  const KvShape& shape = sequence.shape();
  const uint32_t kept = operation->kept_tokens, per_block = shape.tokens_per_block;
  // The old sequence stays as well: a new table that shared blocks with it would need second holds on them.
  // A merge may write into any token that stays.
  const bool moves_all = request.keep_sources() || Merges(*operation);
  const uint32_t leading = moves_all && operation->loses ? 0 : LeadingBlocks(*operation);
  operation->settled = std::min(kept, leading * per_block);
  const uint32_t table = (kept + per_block - 1) / per_block;
  operation->destinations_used = table - leading;
  if (operation->destinations_used > operation->destinations.size()) {
    return absl::InternalError(absl::StrCat("compact: ", operation->destinations_used,
                                            " blocks are needed, and ", operation->destinations.size(),
                                            " were leased"));
  }
  v1::CompactResult* result = operation->result.mutable_compact();
  for (uint32_t block = 0; block < leading; ++block) result->add_table(sequence.refs[block]);
  for (uint32_t i = 0; i < operation->destinations_used; ++i) {
    result->add_table(operation->destinations[i].Pack());
  }
  result->set_last_block_tokens(kept - (table - 1) * per_block);
  result->set_moved_from_block(leading);
  result->set_rows(operation->kept_rows);
  for (const uint32_t position : operation->kept) {
    if (position != scorers::kNoToken) result->add_kept_positions(position);
  }
  if (!request.keep_sources()) {
    for (uint32_t block = leading; block < shape.blocks(); ++block) {
      operation->released.push_back(BlockRef::Unpack(sequence.refs[block]));
      result->add_released_blocks(sequence.refs[block]);
    }
  }
  result->set_released(static_cast<uint32_t>(operation->released.size()));
  result->set_blocks_read(BlocksRead(*operation));
  if (operation->loses) {
    result->set_kept_digest(KeptDigest(request, operation->kept_rows, operation->kept));
  }
  if (request.has_low()) {
    result->set_low_tokens(shape.tokens - kept);
    result->set_low_blocks(static_cast<uint32_t>(operation->ranks[0].low_addresses.size()));
    result->set_low_records_per_block(operation->low.records_per_block);
  }
  return absl::OkStatus();
}

absl::Status AnswerPlanBudgets(DeviceOperation* operation) {
  // Entropies and variances add up over ranks; a density belongs to one head.
  std::vector<scorers::AttentionSpread> spreads;
  std::vector<double> densities;
  std::vector<uint32_t> heads;
  ObservedAttention observed;
  size_t first_plane = 0;  // The first plane of this sequence.
  for (const SequenceWork& sequence : operation->sequences) {
    const KvShape& shape = sequence.shape();
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      scorers::AttentionSpread all;
      for (const RankWork& rank : operation->ranks) {
        const scorers::AttentionSpread& own = rank.outcome.spreads[spreads.size()];
        all.entropy += own.entropy;
        all.variance += own.variance;
        const auto first = rank.outcome.densities.begin() + first_plane + layer * shape.kv_heads;
        densities.insert(densities.end(), first, first + shape.kv_heads);
      }
      spreads.push_back(all);
      heads.push_back(shape.kv_heads * static_cast<uint32_t>(operation->ranks.size()));
    }
    first_plane += shape.planes();
    observed.sequence_tokens = std::max<uint64_t>(observed.sequence_tokens, shape.tokens);
    observed.window_tokens = std::max<uint64_t>(observed.window_tokens, sequence.plan().window.own_tokens());
  }
  observed.spreads = spreads;
  observed.densities = densities;
  observed.heads = heads;
  return PlanLayerBudgets(operation->request.plan_budgets(), observed,
                          operation->result.mutable_plan_budgets());
}

// The items in `discard`; where blocks leave, the blocks that lie in it whole.
std::vector<uint8_t> MarksOf(const std::vector<scorers::IndexRange>& ranges, const KvShape& shape,
                             bool of_tokens) {
  std::vector<uint8_t> tokens(shape.tokens);
  for (const scorers::IndexRange& range : ranges) {
    std::fill(tokens.begin() + range.begin, tokens.begin() + range.end, 1);
  }
  if (of_tokens) return tokens;
  std::vector<uint8_t> blocks(shape.blocks());
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    const auto first = tokens.begin() + size_t{block} * shape.tokens_per_block;
    blocks[block] = std::all_of(first, first + shape.TokensOf(block), [](uint8_t mark) { return mark != 0; });
  }
  return blocks;
}

// Items that the engine expects never to read again leave first: all of them, or the
// lowest-scored among them.
void DiscardFirst(const DeviceOperation& operation, RowChoice* choice) {
  if (operation.discard.empty()) return;
  const KvShape& shape = operation.sequences[0].shape();
  const std::vector<uint8_t> discarded = MarksOf(operation.discard, shape, choice->of_tokens);
  std::vector<uint32_t> leaving;
  for (uint32_t i = 0; i < discarded.size(); ++i) {
    if (discarded[i] != 0 && choice->marks[i] == 0) leaving.push_back(i);
  }
  const bool enough = leaving.size() >= choice->count;
  for (uint32_t i = 0; i < discarded.size() && enough; ++i) {
    if (discarded[i] == 0) choice->marks[i] = 1;
  }
  if (enough && leaving.size() > choice->count) return;  // Scores decide among them.
  for (const uint32_t i : leaving) choice->marks[i] = 1;
  choice->count -= static_cast<uint32_t>(leaving.size());
  choice->discarded = std::move(leaving);
}

}  // namespace

RowChoice ChoiceOf(const DeviceOperation& operation) {
  RowChoice choice;
  const v1::Operation& request = operation.request;
  if (!request.has_prune() && !(request.has_compact() && !request.compact().has_keep())) return choice;
  const SequenceWork& sequence = operation.sequences[0];
  const KvShape& shape = sequence.shape();
  choice.of_tokens = request.has_compact();
  choice.count = choice.of_tokens
                     ? scorers::TokensOverBudget(sequence.request.policy, shape, operation.budget_tokens)
                     : scorers::BlocksOverBudget(shape, operation.budget_tokens);
  if (choice.count == 0) return choice;
  if (choice.of_tokens) {
    choice.marks.resize(shape.tokens);
    scorers::MarkProtectedTokens(operation.protection, operation.protect, shape,
                                 absl::MakeSpan(choice.marks));
  } else {
    choice.marks.resize(shape.blocks());
    scorers::MarkProtectedBlocks(operation.protection, operation.protect, shape,
                                 absl::MakeSpan(choice.marks));
  }
  DiscardFirst(operation, &choice);
  return choice;
}

WantedScores WantedOf(const DeviceOperation& operation, const RowChoice& choice) {
  if (operation.request.has_plan_budgets()) return {.spreads = true};
  if (operation.request.has_select())
    return {.blocks = true};  // Each row belongs to one head, and so to one rank.
  if (operation.sequences[0].shares[0].plan.rows == 0) return {};  // It is only moved.
  bool tokens = operation.request.has_score() && operation.request.score().token_scores();
  bool blocks = operation.request.has_score() && operation.request.score().block_scores();
  if (!operation.request.has_score()) {
    if (choice.count == 0) return {};
    if (ChosenByRanks(operation)) return {.victims = true};
    tokens = choice.of_tokens;
    blocks = !choice.of_tokens;
  }
  // Block scores are reduced from the joined token scores, unless the policy scores blocks itself.
  const bool own_blocks = operation.sequences[0].plan().own_blocks;
  if (operation.ranks.size() == 1) return {.tokens = tokens, .blocks = blocks};
  return {.tokens = tokens || (blocks && !own_blocks), .blocks = blocks && own_blocks};
}

absl::Status AnswerOperation(DeviceOperation* operation) {
  switch (operation->request.verb_case()) {
    case v1::Operation::kScore:
      return AnswerScore(operation);
    case v1::Operation::kSelect:
      return AnswerSelect(operation);
    case v1::Operation::kPrune:
      return AnswerPrune(operation);
    case v1::Operation::kCompact:
      return AnswerCompact(operation);
    default:
      return AnswerPlanBudgets(operation);
  }
}

bool Merges(const DeviceOperation& operation) {
  return operation.request.has_compact() &&
         operation.request.compact().disposition() == v1::DISPOSITION_MERGE;
}

bool Folds(const DeviceOperation& operation) {
  return operation.request.has_compact() && operation.request.compact().disposition() == v1::DISPOSITION_LESS;
}

bool Moves(const DeviceOperation& operation) {
  return operation.settled < operation.kept_tokens || operation.result.compact().low_blocks() > 0 ||
         !operation.ranks[0].into.empty();
}

void AnswerDisposition(DeviceOperation* operation) {
  if (Folds(*operation)) {
    uint64_t folded = 0;
    for (const RankWork& rank : operation->ranks) folded += rank.outcome.folded;
    operation->result.mutable_compact()->set_folded_tokens(folded);
  }
  if (!Merges(*operation)) return;
  const KvShape& shape = operation->sequences[0].shape();
  v1::CompactResult* const result = operation->result.mutable_compact();
  uint64_t merged = 0;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (const RankWork& rank : operation->ranks) {
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const uint32_t plane = layer * shape.kv_heads + head;
        result->add_merge_thresholds(rank.outcome.merge.thresholds[plane]);
        merged += rank.outcome.merge.merged[plane];
      }
    }
  }
  result->set_merged_tokens(merged);
}

}  // namespace kvpool
