// The limits of the contract (proto/kvpool/v1), for both ends of the wire: what the daemon checks, a client
// need not send.
#ifndef KVPOOL_PROTO_SUPPORT_LIMITS_H_
#define KVPOOL_PROTO_SUPPORT_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace kvpool {

// ---- Sessions
inline constexpr uint32_t kMaxRanks = 64;
inline constexpr uint32_t kMaxMembers = kMaxRanks + 1;  // A scheduler, and a process for each rank.
inline constexpr size_t kMaxClientNameBytes = 128;
inline constexpr size_t kAttachTokenBytes = 32;
inline constexpr size_t kMemberTokenBytes = 16;

// ---- Layouts
inline constexpr uint32_t kMaxGroups = 16;
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxKvHeads = 1024;
inline constexpr uint32_t kMaxHeadDim = 4096;
inline constexpr uint32_t kMaxTokensPerBlock = 4096;

// ---- Verbs
inline constexpr uint32_t kMaxBatchOperations = 4096;
inline constexpr uint32_t kMaxNames = 65536;  // Blocks and keys of one batch, and blocks of one verb.
inline constexpr uint32_t kMaxKeyBytes = 64;
inline constexpr uint32_t kMaxKeysPerBlock = 8;
inline constexpr uint32_t kMaxMatchWaitMs = 60000;
inline constexpr uint32_t kMaxPrefillSamples = 64;  // A batch has so many at most.
inline constexpr uint64_t kMaxPrefillTokens = 1 << 24;
inline constexpr uint64_t kMaxPrefillBefore = uint64_t{1} << 32;
inline constexpr uint64_t kMaxPrefillMicroseconds = 3'600'000'000;
inline constexpr uint8_t kMaxPriority = 100;
inline constexpr uint64_t kMaxTtlMs = 86400000;  // A day.

// ---- Scoring
inline constexpr uint32_t kMaxSequenceTokens = 1 << 24;  // A float counts tokens exactly up to here.
inline constexpr uint32_t kMaxQueries = 1024;            // Queries of one window.
inline constexpr uint32_t kMaxQueryHeads = 65536;
inline constexpr uint64_t kMaxLayerTokens = uint64_t{1} << 40;  // Tokens that PlanBudgets gives to one layer.

// ---- Operators
inline constexpr uint32_t kMaxListedBlocks = 1000;
inline constexpr size_t kMaxPolicyNameBytes = 64;  // A pruning policy is asked for by name.
inline constexpr size_t kMaxTierSpecBytes = 4096;
inline constexpr size_t kMaxTierNameBytes = 64;
inline constexpr uint32_t kMaxTierTimeoutMs = 3'600'000;  // An hour.

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_LIMITS_H_
