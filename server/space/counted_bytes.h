// Bytes that one owner has, and those of all owners of its kind: memory is the process's, and so is the bound on all
// of them together. A kind says
//
//   kMaxBytes        what one owner may have
//   kMaxBytesOfAll   beyond so many of all owners together, one may have only
//   kSmallBytes
//
// The count of one owner is not thread-safe; that of all is.
#ifndef KVPOOL_SERVER_SPACE_COUNTED_BYTES_H_
#define KVPOOL_SERVER_SPACE_COUNTED_BYTES_H_

#include <atomic>
#include <cstddef>
#include <utility>

namespace kvpool {

template <typename Kind>
class CountedBytes : public Kind {
 public:
  CountedBytes() = default;
  CountedBytes(CountedBytes&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)) {}
  CountedBytes& operator=(CountedBytes&& other) noexcept {
    Subtract(bytes_);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~CountedBytes() { Subtract(bytes_); }

  void Add(size_t bytes) {
    bytes_ += bytes;
    all_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void Subtract(size_t bytes) {
    bytes_ -= bytes;
    all_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  size_t bytes() const { return bytes_; }
  size_t limit() const { return bytes_of_all() > Kind::kMaxBytesOfAll ? Kind::kSmallBytes : Kind::kMaxBytes; }
  bool over_limit() const { return bytes_ > limit(); }
  static size_t bytes_of_all() { return all_.load(std::memory_order_relaxed); }

 private:
  inline static std::atomic<size_t> all_{0};
  size_t bytes_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_COUNTED_BYTES_H_
