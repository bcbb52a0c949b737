// The daemon without its sockets: spaces, sessions, members, and every verb.
//
//   called by       what                                                         thread
//   attach socket   OnAttached, OnSlabAck, OnSlabLeft, OnHangup, OnProcessDead   the attach server's
//   gRPC            OpenSession, AddMember, Apply, operator verbs                any
//   housekeeper     growth, background reclaim, expiry                           one of its own
//   verifier        sums of what was sealed                                      one of its own
//   DeviceRunner    OnOperationDone                                              the runner's, one a device
//
// The class is implemented in these files:
//
//   daemon.cc            start and stop, attach connections, engine verbs, device operations, housekeeping
//   daemon_open.cc       OpenSession and AddMember, and the memory that they need
//   daemon_reclaim.cc    ReclaimAhead, TidyUp
//   daemon_recover.cc    spaces that an earlier daemon left with a keeper
//   daemon_evict.cc      the operator's Evict
//   daemon_erase.cc      the operator's Erase: all that is cached of a tenant
//   daemon_explain.cc    the operator's Explain
//   daemon_give_back.cc  memory that moves from one space to another; SetShare
//   daemon_hand_over.cc  what is asked and done before another daemon takes over
//   daemon_policy.cc     GetPolicies, SetPolicy
//   daemon_rules.cc      rules of access that were read again, and the terms of spaces
//   daemon_operator.cc   all other operator verbs
//   daemon_snapshot.cc   Snapshot, for metrics
//   daemon_tiers.cc      tiers that come and go
//   daemon_verify.cc     sums of what was sealed
//
// Locks: the registry's mutex (sessions, spaces, tokens), then one mutex a space (its pool, its sessions'
// fences, parked verbs and remembered answers). Neither is held across a device call, a send, or a listener.
//
// A session ends once: by CloseSession, by hang-up of a member's attach socket, by death of a member, by a
// slab that a member could not map or that could not be sent, by an operator. Its blocks come free when the
// pidfd of every member has fired; a session that closed itself gives everything back at once, which is the
// engine's word that nothing of it still runs.
#ifndef KVPOOL_SERVER_DAEMON_DAEMON_H_
#define KVPOOL_SERVER_DAEMON_DAEMON_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device.h"
#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/operator.pb.h"
#include "proto/support/mutex.h"
#include "server/access/access_control.h"
#include "server/base/clock.h"
#include "server/daemon/options.h"
#include "server/daemon/snapshot.h"
#include "server/daemon/start_report.h"
#include "server/keeper/keeper_link.h"
#include "server/space/attach_peer.h"
#include "server/space/space_owner.h"
#include "server/space/stream_listener.h"

namespace kvpool {

// One process of a session, as callers hold it: it stays valid after the session's end, and
// then answers ABORTED.
class Member;

class DeviceBudget;
class FreedMemory;
class DeviceRunner;
class EventLog;
struct DeviceOperation;
class Housekeeper;
class Registry;
class QualityGuard;
struct GuardedPolicy;
class RetiredCounters;
class Session;
class TierMover;
class TierOpening;
struct TierKey;
struct KeptOfMember;
class MemberLog;
struct LostSession;
struct MemberIdentity;
struct OldMember;
struct Resumable;
struct SlabRow;
struct SpaceFacts;
class SlabPlaces;
class SpaceTable;
struct TableVersion;
struct TenantScope;

class Daemon final : private SpaceOwner {
 public:
  // Takes the devices. With a keeper, which outlives it, the daemon goes on with the spaces that one has, and gives it its
  // own. INVALID_ARGUMENT names the option and its limits. FAILED_PRECONDITION: the keeper has what a daemon of
  // another version left; the error names both.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const DaemonOptions& options,
                                                       std::vector<std::unique_ptr<Device>> devices,
                                                       const Clock* clock, KeeperLink* keeper = nullptr);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // ---- Attach connections
  struct Welcome {
    AttachId id;
    v1::AttachFrame frame;
  };
  // The payload of a refusal of hello.member_token that stays: the session is lost to that process.
  static constexpr const char* kForGood = "kvpool/for_good";
  // PERMISSION_DENIED: the process is no engine, or not that of hello.member_token. NOT_FOUND, FAILED_PRECONDITION: no
  // member can come back with that token.
  absl::StatusOr<Welcome> OnAttached(std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                                     const v1::AttachHello& hello);
  void OnSlabAck(AttachId id, const v1::SlabAck& ack);
  void OnSlabLeft(AttachId id, const v1::SlabLeft& left);
  // The connection is gone: no verb of the session is obeyed any more. The process may run on. True:
  // something waits for its end, as the connection is a member's or an opening has taken its token. False: it
  // was nobody's, and the id is forgotten.
  bool OnHangup(AttachId id);
  // The process is gone, as its pidfd says. Comes once, before or after OnHangup; the id is
  // forgotten after both.
  void OnProcessDead(AttachId id);

  // ---- Engine verbs
  // Making what the session is guaranteed may take seconds. Once `given_up`, if given, is set, nobody waits for the
  // answer: CANCELLED, and the attach token may be used again.
  absl::Status OpenSession(const v1::OpenSession& request, v1::OpenSessionResult* result,
                           const std::atomic<bool>* given_up = nullptr);
  absl::Status AddMember(const v1::AddMember& request, v1::AddMemberResult* result);
  // Neither of the two answers reached the member: its session ends. If it was never ready,
  // it is gone at once, instead of when its processes are.
  void OnUndelivered(std::string_view member_token);
  // UNAUTHENTICATED: no member has this token.
  absl::StatusOr<std::shared_ptr<Member>> FindMember(std::string_view token);
  // Applies a batch (never open_session or add_member) and fills the answer, with what else is pending for
  // the member's stream. A repeated sequence gets the first answer again. `wire`, if given, gets the answer
  // serialised. `stream`, if given, is the caller's: what is pending stays with the member if another one has taken
  // its place. True: call FollowUp once the answer is on its way.
  bool Apply(const std::shared_ptr<Member>& member, const v1::StepRequest& request,
             v1::StepResponse* response, std::string* wire = nullptr, const StreamListener* stream = nullptr);
  // What verbs in the member's space left to do that no answer waits for: tells the policy of them, and reclaims
  // ahead of the next ones what they used up.
  void FollowUp(const std::shared_ptr<Member>& member);
  // Applies one verb outside the stream. `done` is called once: inside the call or, for a verb that was
  // parked, later on any thread.
  void ApplyUnary(const v1::Call& call, v1::Operation operation,
                  std::function<void(const v1::OperationResult&)> done);
  // Makes `listener` the member's stream; the one before is superseded.
  void BindStream(const std::shared_ptr<Member>& member, std::shared_ptr<StreamListener> listener);
  // The member's session is one of an earlier daemon's, and not all of its members have come back and mapped its slabs: verbs
  // that name blocks would be refused. Streams come again meanwhile, for a second at most: a member may stay away.
  bool AwaitsMembers(const Member& member);
  void UnbindStream(const std::shared_ptr<Member>& member, const StreamListener* listener);
  // Moves pending completions and notices into the response, a part of them if they are large. False:
  // there were none, or another stream has replaced this one (null: whoever asks).
  bool TakePending(const std::shared_ptr<Member>& member, const StreamListener* stream,
                   v1::StepResponse* response);

  // ---- Operator verbs
  absl::Status Evict(const v1::EvictRequest& request, v1::EvictResponse* response);
  absl::Status ListSpaces(const v1::ListSpacesRequest& request, v1::ListSpacesResponse* response);
  absl::Status ListSessions(const v1::ListSessionsRequest& request, v1::ListSessionsResponse* response);
  absl::Status ListBlocks(const v1::ListBlocksRequest& request, v1::ListBlocksResponse* response);
  absl::Status GetStats(const v1::GetStatsRequest& request, v1::GetStatsResponse* response);
  absl::Status Revoke(const v1::RevokeRequest& request, v1::RevokeResponse* response);
  absl::Status EndSession(const v1::EndSessionRequest& request, v1::EndSessionResponse* response);
  absl::Status Drain(const v1::DrainRequest& request, v1::DrainResponse* response);
  absl::Status Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response);
  absl::Status PinPrefix(const v1::PinPrefixRequest& request, v1::PinPrefixResponse* response);
  absl::Status GetPolicies(const v1::GetPoliciesRequest& request, v1::GetPoliciesResponse* response);
  absl::Status SetPolicy(const v1::SetPolicyRequest& request, v1::SetPolicyResponse* response);
  absl::Status SetShare(const v1::SetShareRequest& request, v1::SetShareResponse* response);
  absl::Status GetGuard(const v1::GetGuardRequest& request, v1::GetGuardResponse* response);
  absl::Status ResetGuard(const v1::ResetGuardRequest& request, v1::ResetGuardResponse* response);
  absl::Status Erase(const v1::EraseRequest& request, v1::EraseResponse* response);
  absl::Status GetRecovery(const v1::GetRecoveryRequest& request, v1::GetRecoveryResponse* response);
  absl::Status ListTiers(const v1::ListTiersRequest& request, v1::ListTiersResponse* response);
  absl::Status AttachTier(const v1::AttachTierRequest& request, v1::AttachTierResponse* response);
  absl::Status DrainTier(const v1::DrainTierRequest& request, v1::DrainTierResponse* response);
  absl::Status DetachTier(const v1::DetachTierRequest& request, v1::DetachTierResponse* response);

  DaemonSnapshot Snapshot();
  // So many have sessions.
  size_t tenants() const;
  // The rules were read again: what they say of a space's limit and weight reaches each open one from the rule by which it was
  // opened last, known by its name; what an operator says stays in front of that. Where that rule is gone, or is not for the
  // space's tenant any more, what it said stays until the next opening. Each change, and each rule that is gone, has an audit line.
  void ApplyRules();
  const AccessControl& access() const { return *options_.access; }
  // One round of growth, background reclaim, expiry and closing of idle spaces. Ends the process if a
  // GPU is lost.
  void HousekeepOnce();
  // Sums what was sealed, and compares as much of a sample as comes to so long a time. REQUIRES: no housekeeping_thread.
  void VerifyOnce(uint64_t elapsed_ms);
  // Runs the next part of an operation that waits for this device; false: none does. REQUIRES: no device_threads.
  bool RunDevicePart(size_t device);
  // One round of what moves blocks between pools and the tier. False: there is nothing to do now. REQUIRES: no
  // housekeeping_thread, and there can be tiers.
  bool MoveTierOnce();
  // Copies what is resident and not below, for so long at most. Nothing comes up any more from then on.
  TierFlush FlushTier(std::chrono::milliseconds limit);
  // From now on only operations that run on a device at this moment are done. All others are answered
  // UNAVAILABLE, and so are those that come.
  void StopDeviceOperations();
  // What takes long and may be asked for again ends soon: an erasure, a change of policy.
  void EndSoon() { stopping_.store(true, std::memory_order_relaxed); }

  // ---- Before another daemon takes over
  // Which sessions could not come back to one that begins now, and why; empty: all could. REQUIRES: there is a keeper.
  std::string WhoCanNotComeBack();
  // How the tiers of one that begins now differ from those of this one; for people.
  std::vector<std::string> TierChanges();
  // What another program has to read: of all spaces that there are, and of those that may be made until it comes.
  std::vector<TableVersion> KeptTables() const;
  // From now on nothing changes but by calls to this object.
  void EndThreads();

 private:
  Daemon(const DaemonOptions& options, std::vector<std::unique_ptr<Device>> devices, const Clock* clock,
         KeeperLink* keeper);
  struct Remains;
  absl::Status Recover();
  // The sessions of an earlier daemon, as far as can be told before their pool is recovered.
  static absl::StatusOr<std::vector<Resumable>> SessionsOf(const std::shared_ptr<Space>& space,
                                                           Remains* remains, std::vector<LostSession>* lost);
  // A member has come back: it gets the slabs again, and its session goes on when it has acknowledged them.
  absl::StatusOr<Welcome> ComeBack(std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                                   const AccessRule& rule, const v1::AttachHello& hello);
  // Those that have died, or stay away for too long.
  void CollectAbsent(uint64_t now);
  // Raises `last_session` to the ids of the sessions that it finds. A table that is of no use stays the caller's.
  absl::Status RecoverSpace(std::unique_ptr<SpaceTable>* table, Remains remains, uint64_t* last_session);
  // Adds their bytes on one rank to `bytes`.
  // `places` may be null.
  absl::StatusOr<std::vector<SlabRow>> AdoptSlabs(const SpaceFacts& facts, const SlabPlaces* places,
                                                  Remains* remains, uint64_t* bytes);
  absl::StatusOr<std::shared_ptr<Space>> MakeSpace(SpaceFacts facts, std::unique_ptr<SpaceTable> table);
  // The keeper has the process and the log of a member to be, before anything is sent to it. Without a keeper there is no
  // log.
  absl::StatusOr<std::unique_ptr<MemberLog>> KeepMember(const Session& session,
                                                        const MemberIdentity& identity, KeptOfMember* kept);
  void AfterTurn(Space* space, const Deferred& deferred) override;
  absl::StatusOr<std::shared_ptr<Space>> OpenSpace(const v1::OpenSession& request, const TenantScope& tenant);
  // The rule by which the process is an engine.
  absl::StatusOr<std::shared_ptr<const AccessRule>> AdmitEngine(const PeerCredentials& credentials,
                                                                absl::string_view what) const;
  // Makes slabs where some were given back, for the first member of a session, which takes no holes. Spaces of any class give up to
  // what the session is guaranteed, those of its own up to what its rule would let it be, and lower ones whatever they can spare.
  // REQUIRES: no hole comes about meanwhile. RESOURCE_EXHAUSTED: there is no memory for them.
  absl::Status FillHoles(const Session& session, const AccessRule& rule, const std::atomic<bool>* given_up);
  // Enters the session in its space, making the slabs that its guarantee needs.
  absl::Status Admit(Session* session, const std::atomic<bool>* given_up);
  // The same. `waits_since_ms` is set when it asks other spaces for memory.
  absl::Status EnterOrWait(Session* session, const std::atomic<bool>* given_up,
                           std::optional<uint64_t>* waits_since_ms);
  // Takes the memory of spaces that nobody uses, on the devices of `space`. False: none came back since
  // the registry counted `spaces_closed`. Each time it says true a space has gone, so asking again comes
  // to an end. Spaces of a class above `most` stay.
  bool MakeRoom(const Space& space, uint64_t spaces_closed, v1::PriorityClass most);
  // Other spaces are to give back what this one needs, `bytes` on each rank. True: there is room for a part of it. False: none
  // could give any, or none did in time. `on_wait` is called under no lock, each time that it can only wait. Spaces of a class above
  // `most` are not asked, and of the others those of the lowest first.
  bool AskOthers(const std::shared_ptr<Space>& needy, uint64_t bytes, v1::PriorityClass most,
                 std::chrono::steady_clock::time_point deadline, const std::atomic<bool>* given_up,
                 absl::FunctionRef<void()> on_wait);
  // What other spaces have, and what keeps them from giving it: "; space 3 (tenant a) has 4096 bytes on each rank: …".
  std::string WhoKeepsWhat(const Space& needy);
  // A line of the log, with who keeps what; of many openings not each has one.
  void SayThatItWaits(const Session& session, uint64_t missing_bytes) ABSL_LOCKS_EXCLUDED(waits_mu_);
  // Openings wait for memory of its devices, and another slab of its own would leave less there than they ask for.
  bool OthersAsk(const Space& space) ABSL_LOCKS_EXCLUDED(waits_mu_);
  // A line of the log where a request was not met in time, with the sessions that had been asked: every 10 s for a space.
  void SayWhoIsLate(Space* space);
  // Steps of giving back, for a while. True: there is more to do at once.
  bool GiveBack(Space* space);
  // A slab for a space that is under pressure, of one of a lower class or, of its own class, one whose next block to leave is worth
  // much less than its own. True: it was asked for.
  // `bytes`: there is no room for so many on each rank. More than a unit is a reserve, which only those that have more than their
  // own, or that no session uses, give to.
  bool LevelWorths(const std::shared_ptr<Space>& needy, uint64_t bytes);
  // Of tenants that have more than their shares, which have become less, the spaces with most are asked for what is beyond.
  void KeepWithinShares(const std::vector<std::shared_ptr<Space>>& spaces);
  // What a space has, against what is its own by its weight.
  struct Standing {
    bool weighted = false;       // Some space of its devices has a weight.
    bool below = false;          // It should have another slab.
    bool elsewhere = false;      // See Growth::set_own_elsewhere: it is, or a lower class has some to spare.
    uint64_t reserve_bytes = 0;  // So much room is for those that are below, on each rank; 0: nobody is.
    bool leaves = false;  // It takes none of that: they are of a higher class, or it is not below itself.
  };
  std::vector<Standing> Standings(const std::vector<std::shared_ptr<Space>>& spaces) const;
  // Closes an idle space whose memory helps this one, and answers it; null: there is none. It is one of the
  // same tenant if that has all it may have, and of a class up to `most`.
  std::shared_ptr<Space> CloseIdleFor(const Space& space, v1::PriorityClass most);
  void EndByAttachment(const std::shared_ptr<Member>& member, bool hung_up, bool dead);
  void OnOperationDone(DeviceOperation* operation);
  absl::Status StartEventLog();
  void StartRunners();
  // Destroys a closing space's memory, or waits for the thread that does: any number of threads may call it.
  void Destroy(Space* closing);
  // The same, and keeps the space's counters. The one thread that closed it calls this.
  void Retire(const std::shared_ptr<Space>& space);
  // Asks each device, once a second, whether it is still there.
  void CheckDevices(uint64_t now);
  void Housekeep(const std::shared_ptr<Space>& space, const Standing& standing);
  // Reclaims up to the high watermark, if free blocks are below the low one.
  void ReclaimAhead(Space* space);
  // Carries out, slice by slice, what ended sessions left to do and what is over by now.
  void TidyUp(Space* space);
  // Evicts at most `count` of the victims, the last first, or, if that is null, of what the policy chooses; answers how many.
  uint64_t EvictFrom(Space* space, EvictReason reason, const std::vector<BlockRef>* victims, uint64_t count);
  std::string NewSpacesPolicy() ABSL_LOCKS_EXCLUDED(new_spaces_mu_);
  // The policy has the weights that the operator gave, if they are its own.
  absl::StatusOr<std::unique_ptr<ReplacementPolicy>> MakePolicy(const std::string& name,
                                                                const SpaceFacts& facts) const;
  // Lets the policy of this name take over in the space, while verbs go on.
  absl::Status ChangePolicy(Space* space, const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(switching_mu_);
  // Gives spaces that were recovered the policy that new ones get. A million blocks take a second.
  void ReplaceStandIns() ABSL_LOCKS_EXCLUDED(switching_mu_);
  // Those that nobody uses any more. Any number of threads may call it.
  void CloseDetached();
  // The tiers that a daemon begins with now, in the words of --tier.
  absl::StatusOr<std::vector<std::string>> NextTiers() const;
  // The blocks of a tenant's space leave. Appends the names that they had below.
  void EraseFrom(Space* space, v1::EraseResponse* response, std::vector<TierKey>* names);
  // What it has below. True: the tier knows of nothing of it, and `known` says so.
  bool EraseBelow(Tier* tier, const TierOwner& owner, const std::vector<TierKey>& names,
                  v1::EraseResponse* response, std::string* known);
  // Adds what the guard knows of policies, with the tenants of their spaces.
  void FillGuarded(const std::vector<GuardedPolicy>& policies,
                   google::protobuf::RepeatedPtrField<v1::GuardedPolicy>* to);
  std::vector<std::shared_ptr<Space>> SpacesOf(uint64_t space, const std::string& tenant);

  const DaemonOptions options_;
  const std::vector<std::unique_ptr<Device>> devices_;
  const Clock* const clock_;
  KeeperLink* const keeper_;  // Null: what there is ends with this process.
  uint64_t start_ms_ = 0;     // When it had recovered what there was. Written before the housekeeper starts.
  StartReport start_report_;  // Written before that, too; without the time of the first answer.
  static constexpr uint64_t kNotAnswered = UINT64_MAX;
  std::atomic<uint64_t> first_answer_ms_{kNotAnswered};
  // A verb is answered: how long after the start, if it is the first one.
  void NoteAnswer();
  std::unique_ptr<DeviceBudget> budget_;
  std::unique_ptr<FreedMemory> freed_;
  std::unique_ptr<EventLog> event_log_;   // Spaces add to it. Null: nothing is recorded.
  const std::unique_ptr<TierSet> tiers_;  // Spaces use it. Null: there can be no tier.
  const std::unique_ptr<TierOpening> tier_opening_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<RetiredCounters> retired_;
  std::unique_ptr<QualityGuard> guard_;
  std::atomic<uint64_t> reconnects_{0};
  Mutex waits_mu_;
  // What openings ask for that wait for memory of other spaces, by device.
  std::map<size_t, uint64_t> asked_bytes_ ABSL_GUARDED_BY(waits_mu_);
  Histogram guarantee_wait_ ABSL_GUARDED_BY(waits_mu_){kTierBounds};
  // Lines of openings that wait: when they are counted anew, how many there were until now, and how many openings had none
  // since the last line.
  uint64_t wait_lines_until_ms_ ABSL_GUARDED_BY(waits_mu_) = 0;
  uint32_t wait_lines_ ABSL_GUARDED_BY(waits_mu_) = 0;
  uint64_t wait_lines_left_out_ ABSL_GUARDED_BY(waits_mu_) = 0;
  std::atomic<uint64_t> device_check_ms_{0};  // Devices are asked next then.
  // Both are indexed by device. Null: it can't score, and runner_errors_ says why.
  std::vector<std::unique_ptr<DeviceRunner>> runners_;
  std::vector<absl::Status> runner_errors_;
  Mutex switching_mu_;   // It is held by one change of policies at a time, and taken before all others.
  Mutex new_spaces_mu_;  // It is taken under the registry's; under it no other is.
  std::string new_spaces_policy_ ABSL_GUARDED_BY(new_spaces_mu_);
  std::unique_ptr<TierMover> tier_mover_;  // Null where tiers_ is.
  std::atomic<bool> stopping_{false};
  std::thread stand_ins_;  // Runs ReplaceStandIns after a recovery.
  // Only the verifier's rounds use these: what of a sample's bytes is left over, and which space is first.
  uint64_t sample_bytes_ = 0, sample_rounds_ = 0;
  std::unique_ptr<Housekeeper> verifier_;     // It runs VerifyOnce.
  std::unique_ptr<Housekeeper> housekeeper_;  // It is the last member: its thread uses all the others.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_DAEMON_H_
