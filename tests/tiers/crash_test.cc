// The process ends at any write: whatever the next one finds in the folder is whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "server/tiers/file_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

constexpr uint64_t kDiskBytes = 1 << 20;
// A prime, so that sanitizers see every kind of write.
constexpr uint64_t kStride = KVPOOL_SANITIZED ? 29 : 1;

// The process ends within its n-th change of the disk: half of that is done, and nothing behind it.
class DyingIo final : public FileIo {
 public:
  explicit DyingIo(uint64_t last) : left_(last) {}
  absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at) override {
    const uint64_t left = Step();
    if (left > 1) return FileIo::Write(fd, data, bytes, at);
    if (left == 1) FileIo::Write(fd, data, bytes / 2 / 512 * 512, at).IgnoreError();
    return absl::UnavailableError("the process has ended");
  }
  absl::Status Allocate(int fd, uint64_t bytes) override {
    const uint64_t left = Step();
    if (left > 1) return FileIo::Allocate(fd, bytes);
    if (left == 1) FileIo::Allocate(fd, bytes / 2).IgnoreError();
    return absl::UnavailableError("the process has ended");
  }
  absl::Status Zero(int fd, uint64_t bytes, uint64_t at) override {
    const uint64_t left = Step();
    if (left > 1) return FileIo::Zero(fd, bytes, at);
    if (left == 1) FileIo::Zero(fd, bytes / 2, at).IgnoreError();
    return absl::UnavailableError("the process has ended");
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Step() > 1 ? FileIo::Rename(from, to) : absl::UnavailableError("the process has ended");
  }
  absl::Status Remove(const std::string& path) override {
    return Step() > 1 ? FileIo::Remove(path) : absl::UnavailableError("the process has ended");
  }
  bool ended() const { return left_ == 0; }

 private:
  uint64_t Step() {
    uint64_t left = left_;
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1)) {
    }
    return left;
  }
  std::atomic<uint64_t> left_;
};

std::unique_ptr<FileTier> Open(const TierFolder& folder, FileIo* io) {
  // With one thread the writes come in one order.
  auto tier = FileTier::Open({.path = folder.path(), .capacity_bytes = kDiskBytes, .threads = 1, .io = io});
  return tier.ok() ? *std::move(tier) : nullptr;
}

// Fills files, evicts from them, takes a file for another size, stores again what was evicted.
void Live(FileTier* tier) {
  Store(tier, Numbers(110));
  Load(tier, Numbers(5));
  Store(tier, Numbers(60, 200));
  Store(tier, Numbers(2, 300), 60000);
  tier->Erase(OwnerOf(1), {});
  Store(tier, Numbers(20, 20));
}

TEST(Crash, AtEveryWrite) {
  bool ended = true;
  uint64_t writes = 0;
  for (uint64_t last = 1; ended; last += kStride) {
    TierFolder folder(TierFolder::On::kMemory);  // A kill takes nothing from the page cache either.
    DyingIo dying(last);
    if (const auto tier = Open(folder, &dying)) {
      Live(tier.get());
    }
    ended = dying.ended();
    writes = last;
    const auto next = Open(folder, nullptr);
    ASSERT_NE(next, nullptr) << "after write " << last;
    const TierUsage found = next->usage();
    ASSERT_LE(found.bytes, kDiskBytes) << "after write " << last;
    Loaded all = Load(next.get(), Numbers(110));
    ASSERT_EQ(all.wrong, 0) << "after write " << last;
    uint64_t right = all.right;
    all = Load(next.get(), Numbers(60, 200));
    ASSERT_EQ(all.wrong, 0) << "after write " << last;
    right += all.right;
    all = Load(next.get(), Numbers(2, 300), 60000);
    ASSERT_EQ(all.wrong, 0) << "after write " << last;
    right += all.right;
    // What its records name was written whole, as no write was lost.
    ASSERT_EQ(right, found.values) << "after write " << last;
    ASSERT_EQ(next->usage().counters.corrupt, 0) << "after write " << last;
    if ((last - 1) / kStride % 50 == 0) {
      Live(next.get());
      ASSERT_EQ(Load(next.get(), Numbers(20, 20)).right, 20) << "after write " << last;
    }
    // Whether the process ended within an erasure or not, the next one leaves no byte.
    ASSERT_TRUE(next->Erase(OwnerOf(0), {}).complete && next->Erase(OwnerOf(1), {}).complete);
    for (const std::string& path : folder.Segments()) {
      std::ifstream file(path, std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      ASSERT_EQ(bytes.find_first_not_of('\0', kTierPageBytes), std::string::npos)
          << path << " after write " << last;
      std::ifstream records(Segment::RecordsPath(path), std::ios::binary);
      const std::string named{std::istreambuf_iterator<char>(records), {}};
      ASSERT_FALSE(named.empty()) << path << " after write " << last;
      ASSERT_EQ(named.find_first_not_of('\0'), std::string::npos) << path << " after write " << last;
    }
  }
  EXPECT_GT(writes, 400);
}

}  // namespace
}  // namespace kvpool
