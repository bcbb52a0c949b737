// GetGuard and ResetGuard: what pruning policies do to attention outputs, and which are off.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/scoring/quality_guard.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {

void Daemon::FillGuarded(const std::vector<GuardedPolicy>& policies,
                         google::protobuf::RepeatedPtrField<v1::GuardedPolicy>* to) {
  for (const GuardedPolicy& policy : policies) {
    v1::GuardedPolicy* const info = to->Add();
    info->set_space(policy.space);
    if (const std::shared_ptr<Space> space = registry_->FindSpace(policy.space); space != nullptr)
      info->set_tenant(space->facts.tenant);
    info->set_policy(policy.policy);
    info->set_samples(policy.samples);
    info->set_mean(policy.mean);
    info->set_greatest(policy.greatest);
    info->set_off(policy.off);
    for (size_t i = 0; i < kGuardOutcomes; ++i) {
      if (policy.operations[i] > 0)
        (*info->mutable_operations())[kGuardOutcomeNames[i]] = policy.operations[i];
    }
    info->set_refused(policy.refused);
    info->set_last_failure(policy.last_failure);
  }
}

absl::Status Daemon::GetGuard(const v1::GetGuardRequest& request, v1::GetGuardResponse* response) {
  RETURN_IF_ERROR(ValidateGetGuard(request));
  response->set_share(guard_->options().share);
  response->set_bound(guard_->options().bound);
  response->set_samples(guard_->options().samples);
  FillGuarded(guard_->List(request.space(), request.policy()), response->mutable_policies());
  return absl::OkStatus();
}

absl::Status Daemon::ResetGuard(const v1::ResetGuardRequest& request, v1::ResetGuardResponse* response) {
  RETURN_IF_ERROR(ValidateResetGuard(request));
  const std::vector<GuardedPolicy> before = guard_->Reset(request.space(), request.policy());
  if (before.empty()) {
    return absl::NotFoundError(
        absl::StrCat("the guard knows of no drop by ",
                     request.policy().empty() ? "any policy" : "policy " + request.policy(),
                     request.space() == 0 ? "" : absl::StrCat(" in space ", request.space()),
                     guard_->options().share == 0 ? ": it measures nothing (--guard-share)" : ""));
  }
  for (const GuardedPolicy& policy : before) {
    if (policy.off)
      LogInfo("pruning policy turned on again", {{"space", policy.space}, {"policy", policy.policy}});
  }
  FillGuarded(before, response->mutable_policies());
  return absl::OkStatus();
}

}  // namespace kvpool
