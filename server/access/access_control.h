// The policy in force, and what its rules' sessions have of their limits. Thread-safe; its mutexes are leaves.
#ifndef KVPOOL_SERVER_ACCESS_ACCESS_CONTROL_H_
#define KVPOOL_SERVER_ACCESS_ACCESS_CONTROL_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/support/mutex.h"
#include "server/access/access_policy.h"

namespace kvpool {

// What the sessions of each rule have taken. Rules are known by name, so that what is taken counts after the policy
// has changed.
class AccessLedger {
 public:
  // RESOURCE_EXHAUSTED, with the numbers.
  absl::Status Take(const AccessRule& rule, uint32_t guaranteed_blocks);
  // Whatever the limits are.
  void Count(const std::string& rule, uint32_t guaranteed_blocks);
  void GiveBack(const std::string& rule, uint32_t guaranteed_blocks);
  uint64_t guaranteed_blocks(const std::string& rule);

 private:
  struct Taken {
    uint64_t sessions = 0, guaranteed_blocks = 0;
  };
  Mutex mu_;
  std::map<std::string, Taken> taken_ ABSL_GUARDED_BY(mu_);  // Rules with sessions.
};

// How fast the verbs of a rule's sessions come, all together. Any thread may ask.
class VerbPace {
 public:
  // A tenth of a second's come at once.
  static constexpr uint64_t kBurstNs = 100'000'000;

  // 0: they are taken, and may be applied. Else they are not, and to ask again before so many nanoseconds is in vain. However
  // many there are, they are taken once all that was taken before is due.
  uint64_t Take(uint64_t now_ns, uint64_t verbs);
  void set_rate(uint32_t verbs_a_second);

 private:
  std::atomic<uint64_t> ns_per_verb_{0};  // 0: there is no limit.
  std::atomic<uint64_t> taken_until_ns_{0};
};

// A session's part of its rule's limits, given back with this object.
class SessionShare {
 public:
  SessionShare() = default;
  SessionShare(SessionShare&& other) noexcept = default;
  SessionShare& operator=(SessionShare&& other) noexcept;
  ~SessionShare() { GiveBack(); }

 private:
  friend class AccessControl;
  SessionShare(std::shared_ptr<AccessLedger> ledger, std::string rule, uint32_t guaranteed_blocks)
      : ledger_(std::move(ledger)), rule_(std::move(rule)), guaranteed_blocks_(guaranteed_blocks) {}
  void GiveBack();

  std::shared_ptr<AccessLedger> ledger_;  // Null: there is nothing to give back.
  std::string rule_;
  uint32_t guaranteed_blocks_ = 0;
};

class AccessControl {
 public:
  explicit AccessControl(std::shared_ptr<const AccessPolicy> policy) : policy_(std::move(policy)) {}

  // Counts from now on; sessions that are open stay as they are. What it says of their spaces is for Daemon::ApplyRules.
  void Replace(std::shared_ptr<const AccessPolicy> policy) ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<const AccessPolicy> policy() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return policy_;
  }
  // As AccessPolicy::Admit, by the policy in force.
  absl::StatusOr<std::shared_ptr<const AccessRule>> Admit(const Peer& peer, AccessRole role,
                                                          absl::string_view what) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // The rule of this name in the policy in force; null: there is none.
  std::shared_ptr<const AccessRule> RuleNamed(absl::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // Takes what a session of the rule needs. RESOURCE_EXHAUSTED names rule, limit, and what is taken.
  absl::StatusOr<SessionShare> TakeSession(const AccessRule& rule, uint32_t guaranteed_blocks) const;
  // The most that the guarantee of a session could be, whose share was taken with this one. kNoAccessLimit: there is no limit.
  uint32_t MayBeGuaranteed(const AccessRule& rule, uint32_t guaranteed_blocks) const;
  // The share of a session that is open already: it goes on whatever the limits are, and counts.
  SessionShare CountSession(const AccessRule& rule, uint32_t guaranteed_blocks) const;
  // The rule's pace, as the policy in force has it at any time. It lives as long as this object.
  VerbPace* PaceOf(const AccessRule& rule) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  std::shared_ptr<const AccessRule> Find(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint32_t VerbsASecondOf(const std::string& rule) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<AccessLedger> ledger_ = std::make_shared<AccessLedger>();
  mutable Mutex mu_;
  std::shared_ptr<const AccessPolicy> policy_ ABSL_GUARDED_BY(mu_);
  // Rules that have ever had sessions, by name.
  mutable std::map<std::string, VerbPace> paces_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_ACCESS_CONTROL_H_
