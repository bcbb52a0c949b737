// CRC-32C (Castagnoli).
#ifndef KVPOOL_SERVER_TIERS_CRC32C_H_
#define KVPOOL_SERVER_TIERS_CRC32C_H_

#include <cstddef>
#include <cstdint>

namespace kvpool {

// `crc` is that of the bytes in front, 0 at the beginning.
uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc = 0);
// The same where the processor has no instruction for it.
uint32_t Crc32cByTables(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_CRC32C_H_
