// From an engine's OpenSession to the facts of a space, and whether a space that exists has the facts
// it asks for.
#ifndef KVPOOL_SERVER_DAEMON_SPACE_TERMS_H_
#define KVPOOL_SERVER_DAEMON_SPACE_TERMS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device.h"
#include "server/access/access_control.h"
#include "server/access/access_policy.h"
#include "server/daemon/options.h"
#include "server/pool/block_pool.h"
#include "server/space/give_back.h"
#include "server/space/space_facts.h"

namespace kvpool {

struct TenantScope {
  std::string name;   // "default".
  std::string scope;  // "default@1000", or the name where a rule lists it: @ is in no name.
};
// The tenant that `uid` is served as by the rule that it matches. PERMISSION_DENIED: the rule lists others.
absl::StatusOr<TenantScope> ScopeTenant(const AccessRule& rule, const std::string& tenant, uint32_t uid);

// What the rule says of spaces, `asked` by whoever opened one.
GiveBack::Terms TermsOf(const AccessRule& rule, v1::PriorityClass asked);
// Could an engine by this rule open a session in a space of this tenant? Of a tenant that belongs to one uid, whose name has that
// uid, it may be no other's.
bool IsForTenant(const AccessRule& rule, const std::string& tenant_scope);
// The same by the policy in force, which may have been read again since the rule admitted somebody: that says nothing of the
// space any more where IsForTenant is false, or where no rule has the name, and what the rule said stays.
GiveBack::Terms TermsInForce(const AccessControl& access, const AccessRule& rule,
                             const std::string& tenant_scope, v1::PriorityClass asked);

// The space's hash seed, and its name below the pool. Without a secret of tiers the seed is random. With one both are derived
// from it and from the fingerprint, layout, ranks and tenant in `facts`: the same after every start, and on every node
// that has the secret. A tenant that no rule names is "default@1000" here, with the uid: that is somebody else on another node,
// so only a tier that no other node shares may have such a space.
void DeriveKeys(const DaemonOptions& options, SpaceFacts* facts, uint32_t ranks);
// Whose values of a tier are. REQUIRES: there is a secret.
TierOwner OwnerBelow(const DaemonOptions& options, const std::string& tenant_scope);

// The facts of a new space. NOT_FOUND: no such device; INVALID_ARGUMENT: fewer devices than ranks.
absl::StatusOr<SpaceFacts> DescribeSpace(const DaemonOptions& options,
                                         const std::vector<std::unique_ptr<Device>>& devices,
                                         const v1::OpenSession& request, const TenantScope& tenant,
                                         uint64_t id);
// The name under which the registry has the space.
std::string SpaceKey(const std::string& tenant_scope, const v1::Fingerprint& fingerprint);
PoolOptions PoolOptionsOf(const DaemonOptions& options, const SpaceFacts& facts);

// FAILED_PRECONDITION: they differ; it names both sides.
absl::Status CheckSameModel(const SpaceFacts& facts, const v1::Layout& layout,
                            const v1::Fingerprint& fingerprint);
absl::Status CheckSameSpace(const SpaceFacts& facts, const std::vector<std::unique_ptr<Device>>& devices,
                            const v1::OpenSession& request);

// The facts that differ, as in `weights "a" there, "b" here; …`; empty: none does.
std::string DescribeFactDifferences(const v1::Fingerprint& there, const v1::Fingerprint& here);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_SPACE_TERMS_H_
