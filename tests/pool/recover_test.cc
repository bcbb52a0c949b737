// What a pool leaves in its table, read by another one: after each verb, and after each instruction of a verb that stored
// anything.
//
// A child process runs the verbs on a table that it shares with this one, which steps it by ptrace. Each time that the table has
// changed, a copy is recovered as if the child had been killed there.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_table.h"
#include "server/pool/prefix_index.h"
#include "server/replacement/policy.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

constexpr uint32_t kBlocks = 24;
constexpr uint32_t kSessions = 24;
constexpr uint32_t kKeys = 40;

PoolOptions OptionsIn(void* table) {
  PoolOptions options;
  options.max_blocks = kBlocks + 1;
  options.windows = {0, 4};
  options.ghosts = 64;
  options.table = table;
  options.table_sessions = kSessions;
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
  friend bool operator==(const Fate&, const Fate&) = default;
};
using Fates = std::vector<Fate>;

Fate FateOf(const BlockPool& pool, uint32_t b) {
  const BlockView view = *pool.View(BlockId{b}, 0);
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

// The fates in a pool whose sessions are these, by id.
Fates FatesOf(const BlockPool& pool, const std::map<uint64_t, Holder>& sessions) {
  Fates fates(1);
  for (uint32_t b = 1; b <= kBlocks; ++b) {
    Fate fate = FateOf(pool, b);
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

// What another process would find in this image of a table. It is left in `table`.
Recovered Recover(const std::string& image, Table* table) {
  table->CopyFrom(image);
  Recovered recovered{.pool = MakePool(table->data())};
  recovered.found = recovered.pool->Recover(kRecovered, kBlocks);
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

BlockKey KeyOf(uint32_t number) { return Key(absl::StrCat("key ", number), number % 8 == 7 ? 1 : 0); }

// Random verbs of up to six sessions. The child runs it; this process does in the test without steps.
class Player {
 public:
  // `mark` is called right before and right after each call of the pool.
  Player(
      void* table, uint64_t seed, std::function<void()> mark = [] {})
      : pool(MakePool(table)), random_(seed), mark_(std::move(mark)) {
    EXPECT_TRUE(pool->Grow(kBlocks).ok());
  }

  void Step() {
    ++now_;
    switch (Below(15)) {
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
        return Match();
      case 9:
        return Ref();
      case 10:
        mark_();
        pool->Reclaim(now_, 1 + Below(3), EvictReason::kOperator, nullptr);
        return Done();
      case 11:
        return Pin();
      case 12:
        return Unpin();
      case 13:
        return SetRetention();
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
      mark_();
      pool->FreeQuarantine(holder);
      Done();
      sessions.erase(id);
      return;
    }
    if (open_.empty()) return;
    mark_();
    pool->EndSession(sessions[open_.front()]);
    Done();
    open_.erase(open_.begin());
  }
  void Lease() {
    std::vector<BlockRef> blocks;
    const Holder session = sessions[AnySession()];
    const uint32_t count = 1 + Below(5);
    mark_();
    pool->Lease(session, now_, count, 1, &blocks);
    Done();
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
  void Seal() {
    const uint64_t session = AnySession();
    std::vector<BlockRef> blocks = Held(session, BlockState::kLeased);
    if (blocks.size() > 4) blocks.resize(4);
    const uint32_t first = Below(kKeys);
    std::vector<BlockKey> keys;
    for (uint32_t i = 0; i <= blocks.size(); ++i) keys.push_back(KeyOf(first + i));
    std::vector<SealEntry> entries;
    for (size_t i = 0; i < blocks.size(); ++i) {
      entries.push_back({.block = blocks[i], .keys = {&keys[i + 1], 1}, .leave_duplicate = Below(2) == 0});
    }
    std::vector<SealVerdict> outcomes(entries.size());
    mark_();
    pool->Seal(sessions[session], now_, &keys[0], entries, absl::MakeSpan(outcomes));
    Done();
  }
  void Match() {
    const uint32_t first = Below(kKeys);
    std::vector<BlockKey> keys;
    for (uint32_t i = 0; i < 4 && KeyOf(first + i).group == 0; ++i) keys.push_back(KeyOf(first + i));
    const GroupQuery query{.group = 0, .keys = keys};
    MatchOutcome outcome;
    const Holder session = sessions[AnySession()];
    mark_();
    pool->Match(session, now_, {&query, 1}, &outcome);
    Done();
  }
  void Ref() {
    const uint64_t session = AnySession();
    const std::vector<BlockRef> blocks =
        Held(session, Below(2) == 0 ? BlockState::kSealed : BlockState::kLeased);
    std::vector<Verdict> verdicts(blocks.size());
    mark_();
    pool->Ref(sessions[session], blocks, absl::MakeSpan(verdicts));
    Done();
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
    mark_();
    pool->Pin(now_, until, blocks, absl::MakeSpan(verdicts));
    Done();
  }
  void Unpin() {
    const std::vector<BlockRef> blocks = Resident();
    mark_();
    if (Below(2) == 0) {
      pool->Unpin(blocks);
    } else {
      pool->Expire(kRecovered + Below(1000), UINT32_MAX);
    }
    Done();
  }
  void SetRetention() {
    const std::vector<BlockRef> blocks = Resident();
    std::vector<Verdict> verdicts(blocks.size());
    const Retention retention = {.priority = static_cast<uint8_t>(Below(kMaxPriority + 1)),
                                 .until = Until(),
                                 .half_life_ms = Below(2) * 20};
    mark_();
    pool->SetRetention(now_, retention, blocks, absl::MakeSpan(verdicts));
    Done();
  }
  void Release() {
    const uint64_t session = AnySession();
    std::vector<BlockRef> blocks = Held(session, Below(2) == 0 ? BlockState::kSealed : BlockState::kLeased);
    if (blocks.size() > 3) blocks.resize(3);
    std::vector<Verdict> verdicts(blocks.size());
    mark_();
    pool->Release(sessions[session], now_, blocks, absl::MakeSpan(verdicts));
    Done();
  }

  void Done() {
    pool->Commit();
    mark_();
  }

  std::mt19937_64 random_;
  const std::function<void()> mark_;
  TimeMs now_ = 1000;
  uint64_t next_id_ = 1;
  std::vector<uint64_t> open_;
};

TEST(RecoverTest, AfterEachVerbAllIsAsItWas) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Table table, copy;
    Player player(table.data(), seed);
    for (int step = 0; step < 400; ++step) {
      player.Step();
      Recovered recovered = Recover(table.Image(), &copy);
      ASSERT_EQ(recovered.fates, FatesOf(*player.pool, player.sessions)) << "step " << step;
      ASSERT_EQ(recovered.found.dropped + recovered.found.cut_links, 0u);
      if (step % 50 == 0) ExpectAllComesBack(&recovered);
    }
  }
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

// A block of a torn verb is as it was before or after, or nobody's and empty in between; and what no verb touches stays.
void ExpectBetween(const Fates& before, const Fates& now, const Fates& after) {
  // What is held is what was held before the verb or after it: an engine that goes on is answered so, or asks again.
  const auto same_holds = [&now](const Fates& other) {
    return std::equal(now.begin(), now.end(), other.begin(), other.end(),
                      [](const Fate& a, const Fate& b) { return a.holds == b.holds; });
  };
  ASSERT_TRUE(same_holds(before) || same_holds(after)) << "the verb is half done";
  for (uint32_t b = 1; b <= kBlocks; ++b) {
    SCOPED_TRACE(absl::StrCat("block ", b));
    for (const auto& [session, holds] : before[b].holds) {
      const auto stays = after[b].holds.find(session);
      if (stays == after[b].holds.end()) continue;
      const auto held = now[b].holds.find(session);
      ASSERT_TRUE(held != now[b].holds.end()) << "session " << session << " has lost it";
      ASSERT_GE(held->second, std::min(holds, stays->second));
    }
    for (const auto& [session, holds] : now[b].holds) {
      ASSERT_TRUE(before[b].holds.contains(session) || after[b].holds.contains(session))
          << "session " << session;
    }
    const auto same_content = [&](const Fate& other) {
      return now[b].key == other.key && now[b].generation == other.generation && other.resident;
    };
    if (now[b].resident) {
      ASSERT_TRUE(same_content(before[b]) || same_content(after[b])) << "it has another's content";
      ASSERT_TRUE(now[b].parent == before[b].parent || now[b].parent == after[b].parent);
      ASSERT_TRUE(now[b].pinned == before[b].pinned || now[b].pinned == after[b].pinned);
      // It may have been halved again and again.
      const auto [least, most] = std::minmax(before[b].priority, after[b].priority);
      ASSERT_TRUE(now[b].priority >= least && now[b].priority <= most);
    }
    const bool stays = before[b].resident && after[b].resident && before[b].generation == after[b].generation;
    ASSERT_TRUE(!stays || now[b].resident) << "what was sealed is lost";
    ASSERT_GE(now[b].generation, before[b].generation);
  }
}

// How the child came to its next stop.
enum class Stop { kMark, kStep, kEnd };
Stop Continue(pid_t child, __ptrace_request how) {
  int status = 0;
  if (ptrace(how, child, nullptr, nullptr) != 0 || waitpid(child, &status, 0) != child) return Stop::kEnd;
  if (!WIFSTOPPED(status)) return Stop::kEnd;
  return WSTOPSIG(status) == SIGSTOP ? Stop::kMark : Stop::kStep;
}

TEST(RecoverTest, AfterEachInstructionThatStoresNothingIsLostAndNothingIsTwice) {
  constexpr uint32_t kVerbs = 100;
  Table table, copy;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    Player player(table.data(), 7, [] { raise(SIGSTOP); });
    while (true) player.Step();
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << "ptrace does not work here";
  // The child is before its first verb.
  uint32_t images = 0;
  for (uint32_t verb = 0; verb < kVerbs && !HasFatalFailure(); ++verb) {
    const Fates before = Recover(table.Image(), &copy).fates;
    std::vector<std::string> torn;
    std::string last = table.Image();
    Stop stop = Stop::kStep;
    while ((stop = Continue(child, PTRACE_SINGLESTEP)) == Stop::kStep) {
      if (table.Is(last)) continue;
      last = table.Image();
      torn.push_back(last);
    }
    ASSERT_EQ(stop, Stop::kMark) << "verb " << verb;
    const Fates after = Recover(last, &copy).fates;
    for (const std::string& image : torn) {
      SCOPED_TRACE(absl::StrCat("verb ", verb, ", image ", images++));
      Recovered recovered = Recover(image, &copy);
      ExpectBetween(before, recovered.fates, after);
      ExpectAllComesBack(&recovered);
      if (HasFatalFailure()) break;
    }
    ASSERT_EQ(Continue(child, PTRACE_CONT), Stop::kMark) << "verb " << verb;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  EXPECT_GT(images, 300u) << "the verbs did too little to say anything";
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
  BlockRecord& record(size_t block) { return table_.view().records[Index(blocks_[block].id)]; }

  Table table_, copy_, third_;
  std::unique_ptr<BlockPool> pool_;
  Holder session_{};
  std::vector<BlockRef> blocks_;
};

TEST_F(DamagedTableTest, ADamagedBlockThatIsHeldStaysWithItsHolder) {
  record(2).key[3] ^= 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.dropped, 1u);
  EXPECT_EQ(recovered.found.held, 2u);
  EXPECT_EQ(recovered.found.quarantined, 1u);
  EXPECT_EQ(recovered.pool->Find(Key("c")), kNullRef);
  EXPECT_EQ(recovered.pool->Find(Key("b")), blocks_[1]);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, ADamagedBlockThatNobodyHoldsIsFree) {
  Release(2);
  record(2).key[3] ^= 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.dropped, 1u);
  EXPECT_EQ(recovered.found.quarantined, 0u);
  ExpectAllComesBack(&recovered);
}

TEST_F(DamagedTableTest, ALinkToABlockThatIsGoneIsCut) {
  Release(0);
  record(0).generation += 1;
  Recovered recovered = Recover(table_.Image(), &copy_);
  EXPECT_EQ(recovered.found.dropped, 1u);
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
  EXPECT_EQ(recovered.found.dropped, 0u);
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
  EXPECT_EQ(recovered.found.dropped, 0u);
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
  EXPECT_EQ(recovered.found.dropped, 1u);
  EXPECT_EQ(recovered.pool->Find(Key("b")), blocks_[1]);
  ExpectAllComesBack(&recovered);
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

TEST_F(DamagedTableTest, ATurnThatIsTooLargeToBeUndoneIsSaidToBe) {
  // Many more stores than the log of so small a pool has room for.
  for (uint32_t i = 0; i < 8192 + 4 * kBlocks; ++i) {
    Verdict verdict;
    pool_->Ref(session_, {&blocks_[0], 1}, {&verdict, 1});
    pool_->Release(session_, 1001, {&blocks_[0], 1}, {&verdict, 1});
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

}  // namespace
}  // namespace kvpool
