// What a keeper is told of the things that it keeps for a space, for the next daemon to read.
#ifndef KVPOOL_SERVER_SPACE_KEPT_FACTS_H_
#define KVPOOL_SERVER_SPACE_KEPT_FACTS_H_

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace kvpool {

// Of one rank's slab; the descriptor is of its memory.
struct KeptSlab {
  uint64_t space;
  uint64_t bytes;
  uint32_t slab;
  uint32_t rank;
};

// Of a member of a session; the descriptor is the pidfd of its process.
struct KeptMember {
  uint64_t space;
  uint64_t session;
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
