// A public trace through the pool: the block hit ratios of LRU are known, so a policy, a match or a release
// that is slightly wrong shows in the fourth digit.
#include "proto/formats/trace.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

// Each request matches its ids, leases and seals what is missing, and releases all of it before the next.
double BlockHitRatio(const std::vector<replay::Request>& requests, uint32_t blocks) {
  BlockPool pool({.max_blocks = blocks + 1, .windows = {0}}, *MakeReplacementPolicy("lru", blocks + 1));
  EXPECT_TRUE(pool.Grow(blocks).ok());
  const Holder session = *pool.AddSession({});
  MatchOutcome match;
  std::vector<BlockKey> keys;
  for (const replay::Request& request : requests) {
    keys.clear();
    for (const uint64_t id : request.hash_ids) {
      std::string bytes(32, '\0');
      std::memcpy(bytes.data(), &id, sizeof(id));
      keys.push_back(BlockKey::From(bytes, 0));
    }
    const TimeMs now = request.timestamp_ms;
    const GroupQuery query = {.group = 0, .keys = keys};
    pool.Match(session, now, {&query, 1}, &match);
    std::vector<BlockRef>& held = match.blocks[0];
    const size_t hits = held.size();
    const auto missing = static_cast<uint32_t>(keys.size() - hits);
    EXPECT_EQ(pool.Lease(session, now, missing, missing, &held).leased, missing);
    std::vector<SealEntry> entries;
    for (size_t i = hits; i < keys.size(); ++i) entries.push_back({held[i], {&keys[i], 1}});
    std::vector<SealVerdict> outcomes(entries.size());
    pool.Seal(session, now, hits == 0 ? nullptr : &keys[hits - 1], entries, absl::MakeSpan(outcomes));
    std::vector<Verdict> verdicts(held.size());
    pool.Release(session, now, held, absl::MakeSpan(verdicts));
    for (const Verdict verdict : verdicts) EXPECT_EQ(verdict, Verdict::kDone);
  }
  pool.CheckInvariants();
  EXPECT_EQ(pool.counters().lookups, requests.size());
  return static_cast<double>(pool.counters().hit_blocks) / static_cast<double>(pool.counters().lookup_blocks);
}

TEST(Trace, ConversationHitRatiosAreThoseOfExactLru) {
  const absl::StatusOr<std::string> path =
      replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  if (!path.ok()) GTEST_SKIP() << path.status().message();
  const absl::StatusOr<std::vector<replay::Request>> requests = replay::ReadTrace(*path);
  ASSERT_TRUE(requests.ok()) << requests.status();
  const std::pair<uint32_t, double> known[] = {{1000, 0.0445},  {5000, 0.1118},  {10000, 0.2116},
                                               {30000, 0.3257}, {50000, 0.3546}, {200000, 0.3664}};
  for (const auto& [blocks, ratio] : known) {
    EXPECT_NEAR(BlockHitRatio(*requests, blocks), ratio, 1e-4) << blocks << " blocks";
  }
}

}  // namespace
}  // namespace kvpool
