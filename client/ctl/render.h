// The daemon's answers as people read them. Unknown enum values, from a newer daemon, show as numbers.
#ifndef KVPOOL_CLIENT_CTL_RENDER_H_
#define KVPOOL_CLIENT_CTL_RENDER_H_

#include <string>

#include "absl/strings/string_view.h"
#include "kvpool/v1/operator.pb.h"

namespace kvpool::ctl {

// "sealed" of BLOCK_STATE_SEALED; the number of a state that this build does not know.
std::string StateName(int state);
std::string PriorityText(v1::PriorityClass priority);  // "batch".
// BLOCK_STATE_UNSPECIFIED: there is no state of this name.
v1::BlockState StateFromName(absl::string_view name);

std::string RenderStatus(const v1::GetStatsResponse& stats);
std::string RenderSpaces(const v1::ListSpacesResponse& spaces);
std::string RenderRecovery(const v1::GetRecoveryResponse& recovery);
std::string RenderTiers(const v1::ListTiersResponse& tiers);
std::string RenderPolicies(const v1::GetPoliciesResponse& policies);
std::string RenderGuard(const v1::GetGuardResponse& guard);
std::string RenderResetGuard(const v1::ResetGuardResponse& answer);
std::string RenderSetPolicy(const v1::SetPolicyResponse& answer, const v1::SetPolicyRequest& request);
std::string RenderSessions(const v1::ListSessionsResponse& sessions);
// Tells that an operator has ended the session.
std::string RenderEnded(const v1::SessionInfo& session);
std::string RenderErased(const std::string& tenant, const v1::EraseResponse& receipt);
std::string RenderBlocks(const v1::ListBlocksResponse& blocks);
// With `all`, every block of a long chain; else its ends.
std::string RenderExplanation(const v1::ExplainResponse& explanation, bool all);

}  // namespace kvpool::ctl

#endif  // KVPOOL_CLIENT_CTL_RENDER_H_
