// A daemon that ends without a word, and the next one, with one keeper: what it finds, and what it refuses.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/base/shared_memory.h"
#include "server/space/kept_facts.h"
#include "server/space/slab_places.h"
#include "server/space/space_table.h"
#include "tests/service/other_table.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

// Which space a kept thing is of.
uint64_t SpaceOf(const KeptThing& thing) {
  KeptSlab slab{};
  KeptMember member{};
  if (ReadFacts(thing.facts, &slab)) return slab.space;
  if (ReadFacts(thing.facts, &member)) return member.space;
  const auto table = SpaceTable::Map(UniqueFd(fcntl(thing.fd.get(), F_DUPFD_CLOEXEC, 0)));
  return table.ok() ? (*table)->space() : 0;
}

TEST_F(RecoveryTest, SealedBlocksAreCachedAndHeldOnesStayUntilTheirProcessEnds) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<std::string> keys = Keys("k", 6);
  const std::vector<uint64_t> blocks = engine->Lease(8);
  ASSERT_EQ(blocks.size(), 8u);
  engine->Seal({blocks.begin(), blocks.begin() + 6}, keys);
  engine->Release({blocks.begin() + 2, blocks.begin() + 6});
  EXPECT_EQ(Recovery().start(), "nothing_kept");
  const std::string seed = engine->opened.hash_seed();
  const uint64_t session = engine->opened.session();
  engine.reset();

  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Start().ok());
    daemon_->HousekeepOnce();
    const v1::StateCounts counts = Blocks();
    EXPECT_EQ(counts.cached(), 4u);
    EXPECT_EQ(counts.sealed(), 2u);
    EXPECT_EQ(counts.leased(), 3u) << "two leases and the sink";
    const v1::RecoveredSpace found = RecoveredSpace();
    EXPECT_EQ(found.cached_blocks(), 4u);
    EXPECT_EQ(found.held_blocks(), 2u);
    EXPECT_EQ(found.quarantined_blocks(), 0u);
    EXPECT_TRUE(found.dropped_blocks().empty()) << found.ShortDebugString();
    EXPECT_EQ(found.sessions_waiting(), 1u);
    EXPECT_GT(found.seconds(), 0);
  }
  Sleeper other;
  auto second = Open(other.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  EXPECT_EQ(second->opened.hash_seed(), seed);
  EXPECT_GT(second->opened.session(), session) << "its pages of holds would be taken for the old one's";
  EXPECT_EQ(second->Match(keys).groups(0).blocks_size(), 6);
  process.Kill();
  daemon_->HousekeepOnce();
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.quarantined(), 0u);
  EXPECT_EQ(counts.sealed(), 6u);
}

TEST_F(RecoveryTest, WhoeverLooksAtADaemonThatHandsOverFindsAllInPlace) {
  ASSERT_TRUE(Start().ok());
  std::atomic<bool> over = false;
  std::thread scrape([&] {
    while (!over) EXPECT_EQ(daemon_->Snapshot().devices.size(), 1u);
  });
  daemon_->EndThreads();
  EXPECT_EQ(daemon_->Snapshot().device_operations.size(), 1u);
  over = true;
  scrape.join();
}

TEST_F(RecoveryTest, AnOpeningThatNoSlabHelpsMakesNone) {
  options_.max_sessions = 2;
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto holder = Open(process.credentials());
  ASSERT_NE(holder, nullptr) << opened_;
  const uint64_t before = daemon_->Snapshot().devices[0].used_bytes();
  // Each that is gone has a block charged to it, which another holds.
  int opened = 0;
  for (; opened < 100; ++opened) {
    auto engine = Open(process.credentials());
    if (engine == nullptr) break;
    const std::vector<std::string> keys = Keys(absl::StrCat("k", opened), 1);
    engine->Seal(engine->Lease(1), keys);
    EXPECT_EQ(holder->Match(keys).groups(0).blocks_size(), 1);
    engine->Do(CloseOp());
  }
  ASSERT_LT(opened, 100);
  EXPECT_THAT(std::string(opened_.message()), HasSubstr("sessions are in the pool, all there can be"));
  EXPECT_EQ(daemon_->Snapshot().devices[0].used_bytes(), before);
}

class OtherVersionTest : public RecoveryTest {
 protected:
  // A daemon that sealed 6 blocks, of which its engine holds 2, and ended.
  void LeaveState() {
    ASSERT_TRUE(Start().ok());
    auto engine = Open(process_.credentials());
    ASSERT_NE(engine, nullptr) << opened_;
    const std::vector<uint64_t> blocks = engine->Lease(6);
    ASSERT_EQ(blocks.size(), 6u);
    engine->Seal(blocks, Keys("k", 6));
    engine->Release({blocks.begin() + 2, blocks.end()});
    engine.reset();
    End();
  }
  void ExpectAllThere() {
    const v1::StateCounts counts = Blocks();
    EXPECT_EQ(counts.cached(), 4u);
    EXPECT_EQ(counts.sealed(), 2u);
  }
  void ExpectRefused(uint32_t version) {
    const absl::Status started = Start();
    EXPECT_EQ(started.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(started.message()),
                HasSubstr(absl::StrCat("of version ", version, "; this kvpoold reads versions ",
                                       kOldestTableRead, " to ", kSpaceTableVersion)));
  }

  Sleeper process_;
};

TEST_F(OtherVersionTest, OneWithoutRoomForSumsSaysThatTheyAreForgotten) {
  options_.verify = true;
  LeaveState();
  ASSERT_TRUE(Start().ok());
  EXPECT_FALSE(RecoveredSpace().forgets_sums());
  daemon_->VerifyOnce(0);
  End();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kOldestTableRead, kOldestTableRead); });
  testing::internal::CaptureStderr();
  ASSERT_TRUE(Start().ok());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("sums of content end with this daemon"));
  EXPECT_TRUE(RecoveredSpace().forgets_sums());
  EXPECT_EQ(RecoveredSpace().unverified_blocks(), 6u);
}

TEST_F(OtherVersionTest, TheOneBeforeIsReadAndStaysReadableForIt) {
  LeaveState();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kSpaceTableVersion - 1, kSpaceTableVersion - 1); });
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Start().ok());
    ExpectAllThere();
    // A program that takes over has to read both: this one, and those of spaces that are made meanwhile.
    const std::vector<TableVersion> tables = daemon_->KeptTables();
    ASSERT_EQ(tables.size(), 2u);
    EXPECT_EQ(tables[0].version, kSpaceTableVersion);
    EXPECT_EQ(tables[1].version, kSpaceTableVersion - 1);
    EXPECT_EQ(tables[1].oldest_reader, kSpaceTableVersion - 1);
    End();
    VisitTable(keeper_, [](const OtherTable& table) { EXPECT_EQ(table.version(), kSpaceTableVersion - 1); });
  }
}

TEST_F(OtherVersionTest, OlderOnesAreRefused) {
  LeaveState();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kOldestTableRead - 1, 0); });
  ExpectRefused(kOldestTableRead - 1);
}

TEST_F(OtherVersionTest, TheNextOneIsReadIfItSaysSoAndIsToldWhoHadIt) {
  LeaveState();
  VisitTable(keeper_, [](OtherTable table) {
    EXPECT_EQ(table.version(), kSpaceTableVersion);
    EXPECT_EQ(table.had_by(), 0u);
    table.Become(kSpaceTableVersion + 1, kSpaceTableVersion);
  });
  ASSERT_TRUE(Start().ok());
  ExpectAllThere();
  End();
  VisitTable(keeper_, [](const OtherTable& table) {
    EXPECT_EQ(table.version(), kSpaceTableVersion + 1);
    EXPECT_EQ(table.had_by(), kSpaceTableVersion);
  });
}

TEST_F(OtherVersionTest, TheNextOneIsRefusedIfItDoesNotSayThatItCanBeRead) {
  LeaveState();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kSpaceTableVersion + 1, kSpaceTableVersion + 1); });
  ExpectRefused(kSpaceTableVersion + 1);
}

TEST_F(OtherVersionTest, OnesFurtherOnAreRefusedWhateverTheySay) {
  LeaveState();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kSpaceTableVersion + 2, kSpaceTableVersion); });
  ExpectRefused(kSpaceTableVersion + 2);
}

TEST_F(OtherVersionTest, AThingThatOneCanDoWithoutIsLetGoAndAnotherStopsTheStart) {
  LeaveState();
  // Keeps one of this kind, and answers how many there were.
  const auto keep = [this](uint16_t kind, int* before) {
    auto link = JoinKeeper(keeper_->Connect());
    ASSERT_TRUE(link.ok()) << link.status();
    for (KeptThing& thing : (*link)->TakeInherited()) {
      *before += static_cast<uint16_t>(thing.kind) == kind ? 1 : 0;
      thing.kept.Forget();
    }
    auto memory = SharedMemory::Make("kvpool-test", 4096);
    ASSERT_TRUE(memory.ok()) << memory.status();
    auto kept = (*link)->Keep(static_cast<KeptKind>(kind), "facts", memory->fd());
    ASSERT_TRUE(kept.ok()) << kept.status();
    kept->Forget();
    (*link)->Leave();
  };
  for (int round = 0; round < 2; ++round) {
    int before = 0;
    keep(kFirstOptionalKind, &before);
    EXPECT_EQ(before, 0) << "the daemon of the round before has let go of it";
    ASSERT_TRUE(Start().ok());
    ExpectAllThere();
    daemon_->HousekeepOnce();
    End();
  }
  int before = 0;
  keep(kFirstOptionalKind - 1, &before);
  const absl::Status started = Start();
  EXPECT_EQ(started.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(started.message()), HasSubstr(absl::StrCat("kind ", kFirstOptionalKind - 1)));
}

// The next daemon is shown another descriptor where that of the table was.
void ReplaceTable(ServedKeeper* keeper, const std::function<UniqueFd(const SharedMemory&)>& replace) {
  auto link = JoinKeeper(keeper->Connect());
  ASSERT_TRUE(link.ok()) << link.status();
  for (KeptThing& thing : (*link)->TakeInherited()) {
    if (thing.kind != KeptKind::kTable) {
      thing.kept.Forget();
      continue;
    }
    const auto table = SharedMemory::Map(std::move(thing.fd));
    ASSERT_TRUE(table.ok()) << table.status();
    auto kept = (*link)->Keep(KeptKind::kTable, thing.facts, replace(*table).get());
    ASSERT_TRUE(kept.ok()) << kept.status();
    kept->Forget();
  }
  (*link)->Flush();
  (*link)->Leave();
}

UniqueFd DupOf(const SharedMemory& memory) { return UniqueFd(fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0)); }

UniqueFd MemoryWith(std::string_view bytes) {
  const auto memory = SharedMemory::Make("a table of a test", bytes.size());
  EXPECT_TRUE(memory.ok()) << memory.status();
  std::copy(bytes.begin(), bytes.end(), memory->data());
  return DupOf(*memory);
}

// What is in use of so small a table, in a file that anybody may shrink.
UniqueFd FileLike(const SharedMemory& table) {
  FILE* const file = tmpfile();
  UniqueFd fd(fcntl(fileno(file), F_DUPFD_CLOEXEC, 0));
  fclose(file);
  EXPECT_EQ(pwrite(fd.get(), table.data(), 1 << 20, 0), 1 << 20);
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(table.bytes())), 0);
  return fd;
}

TEST_F(RecoveryTest, ATableThatIsTornCutShortOrForeignIsLostAndTheDaemonServes) {
  const std::pair<const char*, std::function<UniqueFd(const SharedMemory&)>> tables[] = {
      {"torn",
       [](const SharedMemory& table) {
         table.data()[24] ^= 1;
         return DupOf(table);
       }},
      {"cut short in its header",
       [](const SharedMemory& table) {
         return MemoryWith({table.data(), 16});
       }},
      {"cut short behind it",
       [](const SharedMemory& table) {
         return MemoryWith({table.data(), 65536});
       }},
      {"of something else", [](const SharedMemory&) { return MemoryWith(std::string(1 << 20, 'x')); }},
      {"in a file", FileLike},
  };
  for (const auto& [what, replace] : tables) {
    SCOPED_TRACE(what);
    ServedKeeper own;
    keeper_ = &own;
    const absl::Cleanup end = [this] {
      End();
      keeper_ = &keeper_of_test_;
    };
    ASSERT_TRUE(Start().ok());
    Sleeper process;
    const auto engine = Open(process.credentials());
    ASSERT_NE(engine, nullptr) << opened_;
    engine->Seal(engine->Lease(3), Keys("k", 3));
    End();
    ReplaceTable(keeper_, replace);
    const absl::Status started = Start();
    ASSERT_TRUE(started.ok()) << started;
    EXPECT_TRUE(daemon_->Snapshot().spaces.empty());
    const v1::GetRecoveryResponse recovery = Recovery();
    ASSERT_EQ(recovery.lost_spaces_size(), 1) << recovery.ShortDebugString();
    EXPECT_EQ(recovery.lost_spaces(0).reason(), "damaged");
    EXPECT_NE(recovery.lost_spaces(0).detail(), "");
    EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kNotFound);
    const auto next = Open(process.credentials());
    ASSERT_NE(next, nullptr) << opened_;
    EXPECT_EQ(next->Match(Keys("k", 3)).groups(0).blocks_size(), 0);
  }
}

// A file may have as much here as a slab has, and a table has more.
TEST_F(RecoveryTest, WithoutMemoryForItsTableASpaceIsRefusedUntilThereIsSome) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  const auto first = Open(process.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  digest_ = "another";
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit few = {.rlim_cur = 8 << 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  EXPECT_EQ(Open(process.credentials()), nullptr);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_THAT(std::string(opened_.message()), HasSubstr("ftruncate of a memfd"));
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1u);
  EXPECT_EQ(first->Lease(3).size(), 3u) << "the other goes on";
  EXPECT_NE(Open(process.credentials()), nullptr) << opened_;
}

TEST_F(RecoveryTest, WithoutRoomAtTheKeeperAnOpeningIsRefusedAndNothingOfItStays) {
  size_t refused = 0;
  while (true) {
    ServedKeeper small(1 + refused);  // The link has a page of its own.
    keeper_ = &small;
    const absl::Cleanup end = [this] {
      End();
      keeper_ = &keeper_of_test_;
    };
    ASSERT_TRUE(Start().ok());
    Sleeper process;
    if (Open(process.credentials()) != nullptr) break;
    ++refused;
    SCOPED_TRACE(refused);
    ASSERT_EQ(opened_.code(), absl::StatusCode::kResourceExhausted) << opened_;
    EXPECT_THAT(std::string(opened_.message()), HasSubstr("RLIMIT_NOFILE"));
    daemon_->HousekeepOnce();
    EXPECT_TRUE(daemon_->Snapshot().spaces.empty());
    EXPECT_EQ(daemon_->Snapshot().devices.front().used_bytes(), 0u);
    End();
    small.Await();
    EXPECT_EQ(small.inventory.size(), 1u);
  }
  EXPECT_EQ(refused, 4u) << "a log, a process, a table and a slab";
}

TEST_F(RecoveryTest, WhatWasGivenBackIsGoneAndWhatMovedIsFound) {
  gives_back_ = true;
  options_.give_back_ms = 5000;
  options_.policy = "lru";
  ASSERT_TRUE(Start().ok());
  Sleeper one, two, three;
  auto first = Open(one.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 40; ++i) {
    const v1::LeaseResult lease = first->LeaseAsked(1000, 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    first->MapSlabs();
    daemon_->HousekeepOnce();
  }
  const uint64_t capacity = Blocks().capacity();
  ASSERT_EQ(blocks.size(), capacity - 1);
  for (const uint64_t block : blocks) first->Seal({block}, {Key("k" + std::to_string(IdOf(block)))});
  // The last ones are the hottest.
  std::sort(blocks.begin(), blocks.end(), [](uint64_t a, uint64_t b) { return IdOf(a) > IdOf(b); });
  first->Release(blocks);
  digest_ = "other";
  guaranteed_ = 10;
  const auto second = Open(two.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  ASSERT_GT(first->peer->leaves().size(), 0);
  ASSERT_TRUE(Start().ok());
  v1::ListSpacesResponse spaces;
  ASSERT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  ASSERT_EQ(spaces.spaces_size(), 2);
  const v1::StateCounts counts = spaces.spaces(0).blocks();
  EXPECT_LT(counts.capacity(), capacity);
  EXPECT_EQ(counts.withheld(), 0u);
  const auto again = ComeBack(*first, one.credentials());
  ASSERT_NE(again, nullptr);
  daemon_->HousekeepOnce();
  uint32_t found = 0;
  for (uint64_t id = capacity; id > 1 && found < counts.capacity() - 1; --id) {
    const v1::MatchResult match = again->Match({Key("k" + std::to_string(id))});
    if (match.tokens() == 0) break;
    ++found;
    EXPECT_LE(IdOf(match.groups(0).blocks(0)), counts.capacity());
  }
  EXPECT_GT(found, counts.capacity() * 9 / 10) << "the coldest made room";
  digest_ = "recovery";
  guaranteed_ = 0;
  const auto third = Open(three.credentials());
  ASSERT_NE(third, nullptr) << opened_;
  EXPECT_GT(third->opened.session(), second->opened.session()) << "the daemon's own holds are no session's";
}

TEST_F(RecoveryTest, TheFirstSlabMayBeTheNullBlockAlone) {
  options_.slab_bytes = block_bytes_ = 64 << 10;
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 20 && blocks.size() < 3; ++i) {
    const v1::LeaseResult lease = engine->LeaseAsked(3 - static_cast<uint32_t>(blocks.size()), 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    engine->MapSlabs();
    daemon_->HousekeepOnce();
  }
  ASSERT_EQ(blocks.size(), 3u);
  engine->Seal(blocks, Keys("k", 3));
  engine->Release(blocks);
  const uint64_t capacity = Blocks().capacity();
  engine.reset();
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Start().ok());
    EXPECT_EQ(Blocks().cached(), 3u);
    EXPECT_EQ(Blocks().capacity(), capacity);
  }
}

TEST_F(RecoveryTest, HolesOutliveTheDaemonAndOldRefsStayOld) {
  gives_back_ = takes_holes_ = true;
  options_.give_back_ms = 5000;
  options_.policy = "lru";
  ASSERT_TRUE(Start().ok());
  Sleeper one, two, three;
  auto first = Open(one.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 40; ++i) {
    const v1::LeaseResult lease = first->LeaseAsked(1000, 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    first->MapSlabs();
    daemon_->HousekeepOnce();
  }
  const uint64_t capacity = Blocks().capacity();
  ASSERT_EQ(blocks.size(), capacity - 1);
  std::sort(blocks.begin(), blocks.end(), [](uint64_t a, uint64_t b) { return IdOf(a) < IdOf(b); });
  for (const uint64_t block : blocks) first->Seal({block}, {Key("k" + std::to_string(IdOf(block)))});
  const uint64_t held = blocks.back();
  // The middle is the coldest, and none of the last slab's may go.
  const auto middle = blocks.begin() + static_cast<ptrdiff_t>(blocks.size() / 2);
  first->Release({middle, blocks.end() - 1});
  clock_.Advance(10);
  first->Release({blocks.begin(), middle});
  digest_ = "other";
  guaranteed_ = 10;
  auto second = Open(two.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  ASSERT_EQ(first->peer->leaves().size(), 1u);
  const uint32_t gone = first->peer->leaves()[0].slab();
  const std::vector<v1::Slab> before = first->peer->slabs();
  EXPECT_GT(gone, 0u);
  EXPECT_LT(gone + 1, before.size());
  const v1::Slab hole = before[gone];
  uint64_t old = 0;
  for (const uint64_t block : blocks) {
    if (IdOf(block) == hole.first_block() + 1) old = block;
  }

  // Another daemon finds what is there where it was, whatever it does then, and the next one.
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    Kill();
    ASSERT_TRUE(Start().ok());
    EXPECT_EQ(Recovery().lost_spaces_size(), 0);
    first = ComeBack(*first, one.credentials());
    ASSERT_NE(first, nullptr);
    daemon_->HousekeepOnce();
    ASSERT_EQ(first->peer->slabs().size(), before.size() - 1);
    for (const v1::Slab& slab : first->peer->slabs()) {
      EXPECT_NE(slab.slab(), gone);
      EXPECT_EQ(slab.id(), before[slab.slab()].id());
      EXPECT_EQ(slab.first_block(), before[slab.slab()].first_block());
    }
    const v1::MatchResult match = first->Match({Key("k" + std::to_string(IdOf(held)))});
    ASSERT_EQ(match.tokens(), 16u);
    EXPECT_EQ(match.groups(0).blocks(0), held);
    first->Release({held});
    EXPECT_EQ(first->Release({old}).refused_size(), 1);
    uint32_t found = 0;
    for (const uint64_t block : blocks) {
      const v1::MatchResult other = first->Match({Key("k" + std::to_string(IdOf(block)))});
      if (other.tokens() == 0) continue;
      ++found;
      const uint32_t id = IdOf(other.groups(0).blocks(0));
      EXPECT_FALSE(hole.first_block() <= id && id < hole.first_block() + hole.block_count());
      first->Release({other.groups(0).blocks(0)});
    }
    EXPECT_GT(found, blocks.size() * 8 / 10);
  }

  // The memory comes back, and with it the same blocks in another life.
  two.Kill();
  for (int i = 0; i < 4; ++i) {
    clock_.Advance(70'000);
    daemon_->HousekeepOnce();
  }
  std::vector<uint64_t> all;
  for (int i = 0; i < 40; ++i) {
    const v1::LeaseResult lease = first->LeaseAsked(1000, 1);
    all.insert(all.end(), lease.blocks().begin(), lease.blocks().end());
    first->MapSlabs();
    daemon_->HousekeepOnce();
  }
  const v1::Slab filled = first->peer->slabs().back();
  EXPECT_EQ(filled.slab(), gone);
  EXPECT_EQ(filled.first_block(), hole.first_block());
  EXPECT_NE(filled.id(), hole.id());
  const auto now =
      std::find_if(all.begin(), all.end(), [&](uint64_t block) { return IdOf(block) == IdOf(old); });
  ASSERT_NE(now, all.end());
  EXPECT_NE(*now, old);
  EXPECT_EQ(first->Release({old}).refused_size(), 1) << "it is of before the memory went";
  Kill();
  ASSERT_TRUE(Start().ok());
  first = ComeBack(*first, one.credentials());
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->peer->slabs().size(), before.size()) << "there is no hole any more";
  EXPECT_EQ(first->Release({*now}).refused_size(), 0);
  EXPECT_EQ(first->Release({old}).refused_size(), 1);
}

// A daemon that is killed while a slab is destroyed leaves it with some ranks; while one is made, too.
TEST_F(RecoveryTest, ASlabThatNotAllRanksHaveIsAHole) {
  gives_back_ = takes_holes_ = true;
  options_.give_back_ms = 5000;
  ranks_ = 2;
  ASSERT_TRUE(Start().ok());
  Sleeper one, two;
  auto rank0 = Open(one.credentials());
  ASSERT_NE(rank0, nullptr) << opened_;
  role_.set_rank(1);
  auto rank1 = Join(*rank0, role_, two.credentials());
  ASSERT_NE(rank1, nullptr);
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 40; ++i) {
    rank0->MapSlabs();
    rank1->MapSlabs();
    daemon_->HousekeepOnce();
    const v1::LeaseResult lease = rank0->LeaseAsked(1000, 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
  }
  const std::vector<v1::Slab> before = rank0->peer->slabs();
  ASSERT_GT(before.size(), 3u);
  const uint64_t held = *std::max_element(blocks.begin(), blocks.end(),
                                          [](uint64_t a, uint64_t b) { return IdOf(a) < IdOf(b); });
  std::erase(blocks, held);
  rank0->Release(blocks);
  // Places are kept, as before any slab goes that is not the last.
  const auto drop = [&](uint32_t slab, uint32_t rank) {
    End();
    auto link = JoinKeeper(keeper_->Connect());
    ASSERT_TRUE(link.ok());
    uint64_t space = 0;
    bool places = false;
    for (KeptThing& thing : (*link)->TakeInherited()) {
      KeptSlab kept{};
      places = places || thing.kind == KeptKind::kPlaces;
      if (thing.kind == KeptKind::kSlab && ReadFacts(thing.facts, &kept)) space = kept.space;
      if (thing.kind != KeptKind::kSlab || kept.slab != slab || kept.rank != rank) thing.kept.Forget();
    }
    if (!places) {
      auto memory = SlabPlaces::Make(static_cast<uint32_t>(before.size()) + 1);
      ASSERT_TRUE(memory.ok());
      for (const v1::Slab& of : before) (*memory)->Set(of.slab(), of.first_block());
      auto kept = (*link)->Keep(KeptKind::kPlaces, FactBytes(KeptPlaces{.space = space}), (*memory)->fd());
      ASSERT_TRUE(kept.ok());
      kept->Forget();
    }
    (*link)->Flush();
    (*link)->Leave();
  };
  ASSERT_NO_FATAL_FAILURE(drop(1, 1));
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Recovery().lost_spaces_size(), 0);
  rank0 = ComeBack(*rank0, one.credentials());
  ASSERT_NE(rank0, nullptr);
  rank1 = ComeBack(*rank1, two.credentials());
  ASSERT_NE(rank1, nullptr);
  daemon_->HousekeepOnce();
  for (const Engine* engine : {rank0.get(), rank1.get()}) {
    ASSERT_EQ(engine->peer->slabs().size(), before.size() - 1);
    for (const v1::Slab& slab : engine->peer->slabs()) {
      EXPECT_NE(slab.slab(), 1u);
      EXPECT_EQ(slab.first_block(), before[slab.slab()].first_block());
    }
  }
  EXPECT_EQ(rank0->Release({held}).refused_size(), 0) << "what is behind the hole is as it was";
  // Without its first slab nothing of a space is left.
  ASSERT_NO_FATAL_FAILURE(drop(0, 0));
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().capacity(), 0u);
}

// Else an idle model would lose its share to whoever opens next, after an upgrade of which nobody knows.
TEST_F(RecoveryTest, SharesOutliveTheDaemonAsTheyWereLastSet) {
  options_.access =
      MakeAccess("[rule]\nuid = *\nrole = engine\ntenant = *\nweight = 7\nspace-blocks = 900\n");
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  const auto share = [&](const v1::SetShareRequest& changes, bool keep_guaranteed) {
    v1::ListSpacesResponse spaces;
    EXPECT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
    v1::SetShareRequest request = changes;
    request.set_space(spaces.spaces(0).space());
    request.set_keep_guaranteed(keep_guaranteed);
    v1::SetShareResponse response;
    EXPECT_TRUE(daemon_->SetShare(request, &response).ok());
    return response;
  };
  const uint64_t limit_of_rule = share({}, true).limit_blocks();
  Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(share({}, true).weight(), 7) << "the rule's";
  EXPECT_EQ(share({}, true).limit_blocks(), limit_of_rule);
  for (const uint32_t blocks : {11u, 12u, 0u}) {
    v1::SetShareRequest request;
    request.set_guaranteed_blocks(blocks);
    request.set_weight(blocks);
    request.set_limit_blocks(40 * blocks);
    const v1::SetShareResponse set = share(request, false);
    Kill();
    ASSERT_TRUE(Start().ok());
    const v1::SetShareResponse kept = share({}, true);
    EXPECT_EQ(kept.guaranteed_blocks(), blocks);
    EXPECT_EQ(kept.weight(), set.weight());
    EXPECT_EQ(kept.limit_blocks(), set.limit_blocks());
  }
}

TEST_F(RecoveryTest, ClassesOutliveTheDaemon) {
  const auto rules = [](const std::string& priority) {
    return MakeAccess("[rule]\nuid = *\nrole = engine\ntenant = *\npriority = " + priority + "\n");
  };
  options_.access = rules("interactive");
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const auto priority = [this] { return daemon_->Snapshot().spaces.at(0).priority; };
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_INTERACTIVE);
  const auto set = [this](v1::PriorityClass to) {
    v1::SetShareRequest request;
    request.set_space(daemon_->Snapshot().spaces.at(0).space);
    request.set_keep_guaranteed(true);
    request.set_priority_class(to);
    v1::SetShareResponse response;
    EXPECT_TRUE(daemon_->SetShare(request, &response).ok());
    EXPECT_EQ(response.priority_class(), daemon_->Snapshot().spaces.at(0).priority);
  };
  Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_INTERACTIVE);
  set(v1::PRIORITY_CLASS_BATCH);
  Kill();
  options_.access = rules("standard");
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_BATCH) << "the operator's";
  set(v1::PRIORITY_CLASS_UNSPECIFIED);
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_STANDARD) << "the rule's of now";
  // A build that knows no classes keeps its own shares: nothing of before is taken for theirs.
  set(v1::PRIORITY_CLASS_BATCH);
  Kill();
  ASSERT_NO_FATAL_FAILURE(VisitTable(keeper_, [](OtherTable table) { table.KeepSharesAsBefore(5); }));
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_STANDARD);
  set(v1::PRIORITY_CLASS_BATCH);
  const uint32_t weight = daemon_->Snapshot().spaces.at(0).weight;
  Kill();
  ASSERT_NO_FATAL_FAILURE(VisitTable(keeper_, [&](OtherTable table) {
    EXPECT_EQ(table.KeptWeight(), weight);
    for (int i = 0; i < 2; ++i) table.KeepSharesAsBefore(weight);
  }));
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(priority(), v1::PRIORITY_CLASS_STANDARD) << "the same numbers, of another build";
}

// Rules change while no daemon is there, or while the space is idle: it hears of that without an opening.
TEST_F(RecoveryTest, RulesThatChangedMeanwhileCount) {
  const auto rules = [](const std::string& name, int weight) {
    return MakeAccess("[" + name + "]\nuid = *\nrole = engine\ntenant = *\nweight = " +
                      std::to_string(weight) + "\nspace-blocks = 900\n");
  };
  options_.access = rules("rule", 7);
  ASSERT_TRUE(Start().ok());
  {
    Sleeper process;
    auto engine = Open(process.credentials());
    ASSERT_NE(engine, nullptr) << opened_;
    engine->Release(engine->Lease(3));
    const std::vector<uint64_t> blocks = engine->Lease(3);
    engine->Seal(blocks, Keys("k", 3));
    engine->Release(blocks);
    Kill();
  }
  const auto weight = [this] { return daemon_->Snapshot().spaces.at(0).weight; };
  options_.access = rules("rule", 8);
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(weight(), 8);
  options_.access->Replace(MakePolicy(
      "[other]\nuid = *\nrole = engine\ntenant = *\n[rule]\nuid = 4242\nrole = engine\ntenant = a\n"));
  daemon_->ApplyRules();
  EXPECT_EQ(weight(), 8) << "the rule is not for its tenant any more";
  Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(weight(), 8);
  options_.access = rules("rule", 9);
  Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(weight(), 9);
  // A build that knows no names of rules keeps its own shares, and those end what was kept beside them.
  Kill();
  ASSERT_NO_FATAL_FAILURE(VisitTable(keeper_, [](OtherTable table) {
    EXPECT_EQ(table.KeptWeight(), 9u);
    table.KeepSharesAsBefore(5);
  }));
  options_.access = rules("rule", 10);
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(weight(), 5) << "of whichever rule that was";
}

// Whoever comes back last has not opened last.
TEST_F(RecoveryTest, TheLastOpeningsRuleCountsWhoeverComesBack) {
  options_.access = MakeAccess(
      "[first]\nuid = 1000\nrole = engine\ntenant = t\nweight = 2\n"
      "[second]\nuid = 1001\nrole = engine\ntenant = t\nweight = 9\npriority = interactive\n");
  tenant_ = "t";
  ASSERT_TRUE(Start().ok());
  Sleeper one, two;
  const auto first = Open(one.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  PeerCredentials seconds = two.credentials();
  seconds.uid = 1001;
  const auto second = Open(seconds);
  ASSERT_NE(second, nullptr) << opened_;
  Kill();
  ASSERT_TRUE(Start().ok());
  ASSERT_NE(ComeBack(*second, seconds), nullptr);
  ASSERT_NE(ComeBack(*first, one.credentials()), nullptr);
  const auto space = daemon_->Snapshot().spaces.at(0);
  EXPECT_EQ(space.weight, 9);
  EXPECT_EQ(space.priority, v1::PRIORITY_CLASS_INTERACTIVE);
}

// A pinned system prompt is worth most when everybody comes back at once.
TEST_F(RecoveryTest, WhatWasPinnedStaysPinned) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(3);
  engine->Seal(blocks, Keys("k", 3));
  ASSERT_EQ(engine->Do(PinOp({blocks[1]}, 60000)).pin().refused_size(), 0);
  engine->Release(blocks);
  engine.reset();
  process.Kill();
  ASSERT_TRUE(Start().ok());
  const auto evicted = [&] {
    v1::EvictResponse response;
    v1::EvictRequest request;
    EXPECT_TRUE(daemon_->Evict(request, &response).ok());
    return response.evicted();
  };
  EXPECT_EQ(daemon_->Snapshot().spaces[0].pinned, 2u) << "the block and the one in front of it";
  EXPECT_EQ(evicted(), 1u) << "the one behind it";
  clock_.Advance(60001);
  daemon_->HousekeepOnce();
  EXPECT_EQ(daemon_->Snapshot().spaces[0].pinned, 0u);
  EXPECT_EQ(evicted(), 2u);
}

TEST_F(RecoveryTest, ASpaceThatHasOtherSizesTodayIsLostAndNothingElse) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  options_.slab_bytes *= 2;
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().capacity(), 0u);
  const v1::GetRecoveryResponse recovery = Recovery();
  ASSERT_EQ(recovery.lost_spaces_size(), 1) << recovery.ShortDebugString();
  EXPECT_EQ(recovery.lost_spaces(0).space(), 1u);
  EXPECT_EQ(recovery.lost_spaces(0).reason(), "settings");
  EXPECT_EQ(recovery.lost_spaces(0).sealed_blocks(), 3u);
  EXPECT_EQ(recovery.lost_spaces(0).sessions(), 1u);
  EXPECT_THAT(recovery.lost_spaces(0).detail(), HasSubstr("with the settings of today"));
  daemon_->HousekeepOnce();
  End();
  keeper_->Await();
  EXPECT_EQ(keeper_->inventory.size(), 1u) << "its memory is held for nobody, but for the link's own page";
}

TEST_F(RecoveryTest, ASpaceWithoutItsSlabsIsLostAndSaysSo) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  End();
  {
    auto link = JoinKeeper(keeper_->Connect());
    ASSERT_TRUE(link.ok());
    for (KeptThing& thing : (*link)->TakeInherited()) {
      if (thing.kind != KeptKind::kSlab) thing.kept.Forget();
    }
    (*link)->Flush();
    (*link)->Leave();
  }
  ASSERT_TRUE(Start().ok());
  ASSERT_EQ(Recovery().lost_spaces_size(), 1);
  EXPECT_EQ(Recovery().lost_spaces(0).reason(), "damaged");
  EXPECT_EQ(Recovery().lost_spaces(0).sealed_blocks(), 3u);
}

// What is beyond a share that has become less is given back, and not lost.
TEST_F(RecoveryTest, ASpaceAboveItsTenantsShareGoesOn) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  End();
  options_.tenant_share = 0.01;
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Recovery().lost_spaces_size(), 0);
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1);
  EXPECT_EQ(daemon_->Snapshot().sessions_open, 1);
}

TEST_F(RecoveryTest, AStartThatFindsWhatItMayNotUseSaysWhy) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  ASSERT_NE(Open(process.credentials()), nullptr) << opened_;
  link_->Distrust();  // It has lost a GPU.
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Recovery().start(), "gpu_lost");
  ASSERT_NE(Open(process.credentials()), nullptr) << opened_;
  End();
  auto link = KeeperLink::Join(keeper_->Connect());
  ASSERT_TRUE(link.ok() && (*link)->Trust("GPU-1").ok()) << link.status();
  EXPECT_EQ((*link)->cold(), ColdStart::kOtherDevices);
}

TEST_F(RecoveryTest, TheFirstAnswerIsTimed) {
  ASSERT_TRUE(Start().ok());
  options_.began_ms = clock_.NowMs();
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  EXPECT_EQ(Recovery().first_answer_seconds(), 0);
  clock_.Advance(250);
  engine->Lease(1);
  clock_.Advance(250);
  engine->Lease(1);
  EXPECT_EQ(Recovery().first_answer_seconds(), 0.25);
}

TEST_F(RecoveryTest, ADaemonThatWentOnAloneLeavesNothingToTheNext) {
  ASSERT_TRUE(Start().ok());
  Sleeper known, unknown;
  auto first = Open(known.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  const std::vector<std::string> keys = Keys("k", 4);
  first->Seal(first->Lease(4), keys);
  keeper_->Cut();
  // The keeper lives, and hears nothing of this member: what it holds would be anybody's.
  auto second = Open(unknown.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  ASSERT_EQ(second->Lease(8).size(), 8u);
  first.reset();
  second.reset();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().capacity(), 0u) << "the blocks of a living process are free";
  EXPECT_EQ(Recovery().start(), "went_alone");
  // It keeps again, for the one after it.
  first = Open(known.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  first->Seal(first->Lease(4), keys);
  first.reset();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().sealed(), 4u);
}

TEST_F(RecoveryTest, OfTwoSpacesWithOneKeyTheNewerIsTakenAndTheOlderGoes) {
  // One that was being closed is there beside its successor.
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("old", 3));
  engine.reset();
  End();
  ServedKeeper other;
  keeper_ = &other;
  digest_ = "another";
  ASSERT_TRUE(Start().ok());
  engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  digest_ = "recovery";
  auto second = Open(process.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  ASSERT_EQ(second->opened.space(), 2u);
  second->Seal(second->Lease(5), Keys("new", 5));
  engine.reset();
  second.reset();
  End();
  {
    keeper_ = &keeper_of_test_;
    auto from = *JoinKeeper(other.Connect());
    auto to = *JoinKeeper(keeper_->Connect());
    for (KeptThing& thing : from->TakeInherited()) {
      if (SpaceOf(thing) != 2) continue;
      auto kept = to->Keep(thing.kind, thing.facts, thing.fd.get());
      ASSERT_TRUE(kept.ok()) << kept.status();
      kept->Forget();
    }
    from->Leave();
    to->Leave();
  }
  ASSERT_TRUE(Start().ok());
  v1::ListSpacesResponse spaces;
  ASSERT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  ASSERT_EQ(spaces.spaces_size(), 1);
  EXPECT_EQ(spaces.spaces(0).space(), 2u);
  EXPECT_EQ(spaces.spaces(0).blocks().sealed(), 5u);
  const v1::GetRecoveryResponse recovery = Recovery();
  ASSERT_EQ(recovery.lost_spaces_size(), 1) << recovery.ShortDebugString();
  EXPECT_EQ(recovery.lost_spaces(0).space(), 1u);
  EXPECT_EQ(recovery.lost_spaces(0).reason(), "superseded");
  // What the older one had in the budget can be had again.
  EXPECT_EQ(daemon_->Snapshot().devices.front().used_bytes(), spaces.spaces(0).bytes());
}

TEST_F(RecoveryTest, ARecoveredSpaceIsItsTenants) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  tenant_ = "red";
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  engine.reset();
  ASSERT_TRUE(Start().ok());
  v1::ListSpacesResponse spaces;
  ASSERT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  ASSERT_EQ(spaces.spaces_size(), 1);
  EXPECT_EQ(spaces.spaces(0).tenant(), "red@1000");
  engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  EXPECT_EQ(engine->Match(Keys("k", 3)).groups(0).blocks_size(), 3);
}

TEST(SpaceTableTest, ASpaceWithMorePagesOfHoldsThanCanBeNumberedIsRefused) {
  SpaceFacts facts;
  facts.hash_seed = std::string(32, 's');
  facts.geometry.max_blocks = UINT32_MAX;
  const auto table = SpaceTable::Make(facts, {}, 4096);
  EXPECT_EQ(table.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(table.status().message()), HasSubstr("max_space_bytes"));
}

}  // namespace
}  // namespace kvpool
