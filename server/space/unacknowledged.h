// Bytes that a member has been answered and has not acknowledged: the answers that its AnswerWindow keeps, or
// its completions. All members' together are bounded too; memory is the process's, and so is that bound.
#ifndef KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_
#define KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_

#include <atomic>
#include <cstddef>

namespace kvpool {

class Unacknowledged {
 public:
  // What one member may have of each kind. The largest answer has half a MiB (65,536 refs), and a stream at most
  // 16 unanswered batches, whose answers must all be here when it breaks.
  static constexpr size_t kMaxBytes = 16 << 20;
  // When all members together have more than kMaxBytesOfAll, one may have kSmallBytes, more than most ever need.
  static constexpr size_t kMaxBytesOfAll = 512 << 20;
  static constexpr size_t kSmallBytes = 256 << 10;

  Unacknowledged() = default;
  Unacknowledged(const Unacknowledged&) = delete;
  Unacknowledged& operator=(const Unacknowledged&) = delete;
  ~Unacknowledged() { Subtract(bytes_); }

  void Add(size_t bytes) {
    bytes_ += bytes;
    all_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void Subtract(size_t bytes) {
    bytes_ -= bytes;
    all_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  size_t bytes() const { return bytes_; }
  size_t limit() const { return bytes_of_all() > kMaxBytesOfAll ? kSmallBytes : kMaxBytes; }
  bool over_limit() const { return bytes_ > limit(); }
  static size_t bytes_of_all() { return all_.load(std::memory_order_relaxed); }

 private:
  inline static std::atomic<size_t> all_{0};
  size_t bytes_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_UNACKNOWLEDGED_H_
