// Who holds what in the slabs that a space could give back, as far as it needs to be said: those who hold most, by name, and
// how much all others do. A session's sink is no part of it.
//
//   SlabHolders holders;
//   while (LookOn(&holders)) GiveWay();   // Each hold of the space's mutex looks at a slice, from the slab that was made last.
//   holders.Describe();
//
// What it says is of the time that it took, in which blocks come and go. It ends after kMostSlices, and says then that it did
// not look at everything.
//
// Not thread-safe: the space's mutex is around Look.
#ifndef KVPOOL_SERVER_SPACE_SLAB_HOLDERS_H_
#define KVPOOL_SERVER_SPACE_SLAB_HOLDERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/pool/block_pool.h"
#include "server/space/growth.h"
#include "server/space/sessions.h"

namespace kvpool {

class SlabHolders {
 public:
  static constexpr size_t kMostNamed = 4;

  // `spare`: some slabs could go if nobody held any block of them: all but the first one are looked at; and else that too. Only
  // what the first call says counts. True: there is more to look at.
  bool Look(const BlockPool& pool, const Growth& growth, const Sessions& sessions, bool spare);
  bool begun() const { return of_slabs_ > 0; }
  // "session 3 (vllm) holds 5 blocks in 5 of the 7 slabs that could go; …"; empty: nobody holds any.
  std::vector<std::string> Describe() const;

 private:
  struct Holding {
    uint64_t session = 0;
    std::string client_name;
    uint32_t blocks = 0, slabs = 0;
    uint32_t promised = 0;  // More blocks, which it may take whatever others do.

    uint64_t weight() const { return uint64_t{blocks} + promised; }
  };
  // False: there is more of this session to look at.
  bool LookAt(const BlockPool& pool, const Growth& growth, const Session& session, uint32_t* steps);
  void Add(Holding holding);

  bool spare_ = false;     // Some slabs could go; else all are looked at, and what is promised.
  uint32_t first_ = 0;     // The first slab that is looked at, in the order in which they were made.
  uint32_t of_slabs_ = 0;  // So many are.
  uint32_t slices_ = 0;
  bool cut_ = false;
  size_t next_ = 0;  // The holder whose session is next.
  Holding current_;
  uint32_t slab_ = 0;  // This one and those in front are still to be looked at, of the current session.
  // Blocks, from the last one down, for what no session holds.
  uint32_t at_ = UINT32_MAX;
  uint32_t pinned_ = 0, in_use_ = 0;
  uint32_t sinks_ = 0;  // So many of the latter are sinks.

  std::vector<Holding> named_;  // Who has most comes first.
  uint64_t more_sessions_ = 0, more_blocks_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SLAB_HOLDERS_H_
