#include "server/wire/validate.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/replacement/policy.h"
#include "server/wire/field_checks.h"
#include "server/wire/operation.h"
#include "server/wire/validate_score.h"

namespace kvpool {
namespace {

// ---- Verbs

template <typename Verb>
absl::Status CheckBlocks(const char* field, const Verb& verb) {
  return CheckRange(field, verb.blocks_size(), 1, kMaxNames);
}

absl::Status CheckGroup(const char* field, uint32_t group, uint32_t groups) {
  if (group < groups) return absl::OkStatus();
  return Invalid(absl::StrCat(field, " is ", group, "; the layout has ", groups, " groups"));
}

absl::Status Check(const v1::Lease& lease) {
  RETURN_IF_ERROR(CheckKnown("lease", lease));
  RETURN_IF_ERROR(CheckRange("lease.count", lease.count(), 1, kMaxNames));
  if (lease.min() > lease.count()) {
    return Invalid(
        absl::StrCat("lease.min is ", lease.min(), "; must be at most lease.count, ", lease.count()));
  }
  return absl::OkStatus();
}

absl::Status Check(const v1::Seal& seal, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("seal", seal));
  RETURN_IF_ERROR(CheckGroup("seal.group", seal.group(), groups));
  RETURN_IF_ERROR(CheckBlocks("seal.blocks", seal));
  RETURN_IF_ERROR(CheckRange("seal.key_bytes", seal.key_bytes(), 1, kMaxKeyBytes));
  RETURN_IF_ERROR(CheckRange("seal.keys_per_block", seal.keys_per_block(), 0, kMaxKeysPerBlock));
  const uint64_t keys_per_block = seal.keys_per_block() == 0 ? 1 : seal.keys_per_block();
  // After the checks above this is at most kMaxNames * kMaxKeysPerBlock * kMaxKeyBytes,
  // which does not overflow.
  const uint64_t expected = seal.blocks_size() * keys_per_block * seal.key_bytes();
  if (seal.keys().size() != expected) {
    return Invalid(absl::StrCat("seal.keys has ", seal.keys().size(), " bytes; ", seal.blocks_size(),
                                " blocks * ", keys_per_block, " keys * ", seal.key_bytes(), " bytes are ",
                                expected));
  }
  if (!seal.parent_key().empty() && seal.parent_key().size() != seal.key_bytes()) {
    return Invalid(absl::StrCat("seal.parent_key has ", seal.parent_key().size(),
                                " bytes; must have none or seal.key_bytes, ", seal.key_bytes()));
  }
  return absl::OkStatus();
}

absl::Status Check(const v1::Match& match, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("match", match));
  RETURN_IF_ERROR(CheckRange("match.groups", match.groups_size(), 1, kMaxGroups));
  RETURN_IF_ERROR(CheckRange("match.wait_ms", match.wait_ms(), 0, kMaxMatchWaitMs));
  uint32_t seen = 0;
  for (const v1::GroupKeys& keys : match.groups()) {
    RETURN_IF_ERROR(CheckKnown("match.groups", keys));
    RETURN_IF_ERROR(CheckGroup("match.groups.group", keys.group(), groups));
    if ((seen & 1u << keys.group()) != 0) {
      return Invalid(absl::StrCat("match.groups names group ", keys.group(), " twice"));
    }
    seen |= 1u << keys.group();
    RETURN_IF_ERROR(CheckRange("match.groups.key_bytes", keys.key_bytes(), 1, kMaxKeyBytes));
    if (keys.keys().size() % keys.key_bytes() != 0) {
      return Invalid(absl::StrCat("match.groups.keys has ", keys.keys().size(),
                                  " bytes; must be a multiple of key_bytes, ", keys.key_bytes()));
    }
    RETURN_IF_ERROR(
        CheckRange("keys in match.groups.keys", keys.keys().size() / keys.key_bytes(), 0, kMaxNames));
  }
  return absl::OkStatus();
}

absl::Status Check(const v1::Fence& fence) {
  RETURN_IF_ERROR(CheckKnown("fence", fence));
  return CheckRange("fence.step", fence.step(), 0, INT64_MAX);
}

absl::Status Check(const v1::Release& release) {
  RETURN_IF_ERROR(CheckKnown("release", release));
  RETURN_IF_ERROR(CheckBlocks("release.blocks", release));
  RETURN_IF_ERROR(CheckRange("release.reuse", static_cast<uint32_t>(release.reuse()), 0, v1::Reuse_MAX));
  return CheckRange("release.category", release.category(), 0, kMaxCategory);
}

absl::Status Check(const v1::Pin& pin) {
  RETURN_IF_ERROR(CheckKnown("pin", pin));
  RETURN_IF_ERROR(CheckBlocks("pin.blocks", pin));
  return CheckRange("pin.ttl_ms", pin.ttl_ms(), 1, kMaxTtlMs);
}

absl::Status Check(const v1::SetRetention& retention) {
  RETURN_IF_ERROR(CheckKnown("set_retention", retention));
  RETURN_IF_ERROR(CheckBlocks("set_retention.blocks", retention));
  RETURN_IF_ERROR(CheckRange("set_retention.priority", retention.priority(), 0, kMaxPriority));
  RETURN_IF_ERROR(CheckRange("set_retention.ttl_ms", retention.ttl_ms(), 1, kMaxTtlMs));
  return CheckRange("set_retention.half_life_ms", retention.half_life_ms(), 0, kMaxTtlMs);
}

template <typename Verb>
absl::Status CheckNamed(const char* what, const char* field, const Verb& verb) {
  RETURN_IF_ERROR(CheckKnown(what, verb));
  return CheckBlocks(field, verb);
}

// May this verb wait for a step?
bool MayWait(v1::Operation::VerbCase verb) {
  switch (verb) {
    case v1::Operation::kSeal:
    case v1::Operation::kRelease:
    case v1::Operation::kRef:
    case v1::Operation::kPin:
    case v1::Operation::kUnpin:
    case v1::Operation::kSetRetention:
    case v1::Operation::kWarmupDone:
    case v1::Operation::kCloseSession:
    case v1::Operation::kScore:
    case v1::Operation::kSelect:
    case v1::Operation::kPrune:
    case v1::Operation::kCompact:
    case v1::Operation::kPlanBudgets:
    case v1::Operation::kPutEpisode:
    case v1::Operation::kChooseEpisode:
      return true;
    case v1::Operation::kLease:
    case v1::Operation::kMatch:
    case v1::Operation::kTouch:
    case v1::Operation::kFence:
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
    case v1::Operation::VERB_NOT_SET:
      return false;
  }
  return false;
}

}  // namespace

// All sizes are those of data at hand, so that nothing overflows.
uint64_t CountNames(const v1::Operation& operation) {
  if (operation.has_lease()) return operation.lease().count();
  if (!operation.has_match()) return CountBlocks(operation);
  uint64_t names = 0;
  for (const v1::GroupKeys& group : operation.match().groups()) {
    names += group.keys().size() / (group.key_bytes() == 0 ? 1 : group.key_bytes());
  }
  return names;
}

BatchSize SizeOf(absl::Span<const v1::Operation* const> operations) {
  BatchSize size;
  for (const v1::Operation* const operation : operations) {
    const uint64_t names = CountNames(*operation);
    size.names += names;
    switch (operation->verb_case()) {
      case v1::Operation::kLease:
      case v1::Operation::kMatch:
      case v1::Operation::kRelease:
        break;
      case v1::Operation::kFence:
        size.fences = true;
        break;
      case v1::Operation::kCloseSession:
        size.closes = true;
        break;
      default:
        size.beside += WeightOf(*operation) - names + NumbersOf(*operation);
        break;
    }
  }
  return size;
}

absl::Status ValidateBatch(const v1::StepRequest& request, const BatchSize& size) {
  RETURN_IF_ERROR(CheckKnown("step", request));
  if (request.sequence() == 0) return Invalid("sequence is 0; sequences start at 1");
  RETURN_IF_ERROR(CheckRange("operations in the batch", request.operations_size(), 0, kMaxBatchOperations));
  RETURN_IF_ERROR(CheckRange("prefills in the batch", request.prefills_size(), 0, kMaxPrefillSamples));
  for (const v1::PrefillSample& sample : request.prefills()) {
    RETURN_IF_ERROR(CheckRange("prefills.tokens", sample.tokens(), 1, kMaxPrefillTokens));
    RETURN_IF_ERROR(CheckRange("prefills.tokens_before", sample.tokens_before(), 0, kMaxPrefillBefore));
    RETURN_IF_ERROR(CheckRange("prefills.microseconds", sample.microseconds(), 1, kMaxPrefillMicroseconds));
  }
  return CheckRange("blocks and keys in the batch", size.names, 0, kMaxNames);
}

absl::Status ValidateCall(const v1::Call& call, const v1::Operation& operation) {
  RETURN_IF_ERROR(CheckKnown("call", call));
  if (call.sequence() == 0) return Invalid("call.sequence is 0; sequences start at 1");
  return CheckRange("blocks and keys in the call", CountNames(operation), 0, kMaxNames);
}

absl::Status ValidateOperation(const v1::Operation& operation, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("operation", operation));
  if (operation.after() != 0) {
    if (!MayWait(operation.verb_case())) {
      return Invalid(absl::StrCat("after is ", operation.after(),
                                  "; not allowed with lease, match, touch, fence, ",
                                  "open_session, add_member"));
    }
    RETURN_IF_ERROR(CheckRange("after", operation.after(), 0, INT64_MAX));
  }
  switch (operation.verb_case()) {
    case v1::Operation::kLease:
      return Check(operation.lease());
    case v1::Operation::kSeal:
      return Check(operation.seal(), groups);
    case v1::Operation::kMatch:
      return Check(operation.match(), groups);
    case v1::Operation::kRelease:
      return Check(operation.release());
    case v1::Operation::kRef:
      return CheckNamed("ref", "ref.blocks", operation.ref());
    case v1::Operation::kTouch:
      return CheckNamed("touch", "touch.blocks", operation.touch());
    case v1::Operation::kFence:
      return Check(operation.fence());
    case v1::Operation::kPin:
      return Check(operation.pin());
    case v1::Operation::kUnpin:
      return CheckNamed("unpin", "unpin.blocks", operation.unpin());
    case v1::Operation::kSetRetention:
      return Check(operation.set_retention());
    case v1::Operation::kWarmupDone:
      return CheckKnown("warmup_done", operation.warmup_done());
    case v1::Operation::kCloseSession:
      return CheckKnown("close_session", operation.close_session());
    case v1::Operation::kScore:
      return ValidateScore(operation.score(), groups);
    case v1::Operation::kSelect:
      return ValidateSelect(operation.select(), groups);
    case v1::Operation::kPrune:
      return ValidatePrune(operation.prune(), groups);
    case v1::Operation::kCompact:
      return ValidateCompact(operation.compact(), groups);
    case v1::Operation::kPlanBudgets:
      return ValidatePlanBudgets(operation.plan_budgets(), groups);
    case v1::Operation::kPutEpisode:
      return ValidatePutEpisode(operation.put_episode(), groups);
    case v1::Operation::kChooseEpisode:
      return ValidateChooseEpisode(operation.choose_episode());
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
      return Invalid("open_session and add_member come alone, in the first batch of a stream");
    case v1::Operation::VERB_NOT_SET:
      return Invalid("operation has no verb");
  }
  return Invalid("operation has no verb");
}

absl::Status ValidateClientName(const std::string& name) {
  return CheckSize("client_name", name, 0, kMaxClientNameBytes);
}

// ---- Operator requests

absl::Status ValidateEvict(const v1::EvictRequest& request) {
  RETURN_IF_ERROR(CheckKnown("evict", request));
  RETURN_IF_ERROR(CheckSize("key", request.key(), 0, kMaxKeyBytes));
  return CheckRange("group", request.group(), 0, kMaxGroups - 1);
}

absl::Status ValidateErase(const v1::EraseRequest& request) {
  RETURN_IF_ERROR(CheckKnown("erase", request));
  // Its name, and an uid behind it.
  constexpr size_t kMostUidBytes = sizeof("@4294967295") - 1;
  return CheckSize("tenant", request.tenant(), 1, kMaxTenantBytes + kMostUidBytes);
}

absl::Status ValidateListBlocks(const v1::ListBlocksRequest& request) {
  RETURN_IF_ERROR(CheckKnown("list_blocks", request));
  if (request.space() == 0) return Invalid("space is 0; required");
  if (!v1::BlockState_IsValid(request.state())) {
    return Invalid(absl::StrCat("state is ", static_cast<int>(request.state()), "; must be 0 to 5"));
  }
  return CheckRange("limit", request.limit(), 0, kMaxListedBlocks);
}

absl::Status ValidateRevoke(const v1::RevokeRequest& request) {
  RETURN_IF_ERROR(CheckKnown("revoke", request));
  return CheckRange("blocks", request.blocks(), 1, UINT32_MAX);
}

absl::Status ValidateEndSession(const v1::EndSessionRequest& request) {
  RETURN_IF_ERROR(CheckKnown("end_session", request));
  return request.session() == 0 ? Invalid("session is 0; required") : absl::OkStatus();
}

absl::Status ValidateExplain(const v1::ExplainRequest& request) {
  RETURN_IF_ERROR(CheckKnown("explain", request));
  RETURN_IF_ERROR(CheckRange("group", request.group(), 0, kMaxGroups - 1));
  switch (request.subject_case()) {
    case v1::ExplainRequest::kBlock:
      if (request.space() == 0) return Invalid("space is 0; required to explain a block");
      return absl::OkStatus();
    case v1::ExplainRequest::kKey:
      return CheckSize("key", request.key(), 1, kMaxKeyBytes);
    case v1::ExplainRequest::SUBJECT_NOT_SET:
      return Invalid("subject is missing: a block or a key");
  }
  return Invalid("subject is missing: a block or a key");
}

absl::Status ValidatePinPrefix(const v1::PinPrefixRequest& request) {
  RETURN_IF_ERROR(CheckKnown("pin_prefix", request));
  RETURN_IF_ERROR(CheckSize("key", request.key(), 1, kMaxKeyBytes));
  RETURN_IF_ERROR(CheckRange("group", request.group(), 0, kMaxGroups - 1));
  return CheckRange("ttl_ms", request.ttl_ms(), 0, kMaxTtlMs);
}

absl::Status ValidateSetPolicy(const v1::SetPolicyRequest& request) {
  RETURN_IF_ERROR(CheckKnown("set_policy", request));
  return MakeReplacementPolicy(request.policy(), 1).status();
}

absl::Status ValidateGetGuard(const v1::GetGuardRequest& request) {
  RETURN_IF_ERROR(CheckKnown("get_guard", request));
  return CheckSize("policy", request.policy(), 0, kMaxPolicyNameBytes);
}

absl::Status ValidateResetGuard(const v1::ResetGuardRequest& request) {
  RETURN_IF_ERROR(CheckKnown("reset_guard", request));
  return CheckSize("policy", request.policy(), 0, kMaxPolicyNameBytes);
}

absl::Status ValidateAttachTier(const v1::AttachTierRequest& request) {
  RETURN_IF_ERROR(CheckKnown("attach_tier", request));
  RETURN_IF_ERROR(CheckSize("spec", request.spec(), 1, kMaxTierSpecBytes));
  return CheckRange("timeout_ms", request.timeout_ms(), 1, kMaxTierTimeoutMs);
}

absl::Status ValidateDrainTier(const v1::DrainTierRequest& request) {
  RETURN_IF_ERROR(CheckKnown("drain_tier", request));
  RETURN_IF_ERROR(CheckSize("tier", request.tier(), 1, kMaxTierNameBytes));
  return CheckRange("timeout_ms", request.timeout_ms(), 0, kMaxTierTimeoutMs);
}

absl::Status ValidateDetachTier(const v1::DetachTierRequest& request) {
  RETURN_IF_ERROR(CheckKnown("detach_tier", request));
  RETURN_IF_ERROR(CheckSize("tier", request.tier(), 1, kMaxTierNameBytes));
  return CheckRange("timeout_ms", request.timeout_ms(), 0, kMaxTierTimeoutMs);
}

}  // namespace kvpool
