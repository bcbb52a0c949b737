// The attachments, sessions and spaces there are: all that is looked up by token, id or key.
//
//   attachment   waiting -> opening            Claim
//                opening -> bound              Bind
//                opening -> waiting            Unclaim: the opening failed
//                waiting -> forgotten          it hung up: no opening can name it any more
//                bound   -> forgotten          it hung up and its process died, in any order. Its tokens go too.
//                                              Or its session is gone, and another attachment stands for it: see below
//   session      here from Bind to Gone; counted against max_sessions from Claim on
//   space        open    -> closing            CloseIdle, FinishOpening: it has no session, and none is being opened
//                closing -> gone               Closed: its slabs are destroyed
//
// A space is not closed while a process lives that mapped it. A process may open and close any number of sessions, so
// one attachment for each space that it has mapped stands for all of them: the others go with their sessions.
//
// Thread-safe. Its mutex is taken before a space's, and held across neither device calls nor sends.
#ifndef KVPOOL_SERVER_DAEMON_REGISTRY_H_
#define KVPOOL_SERVER_DAEMON_REGISTRY_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvpool/v1/attach.pb.h"
#include "proto/support/mutex.h"
#include "server/keeper/keeper_link.h"
#include "server/space/deferred.h"
#include "server/space/session.h"
#include "server/space/space.h"

namespace kvpool {

// What the keeper has of a member.
struct KeptOfMember {
  Kept process, log;
};

class Registry {
 public:
  explicit Registry(uint32_t max_sessions) : max_sessions_(max_sessions) {}

  // ---- Attachments
  struct Attached {
    AttachId id;
    std::string token;  // 32 bytes.
  };
  Attached Attach(std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                  const v1::AttachHello& hello);

  struct Claimed {
    AttachId id;
    std::shared_ptr<AttachPeer> peer;
    PeerCredentials credentials;
    std::string client_name;
    bool gives_back = false, holes = false;  // See v1::AttachHello.
  };
  // Takes the attachment for one opening. UNAUTHENTICATED: no connection has this token.
  // FAILED_PRECONDITION: it was used. With `new_session`, also UNAVAILABLE: the daemon drains, and
  // RESOURCE_EXHAUSTED: there are max_sessions.
  absl::StatusOr<Claimed> Claim(const std::string& token, bool new_session);
  // The opening failed: the token may be tried again. False: the connection was hung up on, and the attachment is
  // forgotten.
  bool Unclaim(AttachId id, bool new_session);
  // The opening worked: from now on the member is found by its token, and the session by its id. Answers what
  // happened to the attachment meanwhile.
  struct Fate {
    bool hung_up = false, dead = false;
  };
  // `kept` lasts as long as the attachment.
  Fate Bind(AttachId id, const std::shared_ptr<Session>& session, Member* member, bool new_session,
            KeptOfMember kept);

  // ---- Members that an earlier daemon had
  // The member's session goes on, and it is known by its token; `kept` is as above.
  void Resume(const std::shared_ptr<Session>& session, Member* member, KeptOfMember kept);
  // A resumed session takes this of its rule's limits, until it is gone.
  void Share(Session* session, SessionShare share);
  // The member has come back: it has an attachment again, and that is its old one. NOT_FOUND: there is no such token.
  // PERMISSION_DENIED: the process is another. FAILED_PRECONDITION: it is here already, or came too late.
  absl::StatusOr<std::shared_ptr<Member>> ComeBack(std::string_view token, std::shared_ptr<AttachPeer> peer,
                                                   const PeerCredentials& credentials);
  // Those who have not come back and may live.
  struct Absent {
    AttachId id;
    std::shared_ptr<const UniqueFd> pidfd;
    bool hung_up = false;
  };
  std::vector<Absent> AbsentMembers();
  // From here on this member can't come back. False: it has.
  bool GiveUpAbsent(AttachId id);

  // The member of an attachment, or null. The pointer keeps its session alive.
  std::shared_ptr<Member> MemberOf(AttachId id);
  // Both answer the member, or null. The mutex orders them and an opening: either the opening finds no token,
  // or the hang-up knows that the end of the process is awaited.
  struct HungUp {
    std::shared_ptr<Member> member;
    bool awaited = false;    // The end of the process will matter. False: the attachment is forgotten.
    bool stood_for = false;  // Another attachment of the process stands for it: the member counts as dead.
  };
  HungUp HangUp(AttachId id);
  std::shared_ptr<Member> Die(AttachId id);
  std::shared_ptr<Member> FindMember(std::string_view token);

  // ---- Sessions
  uint64_t NextSessionId();
  std::shared_ptr<Session> FindSession(uint64_t id);
  std::vector<std::shared_ptr<Session>> Sessions();
  // How many tenants have sessions that are not gone.
  size_t tenants() const { return tenants_.load(std::memory_order_relaxed); }
  // Ended counts; after Gone the session is found no more. Gone answers the members that others stand for: they
  // had hung up before.
  void Ended(EndKind kind);
  std::vector<std::shared_ptr<Member>> Gone(uint64_t session) ABSL_LOCKS_EXCLUDED(mu_);
  std::map<std::string, uint64_t> ended_by_reason();  // It has every reason there is.

  // ---- Spaces
  using MakeSpace = std::function<absl::StatusOr<std::shared_ptr<Space>>(uint64_t id)>;
  // The open space of the key, made if there is none; it can't be closed before FinishOpening.
  absl::StatusOr<std::shared_ptr<Space>> OpenSpace(const std::string& key, const MakeSpace& make);
  // A space of an earlier daemon. False: the key has another, and this one goes.
  bool Adopt(const std::string& key, std::shared_ptr<Space> space);
  // That daemon had sessions and spaces up to these ids.
  void StartBehind(uint64_t session, uint64_t space);
  // Nothing of the tenant's spaces goes below the pool or comes from there, also of those that are opened or adopted from now on,
  // until Resume was called as often.
  void Suspend(const std::string& tenant);
  void Resume(const std::string& tenant);
  // Closes the space and answers it if nothing came of it, that is no session and nothing sealed, by this daemon or before: its key and
  // its memory are for others then. Else null.
  std::shared_ptr<Space> FinishOpening(const Space& space);
  std::vector<std::shared_ptr<Space>> Spaces();
  std::shared_ptr<Space> FindSpace(uint64_t id);
  // Closes the idle space that was not used for longest, and answers it; null: there is none. It was last
  // used before `before_ms` and, unless `devices` is empty, has slabs on one of them. Where room is made on
  // devices, spaces of the lowest class go first, and of these those whose tenant has more there than its share, by weight, of what
  // all tenants have. With `tenant`, only its spaces may go, and none that is of a class above `most`.
  std::shared_ptr<Space> CloseIdle(uint64_t before_ms, absl::Span<const size_t> devices,
                                   const std::string* tenant = nullptr,
                                   v1::PriorityClass most = v1::PriorityClass_MAX);
  // Is what memory is left for others? True if a space of a higher class there needs a slab, or if the space's tenant has more than
  // its share of what its class has of the devices that the space is on, and a space of the class of a tenant that has not needs one.
  // `may_have`, which takes no space's lock, says whether another may have more, were there room on the devices of `space`.
  bool MustYield(const Space& space, absl::FunctionRef<bool(const Space&)> may_have);
  // The spaces on these devices that are being closed: their memory is on its way back.
  std::vector<std::shared_ptr<Space>> Closing(absl::Span<const size_t> devices);
  // The same for all of a tenant.
  std::vector<std::shared_ptr<Space>> ClosingOf(const std::string& tenant);
  // The slabs of a closing space are destroyed. Whoever destroyed them says so; once is enough.
  void Closed(const Space& space);
  // Counts the spaces that are gone. If nothing is closing and this has not moved, no memory
  // came back meanwhile.
  uint64_t spaces_closed();
  // How many spaces without sessions can't be closed, as processes that mapped their slabs are alive.
  uint32_t held_idle_spaces();

  bool draining();
  void set_draining(bool draining);

 private:
  void AddSession(const std::shared_ptr<Session>& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  enum class Use { kWaiting, kOpening, kBound };
  struct Attachment {
    std::shared_ptr<AttachPeer> peer;
    PeerCredentials credentials;
    std::string client_name;
    bool gives_back = false, holes = false;
    std::string token;
    Use use = Use::kWaiting;
    Fate fate;
    std::shared_ptr<Member> member;  // Null until it is bound.
    KeptOfMember kept;               // The keeper has these then.
    bool absent = false;             // An earlier daemon had it, and it has not come to this one.
  };
  struct Entry {
    std::shared_ptr<Space> space;
    uint32_t opening = 0;
  };
  // Enters a space that nobody else knows, unless the key has one.
  std::pair<std::map<std::string, Entry>::iterator, bool> Enter(const std::string& key,
                                                                std::shared_ptr<Space> space)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<std::shared_ptr<Space>> AllOf(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetIfOver(AttachId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Which process has mapped which space: 0 if that can't be told.
  using Mapping = std::pair<uint64_t, uint64_t>;
  static Mapping MappingOf(const Attachment& attachment);
  // True, and the attachment is forgotten: it hung up, its session is gone, and another stands for it.
  bool ForgetIfStoodFor(AttachId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The tenants whose spaces on these devices have more than their share, by weight, of what all tenants'
  // spaces have there; of this class alone, if there is one.
  std::set<std::string> TenantsAboveShare(absl::Span<const size_t> devices,
                                          v1::PriorityClass only = v1::PRIORITY_CLASS_UNSPECIFIED)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint32_t max_sessions_;
  Mutex mu_;
  uint64_t next_attach_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_session_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_space_ ABSL_GUARDED_BY(mu_) = 1;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  uint32_t opening_sessions_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<AttachId, Attachment> attachments_ ABSL_GUARDED_BY(mu_);
  std::set<AttachId> absent_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, AttachId> attach_tokens_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::shared_ptr<Member>> member_tokens_ ABSL_GUARDED_BY(mu_);
  // How many bound attachments there are for each.
  absl::flat_hash_map<Mapping, uint32_t> mappings_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, uint32_t> sessions_of_ ABSL_GUARDED_BY(mu_);  // So many each tenant has.
  std::atomic<size_t> tenants_{0};                                    // The size of that.
  std::map<std::string, Entry> spaces_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Space>> closing_ ABSL_GUARDED_BY(mu_);
  uint64_t spaces_closed_ ABSL_GUARDED_BY(mu_) = 0;
  std::multiset<std::string> suspended_ ABSL_GUARDED_BY(mu_);     // Tenants, as often as Suspend was called.
  std::array<uint64_t, kEndKinds> ended_ ABSL_GUARDED_BY(mu_){};  // Indexed by EndKind.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_REGISTRY_H_
