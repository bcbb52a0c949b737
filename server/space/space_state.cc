#include "server/space/space_state.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/pool/hand_over.h"
#include "server/replacement/policy.h"
#include "server/scoring/device_operation.h"

namespace kvpool {
namespace {

// Sessions are asked for unused leases at most this often.
constexpr uint64_t kAskAgainMs = 100;
// A member that owes the daemon something, or sits on blocks, and has not called for this long is stale.
constexpr uint64_t kStaleOwingMs = 5000;
constexpr uint64_t kStaleIdleMs = 60000;
// A space grows when less than this part of it is spare. A larger one is used up faster, by more engines.
constexpr uint32_t kAheadShare = 32;
// So many are reclaimed by the thread that used them up, after its answer: 5 us, as long as it takes to wake another.
constexpr uint32_t kReclaimHere = 64;

}  // namespace

SpaceState::SpaceState(const SpaceFacts* facts, const PoolOptions& options,
                       std::unique_ptr<ReplacementPolicy> policy, uint64_t now)
    : facts(*facts),
      pool(options, std::move(policy)),
      reclaim(kCallBounds),
      lifetime(kLifeBounds),
      idle_before_evict(kLifeBounds),
      reuse_gap(kLifeBounds),
      decision_time(kCallBounds),
      last_used_ms(now) {
  ahead_blocks_ = AheadBlocks();
}

// -------------------------------------------------------------------------------------------------- policy

std::unique_ptr<ReplacementPolicy> SpaceState::SetPolicy(std::unique_ptr<ReplacementPolicy> policy,
                                                         uint64_t now) {
  evicted_before = evicted_by_policy();
  evicted_at_switch = pool.counters().evicted;
  return pool.SetPolicy(now, std::move(policy));
}

std::unique_ptr<ReplacementPolicy> SpaceState::FinishHandOver(BlockPool::HandOver* hand_over,
                                                              uint32_t events) {
  std::map<std::string, EvictedBlocks> before = evicted_by_policy();
  std::unique_ptr<ReplacementPolicy> old = hand_over->Finish(&pool, events);
  if (old == nullptr) return nullptr;
  evicted_before = std::move(before);
  evicted_at_switch = pool.counters().evicted;
  return old;
}

std::map<std::string, EvictedBlocks> SpaceState::evicted_by_policy() const {
  std::map<std::string, EvictedBlocks> by_policy = evicted_before;
  EvictedBlocks& under_this = by_policy[std::string(pool.policy().name())];
  for (int i = 0; i < kEvictReasons; ++i) under_this[i] += pool.counters().evicted[i] - evicted_at_switch[i];
  return by_policy;
}

// ------------------------------------------------------------------------------------------------ sessions

absl::Status SpaceState::Enter(Session* session, uint64_t now, Deferred* deferred) {
  absl::StatusOr<Holder> holder = pool.AddSession(session->limits());
  if (holder.ok()) {
    session->holder = *holder;
  } else {
    // The promise may rest on slabs that were made and are not in the pool yet, as far as no other pending
    // session counts on them.
    uint64_t coming = coming_blocks();
    for (const Session* other : pending_) coming -= std::min<uint64_t>(coming, other->limits().guaranteed);
    if (coming < session->limits().guaranteed) return holder.status();
    pending_.push_back(session);
  }
  sessions.push_back(session);
  last_used_ms = now;
  // What it was promised may be cached today: that is not where it should come from.
  wanted_blocks_ = std::max(wanted_blocks_, session->limits().guaranteed);
  return absl::OkStatus();
}

void SpaceState::OnJoined(Member* member, uint64_t now, Deferred* deferred) {
  Session* session = member->session;
  if (session->ended) return;
  member->joined = true;
  member->last_call_ms = now;
  if (draining) Post(member, v1::NOTICE_KIND_DRAIN, {});
  if (pressure) Post(member, v1::NOTICE_KIND_PRESSURE, {.value = pool.available()});
  SendSlabs(session, deferred);
  UpdateReady(session, now, deferred);
}

void SpaceState::OnSlabAck(Member* member, const v1::SlabAck& ack, uint64_t now, Deferred* deferred) {
  Session* session = member->session;
  if (session->ended) return;
  member->last_call_ms = now;
  absl::Status status = member->slabs.Acknowledge(ack.slab());
  if (status.ok() && !ack.error().empty()) status = absl::AbortedError(ack.error());
  if (!status.ok()) {
    EndSession(session, EndKind::kRefusedSlab,
               absl::StrCat("session ", session->terms.id, " ended: member ", member->index, " (pid ",
                            member->identity.credentials.pid, ") could not map slab ", ack.slab(), ": ",
                            std::string(status.message())),
               nullptr, now, deferred);
    return;
  }
  growth_moved_ms_ = now;
  SendSlabs(session, deferred);
  UpdateReady(session, now, deferred);
  Grow(now, deferred);
}

void SpaceState::OnProcessDead(Member* member, uint64_t now, Deferred* deferred) {
  if (member->dead) return;
  member->dead = true;
  if (member->slabs.sent() > 0) --mapping_processes;
  last_used_ms = now;
  Session* session = member->session;
  EndSession(session, EndKind::kMemberDied,
             absl::StrCat("session ", session->terms.id, " ended: member ", member->index, " (pid ",
                          member->identity.credentials.pid, ") died"),
             member, now, deferred);
  if (session->all_dead()) Free(session, now, deferred);
}

void SpaceState::EndSession(Session* session, EndKind kind, const std::string& reason, const Member* except,
                            uint64_t now, Deferred* deferred) {
  if (session->ended) return;
  session->ended = true;
  session->ready = false;
  session->end_reason = reason;
  if (session->holder != kNobody) pool.EndSession(session->holder);
  session->episodes = {};
  std::erase(pending_, session);
  v1::OperationResult aborted;
  aborted.set_code(static_cast<int>(absl::StatusCode::kAborted));
  aborted.set_message(reason);
  while (std::optional<ParkedVerb> verb = session->parked.PopAny())
    Complete(std::move(*verb), aborted, deferred);
  for (const auto& operation : session->device_operations) {
    // It goes on, or is skipped if it has not begun; nobody hears what came of it.
    operation->abandoned.store(true, std::memory_order_release);
    Complete(session->parked.Finish(operation->id), aborted, deferred);
  }
  PostAll(session, v1::NOTICE_KIND_ENDED, {.detail = reason});
  for (const auto& member : session->members) {
    if (member.get() != except) deferred->hangups.push_back({member->identity.peer, reason});
  }
  deferred->ended.push_back({session->terms.id, kind, reason});
  Grow(now, deferred);
}

uint64_t SpaceState::Free(Session* session, uint64_t now, Deferred* deferred) {
  KVPOOL_CHECK(session->ended, "session %lu is open", session->terms.id);
  const auto it = std::find(sessions.begin(), sessions.end(), session);
  if (it == sessions.end()) return 0;  // Closed by itself before.
  if (!session->device_operations.empty()) {
    session->free_when_over = true;
    return session->holder == kNobody ? 0 : pool.holds(session->holder) - (session->sink != kNullRef ? 1 : 0);
  }
  uint64_t holds = 0;
  if (session->holder != kNobody) {
    holds = pool.FreeQuarantine(session->holder);
    if (session->sink != kNullRef) --holds;
    session->holder = kNobody;
  }
  sessions.erase(it);
  last_used_ms = now;
  deferred->gone.push_back(session->terms.id);
  UpdatePressure(now);
  return holds;
}

// --------------------------------------------------------------------------------------------------- slabs

uint32_t SpaceState::made_blocks() const {
  return slabs.empty() ? 0 : slabs.back().first_block + slabs.back().block_count;
}

uint32_t SpaceState::blocks_mapped_by(const Session& session) const {
  const uint32_t mapped = session.mapped();
  return mapped == 0 ? 0 : slabs[mapped - 1].first_block + slabs[mapped - 1].block_count;
}

void SpaceState::AddSlab(SlabRow row, uint64_t now, Deferred* deferred) {
  row.first_block = made_blocks();
  row.made_ms = now;
  slabs.push_back(std::move(row));
  growing_ = true;
  growth_moved_ms_ = now;
  for (Session* session : sessions) SendSlabs(session, deferred);
  Grow(now, deferred);
}

void SpaceState::SendSlabs(Session* session, Deferred* deferred) {
  if (session->ended) return;
  for (uint32_t in_flight = session->slabs_in_flight(); in_flight < kMaxSlabsInFlight; ++in_flight) {
    // The rank that is furthest behind: ranks advance together.
    Member* next = nullptr;
    for (Member* member : session->by_rank) {
      if (member == nullptr || !member->joined || member->slabs.sent() == slabs.size()) continue;
      if (next == nullptr || member->slabs.sent() < next->slabs.sent()) next = member;
    }
    if (next == nullptr) break;
    const uint32_t index = next->slabs.sent();
    const SlabRow& row = slabs[index];
    const uint32_t rank = next->identity.rank;
    OutgoingFrame out;
    out.session = session->shared_from_this();
    out.peer = next->identity.peer;
    out.slab = row.by_rank[rank];
    v1::Slab* slab = out.frame.mutable_slab();
    slab->set_slab(index);
    slab->set_first_block(row.first_block);
    slab->set_block_count(row.block_count);
    slab->set_bytes(row.bytes);
    slab->set_device_uuid(facts.devices[rank]->uuid_bytes());
    outbox.push_back(std::move(out));
    if (index == 0) ++mapping_processes;
    next->slabs.Send();
    deferred->send = true;
  }
}

void SpaceState::Grow(uint64_t now, Deferred* deferred) {
  while (grown < slabs.size()) {
    const SlabRow& row = slabs[grown];
    for (Session* session : sessions) {
      if (!session->ready || session->mapped() > grown) continue;
      if (now - row.made_ms < kPatienceMs) return;
      session->ready = false;  // Until it has mapped the slab after all.
    }
    // The null block is no part of the pool's capacity.
    const uint32_t blocks = grown == 0 ? row.block_count - 1 : row.block_count;
    LearnAhead();
    const absl::Status status = pool.Grow(blocks);
    KVPOOL_CHECK(status.ok(), "space %lu slab %u: %s", facts.id, grown, status.ToString().c_str());
    ++grown;
    sealer.resize(row.first_block + row.block_count);
    growth_moved_ms_ = now;
    // At least one: a watermark that rounds to nothing would never ask for anything.
    low_blocks_ = std::max<uint32_t>(1, std::ceil(facts.low_watermark * pool.capacity()));
    high_blocks_ = std::max<uint32_t>(low_blocks_ + 1, std::ceil(facts.high_watermark * pool.capacity()));
    ahead_blocks_ = AheadBlocks();
    wanted_blocks_ = 0;  // Who wants more asks again.
    EnterPending(now, deferred);
    for (Session* session : sessions) UpdateReady(session, now, deferred);
  }
  for (Session* session : sessions) {
    if (!session->ready) UpdateReady(session, now, deferred);  // It may have waited for a block for its sink.
  }
  if (!WantsSlab()) growing_ = false;
  UpdatePressure(now);
}

uint32_t SpaceState::AheadBlocks() const {
  const uint64_t slab = facts.geometry.blocks_in(facts.geometry.slab_bytes), capacity = pool.capacity();
  const uint64_t least = slab / 4, most = std::max(least, std::min(4 * slab, capacity / 4));
  const uint64_t ahead = std::clamp(std::max<uint64_t>(capacity / kAheadShare, learned_blocks_), least, most);
  return std::max(low_blocks_, static_cast<uint32_t>(std::min<uint64_t>(ahead, UINT32_MAX)));
}

void SpaceState::LearnAhead() {
  if (std::exchange(came_short_, false)) {
    learned_blocks_ = 2 * std::min(ahead_blocks_, UINT32_MAX / 2);
  } else if (spare_blocks() > ahead_blocks_ / 2) {
    learned_blocks_ /= 2;
  }
}

uint32_t SpaceState::spare_blocks() const {
  const uint32_t free = free_blocks();
  return promises_count_ ? free - std::min(free, pool.promised()) : free;
}

bool SpaceState::short_of_blocks() const {
  return uint64_t{spare_blocks()} + coming_blocks() < std::max(ahead_blocks_, wanted_blocks_);
}

bool SpaceState::GrowFor(uint32_t blocks, uint64_t now) {
  if (!may_grow_ && grown == slabs.size()) return false;
  wanted_blocks_ = std::max(wanted_blocks_, blocks);
  came_short_ = true;
  if (!std::exchange(growing_, true)) growth_moved_ms_ = now;
  return now - growth_moved_ms_ < kGrowthStallMs;
}

SpaceLease SpaceState::Lease(Holder session, uint64_t now, uint32_t count, uint32_t min,
                             std::vector<BlockRef>* out) {
  const uint32_t wanted = std::min(count, pool.cap_room(session));
  const uint32_t credit = pool.credit_room(session);
  uint32_t at_once = std::min({wanted, free_blocks(), credit});
  const uint64_t to_come = facts.geometry.max_blocks - 1 - pool.capacity();
  // Nothing is missing, or slabs can't bring what is.
  if (at_once == wanted || wanted < min || credit + to_come < min) {
    return {.outcome = pool.Lease(session, now, count, min, out)};
  }
  if (at_once < min) at_once = 0;
  if (!GrowFor(wanted - at_once, now)) return {.outcome = pool.Lease(session, now, count, min, out)};
  if (credit < wanted) CountPromises();
  SpaceLease lease{.growing = true};
  if (at_once > 0) lease.outcome = pool.Lease(session, now, at_once, at_once, out);
  return lease;
}

void SpaceState::EnterPending(uint64_t now, Deferred* deferred) {
  std::vector<Session*> waiting = std::exchange(pending_, {});
  for (Session* session : waiting) {
    absl::StatusOr<Holder> holder = pool.AddSession(session->limits());
    if (holder.ok()) {
      session->holder = *holder;
    } else {
      pending_.push_back(session);  // Its slab is a later one.
    }
  }
}

void SpaceState::UpdateReady(Session* session, uint64_t now, Deferred* deferred) {
  if (session->ended) return;
  const uint32_t mapped = std::min(session->mapped(), grown);
  if (session->announced < mapped) {
    while (session->announced < mapped) {
      const SlabRow& row = slabs[session->announced];
      for (const auto& member : session->members) {
        OutgoingFrame out;
        out.session = session->shared_from_this();
        out.peer = member->identity.peer;
        out.frame.mutable_slab_ready()->set_slab(session->announced);
        out.frame.mutable_slab_ready()->set_capacity_blocks(row.first_block + row.block_count);
        outbox.push_back(std::move(out));
      }
      ++session->announced;
    }
    deferred->send = true;
    const SlabRow& last = slabs[mapped - 1];
    PostAll(session, v1::NOTICE_KIND_CAPACITY, {.value = last.first_block + last.block_count - 1});
  }
  session->ready = session->holder != kNobody && grown > 0 && mapped == grown;
  if (session->ready && session->sink == kNullRef) {
    std::vector<BlockRef> sink;
    session->ready = !Lease(session->holder, now, 1, 1, &sink).growing;
    if (!session->ready) return;
    // Its guarantee covers it.
    KVPOOL_CHECK(sink.size() == 1, "session %lu: no block for its sink", session->terms.id);
    session->sink = sink.front();
  }
}

bool SpaceState::complete() const {
  // An IPC space is one allocation for life, whatever its size came to be.
  if (facts.kind == v1::SPACE_KIND_IPC) return !slabs.empty();
  return made_blocks() == facts.geometry.max_blocks;
}

bool SpaceState::NeedsSlab() const {
  return may_grow_ && slabs.size() - grown < kMaxSlabsInFlight && short_of_blocks();
}

void SpaceState::set_may_grow(bool may_grow) {
  may_grow_ = may_grow;
  if (!WantsSlab()) growing_ = false;
}

std::vector<SlabRow> SpaceState::TakeSlabs() {
  KVPOOL_CHECK(closed, "space %lu is open", facts.id);
  return std::exchange(slabs, {});
}

// ------------------------------------------------------------------------------------------------- notices

void SpaceState::Post(Member* member, v1::NoticeKind kind, NoticeBoard::Text text) {
  member->notices.Post(kind, std::move(text));
  Touch(member);
}

void SpaceState::Touch(Member* member) {
  if (!std::exchange(member->touched, true)) touched_.push_back(member);
}

void SpaceState::PostAll(Session* session, v1::NoticeKind kind, const NoticeBoard::Text& text) {
  for (const auto& member : session->members) Post(member.get(), kind, text);
}

void SpaceState::Complete(ParkedVerb verb, const v1::OperationResult& result, Deferred* deferred) {
  verb.member->answers.Complete(verb.sequence, verb.index, result);
  if (verb.on_stream) {
    v1::Completion& completion = verb.member->completions.emplace_back();
    completion.set_sequence(verb.sequence);
    completion.set_index(verb.index);
    *completion.mutable_result() = result;
    Touch(verb.member);
  }
  if (!verb.waiters.empty()) deferred->answers.push_back({std::move(verb.waiters), result});
}

bool SpaceState::RemoveOperation(const DeviceOperation* operation) {
  return std::erase_if(operation->session->device_operations,
                       [operation](const auto& other) { return other.get() == operation; }) > 0;
}

void SpaceState::CollectWakes(Deferred* deferred) {
  for (Member* member : touched_) {
    member->touched = false;
    if (member->listener != nullptr && member->pending()) deferred->wake.push_back(member->listener);
  }
  touched_.clear();
}

void SpaceState::AfterVerbs(uint64_t now, Deferred* deferred) {
  // Others gave back meanwhile, or it is on its way.
  if (uint64_t{spare_blocks()} + coming_blocks() >= wanted_blocks_) wanted_blocks_ = 0;
  if (!growing_ && WantsSlab()) {
    growing_ = true;
    growth_moved_ms_ = now;
  }
  if (NeedsSlab()) deferred->housekeep = true;
  if (std::exchange(lease_was_short, false) && now - asked_ms_ >= kAskAgainMs) AskForLeases(now);
  if (!may_grow_ && free_blocks() < low_blocks_) {
    // What is to be thought about is not for a thread that answers calls.
    const bool few = high_blocks_ - free_blocks() <= kReclaimHere && pool.judge() == nullptr;
    (few ? deferred->reclaim : deferred->housekeep) = true;
  }
  UpdatePressure(now);
}

void SpaceState::UpdatePressure(uint64_t now) {
  const uint32_t available = pool.available();
  if (pressure ? available < high_blocks_ : available >= low_blocks_) return;
  pressure = !pressure;
  for (Session* session : sessions) {
    if (session->ended) continue;
    PostAll(session, v1::NOTICE_KIND_PRESSURE, {.on = pressure, .value = available});
  }
  if (pressure) AskForLeases(now);
}

void SpaceState::AskForLeases(uint64_t now) {
  asked_ms_ = now;
  // What is available may all be promised: then it is not for the one who came short.
  const uint32_t missing = std::max(low_blocks_, high_blocks_ - std::min(high_blocks_, pool.available()));
  for (Session* session : sessions) {
    if (session->ended || session->holder == kNobody) continue;
    const BlockPool::Holdings holdings = pool.holdings(session->holder);
    const uint32_t guaranteed = holdings.limits.guaranteed;
    if (holdings.leased <= 1 || holdings.charged <= guaranteed) continue;
    Post(
        session->lead(), v1::NOTICE_KIND_REVOKE,
        {.value = std::min(missing, holdings.charged - guaranteed), .detail = "the space is under pressure"});
  }
}

void SpaceState::Observe(const std::vector<Eviction>& evictions) {
  for (const Eviction& eviction : evictions) {
    lifetime.Observe(eviction.lifetime_ms / 1000.0);
    idle_before_evict.Observe(eviction.idle_ms / 1000.0);
  }
}

uint32_t SpaceState::stale_members(uint64_t now) const {
  uint32_t stale = 0;
  for (const Session* session : sessions) {
    const bool holds = session->holder != kNobody && pool.holdings(session->holder).charged > 1;
    for (const auto& member : session->members) {
      const uint64_t quiet_ms = now - std::min(now, member->last_call_ms);
      const bool owes =
          member->slabs.unacknowledged() > 0 || (session->ended && !member->dead) ||
          (session->parked.any_waiting() && !member->identity.scheduler && member->fence <= session->passed);
      stale += (owes && quiet_ms >= kStaleOwingMs) || (holds && !member->dead && quiet_ms >= kStaleIdleMs);
    }
  }
  return stale;
}

}  // namespace kvpool
