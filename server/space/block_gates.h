// Who may use each block next: device operations that run, and verbs that wait behind them, in order of arrival.
//
// A verb stands at the gate of each block that it names, and may go when it is first at all of them. One that leaves
// costs what it names: those behind it are counted down there, and not looked at before they may go. It may come and leave
// part by part, while others come and leave: no part takes longer because of how many stand elsewhere, for which trees
// are kept, as the growth of a hash table would move all at once.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_BLOCK_GATES_H_
#define KVPOOL_SERVER_SPACE_BLOCK_GATES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/types/span.h"

namespace kvpool {

class BlockGates {
 public:
  // Who stands there: numbers that grow in order of arrival. 0: nobody.
  using Id = uint64_t;

  BlockGates() = default;
  BlockGates(BlockGates&&) = default;
  BlockGates& operator=(BlockGates&&) = default;

  bool empty() const { return lines_.empty(); }
  bool contains(uint32_t block) const { return lines_.contains(block); }
  // Who is first at the gate of this block; 0: nobody stands there.
  Id first(uint32_t block) const;
  // Is it first wherever it stands? False for one that is not there.
  bool may_go(Id id) const;
  // It came, and has not left.
  bool stands(Id id) const { return standers_.contains(id); }

  // A newcomer, who stands nowhere yet.
  Id Enter();
  // It stands behind all others at the gates of these blocks, once at each, however often that is named. REQUIRES: since it
  // came nobody else stood behind it at one of them.
  void StandLast(Id id, absl::Span<const uint32_t> blocks);
  // It goes in front of all others there.
  void StandFirst(Id id, absl::Span<const uint32_t> blocks);
  // It leaves so many gates, at most, and those are appended to `next` who may go by that. True: it still stands at some,
  // where others may come in front of it meanwhile. REQUIRES: when it was let go, may_go(id).
  bool Leave(Id id, size_t most, std::vector<Id>* next);

 private:
  struct Stander;
  struct Place {
    Stander* who = nullptr;
    uint32_t block = 0;
    Place* next = nullptr;  // The one behind it.
  };
  struct Stander {
    Id id = 0;
    size_t behind = 0;  // The gates at which others are in front of it.
    // No inner one ever has more than were reserved for it: lines are made of their addresses.
    std::vector<std::vector<Place>> places;
  };
  struct Line {
    Place* first = nullptr;
    Place* last = nullptr;
  };

  // Those places of its own for so many blocks.
  std::vector<Place>& Room(Id id, size_t blocks, Stander** who);
  void LeaveOne(const Place& place, std::vector<Id>* next);

  Id last_id_ = 0;
  std::map<Id, Stander> standers_;
  absl::btree_map<uint32_t, Line> lines_;  // Keyed by block id; none is empty.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BLOCK_GATES_H_
