// Memory that the processes of one replay share: who serves which request, and how that went.
//
// A request is in one state: open -> claimed by one engine -> done; when the engine is killed, its
// claims are open again. The state word of a request is the only truth: claiming is one
// compare-and-swap on it, so a kill at any instruction leaves each request open, claimed by the dead
// engine, or done with its record written.
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
};

class Board {
 public:
  struct Size {
    uint32_t requests = 0;
    uint32_t engines = 0;
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

  // ---- The process that started them
  // REQUIRES: the engine's process is gone. Answers how many requests are open again.
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

  Board(UniqueFd fd, void* memory, size_t bytes);
  static size_t BytesFor(Size size);

  UniqueFd fd_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  Size size_;
  Header* header_ = nullptr;
  RequestRecord* records_ = nullptr;
  EngineSlot* slots_ = nullptr;
};

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_BOARD_H_
