#include "client/ctl/render.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/tools/text.h"

namespace kvpool::ctl {
namespace {

using tools::Hex;
using tools::HumanBytes;
using tools::HumanCount;
using tools::HumanSeconds;
using tools::Percent;
using tools::Printable;
using tools::Table;

// How many blocks of a long chain are shown.
constexpr int kHeadBlocks = 6;
constexpr int kTailBlocks = 3;

// "strided" of ENCODING_STRIDED; the number where the name is not known.
std::string EnumText(absl::string_view name, absl::string_view prefix, int number) {
  if (name.empty()) return absl::StrCat(number);
  absl::ConsumePrefix(&name, prefix);
  return absl::AsciiStrToLower(name);
}

std::string CountsText(const v1::StateCounts& counts) {
  return absl::StrFormat(
      "%s free, %s leased, %s sealed, %s cached, %s quarantined%s of %s", HumanCount(counts.free()),
      HumanCount(counts.leased()), HumanCount(counts.sealed()), HumanCount(counts.cached()),
      HumanCount(counts.quarantined()),
      counts.withheld() == 0 ? "" : absl::StrCat(", ", HumanCount(counts.withheld()), " withheld"),
      HumanCount(counts.capacity()));
}

std::string KindText(v1::SpaceKind kind) { return EnumText(v1::SpaceKind_Name(kind), "SPACE_KIND_", kind); }

std::string LayoutText(const v1::Layout& layout) {
  std::vector<std::string> groups;
  for (const v1::LayerGroup& group : layout.groups()) {
    std::string text = absl::StrCat(group.name(), ": ", HumanCount(group.layers_size(), "layer"), " x ",
                                    HumanCount(group.tokens_per_block(), "token"));
    if (group.kv_heads() != 0) {
      absl::StrAppend(&text, ", ", HumanCount(group.kv_heads(), "head"), " x ", group.k_head_dim(), "/",
                      group.v_head_dim());
    }
    if (group.dtype() != v1::DTYPE_UNSPECIFIED) {
      absl::StrAppend(&text, " ", EnumText(v1::Dtype_Name(group.dtype()), "DTYPE_", group.dtype()));
    }
    if (group.window_tokens() != 0) absl::StrAppend(&text, ", window ", group.window_tokens());
    groups.push_back(std::move(text));
  }
  return absl::StrCat(EnumText(v1::Encoding_Name(layout.encoding()), "ENCODING_", layout.encoding()), ", ",
                      HumanBytes(layout.block_bytes()), " a block; ", absl::StrJoin(groups, "; "));
}

std::string Limit(uint64_t limit) { return limit == 0 ? "-" : HumanCount(limit); }

void AddBlock(const v1::BlockInfo& block, Table* table) {
  const bool sealed = !block.key().empty();
  table->Add({absl::StrCat(block.block()), absl::StrCat(block.generation()), StateName(block.state()),
              sealed ? absl::StrCat(block.group()) : "-", absl::StrCat(block.refs()),
              block.parent() == 0 ? "-" : absl::StrCat(block.parent()), absl::StrCat(block.children()),
              block.pinned() ? "yes" : "-", absl::StrCat(block.priority()),
              block.owner_session() == 0 ? "-" : absl::StrCat(block.owner_session()),
              sealed ? HumanSeconds(block.age_seconds()) : "-",
              sealed ? HumanSeconds(block.idle_seconds()) : "-", sealed ? Hex(block.key()) : "-"});
}

using Counts = google::protobuf::Map<std::string, uint64_t>;

uint64_t Sum(const Counts& counts) {
  uint64_t sum = 0;
  for (const auto& [reason, count] : counts) sum += count;
  return sum;
}

// "3 checksum, 1 torn"
std::string ByReason(const Counts& counts) {
  std::vector<std::string> parts;
  for (const auto& [reason, count] : std::map<std::string, uint64_t>(counts.begin(), counts.end()))
    parts.push_back(absl::StrCat(HumanCount(count), " ", Printable(reason)));
  return absl::StrJoin(parts, ", ");
}

Table BlockTable() {
  return Table({">BLOCK", ">GEN", "STATE", ">GROUP", ">REFS", ">PARENT", ">CHILDREN", "PINNED", ">PRIO",
                ">SESSION", ">AGE", ">IDLE", "KEY"});
}

}  // namespace

std::string StateName(int state) {
  return EnumText(
      v1::BlockState_IsValid(state) ? v1::BlockState_Name(static_cast<v1::BlockState>(state)) : "",
      "BLOCK_STATE_", state);
}

v1::BlockState StateFromName(absl::string_view name) {
  v1::BlockState state = v1::BLOCK_STATE_UNSPECIFIED;
  v1::BlockState_Parse(absl::StrCat("BLOCK_STATE_", absl::AsciiStrToUpper(name)), &state);
  return state;
}

std::string PriorityText(v1::PriorityClass priority) {
  return EnumText(v1::PriorityClass_Name(priority), "PRIORITY_CLASS_", priority);
}

std::string RenderStatus(const v1::GetStatsResponse& stats) {
  std::string text =
      absl::StrFormat("kvpoold %s, up %s%s\n%s, %s\n\n", Printable(stats.version()),
                      HumanSeconds(stats.uptime_seconds()), stats.draining() ? ", DRAINING" : "",
                      HumanCount(stats.spaces(), "space"), HumanCount(stats.sessions(), "session"));
  Table devices({"DEVICE", "NAME", ">USED", ">CAPACITY", ">USED %"});
  for (const v1::DeviceInfo& device : stats.devices()) {
    devices.Add(
        {device.device(), device.name(), HumanBytes(device.used_bytes()), HumanBytes(device.capacity_bytes()),
         Percent(static_cast<double>(device.used_bytes()), static_cast<double>(device.capacity_bytes()))});
  }
  const double lookups = static_cast<double>(stats.lookup_blocks_total());
  absl::StrAppend(&text, devices.Text(), "\nBlocks now:  ", CountsText(stats.blocks()), "\n");
  absl::StrAppend(
      &text, absl::StrFormat(
                 "Since start: %s leased, %s sealed, %s deduplicated, %s released, %s evicted\n"
                 "Matches:     %s of %s blocks hit (%s), %s of %s tokens (%s), %s misses on evicted blocks\n",
                 HumanCount(stats.leased_total()), HumanCount(stats.sealed_total()),
                 HumanCount(stats.deduplicated_total()), HumanCount(stats.released_total()),
                 HumanCount(stats.evicted_total()), HumanCount(stats.hit_blocks_total()),
                 HumanCount(stats.lookup_blocks_total()),
                 Percent(static_cast<double>(stats.hit_blocks_total()), lookups),
                 HumanCount(stats.hit_tokens_total()), HumanCount(stats.lookup_tokens_total()),
                 Percent(static_cast<double>(stats.hit_tokens_total()),
                         static_cast<double>(stats.lookup_tokens_total())),
                 HumanCount(stats.regret_total())));
  return text;
}

std::string RenderSpaces(const v1::ListSpacesResponse& spaces) {
  if (spaces.spaces().empty()) return "No spaces: no engine has opened a session yet.\n";
  Table table({">SPACE", "TENANT", "FINGERPRINT", "KIND", "DEVICES", ">MEMORY", ">SLABS", ">FREE", ">LEASED",
               ">SEALED", ">CACHED", ">QUARANT.", ">CAPACITY", ">SESSIONS", ">PINNED", "POLICY", "PRIORITY"});
  std::string layouts;
  for (const v1::SpaceInfo& space : spaces.spaces()) {
    const v1::StateCounts& blocks = space.blocks();
    table.Add({absl::StrCat(space.space()), space.tenant(), Hex(space.fingerprint().substr(0, 6)),
               KindText(space.kind()), absl::StrJoin(space.devices(), ","), HumanBytes(space.bytes()),
               HumanCount(space.slabs()), HumanCount(blocks.free()), HumanCount(blocks.leased()),
               HumanCount(blocks.sealed()), HumanCount(blocks.cached()), HumanCount(blocks.quarantined()),
               HumanCount(blocks.capacity()), HumanCount(space.sessions()),
               absl::StrCat(HumanCount(space.pinned_blocks()), "/", HumanCount(space.pin_budget_blocks())),
               space.policy(), PriorityText(space.priority_class())});
    absl::StrAppend(&layouts, "Space ", space.space(), " holds ", Printable(LayoutText(space.layout())),
                    "\n");
    for (const auto& [name, value] : space.facts()) {
      absl::StrAppend(&layouts, "  ", Printable(name), ": ", Printable(value), "\n");
    }
  }
  return absl::StrCat(table.Text(), "\n", layouts);
}

std::string RenderRecovery(const v1::GetRecoveryResponse& recovery) {
  std::string text = absl::StrCat("Start: ", recovery.start());
  if (recovery.recovery_seconds() > 0)
    absl::StrAppendFormat(&text, "; what was kept was read in %.3f s", recovery.recovery_seconds());
  if (recovery.first_answer_seconds() > 0)
    absl::StrAppendFormat(&text, "; first answer after %.3f s", recovery.first_answer_seconds());
  text += "\n";
  Table table({">SPACE", "TENANT", ">CACHED", ">HELD", ">QUARANT.", ">DROPPED", ">CUT LINKS", ">BACK",
               ">WAITING", ">LOST", ">SECONDS"});
  std::string details;
  for (const v1::RecoveredSpace& space : recovery.spaces()) {
    table.Add({absl::StrCat(space.space()), space.tenant(), HumanCount(space.cached_blocks()),
               HumanCount(space.held_blocks()), HumanCount(space.quarantined_blocks()),
               HumanCount(Sum(space.dropped_blocks())), HumanCount(space.cut_links()),
               HumanCount(space.sessions_back()), HumanCount(space.sessions_waiting()),
               HumanCount(Sum(space.lost_sessions())), absl::StrFormat("%.3f", space.seconds())});
    if (!space.dropped_blocks().empty()) {
      absl::StrAppend(&details, "Space ", space.space(),
                      ": blocks dropped: ", ByReason(space.dropped_blocks()), "\n");
    }
    if (space.unverified_blocks() > 0) {
      absl::StrAppend(&details, "Space ", space.space(), ": ", HumanCount(space.unverified_blocks(), "block"),
                      " without a sum of the content\n");
    }
    if (space.forgets_sums()) {
      absl::StrAppend(&details, "Space ", space.space(),
                      ": an older daemon made it: at the next start its blocks are believed without a sum\n");
    }
    if (!space.lost_sessions().empty()) {
      absl::StrAppend(&details, "Space ", space.space(), ": sessions lost: ", ByReason(space.lost_sessions()),
                      "\n");
    }
    for (const v1::LostSession& session : space.lost()) {
      absl::StrAppend(&details, "  session ", session.session(), " (", Printable(session.client_name()),
                      "): ", Printable(session.reason()), ": ", Printable(session.detail()), "\n");
    }
  }
  for (const v1::LostSpace& space : recovery.lost_spaces()) {
    absl::StrAppend(&details, "Space ",
                    space.space() == 0 ? "of an unreadable table"
                                       : absl::StrCat(space.space(), " (", Printable(space.tenant()), ")"),
                    " lost, with ", HumanCount(space.sealed_blocks(), "sealed block"), " and ",
                    HumanCount(space.sessions(), "session"), ": ", Printable(space.reason()), ": ",
                    Printable(space.detail()), "\n");
  }
  if (!table.empty()) absl::StrAppend(&text, "\n", table.Text());
  if (!details.empty()) absl::StrAppend(&text, "\n", details);
  return text;
}

std::string RenderTiers(const v1::ListTiersResponse& tiers) {
  std::string next;
  for (const std::string& spec : tiers.only_next())
    absl::StrAppend(&next, "The next daemon has another one: ", Printable(spec), "\n");
  if (!tiers.next_unknown().empty()) {
    absl::StrAppend(&next,
                    "What the next daemon has nobody knows, as its flags and config files can't be read: ",
                    Printable(tiers.next_unknown()), "\n");
  }
  if (tiers.tiers().empty())
    return absl::StrCat("No tiers: what is evicted is gone (kvpoold --tier, kvpoolctl tier attach).\n", next);
  Table table({"TIER", "STATE", "PATH", "WRITE", ">USED", ">CAPACITY", ">USED %", ">VALUES", ">WAITING",
               ">READ", ">WRITTEN", ">LATENCY", ">SPEED"});
  std::string counts;
  for (const v1::TierInfo& tier : tiers.tiers()) {
    const bool known = tier.capacity_bytes() > 0;
    const double speed = tier.load_bytes_per_second();
    table.Add(
        {tier.tier(), EnumText(v1::TierState_Name(tier.state()), "TIER_STATE_", tier.state()), tier.path(),
         tier.write(), known ? HumanBytes(tier.bytes()) : "-",
         known ? HumanBytes(tier.capacity_bytes()) : "-",
         known ? Percent(static_cast<double>(tier.bytes()), static_cast<double>(tier.capacity_bytes())) : "-",
         HumanCount(tier.values()), HumanCount(tier.waiting()), HumanBytes(tier.loaded_bytes()),
         HumanBytes(tier.stored_bytes()),
         speed > 0 ? absl::StrFormat("%.1f ms", 1000 * tier.load_seconds()) : "-",
         speed > 0 ? HumanBytes(static_cast<uint64_t>(speed)) + "/s" : "-"});
    absl::StrAppend(
        &counts,
        absl::StrFormat("%-7s %s stored, %s loaded, %s evicted, %s missed, %s corrupt, %s late, "
                        "%s full, %s failed, %s without a key\n",
                        Printable(tier.tier()) + ":", HumanCount(tier.stored()), HumanCount(tier.loaded()),
                        HumanCount(tier.evicted()), HumanCount(tier.missed()), HumanCount(tier.corrupt()),
                        HumanCount(tier.late()), HumanCount(tier.full()), HumanCount(tier.failed()),
                        HumanCount(tier.no_key())));
    const bool stays = tier.state() == v1::TIER_STATE_ATTACHED || tier.state() == v1::TIER_STATE_DRAINING;
    if (!tier.next_has_it() && stays && tiers.next_unknown().empty()) {
      absl::StrAppend(&next, "The next daemon does not have ", Printable(tier.tier()),
                      tier.by_operator() ? ", which was attached to this one" : "",
                      ": neither its flags nor its config files name it so\n");
    }
    if (tier.nodes() > 0) {
      absl::StrAppend(&counts, "        ", HumanCount(tier.nodes(), "node"), ", ",
                      HumanCount(tier.nodes_down()),
                      " of them down; others may write to them: what they have is not known\n");
    }
  }
  const v1::TierInfo& all = tiers.tiers(0);
  absl::StrAppend(&counts,
                  absl::StrFormat("Down:   %s copied, %s moved, %s dropped, %s left before they were copied\n"
                                  "Up:     %s promoted, %s late, %s lost, %s without room, %s not worth it; "
                                  "%s matches waited, %s were "
                                  "not let wait\n",
                                  HumanCount(all.demoted_blocks(), "block"), HumanCount(all.moved_blocks()),
                                  HumanCount(all.dropped_blocks()), HumanCount(all.unwritten_blocks()),
                                  HumanCount(all.promoted_blocks(), "block"), HumanCount(all.late_blocks()),
                                  HumanCount(all.lost_blocks()), HumanCount(all.no_room_blocks()),
                                  HumanCount(all.not_worth_blocks()), HumanCount(all.waits()),
                                  HumanCount(all.refused_waits())));
  if (const auto n = static_cast<double>(all.forecasts()); n > 0) {
    absl::StrAppend(&counts,
                    absl::StrFormat("Loads:  %s with a forecast: %.1f ms expected, %.1f ms taken, %.1f ms "
                                    "off, on average\n",
                                    HumanCount(all.forecasts()), 1000 * all.forecast_seconds() / n,
                                    1000 * all.taken_seconds() / n, 1000 * all.error_seconds() / n));
  }
  return absl::StrCat(table.Text(), next, "\nSince they were attached, values; since start, blocks\n",
                      counts);
}

std::string RenderPolicies(const v1::GetPoliciesResponse& policies) {
  Table spaces({">SPACE", "TENANT", "POLICY", ">BLOCKS"});
  for (const v1::SpacePolicy& space : policies.spaces()) {
    spaces.Add({absl::StrCat(space.space()), Printable(space.tenant()), Printable(space.policy()),
                HumanCount(space.blocks())});
  }
  Table available({"POLICY", "WHAT LEAVES FIRST, OR HOW IT IS CHOSEN"});
  for (const v1::ReplacementPolicyInfo& policy : policies.available()) {
    available.Add({Printable(policy.name()), Printable(policy.summary())});
  }
  return absl::StrCat(policies.spaces().empty() ? "No spaces.\n" : spaces.Text(),
                      "New spaces: ", Printable(policies.new_spaces()), "\n\n", available.Text());
}

std::string RenderSetPolicy(const v1::SetPolicyResponse& answer, const v1::SetPolicyRequest& request) {
  std::string text;
  for (const v1::SpacePolicy& space : answer.spaces()) {
    absl::StrAppend(&text, "Space ", space.space(), ": ", Printable(space.policy()));
    absl::StrAppend(&text, space.previous() == space.policy()
                               ? " as before\n"
                               : absl::StrCat(" instead of ", Printable(space.previous()), "; takes over ",
                                              HumanCount(space.blocks(), "block"), "\n"));
  }
  if (request.space() == 0) absl::StrAppend(&text, "New spaces: ", request.policy(), "\n");
  return text;
}

std::string RenderGuard(const v1::GetGuardResponse& guard) {
  Table table({">SPACE", "TENANT", "POLICY", "STATE", ">MEAN", ">GREATEST", ">SAMPLES", ">MEASURED",
               ">FAILED", ">PASSED OVER", ">NO WINDOW", ">UNSUITED", ">REFUSED"});
  std::string failures;
  for (const v1::GuardedPolicy& policy : guard.policies()) {
    const auto count = [&](const char* outcome) {
      const auto found = policy.operations().find(outcome);
      return HumanCount(found == policy.operations().end() ? 0 : found->second);
    };
    const bool measured = policy.samples() > 0;
    table.Add({absl::StrCat(policy.space()), Printable(policy.tenant()), Printable(policy.policy()),
               policy.off() ? "off" : "on", measured ? absl::StrFormat("%.4f", policy.mean()) : "-",
               measured ? absl::StrFormat("%.4f", policy.greatest()) : "-", HumanCount(policy.samples()),
               count("measured"), count("failed"), count("passed_over"), count("no_window"),
               count("unsuited"), HumanCount(policy.refused())});
    if (policy.last_failure().empty()) continue;
    absl::StrAppend(&failures, "Space ", policy.space(), ", ", Printable(policy.policy()),
                    " failed last: ", Printable(policy.last_failure()), "\n");
  }
  const std::string rule =
      guard.share() == 0 ? "Nothing is measured (--guard-share=0).\n"
      : guard.bound() == 0
          ? absl::StrFormat("A share of %g is measured; no policy is turned off (--guard-bound=0).\n",
                            guard.share())
          : absl::StrFormat("A share of %g is measured; off above a mean of %g over %u samples.\n",
                            guard.share(), guard.bound(), guard.samples());
  return absl::StrCat(guard.policies().empty() ? "No policy has dropped tokens.\n" : table.Text(), failures,
                      rule);
}

std::string RenderResetGuard(const v1::ResetGuardResponse& answer) {
  std::string text;
  for (const v1::GuardedPolicy& policy : answer.policies()) {
    absl::StrAppend(&text, "Space ", policy.space(), ", ", Printable(policy.policy()), ": ",
                    policy.off() ? "on again" : "on as before", "; ", HumanCount(policy.samples(), "sample"),
                    " forgotten\n");
  }
  return text;
}

std::string RenderSessions(const v1::ListSessionsResponse& sessions) {
  if (sessions.sessions().empty()) return "No sessions.\n";
  Table table({">SESSION", ">SPACE", "TENANT", "CLIENT", ">LEASED", ">REFERENCED", ">CHARGED", ">GUARANTEED",
               ">MAX", ">PARKED", ">EPISODES", "STATE"});
  Table members({">SESSION", ">MEMBER", ">PID", ">UID", "ROLE", "ALIVE", ">FENCE", ">UNACKED SLABS", ">IDLE",
                 "CLIENT"});
  for (const v1::SessionInfo& session : sessions.sessions()) {
    table.Add({absl::StrCat(session.session()), absl::StrCat(session.space()), session.tenant(),
               session.client_name(), HumanCount(session.leased()), HumanCount(session.referenced()),
               HumanCount(session.charged()), HumanCount(session.guaranteed()), Limit(session.max_blocks()),
               HumanCount(session.parked()), absl::StrCat(session.episodes()),
               session.ended() ? absl::StrCat("ended: ", session.end_reason()) : "open"});
    for (const v1::MemberInfo& member : session.members()) {
      members.Add({absl::StrCat(session.session()), absl::StrCat(member.member()),
                   member.pid() == 0 ? "-" : absl::StrCat(member.pid()), absl::StrCat(member.uid()),
                   member.scheduler() ? "scheduler" : absl::StrCat("rank ", member.rank()),
                   member.alive() ? "yes" : "no", absl::StrCat(member.fence()),
                   absl::StrCat(member.slabs_unacknowledged()), HumanSeconds(member.idle_seconds()),
                   member.client_name()});
    }
  }
  return absl::StrCat(table.Text(), "\n", members.Text());
}

std::string RenderEnded(const v1::SessionInfo& session) {
  std::vector<std::string> alive;
  for (const v1::MemberInfo& member : session.members()) {
    if (!member.alive()) continue;
    const std::string name =
        member.client_name().empty() ? "" : absl::StrCat(" (", member.client_name(), ")");
    alive.push_back(member.pid() == 0 ? absl::StrCat("member ", member.member(), name)
                                      : absl::StrCat("pid ", member.pid(), name));
  }
  return Printable(absl::StrCat(
             "Session ", session.session(), " has ended. ", HumanCount(session.leased(), "leased block"),
             " and ", HumanCount(session.referenced(), "reference"),
             " come back when no process of it could write them any more: ",
             alive.empty() ? "they are all gone"
                           : absl::StrCat("still there is ", absl::StrJoin(alive, ", ")))) +
         "\n";
}

std::string RenderErased(const std::string& tenant, const v1::EraseResponse& receipt) {
  std::string text = absl::StrCat(
      "Tenant ", tenant, ": ", HumanCount(receipt.blocks(), "block"), " (", HumanBytes(receipt.bytes()),
      ") left ", HumanCount(receipt.spaces(), "space"), ", ", receipt.closed(), " of which are closed\n");
  for (const v1::ErasedTier& tier : receipt.tiers()) {
    absl::StrAppend(&text, "Tier ", tier.tier(), ": ", HumanCount(tier.values(), "value"), " erased",
                    tier.bytes() == 0 ? "" : absl::StrCat(" (", HumanBytes(tier.bytes()), ")"), "\n");
  }
  for (const v1::ErasureHolder& holder : receipt.holders()) {
    absl::StrAppend(&text, "Held in space ", holder.space(), ": ",
                    holder.session() == 0 ? "by processes of ended sessions"
                                          : absl::StrCat("by session ", holder.session(), " (",
                                                         holder.client_name(), ", pid ", holder.pid(), ")"),
                    ": ", HumanCount(holder.shared_blocks(), "shared block"), ", ",
                    HumanCount(holder.leased_blocks(), "leased block"), "\n");
  }
  for (const std::string& remains : receipt.remains()) absl::StrAppend(&text, "Remains: ", remains, "\n");
  absl::StrAppend(&text, absl::StrFormat("Looked for afterwards: %s found; %.3f s\n",
                                         HumanCount(receipt.found_blocks(), "block"), receipt.seconds()));
  std::string printable;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    absl::StrAppend(&printable, Printable(std::string(line)), "\n");
  }
  return printable;
}

std::string RenderBlocks(const v1::ListBlocksResponse& blocks) {
  if (blocks.blocks().empty()) return "No such blocks.\n";
  Table table = BlockTable();
  for (const v1::BlockInfo& block : blocks.blocks()) AddBlock(block, &table);
  std::string text = table.Text();
  if (blocks.next() != 0) absl::StrAppend(&text, "More from --first=", blocks.next(), "\n");
  return text;
}

std::string RenderExplanation(const v1::ExplainResponse& explanation, bool all) {
  std::string text = Printable(explanation.summary()) + "\n";
  for (const std::string& detail : explanation.details())
    absl::StrAppend(&text, "  ", Printable(detail), "\n");
  if (!explanation.blocks().empty()) {
    // What is next to the block and where its chain begins tells more than all that is between.
    const int blocks = explanation.blocks_size();
    const int left_out =
        all || blocks <= kHeadBlocks + kTailBlocks + 1 ? 0 : blocks - kHeadBlocks - kTailBlocks;
    Table table = BlockTable();
    for (int i = 0; i < blocks; ++i) {
      if (i < kHeadBlocks || i >= kHeadBlocks + left_out) AddBlock(explanation.blocks(i), &table);
    }
    absl::StrAppend(&text, "\n", table.Text());
    if (left_out > 0) {
      absl::StrAppend(&text, HumanCount(left_out, "block"), " between the first ", kHeadBlocks,
                      " and the last ", kTailBlocks, " left out; --all shows them\n");
    }
  }
  return text;
}

}  // namespace kvpool::ctl
