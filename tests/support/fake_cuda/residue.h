// What freed allocations have left. A GPU hands their memory out again as it is, so that a new allocation here holds pages of
// them, or a pattern where nothing was freed yet: whoever forgets to wipe what it gives away shows that.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_RESIDUE_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_RESIDUE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpool::fake {

// Bounded: the last pages that were freed, and as many are dirty in a new allocation, whatever its size.
class Residue {
 public:
  Residue();
  // An allocation is freed: keeps its pages that have something in them.
  void Keep(int fd, size_t bytes);
  // Writes all that is kept over a new one: all of it, if that is small, and else its first page, its last one, and some between.
  void LeaveIn(int fd, size_t bytes) const;

 private:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kPages = 512;
  static constexpr size_t kMostPagesRead = 8192;

  using Page = std::array<uint64_t, kPageBytes / sizeof(uint64_t)>;
  std::vector<Page> pages_;
  size_t next_ = 0;  // The oldest, which the next one replaces.
};

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_RESIDUE_H_
