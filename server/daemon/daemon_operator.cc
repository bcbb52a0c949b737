// Operator verbs: lists, statistics, revoke, end of a session, drain.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/replacement/policy.h"
#include "server/space/block_info.h"
#include "server/space/device_budget.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

constexpr uint32_t kDefaultListedBlocks = 100;
// A filter may pass over millions of blocks: a call looks at so many at most, and answers where to go on.
constexpr uint32_t kMostViewed = 65536;
// So many are looked at in one hold of the space's mutex.
constexpr uint32_t kListSlice = 1024;

absl::Status NoSpace(uint64_t space) {
  return absl::NotFoundError(absl::StrCat("space ", space, " does not exist"));
}

void FillSpace(const SpaceState& state, v1::SpaceInfo* info) {
  const SpaceFacts& facts = state.facts;
  info->set_space(facts.id);
  info->set_tenant(facts.tenant);
  info->set_fingerprint(facts.fingerprint.digest());
  *info->mutable_facts() = facts.fingerprint.facts();
  *info->mutable_layout() = facts.layout;
  info->set_kind(facts.kind);
  for (const Device* device : facts.devices) info->add_devices(device->id());
  info->set_block_stride_bytes(facts.geometry.block_stride_bytes);
  info->set_slab_bytes(facts.geometry.slab_bytes);
  info->set_slabs(static_cast<uint32_t>(state.growth.slabs().size()));
  info->set_bytes(state.growth.bytes());
  FillCounts(state.pool.counts(), state.pool.capacity(), info->mutable_blocks());
  info->set_sessions(static_cast<uint32_t>(state.sessions.size()));
  info->set_policy(std::string(state.pool.policy().name()));
  info->set_priority_class(state.give_back.priority());
  info->set_pinned_blocks(state.pool.pinned());
  info->set_pin_budget_blocks(state.pool.pin_budget());
  const auto& [fixed, per_token, per_pair] = state.below.prefill.coefficients();
  info->mutable_prefill()->set_samples(state.below.prefill.samples());
  info->mutable_prefill()->set_fixed_seconds(fixed);
  info->mutable_prefill()->set_seconds_per_token(per_token);
  info->mutable_prefill()->set_seconds_per_pair(per_pair);
}

void FillMember(const Member& member, uint64_t now, v1::MemberInfo* info) {
  info->set_member(member.index);
  info->set_pid(member.identity.credentials.pid);
  info->set_uid(member.identity.credentials.uid);
  info->set_client_name(member.identity.client_name);
  info->set_scheduler(member.identity.scheduler);
  info->set_rank(member.identity.rank);
  info->set_alive(!member.dead);
  info->set_fence(member.fence);
  info->set_slabs_unacknowledged(member.slabs.unacknowledged());
  info->set_idle_seconds(static_cast<double>(now - std::min(now, member.last_call_ms)) / 1000);
}

void FillSession(const SpaceState& state, const Session& session, uint64_t now, v1::SessionInfo* info) {
  info->set_session(session.terms.id);
  info->set_space(state.facts.id);
  info->set_tenant(state.facts.tenant);
  info->set_client_name(session.terms.client_name);
  for (const auto& member : session.members) FillMember(*member, now, info->add_members());
  if (session.holder != kNobody) {
    const BlockPool::Holdings holdings = state.pool.holdings(session.holder);
    info->set_leased(holdings.leased);
    info->set_referenced(holdings.referenced);
    info->set_charged(holdings.charged);
  }
  info->set_guaranteed(session.terms.guaranteed_blocks);
  info->set_max_blocks(session.terms.max_blocks);
  info->set_parked(session.parked.size());
  info->set_ended(session.ended);
  info->set_end_reason(session.end_reason);
  info->set_episodes(session.episodes.size());
}

}  // namespace

std::vector<std::shared_ptr<Space>> Daemon::SpacesOf(uint64_t space, const std::string& tenant) {
  std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  std::erase_if(spaces, [&](const std::shared_ptr<Space>& candidate) {
    const SpaceFacts& facts = candidate->facts;
    return (space != 0 && facts.id != space) ||
           (!tenant.empty() && facts.tenant != tenant && facts.tenant_name != tenant);
  });
  return spaces;
}

absl::Status Daemon::ListSpaces(const v1::ListSpacesRequest& request, v1::ListSpacesResponse* response) {
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    SpaceLock lock(*space);
    FillSpace(space->state, response->add_spaces());
  }
  return absl::OkStatus();
}

absl::Status Daemon::ListSessions(const v1::ListSessionsRequest& request,
                                  v1::ListSessionsResponse* response) {
  if (request.space() != 0 && registry_->FindSpace(request.space()) == nullptr)
    return NoSpace(request.space());
  const uint64_t now = clock_->NowMs();
  for (const std::shared_ptr<Session>& session : registry_->Sessions()) {
    Space& space = *session->space;
    if (request.space() != 0 && space.facts.id != request.space()) continue;
    SpaceLock lock(space);
    FillSession(space.state, *session, now, response->add_sessions());
  }
  return absl::OkStatus();
}

absl::Status Daemon::ListBlocks(const v1::ListBlocksRequest& request, v1::ListBlocksResponse* response) {
  RETURN_IF_ERROR(ValidateListBlocks(request));
  const std::shared_ptr<Space> space = registry_->FindSpace(request.space());
  if (space == nullptr) return NoSpace(request.space());
  const uint32_t limit = request.limit() == 0 ? kDefaultListedBlocks : request.limit();
  uint64_t id = std::max(1u, request.first());
  for (const uint64_t end = id + kMostViewed;;) {
    space->GiveWay();
    SpaceLock lock(*space);
    const uint64_t now = clock_->NowMs();  // No block was used later, so that no age is below 0.
    const BlockPool& pool = space->state.pool;
    for (uint32_t i = 0; i < kListSlice; ++i, ++id) {
      if (id >= pool.end_block()) return absl::OkStatus();
      if (response->blocks_size() == static_cast<int>(limit) || id == end) {
        response->set_next(static_cast<uint32_t>(id));
        return absl::OkStatus();
      }
      const absl::StatusOr<BlockView> view = pool.View(BlockId{static_cast<uint32_t>(id)}, now);
      if (!view.ok()) continue;  // Its memory was given back.
      if (request.state() != v1::BLOCK_STATE_UNSPECIFIED && request.state() != WireState(view->state))
        continue;
      FillBlock(space->state, *view, response->add_blocks());
    }
  }
}

absl::Status Daemon::GetStats(const v1::GetStatsRequest& request, v1::GetStatsResponse* response) {
  const DaemonSnapshot snapshot = Snapshot();
  response->set_version(options_.version);
  response->set_daemon_epoch(options_.epoch);
  response->set_uptime_seconds(snapshot.uptime_seconds);
  v1::StateCounts* blocks = response->mutable_blocks();
  for (const SpaceSnapshot& space : snapshot.spaces) FillCounts(space.blocks, space.capacity, blocks);
  response->set_spaces(static_cast<uint32_t>(snapshot.spaces.size()));
  const PoolCounters& total = snapshot.totals.pool;
  response->set_leased_total(total.leased);
  response->set_sealed_total(total.sealed);
  response->set_deduplicated_total(total.deduplicated);
  response->set_lookup_blocks_total(total.lookup_blocks);
  response->set_hit_blocks_total(total.hit_blocks);
  response->set_lookup_tokens_total(total.lookup_tokens);
  response->set_hit_tokens_total(total.hit_tokens);
  response->set_released_total(total.released);
  response->set_evicted_total(std::accumulate(total.evicted.begin(), total.evicted.end(), uint64_t{0}));
  response->set_regret_total(total.regret);
  response->set_sessions(snapshot.sessions_open);
  for (const v1::DeviceInfo& device : snapshot.devices) *response->add_devices() = device;
  response->set_draining(snapshot.draining);
  if (keeper_ == nullptr) return absl::OkStatus();
  // Both enumerations have the same numbers.
  response->mutable_last_upgrade()->set_outcome(static_cast<v1::UpgradeOutcome>(keeper_->last_upgrade()));
  response->mutable_last_upgrade()->set_reason(keeper_->upgrade_failure());
  return absl::OkStatus();
}

absl::Status Daemon::GetRecovery(const v1::GetRecoveryRequest& request, v1::GetRecoveryResponse* response) {
  const DaemonSnapshot snapshot = Snapshot();
  const StartReport& start = snapshot.start;
  response->set_start(kColdStartNames[static_cast<size_t>(start.cold)]);
  response->set_recovery_seconds(start.recovery_seconds);
  response->set_first_answer_seconds(start.first_answer_seconds.value_or(0));
  for (const SpaceSnapshot& space : snapshot.spaces) {
    const Recovered& found = space.recovered;
    if (!found.any) continue;
    v1::RecoveredSpace* const info = response->add_spaces();
    info->set_space(space.space);
    info->set_tenant(space.tenant);
    info->set_cached_blocks(found.blocks.cached);
    info->set_held_blocks(found.blocks.held);
    info->set_quarantined_blocks(found.blocks.quarantined);
    for (size_t i = 0; i < kBlockLosses; ++i) {
      if (found.blocks.lost[i] > 0)
        (*info->mutable_dropped_blocks())[kBlockLossNames[i]] = found.blocks.lost[i];
    }
    info->set_cut_links(found.blocks.cut_links);
    info->set_sessions_back(found.back);
    info->set_sessions_waiting(found.waiting);
    for (size_t i = 0; i < kSessionLosses; ++i) {
      if (found.lost_sessions[i] > 0)
        (*info->mutable_lost_sessions())[kSessionLossNames[i]] = found.lost_sessions[i];
    }
    for (const LostSession& session : found.named) {
      v1::LostSession* const lost = info->add_lost();
      lost->set_session(session.id);
      lost->set_client_name(session.client_name);
      lost->set_reason(kSessionLossNames[static_cast<size_t>(session.why.loss)]);
      lost->set_detail(session.why.text);
    }
    info->set_seconds(found.seconds);
    info->set_unverified_blocks(found.blocks.unsummed);
    info->set_forgets_sums(found.blocks.forgets_sums);
  }
  for (const LostSpace& space : start.lost) {
    v1::LostSpace* const lost = response->add_lost_spaces();
    lost->set_space(space.space);
    lost->set_tenant(space.tenant);
    lost->set_reason(kSpaceLossNames[static_cast<size_t>(space.loss)]);
    lost->set_detail(space.text);
    lost->set_sealed_blocks(space.sealed_blocks);
    lost->set_sessions(space.sessions);
  }
  return absl::OkStatus();
}

absl::Status Daemon::Revoke(const v1::RevokeRequest& request, v1::RevokeResponse* response) {
  RETURN_IF_ERROR(ValidateRevoke(request));
  bool found = request.session() == 0;
  for (const std::shared_ptr<Session>& session : registry_->Sessions()) {
    if (request.session() != 0 && session->terms.id != request.session()) continue;
    found = true;
    Space& space = *session->space;
    SpaceTurn turn(space);
    const auto hears = [](const auto& member) { return member->listener != nullptr; };
    if (session->ended || std::none_of(session->members.begin(), session->members.end(), hears)) continue;
    space.state.sessions.PostAll(session.get(), v1::NOTICE_KIND_REVOKE,
                                 {.value = request.blocks(), .detail = "an operator asks"});
    response->set_sessions_asked(response->sessions_asked() + 1);
  }
  if (!found) return absl::NotFoundError(absl::StrCat("session ", request.session(), " does not exist"));
  return absl::OkStatus();
}

absl::Status Daemon::EndSession(const v1::EndSessionRequest& request, v1::EndSessionResponse* response) {
  RETURN_IF_ERROR(ValidateEndSession(request));
  const std::shared_ptr<Session> session = registry_->FindSession(request.session());
  if (session == nullptr) {
    return absl::NotFoundError(absl::StrCat("session ", request.session(), " does not exist"));
  }
  Space& space = *session->space;
  SpaceTurn turn(space);
  space.state.sessions.End(turn, session.get(), EndKind::kOperator,
                           absl::StrCat("session ", session->terms.id, " ended: an operator asked for it"),
                           nullptr);
  space.state.pressure.AfterVerbs(turn);
  FillSession(space.state, *session, turn.now, response->mutable_session());
  return absl::OkStatus();
}

absl::Status Daemon::Drain(const v1::DrainRequest& request, v1::DrainResponse* response) {
  const bool draining = !request.cancel();
  if (registry_->draining() != draining) LogInfo(draining ? "draining" : "draining cancelled");
  registry_->set_draining(draining);
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    SpaceTurn turn(*space);
    response->set_sessions_left(response->sessions_left() + space->state.sessions.SetDraining(draining));
  }
  return absl::OkStatus();
}

}  // namespace kvpool
