// Memory that the processes of one replay share: who serves which request, who holds which block, and how that went.
//
// A request is in one state: open -> claimed by one engine -> done; when the engine is killed, its
// claims are open again. The state word of a request is the only truth: claiming is one
// compare-and-swap on it, so a kill at any instruction leaves each request open, claimed by the dead
// engine, or done with its record written.
//
// Who holds which block is written here by the engines, beside the daemon's own books: what an engine has leased is its
// alone, and what is sealed may be held by many, but by nobody who leased it. An engine writes what it holds before it
// looks at the others, and takes that back before it releases, so that of two owners at least one sees the other.
#ifndef KVPOOL_CLIENT_REPLAY_BOARD_H_
#define KVPOOL_CLIENT_REPLAY_BOARD_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool::replay {

// The verbs whose durations are measured. Local: the engine's thread does not wait for the daemon.
enum class Verb { kMatch, kLeaseLocal, kLeaseWait, kSealLocal, kSealAnswer, kRelease };
inline constexpr int kVerbs = 6;
const char* VerbName(Verb verb);  // The verb's name in JSON.

// Durations in classes an eighth of an octave wide. One process adds; any process reads.
class Durations {
 public:
  void Add(uint64_t ns);
  uint64_t count() const;
  uint64_t max_ns() const { return max_ns_.load(std::memory_order_relaxed); }
  // Upper bound of the class that the quantile lies in, at most max_ns(); 0: there are no durations.
  uint64_t QuantileNs(double q) const;
  void Merge(const Durations& other);

 private:
  static constexpr int kOctaves = 48;  // 2^48 ns are three days.
  static constexpr int kClasses = kOctaves * 8;
  std::array<std::atomic<uint64_t>, kClasses> counts_;
  std::atomic<uint64_t> max_ns_;
};

struct RequestRecord {
  std::atomic<uint32_t> state;  // 0 open; slot + 1 claimed; kDone.
  uint32_t hit_blocks;
  uint32_t deduplicated_blocks;
};

// Written by one engine process at a time; the one that replaces it goes on with it.
struct EngineSlot {
  std::array<Durations, kVerbs> verbs;
  std::atomic<uint64_t> corrupt_blocks;  // Blocks with a wrong stamp.
  std::atomic<uint64_t> checked_blocks;  // Blocks whose stamp was read.
  std::atomic<uint64_t> retries;         // Requests begun again because the pool was short of blocks.
  std::atomic<uint64_t> sessions;        // Sessions opened.
  std::atomic<uint64_t> refused;         // Blocks, leases and fences that the daemon refused.
  std::atomic<uint64_t> late_tokens;     // Tokens that a match left below after its wait.
  std::atomic<uint64_t> double_owners;   // Blocks that another engine held, too.
  // Blocks sealed under a key that had been sealed before, and that the daemon did not know: it was evicted, or lost.
  std::atomic<uint64_t> sealed_again;
  std::atomic<bool> doomed;  // It is being killed, and others may get what it holds.
};

class Board {
 public:
  struct Size {
    uint32_t requests = 0;
    uint32_t engines = 0;
    uint32_t blocks = 0;  // Indices of blocks are below this.
    uint32_t keys = 0;    // The most keys that are sealed.
  };
  static absl::StatusOr<Board> Create(Size size);
  // Opens it in a process that inherited the fd.
  static absl::StatusOr<Board> Open(UniqueFd fd);
  Board(Board&& other) noexcept;
  ~Board();

  int fd() const { return fd_.get(); }
  Size size() const { return size_; }

  // ---- Engines
  // The first open request, now claimed; nothing when none is open.
  std::optional<uint32_t> Claim(uint32_t engine);
  // REQUIRES: claimed by this engine, and its record is written.
  void Done(uint32_t request);
  uint32_t done() const;
  void Stop();  // Has engines end after the request that they serve.
  bool stopped() const;

  // The engine holds the block, which it leased or which is sealed. False: another engine holds it, and one of both as
  // its own.
  // REQUIRES: block < size().blocks.
  bool HoldLeased(uint32_t engine, uint32_t block);
  bool HoldSealed(uint32_t engine, uint32_t block);
  void LetGo(uint32_t engine, uint32_t block);

  // A key whose seal was answered, by the first 64 bits of it.
  void Sealed(uint64_t digest);
  bool sealed(uint64_t digest) const;

  // ---- The process that started them
  // The engine is about to be killed: from now on others may get what it holds.
  void Doom(uint32_t engine);
  // Forgets what the engine held. REQUIRES: its process is gone. Answers how many requests are open again.
  uint32_t Reopen(uint32_t engine);
  // Hides open requests from this one on until it is called again, so that engines do not outrun the kills
  // that are due.
  void HoldFrom(uint64_t request);
  bool busy(uint32_t engine) const;  // The engine has a claim.

  RequestRecord& record(uint32_t request) const { return records_[request]; }
  EngineSlot& slot(uint32_t engine) const { return slots_[engine]; }

 private:
  static constexpr uint32_t kDone = ~uint32_t{0};
  struct Header;
  enum Hold : uint8_t { kNone, kSealed, kLeased };

  Board(UniqueFd fd, void* memory, size_t bytes);
  static size_t BytesFor(Size size);
  std::atomic<uint8_t>& hold(uint32_t engine, uint32_t block) const {
    return holds_[size_t{engine} * size_.blocks + block];
  }
  bool OthersHold(uint32_t engine, uint32_t block, Hold least) const;
  // The digest's place among the sealed ones, or the empty one where it belongs.
  std::atomic<uint64_t>& PlaceOf(uint64_t digest) const;

  UniqueFd fd_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  Size size_;
  Header* header_ = nullptr;
  RequestRecord* records_ = nullptr;
  EngineSlot* slots_ = nullptr;
  std::atomic<uint64_t>* sealed_ = nullptr;  // A hash table with open addressing; 0: empty.
  std::atomic<uint8_t>* holds_ = nullptr;    // A Hold for each engine and block.
};

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_BOARD_H_
