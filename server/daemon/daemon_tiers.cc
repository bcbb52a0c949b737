// Tiers that come and go while the daemon runs: ListTiers, AttachTier, DrainTier, DetachTier.
//
// A tier is opened and closed on threads that hold no mutex. From then on, or until then, views have it (tiers/tier_set.h), which is
// all that verbs see of it.
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/tier_mover.h"
#include "server/daemon/tier_opening.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// Who waits for answers of a tier looks so often.
constexpr std::chrono::milliseconds kAnswerPoll{1};

v1::TierState StateOf(TierSet::State state) {
  switch (state) {
    case TierSet::State::kAttached:
      return v1::TIER_STATE_ATTACHED;
    case TierSet::State::kDraining:
      return v1::TIER_STATE_DRAINING;
    case TierSet::State::kDetaching:
      return v1::TIER_STATE_DETACHING;
    case TierSet::State::kClosing:
      return v1::TIER_STATE_CLOSING;
    case TierSet::State::kFree:
      break;
  }
  return v1::TIER_STATE_UNSPECIFIED;
}

absl::Status NoTiers(const std::string& name) {
  return absl::NotFoundError(absl::StrCat("tier is \"", name, "\"; there is none"));
}

// Calls `over` until it says so. False: there was no time left, or the daemon is to end.
template <typename Over>
bool Await(uint32_t timeout_ms, const std::atomic<bool>& stop, Over over) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!over()) {
    if (stop || std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(kAnswerPoll);
  }
  return true;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> Daemon::NextTiers() const {
  if (options_.next_tiers == nullptr) return std::vector<std::string>();
  return options_.next_tiers();
}

std::vector<std::string> Daemon::TierChanges() {
  absl::StatusOr<std::vector<std::string>> next = NextTiers();
  if (!next.ok()) {
    return {absl::StrCat("nobody knows, as flags and config files can't be read: ", next.status().message())};
  }
  std::vector<std::string> changes;
  const std::vector<TierSet::Listed> here =
      tiers_ == nullptr ? std::vector<TierSet::Listed>() : tiers_->list();
  for (const TierSet::Listed& listed : here) {
    if (!listed.in_view() || std::erase(*next, listed.tier->spec()) > 0) continue;
    changes.push_back(absl::StrCat("it does not have ", listed.tier->spec()));
  }
  for (const std::string& spec : *next) changes.push_back(absl::StrCat("it has ", spec));
  return changes;
}

absl::Status Daemon::ListTiers(const v1::ListTiersRequest&, v1::ListTiersResponse* response) {
  const DaemonSnapshot snapshot = Snapshot();
  absl::StatusOr<std::vector<std::string>> read = NextTiers();
  if (!read.ok()) response->set_next_unknown(std::string(read.status().message()));
  std::vector<std::string> next = std::move(read).value_or(std::vector<std::string>());
  for (const TierSnapshot& of_tier : snapshot.tiers) {
    v1::TierInfo* tier = response->add_tiers();
    tier->set_tier(of_tier.name);
    tier->set_path(of_tier.path);
    tier->set_write(TextOf(of_tier.rule));
    tier->set_state(StateOf(of_tier.state));
    tier->set_by_operator(of_tier.by_operator);
    tier->set_next_has_it(of_tier.state != TierSet::State::kDetaching && std::erase(next, of_tier.spec) > 0);
    tier->set_load_seconds(of_tier.load.seconds);
    tier->set_load_bytes_per_second(of_tier.load.bytes_per_second);
    const TierUsage& usage = of_tier.usage;
    tier->set_capacity_bytes(usage.capacity_bytes);
    tier->set_bytes(usage.bytes);
    tier->set_values(usage.values);
    tier->set_waiting(usage.waiting);
    tier->set_nodes(usage.nodes);
    tier->set_nodes_down(usage.nodes_down);
    const TierCounters& counters = usage.counters;
    tier->set_stored(counters.stored);
    tier->set_stored_bytes(counters.stored_bytes);
    tier->set_loaded(counters.loaded);
    tier->set_loaded_bytes(counters.loaded_bytes);
    tier->set_evicted(counters.evicted);
    tier->set_missed(counters.missed);
    tier->set_corrupt(counters.corrupt);
    tier->set_late(counters.late);
    tier->set_full(counters.full);
    tier->set_failed(counters.failed);
    tier->set_no_key(counters.no_key);
  }
  for (const std::string& spec : next) response->add_only_next(spec);
  // Those of all tiers together.
  const BelowCounters& below = snapshot.totals.below;
  const auto ms = [](uint64_t count) { return static_cast<double>(count) / 1000; };
  for (v1::TierInfo& tier : *response->mutable_tiers()) {
    tier.set_demoted_blocks(below.demoted);
    tier.set_moved_blocks(below.moved);
    tier.set_dropped_blocks(below.dropped);
    tier.set_unwritten_blocks(below.unwritten);
    tier.set_promoted_blocks(below.promoted);
    tier.set_late_blocks(below.late);
    tier.set_lost_blocks(below.lost);
    tier.set_no_room_blocks(below.no_room);
    tier.set_waits(below.waits);
    tier.set_refused_waits(below.refused_waits);
    tier.set_not_worth_blocks(below.not_worth);
    tier.set_forecasts(below.forecasts);
    tier.set_forecast_seconds(ms(below.forecast_ms));
    tier.set_taken_seconds(ms(below.taken_ms));
    tier.set_error_seconds(ms(below.error_ms));
  }
  for (const std::string& name : tiers_ == nullptr ? std::vector<std::string>() : tiers_->closing()) {
    v1::TierInfo* const tier = response->add_tiers();
    tier->set_tier(name);
    tier->set_state(v1::TIER_STATE_CLOSING);
  }
  return absl::OkStatus();
}

absl::Status Daemon::AttachTier(const v1::AttachTierRequest& request, v1::AttachTierResponse* response) {
  RETURN_IF_ERROR(ValidateAttachTier(request));
  if (tiers_ == nullptr || options_.name_tier == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("spec is \"", request.spec(),
                     "\", and the daemon was started with neither --tier nor --tier-key-file: keys of its "
                     "spaces are of no "
                     "secret, and no tier would ever find them again; start it with --tier-key-file=FILE"));
  }
  ASSIGN_OR_RETURN(NamedTier named, options_.name_tier(request.spec()));
  RETURN_IF_ERROR(tiers_->CheckRoom(named.name));
  ASSIGN_OR_RETURN(TierMember member,
                   tier_opening_->Run(named.name, std::move(named.open),
                                      std::chrono::milliseconds(request.timeout_ms()), stopping_));
  member.spec = request.spec();
  ASSIGN_OR_RETURN(const std::shared_ptr<AttachedTier> tier, tiers_->Attach(std::move(member)));
  tier_mover_->Wake();
  response->set_tier(std::string(tier->tier().name()));
  response->set_path(tier->tier().path());
  response->set_values(tier->tier().usage().values);
  LogInfo("tier attached", {{"tier", response->tier()},
                            {"what", tier->tier().describe()},
                            {"write", TextOf(tier->rule())},
                            {"values", response->values()},
                            {"until", "it is detached, or the daemon ends"}});
  return absl::OkStatus();
}

absl::Status Daemon::DrainTier(const v1::DrainTierRequest& request, v1::DrainTierResponse* response) {
  RETURN_IF_ERROR(ValidateDrainTier(request));
  if (tiers_ == nullptr) return NoTiers(request.tier());
  ASSIGN_OR_RETURN(const uint64_t id, tiers_->SetWrites(request.tier(), request.cancel()));
  LogInfo(request.cancel() ? "tier written to again" : "tier drains", {{"tier", request.tier()}});
  if (request.cancel()) {
    tier_mover_->Wake();
    return absl::OkStatus();
  }
  // The round under way may write to it still.
  tier_mover_->AwaitRound();
  const auto writes = [&] { return tiers_->OutOf(id).value_or(AttachedTier::Out()).stores; };
  Await(request.timeout_ms(), stopping_, [&] { return writes() == 0; });
  response->set_writes(writes());
  return absl::OkStatus();
}

absl::Status Daemon::DetachTier(const v1::DetachTierRequest& request, v1::DetachTierResponse* response) {
  RETURN_IF_ERROR(ValidateDetachTier(request));
  if (tiers_ == nullptr) return NoTiers(request.tier());
  ASSIGN_OR_RETURN(const uint64_t id, tiers_->Detach(request.tier()));
  LogInfo("tier detaches", {{"tier", request.tier()}});
  const bool gone = Await(request.timeout_ms(), stopping_, [&] {
    CloseDetached();
    return !tiers_->OutOf(id).has_value();
  });
  response->set_detached(gone);
  if (gone) return absl::OkStatus();
  const AttachedTier::Out out = tiers_->OutOf(id).value_or(AttachedTier::Out());
  response->set_reads(out.loads);
  response->set_writes(out.stores);
  return absl::OkStatus();
}

void Daemon::CloseDetached() {
  if (tiers_ == nullptr) return;
  for (std::shared_ptr<AttachedTier>& tier : tiers_->TakeIdle()) {
    // No round has a view of it, and none of its answers comes any more: nothing new is owed to the slot.
    for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
      SpaceLock lock(*space);
      space->state.below.Forget(tier->slot());
    }
    LogInfo("tier detached", {{"tier", std::string(tier->tier().name())}, {"path", tier->tier().path()}});
    tiers_->Close(std::move(tier));
  }
}

}  // namespace kvpool
