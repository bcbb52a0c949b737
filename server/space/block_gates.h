// Who may use each block next: device operations that run, and verbs that wait behind them, in order of arrival.
//
// A verb stands at the gate of each block that it names, and may go when it is first at all of them. One that leaves
// costs what it names: those behind it are counted down there, and not looked at before they may go.
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_BLOCK_GATES_H_
#define KVPOOL_SERVER_SPACE_BLOCK_GATES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_map.h"
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

  // A newcomer, who stands nowhere yet.
  Id Enter();
  // It stands behind all others at the gates of these blocks, once at each, however often that is named. REQUIRES: it
  // stands at none of them yet.
  void StandLast(Id id, absl::Span<const uint32_t> blocks);
  // It goes in front of all others there.
  void StandFirst(Id id, absl::Span<const uint32_t> blocks);
  // It is gone, and those are appended to `next` who may go by that. REQUIRES: may_go(id).
  void Leave(Id id, std::vector<Id>* next);

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
    std::vector<std::vector<Place>>
        places;  // None of the inner ones ever grows: lines are made of their addresses.
  };
  struct Line {
    Place* first = nullptr;
    Place* last = nullptr;
  };

  // Those places of its own for so many blocks.
  std::vector<Place>& Room(Id id, size_t blocks, Stander** who);

  Id last_id_ = 0;
  std::map<Id, Stander> standers_;
  absl::flat_hash_map<uint32_t, Line> lines_;  // Keyed by block id; none is empty.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_BLOCK_GATES_H_
