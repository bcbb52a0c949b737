// What a keeper is told of the things that it keeps for a space, for the next daemon to read.
#ifndef KVPOOL_SERVER_SPACE_KEPT_FACTS_H_
#define KVPOOL_SERVER_SPACE_KEPT_FACTS_H_

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "proto/support/limits.h"

namespace kvpool {

inline constexpr size_t kSlabIdBytes = 16;

// Of one rank's slab; the descriptor is of its memory.
struct KeptSlab {
  uint64_t space;
  uint64_t bytes;
  uint32_t slab;
  uint32_t rank;
  char id[kSlabIdBytes];
};

// Of a space's SlabPlaces; the descriptor is of their memory.
struct KeptPlaces {
  uint64_t space;
};

// Of a member of a session, and what the session is; the descriptor is the pidfd of its process.
struct KeptMember {
  uint64_t space;
  uint64_t session;
  uint32_t rank;
  uint32_t scheduler;
  uint32_t ranks;
  uint32_t uid;
  uint32_t guaranteed_blocks;
  uint32_t max_blocks;
  uint32_t max_pinned_blocks;
  uint32_t warmup;
  uint32_t name_bytes;
  uint32_t unused;
  char token[kMemberTokenBytes];
  char name[kMaxClientNameBytes];
};

// Of a member's log; the descriptor is of its memory.
struct KeptLog {
  uint64_t space;
  char token[kMemberTokenBytes];
};

template <typename Facts>
std::string_view FactBytes(const Facts& facts) {
  static_assert(std::has_unique_object_representations_v<Facts>);
  return {reinterpret_cast<const char*>(&facts), sizeof(facts)};
}

// False: they are not of this kind.
template <typename Facts>
bool ReadFacts(std::string_view bytes, Facts* facts) {
  if (bytes.size() != sizeof(*facts)) return false;
  std::memcpy(facts, bytes.data(), sizeof(*facts));
  return true;
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_KEPT_FACTS_H_
