// Stamps on every device: another process can verify what one wrote, and anything else in a block is found.
#include <memory>
#include <vector>

#include "cuda/block_stamper.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/support/block_ref.h"
#include "tests/device/test_device_fixture.h"

namespace kvpool {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr size_t kCapacityBytes = size_t{64} << 20;
constexpr size_t kBlockBytes = size_t{96} << 10;

class StamperTest : public TestDeviceTest {
 protected:
  StamperTest() : TestDeviceTest(kCapacityBytes) {}
  void SetUp() override {
    TestDeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (device().id() == "host") {
      stamper_ = MakeHostStamper();
    } else {
      absl::StatusOr<std::unique_ptr<BlockStamper>> stamper = OpenCudaStamper(device().uuid_bytes());
      ASSERT_TRUE(stamper.ok()) << stamper.status();
      stamper_ = std::move(*stamper);
    }
    absl::StatusOr<std::unique_ptr<Slab>> slab = device().MakeSlab(size_t{16} << 20);
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = std::move(*slab);
  }

  // Block i of the slab with its owner's stamp.
  StampedBlock Block(uint32_t i, uint64_t key_digest = 7, uint32_t generation = 1) const {
    return {.address = slab_->address() + i * kBlockBytes,
            .key_digest = key_digest,
            .block_ref = BlockRef{.id = BlockId{i}, .generation = generation}.Pack()};
  }
  std::vector<uint64_t> Verify(const std::vector<StampedBlock>& blocks, size_t block_bytes = kBlockBytes) {
    const absl::StatusOr<std::vector<uint64_t>> wrong = stamper_->Verify(blocks, block_bytes);
    EXPECT_TRUE(wrong.ok()) << wrong.status();
    return wrong.value_or(std::vector<uint64_t>());
  }

  std::unique_ptr<BlockStamper> stamper_;
  std::unique_ptr<Slab> slab_;
};

TEST_F(StamperTest, WhatWasWrittenVerifies) {
  const std::vector<StampedBlock> blocks = {Block(0), Block(3), Block(100)};
  ASSERT_TRUE(stamper_->Write(blocks, kBlockBytes).ok());
  EXPECT_THAT(Verify(blocks), ElementsAre(0, 0, 0));
  // Every word is that of the reference, and nothing beyond the block is written.
  for (const uint64_t word : {uint64_t{0}, uint64_t{1}, kBlockBytes / 8 - 1}) {
    EXPECT_EQ(test_device_->Read(blocks[1].address + 8 * word).value(),
              StampWord(StampSeed(blocks[1]), word));
  }
  EXPECT_EQ(test_device_->Read(blocks[1].address + kBlockBytes).value(), 0u);
}

TEST_F(StamperTest, EveryWrongWordCounts) {
  ASSERT_TRUE(stamper_->Write({Block(1), Block(2)}, kBlockBytes).ok());
  for (const uint64_t offset : {uint64_t{0}, uint64_t{4096}, kBlockBytes - 8}) {
    ASSERT_TRUE(test_device_->Write(Block(2).address + offset, 1).ok());
  }
  EXPECT_THAT(Verify({Block(1), Block(2)}), ElementsAre(0, 3));
}

TEST_F(StamperTest, AnotherOwnersStampIsAllWrong) {
  ASSERT_TRUE(stamper_->Write({Block(1)}, kBlockBytes).ok());
  StampedBlock moved = Block(2);
  moved.address = Block(1).address;
  EXPECT_THAT(Verify({Block(1, 8), Block(1, 7, 2), moved, Block(5)}), Each(kBlockBytes / 8));
}

TEST_F(StamperTest, ManyBlocksAndShortOnes) {
  // More than one batch; each block is three words and a tail that is not stamped.
  std::vector<StampedBlock> blocks;
  for (uint32_t i = 0; i < 10'000; ++i) {
    blocks.push_back({.address = slab_->address() + i * 32, .key_digest = i, .block_ref = i});
  }
  ASSERT_TRUE(stamper_->Write(blocks, 31).ok());
  ASSERT_TRUE(test_device_->Write(blocks[9'999].address + 16, 0).ok());
  const std::vector<uint64_t> wrong = Verify(blocks, 31);
  ASSERT_THAT(wrong, SizeIs(10'000));
  for (size_t i = 0; i < wrong.size(); ++i) EXPECT_EQ(wrong[i], i == 9'999 ? 1u : 0u) << i;
  EXPECT_EQ(test_device_->Read(blocks[0].address + 24).value(), 0u);
}

TEST_F(StamperTest, NoBlocksAreNoWork) {
  EXPECT_TRUE(stamper_->Write({}, kBlockBytes).ok());
  EXPECT_THAT(Verify({}), SizeIs(0));
}

TEST_F(StamperTest, AddressesThatAreNotAlignedAreRefused) {
  StampedBlock block = Block(0);
  block.address += 4;
  EXPECT_EQ(stamper_->Write({block}, kBlockBytes).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stamper_->Verify({block}, kBlockBytes).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvpool
