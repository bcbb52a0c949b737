// How often a session holds each block: pages of 1024 counters, each of which exists while a counter
// is not zero.
//
// So memory, and a walk over what the session holds, cost the pages in use, not the capacity of the pool.
// Walks are made in slices: one session may hold every block there is.
#ifndef KVPOOL_SERVER_POOL_HOLD_TABLE_H_
#define KVPOOL_SERVER_POOL_HOLD_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "proto/support/check.h"
#include "server/pool/undo_log.h"

namespace kvpool {

inline constexpr uint32_t kMaxHolds = UINT16_MAX;

struct alignas(64) HoldPage {
  static constexpr uint32_t kBlocks = 1024;
  uint64_t session = 0;  // Whose holds these are, as the pool's caller calls it; 0: the page is spare.
  uint32_t index = 0;    // They are on the blocks from index * kBlocks on.
  uint32_t live = 0;     // How many counters are not zero.
  uint16_t counts[kBlocks] = {};
};

// Where pages come from: the heap or, for a pool whose holds outlive the process, a table. Spare pages, all zero,
// wait for the next session that needs one: without them a magazine's worth of leases and releases of
// scattered blocks would make as many calls of malloc.
class HoldPageStock {
 public:
  // `begun` counts the pages of the table that were ever used, and lies beside them. The caller sees to it that
  // the table has a page for each that its sessions can need. `undo` is the table's, and outlives it.
  HoldPageStock(HoldPage* table, uint32_t pages, uint32_t* begun, UndoLog* undo)
      : table_(table), table_pages_(pages), begun_(begun), undo_(undo) {}
  ~HoldPageStock() {
    for (HoldPage* const page : spare_) Destroy(page);
  }
  HoldPageStock(const HoldPageStock&) = delete;
  HoldPageStock& operator=(const HoldPageStock&) = delete;

  HoldPage* Take(uint64_t session, uint32_t index) {
    HoldPage* page = nullptr;
    if (!spare_.empty()) {
      page = spare_.back();
      spare_.pop_back();
    } else if (table_ == nullptr) {
      page = new HoldPage;
    } else {
      KVPOOL_CHECK(*begun_ < table_pages_, "%u pages of holds are in use, all there are", table_pages_);
      page = &table_[(*begun_)++];
    }
    Save(&page->session);
    Save(&page->index);
    page->index = index;
    page->session = session;
    return page;
  }
  // What is at `at` in a page is about to change.
  void Save(const void* at) { undo_->Save(at); }
  // The same of a counter: a page has four in a word.
  void SaveCount(const void* at) { undo_->SaveShared(at); }
  // REQUIRES: all its counters are zero.
  void Give(HoldPage* page) {
    Save(&page->session);
    page->session = 0;
    if (table_ != nullptr || spare_.size() < kMaxSpare) {
      spare_.push_back(page);
    } else {
      Destroy(page);
    }
  }
  // The pool ends. A page of a table keeps its holds: they are there for the next process.
  void Leave(HoldPage* page) { Destroy(page); }

 private:
  static constexpr size_t kMaxSpare = 1024;  // 2 MiB
  void Destroy(HoldPage* page) {
    if (table_ == nullptr) delete page;
  }

  HoldPage* const table_ = nullptr;  // Null: pages are the heap's.
  const uint32_t table_pages_ = 0;
  uint32_t* const begun_ = nullptr;
  UndoLog* const undo_;
  std::vector<HoldPage*> spare_;
};

class HoldTable {
 public:
  explicit HoldTable(HoldPageStock* stock) : stock_(stock) {}
  HoldTable(HoldTable&& other) noexcept
      : stock_(other.stock_), session_(other.session_), pages_(std::move(other.pages_)) {
    other.pages_.clear();
  }
  ~HoldTable() {
    for (HoldPage* const page : pages_) stock_->Leave(page);
  }

  // Whose holds are added from now on. REQUIRES: it has none.
  void Begin(uint64_t session) { session_ = session; }
  // A page that an earlier process left, with `live` counted. False: it has one of that index.
  bool Adopt(HoldPage* page) {
    if (page->index >= pages_.size()) pages_.resize(page->index + 1);
    if (pages_[page->index] != nullptr) return false;
    pages_[page->index] = page;
    return true;
  }

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
    if (pages_[index] == nullptr) pages_[index] = stock_->Take(session_, index);
    uint16_t& count = pages_[index]->counts[block % HoldPage::kBlocks];
    KVPOOL_CHECK(count < kMaxHolds, "block %u has %u holds of one session", block, kMaxHolds);
    stock_->SaveCount(&count);
    if (count == 0) ++pages_[index]->live;
    return ++count;
  }
  // Takes away `holds` and answers how many are left. REQUIRES: 0 < holds <= count(block).
  uint32_t Subtract(uint32_t block, uint32_t holds) {
    const uint32_t index = block / HoldPage::kBlocks;
    uint16_t& count = pages_[index]->counts[block % HoldPage::kBlocks];
    KVPOOL_CHECK(holds > 0 && holds <= count, "block %u has %u holds, not %u", block, count, holds);
    stock_->SaveCount(&count);
    count = static_cast<uint16_t>(count - holds);
    const uint32_t left = count;
    if (left == 0 && --pages_[index]->live == 0) stock_->Give(std::exchange(pages_[index], nullptr));
    return left;
  }
  // How many blocks of [first, end) are held: a step for each page, and 1,024 where one of them is only in part in there.
  uint32_t CountIn(uint32_t first, uint32_t end) const {
    uint32_t held = 0;
    end = static_cast<uint32_t>(std::min<uint64_t>(end, uint64_t{HoldPage::kBlocks} * pages_.size()));
    for (uint32_t at = first; at < end;) {
      const uint32_t in_page = at % HoldPage::kBlocks;
      const uint32_t blocks = std::min(HoldPage::kBlocks - in_page, end - at);
      const HoldPage* const page = pages_[at / HoldPage::kBlocks];
      if (page != nullptr && blocks == HoldPage::kBlocks) {
        held += page->live;
      } else if (page != nullptr) {
        const uint16_t* const counts = page->counts + in_page;
        held += blocks - static_cast<uint32_t>(std::count(counts, counts + blocks, 0));
      }
      at += blocks;
    }
    return held;
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
    return index < pages_.size() ? pages_[index] : nullptr;
  }

  HoldPageStock* stock_;
  uint64_t session_ = 0;
  // Indexed by block / kBlocks; null where nothing is held.
  std::vector<HoldPage*> pages_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_HOLD_TABLE_H_
