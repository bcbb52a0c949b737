// The C ABI of Session: it converts, and decides nothing.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/c/kvpool.h"
#include "client/c/kvpool_c_session.h"
#include "client/layouts.h"
#include "client/prefix_hasher.h"
#include "client/session.h"
#include "kvpool/version.h"
#include "proto/support/status_macros.h"

struct kvpool_match {
  kvpool::PendingMatch pending;
  std::optional<kvpool::MatchHit> hit;
};

struct kvpool_seal {
  kvpool::PendingSeal pending;
  std::optional<kvpool::SealOutcome> outcome;
};

namespace {

using kvpool::Answer;
using kvpool::BlockRef;
using kvpool::In;

thread_local std::string last_error;
// As many as the session keeps.
constexpr size_t kKeptRefusals = 64;

int Invalid(absl::string_view words) { return Answer(absl::InvalidArgumentError(words)); }

std::string OrEmpty(const char* text) { return text == nullptr ? std::string() : std::string(text); }

// Session can't check this: it takes a signed count, into which `ms` above INT64_MAX does not fit.
absl::StatusOr<std::chrono::milliseconds> Time(const char* field, uint64_t ms, uint64_t least_ms) {
  constexpr uint64_t kMost = kvpool::Session::kMaxTtl.count();
  if (ms >= least_ms && ms <= kMost) return std::chrono::milliseconds(ms);
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", ms, "; must be ", least_ms, " to ", kMost));
}

// INVALID_ARGUMENT: no memory has so many, as with a count of -1.
absl::StatusOr<std::vector<BlockRef>> Refs(const kvpool_block* blocks, size_t count) {
  if (count > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("count is ", count, "; must be 0 to ", UINT32_MAX));
  }
  std::vector<BlockRef> refs(count);
  for (size_t i = 0; i < count; ++i) refs[i] = BlockRef::Unpack(blocks[i]);
  return refs;
}

// What call(refs) answers.
template <typename Call>
int WithRefs(const kvpool_block* blocks, size_t count, Call call) {
  const auto refs = Refs(blocks, count);
  return Answer(refs.ok() ? call(*refs) : refs.status());
}

void Pack(absl::Span<const BlockRef> refs, kvpool_block* out) {
  for (size_t i = 0; i < refs.size(); ++i) out[i] = refs[i].Pack();
}

// Has lease(refs) fill `blocks`. Before there is memory for their refs, more blocks than there can ever be are refused.
template <typename Lease>
int LeaseInto(kvpool_session* session, kvpool_block* blocks, size_t count, Lease lease) {
  if (count > session->session->most_leased_blocks()) {
    return Answer(
        session->session->Lease(static_cast<uint32_t>(std::min<size_t>(count, UINT32_MAX))).status());
  }
  std::vector<BlockRef> refs(count);
  const absl::Status leased = lease(absl::MakeSpan(refs));
  if (leased.ok()) Pack(refs, blocks);
  return Answer(leased);
}

absl::StatusOr<kvpool::SessionOptions> ReadOptions(const kvpool_options* given) {
  ASSIGN_OR_RETURN(const kvpool_options options, kvpool::ReadStruct(given, "kvpool_options"));
  kvpool::SessionOptions result;
  result.socket = OrEmpty(options.socket);
  result.tenant = OrEmpty(options.tenant);
  result.client_name = OrEmpty(options.client_name);
  if (options.fingerprint != nullptr) {
    result.fingerprint.set_digest(options.fingerprint, options.fingerprint_bytes);
  }
  if (options.layout == nullptr) {
    result.layout = kvpool::OpaqueLayout(
        {.block_bytes = options.block_bytes, .tokens_per_block = options.tokens_per_block});
  } else if (!result.layout.ParseFromArray(options.layout, static_cast<int>(options.layout_bytes))) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.layout: ", options.layout_bytes, " bytes are no kvpool.v1.Layout"));
  }
  result.ranks = std::max(1u, options.ranks);
  result.role.set_rank(options.rank);
  result.role.set_scheduler(options.scheduler != 0);
  result.guaranteed_blocks = options.guaranteed_blocks;
  result.max_blocks = options.max_blocks;
  result.max_space_bytes = options.max_space_bytes;
  for (size_t i = 0; i < options.device_uuid_count; ++i) {
    const char* const uuid = options.device_uuids == nullptr ? nullptr : options.device_uuids[i];
    if (uuid == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "options.device_uuids", options.device_uuids == nullptr ? "" : absl::StrCat("[", i, "]"),
          " is NULL; device_uuid_count is ", options.device_uuid_count));
    }
    result.device_uuids.emplace_back(uuid);
  }
  result.kind = static_cast<kvpool::v1::SpaceKind>(options.kind);
  result.warmup = options.warmup != 0;
  switch (options.give_back) {
    case KVPOOL_GIVE_BACK_NEVER:
      break;
    case KVPOOL_GIVE_BACK_BY_CALL:
      result.give_back = kvpool::GiveBack::kByCall;
      break;
    case KVPOOL_GIVE_BACK_ANY_TIME:
      result.give_back = kvpool::GiveBack::kAnyTime;
      break;
    default:  // It is the caller's number, not an enum.
      return absl::InvalidArgumentError(
          absl::StrCat("options.give_back is ", options.give_back, "; must be 0 to 2"));
  }
  result.holes = options.holes != 0;
  if (options.priority_class > static_cast<uint64_t>(kvpool::v1::PriorityClass_MAX)) {
    return absl::InvalidArgumentError(absl::StrCat("options.priority_class is ", options.priority_class,
                                                   "; must be 0 to ",
                                                   static_cast<int>(kvpool::v1::PriorityClass_MAX)));
  }
  result.priority_class = static_cast<kvpool::v1::PriorityClass>(options.priority_class);
  if (options.magazine_blocks != 0) result.magazine_blocks = options.magazine_blocks;
  if (options.open_timeout_ms != 0) result.open_timeout = std::chrono::milliseconds(options.open_timeout_ms);
  return result;
}

int Hand(absl::StatusOr<std::unique_ptr<kvpool::Session>> opened, kvpool_session** session) {
  if (!opened.ok()) return Answer(opened.status());
  *session = new kvpool_session{std::move(*opened)};
  return Answer(absl::OkStatus());
}

}  // namespace

namespace kvpool {

int Answer(const absl::Status& status) {
  last_error.assign(status.message().data(), status.message().size());
  return static_cast<int>(status.code());
}

}  // namespace kvpool

const char* kvpool_last_error(void) { return last_error.c_str(); }

const char* kvpool_version(void) { return kvpool::Version(); }

int kvpool_open(const kvpool_options* options, kvpool_session** session) {
  const auto read = ReadOptions(options);
  return read.ok() ? Hand(kvpool::Session::Open(*read), session) : Answer(read.status());
}

int kvpool_join(const kvpool_options* options, const void* invitation, size_t invitation_bytes,
                kvpool_session** session) {
  const auto read = ReadOptions(options);
  if (!read.ok()) return Answer(read.status());
  return Hand(kvpool::Session::Join(*read, {static_cast<const char*>(invitation), invitation_bytes}),
              session);
}

int kvpool_close(kvpool_session* session, uint32_t timeout_ms) {
  return Answer(session->session->Close(In(timeout_ms)));
}

void kvpool_free(kvpool_session* session) { delete session; }

uint64_t kvpool_session_id(const kvpool_session* session) { return session->session->id(); }

void kvpool_invitation(const kvpool_session* session, uint8_t invitation[KVPOOL_INVITATION_BYTES]) {
  const std::string bytes = session->session->Invitation();
  std::memcpy(invitation, bytes.data(), std::min<size_t>(bytes.size(), KVPOOL_INVITATION_BYTES));
}

int kvpool_status(const kvpool_session* session) { return Answer(session->session->status()); }
uint32_t kvpool_capacity_blocks(const kvpool_session* session) { return session->session->capacity_blocks(); }
uint32_t kvpool_mapped_blocks(const kvpool_session* session) { return session->session->mapped_blocks(); }
size_t kvpool_mapped_ranges(const kvpool_session* session, kvpool_block_range* ranges, size_t room) {
  const std::vector<std::pair<uint32_t, uint32_t>> mapped = session->session->mapped_ranges();
  for (size_t i = 0; i < std::min(room, mapped.size()); ++i) ranges[i] = {mapped[i].first, mapped[i].second};
  return mapped.size();
}
uint32_t kvpool_slabs_asked_back(const kvpool_session* session) {
  return session->session->slabs_asked_back();
}
uint64_t kvpool_asked_back_within_ms(const kvpool_session* session) {
  const auto within = session->session->asked_back_within();
  return within.has_value() ? static_cast<uint64_t>(within->count()) : UINT64_MAX;
}
int kvpool_under_pressure(const kvpool_session* session) { return session->session->under_pressure(); }
int kvpool_draining(const kvpool_session* session) { return session->session->draining(); }
uint64_t kvpool_base(const kvpool_session* session) { return session->session->base(); }
void* kvpool_data(const kvpool_session* session, kvpool_block block) {
  return session->session->data(BlockRef::Unpack(block));
}
int kvpool_device_uuid(const kvpool_session* session, uint8_t uuid[KVPOOL_DEVICE_UUID_BYTES]) {
  const std::string bytes = session->session->device_uuid();
  std::memcpy(uuid, bytes.data(), std::min<size_t>(bytes.size(), KVPOOL_DEVICE_UUID_BYTES));
  return !bytes.empty();
}
uint64_t kvpool_block_stride_bytes(const kvpool_session* session) {
  return session->session->block_stride_bytes();
}
uint32_t kvpool_max_blocks(const kvpool_session* session) { return session->session->max_blocks(); }
kvpool_block kvpool_sink_block(const kvpool_session* session) {
  return session->session->sink_block().Pack();
}
int kvpool_finish_warmup(kvpool_session* session) { return Answer(session->session->FinishWarmup()); }
int kvpool_give_back_slabs(kvpool_session* session, uint64_t* bytes) {
  const absl::StatusOr<uint64_t> given = session->session->GiveBackSlabs();
  if (given.ok() && bytes != nullptr) *bytes = *given;
  return Answer(given.status());
}

int kvpool_read_counters(const kvpool_session* session, kvpool_counters* counters) {
  if (const absl::Status status = kvpool::CheckStructSize(counters, "kvpool_counters"); !status.ok()) {
    return Answer(status);
  }
  const size_t size = counters->struct_size;
  const kvpool::SessionCounters now = session->session->counters();
  const kvpool_counters all = {.struct_size = size,
                               .batches = now.batches,
                               .operations = now.operations,
                               .blocks = now.blocks,
                               .leased = now.leased,
                               .refills = now.refills,
                               .refused = now.refused,
                               .reconnects = now.reconnects};
  std::memset(counters, 0, size);  // Counters of a newer caller, which this library does not have, are 0.
  std::memcpy(counters, &all, std::min(size, sizeof(all)));
  return Answer(absl::OkStatus());
}

uint64_t kvpool_begin_step(kvpool_session* session) { return session->session->BeginStep(); }
void kvpool_begin_step_number(kvpool_session* session, uint64_t step) { session->session->BeginStep(step); }
uint64_t kvpool_current_step(const kvpool_session* session) { return session->session->current_step(); }
uint64_t kvpool_passed_step(const kvpool_session* session) { return session->session->passed_step(); }
void kvpool_complete_step(kvpool_session* session, uint64_t step) { session->session->CompleteStep(step); }

int kvpool_complete_step_on_stream(kvpool_session* session, uint64_t step, void* cuda_stream) {
  return Answer(session->session->CompleteStepOnStream(step, cuda_stream));
}

uint32_t kvpool_free_blocks(const kvpool_session* session) { return session->session->free_blocks(); }

int kvpool_lease(kvpool_session* session, kvpool_block* blocks, size_t count) {
  return LeaseInto(session, blocks, count,
                   [&](absl::Span<BlockRef> refs) { return session->session->LeaseRefs(refs); });
}

int kvpool_lease_within(kvpool_session* session, kvpool_block* blocks, size_t count, uint32_t timeout_ms) {
  return LeaseInto(session, blocks, count, [&](absl::Span<BlockRef> refs) {
    return session->session->LeaseRefsWithin(refs, In(timeout_ms));
  });
}

void kvpool_release(kvpool_session* session, const kvpool_block* blocks, size_t count, uint64_t after) {
  const auto refs = Refs(blocks, count);
  if (refs.ok()) session->session->Release(*refs, after);
}

int kvpool_release_with_hint(kvpool_session* session, const kvpool_block* blocks, size_t count,
                             uint64_t after, uint32_t reuse, uint32_t category) {
  const int named = reuse > INT32_MAX ? -1 : static_cast<int>(reuse);
  return WithRefs(blocks, count, [&](absl::Span<const BlockRef> refs) {
    return session->session->ReleaseWithHint(
        refs, {.reuse = static_cast<kvpool::v1::Reuse>(named), .category = category}, after);
  });
}

int kvpool_hash_tokens(const kvpool_session* session, const void* salt, size_t salt_bytes,
                       const uint32_t* tokens, size_t count, uint32_t tokens_per_block, uint8_t* keys) {
  const kvpool_hash_options options = {
      .struct_size = sizeof(options), .salt = salt, .salt_bytes = salt_bytes};
  return kvpool_hash_tokens_with(session, &options, tokens, count, tokens_per_block, keys);
}

int kvpool_hash_tokens_with(const kvpool_session* session, const kvpool_hash_options* options,
                            const uint32_t* tokens, size_t count, uint32_t tokens_per_block, uint8_t* keys) {
  const auto read = kvpool::ReadStruct(options, "kvpool_hash_options");
  if (!read.ok()) return Answer(read.status());
  if (tokens_per_block == 0) return Invalid("tokens_per_block is 0");
  if (read->salt == nullptr && read->salt_bytes > 0) {
    return Invalid(absl::StrCat("options.salt is NULL; salt_bytes is ", read->salt_bytes));
  }
  const kvpool::PrefixHasher hasher(session->session->hash_seed(),
                                    {static_cast<const char*>(read->salt), read->salt_bytes},
                                    read->salt_from);
  const std::vector<kvpool::PrefixKey> chain = hasher.Chain({tokens, count}, tokens_per_block);
  if (!chain.empty()) std::memcpy(keys, chain.data(), chain.size() * sizeof(kvpool::PrefixKey));
  return Answer(absl::OkStatus());
}

int kvpool_match_start(kvpool_session* session, const kvpool_group_keys* groups, size_t group_count,
                       kvpool_match** match) {
  const kvpool_match_options options = {.struct_size = sizeof(options)};
  return kvpool_match_start_with(session, groups, group_count, &options, match);
}

int kvpool_match_start_with(kvpool_session* session, const kvpool_group_keys* groups, size_t group_count,
                            const kvpool_match_options* options, kvpool_match** match) {
  const auto read = kvpool::ReadStruct(options, "kvpool_match_options");
  if (!read.ok()) return Answer(read.status());
  std::vector<kvpool::GroupKeys> asked;
  for (size_t i = 0; i < group_count; ++i) {
    const uint32_t key_bytes = groups[i].key_bytes == 0 ? KVPOOL_KEY_BYTES : groups[i].key_bytes;
    asked.push_back({.group = groups[i].group,
                     .keys = {static_cast<const char*>(groups[i].keys), groups[i].key_count * key_bytes},
                     .key_bytes = key_bytes});
  }
  auto pending = session->session->Match(asked, {.wait_ms = read->wait_ms, .prefetch = read->prefetch != 0});
  if (!pending.ok()) return Answer(pending.status());
  *match = new kvpool_match{std::move(*pending), std::nullopt};
  return Answer(absl::OkStatus());
}

int kvpool_match_ready(const kvpool_match* match) { return match->hit.has_value() || match->pending.Ready(); }

int kvpool_match_wait(kvpool_match* match, uint32_t timeout_ms, uint64_t* tokens, int* miss) {
  if (!match->hit.has_value()) {
    auto hit = match->pending.Wait(In(timeout_ms));
    if (!hit.ok()) return Answer(hit.status());
    match->hit = std::move(*hit);
  }
  *tokens = match->hit->tokens;
  if (miss != nullptr) *miss = match->hit->miss;
  return Answer(absl::OkStatus());
}

int kvpool_match_below(const kvpool_match* match, uint64_t* below_tokens) {
  if (!match->hit.has_value()) return Answer(absl::FailedPreconditionError("kvpool_match_wait comes first"));
  *below_tokens = match->hit->below_tokens;
  return Answer(absl::OkStatus());
}

int kvpool_match_take(kvpool_match* match, size_t group_index, kvpool_block* blocks, size_t capacity,
                      size_t* count) {
  if (!match->hit.has_value()) return Answer(absl::FailedPreconditionError("kvpool_match_wait comes first"));
  if (group_index >= match->hit->groups.size()) {
    return Invalid(
        absl::StrCat("group_index is ", group_index, ", ", match->hit->groups.size(), " groups were asked"));
  }
  kvpool::Blocks& held = match->hit->groups[group_index];
  *count = held.size();
  if (blocks == nullptr) return Answer(absl::OkStatus());
  if (held.size() > capacity) {
    return Answer(absl::ResourceExhaustedError(
        absl::StrCat(held.size(), " blocks matched, there is room for ", capacity)));
  }
  Pack(held.refs(), blocks);
  held.Detach();
  return Answer(absl::OkStatus());
}

void kvpool_match_free(kvpool_match* match) { delete match; }

int kvpool_seal_start(kvpool_session* session, const kvpool_seal_arguments* arguments, kvpool_seal** seal) {
  const auto read = kvpool::ReadStruct(arguments, "kvpool_seal_arguments");
  if (!read.ok()) return Answer(read.status());
  const uint32_t key_bytes = read->key_bytes == 0 ? KVPOOL_KEY_BYTES : read->key_bytes;
  const uint32_t per_block = std::max(1u, read->keys_per_block);
  const auto blocks = Refs(read->blocks, read->block_count);
  if (!blocks.ok()) return Answer(blocks.status());
  kvpool::SealArguments given;
  given.group = read->group;
  given.blocks = *blocks;
  given.key_bytes = key_bytes;
  given.keys_per_block = per_block;
  given.keys = {static_cast<const char*>(read->keys), blocks->size() * per_block * key_bytes};
  if (read->parent_key != nullptr) {
    given.parent_key = {static_cast<const char*>(read->parent_key), key_bytes};
  }
  given.leave_duplicates = read->leave_duplicates != 0;
  given.after = read->after;
  auto pending = session->session->Seal(given);
  if (!pending.ok()) return Answer(pending.status());
  if (seal != nullptr) *seal = new kvpool_seal{std::move(*pending), std::nullopt};
  return Answer(absl::OkStatus());
}

int kvpool_seal_ready(const kvpool_seal* seal) { return seal->outcome.has_value() || seal->pending.Ready(); }

int kvpool_seal_wait(kvpool_seal* seal, uint32_t timeout_ms, kvpool_block* canonical) {
  if (!seal->outcome.has_value()) {
    auto outcome = seal->pending.Wait(In(timeout_ms));
    if (!outcome.ok()) return Answer(outcome.status());
    seal->outcome = std::move(*outcome);
  }
  Pack(seal->outcome->canonical, canonical);
  return Answer(absl::OkStatus());
}

void kvpool_seal_keep_duplicates(kvpool_seal* seal) {
  if (seal->outcome.has_value()) seal->outcome->duplicates.Detach();
}

void kvpool_seal_free(kvpool_seal* seal) { delete seal; }

int kvpool_ref(kvpool_session* session, const kvpool_block* blocks, size_t count) {
  return WithRefs(blocks, count, [&](absl::Span<const BlockRef> refs) {
    auto held = session->session->Ref(refs);
    if (held.ok()) held->Detach();
    return held.status();
  });
}

int kvpool_touch(kvpool_session* session, const kvpool_block* blocks, size_t count) {
  return WithRefs(blocks, count,
                  [&](absl::Span<const BlockRef> refs) { return session->session->Touch(refs); });
}

int kvpool_pin(kvpool_session* session, const kvpool_block* blocks, size_t count, uint64_t ttl_ms) {
  const auto ttl = Time("ttl_ms", ttl_ms, 1);
  if (!ttl.ok()) return Answer(ttl.status());
  return WithRefs(blocks, count,
                  [&](absl::Span<const BlockRef> refs) { return session->session->Pin(refs, *ttl); });
}

int kvpool_unpin(kvpool_session* session, const kvpool_block* blocks, size_t count) {
  return WithRefs(blocks, count,
                  [&](absl::Span<const BlockRef> refs) { return session->session->Unpin(refs); });
}

int kvpool_set_retention(kvpool_session* session, const kvpool_block* blocks, size_t count, uint32_t priority,
                         uint64_t ttl_ms) {
  return kvpool_set_retention_decaying(session, blocks, count, priority, ttl_ms, 0);
}

int kvpool_set_retention_decaying(kvpool_session* session, const kvpool_block* blocks, size_t count,
                                  uint32_t priority, uint64_t ttl_ms, uint64_t half_life_ms) {
  const auto ttl = Time("ttl_ms", ttl_ms, 1), half_life = Time("half_life_ms", half_life_ms, 0);
  if (!ttl.ok() || !half_life.ok()) return Answer(ttl.ok() ? half_life.status() : ttl.status());
  return WithRefs(blocks, count, [&](absl::Span<const BlockRef> refs) {
    return session->session->SetRetention(refs, priority, *ttl, *half_life);
  });
}

int kvpool_report_prefill(kvpool_session* session, uint64_t tokens, uint64_t tokens_before,
                          uint64_t microseconds) {
  const std::chrono::microseconds time(std::min<uint64_t>(microseconds, INT64_MAX));
  return Answer(session->session->ReportPrefill(tokens, tokens_before, time));
}

int kvpool_take_refusal(kvpool_session* session, char* text, size_t capacity) {
  for (kvpool::Refusal& refusal : session->session->TakeRefusals()) {
    session->refusals.push_back(std::move(refusal));
    if (session->refusals.size() > kKeptRefusals) session->refusals.pop_front();
  }
  if (session->refusals.empty()) return Answer(absl::NotFoundError("nothing was refused"));
  const kvpool::Refusal& refusal = session->refusals.front();
  const std::string line =
      absl::StrCat(refusal.verb, " of ", refusal.blocks, " blocks: ", std::string(refusal.status.message()));
  if (capacity > 0) {
    const size_t bytes = std::min(capacity - 1, line.size());
    line.copy(text, bytes);
    text[bytes] = '\0';
  }
  session->refusals.pop_front();
  return Answer(absl::OkStatus());
}

int kvpool_flush(kvpool_session* session, uint32_t timeout_ms) {
  return Answer(session->session->Flush(In(timeout_ms)));
}
