// Spaces of an earlier daemon, made again from what its keeper has.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/space_terms.h"
#include "server/keeper/keeper_link.h"
#include "server/replacement/policy.h"
#include "server/space/device_budget.h"
#include "server/space/kept_facts.h"
#include "server/space/space.h"

namespace kvpool {

// What was kept of one space.
struct Daemon::Remains {
  KeptThing table;
  std::map<std::pair<uint32_t, uint32_t>, std::pair<KeptSlab, KeptThing>> slabs;  // The key is slab and rank.
  std::vector<std::shared_ptr<OldMember>> members;
};

absl::Status Daemon::Recover() {
  std::map<uint64_t, std::unique_ptr<SpaceTable>> tables;
  std::map<uint64_t, Remains> spaces;
  uint64_t last_session = 0, last_space = 0;
  for (KeptThing& thing : keeper_->TakeInherited()) {
    KeptSlab slab;
    KeptMember member;
    if (thing.kind == KeptKind::kTable) {
      absl::StatusOr<std::unique_ptr<SpaceTable>> table = SpaceTable::Map(std::move(thing.fd));
      // Of another version nothing is known: neither what is held, nor by whom.
      if (absl::IsFailedPrecondition(table.status())) return table.status();
      if (!table.ok()) {
        LogError("space lost", {{"error", table.status()}});
        continue;
      }
      const uint64_t space = (*table)->space();
      last_space = std::max(last_space, space);
      tables[space] = *std::move(table);
      spaces[space].table = std::move(thing);
    } else if (thing.kind == KeptKind::kSlab && ReadFacts(thing.facts, &slab)) {
      spaces[slab.space].slabs[{slab.slab, slab.rank}] = {slab, std::move(thing)};
    } else if (thing.kind == KeptKind::kMember && ReadFacts(thing.facts, &member)) {
      last_session = std::max(last_session, member.session);
      last_space = std::max(last_space, member.space);
      spaces[member.space].members.push_back(std::make_shared<OldMember>(
          OldMember{.session = member.session, .pidfd = std::move(thing.fd), .kept = std::move(thing.kept)}));
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat("the keeper has a thing of kind ", static_cast<int>(thing.kind), " with ",
                       thing.facts.size(), " bytes of facts; this kvpoold does not know it"));
    }
  }
  for (auto& [id, table] : tables) {
    const absl::Status recovered = RecoverSpace(std::move(table), std::move(spaces[id]), &last_session);
    if (!recovered.ok()) LogError("space lost", {{"space", id}, {"error", recovered}});
  }
  // Ids of sessions and spaces are never used again: a page of holds may have an old one.
  registry_->StartBehind(last_session, last_space);
  return absl::OkStatus();
}

absl::Status Daemon::RecoverSpace(std::unique_ptr<SpaceTable> table, Remains remains,
                                  uint64_t* last_session) {
  const v1::OpenSession& opening = table->opening();
  const std::string scope = table->tenant_scope();
  const TenantScope tenant{.name = scope.substr(0, scope.find('@')), .scope = scope};
  ASSIGN_OR_RETURN(SpaceFacts facts, DescribeSpace(options_, devices_, opening, tenant, table->space()));
  const auto sizes = [](const SpaceGeometry& g) {
    return absl::StrCat(g.max_blocks, " blocks of ", g.block_stride_bytes, " bytes in slabs of ",
                        g.slab_bytes);
  };
  if (facts.geometry != table->geometry()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it had ", sizes(table->geometry()), "; with the settings of today it has ", sizes(facts.geometry)));
  }
  facts.hash_seed = table->hash_seed();
  Space::Inheritance inheritance{.table = std::move(remains.table.kept),
                                 .members = std::move(remains.members)};
  uint64_t bytes = 0;
  ASSIGN_OR_RETURN(inheritance.rows, AdoptSlabs(facts, std::move(remains), &bytes));
  // Rows of a slab that not all ranks had were never sent to anybody, and go.
  if (inheritance.rows.empty()) return absl::OkStatus();
  const DeviceBudget::Want want{.tenant = facts.tenant, .bytes = bytes, .unit = bytes};
  RETURN_IF_ERROR(budget_->Take(facts.rank_devices, want).status());
  const std::string key = SpaceKey(facts.tenant, facts.fingerprint);
  absl::StatusOr<std::shared_ptr<Space>> space = MakeSpace(std::move(facts), std::move(table));
  if (!space.ok()) return space.status();
  const RecoveredPool found = (*space)->Recover(std::move(inheritance));
  for (const RecoveredPool::Session& session : found.sessions)
    *last_session = std::max(*last_session, session.id);
  LogInfo("space recovered", {{"space", (*space)->facts.id},
                              {"tenant", (*space)->facts.tenant},
                              {"cached", found.cached},
                              {"held", found.held},
                              {"quarantined", found.quarantined},
                              {"old_sessions", found.sessions.size()},
                              {"dropped", found.dropped},
                              {"cut_links", found.cut_links}});
  registry_->Adopt(key, *std::move(space));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SlabRow>> Daemon::AdoptSlabs(const SpaceFacts& facts, Remains remains,
                                                        uint64_t* bytes) {
  std::vector<SlabRow> rows;
  while (true) {
    const auto slab = static_cast<uint32_t>(rows.size());
    SlabRow row;
    for (uint32_t rank = 0; rank < facts.devices.size(); ++rank) {
      const auto it = remains.slabs.find({slab, rank});
      if (it == remains.slabs.end()) return rows;
      auto& [kept, thing] = it->second;
      if (rank > 0 && kept.bytes != row.bytes) {
        return absl::DataLossError(absl::StrCat("slab ", slab, " has ", row.bytes, " bytes on rank 0, ",
                                                kept.bytes, " on rank ", rank));
      }
      row.bytes = kept.bytes;
      ASSIGN_OR_RETURN(row.by_rank.emplace_back(),
                       facts.devices[rank]->AdoptSlab(std::move(thing.fd), kept.bytes));
      row.kept.push_back(std::move(thing.kept));
    }
    row.block_count = facts.geometry.blocks_in(row.bytes);
    *bytes += row.bytes;
    rows.push_back(std::move(row));
  }
}

}  // namespace kvpool
