// The contract of every device (cuda/device.h), tested on the one that KVPOOL_TEST_DEVICE names. Memory is
// passed to other processes over a real socket, and these are killed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/device/peer.h"
#include "tests/device/test_device_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

constexpr size_t kCapacityBytes = size_t{256} << 20;
constexpr uint64_t kWord = 0x0123456789abcdef;

class DeviceContract : public TestDeviceTest {
 protected:
  DeviceContract() : TestDeviceTest(kCapacityBytes) {}
  void SetUp() override {
    TestDeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    granule_ = device().granularity_bytes();
  }

  std::unique_ptr<Slab> MakeSlab(size_t bytes) {
    absl::StatusOr<std::unique_ptr<Slab>> slab = device().MakeSlab(bytes);
    EXPECT_TRUE(slab.ok()) << slab.status();
    return slab.ok() ? std::move(*slab) : nullptr;
  }
  static UniqueFd Export(const Slab& slab) {
    absl::StatusOr<UniqueFd> fd = slab.Export();
    EXPECT_TRUE(fd.ok()) << fd.status();
    return fd.ok() ? std::move(*fd) : UniqueFd();
  }
  std::unique_ptr<MemberMemory> Reserve(const MemberMemoryOptions& options) {
    absl::StatusOr<std::unique_ptr<MemberMemory>> member = test_device_->Reserve(options);
    EXPECT_TRUE(member.ok()) << member.status();
    return member.ok() ? std::move(*member) : nullptr;
  }
  static std::unique_ptr<DevicePeer> StartPeer() {
    absl::StatusOr<std::unique_ptr<DevicePeer>> peer = DevicePeer::Start();
    EXPECT_TRUE(peer.ok()) << peer.status();
    return peer.ok() ? std::move(*peer) : nullptr;
  }
  uint64_t Read(uint64_t address) {
    const absl::StatusOr<uint64_t> word = test_device_->Read(address);
    EXPECT_TRUE(word.ok()) << word.status();
    return word.value_or(~uint64_t{0});
  }
  void Write(uint64_t address, uint64_t word) {
    const absl::Status status = test_device_->Write(address, word);
    EXPECT_TRUE(status.ok()) << status;
  }

  bool IsZero(const Slab& slab) {
    std::vector<uint64_t> words(slab.bytes() / sizeof(uint64_t));
    EXPECT_TRUE(test_device_->ReadAll(slab.address(), absl::MakeSpan(words)).ok());
    return std::all_of(words.begin(), words.end(), [](uint64_t word) { return word == 0; });
  }
  bool IsOutOfReach(uint64_t address);

  size_t granule_ = 0;
};

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST_F(DeviceContract, SaysWhatItIs) {
  EXPECT_FALSE(device().name().empty());
  EXPECT_GE(granule_, size_t{2} << 20);
  EXPECT_GT(device().total_bytes(), 0u);
  const absl::StatusOr<size_t> free_bytes = device().free_bytes();
  ASSERT_TRUE(free_bytes.ok()) << free_bytes.status();
  EXPECT_LE(*free_bytes, device().total_bytes());
  if (device().id() == "host") {
    EXPECT_EQ(device().uuid_bytes(), "");
  } else {
    EXPECT_EQ(device().uuid_bytes().size(), 16u);
    EXPECT_EQ(device().id().size(), std::string("GPU-8c0d1f5e-0000-0000-0000-000000000000").size());
  }
}

TEST_F(DeviceContract, SlabsAreZeroedAlsoWhenTheirMemoryWasUsedBefore) {
  for (int round = 0; round < 3; ++round) {
    const std::unique_ptr<Slab> slab = MakeSlab(4 * granule_);
    ASSERT_NE(slab, nullptr);
    EXPECT_EQ(slab->bytes(), 4 * granule_);
    EXPECT_TRUE(IsZero(*slab));
    for (size_t offset = 0; offset < slab->bytes(); offset += granule_ / 64) {
      Write(slab->address() + offset, kWord);
    }
    EXPECT_FALSE(IsZero(*slab));
  }
}

TEST_F(DeviceContract, MemoryWithAnIpcHandleIsZeroedToo) {
  if (!test_device_->makes_ipc_slabs()) GTEST_SKIP() << "this device has no IPC slabs";
  for (int round = 0; round < 3; ++round) {
    const absl::StatusOr<std::unique_ptr<Slab>> slab = device().MakeIpcSlab(2 * granule_);
    ASSERT_TRUE(slab.ok()) << slab.status();
    EXPECT_TRUE(IsZero(**slab));
    for (size_t offset = 0; offset < (*slab)->bytes(); offset += granule_ / 64) {
      Write((*slab)->address() + offset, kWord);
    }
  }
}

TEST_F(DeviceContract, SizesThatAreNoMultipleOfTheGranularityAreRefused) {
  for (const size_t bytes : {size_t{0}, size_t{1}, granule_ - 1, granule_ + 4096}) {
    ExpectStatus(device().MakeSlab(bytes).status(), absl::StatusCode::kInvalidArgument,
                 std::to_string(bytes));
  }
}

TEST_F(DeviceContract, OutOfMemorySaysHowMuchWasAskedAndHowMuchIsFree) {
  const size_t bytes = (device().total_bytes() / granule_ + 1) * granule_;
  const absl::Status status = device().MakeSlab(bytes).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, std::to_string(bytes) + " bytes asked");
  EXPECT_THAT(std::string(status.message()), HasSubstr("free"));
  // The refusals cost no memory.
  EXPECT_NE(MakeSlab(granule_), nullptr);
}

TEST_F(DeviceContract, MemberInAnotherProcessSeesTheSameBytesAtTheSameOffset) {
  const std::unique_ptr<Slab> first = MakeSlab(2 * granule_);
  const std::unique_ptr<Slab> second = MakeSlab(granule_);
  const std::unique_ptr<DevicePeer> peer = StartPeer();
  ASSERT_TRUE(peer->Reserve({.reserve_bytes = 8 * granule_}).ok());
  ASSERT_TRUE(peer->Map(Export(*first), 0, 2 * granule_).ok());
  ASSERT_TRUE(peer->Map(Export(*second), 2 * granule_, granule_).ok());
  // In both directions, at both ends of both slabs.
  Write(first->address() + 2 * granule_ - 8, 1);
  Write(second->address(), 2);
  EXPECT_EQ(peer->Read(2 * granule_ - 8).value(), 1u);
  EXPECT_EQ(peer->Read(2 * granule_).value(), 2u);
  ASSERT_TRUE(peer->Write(0, 3).ok());
  ASSERT_TRUE(peer->Write(3 * granule_ - 8, 4).ok());
  EXPECT_EQ(Read(first->address()), 3u);
  EXPECT_EQ(Read(second->address() + granule_ - 8), 4u);
}

TEST_F(DeviceContract, TwoMembersShareWithoutTheOwnerTouchingAnything) {
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<DevicePeer> writer = StartPeer();
  const std::unique_ptr<DevicePeer> reader = StartPeer();
  for (DevicePeer* peer : {writer.get(), reader.get()}) {
    ASSERT_TRUE(peer->Reserve({.reserve_bytes = granule_}).ok());
    ASSERT_TRUE(peer->Map(Export(*slab), 0, granule_).ok());
  }
  ASSERT_TRUE(writer->Write(4096, kWord).ok());
  EXPECT_EQ(reader->Read(4096).value(), kWord);
}

TEST_F(DeviceContract, MemoryOutlivesTheProcessThatMadeIt) {
  const std::unique_ptr<DevicePeer> owner = StartPeer();
  absl::StatusOr<UniqueFd> fd = owner->MakeSlab(granule_);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ASSERT_TRUE(owner->Write(64, kWord).ok());
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(std::move(*fd), 0, granule_).ok());
  owner->Kill();
  EXPECT_EQ(Read(member->base() + 64), kWord);
  Write(member->base() + 64, kWord + 1);
  EXPECT_EQ(Read(member->base() + 64), kWord + 1);
}

TEST_F(DeviceContract, AnOpenFdAloneHoldsTheMemory) {
  const std::unique_ptr<DevicePeer> owner = StartPeer();
  absl::StatusOr<UniqueFd> fd = owner->MakeSlab(granule_);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ASSERT_TRUE(owner->Write(64, kWord).ok());
  owner->Kill();
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(std::move(*fd), 0, granule_).ok());
  EXPECT_EQ(Read(member->base() + 64), kWord);
}

TEST_F(DeviceContract, ASlabOfAProcessThatHasEndedIsAdoptedAndHandedOverAgain) {
  const std::unique_ptr<DevicePeer> owner = StartPeer();
  absl::StatusOr<UniqueFd> fd = owner->MakeSlab(granule_);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ASSERT_TRUE(owner->Write(64, kWord).ok());
  owner->Kill();
  absl::StatusOr<std::unique_ptr<Slab>> slab = device().AdoptSlab(std::move(*fd), granule_);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ((*slab)->bytes(), granule_);
  EXPECT_EQ(Read((*slab)->address() + 64), kWord);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(Export(**slab), 0, granule_).ok());
  Write((*slab)->address() + 128, kWord + 1);
  EXPECT_EQ(Read(member->base() + 128), kWord + 1);
  slab->reset();
  EXPECT_EQ(Read(member->base() + 64), kWord);
}

TEST_F(DeviceContract, WhatIsNoSlabOfThatSizeIsNotAdopted) {
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  EXPECT_FALSE(device().AdoptSlab(Export(*slab), 2 * granule_).ok());
  EXPECT_FALSE(device().AdoptSlab(Export(*slab), granule_ / 2).ok());
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd pipe_out(pipe_ends[1]);
  EXPECT_FALSE(device().AdoptSlab(UniqueFd(pipe_ends[0]), granule_).ok());
  EXPECT_TRUE(device().AdoptSlab(Export(*slab), granule_).ok());
}

TEST_F(DeviceContract, TheOwnerDoesNotNoticeAMembersDeath) {
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<DevicePeer> member = StartPeer();
  ASSERT_TRUE(member->Reserve({.reserve_bytes = granule_}).ok());
  ASSERT_TRUE(member->Map(Export(*slab), 0, granule_).ok());
  ASSERT_TRUE(member->Write(128, kWord).ok());
  member->Kill();
  EXPECT_EQ(Read(slab->address() + 128), kWord);
}

TEST_F(DeviceContract, ASlabThatItsOwnerGaveUpStaysWithTheMember) {
  std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(Export(*slab), 0, granule_).ok());
  Write(slab->address(), kWord);
  slab.reset();
  EXPECT_EQ(Read(member->base()), kWord);
}

// What a forked child of an engine still maps, or a peer kept open, costs no memory and shows nothing.
TEST_F(DeviceContract, HostMemoryThatIsDiscardedIsGoneWhoeverKeptIt) {
  std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  const UniqueFd kept = Export(*slab);
  ASSERT_TRUE(member->MapSlab(Export(*slab), 0, granule_).ok());
  Write(slab->address(), kWord);
  slab->Discard();
  EXPECT_EQ(Read(member->base()), kWord) << "whoever still holds the slab may read it";
  slab.reset();
  if (device().id() != "host") {
    EXPECT_EQ(Read(member->base()), kWord) << "a GPU's stays";
    return;
  }
  struct stat status;
  ASSERT_EQ(::fstat(kept.get(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_EQ(Read(member->base()), 0u);
}

TEST_F(DeviceContract, FdsOfTheWrongKindAreRefusedAndClosed) {
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  UniqueFd pipe_out(pipe_ends[1]);
  // The end of the pipe that is handed over does not count.
  const size_t fds_before = CountOpenFds() - 1;
  const std::vector<int> wrong = {
      pipe_ends[0],
      ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0),
      ::open("/dev/null", O_RDWR | O_CLOEXEC),
      ::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC),
      ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC),
  };
  for (const int fd : wrong) {
    ASSERT_GE(fd, 0);
    ExpectStatus(member->MapSlab(UniqueFd(fd), 0, granule_), absl::StatusCode::kInvalidArgument, "slab fd");
  }
  ExpectStatus(member->MapSlab(UniqueFd(), 0, granule_), absl::StatusCode::kInvalidArgument, "slab fd");
  EXPECT_EQ(CountOpenFds(), fds_before);
  // After the refusals the range can still be mapped.
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  EXPECT_TRUE(member->MapSlab(Export(*slab), 0, granule_).ok());
}

TEST_F(DeviceContract, FdsOfTheWrongSizeAreRefused) {
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 8 * granule_});
  const std::unique_ptr<Slab> slab = MakeSlab(2 * granule_);
  ExpectStatus(member->MapSlab(Export(*slab), 0, 3 * granule_), absl::StatusCode::kInvalidArgument,
               std::to_string(3 * granule_));
  if (device().id() == "host") {
    // A GPU's driver does not tell the size of an fd's memory: only a size above it is refused.
    ExpectStatus(member->MapSlab(Export(*slab), 0, granule_), absl::StatusCode::kInvalidArgument,
                 std::to_string(granule_));
  }
  EXPECT_TRUE(member->MapSlab(Export(*slab), 0, 2 * granule_).ok());
}

TEST_F(DeviceContract, RangesOutsideTheReservationOrInUseAreRefused) {
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 4 * granule_});
  const std::unique_ptr<Slab> slab = MakeSlab(2 * granule_);
  const size_t far = ~size_t{0} / granule_ * granule_;
  for (const size_t offset : {size_t{1}, size_t{4096}, 3 * granule_, 4 * granule_, far, far - granule_}) {
    ExpectStatus(member->MapSlab(Export(*slab), offset, 2 * granule_), absl::StatusCode::kInvalidArgument,
                 std::to_string(offset));
  }
  ASSERT_TRUE(member->MapSlab(Export(*slab), granule_, 2 * granule_).ok());
  Write(slab->address(), kWord);
  for (const size_t offset : {size_t{0}, granule_, 2 * granule_}) {
    ExpectStatus(member->MapSlab(Export(*slab), offset, 2 * granule_), absl::StatusCode::kInvalidArgument,
                 "is mapped at offset");
  }
  EXPECT_EQ(Read(member->base() + granule_), kWord);
}

TEST_F(DeviceContract, ReservationsMustBeWhole) {
  for (const size_t bytes : {size_t{0}, size_t{4096}, granule_ + 1}) {
    ExpectStatus(test_device_->Reserve({.reserve_bytes = bytes}).status(), absl::StatusCode::kInvalidArgument,
                 "reserve_bytes");
  }
  // More addresses than a process has.
  EXPECT_FALSE(test_device_->Reserve({.reserve_bytes = ~size_t{0} / granule_ * granule_}).ok());
}

TEST_F(DeviceContract, WarmupWritesNeverReachTheSlabs) {
  const std::unique_ptr<Slab> before = MakeSlab(granule_);
  const std::unique_ptr<Slab> after = MakeSlab(granule_);
  Write(before->address(), kWord);
  // Scratch of 2 granules for 5: it is mapped three times, the last time in part.
  const std::unique_ptr<MemberMemory> member =
      Reserve({.reserve_bytes = 5 * granule_, .warmup_scratch = true, .scratch_bytes = 2 * granule_});
  ASSERT_TRUE(member->MapSlab(Export(*before), 0, granule_).ok());
  for (size_t offset = 0; offset < 5 * granule_; offset += granule_) Write(member->base() + offset, 0xdead);
  Write(member->base() + 5 * granule_ - 8, 0xdead);
  EXPECT_EQ(Read(before->address()), kWord);
  ExpectStatus(member->MapSlab(Export(*before), 0, granule_), absl::StatusCode::kInvalidArgument,
               "is mapped at offset");

  const uint64_t base = member->base();
  ASSERT_TRUE(member->FinishWarmup().ok());
  EXPECT_EQ(member->base(), base);
  EXPECT_EQ(Read(base), kWord);
  ASSERT_TRUE(member->MapSlab(Export(*after), granule_, granule_).ok());
  EXPECT_EQ(Read(base + granule_), 0u);
  ExpectStatus(member->FinishWarmup(), absl::StatusCode::kFailedPrecondition, "not warming up");
}

TEST_F(DeviceContract, SlabsHeldBackDuringWarmupOutliveTheirOwner) {
  const std::unique_ptr<DevicePeer> owner = StartPeer();
  absl::StatusOr<UniqueFd> fd = owner->MakeSlab(granule_);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ASSERT_TRUE(owner->Write(8, kWord).ok());
  const std::unique_ptr<MemberMemory> member =
      Reserve({.reserve_bytes = 2 * granule_, .warmup_scratch = true, .scratch_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(std::move(*fd), granule_, granule_).ok());
  owner->Kill();
  ASSERT_TRUE(member->FinishWarmup().ok());
  EXPECT_EQ(Read(member->base() + granule_ + 8), kWord);
}

// Whether an address can't be read. The system says so of the host's addresses, instead of raising a signal, if it is the one to
// read them.
bool DeviceContract::IsOutOfReach(uint64_t address) {
  if (device().id() != "host") return !test_device_->Read(address).ok();
  int pipe_ends[2];
  EXPECT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd out(pipe_ends[0]);
  const UniqueFd in(pipe_ends[1]);
  return ::write(in.get(), reinterpret_cast<void*>(address), 8) < 0 && errno == EFAULT;
}

// Whether an address holds kWord. It may not be mapped, so write() reads it, which fails with EFAULT instead
// of a signal. A mapped address proves nothing: a child's runtime may have mapped memory of its own there.
bool HoldsWord(uint64_t address, const int* pipe_ends) {
  uint64_t word = 0;
  return ::write(pipe_ends[1], reinterpret_cast<void*>(address), sizeof word) == sizeof word &&
         ::read(pipe_ends[0], &word, sizeof word) == sizeof word && word == kWord;
}

TEST_F(DeviceContract, ASlabThatIsUnmappedIsOutOfReachAndAnotherTakesItsPlace) {
  const std::unique_ptr<Slab> stays = MakeSlab(granule_);
  const std::unique_ptr<Slab> goes = MakeSlab(2 * granule_);
  const std::unique_ptr<Slab> comes = MakeSlab(2 * granule_);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 4 * granule_});
  ASSERT_TRUE(member->MapSlab(Export(*stays), 0, granule_).ok());
  ASSERT_TRUE(member->MapSlab(Export(*goes), granule_, 2 * granule_).ok());
  const uint64_t base = member->base();
  Write(base, kWord);
  Write(base + granule_, kWord + 1);
  Write(comes->address(), kWord + 2);

  ASSERT_TRUE(member->UnmapSlab(granule_, 2 * granule_).ok());
  EXPECT_EQ(member->base(), base);
  EXPECT_EQ(member->reserved_bytes(), 4 * granule_);
  EXPECT_EQ(Read(base), kWord);
  EXPECT_TRUE(IsOutOfReach(base + granule_));
  EXPECT_TRUE(IsOutOfReach(base + 3 * granule_ - 8));
  EXPECT_EQ(Read(goes->address()), kWord + 1) << "its owner has it still";

  const absl::Status mapped = member->MapSlab(Export(*comes), granule_, 2 * granule_);
  ASSERT_TRUE(mapped.ok()) << mapped;
  EXPECT_EQ(Read(base + granule_), kWord + 2);
  Write(base + granule_ + 8, kWord + 3);
  EXPECT_EQ(Read(comes->address() + 8), kWord + 3);
  EXPECT_EQ(Read(goes->address() + 8), 0u);
}

TEST_F(DeviceContract, WhatIsUnmappedStaysReserved) {
  if (device().id() != "host") GTEST_SKIP() << "about host memory: a GPU's driver gives no addresses away";
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 3 * granule_});
  ASSERT_TRUE(member->MapSlab(Export(*slab), granule_, granule_).ok());
  ASSERT_TRUE(member->UnmapSlab(granule_, granule_).ok());
  void* const address = reinterpret_cast<void*>(member->base() + granule_);
  void* const other = ::mmap(address, granule_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(other, MAP_FAILED);
  EXPECT_NE(other, address);
  EXPECT_EQ(::munmap(other, granule_), 0);
}

TEST_F(DeviceContract, OnlyWhatIsMappedIsUnmapped) {
  const std::unique_ptr<Slab> slab = MakeSlab(2 * granule_);
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 4 * granule_});
  ASSERT_TRUE(member->MapSlab(Export(*slab), granule_, 2 * granule_).ok());
  Write(slab->address(), kWord);
  const size_t far = ~size_t{0} / granule_ * granule_;
  for (const size_t offset : {size_t{0}, size_t{1}, 2 * granule_, 3 * granule_, 4 * granule_, far}) {
    ExpectStatus(member->UnmapSlab(offset, 2 * granule_), absl::StatusCode::kInvalidArgument,
                 std::to_string(offset));
  }
  for (const size_t bytes : {size_t{0}, granule_, 3 * granule_, far}) {
    ExpectStatus(member->UnmapSlab(granule_, bytes), absl::StatusCode::kInvalidArgument,
                 "has " + std::to_string(2 * granule_) + " bytes");
  }
  EXPECT_EQ(Read(member->base() + granule_), kWord);
  ASSERT_TRUE(member->UnmapSlab(granule_, 2 * granule_).ok());
  ExpectStatus(member->UnmapSlab(granule_, 2 * granule_), absl::StatusCode::kInvalidArgument,
               "no slab is mapped there");
}

TEST_F(DeviceContract, ASlabHeldBackDuringWarmupIsForgotten) {
  const std::unique_ptr<Slab> stays = MakeSlab(granule_);
  const std::unique_ptr<Slab> comes = MakeSlab(granule_);
  const std::unique_ptr<MemberMemory> member =
      Reserve({.reserve_bytes = 3 * granule_, .warmup_scratch = true, .scratch_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(Export(*stays), 0, granule_).ok());
  {
    const std::unique_ptr<Slab> goes = MakeSlab(granule_);
    ASSERT_TRUE(member->MapSlab(Export(*goes), granule_, granule_).ok());
    ASSERT_TRUE(member->UnmapSlab(granule_, granule_).ok());
  }
  Write(member->base() + granule_, 0xdead);  // The scratch is still there.
  Write(stays->address(), kWord);
  Write(comes->address(), kWord + 1);
  ASSERT_TRUE(member->MapSlab(Export(*comes), granule_, granule_).ok());
  ASSERT_TRUE(member->FinishWarmup().ok());
  EXPECT_EQ(Read(member->base()), kWord);
  EXPECT_EQ(Read(member->base() + granule_), kWord + 1);
  EXPECT_TRUE(IsOutOfReach(member->base() + 2 * granule_));
}

TEST_F(DeviceContract, UnmappedSlabsLeaveNothingBehind) {
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = 2 * granule_});
  // The host device's capacity goes through it twice.
  const size_t rounds = device().id() == "host" ? 2 * kCapacityBytes / granule_ : 64;
  size_t fds = 0, mappings = 0;
  for (size_t round = 0; round < rounds; ++round) {
    std::unique_ptr<Slab> slab = MakeSlab(granule_);
    ASSERT_NE(slab, nullptr) << round;
    ASSERT_TRUE(member->MapSlab(Export(*slab), granule_, granule_).ok());
    Write(member->base() + granule_, kWord);
    const absl::Status unmapped = member->UnmapSlab(granule_, granule_);
    ASSERT_TRUE(unmapped.ok()) << unmapped;
    slab.reset();
    if (round > 0) continue;
    fds = CountOpenFds();
    mappings = CountMappings();
  }
  EXPECT_EQ(CountOpenFds(), fds);
  EXPECT_LT(CountMappings(), mappings + 16);
}

TEST_F(DeviceContract, ForkedChildrenDoNotSeeHostMemory) {
  if (device().id() != "host")
    GTEST_SKIP() << "about host memory: a GPU's addresses mean nothing to a forked child";
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd out(pipe_ends[0]);
  const UniqueFd in(pipe_ends[1]);
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  const std::unique_ptr<MemberMemory> member =
      Reserve({.reserve_bytes = granule_, .warmup_scratch = true, .scratch_bytes = granule_});
  ASSERT_TRUE(member->MapSlab(Export(*slab), 0, granule_).ok());
  for (const bool warm : {false, true}) {
    if (warm) {
      ASSERT_TRUE(member->FinishWarmup().ok());
    }
    Write(slab->address(), kWord);
    Write(member->base(), kWord);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(HoldsWord(slab->address(), pipe_ends) + 2 * HoldsWord(member->base(), pipe_ends));
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "after warm-up: " << warm;
    EXPECT_TRUE(HoldsWord(slab->address(), pipe_ends) && HoldsWord(member->base(), pipe_ends));
  }
}

TEST_F(DeviceContract, IpcHandleOpensTheWholeSpace) {
  if (!test_device_->makes_ipc_slabs()) {
    ExpectStatus(device().MakeIpcSlab(granule_).status(), absl::StatusCode::kUnimplemented,
                 "cuda devices only");
    const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
    ExpectStatus(member->MapIpcSlab(IpcHandle{}, granule_), absl::StatusCode::kUnimplemented,
                 "cuda devices only");
    return;
  }
  absl::StatusOr<std::unique_ptr<Slab>> slab = device().MakeIpcSlab(2 * granule_);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ(Read((*slab)->address() + 8), 0u);
  ExpectStatus((*slab)->Export().status(), absl::StatusCode::kFailedPrecondition, "IPC");
  const absl::StatusOr<IpcHandle> handle = (*slab)->ipc_handle();
  ASSERT_TRUE(handle.ok()) << handle.status();
  const std::unique_ptr<DevicePeer> peer = StartPeer();
  ASSERT_TRUE(peer->Reserve({.reserve_bytes = 2 * granule_}).ok());
  const absl::Status mapped = peer->MapIpc(*handle, 2 * granule_);
  ASSERT_TRUE(mapped.ok()) << mapped;
  ASSERT_TRUE(peer->Write(2 * granule_ - 8, kWord).ok());
  EXPECT_EQ(Read((*slab)->address() + 2 * granule_ - 8), kWord);
  Write((*slab)->address(), kWord + 1);
  EXPECT_EQ(peer->Read(0).value(), kWord + 1);
}

TEST_F(DeviceContract, OnlySlabsOfOneKindInOneSpace) {
  if (!test_device_->makes_ipc_slabs()) GTEST_SKIP() << "this device has no IPC slabs";
  const std::unique_ptr<DevicePeer> owner = StartPeer();
  const absl::StatusOr<IpcHandle> handle = owner->MakeIpcSlab(granule_);
  ASSERT_TRUE(handle.ok()) << handle.status();
  const std::unique_ptr<Slab> slab = MakeSlab(granule_);
  ExpectStatus(slab->ipc_handle().status(), absl::StatusCode::kFailedPrecondition, "IPC");

  const std::unique_ptr<MemberMemory> with_slab = Reserve({.reserve_bytes = 2 * granule_});
  ASSERT_TRUE(with_slab->MapSlab(Export(*slab), 0, granule_).ok());
  ExpectStatus(with_slab->MapIpcSlab(*handle, granule_), absl::StatusCode::kFailedPrecondition, "slab");

  const std::unique_ptr<MemberMemory> with_handle = Reserve({.reserve_bytes = 2 * granule_});
  ASSERT_TRUE(with_handle->MapIpcSlab(*handle, granule_).ok());
  EXPECT_EQ(with_handle->reserved_bytes(), granule_);
  ExpectStatus(with_handle->MapSlab(Export(*slab), 0, granule_), absl::StatusCode::kFailedPrecondition,
               "IPC");
  ExpectStatus(with_handle->UnmapSlab(0, granule_), absl::StatusCode::kFailedPrecondition, "IPC");
  ExpectStatus(with_handle->MapIpcSlab(*handle, granule_), absl::StatusCode::kFailedPrecondition, "IPC");
}

TEST_F(DeviceContract, AHandleThatNobodyMadeIsRefused) {
  if (!test_device_->makes_ipc_slabs()) GTEST_SKIP() << "this device has no IPC slabs";
  const std::unique_ptr<MemberMemory> member = Reserve({.reserve_bytes = granule_});
  IpcHandle handle;
  handle.fill(std::byte{0x5a});
  EXPECT_FALSE(member->MapIpcSlab(handle, granule_).ok());
}

TEST_F(DeviceContract, ManySlabsLeaveNothingBehind) {
  constexpr size_t kSlabs = 24;
  size_t fds_after_first_round = 0;
  size_t mappings_after_first_round = 0;
  for (int round = 0; round < 3; ++round) {
    {
      const std::unique_ptr<MemberMemory> member = Reserve(
          {.reserve_bytes = kSlabs * granule_, .warmup_scratch = true, .scratch_bytes = 2 * granule_});
      std::vector<std::unique_ptr<Slab>> slabs;
      for (size_t i = 0; i < kSlabs; ++i) {
        slabs.push_back(MakeSlab(granule_));
        ASSERT_TRUE(member->MapSlab(Export(*slabs.back()), i * granule_, granule_).ok());
        if (i == kSlabs / 2) {
          ASSERT_TRUE(member->FinishWarmup().ok());
        }
      }
    }
    // A device may keep some fds that its first use opened.
    if (round == 0) {
      fds_after_first_round = CountOpenFds();
      mappings_after_first_round = CountMappings();
    }
  }
  EXPECT_EQ(CountOpenFds(), fds_after_first_round);
  // A driver has mappings of its own; a leak of ours would grow with every slab.
  EXPECT_LT(CountMappings(), mappings_after_first_round + kSlabs);
}

TEST_F(DeviceContract, MembersHoldNoFdsOfMappedSlabs) {
  const std::unique_ptr<DevicePeer> peer = StartPeer();
  ASSERT_TRUE(peer->Reserve({.reserve_bytes = 4 * granule_}).ok());
  const uint64_t fds_before = peer->OpenFds().value();
  for (size_t i = 0; i < 4; ++i) {
    const std::unique_ptr<Slab> slab = MakeSlab(granule_);
    ASSERT_TRUE(peer->Map(Export(*slab), i * granule_, granule_).ok());
  }
  EXPECT_EQ(peer->OpenFds().value(), fds_before);
}

}  // namespace
}  // namespace kvpool
