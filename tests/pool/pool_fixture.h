// A small pool and short names for its verbs.
#ifndef KVPOOL_TESTS_POOL_POOL_FIXTURE_H_
#define KVPOOL_TESTS_POOL_POOL_FIXTURE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"

namespace kvpool {

BlockKey Key(std::string_view name, uint32_t group = 0);
std::vector<BlockKey> Keys(const std::vector<std::string>& names, uint32_t group = 0);

void PrintTo(const BlockRef& ref, std::ostream* os);

// The invariants are verified after each test.
class TestPool {
 public:
  explicit TestPool(uint32_t blocks, PoolOptions options = {}, std::string_view policy = "lru");
  ~TestPool() { pool.CheckInvariants(); }

  Holder Session(SessionLimits limits = {});
  // REQUIRES: the pool can lease all of them.
  std::vector<BlockRef> Lease(Holder session, uint32_t count);
  BlockRef LeaseOne(Holder session) { return Lease(session, 1)[0]; }
  std::vector<SealVerdict> Seal(Holder session, const std::vector<BlockRef>& blocks,
                                const std::vector<BlockKey>& keys, const BlockKey* parent = nullptr);
  // Leases and seals a chain of these keys; answers its blocks, held once each.
  std::vector<BlockRef> Chain(Holder session, const std::vector<std::string>& names, uint32_t group = 0);
  // Makes a chain and releases it, so that it is cached unless another session holds it.
  std::vector<BlockRef> Cache(Holder session, const std::vector<std::string>& names, uint32_t group = 0);
  MatchOutcome Match(Holder session, const std::vector<std::string>& names, uint32_t group = 0);
  std::vector<Verdict> Release(Holder session, const std::vector<BlockRef>& blocks, const UseHint& hint = {});
  std::vector<Verdict> Ref(Holder session, const std::vector<BlockRef>& blocks);
  std::vector<Verdict> Pin(const std::vector<BlockRef>& blocks, TimeMs until);
  std::vector<Verdict> Retain(const std::vector<BlockRef>& blocks, const Retention& retention);
  // Answers the keys of the victims, in order.
  std::vector<BlockKey> Reclaim(uint32_t count);

  BlockState state(BlockRef ref) { return pool.View(ref.id, now)->state; }
  uint32_t refs(BlockRef ref) { return pool.View(ref.id, now)->refs; }
  uint32_t count(BlockState state) { return pool.counts()[static_cast<size_t>(state)]; }

  TimeMs now = 1000;
  BlockPool pool;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_POOL_POOL_FIXTURE_H_
