// The limits of the contract, for both ends of the wire.
#ifndef KVPOOL_PROTO_SUPPORT_LIMITS_H_
#define KVPOOL_PROTO_SUPPORT_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace kvpool {

inline constexpr uint32_t kMaxGroups = 16;
inline constexpr uint32_t kMaxKeyBytes = 64;
inline constexpr uint32_t kMaxKeysPerBlock = 8;
inline constexpr uint32_t kMaxBatchOperations = 4096;
inline constexpr uint32_t kMaxNames = 65536;  // Blocks and keys of one batch, blocks of one verb.
inline constexpr uint32_t kMaxRanks = 64;
inline constexpr uint64_t kMaxTtlMs = 86400000;  // A day.
inline constexpr size_t kMaxClientNameBytes = 128;
inline constexpr uint32_t kMaxListedBlocks = 1000;

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_LIMITS_H_
