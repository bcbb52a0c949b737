#include "server/access/access_control.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

absl::Status Exhausted(const AccessRule& rule, absl::string_view field, uint64_t taken, uint64_t asked,
                       uint32_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat("rule [", rule.name, "] allows ", field, " = ", limit,
                                                   ": ", taken, " are taken, ", asked, " asked for"));
}

}  // namespace

absl::Status AccessLedger::Take(const AccessRule& rule, uint32_t guaranteed_blocks) {
  MutexLock lock(&mu_);
  const auto found = taken_.find(rule.name);
  const Taken before = found == taken_.end() ? Taken() : found->second;
  const AccessLimits& limits = rule.limits;
  if (before.sessions >= limits.sessions) {
    return Exhausted(rule, "sessions", before.sessions, 1, limits.sessions);
  }
  if (guaranteed_blocks > 0 && limits.guaranteed_blocks != kNoAccessLimit &&
      before.guaranteed_blocks + guaranteed_blocks > limits.guaranteed_blocks) {
    return Exhausted(rule, "guaranteed-blocks", before.guaranteed_blocks, guaranteed_blocks,
                     limits.guaranteed_blocks);
  }
  taken_[rule.name] = {.sessions = before.sessions + 1,
                       .guaranteed_blocks = before.guaranteed_blocks + guaranteed_blocks};
  return absl::OkStatus();
}

void AccessLedger::Count(const std::string& rule, uint32_t guaranteed_blocks) {
  MutexLock lock(&mu_);
  Taken& taken = taken_[rule];
  ++taken.sessions;
  taken.guaranteed_blocks += guaranteed_blocks;
}

void AccessLedger::GiveBack(const std::string& rule, uint32_t guaranteed_blocks) {
  MutexLock lock(&mu_);
  const auto found = taken_.find(rule);
  KVPOOL_CHECK(found != taken_.end() && found->second.guaranteed_blocks >= guaranteed_blocks,
               "rule %s gives back what it did not take", rule.c_str());
  found->second.guaranteed_blocks -= guaranteed_blocks;
  if (--found->second.sessions == 0) taken_.erase(found);
}

void SessionShare::GiveBack() {
  if (const auto ledger = std::exchange(ledger_, nullptr)) ledger->GiveBack(rule_, guaranteed_blocks_);
}

SessionShare& SessionShare::operator=(SessionShare&& other) noexcept {
  GiveBack();
  ledger_ = std::move(other.ledger_);
  rule_ = std::move(other.rule_);
  guaranteed_blocks_ = other.guaranteed_blocks_;
  return *this;
}

void AccessControl::Replace(std::shared_ptr<const AccessPolicy> policy) {
  MutexLock lock(&mu_);
  policy_.swap(policy);
}

absl::StatusOr<std::shared_ptr<const AccessRule>> AccessControl::Admit(const Peer& peer, AccessRole role,
                                                                       absl::string_view what) const {
  std::shared_ptr<const AccessPolicy> policy;
  {
    MutexLock lock(&mu_);
    policy = policy_;
  }
  return policy->Admit(peer, role, what);
}

absl::StatusOr<SessionShare> AccessControl::TakeSession(const AccessRule& rule,
                                                        uint32_t guaranteed_blocks) const {
  RETURN_IF_ERROR(ledger_->Take(rule, guaranteed_blocks));
  return SessionShare(ledger_, rule.name, guaranteed_blocks);
}

SessionShare AccessControl::CountSession(const AccessRule& rule, uint32_t guaranteed_blocks) const {
  ledger_->Count(rule.name, guaranteed_blocks);
  return SessionShare(ledger_, rule.name, guaranteed_blocks);
}

}  // namespace kvpool
