#include "server/space/verbs.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "server/events/event_log.h"
#include "server/pool/match_search.h"
#include "server/replacement/policy.h"
#include "server/space/block_info.h"
#include "server/space/long_match.h"

namespace kvpool {
namespace {

// Refusals beyond these get a code and no text, so that an answer stays below gRPC's default limit of 4 MiB
// even if each of 65,536 blocks is refused.
constexpr int kExplainedRefusals = 64;
// Likewise of all operations of one batch.
constexpr uint32_t kExplainedOfBatch = 4096;
// What is brought up for a request that is queued has so long to come.
constexpr uint64_t kPrefetchMs = 10000;
// Of an operation that is prefetched ahead, so many blocks are.
constexpr int kPrefetchedBlocks = 4;
// One match in this many, a power of two, looks up when a block of it was last used.
constexpr uint32_t kReuseSample = 8;

int Code(absl::StatusCode code) { return static_cast<int>(code); }

absl::StatusCode CodeOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kDone:
    case Verdict::kDuplicate:
      return absl::StatusCode::kOk;
    case Verdict::kUnknownBlock:
      return absl::StatusCode::kNotFound;
    case Verdict::kStale:
    case Verdict::kNotHeld:
    case Verdict::kWrongState:
      return absl::StatusCode::kFailedPrecondition;
    case Verdict::kTooManyHolds:
    case Verdict::kOverPinBudget:
    case Verdict::kOverCredit:
    case Verdict::kOverCap:
    case Verdict::kTooFar:
      return absl::StatusCode::kResourceExhausted;
    case Verdict::kUnmapped:
    case Verdict::kDoubted:
      return absl::StatusCode::kUnavailable;
  }
  return absl::StatusCode::kInternal;
}

v1::Shortfall WireShortfall(Shortfall shortfall) {
  switch (shortfall) {
    case Shortfall::kNone:
      return v1::SHORTFALL_NONE;
    case Shortfall::kPressure:
      return v1::SHORTFALL_PRESSURE;
    case Shortfall::kCredit:
      return v1::SHORTFALL_CREDIT;
    case Shortfall::kCap:
      return v1::SHORTFALL_CAP;
    case Shortfall::kReclaiming:
      return v1::SHORTFALL_RECLAIMING;
  }
  return v1::SHORTFALL_NONE;
}

// REQUIRES: `reuse` is a value of the enum.
Reuse HintOf(v1::Reuse reuse) {
  static_assert(static_cast<int>(Reuse::kExpected) == v1::REUSE_EXPECTED &&
                static_cast<int>(Reuse::kUnlikely) == v1::REUSE_UNLIKELY &&
                static_cast<int>(Reuse::kNever) == v1::REUSE_NEVER && v1::Reuse_MAX == v1::REUSE_NEVER);
  return static_cast<Reuse>(reuse);
}

// During warm-up engines write dummy K and V into scratch, which is mapped where blocks will be: a block that
// they lease or match now is not what they would touch.
bool RefuseWarmingUp(const Session& session, const char* verb, v1::OperationResult* result) {
  const uint32_t waiting = session.warming_up();
  if (waiting == 0) return false;
  result->set_code(Code(absl::StatusCode::kFailedPrecondition));
  result->set_message(absl::StrCat(verb, " during warm-up: ", waiting, " of ", session.terms.ranks,
                                   " ranks have not sent WarmupDone"));
  return true;
}

}  // namespace

// A verb that works from the tail of a sequence to its head does so part by part, too.
BlockVerbs::Part BlockVerbs::PartOf(const v1::Operation& operation, size_t blocks, size_t done) {
  if (blocks == 0) return {};
  const size_t size = std::min(blocks - done, Turn::kNames);
  if (operation.has_release() || operation.has_touch() || operation.has_unpin()) {
    return {.begin = blocks - done - size, .end = blocks - done};
  }
  return {.begin = done, .end = done + size};
}

std::optional<size_t> BlockVerbs::Apply(Turn& turn, Session* session, const v1::Operation& operation,
                                        size_t done, v1::OperationResult* result) {
  const Holder holder = session->holder;
  const TimeMs now = turn.now;
  const Refs& blocks = BlocksOf(operation);
  const Part part = PartOf(operation, blocks.size(), done);
  if (part.size() > 0) Unpack(*session, blocks, part);
  turn.Worked(part.size());
  switch (operation.verb_case()) {
    case v1::Operation::kLease: {
      const bool more = Lease(session, operation.lease(), now, result);
      turn.Worked(refs_.size());
      return more ? std::optional<size_t>(result->lease().blocks_size()) : std::nullopt;
    }
    case v1::Operation::kMatch:
      // Where it ended the session is looked at before anything else is done.
      return Match(turn, session, operation.match(), result) ? std::nullopt : std::optional<size_t>(done);
    case v1::Operation::kSeal:
      Seal(session, operation.seal(), part, now, result->mutable_seal());
      break;
    case v1::Operation::kRelease: {
      const UseHint hint = {.reuse = HintOf(operation.release().reuse()),
                            .category = static_cast<uint8_t>(operation.release().category())};
      state_.pool.Release(holder, now, hint, refs_, absl::MakeSpan(verdicts_));
      if (event_log_ != nullptr && hint.says_something()) LogHint(*session, now, hint);
      Refusals* const refused = result->mutable_release()->mutable_refused();
      const int of_others = refused->size();
      Refuse(session, blocks, part.begin, refused);
      // Parts come from the tail to the head. Each is turned round, and in the end the whole: a swap of pointers for
      // each, where sorting would take a hold of the mutex as long as that of many parts.
      std::reverse(refused->pointer_begin() + of_others, refused->pointer_end());
      if (part.begin == 0) std::reverse(refused->pointer_begin(), refused->pointer_end());
      break;
    }
    case v1::Operation::kRef:
      state_.pool.Ref(holder, refs_, absl::MakeSpan(verdicts_));
      Refuse(session, blocks, part.begin, result->mutable_ref()->mutable_refused());
      break;
    case v1::Operation::kTouch:
      result->mutable_touch()->set_touched(result->touch().touched() + state_.pool.Touch(now, refs_));
      break;
    case v1::Operation::kPin:
      state_.pool.Pin(now, now + operation.pin().ttl_ms(), refs_, absl::MakeSpan(verdicts_),
                      session->terms.max_pinned_blocks);
      Refuse(session, blocks, part.begin, result->mutable_pin()->mutable_refused());
      break;
    case v1::Operation::kUnpin:
      result->mutable_unpin()->set_unpinned(result->unpin().unpinned() + state_.pool.Unpin(refs_));
      break;
    case v1::Operation::kSetRetention: {
      const v1::SetRetention& retention = operation.set_retention();
      state_.pool.SetRetention(now,
                               {.priority = static_cast<uint8_t>(retention.priority()),
                                .until = now + retention.ttl_ms(),
                                .half_life_ms = retention.half_life_ms()},
                               refs_, absl::MakeSpan(verdicts_), session->terms.max_pinned_blocks);
      Refuse(session, blocks, part.begin, result->mutable_set_retention()->mutable_refused());
      break;
    }
    case v1::Operation::kFence:
    case v1::Operation::kWarmupDone:
    case v1::Operation::kCloseSession:
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
    case v1::Operation::kScore:
    case v1::Operation::kSelect:
    case v1::Operation::kPrune:
    case v1::Operation::kCompact:
    case v1::Operation::kPlanBudgets:
    case v1::Operation::kPutEpisode:
    case v1::Operation::kChooseEpisode:
    case v1::Operation::VERB_NOT_SET:
      KVPOOL_CHECK(false, "verb %d does not act on blocks", operation.verb_case());
  }
  // A few names may have long chains in front of them. The names themselves are counted above.
  const size_t visited = state_.pool.steps();
  turn.Worked(visited - std::min<size_t>(visited, part.size()));
  done += part.size();
  return done < static_cast<size_t>(blocks.size()) ? std::optional<size_t>(done) : std::nullopt;
}

void BlockVerbs::Prefetch(const Session& session, absl::Span<const v1::Operation* const> next) {
  next_refs_.clear();
  next_keys_.clear();
  const auto add_key = [this](const std::string& keys, uint32_t key_bytes, uint32_t group) {
    // Shorter keys would have to be digested.
    if (key_bytes != sizeof(BlockKey::bytes) || keys.size() < key_bytes || group >= kMaxGroups) return;
    next_keys_.push_back(BlockKey::From(std::string_view(keys).substr(0, key_bytes), group));
  };
  for (const v1::Operation* const operation : next) {
    const Refs& blocks = BlocksOf(*operation);
    for (int i = 0; i < std::min(blocks.size(), kPrefetchedBlocks); ++i) {
      next_refs_.push_back(BlockRef::Unpack(blocks.Get(i)));
    }
    if (operation->has_seal()) {
      add_key(operation->seal().keys(), operation->seal().key_bytes(), operation->seal().group());
    } else if (operation->has_match() && !operation->match().groups().empty()) {
      const v1::GroupKeys& group = operation->match().groups(0);
      add_key(group.keys(), group.key_bytes(), group.group());
    }
  }
  state_.pool.Prefetch(session.holder, next_refs_, next_keys_);
}

std::optional<size_t> BlockVerbs::ReleaseLate(Session* session, const v1::Release& release, uint64_t due,
                                              size_t from, v1::OperationResult* result) {
  const auto all = static_cast<size_t>(release.blocks_size());
  const size_t end = std::min(all, from + Turn::kNames);
  Unpack(*session, release.blocks(), {.begin = from, .end = end});
  state_.pool.CheckHeld(session->holder, std::nullopt, refs_, absl::MakeSpan(verdicts_));
  size_t held = 0;
  for (size_t i = 0; i < refs_.size(); ++i) {
    // A held block is sealed in a group that is not asked about here: that too may be released.
    if (verdicts_[i] == Verdict::kWrongState) verdicts_[i] = Verdict::kDone;
    if (verdicts_[i] == Verdict::kDone) refs_[held++] = refs_[i];
  }
  session->parked.ReleaseLate(due, release, absl::MakeConstSpan(refs_).first(held));
  Refuse(session, release.blocks(), from, result->mutable_release()->mutable_refused());
  return end < all ? std::optional(end) : std::nullopt;
}

bool BlockVerbs::Lease(Session* session, const v1::Lease& lease, TimeMs now, v1::OperationResult* result) {
  refs_.clear();
  if (RefuseWarmingUp(*session, "lease", result)) return false;
  v1::LeaseResult* answer = result->mutable_lease();
  if (answer->shortfall() != v1::SHORTFALL_NONE) return GiveBack(session, now, answer);
  v1::Shortfall shortfall = v1::SHORTFALL_GROWING;
  if (session->ready) {
    // All parts together have to be the least that would do; the first looks whether they can be.
    const auto before = static_cast<uint32_t>(answer->blocks_size());
    const SpaceLease leased =
        state_.growth.Lease(session->holder, now, lease.count() - before, before == 0 ? lease.min() : 0,
                            &refs_, static_cast<uint32_t>(Turn::kNames));
    if (!leased.growing) shortfall = WireShortfall(leased.outcome.shortfall);
    // All of it at once: with each part that is as large the copy of what is there would be as much work.
    answer->mutable_blocks()->Reserve(
        static_cast<int>(leased.outcome.more ? lease.count() : before + refs_.size()));
    for (const BlockRef ref : refs_) answer->mutable_blocks()->AddAlreadyReserved(ref.Pack());
    if (leased.outcome.more) return true;
  }
  // The session may have ceased to be ready between two parts.
  if (session->ready || !answer->blocks().empty()) answer->set_sink_block(session->sink.Pack());
  if (session->holder != kNobody) answer->set_free_blocks(state_.pool.guaranteed_free(session->holder));
  answer->set_shortfall(shortfall);
  if (shortfall == v1::SHORTFALL_PRESSURE || shortfall == v1::SHORTFALL_CREDIT) {
    state_.pressure.OnShortLease();
  }
  ++state_.counters.shortfalls[shortfall];
  // Others took the rest of what would do.
  return static_cast<uint32_t>(answer->blocks_size()) < lease.min() && !answer->blocks().empty();
}

bool BlockVerbs::GiveBack(Session* session, TimeMs now, v1::LeaseResult* answer) {
  const auto all = static_cast<size_t>(answer->blocks_size());
  const size_t left = all - std::min(all, Turn::kNames);
  Unpack(*session, answer->blocks(), {.begin = left, .end = all});
  state_.pool.Release(session->holder, now, refs_, absl::MakeSpan(verdicts_));
  answer->mutable_blocks()->Truncate(static_cast<int>(left));
  answer->set_free_blocks(state_.pool.guaranteed_free(session->holder));
  return left > 0;
}

void BlockVerbs::AppendKeys(std::string_view keys, uint32_t key_bytes, uint32_t group) {
  for (size_t at = 0; at < keys.size(); at += key_bytes) {
    keys_.push_back(BlockKey::From(keys.substr(at, key_bytes), group));
  }
}

void BlockVerbs::Seal(Session* session, const v1::Seal& seal, const Part& part, TimeMs now,
                      v1::SealResult* result) {
  const size_t keys_per_block = seal.keys_per_block() == 0 ? 1 : seal.keys_per_block();
  const size_t bytes_per_block = keys_per_block * seal.key_bytes();
  const std::string_view keys = seal.keys();
  keys_.clear();
  AppendKeys(keys.substr(part.begin * bytes_per_block, part.size() * bytes_per_block), seal.key_bytes(),
             seal.group());
  entries_.clear();
  for (size_t i = 0; i < refs_.size(); ++i) {
    entries_.push_back({.block = refs_[i],
                        .keys = absl::MakeConstSpan(&keys_[i * keys_per_block], keys_per_block),
                        .leave_duplicate = seal.leave_duplicates()});
  }
  outcomes_.assign(refs_.size(), {});
  // The chain's key of the block in front: the last of those in its entry.
  std::string_view front_key = seal.parent_key();
  if (part.begin > 0)
    front_key = keys.substr(part.begin * bytes_per_block - seal.key_bytes(), seal.key_bytes());
  BlockKey parent;
  if (!front_key.empty()) parent = BlockKey::From(front_key, seal.group());
  const BlockKey* in_front = front_key.empty() ? nullptr : &parent;
  // A session that is ready has mapped all slabs of the pool.
  const uint32_t mapped_end = session->ready ? UINT32_MAX : state_.sessions.blocks_mapped_by(*session);
  had_before_.assign(refs_.size(), false);
  for (size_t i = 0; state_.below.counts_uses() && i < refs_.size(); ++i)
    had_before_[i] = state_.pool.EvictedAgo(entries_[i].keys.back(), now).ok();
  state_.pool.Seal(session->holder, now, in_front, entries_, absl::MakeSpan(outcomes_), mapped_end);
  if (event_log_ != nullptr) LogSeal(*session, now, seal, in_front);
  result->mutable_canonical()->Reserve(seal.blocks_size());
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    const SealVerdict& outcome = outcomes_[i];
    const auto index = static_cast<uint32_t>(part.begin + i);
    result->mutable_canonical()->AddAlreadyReserved(outcome.canonical.Pack());
    if (outcome.verdict == Verdict::kUnmapped || outcome.verdict == Verdict::kDoubted) {
      RefuseForNow(session, index, entries_[i], outcome.verdict, result->mutable_refused());
    } else if (outcome.verdict == Verdict::kDone) {
      state_.sessions.SetSealer(outcome.canonical.id, *session);
      state_.checks.Sealed(outcome.canonical);
      state_.below.Sealed(outcome.canonical, entries_[i].keys.back(), had_before_[i] ? 2 : 1);
    } else if (outcome.verdict == Verdict::kDuplicate) {
      const uint64_t canonical = outcome.canonical.Pack();
      state_.below.Reused({&canonical, 1});
    } else {
      const BlockRef ref = BlockRef::Unpack(seal.blocks(static_cast<int>(index)));
      RefuseOne(session, index, ref, outcome.verdict, result->mutable_refused());
    }
  }
}

void BlockVerbs::RefuseForNow(Session* session, uint32_t index, const SealEntry& entry, Verdict verdict,
                              Refusals* refusals) {
  v1::Refusal* refusal = refusals->Add();
  refusal->set_index(index);
  refusal->set_code(Code(absl::StatusCode::kUnavailable));
  if (refusals->size() > kExplainedRefusals || session->explained == kExplainedOfBatch) return;
  ++session->explained;
  refusal->set_message(absl::StrCat(
      "the key is that of block ", Index(state_.pool.Find(entry.keys.back()).id),
      verdict == Verdict::kDoubted ? ", which is to be compared first with what was sealed: seal again later"
                                   : ", in a slab that a member of the session has not mapped yet: seal "
                                     "again when it has"));
}

bool BlockVerbs::Match(Turn& turn, Session* session, const v1::Match& match, v1::OperationResult* result) {
  if (RefuseWarmingUp(*session, "match", result)) return true;
  v1::MatchResult* answer = result->mutable_match();
  for (const v1::GroupKeys& group : match.groups()) answer->add_groups()->set_group(group.group());
  if (!session->ready) {
    answer->set_miss(v1::MISS_REASON_GROWING);
    return true;
  }
  SampleReuse(turn.now, match);
  size_t keys = 0;
  for (const v1::GroupKeys& group : match.groups()) keys += group.keys().size() / group.key_bytes();
  if (keys > Turn::kNames) {
    if (!LongMatch(&state_, event_log_, session, match).Run(turn, answer)) return false;
  } else {
    turn.Worked(keys);
    ShortMatch(turn, session, match, answer);
  }
  if (!state_.below.on()) return true;
  for (const v1::GroupHit& group : answer->groups()) {
    absl::Span<const uint64_t> left =
        state_.below.counts_uses() ? absl::MakeConstSpan(group.blocks()) : absl::Span<const uint64_t>();
    for (; !left.empty(); left.remove_prefix(std::min(left.size(), Turn::kNames))) {
      const auto part = left.first(std::min(left.size(), Turn::kNames));
      state_.below.Reused(part);
      if (part.size() == left.size()) continue;
      turn.Worked(part.size());
      turn.Breathe();
      if (session->ended) return false;
    }
  }
  if (answer->miss() != v1::MISS_REASON_NONE) ReportBelow(turn, *session, match, keys, answer);
  return true;
}

void BlockVerbs::ReportBelow(Turn& turn, const Session& session, const v1::Match& match, size_t keys,
                             v1::MatchResult* answer) {
  turn.Worked(Below::Looked(keys));
  Below::Found found = state_.below.Report(match, answer);
  if (!match.prefetch()) return;
  turn.Worked(Below::Looked(keys));
  found = state_.below.Look(match, answer->tokens(), Below::Unknown::kTried);
  if (found.blocks.empty() || !state_.below.IsWorth(found, answer->tokens(), kPrefetchMs)) return;
  const auto promotion = state_.below.Begin(session.terms.id, turn.now, kPrefetchMs, std::move(found));
  if (promotion != nullptr) turn.deferred.promotions.push_back(promotion);
}

std::optional<uint64_t> BlockVerbs::ResidentTokens(Turn& turn, const Session& session,
                                                   const v1::Match& match) const {
  const auto pause = [&] {
    turn.Worked(Turn::kNames);
    turn.Breathe();
    return !session.ended;
  };
  std::vector<BlockKey> keys;
  std::vector<size_t> ends;
  for (const v1::GroupKeys& group : match.groups()) {
    const std::string_view bytes = group.keys();
    for (size_t at = 0; at < bytes.size(); at += group.key_bytes()) {
      keys.push_back(BlockKey::From(bytes.substr(at, group.key_bytes()), group.group()));
      if (keys.size() % Turn::kNames == 0 && !pause()) return std::nullopt;
    }
    ends.push_back(keys.size());
  }
  std::vector<GroupQuery> queries;
  size_t begin = 0;
  for (int i = 0; i < match.groups_size(); ++i) {
    const uint32_t group = match.groups(i).group();
    const size_t end = ends[static_cast<size_t>(i)];
    queries.push_back({group, absl::MakeConstSpan(keys).subspan(begin, end - begin),
                       state_.facts.layout.groups(static_cast<int>(group)).tokens_per_block()});
    begin = end;
  }
  MatchSearch search(state_.pool, queries);
  while (!search.Look(Turn::kNames)) {
    if (!pause()) return std::nullopt;
  }
  return search.steps() * search.step_tokens();
}

void BlockVerbs::ShortMatch(Turn& turn, Session* session, const v1::Match& match, v1::MatchResult* answer) {
  keys_.clear();
  for (const v1::GroupKeys& group : match.groups())
    AppendKeys(group.keys(), group.key_bytes(), group.group());
  queries_.clear();
  size_t first = 0;
  for (const v1::GroupKeys& group : match.groups()) {
    const size_t count = group.keys().size() / group.key_bytes();
    const uint32_t tokens = state_.facts.layout.groups(static_cast<int>(group.group())).tokens_per_block();
    queries_.push_back({group.group(), absl::MakeConstSpan(keys_).subspan(first, count), tokens});
    first += count;
  }
  state_.pool.Match(session->holder, turn.now, queries_, &match_);
  turn.Worked(state_.pool.steps());
  if (match_.miss == MissReason::kCredit) state_.growth.CountPromises();
  if (event_log_ != nullptr && !queries_.empty()) {
    event_words_.clear();
    for (const BlockKey& key : queries_[0].keys) event_words_.push_back(event_log_->Hash(key));
    LogMatch(event_log_, state_.facts.id, session->terms.id, turn.now, queries_[0], event_words_);
  }
  answer->set_tokens(match_.tokens);
  answer->set_miss(WireReason(match_.miss));
  for (size_t i = 0; i < queries_.size(); ++i) {
    AppendRefs(match_.blocks[i], answer->mutable_groups(static_cast<int>(i))->mutable_blocks());
  }
}

void BlockVerbs::LogHint(const Session& session, TimeMs now, const UseHint& hint) {
  EventHeader header = {.kind = EventKind::kHint,
                        .reuse = static_cast<uint8_t>(hint.reuse),
                        .category = hint.category,
                        .time_ms = now,
                        .space = state_.facts.id,
                        .session = session.terms.id};
  const auto add = [&] {
    header.words = static_cast<uint32_t>(event_words_.size());
    if (header.words > 0) event_log_->Add(header, event_words_);
    event_words_.clear();
  };
  event_words_.clear();
  for (size_t i = 0; i < refs_.size(); ++i) {
    if (verdicts_[i] != Verdict::kDone) continue;
    const absl::StatusOr<BlockView> view = state_.pool.View(refs_[i].id, now);
    const bool resident = view->state == BlockState::kSealed || view->state == BlockState::kCached;
    if (view->ref != refs_[i] || !resident) continue;
    if (view->key.group != header.group) add();
    header.group = view->key.group;
    event_words_.push_back(event_log_->Hash(view->key));
  }
  add();
}

// Records the chain as far as it is sealed now, in this session's blocks or others'.
void BlockVerbs::LogSeal(const Session& session, TimeMs now, const v1::Seal& seal, const BlockKey* in_front) {
  event_words_.assign(1, in_front == nullptr ? 0 : event_log_->Hash(*in_front));
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (outcomes_[i].canonical == kNullRef && outcomes_[i].verdict != Verdict::kDuplicate) break;
    event_words_.push_back(event_log_->Hash(entries_[i].keys.back()));
  }
  if (event_words_.size() == 1) return;
  event_log_->Add(
      {.kind = EventKind::kSeal,
       .group = static_cast<uint8_t>(seal.group()),
       .words = static_cast<uint32_t>(event_words_.size()),
       .time_ms = now,
       .space = state_.facts.id,
       .session = session.terms.id,
       .tokens_per_block = state_.facts.layout.groups(static_cast<int>(seal.group())).tokens_per_block()},
      event_words_);
}

void BlockVerbs::SampleReuse(TimeMs now, const v1::Match& match) {
  if (++matches_ % kReuseSample != 0 || match.groups_size() == 0) return;
  // Any of the keys may be sampled: taking the first would measure system prompts alone.
  const uint32_t sample = matches_ / kReuseSample, groups = static_cast<uint32_t>(match.groups_size());
  const v1::GroupKeys& group = match.groups(static_cast<int>(sample % groups));
  const size_t keys = group.keys().size() / group.key_bytes();
  if (keys == 0) return;
  const std::string_view key =
      std::string_view(group.keys()).substr(sample / groups % keys * group.key_bytes(), group.key_bytes());
  const BlockRef block = state_.pool.Find(BlockKey::From(key, group.group()));
  if (block == kNullRef) return;
  const absl::StatusOr<BlockView> view = state_.pool.View(block.id, now);
  if (view.ok()) state_.reuse_gap.Observe(view->idle_ms / 1000.0);
}

void BlockVerbs::Unpack(const Session& session, const Refs& wire, const Part& part) {
  const uint64_t sink = session.sink.Pack();
  refs_.clear();
  for (const uint64_t ref : absl::MakeConstSpan(wire).subspan(part.begin, part.size())) {
    refs_.push_back(ref == sink ? kNullRef : BlockRef::Unpack(ref));
  }
  verdicts_.assign(refs_.size(), Verdict::kDone);
}

void BlockVerbs::Refuse(Session* session, const Refs& wire, size_t first, Refusals* refusals) {
  for (size_t i = 0; i < verdicts_.size(); ++i) {
    if (verdicts_[i] == Verdict::kDone) continue;
    const BlockRef ref = BlockRef::Unpack(wire.Get(static_cast<int>(first + i)));
    RefuseOne(session, static_cast<uint32_t>(first + i), ref, verdicts_[i], refusals);
  }
}

void BlockVerbs::RefuseOne(Session* session, uint32_t index, BlockRef ref, Verdict verdict,
                           Refusals* refusals) {
  v1::Refusal* refusal = refusals->Add();
  refusal->set_index(index);
  const bool is_sink = ref == session->sink && ref != kNullRef;
  refusal->set_code(Code(is_sink ? absl::StatusCode::kFailedPrecondition : CodeOf(verdict)));
  // Those in front are explained too where the parts at the tail come first.
  if (refusals->size() > kExplainedRefusals && index >= kExplainedRefusals) return;
  if (session->explained == kExplainedOfBatch) return;
  ++session->explained;
  refusal->set_message(std::string(WhyRefused(*session, ref, verdict).message()));
}

absl::Status BlockVerbs::WhyRefused(const Session& session, BlockRef ref, Verdict verdict) const {
  if (ref == session.sink && ref != kNullRef) {
    return absl::FailedPreconditionError(
        absl::StrCat("block ", Index(ref.id), " is the sink of session ", session.terms.id));
  }
  return absl::Status(CodeOf(verdict), Explain(session, ref, verdict));
}

std::string BlockVerbs::Explain(const Session& session, BlockRef ref, Verdict verdict) const {
  const BlockPool& pool = state_.pool;
  const std::string block = absl::StrCat("block ", Index(ref.id));
  if (ref.id == kNullBlock) return absl::StrCat(block, " is the null block");
  const absl::StatusOr<BlockView> view = pool.View(ref.id, /*now=*/0);  // Its ages are not looked at.
  if (!view.ok()) {
    const uint32_t last = pool.end_block() - 1;
    return Index(ref.id) > last ? absl::StrCat(block, " does not exist: ids end at ", last)
                                : absl::StrCat(block, " does not exist: its memory was given back");
  }
  switch (verdict) {
    case Verdict::kDone:
    case Verdict::kDuplicate:
    case Verdict::kUnknownBlock:
    case Verdict::kUnmapped:
    case Verdict::kDoubted:
      return block;
    case Verdict::kStale:
      if (view->ref.generation == ref.generation) {
        return absl::StrCat(block, " generation ", ref.generation, " is stale: now ", StateName(view->state));
      }
      return absl::StrCat(block, " generation ", ref.generation, " is stale: now at generation ",
                          view->ref.generation);
    case Verdict::kNotHeld:
      return absl::StrCat(block, " is ", StateName(view->state), ", and not held by session ",
                          session.terms.id);
    case Verdict::kWrongState:
      return absl::StrCat(block, " is ", StateName(view->state));
    case Verdict::kTooManyHolds:
      return absl::StrCat(block, " is held ", pool.holds(session.holder, ref.id), " times by session ",
                          session.terms.id, ", the limit");
    case Verdict::kOverPinBudget:
      return absl::StrCat(block, " is beyond the pin budget: ", pool.pinned(), " of ",
                          std::min(pool.pin_budget(), session.terms.max_pinned_blocks), " blocks are pinned");
    case Verdict::kOverCredit:
      return absl::StrCat(block, " is promised to other sessions: ", pool.available(), " available, ",
                          pool.promised(), " promised");
    case Verdict::kTooFar:
      return absl::StrCat(block,
                          " is behind more blocks than one call visits: begin with those nearer to the root");
    case Verdict::kOverCap: {
      const BlockPool::Holdings holdings = pool.holdings(session.holder);
      return absl::StrCat(block, " is beyond max_blocks of session ", session.terms.id, ": ",
                          holdings.leased + holdings.referenced, " of ", holdings.limits.max_blocks, " held");
    }
  }
  return block;
}

}  // namespace kvpool
