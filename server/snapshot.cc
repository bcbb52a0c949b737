#include "server/snapshot.h"

#include <string>

#include "server/daemon.h"
#include "server/device_budget.h"
#include "server/device_runner.h"
#include "server/event_log.h"
#include "server/registry.h"
#include "server/replacement/policy.h"
#include "server/retired_counters.h"
#include "server/space.h"
#include "server/space_state.h"

namespace kvpool {

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now) {
  SpaceSnapshot snapshot;
  snapshot.space = state.facts.id;
  snapshot.tenant = state.facts.tenant;
  snapshot.kind = state.facts.kind == v1::SPACE_KIND_IPC ? "ipc" : "slabs";
  snapshot.policy = std::string(state.pool.policy().name());
  snapshot.blocks = state.pool.counts();
  snapshot.capacity = state.pool.capacity();
  snapshot.slabs = static_cast<uint32_t>(state.slabs.size());
  snapshot.sessions = static_cast<uint32_t>(state.sessions.size());
  snapshot.members_stale = state.stale_members(now);
  snapshot.pinned = state.pool.pinned();
  snapshot.pin_budget = state.pool.pin_budget();
  for (const Session* session : state.sessions) {
    snapshot.parked += static_cast<uint32_t>(session->parked.size());
  }
  for (const SlabRow& row : state.slabs) snapshot.slab_bytes += row.bytes * row.by_rank.size();
  snapshot.growth_failures = state.counters.growth_failures;
  snapshot.pressure = state.pressure;
  snapshot.pool = state.pool.counters();
  snapshot.evicted_by_policy = state.evicted_by_policy();
  snapshot.shortfalls = state.counters.shortfalls;
  snapshot.reclaim = state.reclaim.Snapshot();
  snapshot.lifetime = state.lifetime.Snapshot();
  snapshot.idle_before_evict = state.idle_before_evict.Snapshot();
  snapshot.reuse_gap = state.reuse_gap.Snapshot();
  snapshot.decided_in_time = state.decisions.in_time;
  snapshot.decided_late = state.decisions.late;
  snapshot.decisions_not_asked = state.decisions.not_asked;
  snapshot.breaker_state = static_cast<uint32_t>(state.decisions.breaker.state(now));
  snapshot.thinking = state.thinking.Snapshot();
  return snapshot;
}

DaemonSnapshot Daemon::Snapshot() {
  DaemonSnapshot snapshot;
  const uint64_t now = clock_->NowMs();
  // A space that retires between the two is counted late rather than twice.
  SpaceCounters counters = retired_->counters();
  snapshot.spaces.push_back(retired_->space());
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    MutexLock lock(&space->mu);
    snapshot.spaces.push_back(SnapshotOf(space->state, now));
    Accumulate(space->state.counters, &counters);
    for (const Session* session : space->state.sessions) snapshot.sessions_open += session->ended ? 0 : 1;
  }
  for (size_t i = 0; i < devices_.size(); ++i) {
    v1::DeviceInfo& device = snapshot.devices.emplace_back();
    device.set_device(devices_[i]->id());
    device.set_name(devices_[i]->name());
    device.set_capacity_bytes(budget_->capacity(i));
    device.set_used_bytes(budget_->used(i));
  }
  for (const std::unique_ptr<DeviceRunner>& runner : runners_) {
    if (runner != nullptr) snapshot.device_operations.push_back(runner->Snapshot());
  }
  snapshot.sessions_ended = registry_->ended_by_reason();
  const google::protobuf::OneofDescriptor* verbs = v1::Operation::descriptor()->FindOneofByName("verb");
  for (int i = 0; i < verbs->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* verb = verbs->field(i);
    snapshot.step_operations[verb->name()] = counters.operations[verb->number()];
  }
  snapshot.step_batches = counters.batches;
  snapshot.reconnects = reconnects_.load(std::memory_order_relaxed);
  if (event_log_ != nullptr) {
    const EventLog::Counters events = event_log_->counters();
    snapshot.events_logged = events.written;
    snapshot.events_lost = events.lost;
  }
  snapshot.draining = registry_->draining();
  snapshot.uptime_seconds = static_cast<double>(now - start_ms_) / 1000;
  return snapshot;
}

}  // namespace kvpool
