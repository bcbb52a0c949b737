#include "server/rpc/rpc_methods.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/access/peer.h"
#include "server/rpc/audit.h"
#include "server/rpc/caller.h"
#include "server/space/call_work.h"
#include "server/space/session.h"
#include "server/wire/field_checks.h"

namespace kvpool {
namespace {

using OperatorService = v1::Operator::AsyncService;

// So many unary calls of a session may wait for one of its own that is large.
constexpr size_t kMostWaitingUnaryCalls = 16;

// The unary form of an opening.
template <typename Request, typename Result>
void AddOpening(const RpcSite<EngineService>& site, Openings* openings, const std::string& name,
                std::type_identity_t<typename UnaryMethod<EngineService, Request, Result>::Accept> accept,
                void (Openings::*method)(const Caller&, const Request*, Result*, Openings::Done)) {
  AddUnary<Request, Result>(
      site, name, accept,
      [openings, method, queue = site.queue](const Caller& caller, Request* request, Result* result,
                                             UnaryDone done) {
        if (queue->resting()) return done(Resting());
        (openings->*method)(caller, request, result, std::move(done));
      },
      /*watched=*/true, [openings](const Result& result) { openings->OnUndelivered(result.member_token()); });
}

// Does an operator's call change something? Then it is audited, and an observer may not make it.
// What may take minutes runs one at a time, on one of the workers.
enum class Effect { kReads, kChanges, kChangesAtLength, kTakesTierAway };
// An erasure would not see a tier that is attached meanwhile: the two are one owner's. To have a tier left alone waits for neither.
constexpr uint64_t kAtLength = 1, kTierGoes = 2;
constexpr uint64_t OwnerOf(Effect effect) {
  return effect == Effect::kChangesAtLength ? kAtLength : effect == Effect::kTakesTierAway ? kTierGoes : 0;
}

// What operator calls need besides their request.
struct OperatorDesk {
  Daemon* daemon;
  CallWorkers* workers;
  RefusalLog* refusals;
};

// A method of operators. `run` is carried out by one of the workers.
template <typename Request, typename Response, typename Run>
void AddOperatorCall(
    const RpcSite<OperatorService>& site, const OperatorDesk& desk, const std::string& name,
    std::type_identity_t<typename UnaryMethod<OperatorService, Request, Response>::Accept> accept,
    Effect effect, Run run) {
  const AccessRole role = effect == Effect::kReads ? AccessRole::kObserver : AccessRole::kOperator;
  AddUnary<Request, Response>(
      site, name, accept,
      [=](const Caller& caller, Request* request, Response* response, const UnaryDone& done) {
        const absl::Status admitted = desk.daemon->access().Admit(caller.peer, role, name).status();
        if (!admitted.ok()) {
          desk.refusals->Add(caller.peer, name, admitted);
          return done(admitted);
        }
        if (const absl::Status known = CheckKnown(name, *request); !known.ok()) return done(known);
        const CallWorkers::Call call = {
            .bytes = request->ByteSizeLong(), .owner = OwnerOf(effect), .tenant = UserOf(caller.peer)};
        const absl::Status started = desk.workers->Start(call, [=, &caller] {
          if (caller.gone) return done(absl::CancelledError("the caller is gone"));
          const absl::Status status = run(caller.peer, *request, response);
          if (effect != Effect::kReads) AuditOperatorCall(caller.peer, name, *request, *response, status);
          done(status);
        });
        if (!started.ok()) done(started);
      },
      /*watched=*/true);
}

template <typename Request, typename Response>
void AddOperatorCall(
    const RpcSite<OperatorService>& site, const OperatorDesk& desk, const std::string& name,
    std::type_identity_t<typename UnaryMethod<OperatorService, Request, Response>::Accept> accept,
    Effect effect, absl::Status (Daemon::*method)(const Request&, Response*)) {
  AddOperatorCall<Request, Response>(
      site, desk, name, accept, effect,
      [daemon = desk.daemon, method](const Peer&, const Request& request, Response* response) {
        return (daemon->*method)(request, response);
      });
}

// Applies a verb that came by itself, here or on a thread for large ones. The request lives until `done` is called.
void ApplyVerb(const EngineHost& host, const RpcQueue& queue, const std::string& name, const v1::Call& call,
               const std::shared_ptr<Member>& member, const std::shared_ptr<v1::Operation>& operation,
               const std::function<void(const v1::OperationResult&)>& answer, const UnaryDone& done) {
  if (queue.resting()) return done(Resting());
  const bool large = WorkOf(*member->session, *operation) > kLargeCallNames;
  if (!large && member->session->large_calls == 0) {
    return host.daemon->ApplyUnary(call, std::move(*operation), answer);
  }
  // A large call, or one that would wait for another of its session's.
  const auto apply = [host, &call, member, operation, answer, large] {
    member->session->large_calls += large ? 1 : 0;
    host.daemon->ApplyUnary(call, std::move(*operation), answer);
    member->session->large_calls -= large ? 1 : 0;
  };
  const uint64_t session = LargeCallOwner(*member);
  if (const size_t waiting = host.large_calls->waiting(session); waiting >= kMostWaitingUnaryCalls) {
    return done(absl::ResourceExhaustedError(
        absl::StrCat(name, ": ", waiting, " unary calls of session ", member->session->terms.id,
                     " wait for a large one already; limit ", kMostWaitingUnaryCalls,
                     "; nothing was applied: call again, with the same sequence")));
  }
  const CallWorkers::Call facts = {
      .bytes = operation->ByteSizeLong(), .owner = session, .tenant = TenantOf(*member)};
  const absl::Status started = host.large_calls->Start(facts, apply);
  if (started.ok()) return;
  done(absl::ResourceExhaustedError(absl::StrCat(
      name, ": ", started.message(), "; nothing was applied: call again, with the same sequence")));
}

// What ends a use of blocks is not refused for its pace.
bool GivesBack(const v1::Operation& operation) {
  return operation.has_release() || operation.has_fence() || operation.has_close_session();
}

// The unary form of a Step operation: the same handler, under the call's sequence.
template <typename Request, typename Verb, typename Result>
void AddVerb(const RpcSite<EngineService>& site, const EngineHost& host, const std::string& name,
             std::type_identity_t<typename UnaryMethod<EngineService, Request, Result>::Accept> accept,
             Verb* (Request::*of_request)(), Verb* (v1::Operation::*of_operation)(),
             const Result& (v1::OperationResult::*of_result)() const) {
  AddUnary<Request, Result>(
      site, name, accept,
      [=, queue = site.queue, stats = site.stats](const Caller& caller, Request* request, Result* response,
                                                  const UnaryDone& done) {
        if (queue->resting()) return done(Resting());
        if (const absl::Status known = CheckKnown(name, *request); !known.ok()) return done(known);
        v1::Operation operation;
        (operation.*of_operation)()->Swap((request->*of_request)());
        auto answer = [response, of_result, done](const v1::OperationResult& result) {
          if (result.code() == 0) *response = (result.*of_result)();
          done(absl::Status(static_cast<absl::StatusCode>(result.code()), result.message()));
        };
        const absl::StatusOr<std::shared_ptr<Member>> member =
            host.daemon->FindMember(request->call().member_token());
        if (!member.ok()) return done(member.status());
        if (const absl::Status owner = CheckOwner(caller.peer, **member); !owner.ok()) {
          host.refusals->Add(caller.peer, name, owner);
          return done(owner);
        }
        const std::string& tenant = TenantOf(**member);
        const size_t bytes = operation.ByteSizeLong();
        if (const absl::Status turn = queue->CheckTurn(tenant, name, bytes); !turn.ok()) return done(turn);
        VerbPace* const pace = (*member)->session->pace.load(std::memory_order_relaxed);
        if (pace != nullptr && pace->Take(NowNs(), 1) > 0 && !GivesBack(operation)) {
          stats->CountPaced();
          return done(absl::ResourceExhaustedError(absl::StrCat(
              name,
              ": the sessions of its rule have sent more verbs than its verbs-a-second allows; nothing was "
              "applied: call again, with the same sequence")));
        }
        // Shared, since it may wait.
        auto moved = std::make_shared<v1::Operation>(std::move(operation));
        queue->InTurn(
            tenant,
            [=, member = *member] {
              ApplyVerb(host, *queue, name, request->call(), member, moved, answer, done);
            },
            bytes);
      });
}

}  // namespace

void AcceptEngineCalls(const RpcSite<EngineService>& site, const EngineHost& host) {
  using E = EngineService;
  using O = v1::Operation;
  using R = v1::OperationResult;
  AddOpening(site, host.openings, "OpenSession", &E::RequestOpenSession, &Openings::OpenSession);
  AddOpening(site, host.openings, "AddMember", &E::RequestAddMember, &Openings::AddMember);
  AddVerb(site, host, "Lease", &E::RequestLease, &v1::LeaseRequest::mutable_lease, &O::mutable_lease,
          &R::lease);
  AddVerb(site, host, "Seal", &E::RequestSeal, &v1::SealRequest::mutable_seal, &O::mutable_seal, &R::seal);
  AddVerb(site, host, "Match", &E::RequestMatch, &v1::MatchRequest::mutable_match, &O::mutable_match,
          &R::match);
  AddVerb(site, host, "Release", &E::RequestRelease, &v1::ReleaseRequest::mutable_release,
          &O::mutable_release, &R::release);
  AddVerb(site, host, "Ref", &E::RequestRef, &v1::RefRequest::mutable_ref, &O::mutable_ref, &R::ref);
  AddVerb(site, host, "Touch", &E::RequestTouch, &v1::TouchRequest::mutable_touch, &O::mutable_touch,
          &R::touch);
  AddVerb(site, host, "Fence", &E::RequestFence, &v1::FenceRequest::mutable_fence, &O::mutable_fence,
          &R::fence);
  AddVerb(site, host, "Pin", &E::RequestPin, &v1::PinRequest::mutable_pin, &O::mutable_pin, &R::pin);
  AddVerb(site, host, "Unpin", &E::RequestUnpin, &v1::UnpinRequest::mutable_unpin, &O::mutable_unpin,
          &R::unpin);
  AddVerb(site, host, "SetRetention", &E::RequestSetRetention,
          &v1::SetRetentionRequest::mutable_set_retention, &O::mutable_set_retention, &R::set_retention);
  AddVerb(site, host, "WarmupDone", &E::RequestWarmupDone, &v1::WarmupDoneRequest::mutable_warmup_done,
          &O::mutable_warmup_done, &R::warmup_done);
  AddVerb(site, host, "Score", &E::RequestScore, &v1::ScoreRequest::mutable_score, &O::mutable_score,
          &R::score);
  AddVerb(site, host, "Select", &E::RequestSelect, &v1::SelectRequest::mutable_select, &O::mutable_select,
          &R::select);
  AddVerb(site, host, "Prune", &E::RequestPrune, &v1::PruneRequest::mutable_prune, &O::mutable_prune,
          &R::prune);
  AddVerb(site, host, "Compact", &E::RequestCompact, &v1::CompactRequest::mutable_compact,
          &O::mutable_compact, &R::compact);
  AddVerb(site, host, "PlanBudgets", &E::RequestPlanBudgets, &v1::PlanBudgetsRequest::mutable_plan_budgets,
          &O::mutable_plan_budgets, &R::plan_budgets);
  AddVerb(site, host, "PutEpisode", &E::RequestPutEpisode, &v1::PutEpisodeRequest::mutable_put_episode,
          &O::mutable_put_episode, &R::put_episode);
  AddVerb(site, host, "ChooseEpisode", &E::RequestChooseEpisode,
          &v1::ChooseEpisodeRequest::mutable_choose_episode, &O::mutable_choose_episode, &R::choose_episode);
  AddVerb(site, host, "CloseSession", &E::RequestCloseSession,
          &v1::CloseSessionRequest::mutable_close_session, &O::mutable_close_session, &R::close_session);
  AcceptStepCalls(site, host);
}

void AcceptOperatorCalls(const RpcSite<OperatorService>& site, Daemon* daemon, HealthState* health,
                         CallWorkers* workers, RefusalLog* refusals, UpgradeCall upgrade) {
  using S = OperatorService;
  const OperatorDesk desk{.daemon = daemon, .workers = workers, .refusals = refusals};
  const auto add = [&](const std::string& name, auto accept, Effect effect, auto method) {
    AddOperatorCall(site, desk, name, accept, effect, method);
  };
  constexpr Effect kReads = Effect::kReads, kChanges = Effect::kChanges;
  add("Evict", &S::RequestEvict, kChanges, &Daemon::Evict);
  add("ListSpaces", &S::RequestListSpaces, kReads, &Daemon::ListSpaces);
  add("ListSessions", &S::RequestListSessions, kReads, &Daemon::ListSessions);
  add("ListBlocks", &S::RequestListBlocks, kReads, &Daemon::ListBlocks);
  add("GetStats", &S::RequestGetStats, kReads, &Daemon::GetStats);
  add("Revoke", &S::RequestRevoke, kChanges, &Daemon::Revoke);
  add("EndSession", &S::RequestEndSession, kChanges, &Daemon::EndSession);
  AddOperatorCall<v1::DrainRequest, v1::DrainResponse>(
      site, desk, "Drain", &S::RequestDrain, kChanges,
      [daemon, health](const Peer&, const v1::DrainRequest& request, v1::DrainResponse* response) {
        const absl::Status drained = daemon->Drain(request, response);
        if (drained.ok()) health->SetServing(request.cancel());
        return drained;
      });
  add("Explain", &S::RequestExplain, kReads, &Daemon::Explain);
  add("PinPrefix", &S::RequestPinPrefix, kChanges, &Daemon::PinPrefix);
  add("GetPolicies", &S::RequestGetPolicies, kReads, &Daemon::GetPolicies);
  add("SetPolicy", &S::RequestSetPolicy, kChanges, &Daemon::SetPolicy);
  add("SetShare", &S::RequestSetShare, kChanges, &Daemon::SetShare);
  add("GetGuard", &S::RequestGetGuard, kReads, &Daemon::GetGuard);
  add("ResetGuard", &S::RequestResetGuard, kChanges, &Daemon::ResetGuard);
  add("Erase", &S::RequestErase, Effect::kChangesAtLength, &Daemon::Erase);
  add("GetRecovery", &S::RequestGetRecovery, kReads, &Daemon::GetRecovery);
  add("ListTiers", &S::RequestListTiers, kReads, &Daemon::ListTiers);
  // It names files that the daemon reads, folders that it makes and servers that it writes to.
  AddOperatorCall<v1::AttachTierRequest, v1::AttachTierResponse>(
      site, desk, "AttachTier", &S::RequestAttachTier, Effect::kChangesAtLength,
      [daemon](const Peer& peer, const v1::AttachTierRequest& request, v1::AttachTierResponse* response) {
        const absl::Status may = CheckIsDaemonsUser(peer, "attach a tier");
        return may.ok() ? daemon->AttachTier(request, response) : may;
      });
  add("DrainTier", &S::RequestDrainTier, Effect::kTakesTierAway, &Daemon::DrainTier);
  add("DetachTier", &S::RequestDetachTier, Effect::kTakesTierAway, &Daemon::DetachTier);
  AddOperatorCall<v1::UpgradeRequest, v1::UpgradeResponse>(site, desk, "Upgrade", &S::RequestUpgrade,
                                                           kChanges, std::move(upgrade));
}

}  // namespace kvpool
