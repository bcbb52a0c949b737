#include "server/space/slab_places.h"

#include <atomic>
#include <cstring>

#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

struct PlacesHeader {
  char magic[8];
  uint32_t slabs;
  uint32_t unused;
};
constexpr char kPlacesMagic[8] = {'k', 'v', 'p', 'p', 'l', 'a', 'c', 'e'};

}  // namespace

absl::StatusOr<std::unique_ptr<SlabPlaces>> SlabPlaces::Make(uint32_t slabs) {
  ASSIGN_OR_RETURN(
      SharedMemory memory,
      SharedMemory::Make("kvpool-places", sizeof(PlacesHeader) + uint64_t{slabs} * sizeof(uint32_t)));
  PlacesHeader header{.magic = {}, .slabs = slabs, .unused = 0};
  std::memcpy(header.magic, kPlacesMagic, sizeof(kPlacesMagic));
  std::memset(memory.data(), 0, memory.bytes());  // Its pages come now, and not when a slab is made.
  std::memcpy(memory.data(), &header, sizeof(header));
  return std::unique_ptr<SlabPlaces>(new SlabPlaces(std::move(memory)));
}

absl::StatusOr<std::unique_ptr<SlabPlaces>> SlabPlaces::Map(UniqueFd fd) {
  ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Map(std::move(fd)));
  PlacesHeader header;
  if (memory.bytes() < sizeof(header))
    return absl::DataLossError("places of slabs are shorter than their header");
  std::memcpy(&header, memory.data(), sizeof(header));
  if (std::memcmp(header.magic, kPlacesMagic, sizeof(kPlacesMagic)) != 0 ||
      memory.bytes() < sizeof(header) + uint64_t{header.slabs} * sizeof(uint32_t)) {
    return absl::DataLossError("places of slabs are damaged");
  }
  return std::unique_ptr<SlabPlaces>(new SlabPlaces(std::move(memory)));
}

uint32_t SlabPlaces::slabs() const { return reinterpret_cast<const PlacesHeader*>(memory_.data())->slabs; }
uint32_t* SlabPlaces::places() const {
  return reinterpret_cast<uint32_t*>(memory_.data() + sizeof(PlacesHeader));
}

void SlabPlaces::Set(uint32_t slab, uint32_t first_block) {
  KVPOOL_CHECK(slab < slabs(), "slab %u has no place among %u", slab, slabs());
  std::atomic_ref<uint32_t>(places()[slab]).store(first_block + 1, std::memory_order_release);
}

std::optional<uint32_t> SlabPlaces::FirstBlockOf(uint32_t slab) const {
  if (slab >= slabs()) return std::nullopt;
  const uint32_t place = std::atomic_ref<uint32_t>(places()[slab]).load(std::memory_order_acquire);
  if (place == 0) return std::nullopt;
  return place - 1;
}

}  // namespace kvpool
