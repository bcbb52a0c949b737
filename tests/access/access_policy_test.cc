// The file of rules: what each field may say, whom a rule matches, and what somebody is told whom none lets in.
#include "server/access/access_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string ErrorOf(const std::string& text) {
  const auto policy = AccessPolicy::Parse(text, "rules");
  return policy.ok() ? "accepted" : std::string(policy.status().message());
}

std::shared_ptr<const AccessPolicy> Parsed(const std::string& text) {
  const auto policy = AccessPolicy::Parse(text, "rules");
  EXPECT_TRUE(policy.ok()) << policy.status();
  return *policy;
}

Peer Process(PeerCredentials credentials) {
  return {.process = std::make_shared<const PeerCredentials>(std::move(credentials))};
}

Peer Certificate(std::vector<std::string> names, std::string certificate = "") {
  return {.process = nullptr,
          .address = "ipv4:192.0.2.1:4242",
          .names = std::move(names),
          .certificate = std::move(certificate)};
}

// The name of the rule that lets the peer in; "": none does.
std::string RuleOf(const AccessPolicy& policy, const Peer& peer, AccessRole role = AccessRole::kObserver) {
  const auto rule = policy.Admit(peer, role, "a test");
  return rule.ok() ? (*rule)->name : "";
}

TEST(AccessFileTest, EachFieldSaysWhatIsWrongWithItsValue) {
  constexpr char kMost[] = "the limits are 1 and 4294967294";
  struct {
    const char* field;
    std::string value, error;
  } const kCases[] = {
      {"uid", "4294967295", "\"4294967295\": 4294967295 is no user"},
      {"uid", "-1", "\"-1\": no user \"-1\" on this system"},
      {"uid", "no.such.user", "\"no.such.user\": no user \"no.such.user\" on this system"},
      {"uid", "1, 2,", "a value is empty"},
      {"uid", "", "a value is empty"},
      {"uid", "1, 1", "\"1\" is there twice"},
      {"gid", "4294967295", "\"4294967295\": 4294967295 is no group"},
      {"gid", "no.such.group", "\"no.such.group\": no group \"no.such.group\" on this system"},
      {"cgroup", "kubepods", "\"kubepods\": write a path of cgroup v2, from / on"},
      {"cgroup", "/kubepods/", "\"/kubepods/\": write it without the / at its end"},
      {"cgroup", "/" + std::string(4096, 'x'), "it has 4097 bytes; the limit is 4096"},
      {"san", "*.example.com", "\"*.example.com\": names are compared whole: there are no wildcards"},
      {"san", std::string(257, 'x'), "it has 257 bytes; the limit is 256"},
      {"certificate", "ab:cd",
       "\"ab:cd\": write its SHA-256, 64 digits, as openssl x509 -fingerprint -sha256 does"},
      {"certificate", std::string(63, 'a') + "g", "write its SHA-256, 64 digits"},
      {"certificate", std::string(64, 'a') + "," + std::string(64, 'A'), "\" is there twice"},
      {"role", "admin", "\"admin\": there are engine, observer and operator, or none alone"},
      {"role", "none, observer", "\"none\": there are engine, observer and operator, or none alone"},
      {"tenant", "team a", "\"team a\": tenant has byte 32; allowed are [A-Za-z0-9._-]"},
      {"tenant", "a, *", "\"*\": tenant has byte 42; allowed are [A-Za-z0-9._-]"},
      {"tenant", std::string(65, 'x'), "tenant has 65 bytes; must have 0 to 64"},
      {"sessions", "0", kMost},
      {"sessions", "many", kMost},
      {"sessions", "4294967295", kMost},
      {"guaranteed-blocks", "-1", "the limits are 0 and 4294967294"},
      {"verbs-a-second", "0", "the limits are 1 and 1000000000"},
      {"verbs-a-second", "1000000001", "the limits are 1 and 1000000000"},
      {"held-blocks", "0", kMost},
      {"space-blocks", "0", kMost},
      {"weight", "0", "the limits are 1 and 1000"},
      {"weight", "1001", "the limits are 1 and 1000"},
      {"priority", "urgent", "there are batch, standard and interactive"},
      {"priority", "7", "there are batch, standard and interactive"},
      {"tenant-share", "0", "it is a part of a device, above 0 and up to 1"},
      {"tenant-share", "1.01", "it is a part of a device, above 0 and up to 1"},
      {"tenant-share", "nan", "it is a part of a device, above 0 and up to 1"},
      {"tenant-share", "50%", "it is a part of a device, above 0 and up to 1"},
      {"pinned-blocks", "1.5", "the limits are 0 and 4294967294"},
      {"share", "1",
       "no such field; there are uid, gid, cgroup, san, certificate, role, tenant, sessions, "
       "guaranteed-blocks, "},
  };
  for (const auto& bad : kCases) {
    const std::string error = ErrorOf(absl::StrCat("# one\n[a rule]\n", bad.field, " = ", bad.value, "\n"));
    EXPECT_THAT(error, StartsWith(absl::StrCat("rules:3: [a rule] ", bad.field, " = ", bad.value, ": ")));
    EXPECT_THAT(error, HasSubstr(bad.error)) << bad.field;
  }
}

TEST(AccessFileTest, ARuleIsWhole) {
  EXPECT_EQ(ErrorOf("[a]\nrole = observer\n"),
            "rules:1: [a] matches nobody: it needs uid, gid, cgroup, san or certificate");
  EXPECT_EQ(ErrorOf("[a]\nuid = 1\n"), "rules:1: [a] role is missing");
  EXPECT_EQ(ErrorOf("[a]\nuid = 1\nsan = x\nrole = observer\n"),
            "rules:3: [a] san is for peers on the network, which have no uid, gid and cgroup");
  EXPECT_EQ(
      ErrorOf("[a]\nsan = x\nrole = operator, engine\ntenant = t\n"),
      "rules:3: [a] role = engine: engines are served on the Unix socket, and not by san or certificate");
  EXPECT_EQ(ErrorOf("[a]\nuid = 1\nrole = engine\n"),
            "rules:1: [a] tenant is missing: an engine needs one, or *, by which each uid has its own");
  EXPECT_EQ(ErrorOf("[a]\nuid = 1\ncertificate = " + std::string(64, 'a') + "\nrole = observer\n"),
            "rules:3: [a] certificate is for peers on the network, which have no uid, gid and cgroup");
  for (const char* field : {"tenant", "sessions", "guaranteed-blocks", "verbs-a-second", "held-blocks",
                            "pinned-blocks", "space-blocks", "weight", "tenant-share"}) {
    EXPECT_EQ(ErrorOf(absl::StrCat("[a]\nuid = 1\nrole = operator\n", field, " = 1\n")),
              absl::StrCat("rules:4: [a] ", field, " is for the role engine, which the rule does not give"));
  }
  EXPECT_EQ(ErrorOf("[a]\nuid = 1\nrole = operator\npriority = batch\n"),
            "rules:4: [a] priority is for the role engine, which the rule does not give");
}

TEST(AccessFileTest, LinesAreRulesAndFields) {
  EXPECT_EQ(ErrorOf("# nothing\n\n"), "rules: there is no rule");
  EXPECT_EQ(ErrorOf("uid = 1\n"), "rules:1: \"uid = 1\" is before the first [rule]");
  EXPECT_EQ(ErrorOf("[a]\nuid\n"), "rules:2: \"uid\" is not \"field = value\"");
  EXPECT_EQ(ErrorOf("[a\n"), "rules:1: \"[a\" is not \"[name]\"");
  EXPECT_EQ(ErrorOf("[ ]\n"), "rules:1: the name of a rule has 0 bytes; the limits are 1 and 64");
  EXPECT_EQ(ErrorOf("[" + std::string(65, 'x') + "]\n"),
            "rules:1: the name of a rule has 65 bytes; the limits are 1 and 64");
  const std::string rule = "[a]\nuid = 1\nrole = observer\n";
  EXPECT_EQ(ErrorOf(rule + rule), "rules:4: [a] is at rules:1 too");
  EXPECT_EQ(ErrorOf(rule + "uid = 2\n"), "rules:4: [a] uid is at rules:2 too");
  EXPECT_EQ(ErrorOf(rule), "accepted");
}

TEST(AccessFileTest, RulesAndValuesHaveBounds) {
  std::string rules, values = "0";
  for (int i = 0; i < 256; ++i) absl::StrAppend(&rules, "[", i, "]\nuid = 1\nrole = observer\n");
  EXPECT_EQ(ErrorOf(rules), "accepted");
  EXPECT_EQ(ErrorOf(rules + "[last]\n"), "rules:769: [last] is one rule too many; the limit is 256");
  for (int i = 1; i < 256; ++i) absl::StrAppend(&values, ",", i);
  EXPECT_EQ(ErrorOf(absl::StrCat("[a]\nrole = observer\nuid = ", values, "\n")), "accepted");
  EXPECT_THAT(ErrorOf(absl::StrCat("[a]\nrole = observer\nuid = ", values, ",256\n")),
              HasSubstr("it has 257 values; the limit is 256"));
}

TEST(AccessFileTest, WhatCannotBeReadIsNoEmptyFile) {
  EXPECT_EQ(AccessPolicy::Read("/nonexistent").status().message(),
            "--access=/nonexistent: cannot read it: No such file or directory");
  EXPECT_EQ(AccessPolicy::Read("/").status().message(), "--access=/: cannot read it: it is no regular file");
}

std::string FileOf(const std::string& name) {
  std::stringstream text;
  text << std::ifstream(std::string(KVPOOL_SOURCE_DIR "/") + name).rdbuf();
  EXPECT_FALSE(text.str().empty()) << name;
  return text.str();
}

// The users that they name are not on the machine that builds.
TEST(AccessFileTest, WhatIsShippedIsRight) {
  const auto numbered = [](const std::string& text) {
    return absl::StrReplaceAll(text,
                               {{"= kvpool\n", "= 998\n"}, {"root, kvpool", "root, 998"}, {"alice", "1001"}});
  };
  const auto pod = Parsed(FileOf("deploy/kubernetes/base/access.conf"));
  EXPECT_EQ(RuleOf(*pod, Process({.uid = 65532}), AccessRole::kEngine), "pod");
  EXPECT_EQ(RuleOf(*pod, Process({.uid = 1000}), AccessRole::kObserver), "");
  const auto debian = Parsed(numbered(FileOf("deploy/debian/access.conf")));
  EXPECT_EQ(RuleOf(*debian, Process({.uid = 0}), AccessRole::kOperator), "operators");
  EXPECT_EQ(RuleOf(*debian, Process({.uid = 1000, .gid = 1000, .groups = {998}}), AccessRole::kEngine),
            "users");
  EXPECT_EQ(RuleOf(*debian, Process({.uid = 1000, .gid = 1000, .groups = {998}}), AccessRole::kOperator), "");
  const std::string readme = FileOf("deploy/README.md"), fence = "```text\n# The first rule";
  const size_t begin = readme.find(fence) + 8, end = readme.find("```", begin);
  ASSERT_LT(begin, end);
  const auto example = Parsed(numbered(readme.substr(begin, end - begin)));
  EXPECT_EQ(RuleOf(*example, Process({.uid = 1001}), AccessRole::kObserver), "engines of team a");
  EXPECT_EQ(RuleOf(*example, Process({.uid = 5, .cgroup = "/kubepods.slice/x"}), AccessRole::kEngine),
            "engines in pods");
  EXPECT_EQ(RuleOf(*example, Certificate({"ops.example.com"}), AccessRole::kOperator), "operators elsewhere");
}

TEST(AccessRuleTest, TheFirstThatMatchesCounts) {
  const auto policy = Parsed(
      "[one]\nuid = 1000\nrole = observer\n"
      "[rest]\nuid = *\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 1000})), "one");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 1000}), AccessRole::kOperator), "")
      << "what follows adds nothing";
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 7}), AccessRole::kOperator), "rest");
  EXPECT_EQ(RuleOf(*policy, Certificate({"x"})), "") << "* is each uid, and nobody on the network";
}

TEST(AccessRuleTest, EachLineHasToHold) {
  const auto policy = Parsed("[a]\nuid = 1, 2\ngid = 10, 20\ncgroup = /pods\nrole = observer\n");
  const PeerCredentials good{.pid = 1, .uid = 2, .gid = 10, .groups = {}, .cgroup = "/pods/a"};
  EXPECT_EQ(RuleOf(*policy, Process(good)), "a");
  PeerCredentials other = good;
  other.uid = 3;
  EXPECT_EQ(RuleOf(*policy, Process(other)), "");
  other = good;
  other.gid = 30;
  EXPECT_EQ(RuleOf(*policy, Process(other)), "");
  other.groups = {5, 20, 31};
  EXPECT_EQ(RuleOf(*policy, Process(other)), "a") << "a supplementary group";
  other.cgroup = "/system.slice";
  EXPECT_EQ(RuleOf(*policy, Process(other)), "");
}

TEST(AccessRuleTest, ACgroupIsOneWithAllBelowIt) {
  const auto policy = Parsed("[a]\ncgroup = /pods/burstable\nrole = observer\n");
  const auto rule_of = [&](const std::string& cgroup) {
    return RuleOf(*policy, Process({.cgroup = cgroup}));
  };
  EXPECT_EQ(rule_of("/pods/burstable"), "a");
  EXPECT_EQ(rule_of("/pods/burstable/pod1/x"), "a");
  EXPECT_EQ(rule_of("/pods/burstable-not"), "");
  EXPECT_EQ(rule_of("/pods"), "");
  EXPECT_EQ(rule_of("/other/pods/burstable"), "");
  EXPECT_EQ(rule_of(""), "") << "not known";
  const auto all = Parsed("[a]\ncgroup = /\nrole = observer\n");
  EXPECT_EQ(RuleOf(*all, Process({.cgroup = "/x"})), "a");
  EXPECT_EQ(RuleOf(*all, Process({.cgroup = ""})), "");
  EXPECT_EQ(RuleOf(*all, Process({.cgroup = "/../otherpod"})), "") << "not below, but beside";
  EXPECT_EQ(RuleOf(*all, Process({.cgroup = "/.."})), "");
  EXPECT_EQ(RuleOf(*all, Process({.cgroup = "/..x"})), "a");
  const auto pod = Parsed("[a]\ncgroup = /..\nrole = observer\n");
  EXPECT_EQ(RuleOf(*pod, Process({.cgroup = "/../sidecar"})), "a");
  EXPECT_EQ(RuleOf(*pod, Process({.cgroup = "/../../otherpod/x"})), "");
}

TEST(AccessRuleTest, WhoHidesItsCgroupIsNotGivenWhatLaterRulesSay) {
  const auto policy = Parsed(
      "[pods]\ncgroup = /pods\nuid = 1, 2\nrole = observer\n"
      "[others]\nuid = *\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 1, .cgroup = "/pods/a"})), "pods");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 1, .cgroup = "/system"})), "others");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 3})), "others") << "no cgroup makes it the first rule's";
  const auto hidden = policy->Admit(Process({.uid = 1}), AccessRole::kObserver, "ListSpaces");
  EXPECT_EQ(hidden.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(hidden.status().message()),
              testing::HasSubstr("rule [pods] is by cgroup, and its cgroup is not known"));
}

TEST(AccessRuleTest, ACertificateIsKnownByItsWholeNames) {
  const auto policy = Parsed("[a]\nsan = ops.example.com, spiffe://example/ops\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Certificate({"other", "spiffe://example/ops"})), "a");
  EXPECT_EQ(RuleOf(*policy, Certificate({"ops.example.com.evil.org", "xops.example.com"})), "");
  EXPECT_EQ(RuleOf(*policy, Certificate({})), "");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 0})), "") << "a process has no certificate";
}

TEST(AccessRuleTest, ACertificateIsTakenBackAlone) {
  const std::string lost(64, 'a'), next(64, 'b');
  std::string as_openssl_writes_it;
  for (int i = 0; i < 32; ++i) absl::StrAppend(&as_openssl_writes_it, i == 0 ? "AA" : ":AA");
  const auto policy = Parsed("[lost]\ncertificate = " + as_openssl_writes_it +
                             "\nrole = none\n[operators]\nsan = ops.example.com\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Certificate({"ops.example.com"}, next)), "operators");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 0})), "");
  const auto refusal = [&](const Peer& peer) {
    return std::string(policy->Admit(peer, AccessRole::kObserver, "ListSpaces").status().message());
  };
  EXPECT_THAT(
      refusal(Certificate({"ops.example.com"}, lost)),
      HasSubstr("(certificate of ops.example.com; SHA-256 " + lost + ") lacks: rule [lost] gives it none"));
  EXPECT_THAT(refusal(Certificate({"ops.example.com"})),
              HasSubstr("rule [lost] is by certificate, and its certificate is not known"));
}

TEST(AccessRuleTest, ARuleMayBeForOneCertificateOfAName) {
  const std::string first(64, '1'), second(64, '2');
  const auto policy = Parsed("[a]\nsan = a\ncertificate = " + first + "\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Certificate({"a"}, first)), "a");
  EXPECT_EQ(RuleOf(*policy, Certificate({"a"}, second)), "");
  EXPECT_EQ(RuleOf(*policy, Certificate({"b"}, first)), "");
  EXPECT_EQ(RuleOf(*policy, Certificate({"b"})), "") << "its name already says that it is another";
}

TEST(AccessRuleTest, NoRoleMeansNothing) {
  const auto policy = Parsed("[banned]\nuid = 7\nrole = none\n[all]\nuid = *\nrole = operator\n");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 7})), "");
  EXPECT_EQ(RuleOf(*policy, Process({.uid = 8})), "all");
}

TEST(AccessRuleTest, RolesAreWhatTheySay) {
  const auto allows = [](const std::string& role) {
    const auto policy = Parsed("[a]\nuid = 1\nrole = " + role +
                               (role.find("engine") == std::string::npos ? "\n" : "\ntenant = *\n"));
    std::string allowed;
    for (const AccessRole role : {AccessRole::kEngine, AccessRole::kObserver, AccessRole::kOperator}) {
      if (policy->Admit(Process({.uid = 1}), role, "a test").ok())
        absl::StrAppend(&allowed, AccessRoleName(role), " ");
    }
    return allowed;
  };
  EXPECT_EQ(allows("engine"), "engine ");
  EXPECT_EQ(allows("observer"), "observer ");
  EXPECT_EQ(allows("operator"), "observer operator ");
  EXPECT_EQ(allows("engine, observer"), "engine observer ");
  EXPECT_EQ(allows("engine, operator"), "engine observer operator ");
}

TEST(AccessRuleTest, WithoutAFileTheOwnUidAndRootMayDoAll) {
  const auto policy = AccessPolicy::OfUid(65532);
  for (const AccessRole role : {AccessRole::kEngine, AccessRole::kObserver, AccessRole::kOperator}) {
    EXPECT_TRUE(policy->Admit(Process({.uid = 65532}), role, "a test").ok());
    EXPECT_TRUE(policy->Admit(Process({.uid = 0}), role, "a test").ok());
    EXPECT_FALSE(
        policy->Admit(Process({.uid = 1000, .gid = 65532, .groups = {0, 65532}}), role, "a test").ok());
    EXPECT_FALSE(policy->Admit(Certificate({"65532"}), role, "a test").ok());
  }
}

TEST(AccessRuleTest, WhoIsRefusedIsToldWhoHeIsAndWhatToDo) {
  const Peer peer = Process({.pid = 17, .uid = 1000, .gid = 100, .groups = {}, .cgroup = "/x.slice"});
  const auto refusal = [](const AccessPolicy& policy, const Peer& peer) {
    const absl::Status status = policy.Admit(peer, AccessRole::kOperator, "Evict").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    return std::string(status.message());
  };
  const std::string who =
      "Evict needs the role operator, which uid 1000 (gid 100, pid 17, cgroup /x.slice) lacks: ";
  EXPECT_EQ(refusal(*AccessPolicy::OfUid(7), peer), who +
                                                        "without --access=FILE only uid 7, the daemon's own, "
                                                        "and root have any: name others in such a file");
  EXPECT_EQ(refusal(*Parsed("[a]\nuid = 1\nrole = operator\n"), peer),
            who + "no rule of rules matches it: add one there, and send the daemon SIGHUP");
  EXPECT_EQ(refusal(*Parsed("[a]\nuid = *\nrole = engine, observer\ntenant = *\n"), peer),
            who + "rule [a] gives it engine and observer");
  EXPECT_THAT(refusal(*AccessPolicy::OfUid(7), Certificate({"a", "b\n"})),
              HasSubstr("which network peer ipv4:192.0.2.1:4242 (certificate of a, b\\n) lacks: "));
  EXPECT_THAT(refusal(*AccessPolicy::OfUid(7), Certificate({})),
              HasSubstr("(certificate of no subjectAltName)"));
}

}  // namespace
}  // namespace kvpool
