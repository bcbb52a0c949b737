#include <nmmintrin.h>

#include <cstring>

#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

// Three cycles a word, where the tables take some thirty.
[[gnu::target("sse4.2")]] uint32_t ByInstruction(const void* data, size_t bytes, uint32_t crc) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t wide = static_cast<uint32_t>(~crc);
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes) narrow = _mm_crc32_u8(narrow, *at++);
  return ~narrow;
}

const bool kHasInstruction = __builtin_cpu_supports("sse4.2");

}  // namespace

uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc) {
  return kHasInstruction ? ByInstruction(data, bytes, crc) : Crc32cByTables(data, bytes, crc);
}

}  // namespace kvpool
