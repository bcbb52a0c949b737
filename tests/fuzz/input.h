// Bytes of a fuzzer, taken as choices. When they run out every choice is 0, so that any input is a whole story.
#ifndef KVPOOL_TESTS_FUZZ_INPUT_H_
#define KVPOOL_TESTS_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvpool::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}

  bool empty() const { return next_ == end_; }
  uint8_t Byte() { return empty() ? 0 : *next_++; }
  // 0 to n - 1.
  uint32_t Below(uint32_t n) { return Byte() % n; }
  bool OneIn(uint32_t n) { return Byte() % n == n - 1; }
  uint64_t Word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | Byte();
    return word;
  }
  // Mostly small numbers, sometimes those at the edges of types and limits.
  uint64_t Number() {
    static constexpr uint64_t kEdges[] = {0,       1,          63,         64,         65,        4095,
                                          4096,    65535,      65536,      65537,      1u << 31,  UINT32_MAX,
                                          1 << 20, 1ull << 32, 1ull << 62, 1ull << 63, INT64_MAX, UINT64_MAX};
    const uint8_t kind = Byte();
    if (kind < 200) return kind % 20;
    if (kind < 250) return kEdges[kind % std::size(kEdges)];
    return Word();
  }
  std::string Bytes(size_t most) {
    const size_t size = std::min<size_t>(most, end_ - next_);
    std::string bytes(reinterpret_cast<const char*>(next_), size);
    next_ += size;
    return bytes;
  }

 private:
  const uint8_t* next_;
  const uint8_t* const end_;
};

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_INPUT_H_
