#include "server/tiers/crc32c.h"

namespace kvpool {

uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc) { return Crc32cByTables(data, bytes, crc); }

}  // namespace kvpool
