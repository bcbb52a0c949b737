// An array of fixed address and final size whose memory arrives when it is first touched.
//
// One anonymous mapping: zero until written, never moved, never copied, and no memory committed
// before its first use, or Populate. A pool that may grow to 16 Mi blocks therefore costs what it holds today, and
// growing it costs nothing. A small array is the heap's: a mapping would cost it more than its pages, and there
// sanitizers see what lies beyond its end.
//
// An array for which there is no memory, or there are no addresses, throws std::bad_alloc (server/base/or_exhausted.h).
#ifndef KVPOOL_SERVER_BASE_VIRTUAL_ARRAY_H_
#define KVPOOL_SERVER_BASE_VIRTUAL_ARRAY_H_

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <type_traits>

#ifndef MADV_POPULATE_WRITE  // Linux 5.14; glibc has it since 2.35.
#define MADV_POPULATE_WRITE 23
#endif

namespace kvpool {

class NoAddresses final : public std::bad_alloc {
 public:
  NoAddresses(size_t bytes, int error) {
    std::snprintf(words_, sizeof(words_), "cannot reserve %zu bytes of addresses: %s", bytes,
                  std::strerror(error));
  }
  const char* what() const noexcept override { return words_; }

 private:
  char words_[128];
};

template <typename T>
class VirtualArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>,
                "elements begin as zero bytes and are never destroyed");

 public:
  // REQUIRES: all-zero bytes are a valid T.
  explicit VirtualArray(size_t size) : size_(size) {
    if (bytes() <= kSmallBytes) {
      data_ = static_cast<T*>(::operator new(bytes(), kSmallAlignment));
      std::memset(static_cast<void*>(data_), 0, bytes());
      return;
    }
    // Room to begin at a huge page.
    mapped_bytes_ = size * sizeof(T) + kHugePageBytes;
    void* const at = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw NoAddresses(mapped_bytes_, errno);
    mapped_ = at;
    const uintptr_t begin =
        (reinterpret_cast<uintptr_t>(at) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    data_ = reinterpret_cast<T*>(begin);
    // Advice: where the kernel has no huge pages everything still works.
    if (size * sizeof(T) >= kHugeFromBytes) (void)madvise(data_, size * sizeof(T), MADV_HUGEPAGE);
  }
  // `size` elements that lie in memory of the caller's, which outlives the array.
  VirtualArray(T* data, size_t size) : size_(size), owned_(false), data_(data) {}
  ~VirtualArray() {
    if (!owned_) return;
    if (mapped_ == nullptr) {
      ::operator delete(data_, kSmallAlignment);
    } else {
      munmap(mapped_, mapped_bytes_);
    }
  }
  VirtualArray(const VirtualArray&) = delete;
  VirtualArray& operator=(const VirtualArray&) = delete;

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }
  // The memory it takes once every element was touched.
  size_t bytes() const { return size_ * sizeof(T); }
  // How many small pages it has.
  size_t pages() const { return (bytes() + kPageBytes - 1) / kPageBytes; }
  // The first `elements` are touched next, at no verb's expense: their memory comes now, in huge pages. Also advice. One
  // thread at a time; others may use the array meanwhile.
  void Populate(size_t elements) {
    const size_t bytes = elements * sizeof(T);
    if (mapped_ == nullptr || bytes <= populated_) return;
    char* const at = reinterpret_cast<char*>(data_);
    // Where the kernel does not know how, its pages stay small: see kHugeFromBytes.
    if (madvise(at, std::min(kPageBytes, bytes), MADV_POPULATE_WRITE) != 0) return;
    (void)madvise(at, bytes, MADV_HUGEPAGE);
    // In steps: whoever maps or unmaps memory waits for the end of one.
    while (populated_ < bytes) {
      const size_t begin = populated_ / kPageBytes * kPageBytes;
      const size_t end = std::min((begin / kHugePageBytes + 1) * kHugePageBytes, bytes);
      if (madvise(at + begin, end - begin, MADV_POPULATE_WRITE) != 0) return;
      populated_ = end;
    }
  }
  void Prefetch(size_t i) const { __builtin_prefetch(&data_[i], 1); }

 private:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kHugePageBytes = size_t{2} << 20;
  // Random access to a gibibyte of records takes twice as long where each is on a small page (TLB misses). But the first
  // touch of a huge page zeroes 2 MiB, under the space's mutex: 0.1 ms, and 3 ms in a virtual machine whose
  // host has to find the memory. And a small space would pay for a whole one in each of its tables.
  static constexpr size_t kHugeFromBytes = size_t{256} << 20;
  static constexpr size_t kSmallBytes = size_t{64} << 10;
  static constexpr std::align_val_t kSmallAlignment{
      64};  // No element is in more cache lines than it must be.

  const size_t size_;
  const bool owned_ = true;
  size_t mapped_bytes_ = 0;
  void* mapped_ = nullptr;  // Null: the array is the heap's, or the caller's.
  size_t populated_ = 0;    // The first bytes that Populate has seen to.
  T* data_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_VIRTUAL_ARRAY_H_
