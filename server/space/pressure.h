// Whether a space runs short of blocks, who is told, and who does something about it.
//
//   available < low watermark     pressure goes on: sessions are told, and asked for leases beyond their guarantees
//   available >= high watermark   pressure goes off: sessions are told
//   in between                    it stays as it is
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_PRESSURE_H_
#define KVPOOL_SERVER_SPACE_PRESSURE_H_

#include <cstdint>

#include "server/pool/block_pool.h"
#include "server/space/growth.h"
#include "server/space/sessions.h"
#include "server/space/turn.h"

namespace kvpool {

class Pressure {
 public:
  // All outlive it.
  Pressure(const BlockPool* pool, Growth* growth, Sessions* sessions)
      : pool_(*pool), growth_(*growth), sessions_(*sessions) {}

  bool on() const { return on_; }
  // A lease came short: other sessions may hold more than they use.
  void OnShortLease() { lease_was_short_ = true; }
  // Compares what is available with the watermarks. Every turn ends with it.
  void Update(Turn& turn);
  // Update, and before it: what verbs used up is to be grown, reclaimed or asked back. A turn in which
  // blocks, sessions or slabs changed calls it last.
  void AfterVerbs(Turn& turn);
  // Free blocks are below the low watermark, and no slab will bring some.
  bool IsReclaimDue() const;
  // So few are missing that the thread that used them up reclaims them, after its answer. REQUIRES: IsReclaimDue().
  bool FewToReclaim() const;

 private:
  void AskForLeases(uint64_t now);

  const BlockPool& pool_;
  Growth& growth_;
  Sessions& sessions_;
  bool on_ = false;
  bool lease_was_short_ = false;  // Is cleared when AfterVerbs runs.
  uint64_t asked_ms_ = 0;         // Sessions were last asked for leases then.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_PRESSURE_H_
