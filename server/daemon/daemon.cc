#include "server/daemon/daemon.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "proto/support/step_frames.h"
#include "server/base/housekeeper.h"
#include "server/base/log.h"
#include "server/daemon/registry.h"
#include "server/daemon/retired_counters.h"
#include "server/daemon/slab_copier.h"
#include "server/daemon/snapshot.h"
#include "server/daemon/tier_mover.h"
#include "server/daemon/tier_opening.h"
#include "server/events/event_log.h"
#include "server/replacement/policy.h"
#include "server/scoring/device_runner.h"
#include "server/scoring/lost_gpu.h"
#include "server/scoring/quality_guard.h"
#include "server/space/deferred.h"
#include "server/space/device_budget.h"
#include "server/space/freed_memory.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/tiers/tier_secret.h"
#include "server/wire/field_checks.h"
#include "server/wire/step_writer.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// A daemon that has made its slabs has nothing more to ask a GPU, and would not hear of its loss.
constexpr uint64_t kDeviceCheckMs = 1000;
// What a space has beyond its limit is asked for so long, and then again.
constexpr uint64_t kExcessMs = 1000;
// The event log is written in pieces of this size, and its disk may be as far behind: some thousand matches
// of long prompts.
constexpr uint64_t kMostEventBufferBytes = 4 << 20;

absl::Status CheckShare(absl::string_view field, double value) {
  if (value >= 0 && value <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; must be 0 to 1"));
}

absl::Status CheckTier(const DaemonOptions& options) {
  if (options.tiers.empty() && options.tier_secret.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRange("tiers", options.tiers.size(), 0, TierSet::kMost));
  return CheckRange("tier_secret in bytes", options.tier_secret.size(), kLeastTierSecretBytes,
                    kMostTierSecretBytes);
}

// The tiers are in the set alone: one that is detached is gone.
DaemonOptions WithoutTiers(DaemonOptions options) {
  options.tiers.clear();
  return options;
}

// What copies to and from tiers. Null: there can be none.
absl::StatusOr<std::unique_ptr<SlabCopier>> OpenSlabCopier(
    const DaemonOptions& options, const std::vector<std::unique_ptr<Device>>& devices) {
  if (options.tier_secret.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<SlabCopier>> copier = SlabCopier::Open(devices);
  if (copier.ok()) return copier;
  return absl::Status(copier.status().code(), absl::StrCat("--tier: ", copier.status().message()));
}

absl::Status CheckVerify(const DaemonOptions& options, const std::vector<std::unique_ptr<Device>>& devices) {
  for (const auto& device : devices) {
    if (!options.verify || device->uuid_bytes().empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--verify=seal: device ", device->id(), " is a GPU; only what lies in host memory is summed so far"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const DaemonOptions& options, const std::vector<std::unique_ptr<Device>>& devices) {
  if (devices.empty()) return absl::InvalidArgumentError("no devices; at least one is needed");
  if (options.access == nullptr)
    return absl::InvalidArgumentError("access is null; who may do what is needed");
  if (options.device_capacity_bytes.size() != devices.size()) {
    return absl::InvalidArgumentError(absl::StrCat("device_capacity_bytes has ",
                                                   options.device_capacity_bytes.size(), " entries for ",
                                                   devices.size(), " devices"));
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    RETURN_IF_ERROR(CheckRange(absl::StrCat("capacity of device ", devices[i]->id(), " in bytes"),
                               options.device_capacity_bytes[i], devices[i]->granularity_bytes(),
                               devices[i]->total_bytes()));
  }
  RETURN_IF_ERROR(CheckShare("low_watermark", options.low_watermark));
  RETURN_IF_ERROR(CheckShare("high_watermark", options.high_watermark));
  if (options.low_watermark > options.high_watermark) {
    return absl::InvalidArgumentError(absl::StrCat("low_watermark is ", options.low_watermark,
                                                   "; must be at most high_watermark, ",
                                                   options.high_watermark));
  }
  RETURN_IF_ERROR(CheckShare("pin_budget", options.pin_budget));
  if (!(options.tenant_share > 0 && options.tenant_share <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant_share is ", options.tenant_share, "; must be above 0, up to 1"));
  }
  RETURN_IF_ERROR(CheckRange("max_sessions", options.max_sessions, 1, kMostSessions));
  RETURN_IF_ERROR(CheckRange("max_members", options.max_members, 1, kMaxMembers));
  RETURN_IF_ERROR(CheckRange("score_threads", options.score_threads, 1, kMostScoreThreads));
  RETURN_IF_ERROR(CheckRange("score_queue", options.score_queue, 1, kMostScoreQueue));
  RETURN_IF_ERROR(CheckTier(options));
  RETURN_IF_ERROR(CheckVerify(options, devices));
  return MakeReplacementPolicy(options.policy, {.max_blocks = 1, .weights = options.policy_weights}).status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const DaemonOptions& options,
                                                      std::vector<std::unique_ptr<Device>> devices,
                                                      const Clock* clock, KeeperLink* keeper) {
  RETURN_IF_ERROR(CheckOptions(options, devices));
  ASSIGN_OR_RETURN(std::unique_ptr<SlabCopier> copier, OpenSlabCopier(options, devices));
  std::unique_ptr<Daemon> daemon(new Daemon(options, std::move(devices), clock, keeper));
  RETURN_IF_ERROR(daemon->StartEventLog());
  daemon->start_report_.cold = ColdStart::kNoKeeper;
  if (keeper != nullptr) RETURN_IF_ERROR(daemon->Recover());
  // They may be others than those of the daemon before.
  daemon->ApplyRules();
  daemon->start_ms_ = clock->NowMs();
  if (daemon->tiers_ != nullptr) {
    daemon->tier_mover_ =
        std::make_unique<TierMover>(TierMover::Options{.tiers = daemon->tiers_.get(),
                                                       .copier = std::move(copier),
                                                       .buffer_bytes = options.tier_buffer_bytes,
                                                       .thread = options.housekeeping_thread},
                                    [of = daemon.get()] { return of->registry_->Spaces(); });
  }
  if (keeper != nullptr && options.housekeeping_thread) {
    daemon->stand_ins_ = NamedThread("stand-ins", [of = daemon.get()] { of->ReplaceStandIns(); });
  } else if (keeper != nullptr) {
    daemon->ReplaceStandIns();
  }
  if (options.housekeeping_thread) {
    daemon->housekeeper_ = std::make_unique<Housekeeper>([of = daemon.get()] { of->HousekeepOnce(); });
  }
  // It takes turns at spaces, and whoever has a turn may wake the housekeeper.
  if (options.housekeeping_thread && options.verify) {
    daemon->verifier_ = std::make_unique<Housekeeper>([of = daemon.get(), last = clock->NowMs()]() mutable {
      const uint64_t now = of->clock_->NowMs();
      of->VerifyOnce(now - std::exchange(last, now));
    });
  }
  return daemon;
}

absl::Status Daemon::StartEventLog() {
  if (options_.event_log.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<EventLog>> log =
      EventLog::Open({.path = options_.event_log,
                      .max_bytes = options_.event_log_bytes,
                      .buffer_bytes = std::min(kMostEventBufferBytes, options_.event_log_bytes / 4),
                      .thread = options_.housekeeping_thread});
  if (!log.ok())
    return absl::Status(log.status().code(), absl::StrCat("--event-log: ", log.status().message()));
  event_log_ = *std::move(log);
  return absl::OkStatus();
}

Daemon::Daemon(const DaemonOptions& options, std::vector<std::unique_ptr<Device>> devices, const Clock* clock,
               KeeperLink* keeper)
    : options_(WithoutTiers(options)),
      devices_(std::move(devices)),
      clock_(clock),
      keeper_(keeper),
      tiers_(options.tier_secret.empty() ? nullptr : std::make_unique<TierSet>(options.tiers)),
      tier_opening_(std::make_unique<TierOpening>()),
      new_spaces_policy_(options.policy) {
  std::vector<DeviceBudget::Capacity> capacities;
  for (size_t i = 0; i < devices_.size(); ++i) {
    capacities.push_back({devices_[i]->id(), options_.device_capacity_bytes[i]});
  }
  budget_ = std::make_unique<DeviceBudget>(
      capacities, [share = options_.tenant_share](std::string_view) { return share; });
  freed_ = std::make_unique<FreedMemory>(&devices_, budget_.get(), clock_);
  registry_ = std::make_unique<Registry>(options_.max_sessions);
  retired_ = std::make_unique<RetiredCounters>();
  guard_ = std::make_unique<QualityGuard>(options_.guard);
  StartRunners();
}

Daemon::~Daemon() {
  EndThreads();
  runners_.clear();
  tier_mover_.reset();
  // What is destroyed below is there for the next daemon.
  if (keeper_ != nullptr) keeper_->Leave();
  // Callers may keep members, and members keep their space: its memory must not outlive the devices.
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    {
      SpaceLock lock(*space);
      space->state.growth.Close();
      space->state.sessions.outbox().Clear();
    }
    space->DestroySlabs(Space::Slabs::kStayWithOthers);
  }
}

void Daemon::AfterTurn(Space* space, const Deferred& deferred) {
  for (const Deferred::Ended& ended : deferred.ended) {
    registry_->Ended(ended.kind);
    LogInfo("session ended",
            {{"session", ended.session}, {"kind", EndKindName(ended.kind)}, {"reason", ended.reason}});
  }
  for (const uint64_t session : deferred.gone) {
    for (const std::shared_ptr<Member>& member : registry_->Gone(session)) {
      EndByAttachment(member, /*hung_up=*/false, /*dead=*/true);
      // One that never came back to this daemon has no connection.
      if (member->identity.peer != nullptr) member->identity.peer->NotAwaited(member->identity.attach);
    }
  }
  for (const std::shared_ptr<Promotion>& promotion : deferred.promotions) {
    // A space with a session is not closing.
    if (auto found = registry_->FindSpace(space->facts.id)) tier_mover_->Promote(std::move(found), promotion);
  }
  if (deferred.housekeep && housekeeper_ != nullptr) housekeeper_->Wake();
  if (deferred.reclaim && options_.housekeeping_thread) ReclaimAhead(space);
}

// --------------------------------------------------------------------------------------- attach connections

absl::StatusOr<std::shared_ptr<const AccessRule>> Daemon::AdmitEngine(const PeerCredentials& credentials,
                                                                      absl::string_view what) const {
  const Peer peer{.process = std::make_shared<const PeerCredentials>(credentials)};
  return options_.access->Admit(peer, AccessRole::kEngine, what);
}

absl::StatusOr<Daemon::Welcome> Daemon::OnAttached(std::shared_ptr<AttachPeer> peer,
                                                   const PeerCredentials& credentials,
                                                   const v1::AttachHello& hello) {
  ASSIGN_OR_RETURN(const auto rule, AdmitEngine(credentials, "the attach socket"));
  RETURN_IF_ERROR(ValidateClientName(hello.client_name()));
  Welcome welcome;
  if (hello.member_token().empty()) {
    const Registry::Attached attached = registry_->Attach(std::move(peer), credentials, hello);
    welcome.id = attached.id;
    welcome.frame.mutable_welcome()->set_attach_token(attached.token);
  } else {
    absl::StatusOr<Welcome> back = ComeBack(std::move(peer), credentials, *rule, hello);
    if (!back.ok()) {
      absl::Status refused = back.status();
      refused.SetPayload(kForGood, absl::Cord());
      return refused;
    }
    welcome = *std::move(back);
  }
  welcome.frame.mutable_welcome()->set_daemon_epoch(options_.epoch);
  welcome.frame.mutable_welcome()->set_step_frames(kStepFramesVersion);
  // A keeper that is gone may be followed by another while the session lasts.
  welcome.frame.mutable_welcome()->set_reattach_ms(keeper_ == nullptr ? 0 : options_.reattach_ms);
  return welcome;
}

void Daemon::OnSlabAck(AttachId id, const v1::SlabAck& ack) {
  const std::shared_ptr<Member> member = registry_->MemberOf(id);
  if (member == nullptr) return;  // Nothing was sent to it: its acknowledgement means nothing.
  Space& space = *member->session->space;
  SpaceTurn turn(space);
  space.state.sessions.OnSlabAck(turn, member.get(), ack);
  space.batches.RetryLackingBlocks(turn);
  space.state.pressure.AfterVerbs(turn);
}

void Daemon::OnSlabLeft(AttachId id, const v1::SlabLeft& left) {
  const std::shared_ptr<Member> member = registry_->MemberOf(id);
  if (member == nullptr) return;
  Space& space = *member->session->space;
  SpaceTurn turn(space);
  space.state.sessions.OnSlabLeft(turn, member.get(), left);
  turn.deferred.housekeep = true;
}

bool Daemon::OnHangup(AttachId id) {
  const Registry::HungUp hung_up = registry_->HangUp(id);
  EndByAttachment(hung_up.member, /*hung_up=*/true, /*dead=*/hung_up.stood_for);
  return hung_up.awaited;
}

void Daemon::OnProcessDead(AttachId id) {
  EndByAttachment(registry_->Die(id), /*hung_up=*/false, /*dead=*/true);
}

void Daemon::EndByAttachment(const std::shared_ptr<Member>& member, bool hung_up, bool dead) {
  if (member == nullptr) return;
  Space& space = *member->session->space;
  SpaceTurn turn(space);
  if (dead) space.state.sessions.OnProcessDead(turn, member.get());
  if (hung_up) space.state.sessions.OnHangup(turn, member.get());
  space.state.pressure.AfterVerbs(turn);
}

// ------------------------------------------------------------------------------------------- engine verbs

absl::StatusOr<std::shared_ptr<Member>> Daemon::FindMember(std::string_view token) {
  std::shared_ptr<Member> member = registry_->FindMember(token);
  if (member == nullptr) {
    return absl::UnauthenticatedError(
        absl::StrCat("member_token (", token.size(), " bytes) is of no member"));
  }
  return member;
}

// A larger answer is written a second time, once the mutex is free: the copy's memory may come page by page, at some 3 us each.
constexpr size_t kMostCopiedAnswer = 64 << 10;

bool Daemon::Apply(const std::shared_ptr<Member>& member, const v1::StepRequest& request,
                   v1::StepResponse* response, std::string* wire, const StreamListener* stream) {
  Space& space = *member->session->space;
  if (wire != nullptr) wire->clear();
  bool more = false;
  {
    SpaceTurn turn(space);
    const std::string_view remembered = space.batches.Apply(turn, member.get(), request, response, stream);
    if (wire != nullptr && remembered.size() <= kMostCopiedAnswer) wire->assign(remembered);
    more = std::exchange(turn.deferred.reclaim, false) || space.state.pool.policy_waits();
  }
  if (wire != nullptr && wire->empty()) WriteStep(*response, wire);
  NoteAnswer();
  return more;
}

void Daemon::NoteAnswer() {
  if (first_answer_ms_.load(std::memory_order_relaxed) != kNotAnswered) return;
  uint64_t none = kNotAnswered;
  first_answer_ms_.compare_exchange_strong(none, clock_->NowMs() - options_.began_ms);
}

void Daemon::FollowUp(const std::shared_ptr<Member>& member) {
  Space& space = *member->session->space;
  {
    SpaceLock lock(space);
    space.state.pool.TellPolicy();
    const Pressure& pressure = space.state.pressure;
    if (!pressure.IsReclaimDue() || !pressure.FewToReclaim()) return;
  }
  ReclaimAhead(&space);
}

void Daemon::ApplyUnary(const v1::Call& call, v1::Operation operation,
                        std::function<void(const v1::OperationResult&)> done) {
  const absl::StatusOr<std::shared_ptr<Member>> member = FindMember(call.member_token());
  if (!member.ok()) {
    v1::OperationResult result;
    result.set_code(static_cast<int>(member.status().code()));
    result.set_message(std::string(member.status().message()));
    done(result);
    return;
  }
  Space& space = *(*member)->session->space;
  SpaceTurn turn(space);
  space.batches.ApplyUnary(turn, member->get(), call, std::move(operation), std::move(done));
  NoteAnswer();
}

void Daemon::BindStream(const std::shared_ptr<Member>& member, std::shared_ptr<StreamListener> listener) {
  Space& space = *member->session->space;
  SpaceTurn turn(space);
  if (member->listener != nullptr) turn.deferred.superseded.push_back(std::move(member->listener));
  member->listener = std::move(listener);
  if (std::exchange(member->had_stream, true)) reconnects_.fetch_add(1, std::memory_order_relaxed);
  member->notices.PostAgain();
  member->completions.Resend();
  space.state.sessions.Touch(member.get());
}

void Daemon::UnbindStream(const std::shared_ptr<Member>& member, const StreamListener* listener) {
  Space& space = *member->session->space;
  std::shared_ptr<StreamListener> unbound;  // Destroyed outside the mutex.
  SpaceLock lock(space);
  if (member->listener.get() == listener) unbound = std::move(member->listener);
}

bool Daemon::TakePending(const std::shared_ptr<Member>& member, const StreamListener* stream,
                         v1::StepResponse* response) {
  Space& space = *member->session->space;
  SpaceLock lock(space);
  return space.batches.TakePending(clock_->NowMs(), member.get(), stream, response);
}

// -------------------------------------------------------------------------------------- device operations

void Daemon::StartRunners() {
  for (const std::unique_ptr<Device>& device : devices_) {
    absl::StatusOr<std::unique_ptr<KvCompute>> compute =
        device->MakeKvCompute({.host_threads = options_.score_threads});
    runner_errors_.push_back(compute.status());
    runners_.emplace_back();
    if (!compute.ok()) continue;
    const DeviceRunner::Options runner{.device = device->id(),
                                       .queue_limit = options_.score_queue,
                                       .feature_cache_bytes = options_.score_features_bytes,
                                       .workspace_bytes = options_.score_workspace_bytes,
                                       .time_limit = absl::Milliseconds(options_.score_time_ms),
                                       .guard = guard_.get(),
                                       .thread = options_.device_threads};
    runners_.back() = std::make_unique<DeviceRunner>(
        runner, *std::move(compute),
        [this](const DeviceRunner::Operation& operation) { OnOperationDone(operation.get()); });
  }
}

bool Daemon::RunDevicePart(size_t device) {
  return runners_[device] != nullptr && runners_[device]->RunNext();
}

TierFlush Daemon::FlushTier(std::chrono::milliseconds limit) {
  if (tier_mover_ == nullptr) return {};
  tier_mover_->Stop();
  const auto begin = std::chrono::steady_clock::now();
  const TierFlush flushed = tier_mover_->Flush(limit);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  LogInfo("tier flushed",
          {{"blocks", flushed.written}, {"blocks_left", flushed.left}, {"seconds", seconds.count()}});
  return flushed;
}

size_t Daemon::tenants() const { return registry_->tenants(); }

bool Daemon::MoveTierOnce() { return tier_mover_->RunOnce(); }

void Daemon::StopDeviceOperations() {
  for (const std::unique_ptr<DeviceRunner>& runner : runners_) {
    if (runner != nullptr) runner->Stop();
  }
}

void Daemon::OnOperationDone(DeviceOperation* operation) {
  Space& space = *operation->session->space;
  SpaceTurn turn(space);
  space.batches.OnOperationDone(turn, operation);
}

// ------------------------------------------------------------------------------------------- housekeeping

void Daemon::CheckDevices(uint64_t now) {
  if (now < device_check_ms_.load(std::memory_order_relaxed)) return;
  device_check_ms_.store(now + kDeviceCheckMs, std::memory_order_relaxed);
  for (const std::unique_ptr<Device>& device : devices_) {
    // Any call would do: a context that is gone answers all of them with the error that ended it. Other
    // errors are reported by those who need the device.
    const absl::Status status = device->free_bytes().status();
    EndIfGpuIsLost(status, absl::StrCat("device ", device->id()));
  }
}

void Daemon::HousekeepOnce() {
  CheckDevices(clock_->NowMs());
  freed_->Collect();
  const std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  const std::vector<Standing> standings = Standings(spaces);
  KeepWithinShares(spaces);
  for (size_t i = 0; i < spaces.size(); ++i) Housekeep(spaces[i], standings[i]);
  CloseDetached();
  if (keeper_ != nullptr) {
    CollectAbsent(clock_->NowMs());
    keeper_->Flush();
  }
  const uint64_t now = clock_->NowMs();
  if (now < options_.idle_space_ms) return;
  while (std::shared_ptr<Space> idle = registry_->CloseIdle(now - options_.idle_space_ms + 1, {}))
    Retire(idle);
}

void Daemon::Housekeep(const std::shared_ptr<Space>& space, const Standing& standing) {
  bool needs_slab = false, needs_room = false, evicts = false, asked = false, promised = false;
  const SpaceFacts& facts = space->facts;
  const uint64_t room_bytes = budget_->Room(facts.rank_devices, facts.tenant);
  const uint64_t not_for_it = standing.leaves ? standing.reserve_bytes : 0;
  const bool room = room_bytes >= facts.geometry.unit_bytes + not_for_it;
  const bool others_ask = OthersAsk(*space);
  {
    SpaceLock lock(*space);
    Growth& growth = space->state.growth;
    class GiveBack& give_back = space->state.give_back;
    if (const uint32_t excess = give_back.under_way() ? 0 : give_back.excess_slabs(); excess > 0) {
      give_back.Ask(excess, clock_->NowMs() + kExcessMs);
    }
    growth.set_own_elsewhere(standing.elsewhere);
    const bool blocked = growth.blocked();
    // A space that could not grow may when others have given back.
    if (blocked && room && !others_ask) growth.Unblock(clock_->NowMs());
    evicts = blocked && !room && growth.short_of_blocks() && !space->state.give_back.under_way();
    needs_room = evicts && space->state.pressure.on();
    if (!room && not_for_it > 0 && growth.all_entered()) growth.set_may_grow(false);
    needs_slab = growth.NeedsSlab() && !growth.slabs().empty();
    promised = space->state.sessions.unmet_blocks() > 0;
  }
  // This space has nothing left to evict: it needs the memory more than a cache that no session uses.
  if (needs_room) {
    if (const auto idle = CloseIdleFor(*space, space->priority())) {
      Retire(idle);
      needs_slab = true;
      evicts = false;
    }
  }
  if (evicts) {
    asked = LevelWorths(space, facts.geometry.unit_bytes);
  } else if (standing.below && room_bytes < standing.reserve_bytes) {
    asked = LevelWorths(space, standing.reserve_bytes);
  }
  // What sessions were promised waits for nobody's wish for more cache.
  if (needs_slab && !promised &&
      budget_->Room(facts.rank_devices, facts.tenant) < 2 * facts.geometry.slab_bytes &&
      registry_->MustYield(*space, [this, &facts](const Space& other) {
        // What comes free here would be of no use to it while one of its other devices is full.
        const SpaceFacts& of_other = other.facts;
        return budget_->RoomWithout(facts.rank_devices, of_other.rank_devices, of_other.tenant) >=
               of_other.geometry.unit_bytes;
      })) {
    // It makes do with what it has, and asks again at the next round.
    SpaceLock lock(*space);
    space->state.growth.set_may_grow(false);
    needs_slab = false;
  }
  // An opening that makes slabs at this moment may do so for long, while other spaces are to be served here.
  bool tried = false;
  if (needs_slab && space->growth_mu.TryLock()) {
    tried = true;
    Settlement settlement(*space);
    // An error has been logged, or is no news: the pool goes on at its present capacity.
    space->MakeSlab(&settlement).IgnoreError();
    space->growth_mu.Unlock();
  }
  const bool gives_back = GiveBack(space.get());
  space->CollectOldSessions();
  ReclaimAhead(space.get());
  TidyUp(space.get());
  SpaceTurn turn(*space);
  SpaceState& state = space->state;
  state.sessions.EnterSlabs(turn);
  space->batches.RetryLackingBlocks(turn);
  state.Observe(state.pool.TakeDirectEvictions());
  const bool late_releases = turn.deferred.housekeep;
  state.pressure.AfterVerbs(turn);
  // One slab a round, so that every space has its turn.
  turn.deferred.housekeep =
      asked || gives_back || late_releases || (state.growth.NeedsSlab() && (tried || !needs_slab));
}

void Daemon::Destroy(Space* closing) {
  closing->DestroySlabs(Space::Slabs::kClosed);
  registry_->Closed(*closing);
}

void Daemon::Retire(const std::shared_ptr<Space>& space) {
  // The counts are kept before the memory goes, which takes a while: until they are, sums over spaces lack
  // them.
  SpaceSnapshot last;
  {
    SpaceLock lock(*space);
    last = SnapshotOf(space->state, clock_->NowMs());
  }
  retired_->Add(last);
  guard_->Forget(space->facts.id);
  Destroy(space.get());
  LogInfo("space closed", {{"space", space->facts.id}, {"tenant", space->facts.tenant}});
  // Others may grow now, which they should learn before they evict.
  if (housekeeper_ != nullptr) housekeeper_->Wake();
}

}  // namespace kvpool
