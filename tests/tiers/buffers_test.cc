// Buffers: how many are out at once, and where they lie.
#include "server/tiers/buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "server/tiers/buffer_arena.h"

namespace kvpool {
namespace {

TEST(BufferStock, BoundsWhatIsOut) {
  BufferStock stock(3 * kTierPageBytes);
  auto first = stock.Take(1);
  const auto second = stock.Take(2 * kTierPageBytes);
  EXPECT_EQ(stock.bytes_out(), 3 * kTierPageBytes);
  EXPECT_EQ(stock.Take(1), nullptr);
  first.reset();
  EXPECT_NE(stock.Take(1), nullptr);
}

TEST(BufferStock, OneIsAlwaysToBeHad) {
  BufferStock stock(kTierPageBytes);
  const auto large = stock.Take(10 * kTierPageBytes);
  EXPECT_NE(large, nullptr);
  EXPECT_EQ(stock.Take(1), nullptr);
}

constexpr uint64_t kPage = kTierPageBytes;

std::shared_ptr<BufferArena> Arena(uint64_t pages) {
  absl::StatusOr<std::shared_ptr<BufferArena>> arena = BufferArena::Make(pages * kPage);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return arena.ok() ? *arena : nullptr;
}

TEST(BufferArena, BuffersOfOneSizeLieSideBySide) {
  const auto arena = Arena(8);
  BufferStock stock(8 * kPage, arena);
  std::vector<std::shared_ptr<TierBuffer>> buffers;
  buffers.reserve(4);
  for (int i = 0; i < 4; ++i) buffers.push_back(stock.Take(2 * kPage));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(buffers[i]->data(), arena->data() + 2 * kPage * i);
  // The lowest place is taken first.
  buffers[2].reset();
  buffers[1].reset();
  EXPECT_EQ(stock.Take(kPage)->data(), arena->data() + 2 * kPage);
  EXPECT_EQ(stock.Take(4 * kPage)->data(), arena->data() + 2 * kPage);
}

TEST(BufferArena, WhatHasNoRoomInOnePieceWaits) {
  const auto arena = Arena(4);
  BufferStock stock(4 * kPage, arena);
  auto first = stock.Take(kPage);
  const auto second = stock.Take(kPage);
  auto third = stock.Take(kPage);
  first.reset();
  third.reset();
  EXPECT_EQ(stock.bytes_out(), kPage);
  EXPECT_EQ(stock.Take(3 * kPage), nullptr);
  EXPECT_EQ(stock.bytes_out(), kPage) << "what was not given is not out";
  EXPECT_NE(stock.Take(2 * kPage), nullptr);
}

TEST(BufferArena, ABufferOutlivesStockAndArena) {
  auto arena = Arena(2);
  auto stock = std::make_unique<BufferStock>(2 * kPage, arena);
  const auto buffer = stock->Take(kPage + 1);
  stock.reset();
  arena.reset();
  std::memset(buffer->data(), 7, buffer->bytes());
  EXPECT_EQ(buffer->data()[kPage], 7);
}

TEST(BufferArena, WhatIsBehindAValueIsZeroInAPlaceThatWasUsed) {
  const auto arena = Arena(1);
  BufferStock stock(kPage, arena);
  std::memset(stock.Take(kPage)->data(), 7, kPage);
  const auto buffer = stock.Take(10);
  for (uint64_t i = 10; i < kPage; ++i) ASSERT_EQ(buffer->data()[i], 0) << i;
}

// Whatever comes and goes, no two buffers share a page, and all of it is one piece in the end.
TEST(BufferArena, HoldsWhatAModelHolds) {
  constexpr uint64_t kPages = 64;
  const auto arena = Arena(kPages);
  arena->SpreadOver({0, -1, BufferArena::kMostNodes});
  std::mt19937 random(7);
  struct Held {
    char* data;
    uint64_t pages;
  };
  std::vector<Held> held;
  std::vector<bool> taken(kPages);
  const auto mark = [&](const Held& buffer, bool taking) {
    const uint64_t first = static_cast<uint64_t>(buffer.data - arena->data()) / kPage;
    for (uint64_t page = first; page < first + buffer.pages; ++page) {
      ASSERT_LT(page, kPages);
      ASSERT_NE(taken[page], taking) << page;
      taken[page] = taking;
    }
  };
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const uint64_t pages = 1 + random() % 9;
      uint64_t run = 0, longest = 0;
      for (const bool is_taken : taken) longest = std::max(longest, run = is_taken ? 0 : run + 1);
      char* const data = arena->Take(pages * kPage);
      ASSERT_EQ(data != nullptr, longest >= pages) << step;
      if (data == nullptr) continue;
      std::memset(data, step, pages * kPage);
      held.push_back({data, pages});
      mark(held.back(), true);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      mark(held.back(), false);
      arena->Return(held.back().data, held.back().pages * kPage);
      held.pop_back();
    }
  }
  for (const Held& buffer : held) arena->Return(buffer.data, buffer.pages * kPage);
  EXPECT_EQ(arena->Take(kPages * kPage), arena->data());
}

}  // namespace
}  // namespace kvpool
