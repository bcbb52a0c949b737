#include "server/access/access_policy.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "proto/cli/flags.h"
#include "proto/support/status_macros.h"
#include "server/base/sockets.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

constexpr size_t kMaxCgroupBytes = 4096;
constexpr size_t kMaxSanBytes = 256;
constexpr size_t kFingerprintDigits = 64;
constexpr v1::PriorityClass kClasses[] = {v1::PRIORITY_CLASS_BATCH, v1::PRIORITY_CLASS_STANDARD,
                                          v1::PRIORITY_CLASS_INTERACTIVE};
constexpr AccessRole kRoles[] = {AccessRole::kEngine, AccessRole::kObserver, AccessRole::kOperator};

absl::Status BadPolicy(const std::string& message) { return absl::InvalidArgumentError(message); }

absl::StatusOr<uint32_t> ParseUid(absl::string_view value) { return UserId(std::string(value)); }
absl::StatusOr<uint32_t> ParseGid(absl::string_view value) { return GroupId(std::string(value)); }

absl::StatusOr<std::string> ParseCgroup(absl::string_view value) {
  if (value.size() > kMaxCgroupBytes) {
    return BadPolicy(absl::StrCat("it has ", value.size(), " bytes; the limit is ", kMaxCgroupBytes));
  }
  if (value[0] != '/') return BadPolicy("write a path of cgroup v2, from / on");
  if (value.size() > 1 && value.back() == '/') return BadPolicy("write it without the / at its end");
  return std::string(value);
}

absl::StatusOr<std::string> ParseSan(absl::string_view value) {
  if (value.size() > kMaxSanBytes) {
    return BadPolicy(absl::StrCat("it has ", value.size(), " bytes; the limit is ", kMaxSanBytes));
  }
  if (absl::StrContains(value, '*')) return BadPolicy("names are compared whole: there are no wildcards");
  return std::string(value);
}

// As `openssl x509 -noout -fingerprint -sha256` writes it, with colons, or without.
absl::StatusOr<std::string> ParseCertificate(absl::string_view value) {
  const std::string digits = absl::AsciiStrToLower(absl::StrReplaceAll(value, {{":", ""}}));
  if (digits.size() != kFingerprintDigits ||
      !std::all_of(digits.begin(), digits.end(), absl::ascii_isxdigit)) {
    return BadPolicy(absl::StrCat("write its SHA-256, ", kFingerprintDigits,
                                  " digits, as openssl x509 -fingerprint -sha256 does"));
  }
  return digits;
}

absl::StatusOr<AccessRole> ParseRole(absl::string_view value) {
  for (const AccessRole role : kRoles) {
    if (value == AccessRoleName(role)) return role;
  }
  return BadPolicy("there are engine, observer and operator, or none alone");
}

absl::StatusOr<std::string> ParseTenant(absl::string_view value) {
  std::string tenant(value);
  RETURN_IF_ERROR(CheckTenant(tenant));
  return tenant;
}

// A comma list of one or more different values.
template <typename Value>
absl::Status ParseList(absl::string_view text, absl::StatusOr<Value> (*parse)(absl::string_view),
                       std::vector<Value>* values) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() > kMostAccessValues) {
    return BadPolicy(absl::StrCat("it has ", parts.size(), " values; the limit is ", kMostAccessValues));
  }
  for (const absl::string_view part : parts) {
    const absl::string_view value = absl::StripAsciiWhitespace(part);
    if (value.empty()) return BadPolicy("a value is empty");
    const absl::StatusOr<Value> parsed = parse(value);
    if (!parsed.ok()) return BadPolicy(absl::StrCat("\"", value, "\": ", parsed.status().message()));
    if (std::find(values->begin(), values->end(), *parsed) != values->end()) {
      return BadPolicy(absl::StrCat("\"", value, "\" is there twice"));
    }
    values->push_back(*parsed);
  }
  return absl::OkStatus();
}

absl::Status ParseCount(absl::string_view text, uint32_t least, uint32_t* count,
                        uint32_t most = kNoAccessLimit - 1) {
  if (absl::SimpleAtoi(text, count) && *count >= least && *count <= most) return absl::OkStatus();
  return BadPolicy(absl::StrCat("the limits are ", least, " and ", most));
}

absl::Status ParsePriority(absl::string_view text, v1::PriorityClass* priority) {
  for (const v1::PriorityClass each : kClasses) {
    if (text != PriorityClassName(each)) continue;
    *priority = each;
    return absl::OkStatus();
  }
  return BadPolicy("there are batch, standard and interactive");
}

absl::Status ParseShare(absl::string_view text, double* share) {
  if (absl::SimpleAtod(text, share) && *share > 0 && *share <= 1) return absl::OkStatus();
  return BadPolicy("it is a part of a device, above 0 and up to 1");
}

absl::Status SetField(absl::string_view field, absl::string_view value, AccessRule* rule) {
  AccessLimits& limits = rule->limits;
  if (field == "uid" && value == "*") return absl::OkStatus();
  if (field == "uid") return ParseList(value, ParseUid, &rule->uids);
  if (field == "gid") return ParseList(value, ParseGid, &rule->gids);
  if (field == "cgroup") return ParseList(value, ParseCgroup, &rule->cgroups);
  if (field == "san") return ParseList(value, ParseSan, &rule->sans);
  if (field == "certificate") return ParseList(value, ParseCertificate, &rule->certificates);
  if (field == "role" && value == "none") return absl::OkStatus();
  if (field == "role") return ParseList(value, ParseRole, &rule->roles);
  if (field == "tenant" && value == "*") return absl::OkStatus();
  if (field == "tenant") return ParseList(value, ParseTenant, &rule->tenants);
  if (field == "sessions") return ParseCount(value, 1, &limits.sessions);
  if (field == "guaranteed-blocks") return ParseCount(value, 0, &limits.guaranteed_blocks);
  if (field == "verbs-a-second") return ParseCount(value, 1, &limits.verbs_a_second, kMostVerbsASecond);
  if (field == "held-blocks") return ParseCount(value, 1, &limits.held_blocks);
  if (field == "pinned-blocks") return ParseCount(value, 0, &limits.pinned_blocks);
  if (field == "space-blocks") return ParseCount(value, 1, &limits.space_blocks);
  if (field == "weight") return ParseCount(value, 1, &limits.weight, kMostWeight);
  if (field == "priority") return ParsePriority(value, &limits.priority);
  if (field == "tenant-share") return ParseShare(value, &limits.tenant_share);
  return BadPolicy(
      "no such field; there are uid, gid, cgroup, san, certificate, role, tenant, sessions, "
      "guaranteed-blocks, "
      "verbs-a-second, held-blocks, pinned-blocks, space-blocks, weight, priority and tenant-share");
}

// One rule while its lines are read.
struct Section {
  std::string place;  // "FILE:LINE" of its name.
  AccessRule rule;
  std::map<std::string, std::string> places;  // Field -> "FILE:LINE".
};

absl::Status Wrong(const Section& section, absl::string_view field, absl::string_view why) {
  const auto at = section.places.find(std::string(field));
  return BadPolicy(absl::StrCat(at == section.places.end() ? section.place : at->second, ": [",
                                section.rule.name, "] ", field, why));
}

// What is to be known of all lines of a rule.
absl::Status Check(const Section& section) {
  const AccessRule& rule = section.rule;
  const auto& places = section.places;
  const bool local = places.contains("uid") || places.contains("gid") || places.contains("cgroup");
  if (!local && !rule.IsForNetwork()) {
    return Wrong(section, "matches nobody", ": it needs uid, gid, cgroup, san or certificate");
  }
  if (local && rule.IsForNetwork()) {
    return Wrong(section, rule.sans.empty() ? "certificate" : "san",
                 " is for peers on the network, which have no uid, gid and cgroup");
  }
  if (!places.contains("role")) return Wrong(section, "role", " is missing");
  const bool engine = rule.Allows(AccessRole::kEngine);
  if (engine && rule.IsForNetwork()) {
    return Wrong(section, "role",
                 " = engine: engines are served on the Unix socket, and not by san or certificate");
  }
  if (engine && !places.contains("tenant")) {
    return Wrong(section, "tenant", " is missing: an engine needs one, or *, by which each uid has its own");
  }
  for (const char* field : {"tenant", "sessions", "guaranteed-blocks", "verbs-a-second", "held-blocks",
                            "pinned-blocks", "space-blocks", "weight", "priority", "tenant-share"}) {
    if (!engine && places.contains(field)) {
      return Wrong(section, field, " is for the role engine, which the rule does not give");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ParseRuleName(absl::string_view line) {
  if (line.back() != ']') return BadPolicy(absl::StrCat("\"", line, "\" is not \"[name]\""));
  const absl::string_view name = absl::StripAsciiWhitespace(line.substr(1, line.size() - 2));
  if (name.empty() || name.size() > kMostRuleNameBytes) {
    return BadPolicy(absl::StrCat("the name of a rule has ", name.size(), " bytes; the limits are 1 and ",
                                  kMostRuleNameBytes));
  }
  return std::string(name);
}

template <typename List, typename Value>
bool Has(const List& list, const Value& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// The rule is for processes, this uid and one of these groups.
bool MatchesUser(const AccessRule& rule, const PeerCredentials& process) {
  if (rule.IsForNetwork() || (!rule.uids.empty() && !Has(rule.uids, process.uid))) return false;
  return rule.gids.empty() || std::any_of(rule.gids.begin(), rule.gids.end(), [&process](uint32_t gid) {
           return gid == process.gid || std::binary_search(process.groups.begin(), process.groups.end(), gid);
         });
}

// The rule is for peers on the network, and one of these names.
bool MatchesNames(const AccessRule& rule, const std::vector<std::string>& names) {
  return rule.IsForNetwork() &&
         (rule.sans.empty() || std::any_of(rule.sans.begin(), rule.sans.end(),
                                           [&names](const std::string& san) { return Has(names, san); }));
}

}  // namespace

const char* PriorityClassName(v1::PriorityClass priority) {
  switch (priority) {
    case v1::PRIORITY_CLASS_BATCH:
      return "batch";
    case v1::PRIORITY_CLASS_STANDARD:
      return "standard";
    case v1::PRIORITY_CLASS_INTERACTIVE:
      return "interactive";
    default:  // It is a number of a message.
      return "unspecified";
  }
}

absl::string_view AccessRoleName(AccessRole role) {
  switch (role) {
    case AccessRole::kEngine:
      return "engine";
    case AccessRole::kObserver:
      return "observer";
    case AccessRole::kOperator:
      return "operator";
  }
  return "";
}

bool AccessRule::Allows(AccessRole role) const {
  return std::any_of(roles.begin(), roles.end(), [role](AccessRole has) {
    return has == role || (has == AccessRole::kOperator && role == AccessRole::kObserver);
  });
}

bool AccessRule::Matches(const Peer& peer) const {
  if (peer.process == nullptr) {
    return MatchesNames(*this, peer.names) && (certificates.empty() || Has(certificates, peer.certificate));
  }
  const PeerCredentials& process = *peer.process;
  if (!MatchesUser(*this, process)) return false;
  if (cgroups.empty()) return true;
  return std::any_of(cgroups.begin(), cgroups.end(), [&process](const std::string& top) {
    const std::string& path = process.cgroup;
    if (!absl::StartsWith(path, top)) return false;
    const absl::string_view below = absl::string_view(path).substr(top == "/" ? 0 : top.size());
    // A daemon in a cgroup namespace of its own sees the others beside it behind "/..".
    const bool leaves = below == "/.." || absl::StartsWith(below, "/../");
    return below.empty() || (below[0] == '/' && !leaves);
  });
}

bool AccessRule::CannotTell(const Peer& peer) const {
  if (peer.process == nullptr) {
    return peer.certificate.empty() && !certificates.empty() && MatchesNames(*this, peer.names);
  }
  return peer.process->cgroup.empty() && !cgroups.empty() && MatchesUser(*this, *peer.process);
}

absl::StatusOr<std::shared_ptr<const AccessPolicy>> AccessPolicy::Parse(absl::string_view text,
                                                                        const std::string& path) {
  std::vector<Section> sections;
  int number = 0;
  for (const absl::string_view whole : absl::StrSplit(text, '\n')) {
    const std::string place = absl::StrCat(path, ":", ++number);
    const absl::string_view line = absl::StripAsciiWhitespace(whole);
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      absl::StatusOr<std::string> name = ParseRuleName(line);
      if (!name.ok()) return BadPolicy(absl::StrCat(place, ": ", name.status().message()));
      for (const Section& other : sections) {
        if (other.rule.name != *name) continue;
        return BadPolicy(absl::StrCat(place, ": [", *name, "] is at ", other.place, " too"));
      }
      if (sections.size() == kMostAccessRules) {
        return BadPolicy(
            absl::StrCat(place, ": [", *name, "] is one rule too many; the limit is ", kMostAccessRules));
      }
      sections.emplace_back();
      sections.back().place = place;
      sections.back().rule.name = *std::move(name);
      continue;
    }
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (parts.size() != 2) return BadPolicy(absl::StrCat(place, ": \"", line, "\" is not \"field = value\""));
    if (sections.empty())
      return BadPolicy(absl::StrCat(place, ": \"", line, "\" is before the first [rule]"));
    Section& section = sections.back();
    const std::string field(absl::StripAsciiWhitespace(parts[0]));
    const absl::string_view value = absl::StripAsciiWhitespace(parts[1]);
    const auto [first, is_first] = section.places.emplace(field, place);
    if (!is_first) {
      return BadPolicy(
          absl::StrCat(place, ": [", section.rule.name, "] ", field, " is at ", first->second, " too"));
    }
    const absl::Status set = SetField(field, value, &section.rule);
    if (!set.ok()) return Wrong(section, field, absl::StrCat(" = ", value, ": ", set.message()));
  }
  // A file of comments would lock out everybody, its owner too.
  if (sections.empty()) return BadPolicy(absl::StrCat(path, ": there is no rule"));
  std::vector<std::shared_ptr<const AccessRule>> rules;
  for (Section& section : sections) {
    RETURN_IF_ERROR(Check(section));
    rules.push_back(std::make_shared<const AccessRule>(std::move(section.rule)));
  }
  return std::shared_ptr<const AccessPolicy>(new AccessPolicy(path, std::move(rules)));
}

absl::StatusOr<std::shared_ptr<const AccessPolicy>> AccessPolicy::Read(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFlagFile("access", path));
  return Parse(text, path);
}

std::shared_ptr<const AccessPolicy> AccessPolicy::OfUid(uint32_t uid) {
  AccessRule rule{.name = "default",
                  .uids = {uid, 0},
                  .gids = {},
                  .cgroups = {},
                  .sans = {},
                  .certificates = {},
                  .roles = {AccessRole::kEngine, AccessRole::kOperator},
                  .tenants = {},
                  .limits = {}};
  return std::shared_ptr<const AccessPolicy>(
      new AccessPolicy("", {std::make_shared<const AccessRule>(std::move(rule))}));
}

absl::StatusOr<std::shared_ptr<const AccessRule>> AccessPolicy::Admit(const Peer& peer, AccessRole role,
                                                                      absl::string_view what) const {
  // A rule of which it is not known whether it is the peer's ends the search: who hides its cgroup, or whose certificate
  // nobody can read, would be given what a later rule says.
  const auto found = std::find_if(rules_.begin(), rules_.end(), [&peer](const auto& rule) {
    return rule->Matches(peer) || rule->CannotTell(peer);
  });
  const bool known = found != rules_.end() && !(*found)->CannotTell(peer);
  if (known && (*found)->Allows(role)) return *found;
  std::string why;
  if (found != rules_.end() && !known) {
    const char* what_it_goes_by = peer.process != nullptr ? "cgroup" : "certificate";
    why = absl::StrCat("rule [", (*found)->name, "] is by ", what_it_goes_by, ", and its ", what_it_goes_by,
                       " is not known");
  } else if (found != rules_.end()) {
    why = absl::StrCat("rule [", (*found)->name, "] gives it ", (*found)->roles.empty() ? "none" : "",
                       absl::StrJoin((*found)->roles, " and ", [](std::string* out, AccessRole has) {
                         absl::StrAppend(out, AccessRoleName(has));
                       }));
  } else if (file_.empty()) {
    why = absl::StrCat("without --access=FILE only uid ", rules_[0]->uids[0],
                       ", the daemon's own, and root have any: name others in such a file");
  } else {
    why = absl::StrCat("no rule of ", file_, " matches it: add one there, and send the daemon SIGHUP");
  }
  return absl::PermissionDeniedError(absl::StrCat(what, " needs the role ", AccessRoleName(role), ", which ",
                                                  Describe(peer), " lacks: ", why));
}

}  // namespace kvpool
