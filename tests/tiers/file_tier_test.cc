// What a file tier finds in its folder, and what a disk does to it.
#include "server/tiers/file_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/tiers/crc32c.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kTierBytes = 4 << 20;

std::unique_ptr<FileTier> Open(const TierFolder& folder, uint64_t capacity = kTierBytes,
                               FileIo* io = nullptr) {
  auto tier = FileTier::Open({.path = folder.path(),
                              .capacity_bytes = capacity,
                              .io = io,
                              .pause_after_error = std::chrono::milliseconds(0)});
  EXPECT_TRUE(tier.ok()) << tier.status();
  return *std::move(tier);
}

// Inverts one byte of a file.
void Damage(const std::string& path, uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 0xff);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

// Some value of this owner lies in the folder, with a record or without.
bool HasBytesOf(const TierFolder& folder, uint32_t owner) {
  for (const std::string& path : folder.Segments()) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    for (uint32_t number = owner; number < 10; number += 2) {
      if (bytes.find(std::string(ValueOf(number)->data(), 64)) != std::string::npos) return true;
    }
  }
  return false;
}

TEST(Crc32c, PublishedVectors) {
  // RFC 3720, B.4.
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  std::string rising;
  for (char c = 0; c < 32; ++c) rising.push_back(c);
  EXPECT_EQ(Crc32c(rising.data(), 32), 0x46dd794eu);
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c("6789", 4, Crc32c("12345", 5)), 0xe3069283u);
}

TEST(Crc32c, TablesAndTheInstructionAgree) {
  std::string bytes;
  for (uint32_t i = 0; i < 30000; ++i) bytes.push_back(static_cast<char>(i * i * 131 >> 3));
  // From 6 KiB on it sums three parts at once, again and again.
  for (const size_t least : {0, 6 << 10, 12 << 10, 24 << 10}) {
    for (size_t begin = 0; begin < 9; ++begin) {
      for (size_t size = least - std::min<size_t>(least, 100); size < least + 200; ++size) {
        const char* const at = bytes.data() + begin;
        EXPECT_EQ(Crc32c(at, size, 77), Crc32cByTables(at, size, 77)) << begin << " " << size;
      }
    }
  }
}

TEST(FileTier, TheNextDaemonFindsWhatThisOneStored) {
  TierFolder folder;
  Store(Open(folder).get(), Numbers(50));
  const auto again = Open(folder);
  EXPECT_EQ(again->usage().values, 50);
  EXPECT_EQ(Load(again.get(), Numbers(50)).right, 50);
}

TEST(FileTier, ErasedBytesAreGoneAlsoThoseThatAnEvictedValueLeft) {
  TierFolder folder;
  const auto tier = Open(folder);
  Store(tier.get(), Numbers(2 * kTierBytes / kValueBytes));
  ASSERT_GT(tier->usage().counters.evicted, 0);
  const uint64_t values = tier->usage().values;
  const TierErased even = tier->Erase(OwnerOf(0), {});
  const TierErased odd = tier->Erase(OwnerOf(1), {});
  EXPECT_EQ(even.values + odd.values, values);
  EXPECT_EQ(even.bytes + odd.bytes, values * kValueBytes);
  EXPECT_EQ(even.remains + odd.remains, "");
  ASSERT_FALSE(folder.Segments().empty());
  for (const std::string& path : folder.Segments()) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(bytes.find_first_not_of('\0', kTierPageBytes), std::string::npos) << path;
    std::ifstream records(Segment::RecordsPath(path), std::ios::binary);
    const std::string named{std::istreambuf_iterator<char>(records), {}};
    EXPECT_FALSE(named.empty());
    EXPECT_EQ(named.find_first_not_of('\0'), std::string::npos) << path;
  }
}

TEST(FileTier, WhatCanNotBeWipedIsSaidAndWipedByTheNextCall) {
  class Failing final : public FileIo {
   public:
    absl::Status Zero(int fd, uint64_t bytes, uint64_t at) override {
      return broken ? absl::UnavailableError("broken") : FileIo::Zero(fd, bytes, at);
    }
    bool broken = true;
  } io;
  TierFolder folder;
  const auto tier = Open(folder, kTierBytes, &io);
  Store(tier.get(), Numbers(10));
  const TierErased erased = tier->Erase(OwnerOf(0), {});
  EXPECT_EQ(erased.values, 0);
  EXPECT_EQ(erased.failed, 5);
  EXPECT_THAT(erased.remains, HasSubstr("broken"));
  EXPECT_FALSE(erased.complete);
  EXPECT_EQ(tier->CountOf(OwnerOf(0)).value_or(99), 0) << "nobody finds them all the same";
  EXPECT_TRUE(HasBytesOf(folder, 0));
  io.broken = false;
  const TierErased again = tier->Erase(OwnerOf(0), {});
  EXPECT_TRUE(again.complete) << again.remains;
  EXPECT_FALSE(HasBytesOf(folder, 0));
  EXPECT_TRUE(HasBytesOf(folder, 1)) << "another's";
}

TEST(FileTier, FilesThatItLeavesAloneAreNamedByAnErasure) {
  TierFolder folder;
  Store(Open(folder).get(), Numbers(10));
  // It opens no links.
  const std::string path = folder.Segments().at(0), elsewhere = folder.path() + "/elsewhere";
  std::filesystem::rename(path, elsewhere);
  std::filesystem::create_symlink(elsewhere, path);
  const auto tier = Open(folder);
  EXPECT_EQ(tier->usage().values, 0);
  TierErased erased = tier->Erase(OwnerOf(0), {});
  EXPECT_FALSE(erased.complete);
  EXPECT_THAT(erased.remains, HasSubstr("1 files that could not be read"));
  EXPECT_THAT(erased.remains, HasSubstr(path));
  std::filesystem::remove(path);
  erased = tier->Erase(OwnerOf(0), {});
  EXPECT_TRUE(erased.complete) << erased.remains;
}

TEST(FileTier, AFileThatCanNotBeRemovedKeepsItsValues) {
  class Failing final : public FileIo {
   public:
    absl::Status Remove(const std::string& path) override {
      return broken ? absl::UnavailableError("broken") : FileIo::Remove(path);
    }
    std::atomic<bool> broken = false;
  } io;
  TierFolder folder;
  const auto tier = Open(folder, kTierBytes, &io);
  Store(tier.get(), Numbers(2 * kTierBytes / kValueBytes));
  const uint64_t values = tier->usage().values;
  io.broken = true;
  EXPECT_THAT(Store(tier.get(), Numbers(10, 5000), 100000), Each(TierResult::kFull));
  EXPECT_EQ(tier->usage().values, values);
  uint64_t bytes = 0;
  for (const std::string& path : folder.Segments()) bytes += std::filesystem::file_size(path);
  EXPECT_LE(bytes, kTierBytes);
}

// Another's value takes the place of an erased one, and can't be written: what was there is overwritten all the same.
TEST(FileTier, ASlotThatIsTakenAndNotWrittenIsWipedToo) {
  class Failing final : public FileIo {
   public:
    absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at) override {
      // Whoever erases writes zeros, where there are no holes.
      if (!broken || bytes < kTierPageBytes || std::this_thread::get_id() == eraser) {
        return FileIo::Write(fd, data, bytes, at);
      }
      arrived.count_down();
      wiped.wait();
      return absl::UnavailableError("broken");
    }
    absl::Status Read(int fd, void* data, uint64_t bytes, uint64_t at) override {
      // Whoever erases knows which slots are free, and has not taken them yet.
      if (auto now = std::exchange(on_read, nullptr)) now();
      return FileIo::Read(fd, data, bytes, at);
    }
    absl::Status Sync(int fd) override {
      if (broken && !wiped.try_wait()) wiped.count_down();
      return FileIo::Sync(fd);
    }
    std::atomic<bool> broken = false;
    std::function<void()> on_read;
    const std::thread::id eraser = std::this_thread::get_id();
    std::latch arrived{1}, wiped{1};
  } io;
  TierFolder folder;
  const auto tier = Open(folder, kTierBytes, &io);
  Store(tier.get(), Numbers(10));
  io.on_read = [&] {
    io.broken = true;
    tier->Store({{KeyOf(101), ValueOf(101)}}, [](size_t, TierResult) {});
    io.arrived.wait();
  };
  EXPECT_TRUE(tier->Erase(OwnerOf(0), {}).complete);
  tier->Drain();
  EXPECT_FALSE(HasBytesOf(folder, 0));
  EXPECT_TRUE(HasBytesOf(folder, 1));
}

TEST(FileTier, ValuesOfAnEarlierVersionAreNobodys) {
  TierFolder folder;
  const auto tier = Open(folder);
  TierKey key = KeyOf(7);
  key.owner = {};
  tier->Store({{key, ValueOf(7)}}, [](size_t, TierResult) {});
  tier->Drain();
  EXPECT_THAT(tier->Erase(OwnerOf(0), {}).remains, HasSubstr("1 values of an earlier version"));
  EXPECT_EQ(Load(tier.get(), {7}).right, 1);
}

TEST(FileTier, OneDaemonAtATime) {
  TierFolder folder;
  const auto first = Open(folder);
  EXPECT_TRUE(
      absl::IsAlreadyExists(FileTier::Open({.path = folder.path(), .capacity_bytes = kTierBytes}).status()));
}

TEST(FileTier, RefusesACapacityBelowTheLeast) {
  TierFolder folder;
  EXPECT_THAT(FileTier::Open({.path = folder.path(), .capacity_bytes = 1000}).status().ToString(),
              HasSubstr("--tier: capacity is 1000 bytes; must be at least 1048576"));
}

TEST(FileTier, ASmallerCapacityKeepsWhatWasWrittenLast) {
  TierFolder folder;
  const uint32_t many = kTierBytes / 8192 - 40;
  {
    const auto tier = Open(folder);
    Store(tier.get(), {0});  // Its threads store a batch in any order.
    Store(tier.get(), Numbers(many - 1, 1));
  }
  const auto smaller = Open(folder, kTierBytes / 4);
  EXPECT_LE(smaller->usage().bytes, kTierBytes / 4);
  EXPECT_GT(smaller->usage().values, 0);
  EXPECT_EQ(Load(smaller.get(), {many - 1}).right, 1);
  EXPECT_EQ(Load(smaller.get(), {0}).right, 0);
}

TEST(FileTier, TheNextDaemonKnowsWhatWasUsed) {
  TierFolder folder;
  uint32_t values = 0;
  {
    const auto tier = Open(folder);
    for (uint32_t i = 0; tier->usage().counters.evicted == 0; ++i) Store(tier.get(), {i});
    values = static_cast<uint32_t>(tier->usage().values);
    const auto old = Numbers(values / 4, 10);
    EXPECT_EQ(Load(tier.get(), old).right, old.size());
  }
  const auto again = Open(folder);
  Store(again.get(), Numbers(values / 2, 100'000));
  EXPECT_EQ(Load(again.get(), Numbers(values / 4, 10)).right, values / 4);
}

TEST(FileTier, EveryByteOfARecordAndOfAValueMatters) {
  TierFolder folder;
  Store(Open(folder).get(), {1});
  const std::string segment = folder.Segments().at(0), records = Segment::RecordsPath(segment);
  const auto lost = [&](const std::string& path, uint64_t at) {
    Damage(path, at);
    const auto tier = Open(folder);
    const Loaded loaded = Load(tier.get(), {1});
    const bool corrupt = loaded.results[0] == TierResult::kCorrupt;
    if (corrupt) {
      EXPECT_EQ(tier->usage().counters.corrupt, 1);
      EXPECT_EQ(tier->usage().values, 0) << "it is found again";
    }
    const bool gone = loaded.right == 0 && loaded.wrong == 0;
    Store(tier.get(), {1});
    return gone && (corrupt == (path == segment));
  };
  for (uint64_t at = 0; at < 128; at += 3) EXPECT_TRUE(lost(records, at)) << at;
  for (uint64_t at = 4096; at < 4096 + kValueBytes; at += 501) EXPECT_TRUE(lost(segment, at)) << at;
  EXPECT_TRUE(lost(segment, 4096 + kValueBytes - 1));
}

TEST(FileTier, AFileOfAnotherVersionIsDropped) {
  for (const uint64_t at : {0u, 8u, 12u, 16u, 24u}) {
    TierFolder folder;
    Store(Open(folder).get(), {1});
    Damage(folder.Segments().at(0), at);
    const auto tier = Open(folder);
    EXPECT_EQ(tier->usage().values, 0) << at;
    EXPECT_THAT(Store(tier.get(), {1}), Each(TierResult::kDone)) << at;
  }
}

TEST(FileTier, AFileThatWasCutIsDropped) {
  TierFolder folder;
  Store(Open(folder).get(), {1});
  std::filesystem::resize_file(folder.Segments().at(0), 6000);
  EXPECT_EQ(Open(folder)->usage().values, 0);
}

TEST(FileTier, SlotsWithoutTheirRecordsAreDropped) {
  for (const bool cut : {false, true}) {
    TierFolder folder;
    Store(Open(folder).get(), {1});
    const std::string records = Segment::RecordsPath(folder.Segments().at(0));
    if (cut) {
      std::filesystem::resize_file(records, 128);
    } else {
      std::filesystem::remove(records);
    }
    const auto tier = Open(folder);
    EXPECT_EQ(tier->usage().values, 0);
    EXPECT_TRUE(folder.Segments().empty());
    EXPECT_FALSE(std::filesystem::exists(records));
    EXPECT_THAT(Store(tier.get(), {1}), Each(TierResult::kDone));
  }
}

TEST(FileTier, RecordsWithoutTheirSlotsAreRemoved) {
  TierFolder folder;
  Store(Open(folder).get(), {1});
  const std::string segment = folder.Segments().at(0), copy = folder.path() + "/00.records";
  std::filesystem::copy(Segment::RecordsPath(segment), copy);
  std::filesystem::remove(segment);
  Open(folder);
  EXPECT_FALSE(std::filesystem::exists(Segment::RecordsPath(segment)));
  EXPECT_TRUE(std::filesystem::exists(copy)) << "the tier never had such a file";
}

TEST(FileTier, ARecordOfAnotherSlotIsNone) {
  TierFolder folder;
  Store(Open(folder).get(), {1, 2});
  std::fstream file(Segment::RecordsPath(folder.Segments().at(0)),
                    std::ios::in | std::ios::out | std::ios::binary);
  std::string record(128, '\0');
  file.seekg(0);
  file.read(record.data(), 128);
  file.seekp(128);
  file.write(record.data(), 128);
  file.close();
  const auto tier = Open(folder);
  EXPECT_EQ(tier->usage().values, 1);
  EXPECT_EQ(Load(tier.get(), {1, 2}).wrong, 0);
}

class BadDisk final : public FileIo {
 public:
  absl::Status Allocate(int fd, uint64_t bytes) override {
    return full ? absl::ResourceExhaustedError("no space left") : FileIo::Allocate(fd, bytes);
  }
  absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at) override {
    if (full && bytes >= kTierPageBytes) return absl::ResourceExhaustedError("no space left");
    return broken ? absl::UnavailableError("input/output error") : FileIo::Write(fd, data, bytes, at);
  }
  absl::Status Read(int fd, void* data, uint64_t bytes, uint64_t at) override {
    return broken ? absl::UnavailableError("input/output error") : FileIo::Read(fd, data, bytes, at);
  }
  std::atomic<bool> full{false}, broken{false};
};

TEST(FileTier, ADiskThatIsFullIsNoFault) {
  TierFolder folder;
  BadDisk disk;
  const auto tier = Open(folder, kTierBytes, &disk);
  disk.full = true;
  EXPECT_THAT(Store(tier.get(), Numbers(3)), Each(TierResult::kFull));
  disk.full = false;
  EXPECT_THAT(Store(tier.get(), Numbers(3)), Each(TierResult::kDone));
  disk.full = true;
  EXPECT_THAT(Store(tier.get(), Numbers(3, 10)), Each(TierResult::kFull));
  EXPECT_EQ(Load(tier.get(), Numbers(3)).right, 3);
  EXPECT_EQ(tier->usage().values, 3);
  EXPECT_EQ(tier->usage().counters.full, 6);
}

// It has room for so many files of slots.
class SmallDisk final : public FileIo {
 public:
  absl::Status Allocate(int fd, uint64_t bytes) override {
    if (bytes < kTierBytes / 32) return FileIo::Allocate(fd, bytes);
    if (files == 0) return absl::ResourceExhaustedError("no space left");
    --files;
    return FileIo::Allocate(fd, bytes);
  }
  absl::Status Remove(const std::string& path) override {
    if (path.ends_with(".slots")) ++files;
    return FileIo::Remove(path);
  }
  std::atomic<int> files{2};
};

TEST(FileTier, OnAFullDiskANewSizeGetsTheFileOfAnother) {
  TierFolder folder;
  SmallDisk disk;
  const auto tier = FileTier::Open({.path = folder.path(), .capacity_bytes = kTierBytes, .io = &disk});
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_THAT(Store(tier->get(), Numbers(50)), Each(TierResult::kDone));
  EXPECT_EQ(disk.files, 0);
  EXPECT_THAT(Store(tier->get(), {1000}, 3 * kTierPageBytes), ElementsAre(TierResult::kDone));
  EXPECT_GT(Load(tier->get(), Numbers(50)).right, 0) << "one file is enough";
}

// Some of its sectors can't be written: those of the first value that it is given.
class BadSectors final : public FileIo {
 public:
  absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at) override {
    uint64_t none = 0;
    if (bytes >= kTierPageBytes) bad_.compare_exchange_strong(none, at);
    if (at != 0 && at == bad_) return absl::UnavailableError("input/output error");
    return FileIo::Write(fd, data, bytes, at);
  }

 private:
  std::atomic<uint64_t> bad_{0};
};

TEST(FileTier, ABadSectorIsNotTheNextOneToo) {
  TierFolder folder;
  BadSectors disk;
  const auto tier =
      FileTier::Open({.path = folder.path(), .capacity_bytes = kTierBytes, .threads = 1, .io = &disk});
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_THAT(Store(tier->get(), {0}), ElementsAre(TierResult::kFailed));
  EXPECT_THAT(Store(tier->get(), Numbers(20)), Each(TierResult::kDone));
}

TEST(FileTier, AFolderThatOthersMayWriteToIsRefused) {
  TierFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0770), 0);
  const auto tier = FileTier::Open({.path = folder.path(), .capacity_bytes = kTierBytes});
  EXPECT_TRUE(absl::IsPermissionDenied(tier.status())) << tier.status();
}

TEST(FileTier, ACopyOfAFileIsLeftAlone) {
  TierFolder folder;
  Store(Open(folder, kTierBytes, nullptr).get(), Numbers(3));
  const std::string copy = folder.path() + "/00.slots";
  std::filesystem::copy(folder.path() + "/0.slots", copy);
  const auto tier = Open(folder, kTierBytes, nullptr);
  EXPECT_EQ(Load(tier.get(), Numbers(3)).right, 3);
  EXPECT_EQ(tier->usage().values, 3);
  EXPECT_TRUE(std::filesystem::exists(copy));
}

TEST(FileTier, ADiskThatFailsIsAMissAndNoMore) {
  TierFolder folder;
  BadDisk disk;
  const auto tier = Open(folder, kTierBytes, &disk);
  Store(tier.get(), Numbers(4));
  disk.broken = true;
  EXPECT_THAT(Load(tier.get(), {0, 1}).results, Each(TierResult::kFailed));
  EXPECT_THAT(Store(tier.get(), {8, 9}), Each(TierResult::kFailed));
  disk.broken = false;
  EXPECT_THAT(Load(tier.get(), {2, 3}).results, Each(TierResult::kDone));
  EXPECT_THAT(Load(tier.get(), {0, 8}).results, ElementsAre(TierResult::kMiss, TierResult::kMiss));
  EXPECT_THAT(Store(tier.get(), {0, 8}), Each(TierResult::kDone));
  EXPECT_EQ(tier->usage().counters.failed, 4);
}

TEST(FileTier, AFileThatCannotBeReadIsLeftAlone) {
  TierFolder folder;
  BadDisk disk;
  Store(Open(folder).get(), Numbers(4));
  disk.broken = true;
  {
    const auto tier = Open(folder, kTierBytes, &disk);
    ASSERT_NE(tier, nullptr);
    EXPECT_EQ(tier->usage().values, 0);
    disk.broken = false;
    EXPECT_THAT(Store(tier.get(), Numbers(4, 10)), Each(TierResult::kDone));
  }
  const auto again = Open(folder);
  EXPECT_EQ(Load(again.get(), Numbers(4)).right, 4);
  EXPECT_EQ(Load(again.get(), Numbers(4, 10)).right, 4);
}

}  // namespace
}  // namespace kvpool
