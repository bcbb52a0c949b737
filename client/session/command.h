// One call of the engine on its way to the stream's thread, and the ring it travels in.
#ifndef KVPOOL_CLIENT_SESSION_COMMAND_H_
#define KVPOOL_CLIENT_SESSION_COMMAND_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/release_hint.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

struct AnswerState;

// Slots are reused, so that no vector grows in the steady state.
struct Command {
  enum class Verb {
    kMatch,
    kSeal,
    kRelease,
    kRef,
    kTouch,
    kPin,
    kUnpin,
    kSetRetention,
    kWarmupDone,
    kClose,
    kOnDevice,
    kFlush
  };
  struct Keys {
    uint32_t group = 0;
    uint32_t key_bytes = 0;
    uint32_t count = 0;  // kMatch: keys. kSeal: keys per block.
  };

  Verb verb = Verb::kFlush;
  uint64_t after = 0;
  std::vector<BlockRef> blocks;
  std::vector<Keys> groups;  // kMatch: one for each group asked. kSeal: one.
  std::string keys;          // Keys of all groups, one after another.
  uint32_t wait_ms = 0;      // kMatch.
  bool prefetch = false;     // kMatch.
  std::string parent_key;
  bool leave_duplicates = false;  // kSeal.
  ReleaseHint hint;               // kRelease.
  uint32_t priority = 0;
  uint64_t ttl_ms = 0, half_life_ms = 0;
  std::unique_ptr<v1::Operation> operation;  // kOnDevice: the whole operation; `blocks` are those it names.
  std::shared_ptr<AnswerState> answer;       // Null: nobody waits, and a match has been answered.

  // Arrays travel inside an operation. So many of its bytes count as one name, so that a batch
  // stays below 4 MiB.
  static constexpr size_t kBytesOfName = 64;
  // What counts towards the limit of a batch: blocks and keys named, and the operation's size.
  size_t names() const;
};

// One producer, one consumer, neither of which waits.
class CommandRing {
 public:
  static constexpr size_t kCommands = 1024;

  // Producer: the slot to fill, or null when the ring is full. Publish hands it over.
  Command* Vacant() {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) == kCommands) return nullptr;
    return &slots_[tail % kCommands];
  }
  void Publish() { tail_.store(tail_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst); }

  // Consumer: the oldest command, or null. Pop returns its slot.
  Command* Front() {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_seq_cst)) return nullptr;
    return &slots_[head % kCommands];
  }
  // Consumer: the oldest but `index`. REQUIRES: index < size().
  Command* At(size_t index) { return &slots_[(head_.load(std::memory_order_relaxed) + index) % kCommands]; }
  void Pop() { head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

  // Either side.
  size_t size() const {
    return tail_.load(std::memory_order_acquire) - head_.load(std::memory_order_acquire);
  }

 private:
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::unique_ptr<Command[]> slots_{new Command[kCommands]};
};

inline size_t Command::names() const {
  size_t names = blocks.size() + (operation == nullptr ? 0 : operation->ByteSizeLong() / kBytesOfName);
  for (const Keys& group : groups) names += verb == Verb::kSeal ? blocks.size() * group.count : group.count;
  return names;
}

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_COMMAND_H_
