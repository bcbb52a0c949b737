// What a pool leaves in its table, read by another one: after each verb, and after each instruction of a verb that stored
// anything.
//
// A child process runs the verbs on a table that it shares with this one, which steps it by ptrace. Each time that the table has
// changed, a copy is recovered as if the child had been killed there. Were a store of a verb made before the one in front of it,
// a copy that has the later one alone would be there to be recovered, too: the test makes some, to see that it would notice.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_table.h"
#include "server/pool/prefix_index.h"
#include "server/replacement/policy.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

constexpr uint32_t kBlocks = 64;
constexpr uint32_t kSessions = 24;
constexpr uint32_t kKeys = 100;

PoolOptions OptionsIn(void* table) {
  PoolOptions options;
  options.max_blocks = kBlocks + 1;
  options.windows = {0, 4};
  options.ghosts = 64;
  options.table = table;
  options.table_sessions = kSessions;
  options.table_has_sums = options.keeps_sums = true;
  return options;
}

std::unique_ptr<BlockPool> MakePool(void* table) {
  return std::make_unique<BlockPool>(OptionsIn(table), *MakeReplacementPolicy("lru", kBlocks + 1));
}

// Memory for a table, of this process or shared with a child.
class Table {
 public:
  Table()
      : bytes_(PoolTable::Bytes(kBlocks + 1, kSessions)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~Table() { munmap(data_, bytes_); }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  void* data() { return data_; }
  PoolTable view() { return PoolTable(data_, kBlocks + 1, kSessions); }
  void CopyFrom(const std::string& image) { std::memcpy(data_, image.data(), bytes_); }
  bool Is(const std::string& image) const { return std::memcmp(data_, image.data(), bytes_) == 0; }
  std::string Image() const { return {static_cast<const char*>(data_), bytes_}; }

 private:
  const size_t bytes_;
  void* const data_;
};

// When pools are recovered, which is later than all verbs; and when nothing is protected any more.
constexpr TimeMs kRecovered = 1000000, kNoPinLastsLonger = 9000000;

// What may be relied on of a block after a crash.
struct Fate {
  uint32_t generation = 0;
  bool resident = false;
  BlockKey key;
  uint32_t parent = 0;
  bool pinned = false;
  uint8_t priority = kDefaultPriority;
  std::map<uint64_t, uint32_t> holds;  // The key is the session's id.
  std::vector<std::string> aliases;    // Names of further keys that find it.
  friend bool operator==(const Fate&, const Fate&) = default;
};
using Fates = std::vector<Fate>;

uint8_t GroupOf(uint32_t number) { return number % 8 == 7 ? 1 : 0; }
BlockKey KeyOf(uint32_t number) { return Key(absl::StrCat("key ", number), GroupOf(number)); }
BlockKey AliasOf(uint32_t number) { return Key(absl::StrCat("alias ", number), GroupOf(number)); }

// A block that was sealed under it and is condemned has another one.
bool IsSealedUnder(const BlockKey& key) {
  static const auto* const keys = [] {
    auto* const all = new std::set<std::array<uint8_t, 32>>;
    for (uint32_t number = 0; number < kKeys; ++number) all->insert(KeyOf(number).bytes);
    for (const char* const name : {"a", "b", "c"}) all->insert(Key(name).bytes);
    return all;
  }();
  return keys->contains(key.bytes);
}

// What is sealed under a key has this sum.
uint32_t SumOf(const BlockKey& key) { return key.bytes[0] | key.bytes[1] << 8 | 1u << 16; }

Fate FateOf(const BlockPool& pool, uint32_t b) {
  const BlockView view = *pool.View(BlockId{b}, 0);
  if (const auto sum = pool.SumOf(view.ref); sum.has_value() && IsSealedUnder(view.key)) {
    EXPECT_EQ(*sum, SumOf(view.key)) << "block " << b << " has the sum of another";
  }
  Fate fate{.generation = view.ref.generation};
  fate.resident = view.state == BlockState::kSealed || view.state == BlockState::kCached;
  if (fate.resident) {
    fate.key = view.key;
    fate.parent = Index(view.parent);
    fate.pinned = view.pinned;
    fate.priority = view.priority;
  }
  return fate;
}

// Names of the keys that find each block and are not its own, by block.
std::map<uint32_t, std::vector<std::string>> AliasesIn(const BlockPool& pool) {
  std::map<uint32_t, std::vector<std::string>> aliases;
  for (uint32_t number = 0; number < kKeys; ++number) {
    for (const auto& [name, key] : {std::pair(absl::StrCat("key ", number), KeyOf(number)),
                                    std::pair(absl::StrCat("alias ", number), AliasOf(number))}) {
      const BlockRef block = pool.Find(key);
      if (block != kNullRef && pool.View(block.id, 0)->key != key) aliases[Index(block.id)].push_back(name);
    }
  }
  return aliases;
}

// The fates in a pool whose sessions are these, by id.
Fates FatesOf(const BlockPool& pool, const std::map<uint64_t, Holder>& sessions) {
  Fates fates(1);
  std::map<uint32_t, std::vector<std::string>> aliases = AliasesIn(pool);
  for (uint32_t b = 1; b <= kBlocks; ++b) {
    Fate fate = FateOf(pool, b);
    fate.aliases = std::move(aliases[b]);
    for (const auto& [id, holder] : sessions) {
      if (const uint32_t holds = pool.holds(holder, BlockId{b}); holds > 0) fate.holds[id] = holds;
    }
    const BlockState state = pool.View(BlockId{b}, 0)->state;
    EXPECT_TRUE(fate.holds.empty() || state == BlockState::kSealed || state == BlockState::kLeased ||
                state == BlockState::kQuarantined)
        << "block " << b << " is held, in state " << static_cast<int>(state);
    fates.push_back(std::move(fate));
  }
  return fates;
}

struct Recovered {
  std::unique_ptr<BlockPool> pool;
  RecoveredPool found;
  Fates fates;
};

// So many blocks, none of them absent.
std::vector<BlockRange> First(uint32_t blocks) { return {{1, blocks + 1}}; }

// What another process would find in this image of a table. It is left in `table`.
Recovered Recover(const std::string& image, Table* table) {
  table->CopyFrom(image);
  Recovered recovered{.pool = MakePool(table->data())};
  recovered.found = recovered.pool->Recover(kRecovered, First(kBlocks));
  recovered.pool->CheckInvariants();
  std::map<uint64_t, Holder> sessions;
  for (const RecoveredPool::Session& session : recovered.found.sessions)
    sessions[session.id] = session.holder;
  recovered.fates = FatesOf(*recovered.pool, sessions);
  return recovered;
}

// Once its sessions are gone, everything that is not resident is free, and all of it can be had.
void ExpectAllComesBack(Recovered* recovered) {
  BlockPool& pool = *recovered->pool;
  for (const RecoveredPool::Session& session : recovered->found.sessions) pool.FreeQuarantine(session.holder);
  while (pool.Tidy(BlockPool::kTidySlice)) {
  }
  pool.CheckInvariants();
  pool.Expire(kNoPinLastsLonger, UINT32_MAX);
  pool.CheckInvariants();
  EXPECT_EQ(pool.pinned(), 0u);
  EXPECT_EQ(pool.available(), kBlocks);
  const Holder heir = *pool.AddSession({}, 0, 999999);
  std::vector<BlockRef> blocks;
  EXPECT_EQ(pool.Lease(heir, 1000001, kBlocks, kBlocks, &blocks).leased, kBlocks);
  for (const BlockRef block : blocks) {
    EXPECT_GT(block.generation, recovered->fates[Index(block.id)].generation);
  }
  pool.CheckInvariants();
}

enum class Verb : uint8_t {
  kLease,
  kMatch,
  kSeal,
  kRelease,
  kRef,
  kEvict,
  kPin,
  kUnpin,
  kRetain,
  kEndSession,
  kFreeQuarantine,
  kSettle,
  kKeepSum,
  kCondemn,
  kMove
};
constexpr std::array<const char*, 15> kVerbNames = {
    "Lease",        "Match",      "Seal",           "Release", "Ref",     "Evict",   "Pin", "Unpin",
    "SetRetention", "EndSession", "FreeQuarantine", "Settle",  "KeepSum", "Condemn", "Move"};

// Random verbs of up to six sessions. The child runs it; this process does in the test without steps.
class Player {
 public:
  // `mark` is called right before and right after each verb.
  Player(
      void* table, uint64_t seed, std::function<void(Verb)> mark = [](Verb) {})
      : pool(MakePool(table)), random_(seed), mark_(std::move(mark)) {
    EXPECT_TRUE(pool->Grow(kBlocks).ok());
  }

  void Step() {
    ++now_;
    switch (Below(21)) {
      case 0:
        return Open();
      case 1:
        if (Below(3) != 0) return;
        return End();
      case 2:
      case 3:
      case 4:
        return Lease();
      case 5:
      case 6:
      case 7:
        return Seal();
      case 8:
      case 9:
        return Match();
      case 10:
        return Ref();
      case 11:
        return Evict();
      case 12:
        return Pin();
      case 13:
        return Unpin();
      case 14:
        return SetRetention();
      case 15:
        return Compact();
      case 16:
      case 17:
        return KeepSums();
      case 18:
        return Condemn();
      case 19:
        return Move();
      default:
        return Release();
    }
  }

  std::unique_ptr<BlockPool> pool;
  std::map<uint64_t, Holder> sessions;  // Those that may hold anything, ended ones included.

 private:
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  uint64_t AnySession() {
    if (open_.empty()) Open();
    return open_[Below(static_cast<uint32_t>(open_.size()))];
  }
  // All that happens in between is answered together, or never was.
  template <typename Calls>
  void Do(Verb verb, Calls calls) {
    mark_(verb);
    calls();
    pool->Commit();
    mark_(verb);
  }
  void Open() {
    if (sessions.size() >= 6) return;
    const uint64_t id = next_id_++;
    sessions[id] = *pool->AddSession({}, 0, id);
    open_.push_back(id);
  }
  // A session ends, or one that has ended is gone.
  void End() {
    for (const auto& [id, holder] : sessions) {
      if (std::find(open_.begin(), open_.end(), id) != open_.end()) continue;
      Do(Verb::kFreeQuarantine, [&, holder = holder] { pool->FreeQuarantine(holder); });
      sessions.erase(id);
      return;
    }
    if (open_.empty()) return;
    Do(Verb::kEndSession, [&] { pool->EndSession(sessions[open_.front()]); });
    open_.erase(open_.begin());
  }
  std::vector<BlockRef> LeaseUpTo(uint64_t session, uint32_t count) {
    std::vector<BlockRef> blocks;
    Do(Verb::kLease, [&] { pool->Lease(sessions[session], now_, count, 1, &blocks); });
    return blocks;
  }
  void Lease() {
    const uint32_t count = 1 + Below(10);  // Compilers draw the arguments of one call in different orders.
    LeaseUpTo(AnySession(), count);
  }
  std::vector<BlockRef> Held(uint64_t session, BlockState state) {
    std::vector<BlockRef> held;
    for (uint32_t b = 1; b <= kBlocks; ++b) {
      const BlockView view = *pool->View(BlockId{b}, now_);
      if (view.state == state && pool->holds(sessions[session], BlockId{b}) > 0) held.push_back(view.ref);
    }
    std::shuffle(held.begin(), held.end(), random_);
    return held;
  }
  // Up to two aliases, each a key of its own or the chain's of another block.
  std::vector<BlockKey> WithAliases(uint32_t number) {
    std::vector<BlockKey> keys;
    for (uint32_t aliases = Below(3); aliases-- > 0;) {
      const uint32_t other = Below(kKeys);
      keys.push_back(GroupOf(other) == GroupOf(number) ? KeyOf(other) : AliasOf(number));
    }
    keys.push_back(KeyOf(number));
    return keys;
  }
  void Seal() {
    const uint64_t session = AnySession();
    std::vector<BlockRef> blocks = Held(session, BlockState::kLeased);
    if (blocks.size() > 4) blocks.resize(4);
    const uint32_t first = Below(kKeys - 4);
    const BlockKey in_front = KeyOf(first);
    std::vector<std::vector<BlockKey>> keys;
    for (uint32_t i = 1; i <= blocks.size(); ++i) keys.push_back(WithAliases(first + i));
    std::vector<SealEntry> entries;
    for (size_t i = 0; i < blocks.size(); ++i) {
      entries.push_back({.block = blocks[i], .keys = keys[i], .leave_duplicate = Below(2) == 0});
    }
    std::vector<SealVerdict> outcomes(entries.size());
    Do(Verb::kSeal,
       [&] { pool->Seal(sessions[session], now_, &in_front, entries, absl::MakeSpan(outcomes)); });
  }
  void Match() {
    const uint32_t first = Below(kKeys - 4);
    std::vector<BlockKey> keys;
    for (uint32_t i = 0; i < 4 && GroupOf(first + i) == 0; ++i) {
      keys.push_back(Below(4) == 0 ? AliasOf(first + i) : KeyOf(first + i));
    }
    const GroupQuery query{.group = 0, .keys = keys};
    MatchOutcome outcome;
    const Holder session = sessions[AnySession()];
    Do(Verb::kMatch, [&] { pool->Match(session, now_, {&query, 1}, &outcome); });
  }
  void Ref() {
    const uint64_t session = AnySession();
    const std::vector<BlockRef> blocks =
        Held(session, Below(2) == 0 ? BlockState::kSealed : BlockState::kLeased);
    std::vector<Verdict> verdicts(blocks.size());
    Do(Verb::kRef, [&] { pool->Ref(sessions[session], blocks, absl::MakeSpan(verdicts)); });
  }
  void Evict() {
    const std::vector<BlockRef> victims = Resident();
    const bool any = Below(2) == 0;
    Do(Verb::kEvict, [&] {
      if (any) {
        pool->Reclaim(now_, 1 + static_cast<uint32_t>(victims.size()), EvictReason::kOperator, nullptr);
      } else {
        pool->Reclaim(now_, victims, EvictReason::kOperator, nullptr);
      }
    });
  }
  std::vector<BlockRef> Resident() {
    std::vector<BlockRef> resident;
    for (uint32_t b = 1; b <= kBlocks; ++b) {
      const BlockView view = *pool->View(BlockId{b}, now_);
      if (view.state == BlockState::kSealed || view.state == BlockState::kCached)
        resident.push_back(view.ref);
    }
    std::shuffle(resident.begin(), resident.end(), random_);
    resident.resize(std::min<size_t>(resident.size(), 3));
    return resident;
  }
  TimeMs Until() { return kRecovered + 1 + Below(1000); }
  void Pin() {
    const std::vector<BlockRef> blocks = Resident();
    std::vector<Verdict> verdicts(blocks.size());
    const TimeMs until = Until();
    Do(Verb::kPin, [&] { pool->Pin(now_, until, blocks, absl::MakeSpan(verdicts)); });
  }
  void Unpin() {
    const std::vector<BlockRef> blocks = Resident();
    const bool expire = Below(2) == 0;
    const TimeMs now = kRecovered + Below(1000);
    Do(Verb::kUnpin, [&] {
      if (expire) {
        pool->Expire(now, UINT32_MAX);
      } else {
        pool->Unpin(blocks);
      }
    });
  }
  void SetRetention() {
    const std::vector<BlockRef> blocks = Resident();
    std::vector<Verdict> verdicts(blocks.size());
    const Retention retention = {.priority = static_cast<uint8_t>(Below(kMaxPriority + 1)),
                                 .until = Until(),
                                 .half_life_ms = Below(2) * 20};
    Do(Verb::kRetain, [&] { pool->SetRetention(now_, retention, blocks, absl::MakeSpan(verdicts)); });
  }
  // What a Compact asks of the pool (DeviceVerbs): it leases destinations, and settles once the device is done. In one turn its
  // sources get their scores, and the destinations that it did not need go back, as do the sources if it does not keep them.
  void Compact() {
    const uint64_t session = AnySession();
    std::vector<BlockRef> sources = Held(session, BlockState::kSealed);
    if (sources.size() > 4) sources.resize(4);
    std::vector<BlockRef> released = LeaseUpTo(session, 1 + static_cast<uint32_t>(sources.size()));
    released.erase(released.begin(), released.begin() + Below(static_cast<uint32_t>(released.size()) + 1));
    if (Below(2) == 0) released.insert(released.end(), sources.begin(), sources.end());
    const std::vector<float> scores(sources.size(), 0.5f);
    std::vector<Verdict> verdicts(released.size());
    Do(Verb::kSettle, [&] {
      pool->SetScores(now_, sources, scores);
      pool->Release(sessions[session], now_, released, absl::MakeSpan(verdicts));
    });
  }
  void KeepSums() {
    const std::vector<BlockRef> blocks = Resident();
    Do(Verb::kKeepSum, [&] {
      for (const BlockRef block : blocks) pool->KeepSum(block, SumOf(pool->View(block.id, now_)->key));
    });
  }
  void Condemn() {
    const std::vector<BlockRef> blocks = Resident();
    if (!blocks.empty()) Do(Verb::kCondemn, [&] { pool->Condemn(blocks[0]); });
  }
  // A cached block of the upper half moves to the lower one.
  void Move() {
    std::vector<BlockRef> cached;
    for (uint32_t b = kBlocks / 2 + 1; b <= kBlocks; ++b) {
      const BlockView view = *pool->View(BlockId{b}, now_);
      if (view.state == BlockState::kCached) cached.push_back(view.ref);
    }
    if (cached.empty()) return;
    const BlockRef from = cached[Below(static_cast<uint32_t>(cached.size()))];
    const uint64_t session = AnySession();
    pool->Vacate({kBlocks / 2 + 1, kBlocks + 1});
    const std::vector<BlockRef> to = LeaseUpTo(session, 1);
    EXPECT_TRUE(pool->NoteChildren(kBlocks + 1));
    const std::optional<uint32_t> sum = pool->SumOf(from);
    bool moved = false;
    if (!to.empty())
      Do(Verb::kMove, [&] { moved = pool->Move(sessions[session], now_, from, to[0], kBlocks); });
    if (moved) {
      EXPECT_EQ(pool->SumOf(to[0]), sum);
    }
    while (pool->PutBack(1)) {
    }
  }
  void Release() {
    const uint64_t session = AnySession();
    std::vector<BlockRef> blocks = Held(session, Below(2) == 0 ? BlockState::kSealed : BlockState::kLeased);
    if (blocks.size() > 3) blocks.resize(3);
    std::vector<Verdict> verdicts(blocks.size());
    Do(Verb::kRelease, [&] { pool->Release(sessions[session], now_, blocks, absl::MakeSpan(verdicts)); });
  }

  std::mt19937_64 random_;
  const std::function<void(Verb)> mark_;
  TimeMs now_ = 1000;
  uint64_t next_id_ = 1;
  std::vector<uint64_t> open_;
};

// Empty if all is as before a verb or after it, but for what nobody was told: what was cached may have left, a free block may
// have skipped a generation, and pins and priorities may be either. Else the first block that is neither.
std::string WhyNeither(const Fates& before, const Fates& now, const Fates& after) {
  if (now == after) return "";
  for (uint32_t b = 1; b <= kBlocks; ++b) {
    Fate expected = before[b];
    const bool may_leave =
        before[b].holds.empty() && !(after[b].resident && after[b].generation == before[b].generation);
    if (expected.resident && !now[b].resident && may_leave) {
      expected = Fate{.generation = expected.generation};
    } else if (expected.resident) {
      if (now[b].pinned == after[b].pinned) expected.pinned = now[b].pinned;
      // It may have been halved again and again.
      const auto [least, most] = std::minmax(before[b].priority, after[b].priority);
      if (now[b].priority >= least && now[b].priority <= most) expected.priority = now[b].priority;
    }
    if (!expected.resident && before[b].holds.empty() && now[b].generation == after[b].generation)
      expected.generation = now[b].generation;
    if (now[b] == expected) continue;
    const auto words = [](const Fate& fate) {
      std::string text =
          absl::StrCat("generation ", fate.generation, fate.resident ? ", resident" : "", ", parent ",
                       fate.parent, fate.pinned ? ", pinned" : "", ", priority ", fate.priority);
      for (const std::string& alias : fate.aliases) absl::StrAppend(&text, ", ", alias);
      for (const auto& [session, holds] : fate.holds) absl::StrAppend(&text, ", ", holds, " of ", session);
      return text;
    };
    return absl::StrCat("block ", b, " was: ", words(before[b]), "; is: ", words(now[b]),
                        "; would be: ", words(after[b]));
  }
  return "";
}

TEST(RecoverTest, AfterEachVerbAllIsAsItWas) {
  uint32_t aliases = 0, condemned = 0, sums = 0, moved = 0;
  constexpr uint32_t kSeeds = KVPOOL_SANITIZED ? 10 : 30;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Table table, copy;
    Player player(table.data(), seed);
    for (int step = 0; step < 400; ++step) {
      player.Step();
      Recovered recovered = Recover(table.Image(), &copy);
      const Fates fates = FatesOf(*player.pool, player.sessions);
      ASSERT_EQ(WhyNeither(fates, recovered.fates, fates), "") << "step " << step;
      ASSERT_EQ(recovered.found.damaged() + recovered.found.cut_links + recovered.found.lost_aliases, 0u);
      for (const Fate& fate : recovered.fates) aliases += static_cast<uint32_t>(fate.aliases.size());
      for (uint32_t b = 1; b <= kBlocks; ++b) {
        const BlockView view = *player.pool->View(BlockId{b}, 0);
        if (!player.pool->IsResident(view.ref)) continue;
        ASSERT_EQ(recovered.pool->Find(view.key), view.ref) << "step " << step;
        ASSERT_EQ(player.pool->IsCondemned(view.ref), !IsSealedUnder(view.key)) << "step " << step;
        condemned += player.pool->IsCondemned(view.ref);
        if (player.pool->IsCondemned(view.ref)) continue;
        ASSERT_EQ(recovered.pool->SumOf(view.ref), player.pool->SumOf(view.ref)) << "step " << step;
        sums += player.pool->SumOf(view.ref).has_value();
      }
      if (step % 50 == 0) ExpectAllComesBack(&recovered);
    }
    moved += player.pool->counters().moved;
  }
  EXPECT_GT(aliases, 300 * kSeeds);
  EXPECT_GT(condemned, 30 * kSeeds);
  EXPECT_GT(sums, 300 * kSeeds);
  EXPECT_GT(moved, kSeeds / 2);
}

// Fills a table with cached chains of one to three blocks. Many of them were used in the same millisecond.
void CacheChains(void* table, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::unique_ptr<BlockPool> pool = MakePool(table);
  EXPECT_TRUE(pool->Grow(kBlocks).ok());
  const Holder session = *pool->AddSession({}, 0, 5);
  std::vector<BlockRef> blocks;
  pool->Lease(session, 1000, kBlocks, kBlocks, &blocks);
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (size_t at = 0; at < kBlocks;) {
    const size_t length = std::min<size_t>(1 + random() % 3, kBlocks - at);
    std::vector<BlockKey> keys;
    for (size_t i = 0; i < length; ++i) keys.push_back(Key(absl::StrCat("block ", at + i)));
    std::vector<SealEntry> entries;
    for (size_t i = 0; i < length; ++i) entries.push_back({blocks[at + i], {&keys[i], 1}});
    std::vector<SealVerdict> outcomes(length);
    pool->Seal(session, 1000, nullptr, entries, absl::MakeSpan(outcomes));
    at += length;
  }
  std::shuffle(blocks.begin(), blocks.end(), random);
  TimeMs now = 1000;
  for (const BlockRef& block : blocks) {
    Verdict verdict = Verdict::kDone;
    pool->Release(session, now += random() % 2, {&block, 1}, {&verdict, 1});
    EXPECT_EQ(verdict, Verdict::kDone);
  }
  pool->Commit();
}

// The blocks that leave when all that may is reclaimed, one by one.
std::vector<uint32_t> Leaving(BlockPool* pool, TimeMs now) {
  std::vector<uint32_t> left;
  std::vector<Eviction> log;
  while (pool->Reclaim(now, 1, EvictReason::kOperator, &log) > 0) {
  }
  for (const Eviction& eviction : log) left.push_back(Index(eviction.block));
  return left;
}

TEST(RecoverTest, UntilAPolicyHasTakenOverTheLeastRecentlyUsedLeaves) {
  uint32_t left = 0, ties = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Table table, copy;
    CacheChains(table.data(), seed);
    const Recovered recovered = Recover(table.Image(), &copy);
    BlockPool& pool = *recovered.pool;
    ASSERT_TRUE(pool.has_stand_in());
    while (true) {
      // The longest idle of those that may leave, the first of them.
      BlockView next{};
      for (uint32_t b = 1; b <= kBlocks; ++b) {
        const BlockView view = *pool.View(BlockId{b}, 1000000);
        if (view.state != BlockState::kCached || view.children != 0) continue;
        ties += next.ref != kNullRef && view.idle_ms == next.idle_ms;
        if (next.ref == kNullRef || view.idle_ms > next.idle_ms) next = view;
      }
      std::vector<Eviction> log;
      if (pool.Reclaim(1000000, 1, EvictReason::kOperator, &log) == 0) {
        EXPECT_EQ(next.ref, kNullRef);
        break;
      }
      ASSERT_EQ(log.size(), 1u);
      ASSERT_EQ(Index(log[0].block), Index(next.ref.id));
      ++left;
    }
    pool.CheckInvariants();
  }
  EXPECT_EQ(left, 40 * kBlocks);
  EXPECT_GT(ties, 200u);
}

TEST(RecoverTest, WhatWasUsedAfterwardsLeavesLastWithAStandInAndUnderItsSuccessor) {
  size_t all_used = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Table table, first_copy, second_copy;
    CacheChains(table.data(), seed);
    // All within one millisecond, so that no time of a record says which was the last.
    std::vector<uint32_t> used;
    const auto use = [&used](BlockPool* pool) {
      used.clear();
      for (uint32_t b = kBlocks; b > 0; --b) {
        const BlockView view = *pool->View(BlockId{b}, 1000000);
        if (view.state != BlockState::kCached || view.children != 0 || view.parent != kNullBlock) continue;
        EXPECT_EQ(pool->Touch(1000001, {&view.ref, 1}), 1u);
        used.push_back(b);
      }
    };
    Recovered one = Recover(table.Image(), &first_copy), other = Recover(table.Image(), &second_copy);
    use(one.pool.get());
    use(other.pool.get());
    other.pool->SetPolicy(1000002, *MakeReplacementPolicy("lru", kBlocks + 1));
    EXPECT_FALSE(other.pool->has_stand_in());
    for (BlockPool* const pool : {one.pool.get(), other.pool.get()}) {
      const std::vector<uint32_t> left = Leaving(pool, 1000003);
      ASSERT_EQ(left.size(), kBlocks);
      EXPECT_TRUE(std::equal(used.rbegin(), used.rend(), left.rbegin()));
      pool->CheckInvariants();
    }
    all_used += used.size();
  }
  EXPECT_GT(all_used, 100u);
}

// How the child came to its next stop.
enum class Stop { kMark, kStep, kEnd };
Stop Continue(pid_t child, __ptrace_request how) {
  int status = 0;
  if (ptrace(how, child, nullptr, nullptr) != 0 || waitpid(child, &status, 0) != child) return Stop::kEnd;
  if (!WIFSTOPPED(status)) return Stop::kEnd;
  return WSTOPSIG(status) == SIGSTOP ? Stop::kMark : Stop::kStep;
}

// A mutant: two stores, one right after the other, were made the other way round, and the process was killed in between.
enum class Swap { kNone, kCountedBeforeWritten, kChangedBeforeSaved };

// What the swap of the stores that led from `first` to `second` and from there to `third` would be.
Swap SwapOf(const PoolTable& view, const std::string& first, const std::string& second,
            const std::string& third) {
  const auto at = [&view](const void* in) {
    return static_cast<size_t>(static_cast<const char*>(in) - view.data);
  };
  const auto changed = [](const std::string& from, const std::string& to) {
    return static_cast<size_t>(std::mismatch(from.begin(), from.end(), to.begin()).first - from.begin());
  };
  const auto in_log = [&](size_t place) { return place >= at(view.undo) && place < at(view.protections); };
  const auto is_head = [&](size_t place) { return place - at(&view.begun.turn) < sizeof(view.begun.turn); };
  const size_t one = changed(first, second), other = changed(second, third);
  if (in_log(one) && is_head(other)) return Swap::kCountedBeforeWritten;
  if (is_head(one) && !in_log(other) && !is_head(other)) return Swap::kChangedBeforeSaved;
  return Swap::kNone;
}

// `first` with what only the second store changed.
std::string Swapped(const std::string& first, const std::string& second, const std::string& third) {
  std::string image = first;
  for (size_t i = 0; i < image.size(); ++i) {
    if (third[i] != second[i]) image[i] = third[i];
  }
  return image;
}

// Whether the image that a mutant leaves is neither as before nor as after. A pool may well abort on it.
bool IsNoticed(const std::string& image, Table* copy, const Fates& before, const Fates& after) {
  const pid_t child = fork();
  if (child == 0) _exit(WhyNeither(before, Recover(image, copy).fates, after).empty() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status != 0;
}

TEST(RecoverTest, AfterEachInstructionThatStoresNothingIsLostAndNothingIsTwice) {
  if (KVPOOL_SANITIZED)
    GTEST_SKIP() << "a sanitizer's own instructions are most of the steps: minutes for a few verbs";
  // With this seed there are all kinds of verbs, and a block that moves, among the first 26.
  constexpr uint64_t kSeed = 2456;
  constexpr uint32_t kVerbs = 50;
  constexpr uint32_t kMutants = 50;  // There are so many of each kind.
  Table table, copy;
  void* const shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const verb_now = static_cast<Verb*>(shared);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    bool stops = false;
    Player player(table.data(), kSeed, [&](Verb verb) {
      *verb_now = verb;
      if (stops) raise(SIGSTOP);
    });
    // Where something is cached and nothing is free a verb has most to do.
    for (int step = 0; step < 200; ++step) player.Step();
    stops = true;
    while (true) player.Step();
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << "ptrace does not work here";
  // The child is before its first verb.
  std::array<uint32_t, kVerbNames.size()> images{};
  std::map<Swap, uint32_t> mutants, noticed;
  for (uint32_t number = 0; number < kVerbs && !HasFailure(); ++number) {
    const Verb verb = *verb_now;
    SCOPED_TRACE(absl::StrCat("verb ", number, ", ", kVerbNames[static_cast<size_t>(verb)]));
    std::string first, second, third = table.Image();
    const Fates before = Recover(third, &copy).fates;
    std::vector<Fates> torn;
    std::vector<std::pair<Swap, std::string>> swapped;
    Stop stop = Stop::kStep;
    while ((stop = Continue(child, PTRACE_SINGLESTEP)) == Stop::kStep) {
      if (table.Is(third)) continue;
      first = std::exchange(second, std::exchange(third, table.Image()));
      Recovered recovered = Recover(third, &copy);
      ASSERT_EQ(recovered.found.lost_aliases, 0u);
      ExpectAllComesBack(&recovered);
      torn.push_back(std::move(recovered.fates));
      const Swap swap = first.empty() ? Swap::kNone : SwapOf(table.view(), first, second, third);
      if (swap == Swap::kNone || mutants[swap] == kMutants) continue;
      ++mutants[swap];
      swapped.emplace_back(swap, Swapped(first, second, third));
    }
    ASSERT_EQ(stop, Stop::kMark);
    const Fates after = Recover(third, &copy).fates;
    images[static_cast<size_t>(verb)] += static_cast<uint32_t>(torn.size());
    for (size_t i = 0; i < torn.size(); ++i)
      ASSERT_EQ(WhyNeither(before, torn[i], after), "") << "image " << i;
    for (const auto& [swap, image] : swapped) noticed[swap] += IsNoticed(image, &copy, before, after);
    ASSERT_EQ(Continue(child, PTRACE_CONT), Stop::kMark);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  munmap(shared, 4096);
  for (size_t verb = 0; verb < kVerbNames.size(); ++verb) {
    EXPECT_GT(images[verb], 0u) << kVerbNames[verb] << " was not stepped through";
  }
  for (const Swap swap : {Swap::kCountedBeforeWritten, Swap::kChangedBeforeSaved}) {
    EXPECT_GT(noticed[swap], 0u) << "of " << mutants[swap] << " mutants of kind " << static_cast<int>(swap);
  }
}

// The links of the index are in the table, and those that a split moves are stored there.
TEST(RecoverTest, AfterEachInstructionOfASplitAllIsFound) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "a sanitizer's own instructions are most of the steps";
  constexpr uint32_t kFirst = 15;
  Table table, copy;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    const std::unique_ptr<BlockPool> pool = MakePool(table.data());
    EXPECT_TRUE(pool->Grow(kFirst).ok());
    const Holder session = *pool->AddSession({}, 0, 5);
    std::vector<BlockRef> blocks;
    pool->Lease(session, 1000, kFirst, kFirst, &blocks);
    for (uint32_t i = 0; i + 1 < kFirst; ++i) {
      const std::vector<BlockKey> keys = {AliasOf(8 * i), KeyOf(8 * i % kKeys)};
      const SealEntry entry = {blocks[i], keys};
      SealVerdict outcome;
      pool->Seal(session, 1000, nullptr, {&entry, 1}, {&outcome, 1});
    }
    std::vector<Verdict> verdicts(kFirst / 2);
    pool->Release(session, 1001, absl::MakeSpan(blocks).subspan(0, kFirst / 2), absl::MakeSpan(verdicts));
    pool->Commit();
    raise(SIGSTOP);
    while (!pool->Prepare(kBlocks + 1, 1)) {
    }
    EXPECT_TRUE(pool->Grow(kBlocks - kFirst).ok());
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << "ptrace does not work here";
  std::string image = table.Image();
  const Recovered whole = Recover(image, &copy);
  EXPECT_EQ(whole.found.cached, kFirst / 2);
  EXPECT_EQ(whole.found.held, kFirst - 1 - kFirst / 2);
  uint32_t images = 0;
  Stop stop = Stop::kStep;
  while ((stop = Continue(child, PTRACE_SINGLESTEP)) == Stop::kStep) {
    if (table.Is(image)) continue;
    image = table.Image();
    ++images;
    Recovered recovered = Recover(image, &copy);
    ASSERT_EQ(recovered.fates, whole.fates) << "image " << images;
    ASSERT_EQ(recovered.found.damaged() + recovered.found.cut_links + recovered.found.lost_aliases, 0u);
    ExpectAllComesBack(&recovered);
  }
  EXPECT_EQ(stop, Stop::kMark);
  EXPECT_GT(images, 10u) << "hardly any link was moved";
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
}

class DamagedTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    pool_ = MakePool(table_.data());
    ASSERT_TRUE(pool_->Grow(kBlocks).ok());
    session_ = *pool_->AddSession({}, 0, 5);
    ASSERT_EQ(pool_->Lease(session_, 1000, 3, 3, &blocks_).leased, 3u);
    const std::vector<BlockKey> keys = Keys({"a", "b", "c"});
    std::vector<SealEntry> entries;
    for (size_t i = 0; i < 3; ++i) entries.push_back({blocks_[i], {&keys[i], 1}});
    std::vector<SealVerdict> outcomes(3);
    pool_->Seal(session_, 1000, nullptr, entries, absl::MakeSpan(outcomes));
    pool_->Commit();
  }
  void Release(size_t block) {
    Verdict verdict;
    pool_->Release(session_, 1001, {&blocks_[block], 1}, {&verdict, 1});
    ASSERT_EQ(verdict, Verdict::kDone);
    pool_->Commit();
  }
  // Its record is whole, whatever was changed.
  void MakeWhole(size_t block) {
    const uint32_t b = Index(blocks_[block].id);
    table_.view().checksums[b] = RecordChecksum(b, record(block));
  }
  BlockRecord& record(size_t block) { return table_.view().records[Index(blocks_[block].id)]; }

  Table table_, copy_, third_;
  std::unique_ptr<BlockPool> pool_;
  Holder session_{};
  std::vector<BlockRef> blocks_;
};

TEST_F(DamagedTableTest, ADamagedBlockThatIsHeldStaysWithItsHolder) {
  record(2).key[3] ^= 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 1u);
  EXPECT_EQ(recovered.found.held, 2u);
  EXPECT_EQ(recovered.found.quarantined, 1u);
  EXPECT_EQ(recovered.pool->Find(Key("c")), kNullRef);
  EXPECT_EQ(recovered.pool->Find(Key("b")), blocks_[1]);
  ExpectAllComesBack(&recovered);
}

class AliasedTest : public DamagedTableTest {
 protected:
  // The third block is sealed under aliases, too, in a pool that begins anew.
  void SetUp() override {
    DamagedTableTest::SetUp();
    ASSERT_EQ(pool_->Lease(session_, 1001, 1, 1, &blocks_).leased, 1u);
    const std::vector<BlockKey> keys = Keys({"d'", "d''", "d"});
    const SealEntry entry = {blocks_[3], keys};
    SealVerdict outcome;
    pool_->Seal(session_, 1001, nullptr, {&entry, 1}, {&outcome, 1});
    ASSERT_EQ(outcome.verdict, Verdict::kDone);
    pool_->Commit();
  }
  PoolTable::KeptAliases& kept() { return table_.view().aliases[Index(blocks_[3].id)]; }
};

TEST_F(AliasedTest, AnHeirsHeirFindsThem) {
  Recovered heir = Recover(table_.Image(), &copy_);
  Recovered next = Recover(copy_.Image(), &third_);
  for (const Recovered* each : {&heir, &next}) {
    for (const char* key : {"d'", "d''", "d"}) EXPECT_EQ(each->pool->Find(Key(key)), blocks_[3]) << key;
    EXPECT_EQ(each->found.lost_aliases, 0u);
  }
  ExpectAllComesBack(&next);
  EXPECT_EQ(next.pool->Find(Key("d'")), kNullRef);
}

TEST_F(AliasedTest, DamagedOnesAreLostAndTheBlockIsNot) {
  const std::string whole = table_.Image();
  const auto damage = [&](auto how) {
    table_.CopyFrom(whole);
    how();
    Recovered recovered = Recover(table_.Image(), &copy_);
    EXPECT_EQ(recovered.found.lost_aliases, 1u);
    EXPECT_EQ(recovered.pool->Find(Key("d'")), kNullRef);
    EXPECT_EQ(recovered.pool->Find(Key("d")), blocks_[3]);
    ExpectAllComesBack(&recovered);
  };
  damage([&] { kept().keys[1][7] ^= 1; });
  damage([&] { kept().raw[0] ^= 1; });
  damage([&] { kept().whose += PoolTable::KeptAliases::kMost; });
  // Of the block's life before.
  damage([&] {
    kept().whose -= uint64_t{1} << 32;
    kept().checksum = kept().Checksum(Index(blocks_[3].id), record(3));
  });
}

TEST_F(AliasedTest, ThoseOfAnotherContentOfTheSameGenerationAreNone) {
  // A version that knows no aliases has sealed it anew, after a turn that was torn.
  BlockRecord& r = record(3);
  r.set_key(Key("e"));
  const uint32_t b = Index(blocks_[3].id);
  table_.view().checksums[b] = RecordChecksum(b, r);
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.lost_aliases, 1u);
  EXPECT_EQ(recovered.pool->Find(Key("e")), blocks_[3]);
  EXPECT_EQ(recovered.pool->Find(Key("d'")), kNullRef);
  ExpectAllComesBack(&recovered);
}

TEST_F(AliasedTest, ATableOfBeforeHasNone) {
  copy_.CopyFrom(table_.Image());
  PoolOptions options = OptionsIn(copy_.data());
  options.table_has_sums = false;
  BlockPool pool(options, *MakeReplacementPolicy("lru", kBlocks + 1));
  EXPECT_EQ(pool.Recover(kRecovered, First(kBlocks)).lost_aliases, 1u);
  pool.CheckInvariants();
  EXPECT_EQ(pool.Find(Key("d'")), kNullRef);
  EXPECT_EQ(pool.Find(Key("d")), blocks_[3]);
}

TEST_F(DamagedTableTest, ADamagedBlockThatNobodyHoldsIsFree) {
  Release(2);
  record(2).key[3] ^= 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 1u);
  EXPECT_EQ(recovered.found.quarantined, 0u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, ALinkToABlockThatIsGoneIsCut) {
  Release(0);
  record(0).generation += 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 1u);
  EXPECT_EQ(recovered.found.cut_links, 1u);
  EXPECT_EQ(recovered.pool->View(blocks_[1].id, 0)->parent, kNullBlock);
  EXPECT_EQ(Index(recovered.pool->View(blocks_[2].id, 0)->parent), Index(blocks_[1].id));
  // Whoever takes over from the heir finds nothing to cut.
  Table again;
  EXPECT_EQ(Recover(copy_.Image(), &again).found.cut_links, 0u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, LinksInACircleAreCutOnce) {
  for (size_t i = 0; i < 3; ++i) Release(i);
  BlockRecord& root = record(0);
  root.parent = Index(blocks_[2].id);
  const uint32_t b = Index(blocks_[0].id);
  table_.view().checksums[b] = RecordChecksum(b, root);
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 0u);
  EXPECT_EQ(recovered.found.cut_links, 1u);
  EXPECT_EQ(recovered.found.cached, 3u);
  Table again;
  EXPECT_EQ(Recover(copy_.Image(), &again).found.cut_links, 0u);
  EXPECT_EQ(Leaving(recovered.pool.get(), 1000000).size(), 3u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, LinksFromGroupToGroupAndWithinAWindowAreCut) {
  std::vector<BlockRef> windowed;
  ASSERT_EQ(pool_->Lease(session_, 1001, 2, 2, &windowed).leased, 2u);
  for (size_t i = 0; i < 2; ++i) {
    const BlockKey key = Key(absl::StrCat("windowed ", i), 1);
    const SealEntry entry = {windowed[i], {&key, 1}};
    SealVerdict outcome;
    pool_->Seal(session_, 1001, nullptr, {&entry, 1}, {&outcome, 1});
    ASSERT_EQ(outcome.verdict, Verdict::kDone);
  }
  pool_->Commit();
  for (const BlockRef block : {blocks_[0], windowed[1]}) {
    const uint32_t b = Index(block.id);
    BlockRecord& r = table_.view().records[b];
    r.parent = Index(windowed[0].id);
    table_.view().checksums[b] = RecordChecksum(b, r);
  }
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 0u);
  EXPECT_EQ(recovered.found.cut_links, 2u);
  EXPECT_EQ(recovered.found.held, 5u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, OfTwoBlocksWithOneKeyOneIsFree) {
  for (size_t i = 0; i < 3; ++i) Release(i);
  BlockRecord& twin = record(2);
  twin.key = record(1).key;
  const uint32_t b = Index(blocks_[2].id);
  table_.view().checksums[b] = RecordChecksum(b, twin);
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.damaged(), 1u);
  EXPECT_EQ(recovered.pool->Find(Key("b")), blocks_[1]);
  ExpectAllComesBack(&recovered);
}

// Each loss of blocks has its reason, and all that is lost comes back to be leased.
TEST_F(DamagedTableTest, WhatIsLostSaysWhy) {
  const auto expect = [&](BlockLoss why, uint32_t blocks = kBlocks) {
    copy_.CopyFrom(table_.Image());
    const std::unique_ptr<BlockPool> pool = MakePool(copy_.data());
    const RecoveredPool found = pool->Recover(kRecovered, First(blocks));
    pool->CheckInvariants();
    for (size_t i = 0; i < kBlockLosses; ++i) {
      EXPECT_EQ(found.lost[i], i == static_cast<size_t>(why) ? 1u : 0u)
          << kBlockLossNames[static_cast<size_t>(why)] << ": counted as " << kBlockLossNames[i];
    }
    // What is behind the end is not there for those that come.
    if (blocks < kBlocks) {
      ASSERT_TRUE(pool->Grow(kBlocks - blocks).ok());
    }
    for (const RecoveredPool::Session& session : found.sessions) pool->FreeQuarantine(session.holder);
    while (pool->Tidy(BlockPool::kTidySlice)) {
    }
    std::vector<BlockRef> all;
    EXPECT_EQ(pool->Lease(*pool->AddSession({}, 0, 999999), 1000001, kBlocks, kBlocks, &all).leased, kBlocks);
    pool->CheckInvariants();
  };
  for (size_t i = 0; i < 3; ++i) Release(i);
  const std::string image = table_.Image();
  record(2).key[3] ^= 1;
  expect(BlockLoss::kChecksum);
  table_.CopyFrom(image);
  BlockKey foreign = record(2).block_key();
  foreign.group = 5;
  record(2).set_key(foreign);
  MakeWhole(2);
  expect(BlockLoss::kLayout);
  table_.CopyFrom(image);
  record(2).key = record(1).key;
  MakeWhole(2);
  expect(BlockLoss::kDuplicate);
  table_.CopyFrom(image);
  expect(BlockLoss::kNoSlab, /*blocks=*/2);
  // A lease of a session whose page of holds is not there.
  std::vector<BlockRef> leased;
  ASSERT_EQ(pool_->Lease(session_, 1002, 1, 1, &leased).leased, 1u);
  pool_->Commit();
  const std::string with_lease = table_.Image();
  PoolTable view = table_.view();
  std::fill(view.pages, view.pages + view.page_count, HoldPage());
  expect(BlockLoss::kUnsealed);
  table_.CopyFrom(with_lease);
  // Its seal was heard of by nobody.
  const BlockKey key = Key("torn");
  const SealEntry entry = {leased[0], {&key, 1}};
  SealVerdict outcome;
  pool_->Seal(session_, 1003, nullptr, {&entry, 1}, {&outcome, 1});
  ASSERT_EQ(outcome.verdict, Verdict::kDone);
  expect(BlockLoss::kTorn);
}

TEST_F(DamagedTableTest, WhatHasASumIsDoubtedUntilItIsBelieved) {
  for (size_t i = 0; i < 3; ++i) Release(i);
  uint32_t unsummed = 0;
  const auto recover = [&](const std::string& image, Table* table) {
    table->CopyFrom(image);
    auto pool = MakePool(table->data());
    unsummed = pool->Recover(kRecovered, First(kBlocks)).unsummed;
    pool->CheckInvariants();
    return pool;
  };
  const std::unique_ptr<BlockPool> heir = recover(table_.Image(), &copy_);
  EXPECT_EQ(unsummed, 3u);
  EXPECT_EQ(heir->doubted(), 0u);
  heir->KeepSum(blocks_[0], 100);
  heir->KeepSum(blocks_[2], 102);
  BlockRef stale = blocks_[1];
  ++stale.generation;
  heir->KeepSum(stale, 101);
  const std::unique_ptr<BlockPool> pool = recover(copy_.Image(), &third_);
  EXPECT_EQ(unsummed, 1u);
  EXPECT_EQ(pool->doubted(), 2u);
  const Holder session = *pool->AddSession({}, 0, 999999);
  const std::vector<BlockKey> keys = Keys({"a", "b", "c"});
  const auto found = [&] {
    const GroupQuery query{.group = 0, .keys = keys};
    MatchOutcome outcome;
    pool->Match(session, kRecovered, {&query, 1}, &outcome);
    std::vector<Verdict> verdicts(outcome.blocks[0].size());
    pool->Release(session, kRecovered, outcome.blocks[0], absl::MakeSpan(verdicts));
    return outcome.blocks[0].size();
  };
  EXPECT_EQ(found(), 0u);
  EXPECT_EQ(pool->SumOf(blocks_[0]), 100u);
  pool->Believe(blocks_[0]);
  EXPECT_EQ(found(), 2u) << "the second has no sum";
  // A seal under its key is its own.
  std::vector<BlockRef> to;
  ASSERT_EQ(pool->Lease(session, kRecovered, 1, 1, &to).leased, 1u);
  const SealEntry entry = {to[0], {&keys[2], 1}};
  SealVerdict outcome;
  pool->Seal(session, kRecovered, nullptr, {&entry, 1}, {&outcome, 1});
  EXPECT_EQ(outcome.verdict, Verdict::kDoubted);
  EXPECT_EQ(outcome.canonical, kNullRef);
  // It moves with its sum, and is doubted there.
  pool->Vacate({3, kBlocks + 1});
  ASSERT_TRUE(pool->Move(session, kRecovered, blocks_[2], to[0], 1));
  pool->CheckInvariants();
  EXPECT_EQ(pool->SumOf(to[0]), 102u);
  EXPECT_TRUE(pool->IsDoubted(to[0]));
  EXPECT_EQ(found(), 2u);
  while (pool->PutBack(kBlocks)) {
  }
  // One that is condemned has neither its key nor a sum.
  pool->Condemn(to[0]);
  EXPECT_EQ(pool->doubted(), 0u);
  EXPECT_EQ(pool->SumOf(to[0]), std::nullopt);
  EXPECT_EQ(found(), 2u);
  pool->CheckInvariants();
  std::vector<BlockRef> others;
  ASSERT_EQ(pool->Lease(session, kRecovered, 1, 1, &others).leased, 1u);
  const SealEntry other = {others[0], {&keys[2], 1}};
  pool->Seal(session, kRecovered, &keys[1], {&other, 1}, {&outcome, 1});
  EXPECT_EQ(outcome.canonical, others[0]);
  EXPECT_EQ(found(), 3u);
  // It is so where it moves to.
  ASSERT_EQ(pool->Lease(session, kRecovered, 1, 1, &others).leased, 1u);
  pool->Vacate({3, kBlocks + 1});
  ASSERT_TRUE(pool->Move(session, kRecovered, to[0], others[1], 1));
  while (pool->PutBack(kBlocks)) {
  }
  EXPECT_TRUE(pool->IsCondemned(others[1]));
  pool->KeepSum(others[1], 103);
  EXPECT_EQ(pool->SumOf(others[1]), std::nullopt);
  pool->CheckInvariants();
  EXPECT_EQ(pool->Reclaim(kRecovered, {&others[1], 1}, EvictReason::kDamaged, nullptr), 1u);
  EXPECT_EQ(found(), 3u);
  EXPECT_FALSE(pool->IsCondemned(others[1]));
  pool->CheckInvariants();
}

TEST_F(DamagedTableTest, AHeirCanBeKilledAnyTime) {
  Release(2);
  Table first, second;
  Recovered heir = Recover(table_.Image(), &first);
  Recovered next = Recover(first.Image(), &second);
  EXPECT_EQ(heir.fates, next.fates);
  EXPECT_EQ(next.found.held, 2u);
  EXPECT_EQ(next.found.cached, 1u);
  ExpectAllComesBack(&next);
}

TEST_F(DamagedTableTest, WhatIsHeldWasLeasedWhateverTheCountOfBlocksSays) {
  table_.view().begun.blocks = 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.held, 3u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, ASessionGoesOnWithWhatItHeld) {
  std::vector<BlockRef> more;
  ASSERT_EQ(pool_->Lease(session_, 1001, 2, 2, &more).leased, 2u);
  pool_->Commit();
  // This turn is torn: it never was.
  Verdict verdict;
  pool_->Release(session_, 1002, {&more[0], 1}, {&verdict, 1});
  std::vector<BlockRef> unheard;
  pool_->Lease(session_, 1002, 4, 4, &unheard);
  Recovered recovered = Recover(table_.Image(), &copy_);
  ASSERT_EQ(recovered.found.half_turn, 0u);
  ASSERT_EQ(recovered.found.sessions.size(), 1u);
  const Holder session = recovered.found.sessions[0].holder;
  BlockPool& pool = *recovered.pool;
  ASSERT_TRUE(pool.Resume(session, {.guaranteed = 10, .max_blocks = 12}));
  pool.CheckInvariants();
  EXPECT_EQ(pool.unmet(session), 5u);
  EXPECT_TRUE(pool.Promise(session));
  pool.CheckInvariants();
  EXPECT_EQ(pool.guaranteed_free(session), 5u);
  EXPECT_EQ(pool.View(more[0].id, 0)->state, BlockState::kLeased);
  std::vector<BlockRef> held = blocks_;
  held.insert(held.end(), more.begin(), more.end());
  std::vector<Verdict> verdicts(held.size());
  pool.Release(session, 1003, held, absl::MakeSpan(verdicts));
  for (const Verdict each : verdicts) EXPECT_EQ(each, Verdict::kDone);
  pool.CheckInvariants();
  EXPECT_EQ(pool.holds(session), 0u);
  EXPECT_EQ(pool.available(), kBlocks);
}

TEST_F(DamagedTableTest, NobodyEndsTheTurnOfAnotherProcessBeforeItIsUndone) {
  // This turn is torn.
  Verdict verdict;
  pool_->Release(session_, 1002, {&blocks_[2], 1}, {&verdict, 1});
  ASSERT_EQ(verdict, Verdict::kDone);
  copy_.CopyFrom(table_.Image());
  const std::unique_ptr<BlockPool> pool = MakePool(copy_.data());
  const uint64_t torn = pool->undo_log().turn();
  pool->Commit();
  EXPECT_EQ(pool->undo_log().turn(), torn);
  const RecoveredPool found = pool->Recover(kRecovered, First(kBlocks));
  EXPECT_EQ(found.held, 3u);
  EXPECT_GT(pool->undo_log().turn(), torn);
  const uint64_t recovered = pool->undo_log().turn();
  pool->Commit();
  EXPECT_GT(pool->undo_log().turn(), recovered);
}

TEST_F(DamagedTableTest, WhatATornTurnGaveBackAndLeasedAgainHasItsOldGeneration) {
  ASSERT_EQ(pool_->Lease(session_, 1001, 1, 1, &blocks_).leased, 1u);
  pool_->Commit();
  const BlockRef leased = blocks_.back();
  // One that was leased, and one that was sealed and leaves.
  for (const BlockRef given_back : {leased, blocks_[2]}) {
    Verdict verdict = Verdict::kNotHeld;
    pool_->Release(session_, 1002, {&given_back, 1}, {&verdict, 1});
    ASSERT_EQ(verdict, Verdict::kDone);
  }
  pool_->Reclaim(1002, {&blocks_[2], 1}, EvictReason::kOperator, nullptr);
  std::vector<BlockRef> again;
  ASSERT_EQ(pool_->Lease(session_, 1002, 2, 2, &again).leased, 2u);
  ASSERT_EQ(Index(again[0].id), Index(blocks_[2].id));
  ASSERT_EQ(Index(again[1].id), Index(leased.id));
  Recovered recovered = Recover(table_.Image(), &copy_);
  for (const BlockRef held : {leased, blocks_[2]}) {
    EXPECT_EQ(recovered.pool->View(held.id, 1003)->ref, held);
    EXPECT_EQ(recovered.pool->holds(recovered.found.sessions[0].holder, held.id), 1u);
  }
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, WhatASessionThatEndedInATornTurnHeldHasItsOldGeneration) {
  ASSERT_EQ(pool_->Lease(session_, 1001, 1, 1, &blocks_).leased, 1u);
  pool_->Commit();
  pool_->EndSession(session_);
  pool_->FreeQuarantine(session_);
  std::vector<BlockRef> again;
  ASSERT_EQ(pool_->Lease(*pool_->AddSession({}, 0, 77), 1002, kBlocks, kBlocks, &again).leased, kBlocks);
  Recovered recovered = Recover(table_.Image(), &copy_);
  ASSERT_EQ(recovered.found.sessions.size(), 1u);
  for (const BlockRef held : blocks_) {
    EXPECT_EQ(recovered.pool->View(held.id, 1003)->ref, held);
    EXPECT_EQ(recovered.pool->holds(recovered.found.sessions[0].holder, held.id), 1u);
  }
}

TEST_F(DamagedTableTest, ATurnThatIsTooLargeToBeUndoneIsSaidToBe) {
  // Many more stores than the log of so small a pool has room for, in two words that take turns.
  ASSERT_EQ(pool_->Lease(session_, 1001, 2, 2, &blocks_).leased, 2u);
  pool_->Commit();
  for (uint32_t i = 0; i < 2 * (8192 + 4 * kBlocks); ++i) {
    const BlockRef block = i % 2 == 0 ? blocks_.front() : blocks_.back();
    Verdict verdict;
    pool_->Ref(session_, {&block, 1}, {&verdict, 1});
    pool_->Release(session_, 1001, {&block, 1}, {&verdict, 1});
  }
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_NE(recovered.found.half_turn, 0u);
  // The next one that dies does not make it whole.
  recovered.pool->Commit();
  Recovered again = Recover(copy_.Image(), &third_);
  EXPECT_EQ(again.found.half_turn, recovered.found.half_turn);
  ExpectAllComesBack(&again);
}

TEST_F(DamagedTableTest, ABlockThatWasHeldToTheLimitStillIs) {
  Verdict verdict = Verdict::kDone;
  for (uint32_t i = 1; i < kMaxHolds; ++i) {
    pool_->Ref(session_, {&blocks_[2], 1}, {&verdict, 1});
    ASSERT_EQ(verdict, Verdict::kDone);
    pool_->Commit();
  }
  Recovered recovered = Recover(table_.Image(), &copy_);
  BlockPool& pool = *recovered.pool;
  const Holder session = recovered.found.sessions[0].holder;
  ASSERT_TRUE(pool.Resume(session, {}));
  const std::vector<BlockKey> keys = Keys({"a", "b", "c"});
  const GroupQuery query = {0, keys, 16};
  MatchOutcome found;
  pool.Match(session, 1003, {&query, 1}, &found);
  EXPECT_EQ(found.tokens, 32u);
  EXPECT_EQ(found.miss, MissReason::kCap);
  pool.CheckInvariants();
}

TEST_F(DamagedTableTest, PinsAndPrioritiesGoOnUntilTheirTimeIsOver) {
  std::vector<Verdict> verdicts(3, Verdict::kDone);
  // The second block is pinned by the third, behind it, and the first for longer.
  pool_->Pin(1002, kRecovered + 1000, {&blocks_[2], 1}, {&verdicts[2], 1});
  pool_->Pin(1002, kRecovered + 2000, {&blocks_[0], 1}, {&verdicts[0], 1});
  pool_->SetRetention(1002, {.priority = 90, .until = kRecovered + 3000, .half_life_ms = kRecovered - 2},
                      {&blocks_[1], 1}, {&verdicts[1], 1});
  for (const Verdict each : verdicts) ASSERT_EQ(each, Verdict::kDone);
  for (size_t i = 0; i < 3; ++i) Release(i);
  ASSERT_EQ(pool_->pinned(), 3u);
  Recovered recovered = Recover(table_.Image(), &copy_);
  // An heir of the one that has recovered finds the same.
  Recovered again = Recover(copy_.Image(), &third_);
  for (const Recovered* each : {&recovered, &again}) {
    BlockPool& pool = *each->pool;
    EXPECT_EQ(each->found.held, 3u);
    EXPECT_EQ(pool.pinned(), 3u);
    EXPECT_EQ(pool.View(blocks_[1].id, 0)->priority, 90);
    EXPECT_EQ(pool.Reclaim(kRecovered, 3, EvictReason::kOperator, nullptr), 0u);
  }
  BlockPool& pool = *recovered.pool;
  pool.Expire(kRecovered + 1000, UINT32_MAX);
  pool.CheckInvariants();
  EXPECT_TRUE(pool.View(blocks_[0].id, 0)->pinned);
  EXPECT_FALSE(pool.View(blocks_[1].id, 0)->pinned);
  EXPECT_FALSE(pool.View(blocks_[2].id, 0)->pinned);
  // One half-life is over.
  EXPECT_EQ(pool.View(blocks_[1].id, 0)->priority, kDefaultPriority + (90 - kDefaultPriority) / 2);
  pool.Expire(kRecovered + 2000, UINT32_MAX);
  EXPECT_EQ(pool.pinned(), 1u) << "its priority counts";
  EXPECT_FALSE(pool.View(blocks_[0].id, 0)->pinned);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, APinHoldsWhatIsInFrontOfItAndEndsWhileNobodyLooks) {
  std::vector<Verdict> verdicts(1);
  pool_->Pin(1002, kRecovered, {&blocks_[0], 1}, absl::MakeSpan(verdicts));
  for (size_t i = 0; i < 3; ++i) Release(i);
  EXPECT_EQ(Recover(table_.Image(), &copy_).pool->pinned(), 0u) << "its last millisecond is over";
  pool_->Pin(1003, kRecovered + 1000, {&blocks_[2], 1}, absl::MakeSpan(verdicts));
  pool_->Commit();
  table_.view().protections[Index(blocks_[1].id)] = {};
  Recovered recovered = Recover(table_.Image(), &third_);
  EXPECT_EQ(recovered.pool->pinned(), 3u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, ProtectionsThatEndedOrAreOfAnotherLifeAreNone) {
  std::vector<Verdict> verdicts(3);
  pool_->Pin(1002, kRecovered, {&blocks_[1], 1}, {&verdicts[0], 1});  // It pins the first block, too.
  pool_->Pin(1002, kNoPinLastsLonger, {&blocks_[2], 1}, {&verdicts[0], 1});
  EXPECT_EQ(pool_->Unpin({&blocks_[2], 1}), 1u);
  EXPECT_EQ(pool_->Unpin({&blocks_[1], 1}), 1u);
  EXPECT_EQ(pool_->Unpin({&blocks_[0], 1}), 1u);
  for (size_t i = 0; i < 3; ++i) Release(i);
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.cached, 3u);
  EXPECT_EQ(recovered.pool->pinned(), 0u);
  // A flag without a protection of this generation, and one of a priority that there is none of.
  for (const size_t block : {0, 1}) record(block).flags |= BlockRecord::kProtected;
  PoolTable::KeptProtection* const kept = table_.view().protections;
  kept[Index(blocks_[0].id)] = {.pin_until = kNoPinLastsLonger,
                                .whose = (blocks_[0].generation + uint64_t{1}) << 32};
  kept[Index(blocks_[1].id)] = {.pin_until = kNoPinLastsLonger,
                                .whose = uint64_t{blocks_[1].generation} << 32 | (kMaxPriority + 1)};
  Recovered again = Recover(table_.Image(), &third_);
  EXPECT_EQ(again.found.cached, 3u);
  EXPECT_EQ(again.pool->pinned(), 0u);
  ExpectAllComesBack(&again);
}

TEST_F(DamagedTableTest, AHoleStaysOneAndWhatWasThereIsLost) {
  for (size_t i = 0; i < 3; ++i) Release(i);
  const uint32_t gone = Index(blocks_[1].id);
  copy_.CopyFrom(table_.Image());
  const std::unique_ptr<BlockPool> pool = MakePool(copy_.data());
  const std::vector<BlockRange> there = {{1, gone}, {gone + 1, kBlocks / 2}, {kBlocks / 2 + 2, kBlocks}};
  const RecoveredPool found = pool->Recover(kRecovered, there);
  pool->CheckInvariants();
  EXPECT_EQ(found.cached, 2u);
  EXPECT_EQ(found.lost[static_cast<size_t>(BlockLoss::kNoSlab)], 1u);
  EXPECT_EQ(pool->capacity(), kBlocks - 4);
  EXPECT_EQ(pool->end_block(), kBlocks);
  EXPECT_FALSE(pool->View(BlockId{gone}, kRecovered).ok());
  for (const RecoveredPool::Session& session : found.sessions) pool->FreeQuarantine(session.holder);
  const Holder session = *pool->AddSession({}, 0, 77);
  std::vector<BlockRef> all;
  EXPECT_EQ(pool->Lease(session, kRecovered, kBlocks, 1, &all).leased, kBlocks - 4);
  for (const BlockRef block : all) EXPECT_NE(Index(block.id), gone);
  ASSERT_TRUE(pool->Enter({gone, gone + 1}).ok());
  all.clear();
  ASSERT_EQ(pool->Lease(session, kRecovered, 1, 1, &all).leased, 1u);
  EXPECT_EQ(Index(all[0].id), gone);
  EXPECT_GT(all[0].generation, blocks_[1].generation) << "or a ref of before would be valid";
  Verdict verdict;
  pool->Release(session, kRecovered, {&blocks_[1], 1}, {&verdict, 1});
  EXPECT_EQ(verdict, Verdict::kStale);
  pool->CheckInvariants();
}

TEST_F(DamagedTableTest, AHoldInAHoleIsNone) {
  const uint32_t gone = Index(blocks_[1].id);
  copy_.CopyFrom(table_.Image());
  const std::unique_ptr<BlockPool> pool = MakePool(copy_.data());
  const RecoveredPool found =
      pool->Recover(kRecovered, std::vector<BlockRange>{{1, gone}, {gone + 1, kBlocks + 1}});
  pool->CheckInvariants();
  ASSERT_EQ(found.sessions.size(), 1u);
  EXPECT_EQ(pool->holds(found.sessions[0].holder, BlockId{gone}), 0u);
  EXPECT_GT(pool->holds(found.sessions[0].holder, blocks_[0].id), 0u);
}

}  // namespace
}  // namespace kvpool
