#include "tests/support/each_verb.h"

namespace kvpool {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kTokens = 4, kDim = 4;
constexpr uint64_t kDayMs = 86'400'000;

// An operation with a list of blocks in `verb`.
template <typename Verb>
v1::Operation Naming(const std::vector<uint64_t>& blocks, Verb* (v1::Operation::*verb)()) {
  v1::Operation operation;
  (operation.*verb)()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

// The same in the sequence of `verb`.
template <typename Verb>
v1::Operation OfSequence(const VerbSubject& subject, Verb* (v1::Operation::*verb)()) {
  v1::Operation operation;
  (operation.*verb)()->mutable_sequence()->mutable_blocks()->Add(subject.leased.begin(),
                                                                 subject.leased.end());
  return operation;
}

v1::Operation Match(const VerbSubject& subject) {
  v1::Operation operation;
  v1::GroupKeys* group = operation.mutable_match()->add_groups();
  group->set_key_bytes(32);
  group->set_keys(subject.key);
  return operation;
}

v1::Operation Pin(const VerbSubject& subject) {
  v1::Operation operation = Naming({subject.sealed}, &v1::Operation::mutable_pin);
  operation.mutable_pin()->set_ttl_ms(kDayMs);
  return operation;
}

v1::Operation SetRetention(const VerbSubject& subject) {
  v1::Operation operation = Naming({subject.sealed}, &v1::Operation::mutable_set_retention);
  operation.mutable_set_retention()->set_priority(60);
  operation.mutable_set_retention()->set_ttl_ms(kDayMs);
  return operation;
}

v1::Operation Score(const VerbSubject& subject) {
  v1::Operation operation = OfSequence(subject, &v1::Operation::mutable_score);
  operation.mutable_score()->set_block_scores(true);
  return operation;
}

v1::Operation Prune(const VerbSubject& subject) {
  v1::Operation operation = OfSequence(subject, &v1::Operation::mutable_prune);
  operation.mutable_prune()->set_budget_tokens(kTokens);
  operation.mutable_prune()->mutable_protection();  // Nothing is protected.
  return operation;
}

v1::Operation Compact(const VerbSubject& subject) {
  v1::Operation operation = OfSequence(subject, &v1::Operation::mutable_compact);
  operation.mutable_compact()->set_budget_tokens(kTokens);
  operation.mutable_compact()->mutable_protection();
  return operation;
}

void SetWindow(v1::QueryWindow* window) {
  window->set_queries(2);
  window->set_q_heads(kHeads);
  const std::vector<float> queries(size_t{kLayers} * 2 * kHeads * kDim, 1);
  window->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
}

v1::Operation Select(const VerbSubject& subject) {
  v1::Operation operation = OfSequence(subject, &v1::Operation::mutable_select);
  SetWindow(operation.mutable_select()->mutable_window());
  operation.mutable_select()->set_budget_blocks(1);
  return operation;
}

v1::Operation PlanBudgets(const VerbSubject& subject) {
  v1::Operation operation;
  v1::PlanBudgets* plan = operation.mutable_plan_budgets();
  plan->set_method(v1::BUDGET_METHOD_CAKE);
  plan->set_tokens_per_layer(kTokens);
  v1::GroupSequence* group = plan->add_sequences();
  group->mutable_sequence()->mutable_blocks()->Add(subject.leased.begin(), subject.leased.end());
  SetWindow(group->mutable_window());
  return operation;
}

}  // namespace

v1::OpenSession VerbSession() {
  v1::OpenSession request;
  v1::Layout* layout = request.mutable_layout();
  layout->set_encoding(v1::ENCODING_STRIDED);
  layout->set_block_bytes(kVerbBlockBytes);
  v1::LayerGroup* group = layout->add_groups();
  group->set_name("full");
  for (uint32_t layer = 0; layer < kLayers; ++layer) group->add_layers(layer);
  group->set_tokens_per_block(kTokens);
  group->set_kv_heads(kHeads);
  group->set_k_head_dim(kDim);
  group->set_v_head_dim(kDim);
  group->set_dtype(v1::DTYPE_F32);
  v1::Plane* k = group->mutable_k();
  k->set_dim_stride_bytes(sizeof(float));
  k->set_head_stride_bytes(kDim * k->dim_stride_bytes());
  k->set_token_stride_bytes(kHeads * k->head_stride_bytes());
  k->set_layer_stride_bytes(kTokens * k->token_stride_bytes());
  *group->mutable_v() = *k;
  group->mutable_v()->set_offset_bytes(kLayers * k->layer_stride_bytes());
  request.mutable_fingerprint()->set_digest("fingerprint of a model whose sessions send each verb");
  return request;
}

v1::Operation SealOne(uint64_t block, const std::string& key) {
  v1::Operation operation = Naming({block}, &v1::Operation::mutable_seal);
  operation.mutable_seal()->set_key_bytes(32);
  operation.mutable_seal()->set_keys(key);
  return operation;
}

v1::Operation PutEpisodeOf(const VerbSubject& subject) {
  v1::Operation operation;
  v1::PutEpisode* put = operation.mutable_put_episode();
  put->set_name("episode");
  put->add_centroid(1);
  put->add_sequences()->add_blocks(subject.sealed);
  return operation;
}

const std::map<std::string, VerbRow>& VerbRows() {
  using O = v1::Operation;
  using S = VerbSubject;
  static const auto* const rows = new std::map<std::string, VerbRow>{
      {"lease",
       [](const S&) {
         O operation;
         operation.mutable_lease()->set_count(1);
         return operation;
       }},
      {"seal",
       [](const S& s) {
         std::string key = s.key;
         key.back() = '+';
         return SealOne(s.leased[0], key);
       }},
      {"match", Match},
      {"release", [](const S& s) { return Naming({s.leased[0]}, &O::mutable_release); }},
      {"ref", [](const S& s) { return Naming({s.sealed}, &O::mutable_ref); }},
      {"touch", [](const S& s) { return Naming({s.sealed}, &O::mutable_touch); }},
      {"fence",
       [](const S&) {
         O operation;
         operation.mutable_fence()->set_step(1);
         return operation;
       }},
      {"pin", Pin},
      {"unpin", [](const S& s) { return Naming({s.sealed}, &O::mutable_unpin); }},
      {"set_retention", SetRetention},
      {"warmup_done",
       [](const S&) {
         O operation;
         operation.mutable_warmup_done();
         return operation;
       }},
      {"close_session",
       [](const S&) {
         O operation;
         operation.mutable_close_session();
         return operation;
       }},
      {"score", Score},
      {"select", Select},
      {"prune", Prune},
      {"compact", Compact},
      {"plan_budgets", PlanBudgets},
      {"put_episode", PutEpisodeOf},
      {"choose_episode",
       [](const S&) {
         O operation;
         operation.mutable_choose_episode()->set_name("episode");
         return operation;
       }},
      {"open_session", nullptr},
      {"add_member", nullptr},
  };
  return *rows;
}

}  // namespace kvpool
