// One engine's hold on a space, and the processes that are its members.
//
//   session   pending   a part of its guarantee waits for a slab that others have not mapped yet
//             joining   some rank is missing, or has not mapped all slabs of the pool: it leases nothing
//             ready     it may lease and match
//             ended     its verbs answer ABORTED; its blocks wait for the death of its members' processes
//             gone      everything has been given back
//
//   member    joined -> hung up or dead, in any order; the first of them ends the session
//             absent    a daemon before this one had it, and it has not come back. While a rank is absent its session is
//                       joining, whatever it was before
//
// Not thread-safe: everything here but the constants is under the mutex of the session's space.
#ifndef KVPOOL_SERVER_SPACE_SESSION_H_
#define KVPOOL_SERVER_SPACE_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "server/access/access_control.h"
#include "server/pool/block_pool.h"
#include "server/space/answer_window.h"
#include "server/space/attach_peer.h"
#include "server/space/completions.h"
#include "server/space/episode_sets.h"
#include "server/space/member_log.h"
#include "server/space/notice_board.h"
#include "server/space/owed_releases.h"
#include "server/space/parked_verbs.h"
#include "server/space/stream_listener.h"

namespace kvpool {

class Session;
class Space;
struct DeviceOperation;

// Which of the space's slabs one rank member was sent, in the order in which they were made (growth.h), and has mapped.
class SlabAcks {
 public:
  uint32_t sent() const { return static_cast<uint32_t>(sent_.size()); }
  // So many of the first ones are all mapped.
  uint32_t mapped() const { return prefix_; }
  uint32_t unacknowledged() const { return sent() - count_; }
  void Send(uint32_t slab) { sent_.push_back({.slab = slab}); }
  // This one is asked back. REQUIRES: all that were sent are mapped.
  void Leave(uint32_t slab);
  // FAILED_PRECONDITION: it was not sent, or acknowledged already.
  absl::Status Acknowledge(uint32_t slab);

 private:
  struct Sent {
    uint32_t slab = 0;
    bool mapped = false;
  };
  std::vector<Sent> sent_;
  uint32_t prefix_ = 0;
  uint32_t count_ = 0;
};

struct MemberIdentity {
  AttachId attach{};
  std::shared_ptr<AttachPeer> peer;
  PeerCredentials credentials;
  std::string client_name;
  bool gives_back = false, holes = false;  // See v1::AttachHello.
  std::string token;                       // 16 bytes.
  bool scheduler = false;
  uint32_t rank = 0;
};

class Member {
 public:
  Member(Session* session, uint32_t index, MemberIdentity identity)
      : session(session), index(index), identity(std::move(identity)) {}
  bool pending() const { return completions.any_waiting() || notices.posted(); }
  // What of it outlives the daemon is in this log, which may be null.
  void KeepIn(std::unique_ptr<MemberLog> kept);

  Session* const session;
  const uint32_t index;
  // Its peer, credentials and gives_back change when it comes back to another daemon.
  MemberIdentity identity;

  std::unique_ptr<MemberLog> log;  // What of it outlives the daemon. Null: nothing.
  AnswerWindow answers;
  NoticeBoard notices;
  Completions completions;
  OwedReleases owed;
  std::shared_ptr<StreamListener> listener;
  bool had_stream = false;
  // A batch of it was read and is not applied yet: on a stream that has ended since, maybe. It has one at a time, or streams
  // that come and go would make many.
  std::atomic<bool> batch_waits{false};
  SlabAcks slabs;
  uint64_t fence = 0;
  bool warmup_done = false;
  // It is bound to its attachment, so that what it acknowledges is heard. It gets no slab before.
  bool joined = false;
  bool dead = false;
  bool hung_up = false;
  bool maps = false;    // It was sent a slab, by this daemon or the one before.
  bool leaves = false;  // It was asked to unmap the slab that leaves the space, and has not said that it did.
  bool crossed = false;  // The slab was sent again meanwhile: that it has left may still be said.
  bool keeps = false;    // Its session is gone, and its process may still map what it does not give back.
  bool touched = false;  // It is in Sessions' list of members to wake.
  uint64_t last_call_ms = 0;
};

struct SessionTerms {
  uint64_t id = 0;
  std::string client_name;
  uint32_t uid = 0;  // All members' processes have it.
  uint32_t ranks = 1;
  uint32_t guaranteed_blocks = 0;
  uint32_t max_blocks = 0;
  // It pins and retains only while fewer blocks of the space are.
  uint32_t max_pinned_blocks = UINT32_MAX;
  bool warmup = false;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(std::shared_ptr<Space> space, SessionTerms terms)
      : space(std::move(space)), terms(std::move(terms)), by_rank(this->terms.ranks, nullptr) {}

  // The pool's limits: the sink is the daemon's wish, so it comes on top of what the engine asked for.
  SessionLimits limits() const;
  // So many slabs, as they were made, every rank has mapped; 0 while a rank is missing.
  uint32_t mapped() const;
  uint32_t slabs_in_flight() const;
  // How many ranks have not sent WarmupDone, those without a member among them: their engines still
  // write to scratch.
  uint32_t warming_up() const;
  bool all_dead() const;
  // Computes `passed` again; true: it moved.
  bool UpdatePassed();
  // Sets parked_names and parked_sets.
  void CountParked();
  // INVALID_ARGUMENT: the session has no such rank. FAILED_PRECONDITION: the role is taken.
  absl::Status CheckRole(bool scheduler, uint32_t rank) const;
  Member* AddMember(MemberIdentity identity);

  const std::shared_ptr<Space> space;
  const SessionTerms terms;

  std::vector<std::unique_ptr<Member>> members;  // Indexed by Member::index; it only grows.
  std::vector<Member*> by_rank;                  // Null: the rank has not joined yet.
  ParkedVerbs parked;
  Holder holder = kNobody;
  BlockRef sink;
  uint64_t passed = 0;     // Every rank has passed this step.
  uint32_t announced = 0;  // So many slabs its members were told are ready.
  // These are prepared and not over: they read or write its blocks, even if it has ended.
  std::vector<std::shared_ptr<DeviceOperation>> device_operations;
  uint64_t next_operation = 1;
  EpisodeSets episodes;
  const Member* closer = nullptr;  // It closed the session, and so unmaps what it has by itself.
  bool free_when_over = false;     // It has ended, and its blocks come free when the last of these is over.
  bool lacks_blocks = false;       // Some parked verb waits for blocks.
  bool applying = false;           // A batch of it is being applied, by a turn that may pause.
  uint32_t explained = 0;          // Refusals of that batch's blocks that were put in words.
  // What waits behind device operations is looked at again when that batch is applied.
  bool readmit = false;
  // Verbs that waited go on, one after the other: what was applied of one is nowhere in the log yet.
  bool admitting = false;
  bool ready = false;
  bool resumed = false;  // An earlier daemon opened it.
  bool awaited = false;  // And not all of its members have come back to this one.
  bool ended = false;
  bool gone = false;
  std::string end_reason;

  // Large calls of it that threads of their own are applying, and verbs of it that are let go: others had better not wait for them on a queue's
  // thread. Any thread may look.
  std::atomic<int> large_calls{0};

  // Blocks of its largest episode: as much as a choice may take. Any thread may look.
  std::atomic<size_t> largest_episode{0};

  // What a fence may let go (ParkedVerbs::to_be_let_go), or the end of the session drops. Any thread may look.
  std::atomic<uint64_t> parked_names{0}, parked_sets{0};

  // Its rule's; null until its first process is known. Any thread may look.
  std::atomic<VerbPace*> pace{nullptr};

  // What it takes of its rule's limits, until it is gone. The registry's mutex is around it.
  SessionShare share;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SESSION_H_
