#include "tests/fuzz/messages.h"

#include <google/protobuf/descriptor.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>

#include "cuda/scorers/policies/registry.h"

namespace kvpool::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

uint64_t Near(Input* input, uint64_t value) {
  switch (input->Below(6)) {
    case 0:
      return value + 1;
    case 1:
      return value - 1;
    case 2:
      return value * 2;
    case 3:
      return value / 2;
    case 4:
      return value + input->Byte();
    default:
      return input->Number();
  }
}

void VaryPlane(Input* input, v1::Plane* plane) {
  switch (input->Below(5)) {
    case 0:
      return plane->set_offset_bytes(Near(input, plane->offset_bytes()));
    case 1:
      return plane->set_layer_stride_bytes(Near(input, plane->layer_stride_bytes()));
    case 2:
      return plane->set_token_stride_bytes(Near(input, plane->token_stride_bytes()));
    case 3:
      return plane->set_head_stride_bytes(Near(input, plane->head_stride_bytes()));
    default:
      return plane->set_dim_stride_bytes(Near(input, plane->dim_stride_bytes()));
  }
}

void VaryOnce(Input* input, v1::Layout* layout) {
  v1::LayerGroup* const group = layout->mutable_groups(0);
  const auto near = [input](uint32_t value) { return static_cast<uint32_t>(Near(input, value)); };
  switch (input->Below(16)) {
    case 0:
    case 1:
      return layout->set_block_bytes(Near(input, layout->block_bytes()));
    case 2:
      return layout->set_encoding(static_cast<v1::Encoding>(input->Below(5)));
    case 3:
      return group->set_tokens_per_block(near(group->tokens_per_block()));
    case 4:
      return group->set_kv_heads(near(group->kv_heads()));
    case 5:
      return group->set_k_head_dim(near(group->k_head_dim()));
    case 6:
      return group->set_v_head_dim(near(group->v_head_dim()));
    case 7:
      return group->set_dtype(static_cast<v1::Dtype>(input->Below(7)));
    case 8:
      return group->set_window_tokens(near(group->window_tokens()));
    case 9:
      return group->add_layers(near(group->layers(group->layers_size() - 1)));
    case 10:
      return AddWindowedGroup(layout);
    case 11:
    case 12:
      return VaryPlane(input, group->mutable_v());
    default:
      return VaryPlane(input, group->mutable_k());
  }
}

// `count` elements, all of them one of a few patterns of bits.
void FillWith(Input* input, size_t count, size_t element_bytes, v1::Data* data) {
  static constexpr std::array<float, 8> kFloats = {0,
                                                   1,
                                                   -1,
                                                   0.25f,
                                                   1e30f,
                                                   std::numeric_limits<float>::quiet_NaN(),
                                                   std::numeric_limits<float>::infinity(),
                                                   std::numeric_limits<float>::denorm_min()};
  if (input->OneIn(8)) count = input->Byte();
  const float value = kFloats[input->Below(kFloats.size())];
  std::string* const bytes = data->mutable_inlined();
  bytes->resize(count * element_bytes);
  for (size_t i = 0; i + sizeof(value) <= bytes->size(); i += sizeof(value)) {
    std::memcpy(bytes->data() + i, &value, sizeof(value));
  }
  // One element differs, so that there is something to order.
  if (!bytes->empty()) (*bytes)[input->Byte() % bytes->size()] = static_cast<char>(input->Byte());
}

v1::Sequence SequenceOf(Input* input, const std::vector<uint64_t>& blocks) {
  v1::Sequence sequence;
  sequence.mutable_blocks()->Add(blocks.begin(), blocks.end());
  sequence.set_last_block_tokens(input->Below(kTokensPerBlock + 1));
  sequence.set_fresh(input->OneIn(4));
  if (input->OneIn(16)) sequence.set_group(input->Below(3));
  return sequence;
}

size_t TokensOf(const v1::Sequence& sequence) {
  const size_t full = sequence.blocks_size() * kTokensPerBlock;
  if (full == 0 || sequence.last_block_tokens() == 0) return full;
  return full - kTokensPerBlock + sequence.last_block_tokens();
}

v1::QueryWindow WindowOf(Input* input) {
  v1::QueryWindow window;
  window.set_queries(1 + input->Below(6));
  window.set_q_heads(kKvHeads * (1 + input->Below(3)));
  window.set_behind(input->OneIn(4));
  if (input->OneIn(8)) window.set_scale(static_cast<float>(input->Byte()) - 20);
  if (input->OneIn(8)) window.set_dtype(input->Below(7));
  FillWith(input, size_t{window.queries()} * window.q_heads() * kHeadDim, sizeof(uint16_t),
           window.mutable_data());
  return window;
}

v1::Policy SomePolicy(Input* input) {
  const auto policies = scorers::Policies();
  const auto name = [&] { return std::string(policies[input->Byte() % policies.size()]->name); };
  v1::Policy policy;
  policy.set_name(name());
  if (input->OneIn(3)) (*policy.mutable_params())["host"] = name();
  if (input->OneIn(3)) {
    const auto params = policies[input->Byte() % policies.size()]->params;
    static constexpr const char* kValues[] = {"0", "1", "-1", "7", "max", "avg", "nan", "1e39", ""};
    if (!params.empty()) {
      (*policy.mutable_params())[std::string(params[input->Byte() % params.size()].name)] =
          kValues[input->Byte() % std::size(kValues)];
    }
  }
  return policy;
}

// The array is in one or two of the blocks, at a place that mostly fits.
void PointInto(Input* input, const std::vector<uint64_t>& scratch, v1::Data* data) {
  data->clear_inlined();
  const size_t first = input->Byte();
  for (uint32_t i = 0, count = 1 + input->Below(2); i < count; ++i) {
    data->add_blocks(scratch[(first + i) % scratch.size()]);
  }
  const uint8_t offset = input->Byte();
  data->set_offset_bytes(offset < 240 ? offset * sizeof(float) : input->Number());
}

template <typename Verb>  // Score, Prune or Compact.
void FillScoring(Input* input, const std::vector<uint64_t>& blocks, const std::vector<uint64_t>& scratch,
                 Verb* verb) {
  *verb->mutable_sequence() = SequenceOf(input, blocks);
  const size_t tokens = TokensOf(verb->sequence());
  if (input->OneIn(2)) *verb->mutable_policy() = SomePolicy(input);
  const uint32_t signals = input->Below(3);
  for (uint32_t i = 0; i < signals; ++i) {
    v1::Signal* const signal = verb->mutable_signals()->add_signals();
    signal->set_kind(static_cast<v1::SignalKind>(input->Below(18)));
    signal->set_per_head(input->OneIn(4));
    signal->set_per_layer(input->OneIn(4));
    size_t floats = 1;  // floats a token
    if (signal->kind() == v1::SIGNAL_KIND_HIDDEN) {
      floats = input->Below(4);
      verb->mutable_signals()->set_hidden_dim(static_cast<uint32_t>(floats));
    }
    FillWith(input, tokens * floats * (signal->per_head() ? kKvHeads : 1), sizeof(float),
             signal->mutable_data());
  }
  if (input->OneIn(3)) *verb->mutable_signals()->mutable_window() = WindowOf(input);
  if (!scratch.empty() && input->OneIn(2)) {
    for (v1::Signal& signal : *verb->mutable_signals()->mutable_signals()) {
      PointInto(input, scratch, signal.mutable_data());
    }
    if (verb->signals().has_window()) {
      PointInto(input, scratch, verb->mutable_signals()->mutable_window()->mutable_data());
    }
  }
  if (input->OneIn(4)) verb->mutable_signals()->set_window_queries(input->Below(8));
  if (input->OneIn(4)) verb->mutable_signals()->set_now(input->Byte());
  if (input->OneIn(4)) {
    verb->mutable_reductions()->set_over_tokens(static_cast<v1::TokenReduction>(input->Below(6)));
    verb->mutable_reductions()->set_over_heads(static_cast<v1::PlaneReduction>(input->Below(4)));
    verb->mutable_reductions()->set_over_layers(static_cast<v1::PlaneReduction>(input->Below(4)));
  }
}

template <typename Verb>  // Prune or Compact.
void FillBudget(Input* input, Verb* verb) {
  verb->set_budget_tokens(input->OneIn(16) ? static_cast<uint32_t>(input->Number()) : input->Below(24));
  for (auto* ranges : {verb->mutable_protect(), verb->mutable_discard()}) {
    if (!input->OneIn(4)) continue;
    v1::TokenRange* const range = ranges->Add();
    range->set_begin(input->Below(24));
    range->set_end(range->begin() + input->Below(8));
  }
  if (input->OneIn(4)) verb->mutable_protection()->set_first_tokens(input->Below(8));
  if (input->OneIn(4)) verb->mutable_protection()->set_last_blocks(input->Below(4));
}

// Budgets that heads share, mostly of a sequence that they were shared of before.
void FillHeads(Input* input, v1::Compact* compact) {
  compact->set_heads(input->OneIn(8) ? static_cast<v1::Heads>(input->Below(5)) : v1::HEADS_ADA);
  if (!input->OneIn(8)) compact->set_scope(v1::SCOPE_HEAD);
  v1::AdaTerms* const terms = compact->mutable_ada();
  if (input->OneIn(4)) {
    compact->set_heads(v1::HEADS_GIVEN);
    for (uint32_t i = 0; i < kKvHeads; ++i) terms->add_tokens(input->Below(compact->budget_tokens() + 2));
  }
  if (input->OneIn(4)) terms->set_least_share(input->Below(9) / 8.0);
  if (input->OneIn(4)) terms->set_most_tokens(input->Below(48));
  if (input->OneIn(4)) return;
  terms->set_counted_tokens(input->Below(24));
  for (uint32_t i = 0; i < kKvHeads; ++i) terms->add_counts(input->Below(terms->counted_tokens() + 1));
}

// Mostly those that go with the disposition.
void FillTerms(Input* input, const std::vector<uint64_t>& scratch, v1::Compact* compact) {
  const uint32_t of = input->OneIn(8) ? input->Below(5) : compact->disposition();
  if (of == v1::DISPOSITION_MERGE) {
    compact->mutable_merge()->add_thresholds(0.5f);
  } else if (of == v1::DISPOSITION_LOW) {
    compact->mutable_low()->mutable_blocks()->Add(scratch.begin(), scratch.end());
    compact->mutable_low()->set_bits(2 * input->Below(5));
  } else if (of == v1::DISPOSITION_LESS) {
    v1::LessTerms* const less = compact->mutable_less();
    less->set_rank(1 + input->Below(3));
    less->set_hidden(1 + input->Below(3));
    less->set_weights_name("weights");
    const uint32_t rank = less->rank(), of_plane = (kHeadDim + rank) * less->hidden() + rank * rank;
    FillWith(input, size_t{kKvHeads} * of_plane, sizeof(float), less->mutable_weights());
    PointInto(input, scratch, less->mutable_state());
    if (input->OneIn(2)) PointInto(input, scratch, less->mutable_previous());
  }
}

}  // namespace

v1::Layout OpaqueLayout() {
  v1::Layout layout;
  v1::LayerGroup* const group = layout.add_groups();
  group->set_name("full");
  group->add_layers(0);
  group->set_tokens_per_block(kTokensPerBlock);
  layout.set_block_bytes(kBlockBytes);
  layout.set_encoding(v1::ENCODING_OPAQUE);
  return layout;
}

v1::Layout ScoredLayout() {
  v1::Layout layout = OpaqueLayout();
  layout.set_encoding(v1::ENCODING_STRIDED);
  v1::LayerGroup* const group = layout.mutable_groups(0);
  group->set_kv_heads(kKvHeads);
  group->set_k_head_dim(kHeadDim);
  group->set_v_head_dim(kHeadDim);
  group->set_dtype(v1::DTYPE_BF16);
  v1::Plane* const k = group->mutable_k();
  k->set_dim_stride_bytes(sizeof(uint16_t));
  k->set_head_stride_bytes(kHeadDim * k->dim_stride_bytes());
  k->set_token_stride_bytes(kKvHeads * k->head_stride_bytes());
  k->set_layer_stride_bytes(kTokensPerBlock * k->token_stride_bytes());
  *group->mutable_v() = *k;
  group->mutable_v()->set_offset_bytes(k->layer_stride_bytes());
  return layout;
}

void AddWindowedGroup(v1::Layout* layout) {
  v1::LayerGroup windowed = layout->groups(0);
  windowed.set_name("window");
  windowed.set_layers(0, static_cast<uint32_t>(layout->groups_size() + windowed.layers_size()) - 1);
  windowed.set_window_tokens(2 * kTokensPerBlock);
  *layout->add_groups() = std::move(windowed);
}

void Vary(Input* input, v1::Layout* layout) {
  const uint32_t changes = 1 + input->Below(3);
  for (uint32_t i = 0; i < changes; ++i) VaryOnce(input, layout);
}

v1::Operation DeviceOperationOn(Input* input, const std::vector<uint64_t>& blocks,
                                const std::vector<uint64_t>& scratch) {
  v1::Operation operation;
  switch (input->Below(5)) {
    case 0: {
      v1::Score* const score = operation.mutable_score();
      FillScoring(input, blocks, scratch, score);
      score->set_scope(static_cast<v1::Scope>(input->Below(5)));
      score->set_token_scores(!input->OneIn(4));
      score->set_block_scores(!input->OneIn(4));
      score->set_budget_tokens(input->Below(16));
      break;
    }
    case 1:
      FillScoring(input, blocks, scratch, operation.mutable_prune());
      FillBudget(input, operation.mutable_prune());
      operation.mutable_prune()->set_dry_run(input->OneIn(4));
      break;
    case 2: {
      v1::Compact* const compact = operation.mutable_compact();
      FillScoring(input, blocks, scratch, compact);
      if (input->OneIn(4)) {
        // It stands in place of the policy and of what that reads.
        compact->clear_policy();
        compact->clear_signals();
        compact->clear_reductions();
        uint32_t position = 0;
        for (uint32_t i = 1 + input->Below(8); i > 0; --i) {
          compact->mutable_keep()->add_positions(position);
          position += input->Below(4);
        }
      } else {
        FillBudget(input, compact);
        compact->set_scope(static_cast<v1::Scope>(input->Below(5)));
      }
      compact->set_keep_sources(input->OneIn(4));
      if (input->OneIn(3)) {
        compact->set_disposition(static_cast<v1::Disposition>(input->Below(5)));
        if (!scratch.empty() && !input->OneIn(4)) FillTerms(input, scratch, compact);
      } else if (!compact->has_keep() && input->OneIn(3)) {
        FillHeads(input, compact);
      }
      break;
    }
    case 3: {
      v1::Select* const select = operation.mutable_select();
      *select->mutable_sequence() = SequenceOf(input, blocks);
      if (!input->OneIn(8)) *select->mutable_window() = WindowOf(input);
      if (!scratch.empty() && input->OneIn(2))
        PointInto(input, scratch, select->mutable_window()->mutable_data());
      if (input->OneIn(4)) {
        select->set_budget_tokens(input->OneIn(4) ? static_cast<uint32_t>(input->Number())
                                                  : input->Below(24));
      } else {
        select->set_budget_blocks(input->OneIn(8) ? static_cast<uint32_t>(input->Number()) : input->Below(6));
      }
      select->set_first_blocks(input->OneIn(8) ? static_cast<uint32_t>(input->Number()) : input->Below(2));
      select->set_last_blocks(input->OneIn(8) ? static_cast<uint32_t>(input->Number()) : input->Below(2));
      select->set_bounds(input->OneIn(2));
      if (!scratch.empty() && input->OneIn(4)) PointInto(input, scratch, select->mutable_into());
      break;
    }
    default: {
      v1::PlanBudgets* const plan = operation.mutable_plan_budgets();
      plan->set_method(static_cast<v1::BudgetMethod>(input->Below(7)));
      plan->set_layers(static_cast<uint32_t>(input->Number()));
      plan->set_tokens_per_layer(input->Number());
      const uint32_t statistics = input->Below(6);
      for (uint32_t i = 0; i < statistics; ++i) plan->add_statistics(static_cast<double>(input->Byte()) - 10);
      if (input->OneIn(2)) {
        v1::GroupSequence* const group = plan->add_sequences();
        *group->mutable_sequence() = SequenceOf(input, blocks);
        *group->mutable_window() = WindowOf(input);
      }
    }
  }
  return operation;
}

void FillPlainly(Input* input, Message* message) {
  const Reflection* const reflection = message->GetReflection();
  const google::protobuf::Descriptor* const descriptor = message->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* const field = descriptor->field(i);
    const uint8_t how = input->Byte(), choice = how / 2;
    if (how % 2 == 0 || field->is_repeated()) continue;
    const uint64_t number = choice < 120 ? choice % 24 : input->Number();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64) {
      reflection->SetUInt64(message, field, number);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
      reflection->SetUInt32(message, field, static_cast<uint32_t>(number));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      reflection->SetBool(message, field, true);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
      reflection->SetEnumValue(message, field, choice % (field->enum_type()->value_count() + 1));
    } else if (field->type() == FieldDescriptor::TYPE_BYTES) {
      reflection->SetString(message, field, std::string(32, static_cast<char>('a' + choice % 12)));
    }
  }
}

bool ParseNext(Input* input, Message* message) {
  const uint8_t size = input->Byte();
  return message->ParseFromString(input->Bytes(size));
}

void NameBlocks(const std::vector<uint64_t>& refs, Message* message) {
  if (refs.empty()) return;
  const Reflection* const reflection = message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int count = field->is_repeated() ? reflection->FieldSize(*message, field) : 1;
    const bool nested = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !field->is_map();
    for (int i = 0; i < count; ++i) {
      if (nested) {
        NameBlocks(refs, field->is_repeated() ? reflection->MutableRepeatedMessage(message, field, i)
                                              : reflection->MutableMessage(message, field));
      } else if (field->is_repeated() && field->type() == FieldDescriptor::TYPE_FIXED64) {
        const uint64_t named = reflection->GetRepeatedUInt64(*message, field, i);
        if (named < 64) reflection->SetRepeatedUInt64(message, field, i, refs[named % refs.size()]);
      }
    }
  }
}

void Trace(const char* what, uint64_t session, const Message& message) {
  static const bool on = std::getenv("KVPOOL_FUZZ_TRACE") != nullptr;
  if (on) std::fprintf(stderr, "%s session %lu: %s\n", what, session, message.ShortDebugString().c_str());
}

}  // namespace kvpool::fuzz
