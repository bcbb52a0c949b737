// Whether blocks still hold what they held when they were sealed (--verify=seal).
//
//   when      which                                      by
//   seal      it was sealed, and gets its sum            the verifier's round (daemon/daemon_verify.cc)
//   restart   it was recovered, and is doubted           the first batch that matches it, before anything of that is done, or
//                                                        the verifier's rounds, as fast as one thread reads
//   sample    some bytes a second of all that have one   the verifier's round
//
// A sealed block is not written before it is leased again. So a sum is taken and compared without the space's mutex, and counts if
// the block is in the same generation afterwards. A block that dies with the daemon before it has its sum has none, and is
// believed. One that is found to be another is condemned: it is answered to nobody, by no later daemon either, and is free when
// nobody holds it and nothing is behind it.
//
// Not thread-safe: the space's mutex is around all but Sum.
#ifndef KVPOOL_SERVER_SPACE_CONTENT_CHECKS_H_
#define KVPOOL_SERVER_SPACE_CONTENT_CHECKS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "cuda/device.h"
#include "kvpool/v1/engine.pb.h"
#include "server/pool/block_pool.h"
#include "server/space/growth.h"
#include "server/space/session.h"
#include "server/space/space_facts.h"
#include "server/space/turn.h"

namespace kvpool {

// The names are label values of metrics.
enum class CheckedWhen : uint8_t { kSeal, kRestart, kSample };
inline constexpr std::array<const char*, 3> kCheckedWhenNames = {"seal", "restart", "sample"};

// What was counted since the space was made. Nothing but uint64_t and arrays of it, as in PoolCounters.
struct CheckCounters {
  // Indexed by CheckedWhen: blocks that got their sum or were compared with it, and those that were another.
  std::array<uint64_t, kCheckedWhenNames.size()> checked{}, failed{};
  uint64_t unsummed = 0;  // Blocks that get no sum, as too many waited for theirs when they were sealed.
};

class ContentChecks {
 public:
  // Blocks under way together: their memory stays mapped as long as they are.
  static constexpr size_t kPartBlocks = 1024;
  static constexpr uint64_t kPartBytes = 64 << 20;
  static constexpr size_t kMostWaiting = 65536;  // Sealed blocks that wait for their sum.

  // All outlive it.
  ContentChecks(const SpaceFacts* facts, BlockPool* pool, const Growth* growth)
      : facts_(*facts), pool_(*pool), growth_(*growth) {}
  void TurnOn() { on_ = true; }

  // It was sealed, or has moved before it had its sum.
  void Sealed(BlockRef ref);
  // Compares what the match would find and is doubted, with the mutex free, as long as the time is not `until`: what it has not
  // come to by then stays doubted. The session may have ended afterwards. REQUIRES: the match is valid.
  void BeforeMatch(Turn& turn, const Session& session, const v1::Match& match, uint64_t until);

  // ---- A part that is checked: it is chosen, summed without the mutex, and settled
  struct Block {
    BlockRef ref;
    std::optional<uint32_t> sum;  // What it was when it was sealed; none: it gets one.
    uint32_t found = 0;           // What it is.
    std::vector<std::shared_ptr<Slab>> slabs;
    std::vector<const void*> at;  // One a rank.
  };
  using Part = std::vector<Block>;
  void ChooseSealed(Part* part);
  // At most `bytes` of those that have a sum. Some blocks are looked at, one after the other from call to call.
  void ChooseSample(uint64_t bytes, Part* part);
  // A part of those that are to be compared before they are answered, the same way.
  void ChooseDoubted(Part* part);
  void Sum(Part* part) const;
  void Settle(CheckedWhen when, absl::Span<const Block> part);

  // Some blocks are to be compared before they are answered.
  bool compares() const { return pool_.doubted() > 0; }
  uint64_t block_bytes() const { return facts_.layout.block_bytes() * facts_.devices.size(); }
  // Some of those that were condemned and may leave.
  std::vector<BlockRef> NextCondemned();

  // ---- What is said of those that were condemned: one in some time, as a peer may cause many
  struct Wrong {
    BlockRef ref;
    BlockKey key;
    CheckedWhen when;
    uint64_t more = 0;  // So many others since the last one that was told of.
  };
  std::optional<Wrong> TakeWrong(uint64_t now_ms);

  CheckCounters counters;

 private:
  void Place(BlockRef ref, Part* part) const;
  bool Full(const Part& part) const {
    return part.size() >= kPartBlocks || part.size() * block_bytes() >= kPartBytes;
  }

  const SpaceFacts& facts_;
  BlockPool& pool_;
  const Growth& growth_;
  bool on_ = false;
  std::deque<BlockRef> waiting_;
  // The last block that was looked at for a sample, by ChooseDoubted, and by NextCondemned.
  uint32_t sampled_ = 0, undoubted_ = 0, condemned_ = 0;
  std::optional<Wrong> wrong_;
  uint64_t tells_at_ms_ = 0;  // Not before.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_CONTENT_CHECKS_H_
