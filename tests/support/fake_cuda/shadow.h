// What is known of memory, byte by byte and beside it: whether anything was ever written there, and which thread of which
// thread block last wrote and read it. Kernels that are executed instruction by instruction (ptx/) are checked against it.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_SHADOW_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_SHADOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpool::fake {

// Points in the course of all launches of a process: each launch, thread block and barrier begins a new one.
struct Moment {
  uint32_t launch = 0;  // the first moment of this launch
  uint32_t block = 0;   // and of this thread block
  uint32_t now = 0;     // begins at the block's last barrier
};

enum class Touch : uint8_t { kRead, kWrite, kAtomic };

// What a launch can't do without: each word of four bytes counts once, however often it is read or written.
struct Footprint {
  uint64_t read_words = 0;  // This launch has not written these before.
  uint64_t written_words = 0;
};

class Shadow {
 public:
  explicit Shadow(size_t bytes);
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

  // What the driver's copies do.
  void Wrote(size_t offset, size_t bytes);
  bool WasWritten(size_t offset, size_t bytes) const;
  // As if nothing had been written. Takes the time of what was touched since the last time, not that of all.
  void Forget();

  // What a thread of a kernel does. Returns what is wrong with that, or nullptr. REQUIRES: [offset, offset + bytes) is aligned
  // to its size, which is a power of two. Adds to the footprint what the launch has not touched before.
  const char* Check(size_t offset, uint32_t bytes, Touch touch, uint32_t thread, const Moment& moment,
                    Footprint* footprint);

 private:
  // Of four bytes; a mask has a bit for each.
  struct Cell {
    uint32_t written_at, read_at;
    uint16_t writer, reader;
    uint8_t write_mask : 4, read_mask : 4;  // what was done at that moment
    uint8_t ever_written : 4;
    uint8_t atomic : 1;         // the last write was
    uint8_t many_readers : 1;   // more than one read it at that moment
    uint8_t another_block : 1;  // read it too, in the launch of read_at
  };
  const char* CheckCell(Cell* cell, uint8_t mask, Touch touch, uint16_t thread, const Moment& moment,
                        Footprint* footprint);

  // [begin, end) are touched.
  void Touched(size_t begin, size_t end) {
    touched_begin_ = std::min(touched_begin_, begin);
    touched_end_ = std::max(touched_end_, end);
  }

  const size_t cells_bytes_;
  Cell* const cells_;
  // All other cells are as they were made: a kernel's shared memory is a small part of what all kernels of a program have.
  size_t touched_begin_ = SIZE_MAX;
  size_t touched_end_ = 0;
};

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_SHADOW_H_
