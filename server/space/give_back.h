// How a space gives memory back to its device while engines are in it: slab by slab, any but the first one.
//
//   asked      others want the memory: the space does not grow, and has a deadline
//   looking    what is in each slab is counted. One goes in which nothing is in use, if there is one, else the one where least
//              is; of these the one with the fewest cached blocks, of these the one that was made last
//   vacating   its blocks are leased only where nothing else is free. Cached ones leave by the policy's ranking, of the whole
//              space, until as many are free as all slabs that are to go have; those that stay move, with their bytes, to where
//              the others were. Sessions are asked for what they have leased there and do not use. What is free there is
//              withheld
//   leaving    all of it is withheld: it has left the pool, no answer names it, and each member that maps it is asked to unmap
//              it. Then it is destroyed, and its memory is the device's again
//
// A block that a session holds keeps its slab, and no other: if another slab comes to be without one meanwhile, that goes in its
// place. There is no bound in time but the deadline. Then what was vacated is the space's again. The first slab stays: the null
// block is in it, and sinks are, as far as there was room.
//
// Engines that know of no holes have the slabs from the first one on: while such a session is in the space only the last slab may
// go, and one enters only where there is no hole (Sessions::Enter).
//
// A slab that leaves and that some member has not unmapped by the deadline is the space's again: it goes out to all.
//
// Not thread-safe: the space's mutex is around it. Bytes are copied outside of it, by whoever runs the steps.
#ifndef KVPOOL_SERVER_SPACE_GIVE_BACK_H_
#define KVPOOL_SERVER_SPACE_GIVE_BACK_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cuda/device.h"
#include "kvpool/v1/engine.pb.h"
#include "server/pool/block_pool.h"
#include "server/space/below.h"
#include "server/space/content_checks.h"
#include "server/space/growth.h"
#include "server/space/sessions.h"
#include "server/space/slab_holders.h"
#include "server/space/space_facts.h"
#include "server/space/turn.h"

namespace kvpool {

// What was counted since the space was made. Nothing but uint64_t, as in PoolCounters.
struct GiveBackCounters {
  uint64_t slabs = 0;   // Slabs that were given back.
  uint64_t asked = 0;   // Times that others asked for memory,
  uint64_t missed = 0;  // and that they had not got all of it in time.
  // Sessions that had been asked kLeastAnswerMs before then, or earlier, and had not answered: each once for each time.
  uint64_t late = 0;
};

class GiveBack {
 public:
  // All outlive it.
  GiveBack(const SpaceFacts* facts, BlockPool* pool, Growth* growth, Sessions* sessions, Below* below,
           ContentChecks* checks)
      : facts_(*facts),
        pool_(*pool),
        growth_(*growth),
        sessions_(*sessions),
        below_(*below),
        checks_(*checks) {}

  // Others want so many slabs, until then. The space does not grow meanwhile. REQUIRES: slabs <= spare_slabs().
  void Ask(uint32_t slabs, uint64_t until_ms);
  // They want none any more. A slab that is leaving still goes, as long as its time is not over. `in_vain`: the time of whoever
  // asked, `until_ms`, is over; another's wish goes on, if it has longer.
  void Withdraw(bool in_vain, uint64_t until_ms);
  // Who is asked with less time left is not late: an engine answers between two of its steps.
  static constexpr uint64_t kLeastAnswerMs = 100;
  // Sessions that were asked to unmap a slab or to give back what they have leased there, and had not when the time was over.
  struct Late {
    uint64_t session = 0;
    std::string client_name;
    int64_t pid = 0;
    uint32_t leased = 0;  // Blocks that it has leased there; 0: it maps a slab that it was asked to unmap.
  };
  // At most so many are named, each once; `more` were late besides, or again.
  static constexpr size_t kMostLateNamed = 4;
  struct LateOnes {
    std::vector<Late> named;
    uint64_t more = 0;
  };
  // Every 10 s at most, as one may be late again and again; in between there is none.
  LateOnes TakeLate(uint64_t now);
  // So many slabs could go once no held block is in them: what is left has room for what sessions hold and are promised, and
  // for `share_blocks`. None while a member lets none be unmapped (Sessions::Keepers).
  uint32_t spare_slabs() const;
  // All slabs were looked at, and what is held in each has kept it for a while: whoever asks had better ask others.
  bool stuck(uint64_t now) const;
  // Slabs that are to go, or are on their way.
  uint32_t pending_slabs() const {
    return (growth_.leaving().has_value() ? 1 : 0) + (asked() ? slabs() - std::min(slabs(), keep_slabs_) : 0);
  }
  bool under_way() const { return begun_ || growth_.leaving().has_value(); }

  // A block on its way to another of the same space.
  struct Copy {
    BlockRef from, to;
    std::vector<std::shared_ptr<Slab>> slabs;  // They stay mapped.
    std::vector<Device::Copy> by_rank;
  };
  enum class Next : uint8_t {
    kDone,     // Nothing is asked for any more.
    kWait,     // Sessions or members have to do something first.
    kGoOn,     // There is more to do at once.
    kCopy,     // `copies` are to be carried out, then OnCopied.
    kPlaces,   // Where slabs lie is to be kept for the next daemon, then OnPlaces.
    kDestroy,  // Growth::TakeLeft is to be destroyed, then OnDestroyed.
  };
  // Appends to `evictions` what has left meanwhile. Runs under Space::growth_mu, so that no slab is made between two steps.
  Next Step(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions);
  // `copied`: their bytes are there. REQUIRES: `copies` is what Step answered.
  // True: some have moved.
  bool OnCopied(Turn& turn, absl::Span<const Copy> copies, bool copied);
  void OnDestroyed() {
    ++counters.slabs;
    --destroying;
  }
  // From now on the next daemon finds slabs where they are, though others were given back that lay in front of them. False: it
  // can't, and only the last slab may go until that is tried again.
  bool keeps_places() const { return places_ == Places::kKept; }
  void OnPlaces(bool kept, uint64_t now) {
    places_ = kept ? Places::kKept : Places::kNotKept;
    places_again_ms_ = now + kPlacesAgainMs;
  }
  // The space needs memory itself: what was withheld is put back, a slice at a time. True: there is more. REQUIRES: no slab
  // is leaving.
  bool Cancel();

  // Looks on at who holds what in the slabs that could go. True: there is more to look at, in another hold of the mutex.
  bool LookAtHolders(SlabHolders* holders) const;
  // Why slabs stay, for people to read; empty: nothing keeps them. `holders` has been looked at.
  std::string Obstacle(const SlabHolders& holders = {}) const;

  // What an operator keeps for the space, whatever others want.
  uint32_t share_blocks = 0;
  // What the rule of the last opening says, and what an operator does, who comes first; 0: nothing.
  struct Terms {
    uint32_t limit_blocks = 0;  // The most that the space may have.
    // How much of a device that several spaces want is the space's own, in relation to those of its tenant, and through the greatest
    // of these to other tenants (WeightedShares). Where no space of the device has one, nothing is anybody's own; where some have,
    // the others' is 1.
    uint32_t weight = 0;
    // Who comes first, before weights decide; none: nothing says so. What a rule says bounds what its opening asked for.
    v1::PriorityClass priority = v1::PRIORITY_CLASS_UNSPECIFIED;
    v1::PriorityClass asked = v1::PRIORITY_CLASS_UNSPECIFIED;
    v1::PriorityClass priority_class() const {
      return asked == v1::PRIORITY_CLASS_UNSPECIFIED ? priority : std::min(asked, priority);
    }
    bool operator==(const Terms&) const = default;
  };
  Terms of_rule, of_operator;
  Terms kept;             // Those of the rule of the last opening that succeeded,
  std::string rule;       // and its name; empty: there was none, or an earlier daemon did not keep it.
  uint32_t openings = 0;  // So many are under way: `of_rule` is that of the last one.
  uint32_t limit_blocks() const {
    return of_operator.limit_blocks > 0 ? of_operator.limit_blocks : of_rule.limit_blocks;
  }
  uint32_t weight() const { return of_operator.weight > 0 ? of_operator.weight : of_rule.weight; }
  v1::PriorityClass priority() const {
    for (const Terms& terms : {of_operator, of_rule}) {
      if (const auto said = terms.priority_class(); said != v1::PRIORITY_CLASS_UNSPECIFIED) return said;
    }
    return v1::PRIORITY_CLASS_STANDARD;
  }
  // Slabs that the space has beyond its limit, and could give.
  uint32_t excess_slabs() const;
  // Openings that wait for the memory of others on behalf of this space: it gives none of its own.
  uint32_t asking = 0;
  uint32_t destroying = 0;  // Slabs that are no member's any more, and whose memory is not free yet.
  // Members on their way in that take no holes: none comes about meanwhile.
  uint32_t rigid = 0;
  GiveBackCounters counters;

 private:
  // So many blocks, and slabs, there is no doing without, as long as sessions hold and are promised what they do.
  uint32_t needed_blocks() const;
  uint32_t needed_slabs() const;
  bool asked() const { return keep_slabs_ < UINT32_MAX; }
  uint32_t slabs() const { return static_cast<uint32_t>(growth_.slabs().size()); }
  // What is over is put back, a slice at a time. True: there is more.
  bool PutBack();
  // What is in a slab that may go.
  struct Candidate {
    BlockRange blocks;
    uint32_t in_use = 0, cached = 0;
    bool has_sink = false;  // A session's sink stays as long as that: such a slab can't go.
    // Had it better go than another that was made later?
    bool operator<(const Candidate& other) const {
      if (has_sink != other.has_sink) return !has_sink;
      return in_use != other.in_use ? in_use < other.in_use : cached < other.cached;
    }
  };
  // Only the last slab may go. Where there is no session nobody holds the last one, and who comes next may take no holes.
  bool last_alone() const {
    return rigid > 0 || places_ == Places::kNotKept || sessions_.empty() || !sessions_.RigidOne().empty();
  }
  // Counts on, a slice at a time. True: it has counted all slabs.
  bool Look();
  // The one that goes, of those that were counted; null: none can.
  const Candidate* Best();
  // Fills `copies` with the next of the slab. True: the slab was gone through since the last time that it was said.
  bool Gather(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions);
  // Nothing can be done before `turn.now` has moved on.
  Next Wait(const Turn& turn);
  void AskHolders(const Turn& turn);
  // The time is over: counts who was asked and has not answered.
  void Miss();
  void NoteLate(const Session& session, uint32_t leased);
  // Of so many that it has leased in the slab: its sink, which it can't release, is asked of nobody.
  uint32_t BesideSink(const Session& session, uint32_t blocks) const;
  // Whether who was asked then had time to answer.
  bool HadTime(uint64_t asked_ms) const { return asked_ms + kLeastAnswerMs <= until_ms_; }
  void ForgetAsked();
  void Place(BlockRef block, bool is_source, Copy* copy) const;

  const SpaceFacts& facts_;
  BlockPool& pool_;
  Growth& growth_;
  Sessions& sessions_;
  Below& below_;
  ContentChecks& checks_;

  enum class Places : uint8_t { kUnknown, kKept, kNotKept };
  // What keeps them from being kept may be over by then: a keeper that has no room, or a moment without descriptors.
  static constexpr uint64_t kPlacesAgainMs = 10'000;
  Places places_ = Places::kUnknown;
  uint64_t places_again_ms_ = 0;
  bool begun_ =
      false;  // Ask was called, and Step has not said kDone since: what was vacated may have to be put back.
  uint32_t keep_slabs_ = UINT32_MAX;  // So many are to be left. UINT32_MAX: nobody asks.
  uint64_t until_ms_ = 0;
  // All slabs but the first, as they were made; the last one may be counted in part.
  std::vector<Candidate> looked_;
  bool looking_ = false;
  BlockRange leaves_;            // The blocks of the slab that was chosen.
  uint64_t look_ms_ = 0;         // Not before this time it looks again whether another slab had better go.
  uint32_t at_ = 0;              // The next block of the slab that is looked at.
  uint64_t waits_since_ms_ = 0;  // 0: it does not.
  // Sessions are asked for what they have leased in the slab, again and again after ever longer pauses.
  std::map<Holder, uint32_t> leased_;
  uint64_t ask_holders_ms_ = 0, pause_ms_ = 0;
  std::map<Holder, uint32_t> still_leased_;  // What was found the last time that the slab was gone through.
  std::map<uint64_t, uint64_t>
      asked_sessions_;                // Sessions that were asked for such, of this request, and when first,
  std::set<uint64_t> late_sessions_;  // and those that were late.
  uint64_t leave_ms_ = 0;             // When members were asked to unmap the slab that leaves.
  LateOnes late_;
  uint64_t say_late_ms_ = 0;  // Not before this time.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_GIVE_BACK_H_
