// Spaces of an earlier daemon, made again from what its keeper has.
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/peer_process.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/space_terms.h"
#include "server/keeper/keeper_link.h"
#include "server/replacement/policy.h"
#include "server/scoring/lost_gpu.h"
#include "server/space/device_budget.h"
#include "server/space/kept_facts.h"
#include "server/space/member_log.h"
#include "server/space/session.h"
#include "server/space/slab_places.h"
#include "server/space/space.h"

namespace kvpool {

// So long after a start, streams wait for sessions to be back. Members come within some milliseconds.
constexpr uint64_t kMembersComeMs = 1000;

// What was kept of one space.
struct Daemon::Remains {
  KeptThing table;
  std::map<std::pair<uint32_t, uint32_t>, std::pair<KeptSlab, KeptThing>> slabs;  // The key is slab and rank.
  std::vector<std::shared_ptr<OldMember>> members;
  std::map<std::string, KeptThing> logs;  // The key is the member's token.
  std::optional<KeptThing> places;
};

namespace {

SpaceLoss LossOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      return SpaceLoss::kDamaged;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
      return SpaceLoss::kSettings;
    case absl::StatusCode::kResourceExhausted:
      return SpaceLoss::kMemory;
    case absl::StatusCode::kAlreadyExists:
      return SpaceLoss::kSuperseded;
    default:
      return SpaceLoss::kOther;
  }
}

}  // namespace

absl::Status Daemon::Recover() {
  const auto begin = std::chrono::steady_clock::now();
  std::map<uint64_t, std::unique_ptr<SpaceTable>> tables;
  std::map<uint64_t, Remains> spaces;
  uint64_t last_session = 0, last_space = 0;
  absl::Status unknown;
  for (KeptThing& thing : keeper_->TakeInherited()) {
    KeptSlab slab;
    KeptPlaces places;
    KeptMember member;
    KeptLog log;
    if (thing.kind == KeptKind::kTable) {
      absl::StatusOr<std::unique_ptr<SpaceTable>> table = SpaceTable::Map(std::move(thing.fd));
      // Of another version nothing is known: neither what is held, nor by whom.
      if (absl::IsFailedPrecondition(table.status())) return table.status();
      // Another start may have the memory or the descriptors that this one has not.
      if (absl::IsUnavailable(table.status())) return table.status();
      if (!table.ok()) {
        LogError("space lost", {{"error", table.status()}});
        start_report_.lost.push_back(
            {.loss = SpaceLoss::kDamaged, .text = std::string(table.status().message())});
        continue;
      }
      const uint64_t space = (*table)->space();
      last_space = std::max(last_space, space);
      tables[space] = *std::move(table);
      spaces[space].table = std::move(thing);
    } else if (thing.kind == KeptKind::kSlab && ReadFacts(thing.facts, &slab)) {
      spaces[slab.space].slabs[{slab.slab, slab.rank}] = {slab, std::move(thing)};
    } else if (thing.kind == KeptKind::kPlaces && ReadFacts(thing.facts, &places)) {
      spaces[places.space].places = std::move(thing);
    } else if (thing.kind == KeptKind::kMember && ReadFacts(thing.facts, &member)) {
      last_session = std::max(last_session, member.session);
      last_space = std::max(last_space, member.space);
      spaces[member.space].members.push_back(std::make_shared<OldMember>(
          OldMember{.session = member.session,
                    .facts = member,
                    .pidfd = std::make_shared<const UniqueFd>(std::move(thing.fd)),
                    .kept = std::move(thing.kept)}));
    } else if (thing.kind == KeptKind::kLog && ReadFacts(thing.facts, &log)) {
      spaces[log.space].logs[std::string(log.token, sizeof(log.token))] = std::move(thing);
    } else if (static_cast<uint16_t>(thing.kind) >= kFirstOptionalKind) {
      LogInfo("thing of a newer version let go", {{"kind", static_cast<int>(thing.kind)}});
    } else {
      // The version of a table says more.
      unknown = absl::FailedPreconditionError(
          absl::StrCat("the keeper has a thing of kind ", static_cast<int>(thing.kind), " with ",
                       thing.facts.size(), " bytes of facts; this kvpoold does not know it"));
    }
  }
  RETURN_IF_ERROR(unknown);
  // Of two with one key the older one was being closed: nobody was in it any more.
  for (auto it = tables.rbegin(); it != tables.rend(); ++it) {
    auto& [id, table] = *it;
    std::set<uint64_t> sessions;
    for (const auto& member : spaces[id].members) sessions.insert(member->session);
    LostSpace lost{
        .space = id, .tenant = table->tenant_scope(), .sessions = static_cast<uint32_t>(sessions.size())};
    const absl::Status recovered = RecoverSpace(&table, std::move(spaces[id]), &last_session);
    if (absl::IsUnavailable(recovered)) return recovered;
    if (recovered.ok()) continue;
    lost.loss = LossOf(recovered);
    lost.text = std::string(recovered.message());
    if (table != nullptr) lost.sealed_blocks = table->sealed_blocks();
    LogError("space lost", {{"space", id}, {"sealed", lost.sealed_blocks}, {"error", recovered}});
    start_report_.lost.push_back(std::move(lost));
  }
  start_report_.cold = keeper_->cold();
  start_report_.recovery_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  // Ids of sessions and spaces are never used again: a page of holds may have an old one.
  registry_->StartBehind(last_session, last_space);
  return absl::OkStatus();
}

absl::Status Daemon::RecoverSpace(std::unique_ptr<SpaceTable>* kept_table, Remains remains,
                                  uint64_t* last_session) {
  const SpaceTable* const table = kept_table->get();
  v1::OpenSession opening = table->opening();
  // Daemons before this one wrote down what an engine had named. Where that is nothing, sealed memory is the host's.
  if (opening.device_uuids().empty() && !remains.slabs.empty() &&
      fcntl(remains.slabs.begin()->second.second.fd.get(), F_GET_SEALS) >= 0) {
    for (uint32_t rank = 0; rank < std::max(1u, opening.ranks()); ++rank) opening.add_device_uuids("host");
  }
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
  if (facts.tier_space.has_value() && facts.hash_seed != table->hash_seed()) {
    // Nobody else would find what it has below, nor it what others have.
    LogWarning("space without a tier: its keys are of before the tier",
               {{"space", facts.id}, {"tenant", facts.tenant}, {"until", "the space is closed"}});
    facts.tier_space.reset();
  }
  facts.hash_seed = table->hash_seed();
  Space::Inheritance inheritance{.table = std::move(remains.table.kept), .members = remains.members};
  uint64_t bytes = 0;
  if (remains.places.has_value()) {
    ASSIGN_OR_RETURN(inheritance.places, SlabPlaces::Map(std::move(remains.places->fd)));
    inheritance.kept_places = std::move(remains.places->kept);
  }
  ASSIGN_OR_RETURN(inheritance.rows, AdoptSlabs(facts, inheritance.places.get(), &remains, &bytes));
  // Rows of a slab that not all ranks had were never sent to anybody, and go.
  if (inheritance.rows.empty()) {
    return table->sealed_blocks() == 0 ? absl::OkStatus()
                                       : absl::DataLossError("its first slab was not kept");
  }
  const DeviceBudget::Want want{.tenant = facts.tenant, .bytes = bytes, .unit = bytes, .is_there = true};
  RETURN_IF_ERROR(budget_->Take(facts.rank_devices, want).status());
  absl::Cleanup give_back = [this, devices = facts.rank_devices, of = facts.tenant, bytes] {
    budget_->Give(devices, of, bytes);
  };
  const std::string key = SpaceKey(facts.tenant, facts.fingerprint);
  absl::StatusOr<std::shared_ptr<Space>> space = MakeSpace(std::move(facts), std::move(*kept_table));
  if (!space.ok()) return space.status();
  ASSIGN_OR_RETURN(inheritance.sessions, SessionsOf(*space, &remains, &inheritance.lost));
  std::vector<std::shared_ptr<Session>> resumed;
  const auto begin = std::chrono::steady_clock::now();
  const RecoveredPool found = (*space)->Recover(std::move(inheritance), &resumed);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  if (!registry_->Adopt(key, *space)) {
    return absl::AlreadyExistsError("a newer space has its tenant and fingerprint");
  }
  std::move(give_back).Cancel();
  std::map<std::string, Kept*> processes;
  for (const auto& member : remains.members) {
    processes[std::string(member->facts.token, sizeof(member->facts.token))] = &member->kept;
  }
  for (const std::shared_ptr<Session>& session : resumed) {
    for (const auto& member : session->members) {
      const std::string& token = member->identity.token;
      registry_->Resume(
          session, member.get(),
          {.process = std::move(*processes.at(token)), .log = std::move(remains.logs.at(token).kept)});
    }
  }
  for (const std::shared_ptr<OldMember>& member : remains.members) {
    if (member->keeps) continue;
    const std::string token(member->facts.token, sizeof(member->facts.token));
    // The daemon after this one reads it as well.
    member->log = std::move(remains.logs.at(token).kept);
  }
  for (const RecoveredPool::Session& session : found.sessions) {
    *last_session = std::max(*last_session, session.id);
  }
  LogInfo("space recovered", {{"space", (*space)->facts.id},
                              {"tenant", (*space)->facts.tenant},
                              {"cached", found.cached},
                              {"held", found.held},
                              {"quarantined", found.quarantined},
                              {"old_sessions", found.sessions.size()},
                              {"resumed", resumed.size()},
                              {"dropped", found.damaged()},
                              {"cut_links", found.cut_links},
                              {"lost_aliases", found.lost_aliases},
                              {"recovery_ms", took.count()}});
  if (found.forgets_sums) {
    LogWarning("sums of content end with this daemon",
               {{"space", (*space)->facts.id}, {"why", "a daemon that knew none made the space"}});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Resumable>> Daemon::SessionsOf(const std::shared_ptr<Space>& space,
                                                          Remains* remains, std::vector<LostSession>* lost) {
  std::map<uint64_t, Resumable> sessions;
  std::map<uint64_t, LostSession> without;
  for (const std::shared_ptr<OldMember>& old : remains->members) {
    const KeptMember& facts = old->facts;
    const std::string name(facts.name, std::min<size_t>(facts.name_bytes, sizeof(facts.name)));
    const std::string token(facts.token, sizeof(facts.token));
    const auto kept = remains->logs.find(token);
    Resumable& session = sessions[facts.session];
    const auto lose = [&](SessionLoss why, std::string text) {
      without[facts.session] = {.id = facts.session, .client_name = name, .why = {why, std::move(text)}};
    };
    if (kept == remains->logs.end() || facts.ranks == 0 || facts.ranks > kMaxMembers) {
      lose(SessionLoss::kIncomplete, "the log of a member was not kept");
      continue;
    }
    absl::StatusOr<std::unique_ptr<MemberLog>> log = MemberLog::Map(std::move(kept->second.fd));
    if (absl::IsUnavailable(log.status())) return log.status();
    if (!log.ok()) {
      lose(SessionLoss::kDamaged, std::string(log.status().message()));
      continue;
    }
    if (session.session == nullptr) {
      session.session =
          std::make_shared<Session>(space, SessionTerms{.id = facts.session,
                                                        .client_name = name,
                                                        .uid = facts.uid,
                                                        .ranks = facts.ranks,
                                                        .guaranteed_blocks = facts.guaranteed_blocks,
                                                        .max_blocks = facts.max_blocks,
                                                        .max_pinned_blocks = facts.max_pinned_blocks,
                                                        .warmup = facts.warmup != 0});
    }
    session.members.push_back(
        {.identity = {.credentials = {.pid = PidOf(old->pidfd->get()), .uid = facts.uid, .pidfd = old->pidfd},
                      .client_name = name,
                      .token = token,
                      .scheduler = facts.scheduler != 0,
                      .rank = facts.rank},
         .log = *std::move(log),
         .old = old});
  }
  std::vector<Resumable> resumable;
  for (auto& [id, session] : sessions) {
    // Nobody would wait for the process of a member that is left out.
    if (!without.contains(id)) resumable.push_back(std::move(session));
  }
  for (auto& [id, session] : without) lost->push_back(std::move(session));
  return resumable;
}

absl::StatusOr<std::vector<SlabRow>> Daemon::AdoptSlabs(const SpaceFacts& facts, const SlabPlaces* places,
                                                        Remains* remains, uint64_t* bytes) {
  std::vector<SlabRow> rows;
  std::vector<std::pair<uint32_t, uint32_t>> blocks;  // The first one of each, and its end.
  uint32_t end = 0;
  // Slabs that not all ranks have were on their way: nobody maps them, and they go.
  std::set<uint32_t> whole;
  for (const auto& [slab, thing] : remains->slabs) whole.insert(slab.first);
  std::erase_if(whole, [&](uint32_t slab) {
    for (uint32_t rank = 0; rank < facts.devices.size(); ++rank) {
      if (!remains->slabs.contains({slab, rank})) return true;
    }
    return false;
  });
  if (!whole.contains(0)) return rows;
  for (const uint32_t slab : whole) {
    // Where no slab can have gone, those behind a gap were never sent to anybody either.
    if (places == nullptr && slab != rows.size()) return rows;
    SlabRow row;
    row.index = slab;
    for (uint32_t rank = 0; rank < facts.devices.size(); ++rank) {
      auto& [kept, thing] = remains->slabs.at({slab, rank});
      if (rank > 0 && kept.bytes != row.bytes) {
        return absl::DataLossError(absl::StrCat("slab ", slab, " has ", row.bytes, " bytes on rank 0, ",
                                                kept.bytes, " on rank ", rank));
      }
      row.bytes = kept.bytes;
      row.id.assign(kept.id, sizeof(kept.id));
      absl::StatusOr<std::unique_ptr<Slab>> adopted =
          facts.devices[rank]->AdoptSlab(std::move(thing.fd), kept.bytes);
      EndIfGpuIsLost(adopted.status(), absl::StrCat("adopting slab ", slab));
      // Another start may have the GPU's memory or the descriptors that this one has not.
      const bool on_gpu = !facts.devices[rank]->uuid_bytes().empty();
      if (on_gpu && (absl::IsResourceExhausted(adopted.status()) || absl::IsInternal(adopted.status())))
        return absl::UnavailableError(adopted.status().message());
      if (!adopted.ok()) return adopted.status();
      row.by_rank.push_back(*std::move(adopted));
      row.kept.push_back(std::move(thing.kept));
    }
    row.block_count = facts.geometry.blocks_in(row.bytes);
    row.first_block = end;
    if (places != nullptr) {
      const std::optional<uint32_t> first = places->FirstBlockOf(slab);
      if (!first.has_value())
        return absl::DataLossError(absl::StrCat("the place of slab ", slab, " was not kept"));
      row.first_block = *first;
    }
    if (row.block_count == 0 || row.first_block > facts.geometry.max_blocks ||
        row.block_count > facts.geometry.max_blocks - row.first_block ||
        (slab == 0) != (row.first_block == 0)) {
      return absl::DataLossError(absl::StrCat("slab ", slab, " has ", row.block_count, " blocks from ",
                                              row.first_block, " on, of ", facts.geometry.max_blocks));
    }
    end = row.end_block();
    *bytes += row.bytes;
    blocks.emplace_back(row.first_block, end);
    rows.push_back(std::move(row));
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i - 1].second > blocks[i].first) {
      return absl::DataLossError(absl::StrCat("blocks from ", blocks[i].first, " on are in two slabs"));
    }
  }
  return rows;
}

absl::StatusOr<Daemon::Welcome> Daemon::ComeBack(std::shared_ptr<AttachPeer> peer,
                                                 const PeerCredentials& credentials, const AccessRule& rule,
                                                 const v1::AttachHello& hello) {
  const std::string& token = hello.member_token();
  if (token.size() != kMemberTokenBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("hello.member_token has ", token.size(), " bytes, not ", kMemberTokenBytes));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<Member> member, registry_->ComeBack(token, peer, credentials));
  Session& session = *member->session;
  Space& space = *session.space;
  if (member->index == 0) {
    session.pace = options_.access->PaceOf(rule);
    registry_->Share(&session, options_.access->CountSession(rule, session.terms.guaranteed_blocks));
  }
  peer->Bound();
  {
    SpaceTurn turn(space);
    member->identity.peer = std::move(peer);
    member->identity.credentials = credentials;
    member->identity.gives_back = hello.gives_back();
    member->identity.holes = hello.holes();
    // Of an earlier daemon, which kept no rule's name, this is as near as one gets to the last opening's.
    if (member->index == 0 && space.state.give_back.rule.empty() && IsForTenant(rule, space.facts.tenant))
      space.KeepTerms(rule.name, TermsInForce(*options_.access, rule, space.facts.tenant,
                                              space.state.give_back.kept.asked));
    space.state.sessions.OnJoined(turn, member.get(), space.state.pressure.on());
  }
  LogInfo("session came back", {{"session", session.terms.id},
                                {"space", space.facts.id},
                                {"member", member->index},
                                {"client", session.terms.client_name},
                                {"pid", credentials.pid}});
  return Welcome{.id = member->identity.attach};
}

bool Daemon::AwaitsMembers(const Member& member) {
  if (keeper_ == nullptr || clock_->NowMs() - start_ms_ >= kMembersComeMs) return false;
  const Session& session = *member.session;
  SpaceLock lock(*session.space);
  return session.resumed && !session.ready && !session.ended;
}

void Daemon::CollectAbsent(uint64_t now) {
  for (const Registry::Absent& absent : registry_->AbsentMembers()) {
    if (ProcessEnded(absent.pidfd->get())) {
      OnProcessDead(absent.id);
      OnHangup(absent.id);
    } else if (!absent.hung_up && now - start_ms_ >= options_.reattach_ms &&
               registry_->GiveUpAbsent(absent.id)) {
      OnHangup(absent.id);
    }
  }
}

}  // namespace kvpool
