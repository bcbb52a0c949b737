#include "client/ctl/commands.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/ctl/render.h"
#include "client/tools/text.h"
#include "cuda/scorers/policies/registry.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "proto/support/status_macros.h"

namespace kvpool::ctl {
namespace {

using tools::HumanCount;
using tools::Printable;

constexpr uint64_t kMostBlocks = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMostGroups = 15;
constexpr uint64_t kMostWeight = 1000;
constexpr size_t kMostKeyBytes = 64;
constexpr uint32_t kPageBlocks = 1000;  // ListBlocks' largest page.

absl::Status CheckGroup(const Flags& flags) {
  return flags.given("group") && !flags.given("key") ? absl::InvalidArgumentError("--group is for --key")
                                                     : absl::OkStatus();
}

class StatusCommand : public Command {
 public:
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    ASSIGN_OR_RETURN(const v1::GetStatsResponse stats, daemon->GetStats({}));
    output.Print(stats, RenderStatus(stats));
    return absl::OkStatus();
  }
};

class SpacesCommand : public Command {
 public:
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    ASSIGN_OR_RETURN(const v1::ListSpacesResponse spaces, daemon->ListSpaces({}));
    output.Print(spaces, RenderSpaces(spaces));
    return absl::OkStatus();
  }
};

class RecoveredCommand : public Command {
 public:
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    ASSIGN_OR_RETURN(const v1::GetRecoveryResponse recovery, daemon->GetRecovery({}));
    output.Print(recovery, RenderRecovery(recovery));
    return absl::OkStatus();
  }
};

class TierCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("tier", &spec_, "attach: the tier, as --tier of kvpoold writes it");
    flags->Add("write", &write_, "attach: when blocks are written to it; the same as write= in --tier");
    flags->Add("cancel", &cancel_, "drain: have it written to again");
    // A folder with much in it is read before it is attached, and a slow store answers late.
    flags->SetDefault("deadline", "1m");
  }
  absl::Status TakeArguments(const std::vector<std::string>& arguments) override {
    const std::string verb = arguments.empty() ? "" : arguments[0];
    verb_ = verb == "attach"   ? Verb::kAttach
            : verb == "drain"  ? Verb::kDrain
            : verb == "detach" ? Verb::kDetach
                               : Verb::kList;
    const size_t words = verb_ == Verb::kList ? 0 : verb_ == Verb::kAttach ? 1 : 2;
    if (arguments.size() != words) {
      return absl::InvalidArgumentError(
          "expected nothing more, or: attach --tier=SPEC, drain NAME, detach NAME; kvpoolctl tier lists "
          "names");
    }
    if (words == 2) tier_ = arguments[1];
    return absl::OkStatus();
  }
  absl::Status Check(const Flags& flags) override {
    if ((verb_ == Verb::kAttach) != !spec_.empty())
      return absl::InvalidArgumentError("tier attach needs --tier=SPEC, which nothing else takes");
    if (flags.given("write") && spec_.empty())
      return absl::InvalidArgumentError("--write is for tier attach");
    if (cancel_ && verb_ != Verb::kDrain) return absl::InvalidArgumentError("--cancel is for tier drain");
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    switch (verb_) {
      case Verb::kAttach:
        return Attach(daemon, output);
      case Verb::kDrain:
        return Drain(daemon, output);
      case Verb::kDetach:
        return Detach(daemon, output);
      case Verb::kList:
        break;
    }
    ASSIGN_OR_RETURN(const v1::ListTiersResponse tiers, daemon->ListTiers({}));
    output.Print(tiers, RenderTiers(tiers));
    return absl::OkStatus();
  }

 private:
  enum class Verb { kList, kAttach, kDrain, kDetach };

  // What is left of --deadline is for the answer.
  static uint32_t TimeoutMs(const tools::OperatorClient& daemon) {
    return static_cast<uint32_t>(std::max<int64_t>(1, absl::ToInt64Milliseconds(daemon.deadline()) * 9 / 10));
  }
  absl::Status Attach(tools::OperatorClient* daemon, const Output& output) const {
    v1::AttachTierRequest request;
    request.set_spec(write_.empty() ? spec_ : absl::StrCat(spec_, ",write=", write_));
    request.set_timeout_ms(TimeoutMs(*daemon));
    ASSIGN_OR_RETURN(const v1::AttachTierResponse answer, daemon->AttachTier(request));
    output.Print(answer, absl::StrCat("Tier ", answer.tier(), " at ", Printable(answer.path()),
                                      " is attached, with ", HumanCount(answer.values(), "value"),
                                      ", until the daemon ends. The next one has it if flags or config file "
                                      "name it: tier = ",
                                      request.spec(), "\n"));
    return absl::OkStatus();
  }
  absl::Status Drain(tools::OperatorClient* daemon, const Output& output) const {
    v1::DrainTierRequest request;
    request.set_tier(tier_);
    request.set_timeout_ms(TimeoutMs(*daemon));
    request.set_cancel(cancel_);
    ASSIGN_OR_RETURN(const v1::DrainTierResponse answer, daemon->DrainTier(request));
    output.Print(answer, cancel_ ? absl::StrCat("Tier ", tier_, " is written to again\n")
                                 : absl::StrCat("Tier ", tier_, " is not written to any more; ",
                                                HumanCount(answer.writes(), "write"), " under way\n"));
    if (answer.writes() == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("tier ", tier_, " has not answered all of its writes in time"));
  }
  absl::Status Detach(tools::OperatorClient* daemon, const Output& output) const {
    v1::DetachTierRequest request;
    request.set_tier(tier_);
    request.set_timeout_ms(TimeoutMs(*daemon));
    ASSIGN_OR_RETURN(const v1::DetachTierResponse answer, daemon->DetachTier(request));
    const std::string left = absl::StrCat(HumanCount(answer.reads(), "read"), " and ",
                                          HumanCount(answer.writes(), "write"), " under way");
    output.Print(answer, answer.detached()
                             ? absl::StrCat("Tier ", tier_, " is detached\n")
                             : absl::StrCat("Tier ", tier_, " is being detached: ", left, "\n"));
    if (answer.detached()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "tier ", tier_, " is not closed yet, and asked for nothing more; the daemon goes on with it"));
  }

  std::string spec_, write_, tier_;
  Verb verb_ = Verb::kList;
  bool cancel_ = false;
};

class SessionsCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "only sessions in this space");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::ListSessionsRequest request;
    request.set_space(space_);
    ASSIGN_OR_RETURN(const v1::ListSessionsResponse sessions, daemon->ListSessions(request));
    output.Print(sessions, RenderSessions(sessions));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0;
};

class BlocksCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "id of the space (see kvpoolctl spaces); needed");
    flags->Add("state", &state_,
               "only blocks that are free, leased, sealed, cached, quarantined or withheld");
    flags->Add("first", &first_, {.max = kMostBlocks}, "first block id");
    flags->Add("limit", &limit_, {.min = 1, .max = kMostBlocks}, "most blocks to show");
  }
  absl::Status Check(const Flags&) override {
    if (space_ == 0)
      return absl::InvalidArgumentError("blocks needs --space=ID; kvpoolctl spaces lists them");
    if (!state_.empty() && StateFromName(state_) == v1::BLOCK_STATE_UNSPECIFIED) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--state: \"", state_, "\" is not free, leased, sealed, cached, quarantined or withheld"));
    }
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::ListBlocksRequest request;
    request.set_space(space_);
    request.set_state(StateFromName(state_));
    request.set_first(static_cast<uint32_t>(first_));
    v1::ListBlocksResponse all;
    do {
      const uint64_t wanted = limit_ - static_cast<uint64_t>(all.blocks_size());
      request.set_limit(static_cast<uint32_t>(std::min<uint64_t>(wanted, kPageBlocks)));
      ASSIGN_OR_RETURN(const v1::ListBlocksResponse page, daemon->ListBlocks(request));
      all.MergeFrom(page);
      all.set_next(page.next());
      // A page that does not advance would be requested without end.
      if (page.next() <= request.first()) break;
      request.set_first(page.next());
    } while (static_cast<uint64_t>(all.blocks_size()) < limit_);
    output.Print(all, RenderBlocks(all));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0, first_ = 0, limit_ = 100;
  std::string state_;
};

class ExplainCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "id of the space; --key is looked up in all by default");
    flags->Add("block", &block_, {.min = 1, .max = kMostBlocks}, "why is this block here");
    flags->AddBytes("key", &key_, kMostKeyBytes, "why is this prefix a hit or a miss");
    flags->Add("group", &group_, {.max = kMostGroups}, "layer group of --key");
    flags->Add("all", &all_, "every block of the chain in front of it, not its ends alone");
  }
  absl::Status Check(const Flags& flags) override {
    if (flags.given("block") == flags.given("key")) {
      return absl::InvalidArgumentError("explain needs --space=ID --block=ID, or --key=HEX");
    }
    if (flags.given("block") && space_ == 0) return absl::InvalidArgumentError("--block needs --space=ID");
    return CheckGroup(flags);
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::ExplainRequest request;
    request.set_space(space_);
    if (key_.empty()) {
      request.set_block(static_cast<uint32_t>(block_));
    } else {
      request.set_key(key_);
      request.set_group(static_cast<uint32_t>(group_));
    }
    ASSIGN_OR_RETURN(const v1::ExplainResponse explanation, daemon->Explain(request));
    output.Print(explanation, RenderExplanation(explanation, all_));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0, block_ = 0, group_ = 0;
  std::string key_;
  bool all_ = false;
};

class EvictCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "only in this space");
    flags->Add("tenant", &tenant_, "only in this tenant's spaces");
    flags->Add("session", &session_, {.min = 1}, "only what this session sealed");
    flags->AddBytes("key", &key_, kMostKeyBytes, "only this prefix and what is behind it");
    flags->Add("group", &group_, {.max = kMostGroups}, "layer group of --key");
    flags->Add("count", &count_, {.min = 1}, "at most this many blocks");
    flags->Add("all", &all_, "every cached block, where nothing else is given");
  }
  absl::Status Check(const Flags& flags) override {
    // A script's variable that is not set must not widen what is evicted.
    if (flags.given("tenant") && tenant_.empty())
      return absl::InvalidArgumentError("--tenant: no tenant has an empty name");
    RETURN_IF_ERROR(CheckGroup(flags));
    const bool chosen = space_ != 0 || !tenant_.empty() || session_ != 0 || !key_.empty() || count_ != 0;
    if (chosen || all_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "evict without a selection empties every cache: say --all if that is meant");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::EvictRequest request;
    request.set_space(space_);
    request.set_count(count_);
    request.set_key(key_);
    request.set_group(static_cast<uint32_t>(group_));
    request.set_session(session_);
    request.set_tenant(tenant_);
    ASSIGN_OR_RETURN(const v1::EvictResponse answer, daemon->Evict(request));
    std::string text = absl::StrCat(HumanCount(answer.evicted(), "block"), " evicted");
    if (answer.held_back() != 0) {
      absl::StrAppend(&text, ", ", HumanCount(answer.held_back()),
                      " held back: in use, pinned, or in front of a block that stays");
    }
    output.Print(answer, text + "\n");
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0, session_ = 0, group_ = 0, count_ = 0;
  std::string tenant_, key_;
  bool all_ = false;
};

class PinCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->AddBytes("key", &key_, kMostKeyBytes, "last block of the prefix; needed");
    flags->Add("group", &group_, {.max = kMostGroups}, "layer group of --key");
    flags->Add("space", &space_, {.min = 1}, "only in this space; every one that has the key by default");
    flags->Add("ttl", &ttl_, {.max = absl::Hours(24)}, "for how long, at most 24h");
    flags->Add("unpin", &unpin_, "end the pin instead");
  }
  absl::Status Check(const Flags& flags) override {
    if (key_.empty()) return absl::InvalidArgumentError("pin needs --key=HEX");
    if (flags.given("ttl") == unpin_) return absl::InvalidArgumentError("pin needs --ttl=TIME, or --unpin");
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::PinPrefixRequest request;
    request.set_space(space_);
    request.set_key(key_);
    request.set_group(static_cast<uint32_t>(group_));
    if (!unpin_) request.set_ttl_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(ttl_)));
    ASSIGN_OR_RETURN(const v1::PinPrefixResponse answer, daemon->PinPrefix(request));
    output.Print(answer,
                 absl::StrCat(HumanCount(answer.pinned(), "block"), unpin_ ? " unpinned\n" : " pinned\n"));
    return absl::OkStatus();
  }

 private:
  std::string key_;
  uint64_t group_ = 0, space_ = 0;
  absl::Duration ttl_;
  bool unpin_ = false;
};

class DrainCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("cancel", &cancel_, "accept new sessions again");
    flags->Add("wait", &wait_, "until no session is left");
    flags->Add("timeout", &timeout_, {}, "longest --wait; exit 1 if sessions are left then");
  }
  absl::Status Check(const Flags& flags) override {
    if (cancel_ && wait_) return absl::InvalidArgumentError("--cancel and --wait exclude each other");
    if (flags.given("timeout") && !wait_) return absl::InvalidArgumentError("--timeout is for --wait");
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    const absl::Time give_up = absl::Now() + timeout_;
    v1::DrainRequest request;
    request.set_cancel(cancel_);
    ASSIGN_OR_RETURN(v1::DrainResponse answer, daemon->Drain(request));
    // The daemon has no call that waits: it would hold a thread of it for as long as an operator is patient.
    while (wait_ && answer.sessions_left() > 0 && absl::Now() < give_up) {
      absl::SleepFor(absl::Milliseconds(200));
      ASSIGN_OR_RETURN(answer, daemon->Drain(request));
    }
    const bool drained = !cancel_ && answer.sessions_left() == 0;
    output.Print(answer, drained ? "Drained: no session is left, and no new one is accepted\n"
                                 : absl::StrCat(cancel_ ? "Not draining" : "Draining", ": ",
                                                HumanCount(answer.sessions_left(), "session"), " open\n"));
    if (wait_ && answer.sessions_left() > 0) {
      return absl::FailedPreconditionError(absl::StrCat(HumanCount(answer.sessions_left(), "session"),
                                                        " still open after ", absl::FormatDuration(timeout_),
                                                        "; kvpoolctl sessions lists them"));
    }
    return absl::OkStatus();
  }

 private:
  bool cancel_ = false, wait_ = false;
  absl::Duration timeout_ = absl::Minutes(5);
};

class RevokeCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("blocks", &blocks_, {.min = 1, .max = kMostBlocks},
               "how many leased, unused blocks of each session; needed");
    flags->Add("session", &session_, {.min = 1}, "only this session");
  }
  absl::Status Check(const Flags&) override {
    return blocks_ == 0 ? absl::InvalidArgumentError("revoke needs --blocks=N") : absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::RevokeRequest request;
    request.set_session(session_);
    request.set_blocks(static_cast<uint32_t>(blocks_));
    ASSIGN_OR_RETURN(const v1::RevokeResponse answer, daemon->Revoke(request));
    output.Print(answer, absl::StrCat(HumanCount(answer.sessions_asked(), "session"), " asked\n"));
    return absl::OkStatus();
  }

 private:
  uint64_t session_ = 0, blocks_ = 0;
};

class EndCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("session", &session_, {.min = 1}, "id of the session (see kvpoolctl sessions); needed");
  }
  absl::Status Check(const Flags&) override {
    return session_ == 0 ? absl::InvalidArgumentError("end needs --session=ID; kvpoolctl sessions lists them")
                         : absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::EndSessionRequest request;
    request.set_session(session_);
    ASSIGN_OR_RETURN(const v1::EndSessionResponse answer, daemon->EndSession(request));
    output.Print(answer, RenderEnded(answer.session()));
    return absl::OkStatus();
  }

 private:
  uint64_t session_ = 0;
};

class HealthCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("live", &live_, "whether the daemon answers at all, as it does while it drains");
    flags->Add("service", &service_, "a gRPC service, e.g. kvpool.v1.Engine; the whole daemon by default");
    flags->Add("wait", &wait_, {.max = absl::Hours(24)},
               "until the daemon serves, at most so long: it may be starting");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    ASSIGN_OR_RETURN(const tools::Health health, WaitUntilHealthy(daemon));
    const char* text = health == tools::Health::kServing      ? "SERVING"
                       : health == tools::Health::kNotServing ? "NOT_SERVING"
                                                              : "SERVICE_UNKNOWN";
    output.PrintText(output.json() ? absl::StrFormat("{\"status\":\"%s\"}\n", text)
                                   : absl::StrCat(text, "\n"));
    return Healthy(health) ? absl::OkStatus() : absl::FailedPreconditionError("the daemon is not serving");
  }

 private:
  // A draining daemon is alive but not ready: a restart would end the sessions that it waits for.
  bool Healthy(tools::Health health) const {
    return health == tools::Health::kServing || (live_ && health == tools::Health::kNotServing);
  }
  // The last answer when there is no time left.
  absl::StatusOr<tools::Health> WaitUntilHealthy(tools::OperatorClient* daemon) const {
    const absl::Time give_up = absl::Now() + wait_;
    while (true) {
      absl::StatusOr<tools::Health> health = daemon->CheckHealth(service_);
      if ((health.ok() && Healthy(*health)) || absl::Now() >= give_up) return health;
      absl::SleepFor(absl::Milliseconds(50));
    }
  }

  bool live_ = false;
  std::string service_;
  absl::Duration wait_;
};

// Policies of this build, and so of the daemon that it came with: the daemon is not asked.
class PoliciesCommand : public Command {
 public:
  absl::Status Run(tools::OperatorClient*, const Output& output) override {
    google::protobuf::Struct document;
    google::protobuf::ListValue& policies = *(*document.mutable_fields())["policies"].mutable_list_value();
    for (const scorers::PolicyFacts* facts : scorers::Policies()) {
      auto& fields = *policies.add_values()->mutable_struct_value()->mutable_fields();
      const scorers::Params defaults =
          scorers::BindPolicy(absl::string_view(facts->name.data(), facts->name.size()), {})->params;
      fields["name"].set_string_value(std::string(facts->name));
      fields["title"].set_string_value(std::string(facts->title));
      fields["source"].set_string_value(std::string(facts->source));
      fields["description"].set_string_value(std::string(facts->description));
      fields["needs"].set_string_value(scorers::DescribeNeeds(facts->NeedsOf(defaults)));
      google::protobuf::ListValue& params = *fields["params"].mutable_list_value();
      for (const scorers::ParamFacts& param : facts->params) {
        auto& of_param = *params.add_values()->mutable_struct_value()->mutable_fields();
        of_param["name"].set_string_value(std::string(param.name));
        of_param["help"].set_string_value(std::string(param.help));
      }
    }
    output.Print(document, scorers::PoliciesHelp());
    return absl::OkStatus();
  }
};

class PolicyCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "only this space; else all, and those opened later");
  }
  absl::Status TakeArguments(const std::vector<std::string>& arguments) override {
    if (arguments.empty()) return absl::OkStatus();
    if (arguments.size() != 2 || arguments[0] != "set") {
      return absl::InvalidArgumentError("expected nothing more, or: set NAME");
    }
    policy_ = arguments[1];
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    if (policy_.empty()) {
      ASSIGN_OR_RETURN(v1::GetPoliciesResponse policies, daemon->GetPolicies({}));
      auto* spaces = policies.mutable_spaces();
      spaces->erase(std::remove_if(spaces->begin(), spaces->end(),
                                   [&](const auto& s) { return space_ != 0 && s.space() != space_; }),
                    spaces->end());
      if (space_ != 0 && spaces->empty()) {
        return absl::NotFoundError(absl::StrCat("space ", space_, " does not exist"));
      }
      output.Print(policies, RenderPolicies(policies));
      return absl::OkStatus();
    }
    v1::SetPolicyRequest request;
    request.set_space(space_);
    request.set_policy(policy_);
    ASSIGN_OR_RETURN(const v1::SetPolicyResponse answer, daemon->SetPolicy(request));
    output.Print(answer, RenderSetPolicy(answer, request));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0;
  std::string policy_;
};

class GuardCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "only this space; else all");
    flags->Add("on", &on_, "forget what was measured of this policy, and turn it on again if it is off");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    if (on_.empty()) {
      v1::GetGuardRequest request;
      request.set_space(space_);
      ASSIGN_OR_RETURN(const v1::GetGuardResponse guard, daemon->GetGuard(request));
      output.Print(guard, RenderGuard(guard));
      return absl::OkStatus();
    }
    v1::ResetGuardRequest request;
    request.set_space(space_);
    request.set_policy(on_);
    ASSIGN_OR_RETURN(const v1::ResetGuardResponse answer, daemon->ResetGuard(request));
    output.Print(answer, RenderResetGuard(answer));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0;
  std::string on_;
};

class EraseCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("tenant", &tenant_, "whose cache goes, as kvpoolctl spaces has it; needed");
    // The receipt is in the answer, and a folder of many gigabytes may be written over.
    flags->SetDefault("deadline", "10m");
  }
  absl::Status Check(const Flags&) override {
    return tenant_.empty()
               ? absl::InvalidArgumentError("erase needs --tenant=NAME; kvpoolctl spaces lists them")
               : absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::EraseRequest request;
    request.set_tenant(tenant_);
    ASSIGN_OR_RETURN(const v1::EraseResponse answer, daemon->Erase(request));
    output.Print(answer, RenderErased(tenant_, answer));
    if (answer.remains().empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("not all of tenant ", tenant_, " could be erased"));
  }

 private:
  std::string tenant_;
};

class ShareCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("space", &space_, {.min = 1}, "id of the space (see kvpoolctl spaces); needed");
    flags->Add("guaranteed-blocks", &blocks_, {.max = kMostBlocks},
               "blocks it keeps when others want memory");
    flags->Add("limit-blocks", &limit_, {.max = kMostBlocks}, "the most it may have; 0: its rule's");
    flags->Add("weight", &weight_, {.max = kMostWeight},
               "how much of contended memory is its own, in relation to other spaces; 0: its rule's");
    flags->Add("priority", &priority_, "batch, standard or interactive: who comes first; rule: its rule's");
  }
  absl::Status Check(const Flags& flags) override {
    if (space_ == 0) return absl::InvalidArgumentError("share needs --space=ID; kvpoolctl spaces lists them");
    guaranteed_ = flags.given("guaranteed-blocks");
    limited_ = flags.given("limit-blocks");
    weighted_ = flags.given("weight");
    classed_ = flags.given("priority");
    if (classed_ && priority_ != "rule" &&
        (!v1::PriorityClass_Parse(absl::StrCat("PRIORITY_CLASS_", absl::AsciiStrToUpper(priority_)),
                                  &class_) ||
         class_ == v1::PRIORITY_CLASS_UNSPECIFIED)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--priority is ", priority_, "; must be batch, standard, interactive or rule"));
    }
    if (guaranteed_ || limited_ || weighted_ || classed_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "share needs --guaranteed-blocks=N, --limit-blocks=N, --weight=N or --priority=CLASS");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::SetShareRequest request;
    request.set_space(space_);
    request.set_guaranteed_blocks(static_cast<uint32_t>(blocks_));
    request.set_keep_guaranteed(!guaranteed_);
    if (limited_) request.set_limit_blocks(static_cast<uint32_t>(limit_));
    if (weighted_) request.set_weight(static_cast<uint32_t>(weight_));
    if (classed_) request.set_priority_class(class_);
    ASSIGN_OR_RETURN(const v1::SetShareResponse answer, daemon->SetShare(request));
    output.Print(answer,
                 absl::StrCat("Space ", space_, " keeps ", HumanCount(answer.guaranteed_blocks(), "block"),
                              " instead of ", HumanCount(answer.previous_blocks()), "; it has ",
                              HumanCount(answer.capacity_blocks()), " of at most ",
                              HumanCount(answer.limit_blocks()), ", weight ", answer.weight(), ", and class ",
                              PriorityText(answer.priority_class()), ".\n"));
    return absl::OkStatus();
  }

 private:
  uint64_t space_ = 0, blocks_ = 0, limit_ = 0, weight_ = 0;
  std::string priority_;
  v1::PriorityClass class_ = v1::PRIORITY_CLASS_UNSPECIFIED;
  bool guaranteed_ = false, limited_ = false, weighted_ = false, classed_ = false;
};

class UpgradeCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("binary", &binary_,
               "absolute path of the kvpoold that takes over, of root or of the daemon's user, and for root "
               "and that user "
               "to name; by default the file that the daemon was started from");
    flags->Add("end-sessions", &end_sessions_, "also if some sessions can't come back: they end");
    flags->Add("cold", &cold_,
               "start with nothing of what is kept, as for a state of another version: all sessions end");
    flags->Add("timeout", &timeout_, {.max = absl::Hours(1)}, "longest wait for the next daemon");
  }
  absl::Status Check(const Flags& flags) override {
    // A script's variable that is not set must not mean another file.
    if (flags.given("binary") && (binary_.empty() || binary_[0] != '/'))
      return absl::InvalidArgumentError(absl::StrCat("--binary: \"", binary_, "\" is no absolute path"));
    return absl::OkStatus();
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    v1::UpgradeRequest request;
    request.set_binary(binary_);
    request.set_end_sessions(end_sessions_);
    request.set_cold(cold_);
    ASSIGN_OR_RETURN(const v1::UpgradeResponse before, daemon->Upgrade(request));
    const absl::Time begin = absl::Now();
    ASSIGN_OR_RETURN(const v1::GetStatsResponse after,
                     daemon->AwaitAfter(before.daemon_epoch(), begin + timeout_));
    const double gap_ms = absl::ToDoubleMilliseconds(absl::Now() - begin);
    const bool done = after.last_upgrade().outcome() == v1::UPGRADE_OUTCOME_DONE;
    google::protobuf::Struct document;
    auto& fields = *document.mutable_fields();
    fields["done"].set_bool_value(done);
    fields["reason"].set_string_value(after.last_upgrade().reason());
    fields["binary"].set_string_value(before.binary());
    fields["old_version"].set_string_value(before.version());
    fields["new_version"].set_string_value(after.version());
    fields["old_epoch"].set_number_value(static_cast<double>(before.daemon_epoch()));
    fields["new_epoch"].set_number_value(static_cast<double>(after.daemon_epoch()));
    fields["sessions"].set_number_value(after.sessions());
    fields["gap_ms"].set_number_value(gap_ms);
    const std::string now = absl::StrFormat(
        "kvpoold %s, epoch %d, serves in place of %s, epoch %d; no answer for %.0f ms", after.version(),
        after.daemon_epoch(), before.version(), before.daemon_epoch(), gap_ms);
    std::string text = absl::StrCat(now, "; ", HumanCount(after.sessions(), "session"), " open\n");
    google::protobuf::ListValue& changes = *fields["tier_changes"].mutable_list_value();
    for (const std::string& change : before.tier_changes()) {
      changes.add_values()->set_string_value(change);
      absl::StrAppend(&text, "Other tiers: ", Printable(change), "\n");
    }
    output.Print(document, text);
    if (done) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(before.binary(),
                                                      " did not take over: ", after.last_upgrade().reason(),
                                                      ". The program of before serves again"));
  }

 private:
  std::string binary_;
  bool end_sessions_ = false, cold_ = false;
  absl::Duration timeout_ = absl::Minutes(1);
};

template <typename C>
std::unique_ptr<Command> Make() {
  return std::make_unique<C>();
}

constexpr CommandEntry kCommands[] = {
    {"status", "the daemon, its memory and its counters", &Make<StatusCommand>},
    {"top", "a live view; q ends it", &MakeTop},
    {"spaces", "spaces: memory, layout, blocks by state", &Make<SpacesCommand>},
    {"recovered", "what the last start found of the daemon before, and what it dropped",
     &Make<RecoveredCommand>},
    {"tier", "what is below the pool; tier attach, drain and detach change it", &Make<TierCommand>},
    {"sessions", "sessions, their processes and what they hold", &Make<SessionsCommand>},
    {"blocks", "blocks of a space", &Make<BlocksCommand>},
    {"explain", "why a block is here, or a prefix is not", &Make<ExplainCommand>},
    {"evict", "drop cached blocks", &Make<EvictCommand>},
    {"erase", "remove all that is cached of a tenant, in memory and below", &Make<EraseCommand>},
    {"pin", "protect a prefix from eviction", &Make<PinCommand>},
    {"drain", "refuse new sessions", &Make<DrainCommand>},
    {"revoke", "ask sessions for leased blocks they do not use", &Make<RevokeCommand>},
    {"end", "end a session that its engine does not", &Make<EndCommand>},
    {"policy", "which cached blocks leave first; policy set NAME changes it", &Make<PolicyCommand>},
    {"share", "memory that a space keeps, may have at most, and has beside others", &Make<ShareCommand>},
    {"policies", "policies that prune live sequences, with what they need", &Make<PoliciesCommand>},
    {"guard", "what pruning costs, and which policies are off for it; --on=POLICY ends that",
     &Make<GuardCommand>},
    {"upgrade", "have another kvpoold take over, with sessions and cache", &Make<UpgradeCommand>},
    {"health", "exit 0 if the daemon serves, or with --live answers: for probes", &Make<HealthCommand>},
};

}  // namespace

absl::Span<const CommandEntry> Commands() { return kCommands; }

absl::Status Command::TakeArguments(const std::vector<std::string>& arguments) {
  if (arguments.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("unexpected argument ", arguments.front()));
}

void Output::Print(const google::protobuf::Message& message, const std::string& text) const {
  if (!json_) return PrintText(text);
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  PrintText(status.ok() ? json : absl::StrFormat("{\"error\":\"%s\"}\n", std::string(status.message())));
}

void Output::PrintText(const std::string& text) const {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace kvpool::ctl
