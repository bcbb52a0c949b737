#include "server/rpc/rpc_methods.h"

#include <string>
#include <utility>

namespace kvpool {
namespace {

using OperatorService = v1::Operator::AsyncService;

// A method that the daemon answers within the call.
template <typename Service, typename Request, typename Response>
void AddImmediate(const RpcSite<Service>& site, Daemon* daemon, const std::string& name,
                  std::type_identity_t<typename UnaryMethod<Service, Request, Response>::Accept> accept,
                  absl::Status (Daemon::*method)(const Request&, Response*)) {
  AddUnary<Request, Response>(site, name, accept,
                              [daemon, method](Request* request, Response* response, const UnaryDone& done) {
                                done((daemon->*method)(*request, response));
                              });
}

// The unary form of a Step operation: the same handler, under the call's sequence.
template <typename Request, typename Verb, typename Result>
void AddVerb(const RpcSite<EngineService>& site, Daemon* daemon, const std::string& name,
             std::type_identity_t<typename UnaryMethod<EngineService, Request, Result>::Accept> accept,
             Verb* (Request::*of_request)(), Verb* (v1::Operation::*of_operation)(),
             const Result& (v1::OperationResult::*of_result)() const) {
  AddUnary<Request, Result>(site, name, accept, [=](Request* request, Result* response, UnaryDone done) {
    v1::Operation operation;
    (operation.*of_operation)()->Swap((request->*of_request)());
    daemon->ApplyUnary(request->call(), std::move(operation),
                       [response, of_result, done = std::move(done)](const v1::OperationResult& result) {
                         if (result.code() == 0) *response = (result.*of_result)();
                         done(absl::Status(static_cast<absl::StatusCode>(result.code()), result.message()));
                       });
  });
}

}  // namespace

void AcceptEngineCalls(const RpcSite<EngineService>& site, Daemon* daemon) {
  using E = EngineService;
  using O = v1::Operation;
  using R = v1::OperationResult;
  AddImmediate(site, daemon, "OpenSession", &E::RequestOpenSession, &Daemon::OpenSession);
  AddImmediate(site, daemon, "AddMember", &E::RequestAddMember, &Daemon::AddMember);
  AddVerb(site, daemon, "Lease", &E::RequestLease, &v1::LeaseRequest::mutable_lease, &O::mutable_lease,
          &R::lease);
  AddVerb(site, daemon, "Seal", &E::RequestSeal, &v1::SealRequest::mutable_seal, &O::mutable_seal, &R::seal);
  AddVerb(site, daemon, "Match", &E::RequestMatch, &v1::MatchRequest::mutable_match, &O::mutable_match,
          &R::match);
  AddVerb(site, daemon, "Release", &E::RequestRelease, &v1::ReleaseRequest::mutable_release,
          &O::mutable_release, &R::release);
  AddVerb(site, daemon, "Ref", &E::RequestRef, &v1::RefRequest::mutable_ref, &O::mutable_ref, &R::ref);
  AddVerb(site, daemon, "Touch", &E::RequestTouch, &v1::TouchRequest::mutable_touch, &O::mutable_touch,
          &R::touch);
  AddVerb(site, daemon, "Fence", &E::RequestFence, &v1::FenceRequest::mutable_fence, &O::mutable_fence,
          &R::fence);
  AddVerb(site, daemon, "Pin", &E::RequestPin, &v1::PinRequest::mutable_pin, &O::mutable_pin, &R::pin);
  AddVerb(site, daemon, "Unpin", &E::RequestUnpin, &v1::UnpinRequest::mutable_unpin, &O::mutable_unpin,
          &R::unpin);
  AddVerb(site, daemon, "SetRetention", &E::RequestSetRetention,
          &v1::SetRetentionRequest::mutable_set_retention, &O::mutable_set_retention, &R::set_retention);
  AddVerb(site, daemon, "WarmupDone", &E::RequestWarmupDone, &v1::WarmupDoneRequest::mutable_warmup_done,
          &O::mutable_warmup_done, &R::warmup_done);
  AddVerb(site, daemon, "Score", &E::RequestScore, &v1::ScoreRequest::mutable_score, &O::mutable_score,
          &R::score);
  AddVerb(site, daemon, "Prune", &E::RequestPrune, &v1::PruneRequest::mutable_prune, &O::mutable_prune,
          &R::prune);
  AddVerb(site, daemon, "Compact", &E::RequestCompact, &v1::CompactRequest::mutable_compact,
          &O::mutable_compact, &R::compact);
  AddVerb(site, daemon, "PlanBudgets", &E::RequestPlanBudgets, &v1::PlanBudgetsRequest::mutable_plan_budgets,
          &O::mutable_plan_budgets, &R::plan_budgets);
  AddVerb(site, daemon, "PutEpisode", &E::RequestPutEpisode, &v1::PutEpisodeRequest::mutable_put_episode,
          &O::mutable_put_episode, &R::put_episode);
  AddVerb(site, daemon, "ChooseEpisode", &E::RequestChooseEpisode,
          &v1::ChooseEpisodeRequest::mutable_choose_episode, &O::mutable_choose_episode, &R::choose_episode);
  AddVerb(site, daemon, "CloseSession", &E::RequestCloseSession,
          &v1::CloseSessionRequest::mutable_close_session, &O::mutable_close_session, &R::close_session);
  AcceptStepCalls(site, daemon);
}

void AcceptOperatorCalls(const RpcSite<OperatorService>& site, Daemon* daemon, HealthState* health) {
  using S = OperatorService;
  AddImmediate(site, daemon, "Evict", &S::RequestEvict, &Daemon::Evict);
  AddImmediate(site, daemon, "ListSpaces", &S::RequestListSpaces, &Daemon::ListSpaces);
  AddImmediate(site, daemon, "ListSessions", &S::RequestListSessions, &Daemon::ListSessions);
  AddImmediate(site, daemon, "ListBlocks", &S::RequestListBlocks, &Daemon::ListBlocks);
  AddImmediate(site, daemon, "GetStats", &S::RequestGetStats, &Daemon::GetStats);
  AddImmediate(site, daemon, "Revoke", &S::RequestRevoke, &Daemon::Revoke);
  AddImmediate(site, daemon, "EndSession", &S::RequestEndSession, &Daemon::EndSession);
  AddUnary<v1::DrainRequest, v1::DrainResponse>(
      site, "Drain", &S::RequestDrain,
      [daemon, health](v1::DrainRequest* request, v1::DrainResponse* response, const UnaryDone& done) {
        const absl::Status drained = daemon->Drain(*request, response);
        if (drained.ok()) health->SetServing(request->cancel());
        done(drained);
      });
  AddImmediate(site, daemon, "Explain", &S::RequestExplain, &Daemon::Explain);
  AddImmediate(site, daemon, "PinPrefix", &S::RequestPinPrefix, &Daemon::PinPrefix);
  AddImmediate(site, daemon, "GetPolicies", &S::RequestGetPolicies, &Daemon::GetPolicies);
  AddImmediate(site, daemon, "SetPolicy", &S::RequestSetPolicy, &Daemon::SetPolicy);
}

}  // namespace kvpool
