#include "tests/pool/pool_fixture.h"

#include <utility>

namespace kvpool {
namespace {

PoolOptions Sized(uint32_t blocks, PoolOptions options) {
  if (options.max_blocks == 0) options.max_blocks = blocks + 1;
  if (options.windows.empty()) options.windows = {0};
  if (options.ghosts == 0) options.ghosts = 1024;
  return options;
}

}  // namespace

BlockKey Key(std::string_view name, uint32_t group) {
  std::string bytes(name);
  bytes.resize(32, '.');
  return BlockKey::From(bytes, group);
}

std::vector<BlockKey> Keys(const std::vector<std::string>& names, uint32_t group) {
  std::vector<BlockKey> keys;
  for (const std::string& name : names) keys.push_back(Key(name, group));
  return keys;
}

void PrintTo(const BlockRef& ref, std::ostream* os) { *os << Index(ref.id) << "@" << ref.generation; }

TestPool::TestPool(uint32_t blocks, PoolOptions options, std::string_view policy)
    : pool(Sized(blocks, options), *MakeReplacementPolicy(policy, Sized(blocks, options).max_blocks)) {
  EXPECT_TRUE(pool.Grow(blocks).ok());
}

Holder TestPool::Session(SessionLimits limits) {
  const absl::StatusOr<Holder> session = pool.AddSession(limits);
  EXPECT_TRUE(session.ok()) << session.status();
  return session.value_or(kNobody);
}

std::vector<BlockRef> TestPool::Lease(Holder session, uint32_t count) {
  std::vector<BlockRef> blocks;
  const LeaseOutcome outcome = pool.Lease(session, now, count, count, &blocks);
  EXPECT_EQ(outcome.leased, count);
  blocks.resize(count);
  return blocks;
}

std::vector<SealVerdict> TestPool::Seal(Holder session, const std::vector<BlockRef>& blocks,
                                        const std::vector<BlockKey>& keys, const BlockKey* parent) {
  std::vector<SealEntry> entries;
  for (size_t i = 0; i < blocks.size(); ++i) entries.push_back({blocks[i], {&keys[i], 1}});
  std::vector<SealVerdict> outcomes(entries.size());
  pool.Seal(session, now, parent, entries, absl::MakeSpan(outcomes));
  return outcomes;
}

std::vector<BlockRef> TestPool::Chain(Holder session, const std::vector<std::string>& names, uint32_t group) {
  const std::vector<BlockRef> blocks = Lease(session, static_cast<uint32_t>(names.size()));
  for (const SealVerdict& outcome : Seal(session, blocks, Keys(names, group))) {
    EXPECT_EQ(outcome.verdict, Verdict::kDone);
  }
  return blocks;
}

std::vector<BlockRef> TestPool::Cache(Holder session, const std::vector<std::string>& names, uint32_t group) {
  const std::vector<BlockRef> blocks = Chain(session, names, group);
  Release(session, blocks);
  return blocks;
}

MatchOutcome TestPool::Match(Holder session, const std::vector<std::string>& names, uint32_t group) {
  const std::vector<BlockKey> keys = Keys(names, group);
  const GroupQuery query = {.group = group, .keys = keys};
  MatchOutcome outcome;
  pool.Match(session, now, {&query, 1}, &outcome);
  return outcome;
}

std::vector<Verdict> TestPool::Release(Holder session, const std::vector<BlockRef>& blocks,
                                       const UseHint& hint) {
  std::vector<Verdict> verdicts(blocks.size());
  pool.Release(session, now, hint, blocks, absl::MakeSpan(verdicts));
  return verdicts;
}

std::vector<Verdict> TestPool::Ref(Holder session, const std::vector<BlockRef>& blocks) {
  std::vector<Verdict> verdicts(blocks.size());
  pool.Ref(session, blocks, absl::MakeSpan(verdicts));
  return verdicts;
}

std::vector<Verdict> TestPool::Pin(const std::vector<BlockRef>& blocks, TimeMs until) {
  std::vector<Verdict> verdicts(blocks.size());
  pool.Pin(now, until, blocks, absl::MakeSpan(verdicts));
  return verdicts;
}

std::vector<Verdict> TestPool::Retain(const std::vector<BlockRef>& blocks, const Retention& retention) {
  std::vector<Verdict> verdicts(blocks.size());
  pool.SetRetention(now, retention, blocks, absl::MakeSpan(verdicts));
  return verdicts;
}

std::vector<BlockKey> TestPool::Reclaim(uint32_t count) {
  std::vector<Eviction> log;
  pool.Reclaim(now, count, EvictReason::kBackground, &log);
  std::vector<BlockKey> keys;
  for (const Eviction& eviction : log) keys.push_back(eviction.key);
  return keys;
}

}  // namespace kvpool
