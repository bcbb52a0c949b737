// Every request is checked here, before anything else looks at it, against the limits that the contract
// documents. Errors are INVALID_ARGUMENT and name the field, its value and the limit. Sizes from the wire are
// added and multiplied in 128 bits or not at all.
//
// Stale refs, caps, credit and a mismatch with a space take state to check, and are checked
// where the state is.
#ifndef KVPOOL_SERVER_WIRE_VALIDATE_H_
#define KVPOOL_SERVER_WIRE_VALIDATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/operator.pb.h"
#include "proto/support/limits.h"

namespace kvpool {

absl::Status CheckTenant(const std::string& tenant);
absl::Status ValidateOpenSession(const v1::OpenSession& request);
absl::Status ValidateAddMember(const v1::AddMember& request);
absl::Status ValidateClientName(const std::string& name);

// How many blocks and keys a verb names. Nothing has to be checked before.
uint64_t CountNames(const v1::Operation& operation);

// What the operations of a batch come to, by one look at each. Nothing has to be checked before.
struct BatchSize {
  uint64_t names = 0;
  uint64_t beside = 0;  // What is heavy about them but their names, as the work that so many names are.
  bool fences = false;
  bool closes = false;  // It ends the session.
};
BatchSize SizeOf(absl::Span<const v1::Operation* const> operations);

// The batch as a whole: sequence, counts. Its operations are checked one by one.
absl::Status ValidateBatch(const v1::StepRequest& request, const BatchSize& size);
// Likewise for a unary call and its one operation.
absl::Status ValidateCall(const v1::Call& call, const v1::Operation& operation);
// `groups`: how many layer groups the space has.
absl::Status ValidateOperation(const v1::Operation& operation, uint32_t groups);

absl::Status ValidateEvict(const v1::EvictRequest& request);
absl::Status ValidateErase(const v1::EraseRequest& request);
absl::Status ValidateListBlocks(const v1::ListBlocksRequest& request);
absl::Status ValidateRevoke(const v1::RevokeRequest& request);
absl::Status ValidateEndSession(const v1::EndSessionRequest& request);
absl::Status ValidateExplain(const v1::ExplainRequest& request);
absl::Status ValidatePinPrefix(const v1::PinPrefixRequest& request);
absl::Status ValidateSetPolicy(const v1::SetPolicyRequest& request);
absl::Status ValidateGetGuard(const v1::GetGuardRequest& request);
absl::Status ValidateResetGuard(const v1::ResetGuardRequest& request);
absl::Status ValidateAttachTier(const v1::AttachTierRequest& request);
absl::Status ValidateDrainTier(const v1::DrainTierRequest& request);
absl::Status ValidateDetachTier(const v1::DetachTierRequest& request);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_VALIDATE_H_
