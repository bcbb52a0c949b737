// Bytes on their way between the pool and a tier. A stock bounds how many there are at once.
#ifndef KVPOOL_SERVER_TIERS_BUFFERS_H_
#define KVPOOL_SERVER_TIERS_BUFFERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "proto/support/check.h"

namespace kvpool {

// Disks are written past the page cache in units of this, from memory that begins at a multiple of it.
inline constexpr uint64_t kTierPageBytes = 4096;
constexpr uint64_t WholePages(uint64_t bytes) {
  return (bytes + kTierPageBytes - 1) / kTierPageBytes * kTierPageBytes;
}

// Where buffers lie. Thread-safe.
class BufferMemory {
 public:
  virtual ~BufferMemory() = default;
  // Memory of whole pages, which begins with one; null: there is no room for so much in one piece.
  virtual char* Take(uint64_t bytes) = 0;
  virtual void Return(char* data, uint64_t bytes) = 0;
};

// The process's ordinary memory.
class HeapMemory final : public BufferMemory {
 public:
  char* Take(uint64_t bytes) override {
    char* const data = static_cast<char*>(std::aligned_alloc(kTierPageBytes, bytes));
    KVPOOL_CHECK(data != nullptr, "no memory for a buffer of %lu bytes", bytes);
    return data;
  }
  void Return(char* data, uint64_t) override { std::free(data); }
};

// Memory of whole pages; what is behind bytes() is zero.
class TierBuffer {
 public:
  TierBuffer(const TierBuffer&) = delete;
  TierBuffer& operator=(const TierBuffer&) = delete;
  ~TierBuffer() {
    memory_->Return(data_, WholePages(bytes_));
    out_->fetch_sub(WholePages(bytes_), std::memory_order_relaxed);
  }
  char* data() { return data_; }
  const char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  friend class BufferStock;
  TierBuffer(char* data, uint64_t bytes, std::shared_ptr<BufferMemory> memory,
             std::shared_ptr<std::atomic<uint64_t>> out)
      : data_(data), bytes_(bytes), memory_(std::move(memory)), out_(std::move(out)) {
    for (uint64_t i = bytes; i < WholePages(bytes); ++i) data_[i] = 0;
  }

  char* const data_;
  const uint64_t bytes_;
  const std::shared_ptr<BufferMemory> memory_;
  const std::shared_ptr<std::atomic<uint64_t>> out_;
};

// Thread-safe. Buffers may outlive it.
class BufferStock {
 public:
  explicit BufferStock(uint64_t limit_bytes,
                       std::shared_ptr<BufferMemory> memory = std::make_shared<HeapMemory>())
      : limit_bytes_(limit_bytes), memory_(std::move(memory)) {}
  // Null: it would be more than the limit with those that are out, or the memory has no room. One buffer is always to be had,
  // as large as the memory has room for.
  std::shared_ptr<TierBuffer> Take(uint64_t bytes) {
    const uint64_t pages = WholePages(bytes);
    const uint64_t before = out_->fetch_add(pages, std::memory_order_relaxed);
    char* const data = before != 0 && before + pages > limit_bytes_ ? nullptr : memory_->Take(pages);
    if (data == nullptr) {
      out_->fetch_sub(pages, std::memory_order_relaxed);
      return nullptr;
    }
    return std::shared_ptr<TierBuffer>(new TierBuffer(data, bytes, memory_, out_));
  }
  uint64_t bytes_out() const { return out_->load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_bytes_;
  const std::shared_ptr<BufferMemory> memory_;
  const std::shared_ptr<std::atomic<uint64_t>> out_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_BUFFERS_H_
