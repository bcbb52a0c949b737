#include "server/access/access_control.h"

#include <algorithm>
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

uint64_t AccessLedger::guaranteed_blocks(const std::string& rule) {
  MutexLock lock(&mu_);
  const auto found = taken_.find(rule);
  return found == taken_.end() ? 0 : found->second.guaranteed_blocks;
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

uint64_t VerbPace::Take(uint64_t now_ns, uint64_t verbs) {
  const uint64_t each_ns = ns_per_verb_.load(std::memory_order_relaxed);
  if (each_ns == 0) return 0;
  uint64_t until = taken_until_ns_.load(std::memory_order_relaxed);
  do {
    if (until > now_ns + kBurstNs) return until - now_ns - kBurstNs;
  } while (!taken_until_ns_.compare_exchange_weak(until, std::max(until, now_ns) + verbs * each_ns,
                                                  std::memory_order_relaxed));
  return 0;
}

void VerbPace::set_rate(uint32_t verbs_a_second) {
  const uint64_t each_ns = verbs_a_second == kNoAccessLimit ? 0 : 1'000'000'000 / verbs_a_second;
  // What was taken at another rate is not waited for.
  if (ns_per_verb_.exchange(each_ns, std::memory_order_relaxed) != each_ns) {
    taken_until_ns_.store(0, std::memory_order_relaxed);
  }
}

void AccessControl::Replace(std::shared_ptr<const AccessPolicy> policy) {
  MutexLock lock(&mu_);
  policy_.swap(policy);
  for (auto& [rule, pace] : paces_) pace.set_rate(VerbsASecondOf(rule));
}

std::shared_ptr<const AccessRule> AccessControl::Find(absl::string_view name) const {
  for (const auto& rule : policy_->rules()) {
    if (rule->name == name) return rule;
  }
  return nullptr;
}

std::shared_ptr<const AccessRule> AccessControl::RuleNamed(absl::string_view name) const {
  MutexLock lock(&mu_);
  return Find(name);
}

uint32_t AccessControl::VerbsASecondOf(const std::string& rule) const {
  const auto found = Find(rule);
  return found == nullptr ? kNoAccessLimit : found->limits.verbs_a_second;
}

VerbPace* AccessControl::PaceOf(const AccessRule& rule) const {
  MutexLock lock(&mu_);
  const auto [pace, is_new] = paces_.try_emplace(rule.name);
  if (is_new) pace->second.set_rate(VerbsASecondOf(rule.name));
  return &pace->second;
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

uint32_t AccessControl::MayBeGuaranteed(const AccessRule& rule, uint32_t guaranteed_blocks) const {
  const uint64_t limit = rule.limits.guaranteed_blocks, held = rule.limits.held_blocks;
  if (limit == kNoAccessLimit) return static_cast<uint32_t>(held);
  // Sessions of an earlier daemon count whatever the limit is.
  const uint64_t taken = ledger_->guaranteed_blocks(rule.name);
  return static_cast<uint32_t>(std::min(limit - std::min(limit, taken) + guaranteed_blocks, held));
}

SessionShare AccessControl::CountSession(const AccessRule& rule, uint32_t guaranteed_blocks) const {
  ledger_->Count(rule.name, guaranteed_blocks);
  return SessionShare(ledger_, rule.name, guaranteed_blocks);
}

}  // namespace kvpool
