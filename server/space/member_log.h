// What a member may not have heard, and what it waits for, in memory that outlives the daemon: so the next one answers what
// this one was asked.
//
//   answer       of a batch or call past the floor                                   until the floor passes it
//   parked       a verb that waits, as it came                                       until it is complete
//   lent         blocks that it writes on a device                                   until it is complete
//   completion   what became of it                                                   until the member has heard, and what it
//                                                                                    owes was given back, or is about to be
//   floor        answers through it are forgotten
//   fence        the last that the member reported
//   sink         the session's, in the log of its first member
//   marks        the turns in which the member entered the session, its warm-up was done, the session ended, a batch began
//                and was done, and something that is nowhere here began and was done: a late release, an episode, a verb
//                that there was no room for
//
// What is written in a turn counts once the turn is over (pool/undo_log.h), in the logs of all members alike. The session
// can go on in the next daemon if it has not ended, no batch of any member was half done, and nothing was under way that is
// not here.
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_MEMBER_LOG_H_
#define KVPOOL_SERVER_SPACE_MEMBER_LOG_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/unique_fd.h"
#include "server/base/shared_memory.h"
#include "server/pool/block_pool.h"
#include "server/pool/undo_log.h"
#include "server/space/recovered.h"

namespace kvpool {

class MemberLog {
 public:
  static absl::StatusOr<std::unique_ptr<MemberLog>> Make();
  // DATA_LOSS: it is no log, or a damaged one.
  static absl::StatusOr<std::unique_ptr<MemberLog>> Map(UniqueFd fd);
  int fd() const { return memory_.fd(); }

  // The turns that count are those of the pool's table, which outlives it. REQUIRES: it is called before all below.
  void Follow(const BlockPool* pool) { turns_ = &pool->undo_log(); }

  // ---- By the daemon that serves the member
  // It is the session's member with this index from now on.
  void OnEntered(uint32_t index);
  void Add(uint64_t sequence, std::string_view answer);
  void Park(uint64_t sequence, uint32_t index, bool on_stream, const v1::Operation& operation);
  // An operation on a device that was parked writes these blocks, which nobody else knows of before its result says so.
  void Lend(uint64_t sequence, uint32_t index, absl::Span<const BlockRef> blocks);
  // What the result of an operation says is to be given back (OwedReleases) is, or will be while this daemon lives.
  void Hear(uint64_t sequence, uint32_t index);
  // Ignored if it was not parked.
  void Complete(uint64_t sequence, uint32_t index, const v1::OperationResult& result);
  // The member has heard of it; or it goes with the answer to its batch.
  void Confirm(uint64_t sequence, uint32_t index);
  void Fold(uint64_t sequence, uint32_t index);
  void RaiseFloor(uint64_t floor);
  void SetSink(BlockRef sink) { header().sink = sink.Pack(); }
  void SetFence(uint64_t step);
  void OnWarmupDone() { header().warmup_done = turn(); }
  // Once: dated anew, an end that was kept would be forgotten with a turn that is torn.
  void OnEnded() {
    if (header().ended == 0) header().ended = turn();
  }
  // The member ends its session itself, and unmaps what it has of the space. REQUIRES: OnEnded follows in this turn.
  void OnUnmaps() { header().unmaps = 1; }
  void BeginBatch() { header().begun = turn(); }
  void EndBatch() {
    header().done = turn();
    header().torn_batches = 0;
  }
  // Whether something is under way that is nowhere here.
  void SetUnsettled(bool unsettled) { Set(&header().unsettled, unsettled); }

  // ---- By the next one
  // Forgets what was written in the turn that the process did not live to end: the pool's.
  void ForgetTorn();
  // Whether the session can go on. `half_turn` is the pool's, as it was recovered.
  WhyLost WhyOver(uint64_t half_turn = 0) const;
  // False: its entering was torn. It was told nothing, and is no member.
  bool entered() const { return header().made != 0; }
  uint32_t index() const { return header().index; }
  // It has ended its session, and maps nothing of the space any more.
  bool unmaps() const { return header().ended != 0 && header().unmaps != 0; }
  uint64_t fence() const { return header().fence; }
  bool warmup_done() const { return header().warmup_done != 0; }
  uint64_t floor() const { return header().floor; }
  BlockRef sink() const { return BlockRef::Unpack(header().sink); }
  // What is still of use, in the order in which it was written. REQUIRES: ForgetTorn was called.
  enum class Kind : uint32_t { kAnswer, kParked, kCompletion, kLent, kHeard };
  struct Item {
    Kind kind{};
    uint32_t index = 0;
    uint64_t sequence = 0;
    uint64_t turn = 0;
    bool on_stream = false;
    std::string bytes;  // A StepResponse, an Operation, an OperationResult, or packed refs of 8 bytes each.
  };
  std::vector<Item> Items();
  // What was lent to operations has been given back.
  void Return();

 private:
  // The turns in which something came to be so, and ceased to: it is so if the first is later.
  struct Mark {
    uint64_t on, off;
    bool is_on() const { return on > off; }
  };
  // Positions count bytes since the log was made; a byte's place is its position modulo the room.
  struct Header {
    char magic[8];
    uint64_t floor;
    uint64_t unlogged;  // The last sequence whose answer there was no room for.
    uint64_t sink;
    uint64_t ended, begun, done, warmup_done;  // Turns; 0: none.
    Mark unsettled;
    Mark lossy;                                // Something that there was no room for is still of use.
    uint64_t fence, fence_before, fence_turn;  // The one before that turn.
    uint64_t begin, end;                       // Positions.
    uint64_t made;                             // The turn in which the member entered; 0: it has not.
    uint32_t index;                            // The member's.
    uint32_t unmaps;                           // 1: see OnUnmaps. Versions before it have 0.
    uint64_t torn_batches;  // So many daemons were killed in the middle of its batch, one after another.
  };
  struct Entry {
    uint64_t sequence, turn;
    Kind kind;
    uint32_t index;
    uint32_t on_stream;
    uint32_t bytes;
    uint64_t size() const { return sizeof(Entry) + (uint64_t{bytes} + 7) / 8 * 8; }
  };
  // Where an entry stands, for this process alone.
  struct Slot {
    uint64_t size = 0;
    Kind kind{};
    bool on_stream = false;
    uint64_t dead_since = 0;  // The turn in which it ceased to be of use; 0: it has not.
    bool owes = false;        // A result that is of use until Hear was called.
    bool unfinished = false;  // A verb that is over, which nothing in the log says.
  };
  using Id = std::pair<uint64_t, uint32_t>;  // Sequence and index.

  uint64_t turn() const { return turns_->turn(); }
  explicit MemberLog(SharedMemory memory) : memory_(std::move(memory)) {}
  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }
  uint64_t room() const { return memory_.bytes() - sizeof(Header); }
  void Put(uint64_t at, const void* from, uint64_t bytes) const;
  void Get(uint64_t at, void* to, uint64_t bytes) const;
  Entry EntryAt(uint64_t at) const;
  bool Sound() const;
  // False: there is no room.
  bool Append(Entry entry, std::string_view bytes);
  void AddSlot(const Entry& entry);
  void Set(Mark* mark, bool on);
  void Forget(Mark* mark) const;
  // The last entry is of this result, which owes.
  void Owe(Id id);
  // There was no room for the verb or its result.
  void Lose(Id id, bool on_stream);
  // What is lost of it does not matter any more.
  void Regain(Id id);
  void UpdateLossy() { Set(&header().lossy, !lost_.empty() || unfinished_ > 0); }
  Slot& SlotOf(uint64_t number) { return slots_[number - first_slot_]; }
  // Dead entries at the beginning make room.
  void Trim();

  SharedMemory memory_;
  const UndoLog* turns_ = nullptr;
  std::deque<Slot> slots_;  // One for each entry.
  uint64_t first_slot_ = 0;
  // Each names a slot by its number.
  std::deque<std::pair<uint64_t, uint64_t>> answers_;  // Each has its sequence; as they came.
  absl::flat_hash_map<Id, uint64_t> parked_, completions_, lent_, owing_;
  // Verbs that are not over, and results that the stream has not heard, for which there was no room; the value says whether
  // the verb is on the stream.
  absl::flat_hash_map<Id, bool> lost_;
  // So many slots are of verbs for whose completion there was no room: the next daemon would wait for them.
  uint64_t unfinished_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_MEMBER_LOG_H_
