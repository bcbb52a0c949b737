#include "server/space/space_snapshot.h"

#include <string>

#include "server/replacement/policy.h"

namespace kvpool {
namespace {

std::string Fact(const SpaceFacts& facts, const char* name) {
  const auto fact = facts.fingerprint.facts().find(name);
  return fact == facts.fingerprint.facts().end() ? "" : fact->second;
}

}  // namespace

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now) {
  SpaceSnapshot snapshot;
  snapshot.space = state.facts.id;
  snapshot.tenant = state.facts.tenant;
  snapshot.kind = state.facts.kind == v1::SPACE_KIND_IPC ? "ipc" : "slabs";
  snapshot.policy = std::string(state.pool.policy().name());
  snapshot.model = Fact(state.facts, "model");
  snapshot.architecture = Fact(state.facts, "architecture");
  snapshot.blocks = state.pool.counts();
  snapshot.capacity = state.pool.capacity();
  snapshot.slabs = static_cast<uint32_t>(state.growth.slabs().size());
  snapshot.sessions = static_cast<uint32_t>(state.sessions.size());
  snapshot.members_stale = state.sessions.stale_members(now);
  snapshot.pinned = state.pool.pinned();
  snapshot.pin_budget = state.pool.pin_budget();
  for (const Session* session : state.sessions) {
    snapshot.parked += static_cast<uint32_t>(session->parked.size());
    if (session->ended || session->holder == kNobody) continue;
    snapshot.session_blocks.push_back({session->terms.id, state.pool.holdings(session->holder).charged});
  }
  snapshot.slab_bytes = state.growth.bytes();
  snapshot.bookkeeping_bytes = state.pool.bookkeeping_bytes();
  snapshot.pressure = state.pressure.on();
  snapshot.pool = state.pool.counters();
  snapshot.counters = state.counters;
  snapshot.checks = state.checks.counters;
  snapshot.doubted = state.pool.doubted();
  snapshot.recovered = state.sessions.recovered();
  snapshot.below = state.below.counters;
  snapshot.give_back = state.give_back.counters;
  snapshot.share_blocks = state.give_back.share_blocks;
  snapshot.limit_blocks = state.growth.max_blocks() - 1;
  snapshot.weight = state.give_back.weight();
  snapshot.priority = static_cast<uint32_t>(state.give_back.priority());
  snapshot.evicted_by_policy = state.evicted_by_policy();
  snapshot.hold = state.hold.Snapshot();
  snapshot.hold_work = state.hold_work.Snapshot();
  snapshot.reclaim = state.reclaim.Snapshot();
  snapshot.lifetime = state.lifetime.Snapshot();
  snapshot.idle_before_evict = state.idle_before_evict.Snapshot();
  snapshot.reuse_gap = state.reuse_gap.Snapshot();
  snapshot.decided_in_time = state.decisions.counts().in_time;
  snapshot.decided_late = state.decisions.counts().late;
  snapshot.decisions_not_asked = state.decisions.counts().not_asked;
  snapshot.breaker_state = static_cast<uint32_t>(state.decisions.state(now));
  snapshot.decision_time = state.decision_time.Snapshot();
  return snapshot;
}

}  // namespace kvpool
