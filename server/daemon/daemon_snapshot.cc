// Daemon::Snapshot: what metrics and GetStats show.
#include <string>

#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/retired_counters.h"
#include "server/daemon/snapshot.h"
#include "server/events/event_log.h"
#include "server/replacement/policy.h"
#include "server/scoring/device_runner.h"
#include "server/scoring/quality_guard.h"
#include "server/space/device_budget.h"
#include "server/space/freed_memory.h"
#include "server/space/space.h"

namespace kvpool {

DaemonSnapshot Daemon::Snapshot() {
  DaemonSnapshot snapshot;
  const uint64_t now = clock_->NowMs();
  // The closed spaces are read first: one that closes in between is missing from this snapshot,
  // and never in it twice.
  snapshot.totals = retired_->totals();
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    SpaceLock lock(*space);
    snapshot.totals.Add(snapshot.spaces.emplace_back(SnapshotOf(space->state, now)));
    for (const Session* session : space->state.sessions) snapshot.sessions_open += session->ended ? 0 : 1;
  }
  for (size_t i = 0; i < devices_.size(); ++i) {
    v1::DeviceInfo& device = snapshot.devices.emplace_back();
    device.set_device(devices_[i]->id());
    device.set_name(devices_[i]->name());
    device.set_capacity_bytes(budget_->capacity(i));
    device.set_used_bytes(budget_->used(i));
    device.set_unfreed_bytes(freed_->unfreed_bytes(i));
  }
  for (const std::unique_ptr<DeviceRunner>& runner : runners_) {
    if (runner != nullptr) snapshot.device_operations.push_back(runner->Snapshot());
  }
  snapshot.guard = guard_->Totals();
  snapshot.sessions_ended = registry_->ended_by_reason();
  const google::protobuf::OneofDescriptor* verbs = v1::Operation::descriptor()->FindOneofByName("verb");
  for (int i = 0; i < verbs->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* verb = verbs->field(i);
    snapshot.step_operations[verb->name()] = snapshot.totals.space.operations[verb->number()];
    snapshot.step_errors[verb->name()] = snapshot.totals.space.errors[verb->number()];
    snapshot.refused_blocks[verb->name()] = snapshot.totals.space.refused_blocks[verb->number()];
  }
  snapshot.reconnects = reconnects_.load(std::memory_order_relaxed);
  if (event_log_ != nullptr) {
    const EventLog::Counters events = event_log_->counters();
    snapshot.events_logged = events.written;
    snapshot.events_lost = events.lost;
  }
  snapshot.may_have_tiers = tiers_ != nullptr;
  if (tiers_ != nullptr) {
    for (const auto& [tier, state] : tiers_->list()) {
      snapshot.tiers.push_back({.name = std::string(tier->tier().name()),
                                .path = tier->tier().path(),
                                .spec = tier->spec(),
                                .state = state,
                                .by_operator = tier->facts().by_operator,
                                .rule = tier->rule(),
                                .usage = tier->tier().usage(),
                                .load = tier->cost().measured()});
    }
  }
  snapshot.start = start_report_;
  if (const uint64_t ms = first_answer_ms_.load(std::memory_order_relaxed); ms != kNotAnswered)
    snapshot.start.first_answer_seconds = static_cast<double>(ms) / 1000;
  snapshot.draining = registry_->draining();
  {
    MutexLock lock(&waits_mu_);
    snapshot.guarantee_wait = guarantee_wait_.Snapshot();
  }
  snapshot.uptime_seconds = static_cast<double>(now - start_ms_) / 1000;
  return snapshot;
}

}  // namespace kvpool
