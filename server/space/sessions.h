// The sessions of a space: who is in it, which slabs their members have mapped, and what they are to be told.
//
//   Enter -> OnJoined, OnSlabAck, … -> End -> Free, once no process of it may still touch its blocks
//
// A slab that was made is sent to every rank member of every session, at most kMaxSlabsInFlight frames
// unacknowledged a session. It enters the pool once every ready session has mapped it. A ready session that
// has not after kPatienceMs (a stopped process) stops being ready instead of stopping the others. A session
// is ready once its ranks are complete and have mapped all slabs of the pool, so:
//
//   every block that an answer names lies in a slab that all members of that session have mapped
//
// A guarantee may rest on slabs that were made and have not entered. The session takes its share of each as
// it enters, in order of admission and before anyone can lease of it; and none is admitted beyond what is to
// come. So:
//
//   what pending sessions lack <= blocks of slabs that are made and have not entered
//
// An acknowledgement costs the same however many sessions there are; a slab that is made or enters costs each
// once.
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_SESSIONS_H_
#define KVPOOL_SERVER_SPACE_SESSIONS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.pb.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_pool.h"
#include "server/space/growth.h"
#include "server/space/outbox.h"
#include "server/space/recovered.h"
#include "server/space/session.h"
#include "server/space/turn.h"

namespace kvpool {

class Sessions {
 public:
  // All but `now` outlive it.
  Sessions(const SpaceFacts* facts, BlockPool* pool, Growth* growth, uint64_t now)
      : facts_(*facts),
        pool_(*pool),
        growth_(*growth),
        sealer_(facts->geometry.max_blocks),
        last_used_ms_(now) {}

  // Those that are open, or ended and not gone, by id.
  auto begin() const { return sessions_.begin(); }
  auto end() const { return sessions_.end(); }
  size_t size() const { return sessions_.size(); }
  // Of those, the one that has this holder; null: none has.
  Session* of(Holder holder) const {
    const auto slot = static_cast<size_t>(holder);
    return slot < by_holder_.size() ? by_holder_[slot] : nullptr;
  }
  // All holders of sessions are below this one.
  size_t end_holder() const { return by_holder_.size(); }
  bool empty() const { return sessions_.empty(); }
  // No session, and no process that may still map the space's slabs.
  bool idle() const { return empty() && mapping_processes_ == 0; }
  // Processes that an earlier daemon sent slabs, so many of which do not give back; and of these some that have ended.
  void AddMappingProcesses(size_t count, size_t keeping) {
    mapping_processes_ += static_cast<uint32_t>(count);
    keeping_processes_ += static_cast<uint32_t>(keeping);
  }
  void RemoveMappingProcesses(const Turn& turn, size_t count, size_t keeping) {
    mapping_processes_ -= static_cast<uint32_t>(count);
    keeping_processes_ -= static_cast<uint32_t>(keeping);
    last_used_ms_ = turn.now;
  }
  // No session, and such a process is alive.
  bool held_idle() const { return empty() && mapping_processes_ > 0; }
  uint64_t last_used_ms() const { return last_used_ms_; }
  uint32_t stale_members(uint64_t now) const;

  // ---- Coming and going
  // Enters a new session. RESOURCE_EXHAUSTED: its guarantee needs more slabs than there are.
  absl::Status Enter(const Turn& turn, Session* session);
  // A session of an earlier daemon, which its members may come back to. REQUIRES: its holder is the pool's.
  void Resume(const Turn& turn, Session* session);
  // What was found of the daemon before, and which of its sessions have come back.
  Recovered& recovered() { return recovered_; }
  const Recovered& recovered() const { return recovered_; }
  // A member is bound to its attachment, and hears of drain and pressure if they are on: slabs go out to it.
  void OnJoined(Turn& turn, Member* member, bool pressure);
  void OnSlabAck(Turn& turn, Member* member, const v1::SlabAck& ack);
  // The member's connection is gone; its process may run on.
  void OnHangup(Turn& turn, Member* member);
  // The answer that made it a member has not reached it.
  void OnUndelivered(Turn& turn, Member* member);
  void OnProcessDead(Turn& turn, Member* member);
  // `except`: a member whose connection is left alone (it asked, or is gone); may be null.
  void End(Turn& turn, Session* session, EndKind kind, const std::string& reason, const Member* except);
  // Gives back what the ended session held; answers how many holds, the sink not counted. While device
  // operations of it are not over, it is given back when the last of them is.
  uint64_t Free(Turn& turn, Session* session);
  // Posts it to every session that has not ended; answers how many there are.
  uint32_t SetDraining(bool draining);

  // ---- Slabs
  void AddSlab(Turn& turn, SlabRow row);
  // Those that keep all slabs from being given back, for people to read: who lets no slab be unmapped, has ended and
  // lives on, or has not mapped it yet. Empty: nobody does.
  std::vector<std::string> Keepers() const;
  // A member that takes no holes, or of which others may come that don't, for people to read; empty: there is none.
  std::string RigidOne() const;
  // Growth::PutInOrder, where no session is in the way. False: there is a hole, or one is.
  bool PutInOrder();
  // Growth::Leave was called, and answered this: who maps that slab is asked to unmap it. REQUIRES: Keepers() is empty.
  void AskToUnmap(Turn& turn, uint32_t place, uint64_t until_ms);
  void OnSlabLeft(Turn& turn, Member* member, const v1::SlabLeft& left);
  // The slab is the space's again, and goes out to those that have unmapped it.
  void TakeBack(Turn& turn);
  // What pending sessions lack of their guarantees.
  uint32_t unmet_blocks() const;
  // No process maps it any more.
  bool all_left() const;
  // Lets the slabs enter that all ready sessions have mapped, and sessions become ready.
  void EnterSlabs(Turn& turn);
  // Blocks below this one lie in slabs that every rank of the session has mapped.
  uint32_t blocks_mapped_by(const Session& session) const { return growth_.end_of_prefix(session.mapped()); }
  Outbox& outbox() { return outbox_; }

  // ---- Notices and results
  void Post(Member* member, v1::NoticeKind kind, NoticeBoard::Text text);
  void PostAll(Session* session, v1::NoticeKind kind, const NoticeBoard::Text& text);
  // The member may have something pending: its listener is told at the end of the turn.
  void Touch(Member* member);
  void CollectWakes(Turn& turn);
  // Some of what was parked when the session ended, popped without the mutex where it is much.
  void AnswerDropped(Turn& turn, const Deferred::Dropped& dropped, std::vector<ParkedVerb> verbs);
  // A parked verb has its result.
  void Complete(Turn& turn, ParkedVerb verb, const v1::OperationResult& result);

  // ---- The session that sealed a block, as the low 32 bits of its id; 0: none did.
  uint32_t sealer(BlockId block) const { return sealer_[Index(block)]; }
  void SetSealer(BlockId block, const Session& session) {
    sealer_[Index(block)] = static_cast<uint32_t>(session.terms.id);
  }
  void CopySealer(BlockId from, BlockId to) { sealer_[Index(to)] = sealer_[Index(from)]; }

 private:
  using ById = std::map<uint64_t, Session*>;

  // An ended session that never had its sink has had no block: its processes need not be waited for.
  void FreeIfNeverReady(Turn& turn, Session* session);
  void SendSlabs(Turn& turn, Session* session);
  // Of what is unpromised, pending sessions are promised what they lack, and may come to be ready.
  void PromisePending(Turn& turn);
  // Announces what the session has mapped, and computes again whether it is ready.
  void UpdateReady(Turn& turn, Session* session);
  void Announce(Turn& turn, Session* session, uint32_t mapped);
  // The member is told that the slab at this place is ready, and with it all that were made before it.
  void TellReady(Turn& turn, Member* member, uint32_t place);
  // False: no more in this hold of the mutex.
  bool MakeRoomForSink(const Turn& turn);
  // True if the session has its sink, or got it now.
  bool LeaseSink(const Turn& turn, Session* session);
  // A session that was awaited is back.
  void CameBack(Session* session);
  // It has ended in place of that.
  void LoseAwaited(Session* session, EndKind kind, const Member* member);
  // Whether the next slab waits for the session.
  void UpdateBehind(Session* session);

  const SpaceFacts& facts_;
  BlockPool& pool_;
  Growth& growth_;
  std::vector<Session*> sessions_;
  std::vector<Session*> by_holder_;
  std::deque<Session*> pending_;  // Their guarantees wait for slabs that were made and have not entered.
  ById behind_;                   // The ready ones that have not mapped the next slab, which waits for them.
  uint32_t rooms_made_ = 0;       // Sinks for which room was made in this hold of the mutex.
  ById unequipped_;  // They have mapped what they have to, have their guarantee, and lack a sink.
  std::vector<Member*> touched_;
  Outbox outbox_;
  VirtualArray<uint32_t> sealer_;   // Indexed by block.
  uint32_t mapping_processes_ = 0;  // They were sent a slab and have not died.
  uint32_t keeping_processes_ = 0;  // Those of sessions that are gone, which do not give back.
  Recovered recovered_;
  bool draining_ = false;
  uint64_t last_used_ms_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SESSIONS_H_
