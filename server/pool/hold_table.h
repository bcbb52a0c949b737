// How often a session holds each block: pages of 1024 counters, each of which exists while a counter
// is not zero.
//
// So memory, and a walk over what the session holds, cost the pages in use, not the capacity of the pool.
// Walks are made in slices: one session may hold every block there is.
#ifndef KVPOOL_SERVER_POOL_HOLD_TABLE_H_
#define KVPOOL_SERVER_POOL_HOLD_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "proto/support/check.h"

namespace kvpool {

inline constexpr uint32_t kMaxHolds = UINT16_MAX;

struct HoldPage {
  static constexpr uint32_t kBlocks = 1024;
  uint32_t live = 0;  // How many counters are not zero.
  uint16_t counts[kBlocks] = {};
};

// Spare pages, all zero, for the next session that needs one: without them a magazine's worth of leases and
// releases of scattered blocks would make as many calls of malloc.
class HoldPageStock {
 public:
  std::unique_ptr<HoldPage> Take() {
    if (pages_.empty()) return std::make_unique<HoldPage>();
    std::unique_ptr<HoldPage> page = std::move(pages_.back());
    pages_.pop_back();
    return page;
  }
  void Give(std::unique_ptr<HoldPage> page) {
    if (pages_.size() < kMaxPages) pages_.push_back(std::move(page));
  }

 private:
  static constexpr size_t kMaxPages = 1024;  // 2 MiB
  std::vector<std::unique_ptr<HoldPage>> pages_;
};

class HoldTable {
 public:
  explicit HoldTable(HoldPageStock* stock) : stock_(stock) {}

  uint32_t count(uint32_t block) const {
    const HoldPage* const page = FindPage(block);
    return page == nullptr ? 0 : page->counts[block % HoldPage::kBlocks];
  }
  void Prefetch(uint32_t block) const {
    const HoldPage* const page = FindPage(block);
    if (page != nullptr) __builtin_prefetch(&page->counts[block % HoldPage::kBlocks], 1);
  }
  // Adds a hold and answers how many there are. REQUIRES: count(block) < kMaxHolds.
  uint32_t Add(uint32_t block) {
    const uint32_t index = block / HoldPage::kBlocks;
    if (index >= pages_.size()) pages_.resize(index + 1);
    if (pages_[index] == nullptr) pages_[index] = stock_->Take();
    uint16_t& count = pages_[index]->counts[block % HoldPage::kBlocks];
    KVPOOL_CHECK(count < kMaxHolds, "block %u has %u holds of one session", block, kMaxHolds);
    if (count == 0) ++pages_[index]->live;
    return ++count;
  }
  // Takes away `holds` and answers how many are left. REQUIRES: 0 < holds <= count(block).
  uint32_t Subtract(uint32_t block, uint32_t holds) {
    const uint32_t index = block / HoldPage::kBlocks;
    uint16_t& count = pages_[index]->counts[block % HoldPage::kBlocks];
    KVPOOL_CHECK(holds > 0 && holds <= count, "block %u has %u holds, not %u", block, count, holds);
    count = static_cast<uint16_t>(count - holds);
    const uint32_t left = count;
    if (left == 0 && --pages_[index]->live == 0) stock_->Give(std::move(pages_[index]));
    return left;
  }
  // Calls visit(block, holds) on at most `most` held blocks below `end`, from the highest down. Answers the
  // end for the next call; 0: no held block is left. `visit` may subtract from that block.
  template <typename Visit>
  uint32_t VisitBelow(uint32_t end, uint32_t most, Visit visit) const {
    for (size_t index = std::min<size_t>(pages_.size(), size_t{end} / HoldPage::kBlocks + 1); index-- > 0;) {
      const auto base = static_cast<uint32_t>(index * HoldPage::kBlocks);
      // The page is gone once its last hold is.
      for (uint32_t i = std::min(HoldPage::kBlocks, end - base); i > 0 && pages_[index] != nullptr; --i) {
        const uint32_t holds = pages_[index]->counts[i - 1];
        if (holds == 0) continue;
        if (most-- == 0) return base + i;
        visit(base + i - 1, holds);
      }
    }
    return 0;
  }

 private:
  const HoldPage* FindPage(uint32_t block) const {
    const uint32_t index = block / HoldPage::kBlocks;
    return index < pages_.size() ? pages_[index].get() : nullptr;
  }

  HoldPageStock* stock_;
  // Indexed by block / kBlocks; null where nothing is held.
  std::vector<std::unique_ptr<HoldPage>> pages_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_HOLD_TABLE_H_
