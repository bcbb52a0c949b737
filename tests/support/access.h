// Rules of access for daemons in a test's process.
#ifndef KVPOOL_TESTS_SUPPORT_ACCESS_H_
#define KVPOOL_TESTS_SUPPORT_ACCESS_H_

#include <memory>
#include <string>

#include "proto/support/check.h"
#include "server/access/access_control.h"

namespace kvpool {

// Everybody on the Unix sockets may do all, and each uid has tenants of its own.
inline constexpr char kOpenAccess[] = "[everybody]\nuid = *\nrole = engine, operator\ntenant = *\n";

inline std::shared_ptr<const AccessPolicy> MakePolicy(const std::string& rules) {
  const auto policy = AccessPolicy::Parse(rules, "rules");
  KVPOOL_CHECK(policy.ok(), "%s", policy.status().ToString().c_str());
  return *policy;
}

inline std::shared_ptr<AccessControl> MakeAccess(const std::string& rules = kOpenAccess) {
  return std::make_shared<AccessControl>(MakePolicy(rules));
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_ACCESS_H_
