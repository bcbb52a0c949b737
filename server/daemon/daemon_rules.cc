// What rules of access say of spaces, once they have been read again.
#include <memory>
#include <string>
#include <string_view>

#include "server/access/access_control.h"
#include "server/base/housekeeper.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/space_terms.h"
#include "server/space/device_budget.h"
#include "server/space/space.h"

namespace kvpool {

void Daemon::ApplyRules() {
  budget_->SetShares(
      [policy = options_.access->policy(), all = options_.tenant_share](std::string_view tenant) {
        const std::string scope(tenant);
        for (const std::shared_ptr<const AccessRule>& rule : policy->rules()) {
          if (!IsForTenant(*rule, scope)) continue;
          return rule->limits.tenant_share > 0 ? rule->limits.tenant_share : all;
        }
        return all;
      });
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    GiveBack::Terms before, after;
    std::string rule;
    bool gone = false;
    {
      SpaceLock lock(*space);
      class GiveBack& give_back = space->state.give_back;
      rule = give_back.rule;
      if (rule.empty()) continue;
      const auto now = options_.access->RuleNamed(rule);
      before = after = give_back.kept;
      gone = now == nullptr || !IsForTenant(*now, space->facts.tenant);
      if (!gone) after = TermsOf(*now, before.asked);
      if (after != before) space->KeepTerms(rule, after);
    }
    if (gone) {
      LogAudit("rule of a space is gone", LogFields{{"space", space->facts.id},
                                                    {"tenant", space->facts.tenant},
                                                    {"rule", rule},
                                                    {"limit_blocks", before.limit_blocks},
                                                    {"weight", before.weight},
                                                    {"priority", PriorityClassName(before.priority_class())},
                                                    {"until", "its next opening"}});
    } else if (after.limit_blocks != before.limit_blocks || after.weight != before.weight ||
               after.priority_class() != before.priority_class()) {
      // A bound on a priority that is lower than the bound changes nothing.
      LogAudit("terms of a space changed",
               LogFields{{"space", space->facts.id},
                         {"tenant", space->facts.tenant},
                         {"rule", rule},
                         {"old_limit_blocks", before.limit_blocks},
                         {"limit_blocks", after.limit_blocks},
                         {"old_weight", before.weight},
                         {"weight", after.weight},
                         {"old_priority", PriorityClassName(before.priority_class())},
                         {"priority", PriorityClassName(after.priority_class())}});
    }
  }
  if (housekeeper_ != nullptr) housekeeper_->Wake();
}

}  // namespace kvpool
