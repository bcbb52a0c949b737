// Bytes on their way between the pool and a tier. A stock bounds how many there are at once.
#ifndef KVPOOL_SERVER_TIERS_BUFFERS_H_
#define KVPOOL_SERVER_TIERS_BUFFERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "proto/support/check.h"

namespace kvpool {

// Disks are written past the page cache in units of this, from memory that begins at a multiple of it.
inline constexpr uint64_t kTierPageBytes = 4096;
constexpr uint64_t WholePages(uint64_t bytes) {
  return (bytes + kTierPageBytes - 1) / kTierPageBytes * kTierPageBytes;
}

// Memory of whole pages; what is behind bytes() is zero.
class TierBuffer {
 public:
  TierBuffer(const TierBuffer&) = delete;
  TierBuffer& operator=(const TierBuffer&) = delete;
  ~TierBuffer() {
    std::free(data_);
    out_->fetch_sub(WholePages(bytes_), std::memory_order_relaxed);
  }
  char* data() { return data_; }
  const char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  friend class BufferStock;
  TierBuffer(uint64_t bytes, std::shared_ptr<std::atomic<uint64_t>> out)
      : data_(static_cast<char*>(std::aligned_alloc(kTierPageBytes, WholePages(bytes)))),
        bytes_(bytes),
        out_(std::move(out)) {
    KVPOOL_CHECK(data_ != nullptr, "no memory for a buffer of %lu bytes", bytes);
    for (uint64_t i = bytes; i < WholePages(bytes); ++i) data_[i] = 0;
  }

  char* const data_;
  const uint64_t bytes_;
  const std::shared_ptr<std::atomic<uint64_t>> out_;
};

// Thread-safe. Buffers may outlive it.
class BufferStock {
 public:
  explicit BufferStock(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  // Null: it would be more than the limit with those that are out. One buffer is always to be had, however large.
  std::shared_ptr<TierBuffer> Take(uint64_t bytes) {
    const uint64_t pages = WholePages(bytes);
    const uint64_t before = out_->fetch_add(pages, std::memory_order_relaxed);
    if (before != 0 && before + pages > limit_bytes_) {
      out_->fetch_sub(pages, std::memory_order_relaxed);
      return nullptr;
    }
    return std::shared_ptr<TierBuffer>(new TierBuffer(bytes, out_));
  }
  uint64_t bytes_out() const { return out_->load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_bytes_;
  const std::shared_ptr<std::atomic<uint64_t>> out_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_BUFFERS_H_
