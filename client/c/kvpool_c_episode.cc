// The C ABI of episodes.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/kvpool.h"
#include "client/c/kvpool_c_session.h"
#include "client/session.h"
#include "kvpool/v1/engine.pb.h"

using kvpool::Answer;

struct kvpool_episode {
  kvpool::Pending<kvpool::EpisodeHit> pending;
  std::optional<kvpool::EpisodeHit> hit;
};

int kvpool_put_episode_start(kvpool_session* session, const kvpool_put_episode_arguments* arguments,
                             kvpool_operation** operation) {
  const auto read = kvpool::ReadStruct(arguments, "kvpool_put_episode_arguments");
  if (!read.ok()) return Answer(read.status());
  kvpool::v1::Operation request;
  request.set_after(read->after);
  kvpool::v1::PutEpisode* put = request.mutable_put_episode();
  if (read->name != nullptr) put->set_name(read->name);
  put->mutable_centroid()->Add(read->centroid, read->centroid + read->centroid_count);
  for (size_t i = 0; i < read->table_count; ++i) {
    const kvpool_table& table = read->tables[i];
    kvpool::v1::Sequence* sequence = put->add_sequences();
    sequence->set_group(table.group);
    sequence->mutable_blocks()->Add(table.blocks, table.blocks + table.block_count);
    sequence->set_last_block_tokens(table.last_block_tokens);
  }
  return kvpool::StartOperation(session, request, operation);
}

int kvpool_choose_episode_start(kvpool_session* session, const float* embedding, size_t embedding_count,
                                const char* name, kvpool_episode** episode) {
  kvpool::v1::ChooseEpisode request;
  request.mutable_embedding()->Add(embedding, embedding + embedding_count);
  if (name != nullptr) request.set_name(name);
  auto pending = session->session->ChooseEpisode(request);
  if (!pending.ok()) return Answer(pending.status());
  *episode = new kvpool_episode{std::move(*pending), std::nullopt};
  return Answer(absl::OkStatus());
}

int kvpool_episode_ready(const kvpool_episode* episode) {
  return episode->hit.has_value() || episode->pending.Ready();
}

int kvpool_episode_wait(kvpool_episode* episode, uint32_t timeout_ms, const char** name, float* similarity,
                        size_t* table_count) {
  if (!episode->hit.has_value()) {
    auto hit = episode->pending.Wait(kvpool::In(timeout_ms));
    if (!hit.ok()) return Answer(hit.status());
    episode->hit = std::move(*hit);
  }
  if (name != nullptr) *name = episode->hit->name.c_str();
  if (similarity != nullptr) *similarity = episode->hit->similarity;
  if (table_count != nullptr) *table_count = episode->hit->tables.size();
  return Answer(absl::OkStatus());
}

int kvpool_episode_take(kvpool_episode* episode, size_t table_index, kvpool_block* blocks, size_t capacity,
                        kvpool_table* table) {
  if (!episode->hit.has_value()) {
    return Answer(absl::FailedPreconditionError("kvpool_episode_wait comes first"));
  }
  if (table_index >= episode->hit->tables.size()) {
    return Answer(absl::InvalidArgumentError(absl::StrCat("table_index is ", table_index, ", the set has ",
                                                          episode->hit->tables.size(), " tables")));
  }
  kvpool::EpisodeTable& held = episode->hit->tables[table_index];
  *table = {.group = held.group,
            .last_block_tokens = held.last_block_tokens,
            .blocks = blocks,
            .block_count = held.blocks.size()};
  if (blocks == nullptr) return Answer(absl::OkStatus());
  if (held.blocks.size() > capacity) {
    return Answer(absl::ResourceExhaustedError(
        absl::StrCat(held.blocks.size(), " blocks in the table, there is room for ", capacity)));
  }
  for (size_t i = 0; i < held.blocks.size(); ++i) blocks[i] = held.blocks[i].Pack();
  held.blocks.Detach();
  return Answer(absl::OkStatus());
}

void kvpool_episode_free(kvpool_episode* episode) { delete episode; }
