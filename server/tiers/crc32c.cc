#include "server/tiers/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace kvpool {
namespace {

// Eight bytes at a time: M. E. Kounavis, F. L. Berry, "A systematic approach to building high performance software-based CRC
// generators", 2005. tables[k][b] is what byte b does, seen k bytes later.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();
static_assert(std::endian::native == std::endian::little);

}  // namespace

uint32_t Crc32cByTables(const void* data, size_t bytes, uint32_t crc) {
  const auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; bytes > 0; --bytes) crc = crc >> 8 ^ kTables[0][(crc ^ *at++) & 0xff];
  return ~crc;
}

}  // namespace kvpool
