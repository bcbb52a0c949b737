// What words of a pool's table were before the turn that runs. A process that is killed within a turn has answered nobody
// what it did there: the next one puts the words back, and the turn never was.
//
// Saved are the words on which a client's view of the world depends: holds, generations, whether a block is sealed. What
// was evicted stays evicted. One thread stores at a time, and its stores reach memory in the order of the program.
#ifndef KVPOOL_SERVER_POOL_UNDO_LOG_H_
#define KVPOOL_SERVER_POOL_UNDO_LOG_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace kvpool {

class UndoLog {
 public:
  struct Entry {
    uint64_t at;  // The word's place in the table, in bytes.
    uint64_t was;
  };
  // A turn of a small pool may still name some 2,000 blocks again and again, at two words or three.
  static constexpr uint32_t Entries(uint32_t max_blocks) {
    return std::min<uint64_t>(kFull - 1, 8192 + uint64_t{max_blocks} * 4);
  }

  // A pool without a table: Save does nothing.
  UndoLog() = default;
  // `head` counts turns, from 1, and in its low bits the words saved in this one.
  UndoLog(char* table, uint64_t* head, Entry* entries, uint32_t room)
      : table_(table), head_(head), entries_(entries), room_(room) {
    was_used_ = *head_ != 0;
    if (!was_used_) *head_ = uint64_t{1} << kCountBits;
  }

  // To be called before the aligned word around `at` is changed.
  void Save(const void* at) {
    if (head_ == nullptr) return;
    const uint64_t count = *head_ & kFull;
    if (count >= room_) {
      *head_ |= kFull;  // The turn can't be undone any more.
    } else {
      Entry& entry = entries_[count];
      entry.at = static_cast<uint64_t>(static_cast<const char*>(at) - table_) & ~uint64_t{7};
      std::memcpy(&entry.was, table_ + entry.at, sizeof(entry.was));
      std::atomic_signal_fence(std::memory_order_seq_cst);
      ++*head_;
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  // Calls `visit` with the place of each word that Undo would put back, in bytes.
  template <typename Visit>
  void VisitSaved(Visit visit) const {
    const uint64_t count = *head_ & kFull;
    for (uint64_t i = 0; i < count && count <= room_; ++i) visit(entries_[i].at);
  }
  // The same for words that several of a verb's blocks share, one after the other: the first Save of a turn is the one that counts.
  void SaveShared(const void* at) {
    const auto word = reinterpret_cast<uintptr_t>(at) & ~uintptr_t{7};
    if (word == shared_) return;
    shared_ = word;
    Save(at);
  }
  // What was done stays; the next turn begins. The one that another process did not live to end stays that until it is undone.
  void Commit() {
    if (head_ == nullptr || was_used_) return;
    shared_ = 0;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    *head_ = (*head_ | kFull) + 1;
  }
  // The turn that runs; 0 without a table.
  uint64_t turn() const { return head_ == nullptr ? 0 : *head_ >> kCountBits; }
  // False: the turn changed more than there is room for, and stays half done.
  bool Undo() {
    was_used_ = false;
    const uint64_t count = *head_ & kFull;
    if (count > room_) return false;
    for (uint64_t i = count; i-- > 0;)
      std::memcpy(table_ + entries_[i].at, &entries_[i].was, sizeof(uint64_t));
    return true;
  }

 private:
  static constexpr int kCountBits = 16;
  static constexpr uint64_t kFull = (1 << kCountBits) - 1;

  char* const table_ = nullptr;
  uint64_t* const head_ = nullptr;
  Entry* const entries_ = nullptr;
  const uint32_t room_ = 0;
  uintptr_t shared_ = 0;   // The last word of SaveShared, in this turn.
  bool was_used_ = false;  // Another process used it, whose last turn was not looked at yet.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_UNDO_LOG_H_
