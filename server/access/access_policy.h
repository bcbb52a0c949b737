// Who may do what: rules, of which the first that matches a peer counts.
//
//   # comment
//   [engines of team a]               the rule's name
//   uid = 1000, alice                 whom it matches: each line that is there has to hold, by any of its values
//   role = engine, observer           what they may do; none: nothing, whatever rules follow
//   tenant = team-a                   whom their sessions are of; *: any, and each uid has its own
//   sessions = 8                      what they may have
//
// An engine opens sessions and joins them; an observer reads what operators read; an operator reads and changes. The
// verbs of a session that is open need no rule: a release is never refused.
//
// A policy is immutable. It is read whole, or not at all.
#ifndef KVPOOL_SERVER_ACCESS_ACCESS_POLICY_H_
#define KVPOOL_SERVER_ACCESS_ACCESS_POLICY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvpool/v1/engine.pb.h"
#include "server/access/peer.h"

namespace kvpool {

inline constexpr size_t kMostAccessRules = 256;
inline constexpr size_t kMostRuleNameBytes = 64;
inline constexpr size_t kMostAccessValues = 256;  // Values of one line.
inline constexpr uint32_t kNoAccessLimit = UINT32_MAX;
inline constexpr uint32_t kMostWeight = 1000;
inline constexpr uint32_t kMostVerbsASecond = 1'000'000'000;  // One a nanosecond.

enum class AccessRole : uint8_t { kEngine, kObserver, kOperator };
absl::string_view AccessRoleName(AccessRole role);
// "batch", "standard", "interactive"; "unspecified".
const char* PriorityClassName(v1::PriorityClass priority);

struct AccessLimits {
  // Of all that the rule matches, together.
  uint32_t sessions = kNoAccessLimit;           // Open, or ended and their processes still run.
  uint32_t guaranteed_blocks = kNoAccessLimit;  // Sum over these sessions.
  uint32_t verbs_a_second = kNoAccessLimit;     // Sum over these sessions: more wait.
  // Of each session.
  uint32_t held_blocks = kNoAccessLimit;    // Blocks held at once.
  uint32_t pinned_blocks = kNoAccessLimit;  // It pins and retains only while fewer of its space are.
  // Of each space that they open: the rule of the last opening counts.
  uint32_t space_blocks = kNoAccessLimit;                    // Blocks that it may have.
  uint32_t weight = 0;                                       // See GiveBack::Terms; 0: none.
  v1::PriorityClass priority = v1::PRIORITY_CLASS_STANDARD;  // An opening may ask for a lower one.
  // Of each of its tenants: the first rule that is for one counts. Which part of each device all its spaces may have together; 0: what
  // the daemon's options say.
  double tenant_share = 0;
};

struct AccessRule {
  std::string name;
  // Whom it matches. A list that is empty says nothing; without `sans` and `certificates`, nobody on the network.
  std::vector<uint32_t> uids, gids;
  std::vector<std::string> cgroups;  // Each with all below it.
  std::vector<std::string> sans;
  std::vector<std::string> certificates;  // Their SHA-256, written like Peer::certificate.
  std::vector<AccessRole> roles;          // Empty: whom it matches may do nothing.
  // Tenants of its sessions, the first where OpenSession names none. Empty: any, and each uid has its own.
  std::vector<std::string> tenants;
  AccessLimits limits;

  bool Matches(const Peer& peer) const;
  // It might match, but the peer's cgroup, or its certificate's digest, is not known.
  bool CannotTell(const Peer& peer) const;
  // An operator may do what an observer may.
  bool Allows(AccessRole role) const;
  bool IsForNetwork() const { return !sans.empty() || !certificates.empty(); }
};

class AccessPolicy {
 public:
  // INVALID_ARGUMENT names file, line, rule, field, value and limit.
  static absl::StatusOr<std::shared_ptr<const AccessPolicy>> Read(const std::string& path);
  static absl::StatusOr<std::shared_ptr<const AccessPolicy>> Parse(absl::string_view text,
                                                                   const std::string& path);
  // Where there is no file: this uid and root are engines, with any tenant, and operators. Nobody else is anything.
  static std::shared_ptr<const AccessPolicy> OfUid(uint32_t uid);

  // The rule by which the peer has the role. PERMISSION_DENIED says who asks for what, and what would let him in.
  absl::StatusOr<std::shared_ptr<const AccessRule>> Admit(const Peer& peer, AccessRole role,
                                                          absl::string_view what) const;
  size_t size() const { return rules_.size(); }
  const std::vector<std::shared_ptr<const AccessRule>>& rules() const { return rules_; }

 private:
  AccessPolicy(std::string file, std::vector<std::shared_ptr<const AccessRule>> rules)
      : file_(std::move(file)), rules_(std::move(rules)) {}

  const std::string file_;  // Empty: none.
  const std::vector<std::shared_ptr<const AccessRule>> rules_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_ACCESS_POLICY_H_
